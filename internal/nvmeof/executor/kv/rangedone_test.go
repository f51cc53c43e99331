package kv

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
)

// donePort counts the commands that have ended.
type donePort struct{ done int }

func (p *donePort) Done(*executor.Command) bool { p.done++; return false }
func (p *donePort) Kick()                       {}
func (p *donePort) Deliver()                    {}

func (p *donePort) NeedData(*executor.Command) bool { return false }

// TestOutcomesOfRangeCommands: what a host is told of each outcome of a Request for a range.
func TestOutcomesOfRangeCommands(t *testing.T) {
	const length, dnr = 1 << 20, nvme.DNR
	for _, x := range []struct {
		what   string
		op     kvstore.Op
		status kvstore.Status
		n      int // ValueLen
		want   nvme.Status
		result uint64
		answer int
		access executor.Access
	}{
		{"a Scan", kvstore.Scan, kvstore.OK, 500, nvme.Success, 500, 500, executor.AccessRead},
		{"a long one", kvstore.CopyOut, kvstore.OK, 1<<20 - 3, nvme.Success, 1<<20 - 3, 1<<20 - 3, executor.AccessRead},
		{"one that was ended early", kvstore.Digest, kvstore.OK, 100, nvme.Success, 100, 100, executor.AccessRead},
		{"a loss", kvstore.CopyOut, kvstore.Corrupt, 96, nvme.Success, 96, 96, executor.AccessRead},
		{"a read that fails", kvstore.Count, kvstore.DeviceError, 128, nvme.Success, 128, 128, executor.AccessRead},
		{"a partition that is given up", kvstore.Scan, kvstore.DeviceError, 0, nvme.UnrecoveredReadError | dnr, 0, 0,
			executor.AccessOther},
		{"no room for the first entry", kvstore.CopyOut, kvstore.InvalidValue, 5000, nvme.InvalidValueSize | dnr, 5000,
			0, executor.AccessOther},
		{"a wrong range", kvstore.Digest, kvstore.InvalidValue, 0, nvme.InvalidField | dnr, 0, 0, executor.AccessOther},
		{"no room for a long entry", kvstore.CopyOut, kvstore.InvalidValue, 1 << 20, nvme.InvalidValueSize | dnr,
			1 << 20, 0, executor.AccessOther},
		{"a CopyIn", kvstore.CopyIn, kvstore.OK, 7, nvme.Success, 7, 0, executor.AccessWrite},
		{"one that changes much", kvstore.CopyIn, kvstore.OK, 70_000, nvme.Success, 70_000, 0, executor.AccessWrite},
		{"one that is no KVRange", kvstore.CopyIn, kvstore.InvalidValue, 0, nvme.InvalidField | dnr, 0, 0,
			executor.AccessOther},
		{"one for which there is no room", kvstore.CopyIn, kvstore.CapacityExceeded, 3, nvme.CapacityExceeded | dnr, 3,
			0, executor.AccessOther},
		{"one that the drive fails", kvstore.CopyIn, kvstore.DeviceError, 3, nvme.WriteFault | dnr, 3, 0,
			executor.AccessOther},
		{"a Drop", kvstore.Drop, kvstore.OK, 0, nvme.Success, 4711, 0, executor.AccessOther},
		{"one that the drive fails", kvstore.Drop, kvstore.DeviceError, 0, nvme.WriteFault | dnr, 0, 0,
			executor.AccessOther},
	} {
		p := &donePort{}
		k := &command{c: &executor.Command{Plan: &nvmeof.Plan{}, SQE: new(nvme.SQE), Port: p}}
		k.Op, k.Status, k.ValueLen, k.ObjectVersion, k.Value = x.op, x.status, x.n, 4711, make([]byte, length)
		k.rangeDone()
		if c := k.c; c.Status != x.want || c.Result != x.result || c.AnswerBytes != x.answer || c.Access != x.access ||
			c.Bytes != int64(x.answer)+int64(bool01(x.access == executor.AccessWrite))*length || p.done != 1 {
			t.Errorf("%s: %v, result %d, %d bytes, access %d of %d bytes, want %v, %d, %d, %d", x.what, c.Status,
				c.Result, c.AnswerBytes, c.Access, c.Bytes, x.want, x.result, x.answer, x.access)
		}
	}
}

func bool01(b bool) int {
	if b {
		return 1
	}
	return 0
}

// TestRangeCommandsReadFewSegments: each of them is short, and begins where the host says.
func TestRangeCommandsReadFewSegments(t *testing.T) {
	for _, opcode := range []uint8{nvme.CmdKVScan, nvme.CmdKVCopyOut, nvme.CmdKVCount, nvme.CmdKVDigest} {
		for _, key := range []string{"", "key"} {
			if key != "" && opcode != nvme.CmdKVScan && opcode != nvme.CmdKVCopyOut {
				continue
			}
			k := &command{c: &executor.Command{SQE: new(nvme.SQE)}}
			k.c.SQE.SetOpcode(opcode)
			q := k.c.SQE.KVRange()
			q.SetFrom(nvme.KVCursorAt(5000, []byte(key)))
			if q.SetLast(9000); key == "" {
				q.SetTime(77)
			}
			k.Op, k.KeyLen = rangeOperation(opcode), uint8(len(key))
			k.takeRange()
			r := &k.Range
			if r.Looks != rangeLooks || r.FromKey != (key != "") || r.Last != 9000 ||
				key == "" && (r.First != 5000 || r.From != 5000 || r.Unix != 77) || k.Background {
				t.Errorf("opcode %#x behind %q: %+v", opcode, key, *r)
			}
		}
	}
}
