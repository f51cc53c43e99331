package nvmeof

import (
	"jbofd/internal/nvme"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

// Kind says which executor carries out an I/O command. Executors are registered with the target service by their kind.
type Kind uint8

// Kinds of executors.
const (
	// KindBlock is the drive's: commands for its blocks.
	KindBlock Kind = iota
	// KindKV is the partition's: commands for its keys and values.
	KindKV
	// KindReplica is that of the replicas of a cluster: commands for the keys and values of its partitions, and the
	// messages of other nodes. It is the Executor of a namespace.
	KindReplica
	// Kinds bounds the kinds, with room for those that a namespace names.
	Kinds = 8
)

// Plan is what an I/O command asks for: the outcome of validating it.
type Plan struct {
	// Kind is the executor's. Op, FUA, Unmap, Offset, Len and Ranges are for KindBlock.
	Kind Kind
	Op   pipeline.Op
	// Namespace is what the command addressed; nil if it needs none.
	Namespace *Namespace
	// FUA, of what writes: complete only when durable; of what reads: make durable what is read. Unmap: zeroes may be
	// deallocated space.
	FUA, Unmap bool
	// Offset and Len are the extent on the SSD in bytes; 0 for a flush and for
	// DeallocateRanges, whose ranges come with the data.
	Offset units.DriveOffset
	Len    units.Bytes
	// ToController and ToHost are the bytes of data that cross the wire. A
	// Dataset Management command may bring more than its ranges need, up to a page.
	ToController, ToHost uint32
	// Ranges is how many Dataset Management ranges the data holds.
	Ranges int
	// NoOp: the command is valid and asks for nothing (a hint we do not use).
	NoOp bool
	// AnswerBytes is, for keys and values, how much of the host's buffer of ToHost bytes can be filled at most.
	AnswerBytes uint32
	// MissingOK: a Delete of a key that does not exist succeeds.
	MissingOK bool
	// Wide: the result takes DW0 and DW1 of the completion, so that a credit is in the place of SQID.
	Wide bool
}

// Limits bound a command.
type Limits struct {
	// MDTSBytes is the largest data transfer, a power of two of at least MinMDTSBytes.
	MDTSBytes uint32
	// FusedBytes is the largest fused Compare and Write.
	FusedBytes uint32
}

// MaxVerifyBytes is the largest range of a Verify, announced as VSL. A Verify moves no data, so MDTS does not bound it,
// but it costs its host one small capsule and the drive the reading of the whole range. With blocks of 512 bytes it is
// what the command can name at most, so that only hosts with larger blocks need to know VSL.
const MaxVerifyBytes = 32 << 20

// MinMDTSBytes is the smallest Limits.MDTSBytes: MDTS is its power of two in units of 4 KiB, and 0 there means that
// there is no limit.
const MinMDTSBytes = 8 << 10

// MaxDSMBytes is the size of a full list of Dataset Management ranges.
const MaxDSMBytes = 256 * nvme.DSMRangeSize

// PlanIO validates an I/O command against the namespaces that its host sees and fills p. What an opcode means is said
// by the namespace's command set. The status is Success or why the command fails, with DNR where a retry cannot help.
//
// Source: NVM Command Set 1.0, section 3.2; KV Command Set 1.0, section 3; NVMe Base 2.0, section 7.
//
// hot: 0 allocs
func PlanIO(sqe *nvme.SQE, t *NamespaceTable, lim Limits, p *Plan) nvme.Status {
	*p = Plan{}
	switch sqe.Opcode() {
	case nvme.CmdFlush, nvme.CmdWrite, nvme.CmdRead, nvme.CmdCompare, nvme.CmdWriteZeroes, nvme.CmdDSM, nvme.CmdVerify:
	case nvme.CmdKVList, nvme.CmdKVDelete, nvme.CmdKVExist: // Store is Write, Retrieve is Read
	default:
		if !(t.extendedKV && nvme.KVExtended(sqe.Opcode()) || t.replication && nvme.KVReplication(sqe.Opcode())) {
			return nvme.InvalidOpcode | nvme.DNR
		}
	}
	if sqe.PSDT() == nvme.PSDTPRP || sqe.PSDT() == 3 {
		return nvme.InvalidField | nvme.DNR // fabrics: SGLs only
	}
	if sqe.Fuse() > nvme.FuseSecond {
		return nvme.InvalidField | nvme.DNR
	}
	ns := t.Get(sqe.NSID())
	if ns == nil {
		return t.missing()
	}
	p.Namespace, p.Kind = ns, ns.Executor
	if s := ns.ANAState.Status(); !s.OK() {
		return s
	}
	if ns.CSI == nvme.CSIKV {
		return p.planKV(sqe, t, lim)
	}
	switch sqe.Opcode() {
	case nvme.CmdFlush, nvme.CmdWrite, nvme.CmdRead, nvme.CmdCompare, nvme.CmdWriteZeroes, nvme.CmdDSM, nvme.CmdVerify:
	default: // of keys and values
		return nvme.InvalidOpcode | nvme.DNR
	}
	switch sqe.Opcode() {
	case nvme.CmdFlush:
		p.Op = pipeline.Flush
		return nvme.Success
	case nvme.CmdDSM:
		p.Op = pipeline.DeallocateRanges
		p.Ranges = int(sqe.CDW(10)&0xff) + 1
		p.ToController = uint32(p.Ranges) * nvme.DSMRangeSize
		p.NoOp = sqe.CDW(11)&nvme.DSMDeallocate == 0
		return nvme.Success
	}

	at, ok := ns.place(sqe.SLBA(), sqe.NLB())
	if !ok {
		return nvme.LBAOutOfRange | nvme.DNR
	}
	p.Offset, p.Len = at.Offset, at.Len
	fua := sqe.CDW(12)&nvme.CDW12FUA != 0
	switch sqe.Opcode() {
	case nvme.CmdRead, nvme.CmdWrite, nvme.CmdCompare:
		if p.Len > units.Bytes(lim.MDTSBytes) {
			return nvme.InvalidField | nvme.DNR
		}
		if sqe.Fuse() != nvme.FuseNone && p.Len > units.Bytes(lim.FusedBytes) {
			return nvme.InvalidField | nvme.DNR
		}
	}
	switch sqe.Opcode() {
	case nvme.CmdRead:
		p.Op, p.ToHost, p.FUA = pipeline.Read, uint32(p.Len), fua
	case nvme.CmdWrite:
		p.Op, p.ToController, p.FUA = pipeline.Write, uint32(p.Len), fua
	case nvme.CmdCompare:
		p.Op, p.ToController, p.FUA = pipeline.Compare, uint32(p.Len), fua
	case nvme.CmdWriteZeroes:
		p.Op, p.FUA, p.Unmap = pipeline.WriteZeroes, fua, sqe.CDW(12)&nvme.CDW12Deallocate != 0
	case nvme.CmdVerify:
		if p.Len > MaxVerifyBytes {
			return nvme.InvalidField | nvme.DNR
		}
		p.Op, p.FUA = pipeline.Verify, fua
	}
	return nvme.Success
}

// AppendRanges decodes the ranges of a Dataset Management command and appends
// their extents on the SSD to dst. Empty ranges are left out.
//
// hot: 0 allocs, given room in dst
func (p *Plan) AppendRanges(data []byte, dst []pipeline.Range) ([]pipeline.Range, nvme.Status) {
	for i := range p.Ranges {
		r := (*nvme.DSMRange)(data[i*nvme.DSMRangeSize:])
		if r.NLB() == 0 {
			continue
		}
		at, ok := p.Namespace.place(r.SLBA(), r.NLB())
		if !ok {
			return dst, nvme.LBAOutOfRange | nvme.DNR
		}
		dst = append(dst, at)
	}
	return dst, nvme.Success
}

// CheckFused judges the second half of a fused pair against the first: a
// Compare followed by a Write of the same blocks (NVM Command Set 1.0, section
// 2.3). Both fail with the status if it is not Success.
func CheckFused(first, second *nvme.SQE) nvme.Status {
	if first.Opcode() != nvme.CmdCompare || second.Opcode() != nvme.CmdWrite {
		return nvme.InvalidField | nvme.DNR
	}
	if first.NSID() != second.NSID() || first.SLBA() != second.SLBA() || first.NLB() != second.NLB() {
		return nvme.InvalidField | nvme.DNR
	}
	return nvme.Success
}
