package nvmeof_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/units"
)

func at(lpo uint64) func(*nvme.GetLogSQE) { return func(g *nvme.GetLogSQE) { g.SetLPO(lpo) } }
func rae(g *nvme.GetLogSQE)               { g.SetRAE(true) }

func TestLogPagesAreReadInPartsAndPaddedBeyondTheirEnd(t *testing.T) {
	r := newRig(t)
	c, d := r.connect(hostA, open), r.connect(hostA, nvme.DiscoveryNQN)
	cases := []struct {
		name string
		c    *nvmeof.Controller
		lid  uint8
		size uint64
	}{
		{"supported", c, nvme.LIDSupported, 1024}, {"error", c, nvme.LIDError, 64 * 64},
		{"SMART", c, nvme.LIDSMART, 512},
		{"firmware slot", c, nvme.LIDFirmwareSlot, 512}, {"changed namespaces", c, nvme.LIDChangedNS, 4096},
		{"effects", c, nvme.LIDEffects, 4096},
		// The log has the length that a host computes from NANAGRPID and MNAN, whatever its content.
		{"ANA", c, nvme.LIDANA, 16 + 32*32 + 1024*4}, {"supported at discovery", d, nvme.LIDSupported, 1024},
		{"discovery", d, nvme.LIDDiscovery, 1024 * (1 + 2 + 4)},
	}
	for _, x := range cases {
		t.Run(x.name, func(t *testing.T) {
			_, whole := r.must(x.c, getLog(x.lid, x.size, rae), nil)
			if uint64(len(whole)) != x.size {
				t.Fatalf("%d bytes, asked for %d", len(whole), x.size)
			}
			var parts []byte
			for off := uint64(0); off < x.size; off += 500 {
				n := min(500, x.size-off)
				_, data := r.must(x.c, getLog(x.lid, n, rae, at(off)), nil)
				parts = append(parts, data...)
			}
			if !bytes.Equal(parts, whole) {
				t.Error("read in parts it is another log")
			}
			_, long := r.must(x.c, getLog(x.lid, x.size+4096, rae), nil)
			if !bytes.Equal(long[:x.size], whole) ||
				bytes.ContainsFunc(long[x.size:], func(b rune) bool { return b != 0 }) {
				t.Error("beyond the log's end are not zeroes")
			}
			_, rest := r.must(x.c, getLog(x.lid, 8, rae, at(x.size)), nil)
			if !bytes.Equal(rest, make([]byte, 8)) {
				t.Error("at the log's end are not zeroes")
			}
			for name, sqe := range map[string]*nvme.SQE{
				"offset beyond the end":         getLog(x.lid, 4, at(x.size+4)),
				"offset not of whole dwords":    getLog(x.lid, 4, at(2)),
				"offset far beyond":             getLog(x.lid, 4, at(1<<63)),
				"index offset, not announced":   getLog(x.lid, 4, func(g *nvme.GetLogSQE) { g.SetOT(true) }),
				"offset just below the highest": getLog(x.lid, 4, at(1<<64-4)),
			} {
				reply, _ := r.do(x.c, 0, sqe, nil)
				wantStatus(t, name, reply.Status, nvme.InvalidField|nvme.DNR)
			}
		})
	}
}

func TestUnsupportedLogPagesAreRefused(t *testing.T) {
	r := newRig(t)
	c, d := r.connect(hostA, open), r.connect(hostA, nvme.DiscoveryNQN)
	for _, x := range []struct {
		name string
		c    *nvmeof.Controller
		sqe  *nvme.SQE
		want nvme.Status
	}{
		{"discovery at a subsystem", c, getLog(nvme.LIDDiscovery, 1024), nvme.InvalidLogPage},
		{"vendor page", c, getLog(0xC0, 512), nvme.InvalidLogPage},
		{"feature effects", c, getLog(nvme.LIDFIDEffects, 512), nvme.InvalidLogPage},
		{"SMART at discovery", d, getLog(nvme.LIDSMART, 512), nvme.InvalidLogPage},
		{"SMART of one namespace", c, command(nvme.AdminGetLogPage,
			func(s *nvme.SQE) { *s = *getLog(nvme.LIDSMART, 512); s.SetNSID(1) }), nvme.InvalidField},
		{"effects of another command set", c,
			getLog(nvme.LIDEffects, 4096, func(g *nvme.GetLogSQE) { g.SetCSI(nvme.CSIZNS) }), nvme.InvalidField},
	} {
		reply, _ := r.do(x.c, 0, x.sqe, nil)
		wantStatus(t, x.name, reply.Status, x.want|nvme.DNR)
	}
	for _, nsid := range []uint32{0, nvme.NSIDBroadcast} {
		sqe := getLog(nvme.LIDSMART, 512)
		sqe.SetNSID(nsid)
		r.must(c, sqe, nil)
	}
}

func TestSupportedLogPagesAreThoseThatAnswer(t *testing.T) {
	r := newRig(t)
	for _, c := range []*nvmeof.Controller{r.connect(hostA, open), r.connect(hostA, nvme.DiscoveryNQN)} {
		_, data := r.must(c, getLog(nvme.LIDSupported, 1024), nil)
		for lid := range 256 {
			reply, _ := r.do(c, 0, getLog(uint8(lid), 4, rae), nil)
			if said := (*nvme.SupportedLogPages)(data).LID(uint8(lid)) != 0; said != reply.Status.OK() {
				t.Errorf("discovery %t: log %#x is announced %t and answers %v", c.Discovery, lid, said, reply.Status)
			}
		}
	}
}

func TestEffectsLogListsTheSupportedCommands(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	_, data := r.must(c, getLog(nvme.LIDEffects, 4096), nil)
	log := *(*nvme.EffectsLog)(data)
	table := nvmeof.NewNamespaceTable(testState().Subsystems[0].Namespaces, hostA)
	for op := range 256 {
		var p nvmeof.Plan
		sqe := command(uint8(op), func(s *nvme.SQE) { s.SetNSID(1); s.SetPSDT(nvme.PSDTSGL) })
		s := nvmeof.PlanIO(sqe, table, testLimits, &p)
		if said, is := log.IO(uint8(op))&nvme.EffectSupported != 0, s.Code() != nvme.InvalidOpcode; said != is {
			t.Errorf("I/O opcode %#x is announced %t and answers %v", op, said, s)
		}
		if op == nvme.OpFabrics {
			continue
		}
		if op == nvme.AdminAsyncEvent {
			continue // does not answer
		}
		reply, _ := r.do(c, 0, command(uint8(op), nil), nil)
		if said, is := log.Admin(uint8(op))&nvme.EffectSupported != 0,
			reply.Status.Code() != nvme.InvalidOpcode; said != is {
			t.Errorf("admin opcode %#x is announced %t and answers %v", op, said, reply.Status)
		}
	}
	for _, op := range []uint8{nvme.CmdWrite, nvme.CmdWriteZeroes, nvme.CmdDSM} {
		if log.IO(op)&nvme.EffectLBCC == 0 {
			t.Errorf("I/O opcode %#x is not said to change content", op)
		}
	}
}

func TestErrorLogHasTheNewestFirstAndForgetsTheOldest(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	for i := range uint16(70) {
		c.RecordErrors([]nvmeof.Failed{{QID: 1, CID: i, Opcode: nvme.CmdRead, NSID: 2, LBA: units.LBA(i) * 8,
			Status: nvme.LBAOutOfRange | nvme.DNR}})
	}
	_, data := r.must(c, getLog(nvme.LIDError, 64*64), nil)
	for i := range 64 {
		e := (*nvme.ErrorLogEntry)(data[i*64:])
		n := 69 - i
		if e.ErrorCount() != uint64(n+1) || e.CID() != uint16(n) || e.SQID() != 1 || e.NSID() != 2 ||
			e.LBA() != units.LBA(n)*8 || e.Opcode() != nvme.CmdRead ||
			e.Status() != nvme.LBAOutOfRange|nvme.DNR || e.TRTYPE() != nvme.TRTYPETCP ||
			e.ParamLocation() != nvme.NoParamLocation {
			t.Fatalf("entry %d: count %d, CID %d, status %v", i, e.ErrorCount(), e.CID(), e.Status())
		}
	}
	_, data = r.must(c, getLog(nvme.LIDSMART, 512), nil)
	if n := (*nvme.SMARTLog)(data).ErrorLogEntries(); n.Uint64() != 70 {
		t.Errorf("SMART counts %d errors", n.Uint64())
	}
}

func TestSMARTLogCountsTheHostsWork(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	r.usage = nvmeof.Usage{Reads: 3, Writes: 4, ReadBytes: 512000, WrittenBytes: 512001, MediaErrors: 5}
	r.now = 7201e9
	_, data := r.must(c, getLog(nvme.LIDSMART, 512), nil)
	l := (*nvme.SMARTLog)(data)
	for _, x := range []struct {
		what string
		got  nvme.Uint128
		want uint64
	}{{"reads", l.HostReads(), 3}, {"writes", l.HostWrites(), 4}, {"units read", l.DataUnitsRead(), 1},
		{"units written", l.DataUnitsWritten(), 2},
		{"media errors", l.MediaErrors(), 5}, {"power on hours", l.PowerOnHours(), 2}} {
		if x.got.Uint64() != x.want {
			t.Errorf("%s: %d, want %d", x.what, x.got.Uint64(), x.want)
		}
	}
	if l.CriticalWarning() != 0 || l.AvailableSpare() < l.AvailableSpareThreshold() {
		t.Error("a healthy subsystem warns")
	}
	_, data = r.must(c, getLog(nvme.LIDFirmwareSlot, 512), nil)
	if f := (*nvme.FirmwareSlotLog)(data); f.AFI() != 1 || f.FRS(1) != "fw1" {
		t.Errorf("firmware slot %d holds %q", f.AFI(), f.FRS(1))
	}
}

// anaLog reads the ANA log as text: change count, then group:state[namespaces].
func (r *rig) anaLog(c *nvmeof.Controller, change ...func(*nvme.GetLogSQE)) string {
	r.t.Helper()
	_, data := r.must(c, getLog(nvme.LIDANA, 4096, change...), nil)
	l := nvme.ANALog(data)
	if err := l.Check(); err != nil {
		r.t.Error(err)
	}
	s := fmt.Sprintf("change %d", l.ChangeCount())
	for g := range l.Groups() {
		var nsids []uint32
		for i := range g.Len() {
			nsids = append(nsids, g.NSID(i))
		}
		s += fmt.Sprintf(", %d:%v%v", g.ID(), g.State(), nsids)
	}
	return s
}

func TestANALogListsTheGroupsThatTheHostSees(t *testing.T) {
	r := newRig(t)
	st := testState()
	moved := block(7, 12, 48<<20, 1<<20)
	moved.ANAGroup, moved.ANAState = 3, nvme.ANAStateInaccessible
	first := block(1, 9, 1<<20, 8<<20)
	first.ANAGroup = 4 // its group comes last although its NSID comes first
	st.Subsystems[0].Namespaces = append(st.Subsystems[0].Namespaces[1:], moved, first)
	r.target.Apply(st)
	a, b := r.connect(hostA, open), r.connect(hostB, open)
	if got, want := r.anaLog(a), "change 0, 1:optimized[2 5], 3:inaccessible[7], 4:optimized[1]"; got != want {
		t.Errorf("hostA: %s, want %s", got, want)
	}
	if got, want := r.anaLog(b), "change 0, 1:optimized[2], 3:inaccessible[7], 4:optimized[1]"; got != want {
		t.Errorf("hostB: %s, want %s", got, want)
	}
	groupsOnly := func(g *nvme.GetLogSQE) { g.SetLSP(nvme.LSPANAGroupsOnly) }
	if got, want := r.anaLog(a, groupsOnly), "change 0, 1:optimized[], 3:inaccessible[], 4:optimized[]"; got != want {
		t.Errorf("groups only: %s, want %s", got, want)
	}
	st.Subsystems[0].Namespaces = nil
	r.target.Apply(st)
	if got, want := r.anaLog(a), "change 1, 1:optimized[]"; got != want {
		t.Errorf("without namespaces: %s, want %s", got, want)
	}
}

// discoveryLog reads the log as a host does: the header, then everything, until the generation has not changed. It
// returns a line for each entry.
func (r *rig) discoveryLog(d *nvmeof.Controller) (genctr uint64, lines []string) {
	r.t.Helper()
	_, head := r.must(d, getLog(nvme.LIDDiscovery, 1024, rae), nil)
	n := nvme.DiscoveryLog(head).Header().NUMREC()
	_, data := r.must(d, getLog(nvme.LIDDiscovery, 1024*(1+n)), nil)
	l := nvme.DiscoveryLog(data)
	if err := l.Check(); err != nil {
		r.t.Error(err)
	}
	for i := range l.Len() {
		e := l.Entry(i)
		if e.CNTLID() != nvme.CNTLIDDynamic || e.ASQSZ() < nvme.MinASQSZ || e.TREQ() != nvme.TREQDisableSQFlow {
			r.t.Errorf("entry %d: CNTLID %#x, ASQSZ %d, TREQ %#x", i, e.CNTLID(), e.ASQSZ(), e.TREQ())
		}
		lines = append(lines, fmt.Sprintf("%d port %d trtype %d adrfam %d %s %s %s eflags %d", e.SUBTYPE(), e.PORTID(),
			e.TRTYPE(), e.ADRFAM(), e.TRADDR(), e.TRSVCID(), e.SubNQN(), e.EFLAGS()))
	}
	return l.Header().GENCTR(), lines
}

func wantLines(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("got:\n%q\nwant:\n%q", got, want)
	}
}

func TestDiscoveryListsWhatTheHostMayUseAtAddressesItReaches(t *testing.T) {
	r := newRig(t)
	a := r.connect(hostA, nvme.DiscoveryNQN, func(a *args) { a.port = discoveryPort })
	_, lines := r.discoveryLog(a)
	wantLines(t, lines,
		"3 port 3 trtype 3 adrfam 1 192.0.2.7 8009 "+nvme.DiscoveryNQN+" eflags 3",
		"2 port 1 trtype 3 adrfam 1 192.0.2.7 4420 "+open+" eflags 0",
		"2 port 2 trtype 3 adrfam 1 10.1.1.1 4421 "+open+" eflags 0",
		"2 port 1 trtype 3 adrfam 1 192.0.2.7 4420 "+shut+" eflags 0",
		"2 port 2 trtype 3 adrfam 1 10.1.1.1 4421 "+shut+" eflags 0")
	// Another host, over IPv6 and an I/O port.
	b := r.connect(hostB, nvme.DiscoveryNQN, func(a *args) { a.addr = "2001:db8::7" })
	_, lines = r.discoveryLog(b)
	wantLines(t, lines,
		"3 port 1 trtype 3 adrfam 2 2001:db8::7 4420 "+nvme.DiscoveryNQN+" eflags 3",
		"3 port 3 trtype 3 adrfam 2 2001:db8::7 8009 "+nvme.DiscoveryNQN+" eflags 3",
		"2 port 1 trtype 3 adrfam 2 2001:db8::7 4420 "+open+" eflags 0",
		"2 port 2 trtype 3 adrfam 1 10.1.1.1 4421 "+open+" eflags 0")
}

func TestDiscoveryListsReferralsToEverybody(t *testing.T) {
	r := newRig(t)
	st := testState()
	st.Ports, st.Subsystems = []nvmeof.Port{discoveryPort}, nil
	st.Referrals = []nvmeof.Port{{ID: 9, TRTYPE: nvme.TRTYPETCP, ADRFAM: nvme.ADRFAMIPv4, Address: "10.9.9.9",
		Service: "8009", NQN: nvme.DiscoveryNQN}}
	r.target.Apply(st)
	d := r.connect(hostB, nvme.DiscoveryNQN, func(a *args) { a.port = discoveryPort })
	_, lines := r.discoveryLog(d)
	wantLines(t, lines,
		"3 port 3 trtype 3 adrfam 1 192.0.2.7 8009 "+nvme.DiscoveryNQN+" eflags 3",
		"1 port 9 trtype 3 adrfam 1 10.9.9.9 8009 "+nvme.DiscoveryNQN+" eflags 0")
}

func TestGenerationCounterMovesWithTheDiscoveryLogOnly(t *testing.T) {
	r := newRig(t)
	d := r.connect(hostA, nvme.DiscoveryNQN)
	gen := func() uint64 { g, _ := r.discoveryLog(d); return g }
	was := gen()
	for _, x := range []struct {
		name    string
		change  func(*nvmeof.State)
		changes bool
	}{
		{"nothing", func(*nvmeof.State) {}, false},
		{"a namespace", func(s *nvmeof.State) { s.Subsystems[0].Namespaces = s.Subsystems[0].Namespaces[1:] }, false},
		{"hosts", func(s *nvmeof.State) { s.Subsystems[1].Hosts = []string{hostA, hostB} }, true},
		{"any host", func(s *nvmeof.State) { s.Subsystems[1].AllowAnyHost = true }, true},
		{"a port", func(s *nvmeof.State) { s.Ports = s.Ports[:2] }, true},
		{"a subsystem less", func(s *nvmeof.State) { s.Subsystems = s.Subsystems[:1] }, true},
		{"a subsystem more", func(s *nvmeof.State) {
			s.Subsystems = append(s.Subsystems, nvmeof.SubsystemState{NQN: shut + "2"})
		}, true},
		{"a referral", func(s *nvmeof.State) { s.Referrals = []nvmeof.Port{{ID: 9, NQN: nvme.DiscoveryNQN}} }, true},
	} {
		r.target.Apply(testState()) // back to the start
		was = gen()
		st := testState()
		x.change(&st)
		r.target.Apply(st)
		if now := gen(); now != was && !x.changes || now != was+1 && x.changes {
			t.Errorf("%s: generation %d after %d", x.name, now, was)
		}
	}
}
