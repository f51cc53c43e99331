package nvmeof_test

import (
	"encoding/binary"
	"fmt"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

// io makes an I/O command on blocks of namespace nsid.
func io(op uint8, nsid uint32, slba units.LBA, nlb units.Blocks, change ...func(*nvme.SQE)) *nvme.SQE {
	return command(op, func(s *nvme.SQE) {
		s.SetPSDT(nvme.PSDTSGL)
		s.SetNSID(nsid)
		s.SetSLBA(slba)
		s.SetNLB(nlb)
		for _, f := range change {
			f(s)
		}
	})
}

func cdw12(bits uint32) func(*nvme.SQE) {
	return func(s *nvme.SQE) { s.SetCDW(12, s.CDW(12)|bits) }
}

func fuse(f nvme.Fuse) func(*nvme.SQE) { return func(s *nvme.SQE) { s.SetFuse(f) } }

func testTable() *nvmeof.NamespaceTable {
	return nvmeof.NewNamespaceTable(testState().Subsystems[0].Namespaces, hostA)
}

func TestPlanTurnsBlocksIntoAnExtent(t *testing.T) {
	const o1, o2 = 1 << 20, 16 << 20 // offsets of namespaces 1 (512 bytes) and 2 (4096)
	last := units.LBA(16<<20>>12) - 1
	cases := []struct {
		name string
		sqe  *nvme.SQE
		want nvmeof.Plan
	}{
		{"read 512", io(nvme.CmdRead, 1, 3, 5), nvmeof.Plan{Op: pipeline.Read, Offset: o1 + 3*512, Len: 5 * 512,
			ToHost: 5 * 512}},
		{"read 4096", io(nvme.CmdRead, 2, 3, 5), nvmeof.Plan{Op: pipeline.Read, Offset: o2 + 3*4096, Len: 5 * 4096,
			ToHost: 5 * 4096}},
		{"read of the last block", io(nvme.CmdRead, 2, last, 1),
			nvmeof.Plan{Op: pipeline.Read, Offset: o2 + 16<<20 - 4096, Len: 4096, ToHost: 4096}},
		{"read of MDTS", io(nvme.CmdRead, 2, 0, 256), nvmeof.Plan{Op: pipeline.Read, Offset: o2, Len: 1 << 20,
			ToHost: 1 << 20}},
		{"read with FUA", io(nvme.CmdRead, 1, 0, 1, cdw12(nvme.CDW12FUA)),
			nvmeof.Plan{Op: pipeline.Read, Offset: o1, Len: 512, ToHost: 512, FUA: true}},
		{"compare with FUA", io(nvme.CmdCompare, 1, 0, 1, cdw12(nvme.CDW12FUA)),
			nvmeof.Plan{Op: pipeline.Compare, Offset: o1, Len: 512, ToController: 512, FUA: true}},
		{"verify with FUA", io(nvme.CmdVerify, 1, 0, 1, cdw12(nvme.CDW12FUA)),
			nvmeof.Plan{Op: pipeline.Verify, Offset: o1, Len: 512, FUA: true}},
		{"write", io(nvme.CmdWrite, 1, 0, 1), nvmeof.Plan{Op: pipeline.Write, Offset: o1, Len: 512, ToController: 512}},
		{"write with FUA", io(nvme.CmdWrite, 1, 0, 1, cdw12(nvme.CDW12FUA)),
			nvmeof.Plan{Op: pipeline.Write, Offset: o1, Len: 512, ToController: 512, FUA: true}},
		{"write with limited retry", io(nvme.CmdWrite, 1, 0, 1, cdw12(nvme.CDW12LR)),
			nvmeof.Plan{Op: pipeline.Write, Offset: o1, Len: 512, ToController: 512}},
		{"compare", io(nvme.CmdCompare, 2, 1, 2), nvmeof.Plan{Op: pipeline.Compare, Offset: o2 + 4096, Len: 8192,
			ToController: 8192}},
		{"zeroes beyond MDTS", io(nvme.CmdWriteZeroes, 2, 0, 4096),
			nvmeof.Plan{Op: pipeline.WriteZeroes, Offset: o2, Len: 16 << 20}},
		{"zeroes with deallocate", io(nvme.CmdWriteZeroes, 2, 0, 1, cdw12(nvme.CDW12Deallocate)),
			nvmeof.Plan{Op: pipeline.WriteZeroes, Offset: o2, Len: 4096, Unmap: true}},
		{"zeroes with FUA", io(nvme.CmdWriteZeroes, 2, 0, 1, cdw12(nvme.CDW12FUA)),
			nvmeof.Plan{Op: pipeline.WriteZeroes, Offset: o2, Len: 4096, FUA: true}},
		{"verify beyond MDTS", io(nvme.CmdVerify, 2, 0, 4096),
			nvmeof.Plan{Op: pipeline.Verify, Offset: o2, Len: 16 << 20}},
		{"flush", io(nvme.CmdFlush, 1, 1<<40, 1), nvmeof.Plan{Op: pipeline.Flush}},
		{"deallocate", io(nvme.CmdDSM, 1, 0, 1,
			func(s *nvme.SQE) { s.SetCDW(10, 0); s.SetDSMRanges(3); s.SetCDW(11, nvme.DSMDeallocate) }),
			nvmeof.Plan{Op: pipeline.DeallocateRanges, Ranges: 3, ToController: 48}},
		{"deallocate most", io(nvme.CmdDSM, 1, 0, 1,
			func(s *nvme.SQE) { s.SetDSMRanges(256); s.SetCDW(11, nvme.DSMDeallocate) }),
			nvmeof.Plan{Op: pipeline.DeallocateRanges, Ranges: 256, ToController: 4096}},
		{"hints of integral reads and writes", io(nvme.CmdDSM, 1, 0, 1, func(s *nvme.SQE) { s.SetCDW(11, 3) }),
			nvmeof.Plan{Op: pipeline.DeallocateRanges, Ranges: 1, ToController: 16, NoOp: true}},
	}
	table := testTable()
	for _, x := range cases {
		// of the slot's last command
		got := nvmeof.Plan{Op: 99, FUA: true, Unmap: true, NoOp: true, Ranges: 99, ToHost: 99}
		if s := nvmeof.PlanIO(x.sqe, table, testLimits, &got); s != nvme.Success {
			t.Errorf("%s: %v", x.name, s)
			continue
		}
		x.want.Namespace = table.Get(x.sqe.NSID())
		if got != x.want {
			t.Errorf("%s: %+v, want %+v", x.name, got, x.want)
		}
	}
}

func TestPlanRefusesWithTheStatusTheSpecificationNames(t *testing.T) {
	end1 := units.LBA(8 << 20 >> 9)
	cases := []struct {
		name string
		sqe  *nvme.SQE
		want nvme.Status
	}{
		{"NSID 0", io(nvme.CmdRead, 0, 0, 1), nvme.InvalidNamespaceOrFormat},
		{"NSID FFFFFFFFh", io(nvme.CmdRead, nvme.NSIDBroadcast, 0, 1), nvme.InvalidNamespaceOrFormat},
		{"flush of every namespace, which VWC denies", io(nvme.CmdFlush, nvme.NSIDBroadcast, 0, 1),
			nvme.InvalidNamespaceOrFormat},
		{"inactive NSID", io(nvme.CmdRead, 3, 0, 1), nvme.InvalidNamespaceOrFormat},
		{"NSID beyond NN", io(nvme.CmdWrite, nvmeof.MaxNSID+1, 0, 1), nvme.InvalidNamespaceOrFormat},
		{"first block beyond the end", io(nvme.CmdRead, 1, end1, 1), nvme.LBAOutOfRange},
		{"last block beyond the end", io(nvme.CmdRead, 1, end1-1, 2), nvme.LBAOutOfRange},
		{"end that overflows", io(nvme.CmdWrite, 1, 1<<64-1, 2), nvme.LBAOutOfRange},
		{"bytes that overflow", io(nvme.CmdWrite, 1, 1<<55, 1), nvme.LBAOutOfRange},
		{"zeroes beyond the end", io(nvme.CmdWriteZeroes, 1, end1-1, 2), nvme.LBAOutOfRange},
		{"verify beyond the end", io(nvme.CmdVerify, 1, end1-1, 2), nvme.LBAOutOfRange},
		{"compare beyond the end", io(nvme.CmdCompare, 1, end1-1, 2), nvme.LBAOutOfRange},
		{"read beyond MDTS", io(nvme.CmdRead, 2, 0, 257), nvme.InvalidField},
		{"write beyond MDTS", io(nvme.CmdWrite, 2, 0, 257), nvme.InvalidField},
		{"compare beyond MDTS", io(nvme.CmdCompare, 2, 0, 257), nvme.InvalidField},
		{"fused compare beyond ACWU", io(nvme.CmdCompare, 2, 0, 17, fuse(nvme.FuseFirst)), nvme.InvalidField},
		{"fused write beyond ACWU", io(nvme.CmdWrite, 2, 0, 17, fuse(nvme.FuseSecond)), nvme.InvalidField},
		{"reserved fuse", io(nvme.CmdRead, 1, 0, 1, fuse(3)), nvme.InvalidField},
		{"PRP", io(nvme.CmdRead, 1, 0, 1, func(s *nvme.SQE) { s.SetPSDT(nvme.PSDTPRP) }), nvme.InvalidField},
		{"reserved PSDT", io(nvme.CmdRead, 1, 0, 1, func(s *nvme.SQE) { s.SetPSDT(3) }), nvme.InvalidField},
		{"write uncorrectable", io(nvme.CmdWriteUncorr, 1, 0, 1), nvme.InvalidOpcode},
		{"reservation", io(0x0D, 1, 0, 1), nvme.InvalidOpcode},
		{"vendor specific", io(0x80, 1, 0, 1), nvme.InvalidOpcode},
	}
	table := testTable()
	for _, x := range cases {
		var p nvmeof.Plan
		wantStatus(t, x.name, nvmeof.PlanIO(x.sqe, table, testLimits, &p), x.want|nvme.DNR)
	}
	var p nvmeof.Plan
	wantStatus(t, "metadata SGL", nvmeof.PlanIO(io(nvme.CmdRead, 1, 0, 1,
		func(s *nvme.SQE) { s.SetPSDT(nvme.PSDTSGLMetaSGL) }), table, testLimits, &p), nvme.Success)
	wantStatus(t, "fused of ACWU", nvmeof.PlanIO(io(nvme.CmdCompare, 2, 0, 16, fuse(nvme.FuseFirst)), table, testLimits,
		&p), nvme.Success)
}

// TestPlanRefusesAVerifyBeyondVSL, and no other command because of its length, even the longest that it can have.
func TestPlanRefusesAVerifyBeyondVSL(t *testing.T) {
	table := nvmeof.NewNamespaceTable([]*nvmeof.Namespace{block(1, 12, 0, 1<<30), block(2, 9, 0, 1<<30)}, hostA)
	const vsl = nvmeof.MaxVerifyBytes >> 12
	for _, x := range []struct {
		name string
		sqe  *nvme.SQE
		want nvme.Status
	}{
		{"verify of VSL", io(nvme.CmdVerify, 1, 7, vsl), nvme.Success},
		{"verify of a block more", io(nvme.CmdVerify, 1, 7, vsl+1), nvme.InvalidField | nvme.DNR},
		{"longest verify", io(nvme.CmdVerify, 1, 0, 1<<16), nvme.InvalidField | nvme.DNR},
		{"longest verify of small blocks", io(nvme.CmdVerify, 2, 0, 1<<16), nvme.Success},
		{"longest write zeroes", io(nvme.CmdWriteZeroes, 1, 0, 1<<16), nvme.Success},
	} {
		var p nvmeof.Plan
		wantStatus(t, x.name, nvmeof.PlanIO(x.sqe, table, testLimits, &p), x.want)
	}
}

func TestPlanAnswersWithTheGroupsANAState(t *testing.T) {
	for _, x := range []struct {
		state nvme.ANAState
		want  nvme.Status
	}{{nvme.ANAStateOptimized, nvme.Success}, {nvme.ANAStateNonOptimized, nvme.Success},
		{nvme.ANAStateInaccessible, nvme.ANAInaccessible},
		{nvme.ANAStatePersistentLoss, nvme.ANAPersistentLoss}, {nvme.ANAStateChange, nvme.ANATransition}} {
		n := block(1, 9, 0, 1<<20)
		n.ANAState = x.state
		table := nvmeof.NewNamespaceTable([]*nvmeof.Namespace{n}, hostA)
		for _, op := range []uint8{nvme.CmdRead, nvme.CmdWrite, nvme.CmdFlush, nvme.CmdDSM} {
			var p nvmeof.Plan
			// Without DNR, because another path may serve it.
			wantStatus(t, fmt.Sprintf("%v, opcode %d", x.state, op),
				nvmeof.PlanIO(io(op, 1, 0, 1), table, testLimits, &p), x.want)
		}
	}
}

func TestRangesAreCheckedAndEmptyOnesLeftOut(t *testing.T) {
	ranges := func(pairs ...uint64) []byte {
		var b []byte
		for i := 0; i < len(pairs); i += 2 {
			b = binary.LittleEndian.AppendUint32(b, 0xFFFF) // context attributes: not looked at
			b = binary.LittleEndian.AppendUint32(b, uint32(pairs[i+1]))
			b = binary.LittleEndian.AppendUint64(b, pairs[i])
		}
		return b
	}
	end := uint64(8 << 20 >> 9)
	p := nvmeof.Plan{Namespace: testTable().Get(1)}
	for _, x := range []struct {
		name string
		data []byte
		want []pipeline.Range
		s    nvme.Status
	}{
		{"two", ranges(0, 8, 100, 1), []pipeline.Range{{Offset: 1 << 20, Len: 4096}, {Offset: 1<<20 + 51200, Len: 512}},
			nvme.Success},
		{"an empty one, even beyond the end", ranges(1<<60, 0, 1, 1), []pipeline.Range{{Offset: 1<<20 + 512, Len: 512}},
			nvme.Success},
		{"all of it", ranges(0, end), []pipeline.Range{{Offset: 1 << 20, Len: 8 << 20}}, nvme.Success},
		{"beyond the end", ranges(0, 1, end, 1), []pipeline.Range{{Offset: 1 << 20, Len: 512}},
			nvme.LBAOutOfRange | nvme.DNR},
		{"over the end", ranges(end-1, 2), nil, nvme.LBAOutOfRange | nvme.DNR},
		{"overflowing", ranges(1<<64-1, 0xFFFFFFFF), nil, nvme.LBAOutOfRange | nvme.DNR},
	} {
		p.Ranges = len(x.data) / nvme.DSMRangeSize
		got, s := p.AppendRanges(append(x.data, make([]byte, 64)...), nil)
		if fmt.Sprint(got) != fmt.Sprint(x.want) || s != x.s {
			t.Errorf("%s: %v, %v", x.name, got, s)
		}
	}
}

func TestAFusedPairComparesAndWritesTheSameBlocks(t *testing.T) {
	first, second := io(nvme.CmdCompare, 1, 8, 2, fuse(nvme.FuseFirst)),
		io(nvme.CmdWrite, 1, 8, 2, fuse(nvme.FuseSecond))
	wantStatus(t, "pair", nvmeof.CheckFused(first, second), nvme.Success)
	for name, x := range map[string][2]*nvme.SQE{
		"two writes":        {io(nvme.CmdWrite, 1, 8, 2), second},
		"two compares":      {first, io(nvme.CmdCompare, 1, 8, 2)},
		"another namespace": {first, io(nvme.CmdWrite, 2, 8, 2)},
		"another block":     {first, io(nvme.CmdWrite, 1, 9, 2)},
		"another length":    {first, io(nvme.CmdWrite, 1, 8, 3)},
	} {
		wantStatus(t, name, nvmeof.CheckFused(x[0], x[1]), nvme.InvalidField|nvme.DNR)
	}
}

func TestPlanningAllocatesNothing(t *testing.T) {
	table := testTable()
	sqes := []*nvme.SQE{io(nvme.CmdRead, 1, 0, 8), io(nvme.CmdWrite, 2, 0, 8), io(nvme.CmdRead, 9, 0, 8),
		io(nvme.CmdDSM, 1, 0, 1), io(nvme.CmdRead, 1, 1<<60, 1)}
	data := make([]byte, nvmeof.MaxDSMBytes)
	data[4] = 1
	dst := make([]pipeline.Range, 0, 256)
	var p nvmeof.Plan
	if n := testing.AllocsPerRun(100, func() {
		for _, sqe := range sqes {
			nvmeof.PlanIO(sqe, table, testLimits, &p)
			if p.Ranges > 0 {
				dst, _ = p.AppendRanges(data, dst[:0])
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestCommandsOfAnEndedQueueMayBeRepeated: a host whose connection is being closed must not take its commands for
// refused: Linux turns a status with DNR into an I/O error, although another connection would take the command.
func TestCommandsOfAnEndedQueueMayBeRepeated(t *testing.T) {
	for _, op := range []uint8{nvme.CmdRead, nvme.CmdWrite, nvme.CmdFlush} {
		var p nvmeof.Plan
		wantStatus(t, fmt.Sprintf("opcode %d", op), nvmeof.PlanIO(io(op, 1, 0, 1), nvmeof.EndedTable, testLimits, &p),
			nvme.AbortedSQDeletion)
	}
}
