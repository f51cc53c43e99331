package nvmeof_test

import (
	"math"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
)

// rangeCommand is a command for all positions.
func rangeCommand(op uint8, n uint32, change ...func(*nvme.SQE)) *nvme.SQE {
	return kvCommand(op, 3, "", n, append([]func(*nvme.SQE){func(s *nvme.SQE) {
		if s.KVRange().SetLast(math.MaxUint64); op == nvme.CmdKVCopyIn {
			s.KVRange().SetClock(5)
		}
		if op == nvme.CmdKVDigest {
			s.KVRange().SetShift(60)
		}
	}}, change...)...)
}

func TestPlanOfRanges(t *testing.T) {
	table := kvTable().WithExtendedKV()
	kv := func(p nvmeof.Plan) nvmeof.Plan { p.Kind = nvmeof.KindKV; return p }
	read := func(n, answer uint32) nvmeof.Plan { return kv(nvmeof.Plan{ToHost: n, AnswerBytes: answer}) }
	const most = kvMax + nvme.KVEntryOverhead
	for _, x := range []struct {
		name string
		sqe  *nvme.SQE
		want nvmeof.Plan
	}{
		{"scan", rangeCommand(nvme.CmdKVScan, 136), read(136, 136)},
		{"scan behind a key", rangeCommand(nvme.CmdKVScan, 4096, func(s *nvme.SQE) { s.KV().SetKey([]byte("k")) }),
			read(4096, 4096)},
		{"copy out into more than is used", rangeCommand(nvme.CmdKVCopyOut, 1<<32-1), read(1<<32-1, most)},
		{"count", rangeCommand(nvme.CmdKVCount, 4096), read(4096, 128)},
		{"digest", rangeCommand(nvme.CmdKVDigest, 96+16*16), read(96+16*16, 96+16*16)},
		{"copy in", rangeCommand(nvme.CmdKVCopyIn, most), kv(nvmeof.Plan{ToController: most})},
		{"copy in of nothing", rangeCommand(nvme.CmdKVCopyIn, 96), kv(nvmeof.Plan{ToController: 96})},
		{"drop", rangeCommand(nvme.CmdKVDrop, 0), kv(nvmeof.Plan{Wide: true})},
	} {
		wantExtendedPlan(t, x.name, x.sqe, x.want)
	}
	small := testLimits
	small.MDTSBytes = 64 << 10
	var p nvmeof.Plan
	if s := nvmeof.PlanIO(rangeCommand(nvme.CmdKVScan, 1<<20), table, small, &p); !s.OK() || p.AnswerBytes != 64<<10 {
		t.Errorf("%v, an answer of %d bytes", s, p.AnswerBytes)
	}
	small.MDTSBytes = 96 + 16*16
	if s := nvmeof.PlanIO(rangeCommand(nvme.CmdKVDigest, 96+16*16), table, small, &p); !s.OK() {
		t.Errorf("a digest of MDTS: %v", s)
	}
	small.MDTSBytes = 64 << 10
	for what, sqe := range map[string]*nvme.SQE{
		"copy in beyond MDTS": rangeCommand(nvme.CmdKVCopyIn, 64<<10+1),
		"digest beyond MDTS":  rangeCommand(nvme.CmdKVDigest, 1<<20, func(s *nvme.SQE) { s.KVRange().SetShift(52) }),
	} {
		wantStatus(t, what, nvmeof.PlanIO(sqe, table, small, &p), nvme.InvalidField|nvme.DNR)
	}
	if n := testing.AllocsPerRun(100, func() {
		nvmeof.PlanIO(rangeScan, table, testLimits, &p)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

var rangeScan = rangeCommand(nvme.CmdKVScan, 4096)

func TestPlanRefusesBadRanges(t *testing.T) {
	table := kvTable().WithExtendedKV()
	for what, sqe := range map[string]*nvme.SQE{
		"no room for an entry":         rangeCommand(nvme.CmdKVScan, 135),
		"no room for an entry, copied": rangeCommand(nvme.CmdKVCopyOut, 135),
		"no room for the totals":       rangeCommand(nvme.CmdKVCount, 127),
		"no room for the sums":         rangeCommand(nvme.CmdKVDigest, 96+16*16-1),
		"no header":                    rangeCommand(nvme.CmdKVCopyIn, 95),
		"a batch that is too long":     rangeCommand(nvme.CmdKVCopyIn, kvMax+nvme.KVEntryOverhead+1),
		"a drop with data":             rangeCommand(nvme.CmdKVDrop, 1),
		"fused":                        rangeCommand(nvme.CmdKVScan, 4096, fuse(nvme.FuseFirst)),
		"PRPs": rangeCommand(nvme.CmdKVScan, 4096, func(s *nvme.SQE) {
			s.SetPSDT(nvme.PSDTPRP)
		}),
		"a reserved bit": rangeCommand(nvme.CmdKVScan, 4096, func(s *nvme.SQE) { s.SetCDW(11, 1<<31) }),
	} {
		var p nvmeof.Plan
		wantStatus(t, what, nvmeof.PlanIO(sqe, table, testLimits, &p), nvme.InvalidField|nvme.DNR)
	}
	for _, op := range []uint8{nvme.CmdKVScan, nvme.CmdKVCopyIn, nvme.CmdKVCopyOut, nvme.CmdKVCount, nvme.CmdKVDigest,
		nvme.CmdKVDrop} {
		var p nvmeof.Plan
		wantStatus(t, "to blocks", nvmeof.PlanIO(rangeCommand(op, 0, func(s *nvme.SQE) { s.SetNSID(1) }), table,
			testLimits, &p), nvme.InvalidOpcode|nvme.DNR)
	}
}
