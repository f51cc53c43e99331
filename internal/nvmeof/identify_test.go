package nvmeof_test

import (
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

func TestIdentifyControllerTellsAHostWhatItReliesOn(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	_, data := r.must(c, identify(nvme.CNSController, 0), nil)
	d := (*nvme.IdentifyController)(data)
	if err := d.Check(); err != nil {
		t.Error(err)
	}
	for _, x := range []struct {
		what      string
		got, want any
	}{
		{"SN", d.SN(), "SN1"}, {"MN", d.MN(), "test model"}, {"FR", d.FR(), "fw1"}, {"CNTLID", d.CNTLID(), c.ID},
		{"SUBNQN", d.SubNQN(), open},
		{"VER", d.VER(), nvme.Version2_0}, {"MDTS", d.MDTS(), uint8(8)}, {"KAS", d.KAS(), uint16(1)},
		{"NN", d.NN(), uint32(nvmeof.MaxNSID)},
		{"CNTRLTYPE", d.CNTRLTYPE(), uint8(nvme.CNTRLTYPEIO)}, {"IOCCSZ", d.IOCCSZ(), uint32((64 + 8192) / 16)},
		{"IORCSZ", d.IORCSZ(), uint32(1)},
		{"ICDOFF", d.ICDOFF(), uint16(0)}, {"FCATT", d.FCATT(), uint8(0)}, {"SQES", d.SQES(), uint8(0x66)},
		{"CQES", d.CQES(), uint8(0x44)},
		{"MAXCMD", d.MAXCMD(), uint16(128)}, {"AERL", d.AERL(), uint8(3)},
		{"OAES", d.OAES(), uint32(nvme.AECNamespace | nvme.AECANA)},
		{"VWC", d.VWC(), uint8(nvme.VWCPresent | nvme.VWCFlushNSIDNo)}, {"FUSES", d.FUSES(), uint16(1)},
		{"ACWU", d.ACWU(), uint16(15)},
		{"OFCS", d.OFCS(), uint16(nvme.OFCSDisconnect)},
		{"CMIC", d.CMIC(), uint8(nvme.CMICMultiPort | nvme.CMICMultiController | nvme.CMICANA)},
	} {
		if x.got != x.want {
			t.Errorf("%s is %v, want %v", x.what, x.got, x.want)
		}
	}
	if d.CTRATT()&nvme.CTRATTTBKAS == 0 {
		t.Error("traffic based keep alive is not announced")
	}
}

func TestIdentifyOfADiscoveryController(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, nvme.DiscoveryNQN)
	_, data := r.must(c, identify(nvme.CNSController, 0), nil)
	d := (*nvme.IdentifyController)(data)
	if d.CNTRLTYPE() != nvme.CNTRLTYPEDiscovery || d.SubNQN() != nvme.DiscoveryNQN || d.OAES() != nvme.AECDiscovery ||
		d.DCTYPE() != nvme.DCTYPEDirect || d.NN() != 0 || d.KAS() == 0 {
		t.Errorf("CNTRLTYPE %d SUBNQN %s OAES %#x DCTYPE %d NN %d KAS %d", d.CNTRLTYPE(), d.SubNQN(), d.OAES(),
			d.DCTYPE(), d.NN(), d.KAS())
	}
	for _, cns := range []uint8{nvme.CNSNamespace, nvme.CNSActiveNSList, nvme.CNSNSDescriptors} {
		reply, _ := r.do(c, 0, identify(cns, 1), nil)
		wantStatus(t, fmt.Sprintf("CNS %#x", cns), reply.Status, nvme.InvalidField|nvme.DNR)
	}
}

func TestIdentifyNamespaceIsTheNamespaceAsConfigured(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	for _, x := range []struct {
		nsid   uint32
		shift  uint8
		blocks units.Blocks
		nacwu  uint16
	}{{1, 9, 8 << 20 >> 9, 127}, {2, 12, 16 << 20 >> 12, 15}} {
		for _, cns := range []uint8{nvme.CNSNamespace, nvme.CNSAllocatedNamespace} {
			_, data := r.must(c, identify(cns, x.nsid), nil)
			d := (*nvme.IdentifyNamespace)(data)
			if err := d.Check(); err != nil {
				t.Error(err)
			}
			if d.NSZE() != x.blocks || d.NCAP() != x.blocks || d.NUSE() != x.blocks || d.Format().Shift() != x.shift ||
				d.Format().MetadataBytes() != 0 {
				t.Errorf("namespace %d: %d blocks of 2^%d", x.nsid, d.NSZE(), d.Format().Shift())
			}
			if d.NGUID() != (uuid.UUID{2, byte(x.nsid)}) || d.EUI64() != ([8]byte{3, byte(x.nsid)}) ||
				d.ANAGRPID() != 1 || d.NMIC() != nvme.NMICShared {
				t.Errorf("namespace %d: NGUID %v EUI64 %x ANAGRPID %d", x.nsid, d.NGUID(), d.EUI64(), d.ANAGRPID())
			}
			if d.NACWU() != x.nacwu || d.DLFEAT() != nvme.DLFEATReadZeroes|nvme.DLFEATWriteZeroes {
				t.Errorf("namespace %d: NACWU %d DLFEAT %#x", x.nsid, d.NACWU(), d.DLFEAT())
			}
		}
		_, data := r.must(c, identify(nvme.CNSNSDescriptors, x.nsid), nil)
		if err := nvme.NSDescriptors(data).Check(); err != nil {
			t.Error(err)
		}
		got := map[nvme.NIDT]string{}
		for typ, id := range nvme.NSDescriptors(data).All() {
			got[typ] = fmt.Sprintf("%x", id)
		}
		want := map[nvme.NIDT]string{nvme.NIDTUUID: fmt.Sprintf("01%02x%028x", x.nsid, 0),
			nvme.NIDTNGUID: fmt.Sprintf("02%02x%028x", x.nsid, 0),
			nvme.NIDTEUI64: fmt.Sprintf("03%02x%012x", x.nsid, 0), nvme.NIDTCSI: "00"}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("namespace %d: descriptors %v, want %v", x.nsid, got, want)
		}
		_, data = r.must(c, identify(nvme.CNSNamespaceIndependent, x.nsid), nil)
		if n := (*nvme.IdentifyNamespaceIndependent)(data); n.NSTAT() != nvme.NSTATReady || n.ANAGRPID() != 1 ||
			n.NMIC() != nvme.NMICShared {
			t.Errorf("namespace %d independent: NSTAT %#x", x.nsid, n.NSTAT())
		}
	}
}

func TestIdentifyListsWhatTheHostSees(t *testing.T) {
	r := newRig(t)
	a, b := r.connect(hostA, open), r.connect(hostB, open)
	for _, x := range []struct {
		c     *nvmeof.Controller
		after uint32
		want  []uint32
	}{{a, 0, []uint32{1, 2, 5}}, {a, 1, []uint32{2, 5}}, {a, 4, []uint32{5}}, {a, 5, nil}, {a, 0xFFFFFFFD, nil},
		{b, 0, []uint32{1, 2}}} {
		for _, cns := range []uint8{nvme.CNSActiveNSList, nvme.CNSAllocatedNSList, nvme.CNSActiveNSListCSI,
			nvme.CNSAllocatedNSListCSI} {
			_, data := r.must(x.c, identify(cns, x.after), nil)
			if got := ids((*nvme.NSList)(data)); !slices.Equal(got, x.want) {
				t.Errorf("CNS %#x after %d: %v, want %v", cns, x.after, got, x.want)
			}
		}
	}
	reply, _ := r.do(a, 0, identify(nvme.CNSActiveNSList, 0xFFFFFFFE), nil)
	wantStatus(t, "list after FFFFFFFEh", reply.Status, nvme.InvalidNamespaceOrFormat|nvme.DNR)
}

func TestIdentifyListsControllers(t *testing.T) {
	r := newRig(t)
	a, b := r.connect(hostA, open), r.connect(hostB, open)
	r.connect(hostA, shut) // another subsystem
	list := func(cns uint8, nsid uint32, from uint16) []uint16 {
		_, data := r.must(a, identify(cns, nsid, func(i *nvme.IdentifySQE) { i.SetCNTID(from) }), nil)
		l := (*nvme.ControllerList)(data)
		if err := l.Check(); err != nil {
			t.Error(err)
		}
		return slices.Collect(l.All())
	}
	for _, x := range []struct {
		cns  uint8
		nsid uint32
		from uint16
		want []uint16
	}{
		{nvme.CNSControllerList, 0, 0, []uint16{a.ID, b.ID}}, {nvme.CNSControllerList, 0, a.ID + 1, []uint16{b.ID}},
		{nvme.CNSNSControllerList, 1, 0, []uint16{a.ID, b.ID}}, {nvme.CNSNSControllerList, 5, 0, []uint16{a.ID}},
		{nvme.CNSNSControllerList, 5, b.ID, nil},
	} {
		if got := list(x.cns, x.nsid, x.from); !slices.Equal(got, x.want) {
			t.Errorf("CNS %#x, NSID %d, from %d: %v, want %v", x.cns, x.nsid, x.from, got, x.want)
		}
	}
}

func TestIdentifyOfCommandSets(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	_, data := r.must(c, identify(nvme.CNSIOCommandSets, 0,
		func(i *nvme.IdentifySQE) { i.SetCNTID(nvme.CNTLIDDynamic) }), nil)
	if s := (*nvme.IOCommandSets)(data); s.Combination(0) != 3 || s.Combination(1) != 0 {
		t.Errorf("combinations %#x, %#x, want the NVM and the KV command set together", s.Combination(0),
			s.Combination(1))
	}
	r.must(c, identify(nvme.CNSIOCommandSets, 0, func(i *nvme.IdentifySQE) { i.SetCNTID(c.ID) }), nil)
	_, data = r.must(c, identify(nvme.CNSControllerCSI, 0), nil)
	limits := (*nvme.IdentifyControllerNVM)(data)
	if got := int64(4096) << limits.VSL(); got != nvmeof.MaxVerifyBytes {
		t.Errorf("VSL %d announces %d bytes, want %d", limits.VSL(), got, nvmeof.MaxVerifyBytes)
	}
	if limits.SetVSL(0); slices.ContainsFunc(data, func(b byte) bool { return b != 0 }) {
		t.Error("another limit than VSL is announced")
	}
	// No extended LBA formats, so all zero.
	for _, sqe := range []*nvme.SQE{identify(nvme.CNSNamespaceCSI, 1), identify(nvme.CNSAllocatedNSCSI, 2),
		identify(nvme.CNSNamespace, 3)} {
		_, data := r.must(c, sqe, nil)
		if slices.ContainsFunc(data, func(b byte) bool { return b != 0 }) {
			t.Errorf("CNS %#x, NSID %d is not zeroes", sqe.Identify().CNS(), sqe.NSID())
		}
	}
}

func TestIdentifyRefuses(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostB, open)
	kv := func(i *nvme.IdentifySQE) { i.SetCSI(nvme.CSIKV) }
	const inactive, invalid = 5, nvmeof.MaxNSID + 1 // 5 is hidden from hostB
	cases := []struct {
		name string
		sqe  *nvme.SQE
		want nvme.Status
	}{
		{"namespace 0", identify(nvme.CNSNamespace, 0), nvme.InvalidNamespaceOrFormat},
		{"namespace beyond NN", identify(nvme.CNSNamespace, invalid), nvme.InvalidNamespaceOrFormat},
		{"every namespace, without namespace management", identify(nvme.CNSNamespace, nvme.NSIDBroadcast),
			nvme.InvalidNamespaceOrFormat},
		{"descriptors of an inactive namespace", identify(nvme.CNSNSDescriptors, inactive),
			nvme.InvalidNamespaceOrFormat},
		{"independent data of an inactive namespace", identify(nvme.CNSNamespaceIndependent, inactive),
			nvme.InvalidNamespaceOrFormat},
		{"controllers of an inactive namespace", identify(nvme.CNSNSControllerList, inactive),
			nvme.InvalidNamespaceOrFormat},
		{"CSI namespace beyond NN", identify(nvme.CNSNamespaceCSI, invalid), nvme.InvalidNamespaceOrFormat},
		{"namespace of another command set", identify(nvme.CNSNamespaceCSI, 1, kv), nvme.InvalidField},
		{"controller of another command set", identify(nvme.CNSControllerCSI, 0, kv), nvme.InvalidField},
		{"list of another command set", identify(nvme.CNSActiveNSListCSI, 0, kv), nvme.InvalidField},
		{"command sets of another controller",
			identify(nvme.CNSIOCommandSets, 0, func(i *nvme.IdentifySQE) { i.SetCNTID(99) }), nvme.InvalidField},
		{"NVM sets", identify(nvme.CNSNVMSetList, 0), nvme.InvalidField},
		{"secondary controllers", identify(nvme.CNSSecondaryControllers, 0), nvme.InvalidField},
		{"reserved CNS", identify(0x55, 0), nvme.InvalidField},
	}
	for _, x := range cases {
		reply, _ := r.do(c, 0, x.sqe, nil)
		wantStatus(t, x.name, reply.Status, x.want|nvme.DNR)
	}
	_, data := r.must(c, identify(nvme.CNSNamespace, inactive), nil)
	if !(*nvme.IdentifyNamespace)(data).Inactive() {
		t.Error("a hidden namespace is not identified as inactive")
	}
}

func TestUnsupportedAdminCommandsAreInvalidOpcodes(t *testing.T) {
	r := newRig(t)
	c, d := r.connect(hostA, open), r.connect(hostA, nvme.DiscoveryNQN)
	for _, op := range []uint8{nvme.AdminCreateIOSQ, nvme.AdminDeleteIOCQ, 0x10, 0x80, 0x81, 0xC0, 0xFF} {
		reply, _ := r.do(c, 0, command(op, nil), nil)
		wantStatus(t, fmt.Sprintf("opcode %#x", op), reply.Status, nvme.InvalidOpcode|nvme.DNR)
	}
	reply, _ := r.do(d, 0, command(nvme.AdminAbort, nil), nil)
	wantStatus(t, "Abort at discovery", reply.Status, nvme.InvalidOpcode|nvme.DNR)
}

func TestPlanAdminKnowsTheDataOfEveryCommand(t *testing.T) {
	feature := func(op, fid, sel uint8) *nvme.SQE {
		return command(op, func(s *nvme.SQE) { s.Features().SetFID(fid); s.Features().SetSEL(sel) })
	}
	get, set := uint8(nvme.AdminGetFeatures), uint8(nvme.AdminSetFeatures)
	cases := []struct {
		name                 string
		sqe                  *nvme.SQE
		toController, toHost uint32
		want                 nvme.Status
	}{
		{"Identify", identify(1, 0), 0, 4096, nvme.Success},
		{"log page", getLog(2, 512), 0, 512, nvme.Success},
		{"log page of MDTS", getLog(2, 1<<20), 0, 1 << 20, nvme.Success},
		{"log page beyond MDTS", getLog(2, 1<<20+4), 0, 0, nvme.InvalidField | nvme.DNR},
		{"log page with all of NUMD", getLog(2, 1<<34), 0, 0, nvme.InvalidField | nvme.DNR},
		{"set timestamp", feature(set, nvme.FIDTimestamp, 0), 8, 0, nvme.Success},
		{"get timestamp", feature(get, nvme.FIDTimestamp, 0), 0, 8, nvme.Success},
		{"capabilities of timestamp", feature(get, nvme.FIDTimestamp, nvme.SELSupported), 0, 0, nvme.Success},
		{"set host behaviour", feature(set, nvme.FIDHostBehavior, 0), 512, 0, nvme.Success},
		{"get host behaviour", feature(get, nvme.FIDHostBehavior, 0), 0, 512, nvme.Success},
		{"get host identifier", feature(get, nvme.FIDHostIdentifier, 0), 0, 16, nvme.Success},
		{"set number of queues", feature(set, nvme.FIDNumberOfQueues, 0), 0, 0, nvme.Success},
		{"keep alive", command(nvme.AdminKeepAlive, nil), 0, 0, nvme.Success},
	}
	for _, x := range cases {
		x.sqe.SetPSDT(nvme.PSDTSGL)
		toController, toHost, s := nvmeof.PlanAdmin(x.sqe, testLimits)
		if toController != x.toController || toHost != x.toHost || s != x.want {
			t.Errorf("%s: %d to the controller, %d to the host, %v", x.name, toController, toHost, s)
		}
		for _, psdt := range []uint8{nvme.PSDTPRP, 3} {
			x.sqe.SetPSDT(psdt)
			if _, _, s := nvmeof.PlanAdmin(x.sqe, testLimits); s != nvme.InvalidField|nvme.DNR {
				t.Errorf("%s with PSDT %d: %v", x.name, psdt, s)
			}
		}
	}
	var connect nvme.SQE
	connect.Connect().Init()
	if in, out, s := nvmeof.PlanAdmin(&connect, testLimits); in != nvme.ConnectDataSize || out != 0 || !s.OK() {
		t.Errorf("Connect: %d, %d, %v", in, out, s)
	}
}

// A drive says in bytes what it prefers, and hosts are told in blocks, with a field of 16 bits.
func TestPreferredWritesAreThoseOfTheDrive(t *testing.T) {
	for _, x := range []struct {
		bytes int
		shift uint8
		want  uint16 // 0-based
	}{{0, 9, 0}, {512, 12, 0}, {4096, 9, 7}, {4096, 12, 0}, {32 << 20, 9, 1<<16 - 1}, {33 << 20, 9, 1<<16 - 1},
		{33 << 20, 12, 8447}, {1 << 32, 12, 1<<16 - 1}} {
		st := testState()
		st.Subsystems[0].Namespaces[0].OptimalIOBytes, st.Subsystems[0].Namespaces[0].BlockShift = x.bytes, x.shift
		r := newRig(t)
		r.target.Apply(st)
		_, data := r.must(r.connect(hostA, open), identify(nvme.CNSNamespace, 1), nil)
		d := (*nvme.IdentifyNamespace)(data)
		if d.NPWG() != x.want || d.NPWA() != x.want || d.NPDG() != x.want || d.NPDA() != x.want {
			t.Errorf("%d bytes in blocks of 1<<%d: NPWG %d NPWA %d NPDG %d NPDA %d, want %d", x.bytes, x.shift,
				d.NPWG(), d.NPWA(), d.NPDG(), d.NPDA(), x.want)
		}
	}
}
