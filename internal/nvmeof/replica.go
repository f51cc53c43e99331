package nvmeof

import "jbofd/internal/nvme"

// MaxReplicatedValue is the longest value of a replicated namespace whose store takes values of so many bytes: one of
// them fits a message between nodes, with all that goes with it when it is copied. The MDTS is that of all nodes, 0: no
// limit.
func MaxReplicatedValue(storeBytes int, mdts uint32) int {
	message := nvme.KVMaxMessage
	if mdts != 0 {
		message = min(message, int(mdts))
	}
	return min(storeBytes, message-nvme.KVEntryOverhead)
}

// planReplica is the part of planKV for messages of other nodes. The executor checks the header of a Forward when it
// has the data. Only namespaces that are replicated know these commands.
func (p *Plan) planReplica(sqe *nvme.SQE, lim Limits) nvme.Status {
	if p.Kind != KindReplica {
		return nvme.InvalidOpcode | nvme.DNR
	}
	k := sqe.KVReplica()
	if !k.Valid() {
		return nvme.InvalidField | nvme.DNR
	}
	n, value := k.LenBytes(), uint32(p.Namespace.MaxValueBytes)
	p.Wide = nvme.KVVersioned(sqe.Opcode())
	switch sqe.Opcode() {
	case nvme.CmdKVForward:
		switch {
		case n < nvme.KVForwardHeaderSize, n > nvme.KVForwardHeaderSize && k.Flags()&nvme.KVForwardDelete != 0:
			return nvme.InvalidField | nvme.DNR
		case n > min(nvme.KVForwardHeaderSize+value, lim.MDTSBytes):
			return nvme.InvalidValueSize | nvme.DNR
		}
		p.ToController = n
		return nvme.Success
	case nvme.CmdKVDurable, nvme.CmdKVSync:
		return nvme.Success
	}
	least, longest := uint32(nvme.KVReadHeaderSize), nvme.KVReadHeaderSize+value
	switch sqe.Opcode() {
	case nvme.CmdKVCompare:
		sums, _ := k.SubRanges()
		least = uint32(nvme.KVRangeHeaderBytes + sums*nvme.KVSumBytes)
		longest = least
	case nvme.CmdKVFetch:
		least = uint32(nvme.KVRangeHeaderBytes + nvme.KVEntryBytes(nvme.KVCopy, nvme.MaxKVKey, 0, 0))
		longest = value + nvme.KVEntryOverhead
	}
	if n < least {
		return nvme.InvalidField | nvme.DNR
	}
	p.ToHost, p.AnswerBytes = n, min(n, longest, lim.MDTSBytes)
	return nvme.Success
}
