package nvmeof_test

import (
	"slices"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
)

// extended are the opcodes of extended key-value.
var extended = []uint8{nvme.CmdKVXStore, nvme.CmdKVXRetrieve, nvme.CmdKVXDelete}

// wantExtendedPlan plans a command of extended key-value, and checks that it is refused without the extension.
func wantExtendedPlan(t *testing.T, name string, sqe *nvme.SQE, want nvmeof.Plan) {
	t.Helper()
	got := nvmeof.Plan{Op: 99, FUA: true, MissingOK: true}
	if s := nvmeof.PlanIO(sqe, kvTable().WithExtendedKV(), testLimits, &got); s != nvme.Success {
		t.Errorf("%s: %v", name, s)
	} else if got.Namespace = nil; got != want {
		t.Errorf("%s: %+v, want %+v", name, got, want)
	}
	var p nvmeof.Plan
	wantStatus(t, name+" without the extension", nvmeof.PlanIO(sqe, kvTable(), testLimits, &p),
		nvme.InvalidOpcode|nvme.DNR)
}

func TestPlanOfExtendedKeysAndValues(t *testing.T) {
	table := kvTable().WithExtendedKV()
	const header = nvme.KVWriteHeaderSize
	kv := func(p nvmeof.Plan) nvmeof.Plan { p.Kind = nvmeof.KindKV; return p }
	for _, x := range []struct {
		name string
		sqe  *nvme.SQE
		want nvmeof.Plan
	}{
		{"store", kvCommand(nvme.CmdKVXStore, 3, "k", header+100),
			kv(nvmeof.Plan{Wide: true, ToController: header + 100})},
		{"store of nothing", kvCommand(nvme.CmdKVXStore, 3, "k", header),
			kv(nvmeof.Plan{Wide: true, ToController: header})},
		{"store of the longest", kvCommand(nvme.CmdKVXStore, 3, "0123456789abcdef", header+kvMax),
			kv(nvmeof.Plan{Wide: true, ToController: header + kvMax})},
		{"delete", kvCommand(nvme.CmdKVXDelete, 3, "k", header),
			kv(nvmeof.Plan{Wide: true, MissingOK: true, ToController: header})},
		{"retrieve", kvCommand(nvme.CmdKVXRetrieve, 3, "k", 116), kv(nvmeof.Plan{ToHost: 116, AnswerBytes: 116})},
		{"retrieve of the header", kvCommand(nvme.CmdKVXRetrieve, 3, "k", 16),
			kv(nvmeof.Plan{ToHost: 16, AnswerBytes: 16})},
		{"retrieve into more than there can be", kvCommand(nvme.CmdKVXRetrieve, 3, "k", 1<<32-1),
			kv(nvmeof.Plan{ToHost: 1<<32 - 1, AnswerBytes: 16 + kvMax})},
	} {
		wantExtendedPlan(t, x.name, x.sqe, x.want)
	}
	small := testLimits
	small.MDTSBytes = 64 << 10
	var p nvmeof.Plan
	wantStatus(t, "data beyond MDTS", nvmeof.PlanIO(kvCommand(nvme.CmdKVXStore, 3, "k", 64<<10+1), table, small, &p),
		nvme.InvalidValueSize|nvme.DNR)
	if s := nvmeof.PlanIO(kvCommand(nvme.CmdKVXRetrieve, 3, "k", 1<<20), table, small, &p); !s.OK() ||
		p.AnswerBytes != 64<<10 {
		t.Errorf("%v, an answer of %d bytes", s, p.AnswerBytes)
	}
	if n := testing.AllocsPerRun(100, func() {
		for _, op := range extended {
			var sqe nvme.SQE
			sqe.SetOpcode(op)
			sqe.SetNSID(3)
			sqe.SetPSDT(nvme.PSDTSGL)
			sqe.KV().SetKeyLen(1)
			sqe.KV().SetLenBytes(header)
			if s := nvmeof.PlanIO(&sqe, table, testLimits, &p); !s.OK() {
				t.Error(s)
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestPlanRefusesBadExtendedKeysAndValues(t *testing.T) {
	table := kvTable().WithExtendedKV()
	check := func(what string, sqe *nvme.SQE, want nvme.Status) {
		t.Helper()
		var p nvmeof.Plan
		wantStatus(t, what, nvmeof.PlanIO(sqe, table, testLimits, &p), want|nvme.DNR)
	}
	const header = nvme.KVWriteHeaderSize
	for _, op := range extended {
		check("no key", kvCommand(op, 3, "", header), nvme.InvalidKeySize)
		check("a key of 17", kvCommand(op, 3, "k", header, keyLen(17)), nvme.InvalidKeySize)
		for bit := range 32 {
			if bit >= 8 {
				check("CDW11", kvCommand(op, 3, "k", header, func(s *nvme.SQE) { s.SetCDW(11, 1|1<<bit) }),
					nvme.InvalidField)
			}
			for _, dw := range []int{12, 13} {
				check("CDW12, CDW13", kvCommand(op, 3, "k", header, func(s *nvme.SQE) { s.SetCDW(dw, 1<<bit) }),
					nvme.InvalidField)
			}
		}
		check("fused", kvCommand(op, 3, "k", header, fuse(nvme.FuseFirst)), nvme.InvalidField)
		check("PRPs", kvCommand(op, 3, "k", header, func(s *nvme.SQE) { s.SetPSDT(nvme.PSDTPRP) }), nvme.InvalidField)
		check("no namespace", kvCommand(op, 4, "k", header), nvme.InvalidNamespaceOrFormat)
		check("to blocks", kvCommand(op, 1, "k", header), nvme.InvalidOpcode)
	}
	check("no whole header", kvCommand(nvme.CmdKVXStore, 3, "k", header-1), nvme.InvalidField)
	check("no whole header", kvCommand(nvme.CmdKVXDelete, 3, "k", header-1), nvme.InvalidField)
	check("a delete with a value", kvCommand(nvme.CmdKVXDelete, 3, "k", header+1), nvme.InvalidField)
	check("no space for the header", kvCommand(nvme.CmdKVXRetrieve, 3, "k", 15), nvme.InvalidField)
	check("a value too long", kvCommand(nvme.CmdKVXStore, 3, "k", header+kvMax+1), nvme.InvalidValueSize)
	check("a value of 4 GiB", kvCommand(nvme.CmdKVXStore, 3, "k", 1<<32-1), nvme.InvalidValueSize)
}

// TestExtendedKVIsOffUntilGranted: queues get a table with which PlanIO takes the commands, and the effects log lists
// them, from the grant until it is withdrawn or the controller is reset.
func TestExtendedKVIsOffUntilGranted(t *testing.T) {
	r := kvRig(t)
	c := r.connectKV(hostA)
	table := r.tryConnect(hostA, open, queue(c, 1)).Table
	on := func() (planned, listed bool) {
		var p nvmeof.Plan
		planned = nvmeof.PlanIO(kvCommand(nvme.CmdKVXStore, 3, "k", 100), table, testLimits, &p).OK()
		for csi, want := range map[nvme.CSI]bool{nvme.CSINVM: false, nvme.CSIKV: planned} {
			_, data := r.must(c, getLog(nvme.LIDEffects, 4096, func(g *nvme.GetLogSQE) { g.SetCSI(csi) }), nil)
			l := (*nvme.EffectsLog)(data)
			for _, op := range append(slices.Clone(extended), nvme.CmdKVScan, nvme.CmdKVCopyIn, nvme.CmdKVCopyOut,
				nvme.CmdKVCount, nvme.CmdKVDigest, nvme.CmdKVDrop) {
				effects := nvme.Effects(nvme.EffectSupported)
				if _, reads := nvme.DataDirection(op); !reads {
					effects |= nvme.EffectLBCC
				}
				if listed = l.IO(op) == effects; listed != want || !listed && l.IO(op) != 0 {
					t.Errorf("CSI %d, opcode %#x: effects %#x, granted %t", csi, op, l.IO(op), planned)
				}
			}
		}
		return planned, listed
	}
	set := func(bits uint32, tables int) {
		t.Helper()
		reply, _ := r.do(c, 0, extension(bits), nil)
		if !reply.Status.OK() || reply.Result != uint64(bits) {
			t.Errorf("granted %#x, want %#x: %v", reply.Result, bits, reply.Status)
		}
		for _, a := range r.take() {
			if a.Kind == nvmeof.ActionTable {
				table = a.Table
				tables--
			}
		}
		if tables != 0 {
			t.Errorf("extensions %#x: %d tables are missing", bits, tables)
		}
	}
	check := func(when string, want bool) {
		t.Helper()
		if planned, _ := on(); planned != want {
			t.Errorf("%s: extended commands are taken: %t", when, planned)
		}
	}
	check("at first", false)
	set(nvme.ExtCredits, 0)
	check("with credits", false)
	set(nvme.ExtKV, 1)
	check("granted", true)
	set(nvme.ExtKV|nvme.ExtCredits, 0)
	check("granted with credits", true)
	r.target.Apply(kvState())
	s := kvState()
	s.Subsystems[0].Namespaces[3].MaxValueBytes++
	r.target.Apply(s)
	for _, a := range r.take() {
		table = a.Table
	}
	check("after a change of the configuration", true)
	set(nvme.ExtCredits, 1)
	check("withdrawn", false)
	set(nvme.ExtKV, 1)
	r.setCC(c, 0)
	r.setCC(c, enableAll)
	r.actions()
	table = r.tryConnect(hostA, open, queue(c, 1)).Table
	check("after a reset", false)
}
