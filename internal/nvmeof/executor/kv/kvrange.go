package kv

import (
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/executor"
)

// rangeLooks is how many segments a command reads at most, so that a command is short whatever its range is: a host
// continues, and may be connected again soon after its association has ended.
const rangeLooks = 1024

// rangeOperation is what a command for a range asks of a partition.
func rangeOperation(opcode uint8) kvstore.Op {
	switch opcode {
	case nvme.CmdKVScan:
		return kvstore.Scan
	case nvme.CmdKVCopyOut:
		return kvstore.CopyOut
	case nvme.CmdKVCount:
		return kvstore.Count
	case nvme.CmdKVDigest:
		return kvstore.Digest
	case nvme.CmdKVCopyIn:
		return kvstore.CopyIn
	}
	return kvstore.Drop
}

// takeRange reads the range of a command, and the clock. The tenant pays, whatever the command is: a host that could
// choose the store's background work instead would take from all tenants.
//
// hot: 0 allocs
func (k *command) takeRange() {
	q := k.c.SQE.KVRange()
	k.extended = true // Version is reset before the next command
	k.Range = kvstore.Range{First: q.First(), From: q.First(), Last: q.Last(), Looks: rangeLooks}
	switch k.Op {
	case kvstore.CopyIn:
		k.Range, k.Version = kvstore.Range{}, q.Clock()
		return
	case kvstore.Drop:
		k.Version = q.Clock()
		return
	case kvstore.Digest:
		k.Range.Width = q.Shift() + 1
		k.Range.First &^= 1<<q.Shift() - 1
	}
	if k.KeyLen > 0 {
		k.Range.FromKey = true
		return
	}
	k.Range.Unix = q.Time()
}

// rangeDone is KVDone of a command for a range.
//
// hot: 0 allocs
func (k *command) rangeDone() (kick bool) {
	c := k.c
	c.Status, c.Access, c.Bytes, c.AnswerBytes, c.Result, c.CreditUnits = k.status(), executor.AccessOther, 0, 0, 0,
		k.CreditUnits
	switch k.Op {
	case kvstore.Drop:
		switch c.Result = k.versionResult(); k.Status {
		case kvstore.DeviceError:
			c.Status = nvme.WriteFault | nvme.DNR
		case kvstore.InvalidValue:
			c.Status = nvme.InvalidField | nvme.DNR // the clock is too great
		}
	case kvstore.CopyIn:
		if k.Status == kvstore.InvalidValue {
			c.Status = nvme.InvalidField | nvme.DNR // it is not a KVRange that may be stored
			break
		}
		c.Result = uint64(k.ValueLen) // entries may have been stored before one that has failed
		switch {
		case c.Status.OK():
			c.Access, c.Bytes = executor.AccessWrite, int64(len(k.Value))
		case k.Status == kvstore.DeviceError:
			c.Status = nvme.WriteFault | nvme.DNR
		}
	default:
		k.answerRange()
	}
	k.Value = nil
	return c.Port.Done(c)
}

// answerRange makes the answer to a command that reads a range.
func (k *command) answerRange() {
	c := k.c
	switch k.Status {
	case kvstore.Corrupt, kvstore.DeviceError:
		if k.ValueLen < nvme.KVRangeHeaderBytes { // the partition is given up
			return
		}
		// The data is as good as others, and says that something is missing.
		c.Status = nvme.Success
		fallthrough
	case kvstore.OK:
		c.Result = uint64(k.ValueLen)
		c.AnswerBytes = min(k.ValueLen, len(k.Value))
		c.Access, c.Bytes = executor.AccessRead, int64(c.AnswerBytes)
	case kvstore.InvalidValue:
		// With the length of the data in DW0 the host knows how much the first entry needs; 0: the range is wrong.
		if c.Result = uint64(k.ValueLen); k.ValueLen == 0 {
			c.Status = nvme.InvalidField | nvme.DNR
		}
	}
}
