package nvmeof

import (
	"jbofd/internal/nvme"
	"jbofd/internal/pipeline"
	"jbofd/internal/uuid"
)

// maxValue is the longest value that a command may move.
func (n *Namespace) maxValue(lim Limits) uint32 {
	return uint32(min(n.MaxValueBytes, int(lim.MDTSBytes)))
}

// minListBytes is the least buffer of a List: it holds the number of keys.
const minListBytes = 4

// planKV is the part of PlanIO for namespaces of keys and values. PlanIO has set p.Namespace, and p.Kind to the
// namespace's Executor; planKV validates the rest of the command and fills p. If the namespace leaves the executor to
// the command set (KindBlock), a Flush stays with the drive, and all other commands get KindKV.
func (p *Plan) planKV(sqe *nvme.SQE, t *NamespaceTable, lim Limits) nvme.Status {
	if sqe.Fuse() != nvme.FuseNone {
		return nvme.InvalidField | nvme.DNR
	}
	k := sqe.KV()
	known := uint8(0) // options
	switch sqe.Opcode() {
	case nvme.CmdFlush:
		// A Store or Delete is durable when it is answered, unless the operator has chosen otherwise. The drive is
		// flushed nevertheless, for hosts that do not rely on that.
		p.Op = pipeline.Flush
		return nvme.Success
	case nvme.CmdKVStore:
		known = nvme.KVStoreOptions
	case nvme.CmdKVRetrieve:
		known = nvme.KVRetrieveRaw
	case nvme.CmdKVList, nvme.CmdKVDelete, nvme.CmdKVExist:
	case nvme.CmdKVXStore, nvme.CmdKVXRetrieve, nvme.CmdKVXDelete:
		if sqe.CDW(11)&^0xff != 0 || sqe.CDW(12) != 0 || sqe.CDW(13) != 0 { // reserved
			return nvme.InvalidField | nvme.DNR
		}
	case nvme.CmdKVScan, nvme.CmdKVCopyIn, nvme.CmdKVCopyOut, nvme.CmdKVCount, nvme.CmdKVDigest, nvme.CmdKVDrop:
		return p.planRange(sqe, lim)
	case nvme.CmdKVForward, nvme.CmdKVDurable, nvme.CmdKVSync, nvme.CmdKVShip, nvme.CmdKVCompare, nvme.CmdKVFetch:
		return p.planReplica(sqe, lim)
	default:
		return nvme.InvalidOpcode | nvme.DNR
	}
	const both = nvme.KVStoreMustExist | nvme.KVStoreMustNotExist
	switch {
	case !k.ValidKey():
		return nvme.InvalidKeySize | nvme.DNR
	case k.Options()&^known != 0 || sqe.Opcode() == nvme.CmdKVStore && k.Options()&both == both:
		return nvme.InvalidField | nvme.DNR
	}
	if p.Namespace.Executor == KindBlock {
		p.Kind = KindKV
	}
	n, longest := k.LenBytes(), p.Namespace.maxValue(lim)
	switch sqe.Opcode() {
	case nvme.CmdKVStore:
		if n > longest {
			return nvme.InvalidValueSize | nvme.DNR
		}
		p.ToController = n
	case nvme.CmdKVRetrieve:
		p.ToHost, p.AnswerBytes = n, min(n, longest)
	case nvme.CmdKVList:
		if n < minListBytes {
			return nvme.InvalidField | nvme.DNR
		}
		p.ToHost, p.AnswerBytes = n, min(n, lim.MDTSBytes)
	case nvme.CmdKVDelete:
		p.MissingOK = t.errorOnDelete.get(sqe.NSID())&nvme.KVErrorOnDelete == 0
	default:
		return p.planExtendedKV(sqe, lim)
	}
	return nvme.Success
}

// planExtendedKV is the part of planKV for commands whose data begins with a header. The executor checks the header of
// a Store or Delete when it has the data.
func (p *Plan) planExtendedKV(sqe *nvme.SQE, lim Limits) nvme.Status {
	n, longest := sqe.KV().LenBytes(), uint32(p.Namespace.MaxValueBytes)
	p.Wide = nvme.KVVersioned(sqe.Opcode())
	switch sqe.Opcode() {
	case nvme.CmdKVXStore:
		switch {
		case n < nvme.KVWriteHeaderSize:
			return nvme.InvalidField | nvme.DNR
		case n > min(nvme.KVWriteHeaderSize+longest, lim.MDTSBytes):
			return nvme.InvalidValueSize | nvme.DNR
		}
		p.ToController = n
	case nvme.CmdKVXDelete:
		if n != nvme.KVWriteHeaderSize {
			return nvme.InvalidField | nvme.DNR
		}
		p.ToController, p.MissingOK = n, true
	case nvme.CmdKVXRetrieve:
		if n < nvme.KVReadHeaderSize {
			return nvme.InvalidField | nvme.DNR
		}
		p.ToHost, p.AnswerBytes = n, min(n, nvme.KVReadHeaderSize+longest, lim.MDTSBytes)
	}
	return nvme.Success
}

// planRange is the part of planKV for commands for ranges. The executor checks the data of a CopyIn when it has it.
func (p *Plan) planRange(sqe *nvme.SQE, lim Limits) nvme.Status {
	k := sqe.KVRange()
	if !k.Valid() {
		return nvme.InvalidField | nvme.DNR
	}
	if p.Namespace.Executor == KindBlock {
		p.Kind = KindKV
	}
	n, longest := k.LenBytes(), min(uint32(p.Namespace.MaxValueBytes+nvme.KVEntryOverhead), lim.MDTSBytes)
	least := uint32(nvme.KVRangeHeaderBytes)
	switch sqe.Opcode() {
	case nvme.CmdKVDrop:
		p.Wide = true
		return nvme.Success
	case nvme.CmdKVCopyIn:
		if n < least || n > longest {
			return nvme.InvalidField | nvme.DNR
		}
		p.ToController = n
		return nvme.Success
	case nvme.CmdKVScan, nvme.CmdKVCopyOut:
		least += uint32(nvme.KVEntryBytes(nvme.KVScan, nvme.MaxKVKey, 0, 0))
	case nvme.CmdKVCount:
		least += nvme.KVTotalsBytes
		longest = least
	case nvme.CmdKVDigest:
		least += uint32(k.SubRanges()+1) * nvme.KVSumBytes
		longest = least
	}
	if n < least || least > lim.MDTSBytes {
		return nvme.InvalidField | nvme.DNR
	}
	p.ToHost, p.AnswerBytes = n, min(n, longest)
	return nvme.Success
}

// identifyNamespaceKV fills the Identify Namespace data structure of the KV command set, but for NUSE.
func (c *Controller) identifyNamespaceKV(d *nvme.IdentifyNamespaceKV, ns *Namespace) {
	d.SetNSZE(uint64(ns.SizeBytes))
	d.SetNMIC(nvme.NMICShared)
	var f nvme.KVFormat
	f.SetKVKML(nvme.MaxKVKey)
	f.SetKVVML(ns.maxValue(c.t.cfg.Limits))
	d.SetKVF(0, f)
	d.SetANAGRPID(ns.ANAGroup)
	d.SetNGUID(uuid.UUID(ns.NGUID))
	d.SetEUI64(ns.EUI64)
	d.SetSSD(uint16(ns.SSD))
}

// allCommandSets reports that the host has enabled all command sets; otherwise it works with
// blocks only, and namespaces of keys and values are not there for it.
func (c *Controller) allCommandSets() bool { return c.css == nvme.CCCSSIOCS }

// mayUseCommandSet reports whether the host may ask for what is of a command set.
func (c *Controller) mayUseCommandSet(csi nvme.CSI) bool {
	return csi == nvme.CSINVM || csi == nvme.CSIKV && c.allCommandSets()
}

// view makes the table of the namespaces that the host sees now.
func (c *Controller) view() *NamespaceTable {
	t := newNamespaceTable(c.sub.Namespaces, func(n *Namespace) bool {
		return (n.CSI == nvme.CSINVM || c.allCommandSets()) &&
			(n.VisibleTo(c.HostNQN) || c.node && n.Executor == KindReplica)
	})
	t.errorOnDelete = c.features.errorOnDelete.clone()
	t.extendedKV = c.features.extensions&nvme.ExtKV != 0
	t.replication = c.features.extensions&nvme.ExtReplication != 0
	return t
}

// keyValue reports whether a feature of keys and values may be asked of nsid.
func (c *Controller) keyValue(nsid uint32) bool {
	ns := c.table.Get(nsid)
	return c.allCommandSets() && (nsid == nvme.NSIDBroadcast || ns != nil && ns.CSI == nvme.CSIKV)
}

// setKeyValue executes Set Features of the Key Value feature (KV Command Set 1.0, section 4.1.3).
func (c *Controller) setKeyValue(nsid, v uint32) Reply {
	if !c.keyValue(nsid) || v&^nvme.KVErrorOnDelete != 0 {
		return fail(nvme.InvalidField)
	}
	c.features.errorOnDelete.set(nsid, v)
	c.t.version++
	c.table = c.view()
	c.publishTable()
	return Reply{}
}
