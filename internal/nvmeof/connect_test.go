package nvmeof_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
)

// NVMe Base 2.0, section 6.3: each failure of Connect has its status, and the invalid parameter is named.
func TestConnectRefusesWithTheDocumentedStatus(t *testing.T) {
	invalid := func(iattr, ipo uint64) (nvme.Status, uint64) {
		return nvme.ConnectInvalidParameters | nvme.DNR, iattr<<16 | ipo
	}
	param, _ := invalid(0, 0)
	cases := []struct {
		name   string
		host   string
		sub    string
		change func(*args)
		status nvme.Status
		result uint64
	}{
		{"record format", hostA, open, func(a *args) { a.c.SetRECFMT(1) }, nvme.ConnectIncompatibleFormat | nvme.DNR,
			0},
		{"unterminated SUBNQN", hostA, open, func(a *args) { fill(a.data[256:512]) }, param, 1<<16 | 256},
		{"empty SUBNQN", hostA, "", nil, param, 1<<16 | 256},
		{"unterminated HOSTNQN", hostA, open, func(a *args) { fill(a.data[512:768]) }, param, 1<<16 | 512},
		{"unknown subsystem", hostA, open + "x", nil, param, 1<<16 | 256},
		{"subsystem on a discovery port", hostA, open, func(a *args) { a.port = discoveryPort }, param, 1<<16 | 256},
		{"host not allowed", hostB, shut, nil, nvme.ConnectInvalidHost | nvme.DNR, 0},
		{"SQSIZE 0", hostA, open, func(a *args) { a.c.SetSQSIZE(0) }, param, 44},
		{"SQSIZE beyond MQES", hostA, open, func(a *args) { a.c.SetSQSIZE(129) }, param, 44},
		{"static CNTLID", hostA, open, func(a *args) { a.data.SetCNTLID(1) }, param, 1<<16 | 16},
		{"any static CNTLID", hostA, open, func(a *args) { a.data.SetCNTLID(nvme.CNTLIDStatic) }, param, 1<<16 | 16},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			var change []func(*args)
			if c.change != nil {
				change = append(change, c.change)
			}
			reply := r.tryConnect(c.host, c.sub, change...)
			wantStatus(t, "status", reply.Status, c.status)
			if reply.Result != c.result {
				t.Errorf("IATTR and IPO %#x, want %#x", reply.Result, c.result)
			}
			if reply.Label == "" || reply.Reason == "" {
				t.Error("neither label nor reason for log and metric")
			}
			if n := len(r.target.Controllers()); n != 0 {
				t.Errorf("%d controllers after a refusal", n)
			}
		})
	}
}

func fill(b []byte) {
	for i := range b {
		b[i] = 'x'
	}
}

func TestConnectOfIOQueueRefusesWithTheDocumentedStatus(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	raw := r.tryConnect(hostA, open).Controller // not enabled
	disc := r.connect(hostA, nvme.DiscoveryNQN)
	gone := r.connect(hostB, open)
	r.target.Disconnected(r.now, gone, 0, gone.Admin)
	r.wantActions()
	if reply := r.tryConnect(hostA, open, queue(c, 1)); !reply.Status.OK() {
		t.Fatal(reply.Status)
	}
	param := nvme.ConnectInvalidParameters | nvme.DNR
	sequence := nvme.CommandSequenceError | nvme.DNR
	cases := []struct {
		name, host, sub string
		change          func(*args)
		status          nvme.Status
		result          uint64
	}{
		{"unknown CNTLID", hostA, open, func(a *args) { queue(c, 2)(a); a.data.SetCNTLID(999) }, param, 1<<16 | 16},
		{"dynamic CNTLID", hostA, open, func(a *args) { queue(c, 2)(a); a.data.SetCNTLID(nvme.CNTLIDDynamic) }, param,
			1<<16 | 16},
		{"controller that is gone", hostB, open, queue(gone, 1), param, 1<<16 | 16},
		{"controller of another subsystem", hostA, shut, queue(c, 2), param, 1<<16 | 16},
		{"another host", hostB, open, queue(c, 2), param, 1<<16 | 512},
		{"discovery controller", hostA, nvme.DiscoveryNQN, queue(disc, 1), param, 42},
		{"controller not enabled", hostA, open, queue(raw, 1), sequence, 0},
		{"queue exists", hostA, open, queue(c, 1), sequence, 0},
		{"QID out of range", hostA, open, queue(c, 5), param, 42},
		{"SQSIZE out of range", hostA, open, func(a *args) { queue(c, 2)(a); a.c.SetSQSIZE(200) }, param, 44},
	}
	for _, x := range cases {
		reply := r.tryConnect(x.host, x.sub, x.change)
		wantStatus(t, x.name, reply.Status, x.status)
		if reply.Result != x.result {
			t.Errorf("%s: IATTR and IPO %#x, want %#x", x.name, reply.Result, x.result)
		}
	}
	if got := len(c.Queues()); got != 2 {
		t.Errorf("%d queues after refusals, want the admin queue and queue 1", got)
	}
}

func TestConnectGivesTheQueueWhatWasAskedFor(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	reply := r.tryConnect(hostA, open, queue(c, 3), func(a *args) {
		a.c.SetSQSIZE(128)
		a.c.SetCATTR(nvme.CATTRDisableSQFlow)
	})
	if !reply.Status.OK() || reply.QID != 3 || reply.Entries != 129 || !reply.NoSQFlow || reply.Controller != c ||
		uint16(reply.Result) != c.ID {
		t.Errorf("reply %+v", reply)
	}
	if got := reply.Table.AppendIDs(nil, 0, 10); fmt.Sprint(got) != "[1 2 5]" {
		t.Errorf("hostA sees namespaces %v", got)
	}
	if id, ok := c.QueueConn(3); !ok || id != r.last {
		t.Errorf("queue 3 is connection %d, %t", id, ok)
	}
	b := r.connect(hostB, open)
	if got := r.tryConnect(hostB, open, queue(b, 1)).Table.AppendIDs(nil, 0, 10); fmt.Sprint(got) != "[1 2]" {
		t.Errorf("hostB sees namespaces %v", got)
	}
}

func TestConnectIsBusyAtTheLimitsAndMayBeRetried(t *testing.T) {
	r := newRig(t, func(c *nvmeof.Config) { c.MaxControllers, c.MaxHosts = 3, 1 })
	a := r.connect(hostA, open)
	r.connect(hostA, open)
	reply := r.tryConnect(hostB, open)
	wantStatus(t, "a second host", reply.Status, nvme.ConnectControllerBusy)
	if reply.Label != "hosts" {
		t.Errorf("label %q", reply.Label)
	}
	r.connect(hostB, nvme.DiscoveryNQN) // does not count
	r.connect(hostA, open)
	reply = r.tryConnect(hostA, open)
	wantStatus(t, "a fourth controller", reply.Status, nvme.ConnectControllerBusy)
	if reply.Label != "controllers" {
		t.Errorf("label %q", reply.Label)
	}
	r.target.Disconnected(r.now, a, 0, a.Admin)
	r.connect(hostA, open)
}

func TestControllersAreDynamicAndNumbersAreNotReusedSoon(t *testing.T) {
	r := newRig(t)
	seen := map[uint16]bool{}
	for range 1000 {
		c := r.connect(hostA, open)
		if seen[c.ID] || c.ID == 0 || c.ID >= 0xFFF0 {
			t.Fatalf("CNTLID %#x", c.ID)
		}
		seen[c.ID] = true
		r.target.Disconnected(r.now, c, 0, c.Admin)
		r.actions()
	}
}

func TestHostsAreJoinedWhileTheyHaveAnIOQueue(t *testing.T) {
	r := newRig(t)
	want := func(sub string, hosts ...string) {
		t.Helper()
		var got []string
		r.target.Joined(sub, func(h string) { got = append(got, h) })
		if !slices.Equal(got, hosts) {
			t.Errorf("%q are joined to %s, want %q", got, sub, hosts)
		}
	}
	r.connect(hostA, open)
	c := r.connect(hostB, open)
	want(open)
	q := r.tryConnect(hostB, open, func(a *args) {
		a.c.SetQID(1)
		a.data.SetCNTLID(c.ID)
	})
	if !q.Status.OK() {
		t.Fatal(q.Status)
	}
	want(open, hostB)
	want(shut)
	want("nqn.2026-11.example.jbofd:unknown")
	r.target.Disconnected(r.now, c, 1, r.last)
	want(open)
}

func TestControllerNumbersWrapAroundThoseInUse(t *testing.T) {
	r := newRig(t)
	first := r.connect(hostA, open)
	for range 0xFFF0 {
		c := r.tryConnect(hostB, open).Controller
		if c.ID == first.ID {
			t.Fatal("a number in use was given again")
		}
		r.target.Disconnected(r.now, c, 0, c.Admin)
	}
	if n := len(r.target.Controllers()); n != 1 {
		t.Errorf("%d controllers", n)
	}
}

func TestPropertiesReadAsTheSpecificationLaysThemOut(t *testing.T) {
	r := newRig(t)
	c := r.tryConnect(hostA, open).Controller
	cap := nvme.CAP(r.property(c, nvme.PropCAP))
	if cap.MQES() != 128 || !cap.CQR() || cap.CSS() != nvme.CAPCSSNVM|nvme.CAPCSSIOCS || cap.TO() == 0 ||
		cap.MPSMIN() != 0 || cap.NSSRS() || !cap.CRWMS() {
		t.Errorf("CAP %#x", uint64(cap))
	}
	if v := r.property(c, nvme.PropVS); v != uint64(nvme.Version2_0) {
		t.Errorf("VS %#x", v)
	}
	if v := r.property(c, nvme.PropCC); v != 0 {
		t.Errorf("CC %#x before it was written", v)
	}
	if v := r.property(c, nvme.PropCSTS); v != 0 {
		t.Errorf("CSTS %#x before enabling", v)
	}
	if v := r.property(c, nvme.PropCRTO); v == 0 {
		t.Error("CRTO 0")
	}
	r.setCC(c, enable)
	if v := r.property(c, nvme.PropCC); v != uint64(enable) {
		t.Errorf("CC %#x, written %#x", v, enable)
	}
}

func TestPropertyAccessIsRefused(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	r.tryConnect(hostA, open, queue(c, 1))
	get, set := uint8(nvme.FabricsPropertyGet), uint8(nvme.FabricsPropertySet)
	cases := []struct {
		name   string
		fctype uint8
		off    uint32
		attrib byte
		qid    uint16
		want   nvme.Status
	}{
		{"offset of nothing", get, 0x30, 0, 0, nvme.InvalidField},
		{"misaligned offset", get, nvme.PropVS + 2, 0, 0, nvme.InvalidField},
		{"CAP as 4 bytes", get, nvme.PropCAP, 0, 0, nvme.InvalidField},
		{"CSTS as 8 bytes", get, nvme.PropCSTS, 1, 0, nvme.InvalidField},
		{"reserved size", get, nvme.PropCSTS, 2, 0, nvme.InvalidField},
		{"NSSD", get, nvme.PropNSSD, 0, 0, nvme.InvalidField},
		{"set read-only CAP", set, nvme.PropCAP, 1, 0, nvme.InvalidField},
		{"set read-only CSTS", set, nvme.PropCSTS, 0, 0, nvme.InvalidField},
		{"set NSSR without support", set, nvme.PropNSSR, 0, 0, nvme.InvalidField},
		{"set CC as 8 bytes", set, nvme.PropCC, 1, 0, nvme.InvalidField},
		{"get on an I/O queue", get, nvme.PropCSTS, 0, 1, nvme.InvalidOpcode},
		{"set on an I/O queue", set, nvme.PropCC, 0, 1, nvme.InvalidOpcode},
		{"authentication", nvme.FabricsAuthSend, 0, 0, 0, nvme.InvalidOpcode},
		{"reserved fabrics command", 0x55, 0, 0, 0, nvme.InvalidOpcode},
		{"Connect on a connected queue", nvme.FabricsConnect, 0, 0, 0, nvme.CommandSequenceError},
		{"Connect on a connected I/O queue", nvme.FabricsConnect, 0, 0, 1, nvme.CommandSequenceError},
	}
	for _, x := range cases {
		var sqe nvme.SQE
		sqe.Property().Init(x.fctype, x.off)
		sqe[40] = x.attrib
		reply, _ := r.do(c, x.qid, &sqe, nil)
		wantStatus(t, x.name, reply.Status, x.want|nvme.DNR)
	}
	if !r.csts(c).RDY() {
		t.Error("a refused Property Set changed the controller")
	}
}

func TestEnablingMakesReadyAndAWrongConfigurationIsFatal(t *testing.T) {
	cases := []struct {
		name string
		cc   nvme.CC
		want nvme.CSTS
	}{
		{"as Linux does", enable.WithCSS(nvme.CCCSSIOCS), nvme.CSTSRDY},
		{"NVM command set", enable, nvme.CSTSRDY},
		{"page size", enable.WithMPS(1), nvme.CSTSCFS},
		{"arbitration", enable.WithAMS(nvme.CCAMSWeight), nvme.CSTSCFS},
		{"command set not in CAP.CSS", enable.WithCSS(nvme.CCCSSAdmin), nvme.CSTSCFS},
		{"reserved command set", enable.WithCSS(3), nvme.CSTSCFS},
		{"SQ entry size", enable.WithIOSQES(5), nvme.CSTSCFS},
		{"CQ entry size", enable.WithIOCQES(6), nvme.CSTSCFS},
	}
	for _, x := range cases {
		r := newRig(t)
		c := r.tryConnect(hostA, open).Controller
		r.setCC(c, x.cc)
		if got := r.csts(c); got != x.want {
			t.Errorf("%s: CSTS %#x, want %#x", x.name, got, x.want)
		}
		if x.want == nvme.CSTSCFS {
			r.setCC(c, 0)
			r.setCC(c, enable)
			if got := r.csts(c); got != nvme.CSTSRDY {
				t.Errorf("%s: CSTS %#x after a reset, want ready", x.name, got)
			}
		}
	}
	r := newRig(t)
	d := r.tryConnect(hostA, nvme.DiscoveryNQN).Controller
	r.setCC(d, nvme.CC(0).WithEN(true)) // no I/O queues, no entry sizes
	if !r.csts(d).RDY() {
		t.Error("discovery controller is not ready")
	}
}

func TestCommandsBeforeEnablingAreOutOfSequence(t *testing.T) {
	r := newRig(t)
	c := r.tryConnect(hostA, open).Controller
	for _, op := range []uint8{nvme.AdminIdentify, nvme.AdminKeepAlive, nvme.AdminGetFeatures, nvme.AdminAsyncEvent} {
		reply, _ := r.do(c, 0, command(op, nil), nil)
		wantStatus(t, fmt.Sprintf("opcode %#x", op), reply.Status, nvme.CommandSequenceError|nvme.DNR)
	}
}

func TestResetEndsIOQueuesAndForgetsWhatTheHostSet(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	r.must(c, setFeature(nvme.FIDNumberOfQueues, nvme.NumberOfQueues(2, 2)), nil)
	r.must(c, setFeature(nvme.FIDAsyncEvent, nvme.AECNamespace), nil)
	r.tryConnect(hostA, open, queue(c, 1))
	r.tryConnect(hostA, open, queue(c, 2))
	first, second := r.aer(c), r.aer(c)
	r.setCC(c, enable.WithEN(false))
	aborted := nvme.AbortRequested.String()
	r.wantActions(fmt.Sprintf("event %d: %s", first, aborted), fmt.Sprintf("event %d: %s", second, aborted),
		fmt.Sprintf("close %d: controller reset", r.last), fmt.Sprintf("close %d: controller reset", r.last-1))
	if r.csts(c) != 0 {
		t.Errorf("CSTS %#x after a reset", r.csts(c))
	}
	// When their connections end later, queues that have the same numbers by then must not be affected.
	old := r.last
	r.setCC(c, enable)
	if reply := r.tryConnect(hostA, open, queue(c, 4)); !reply.Status.OK() {
		t.Errorf("queue 4 after a reset: %v; the number of queues agreed on before is forgotten", reply.Status)
	}
	if reply := r.tryConnect(hostA, open, queue(c, 2)); !reply.Status.OK() {
		t.Error(reply.Status)
	}
	r.target.Disconnected(r.now, c, 2, old)
	if _, ok := c.QueueConn(2); !ok {
		t.Error("the old connection's end took the new queue 2 away")
	}
	if v, _ := r.must(c, getFeature(nvme.FIDAsyncEvent, nvme.SELCurrent), nil); v != 0 {
		t.Errorf("event configuration %#x survived the reset", v)
	}
	for range 4 {
		r.aer(c) // the earlier four do not count any more
	}
}

func TestShutdownOfIdleDrivesCompletesAtOnceAndStopsCommands(t *testing.T) {
	for _, shn := range []uint8{nvme.SHNNormal, nvme.SHNAbrupt} {
		r := newRig(t)
		c := r.connect(hostA, open)
		r.setCC(c, enable.WithSHN(shn))
		if got := r.csts(c); got.SHST() != 2 {
			t.Errorf("SHST %d after SHN %d", got.SHST(), shn)
		}
		reply, _ := r.do(c, 0, command(nvme.AdminKeepAlive, nil), nil)
		wantStatus(t, "after shutdown", reply.Status, nvme.CommandSequenceError|nvme.DNR)
		r.setCC(c, 0)
		r.setCC(c, enable)
		if got := r.csts(c); got != nvme.CSTSRDY {
			t.Errorf("CSTS %#x after shutdown, reset and enable", got)
		}
	}
}

func TestDisconnectEndsAnIOQueueOnly(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	r.tryConnect(hostA, open, queue(c, 1))
	var sqe nvme.SQE
	sqe.InitDisconnect()
	reply, _ := r.do(c, 0, &sqe, nil)
	wantStatus(t, "Disconnect on the admin queue", reply.Status, nvme.InvalidQueueType|nvme.DNR)
	reply, _ = r.do(c, 1, &sqe, nil)
	if !reply.Status.OK() || !reply.Disconnect {
		t.Errorf("Disconnect on queue 1: %+v", reply)
	}
	r.target.Disconnected(r.now, c, 1, r.last)
	r.noActions()
	if reply := r.tryConnect(hostA, open, queue(c, 1)); !reply.Status.OK() {
		t.Errorf("queue 1 again: %v", reply.Status)
	}
}

func TestLosingTheAdminQueueEndsTheAssociation(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	r.tryConnect(hostA, open, queue(c, 1))
	io := r.last
	r.aer(c)
	r.target.Disconnected(r.now, c, 0, c.Admin)
	r.wantActions(fmt.Sprintf("close %d: the admin queue was disconnected", io))
	reply, _ := r.do(c, 0, command(nvme.AdminKeepAlive, nil), nil)
	wantStatus(t, "a command after the end", reply.Status, nvme.CommandSequenceError|nvme.DNR)
	r.target.Disconnected(r.now, c, 1, io)
	r.target.Disconnected(r.now, c, 0, c.Admin) // once more, harmless
	r.noActions()
}

func TestKATOIsRaisedToTheMinimumAndRoundedUp(t *testing.T) {
	r := newRig(t)
	for _, x := range []struct{ ask, want uint32 }{{0, 0}, {1, 1000}, {1000, 1000}, {1001, 1100}, {5000, 5000},
		{5050, 5100},
		{0xFFFFFFFF, 4294967200}, {4294967201, 4294967200}} {
		c := r.connect(hostA, open, withKATO(x.ask))
		if c.KATOMS() != x.want {
			t.Errorf("KATO %d became %d, want %d", x.ask, c.KATOMS(), x.want)
		}
		if v, _ := r.must(c, getFeature(nvme.FIDKeepAlive, nvme.SELCurrent), nil); uint32(v) != x.want {
			t.Errorf("KATO %d reads %d by feature", x.ask, v)
		}
		if v, _ := r.must(c, setFeature(nvme.FIDKeepAlive, x.ask), nil); uint32(v) != x.want {
			t.Errorf("KATO %d by feature: %d, want %d", x.ask, v, x.want)
		}
		r.target.Disconnected(r.now, c, 0, c.Admin)
	}
}

// silent is a driver whose connections have had no traffic.
func silent(*nvmeof.Controller) int64 { return 0 }

func TestSilenceForKATOEndsTheAssociationAndIsReported(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open, withKATO(5000))
	r.tryConnect(hostA, open, queue(c, 1))
	io := r.last
	r.must(c, command(nvme.AdminKeepAlive, nil), nil)
	quiet := r.connect(hostB, open) // no KATO: never expires
	at, ok := r.target.NextExpiry()
	if !ok || at < r.now+5000*ms || at > r.now+5200*ms {
		t.Fatalf("next expiry in %d ms", (at-r.now)/ms)
	}
	r.target.Expire(at-1, silent)
	r.noActions()
	r.target.Expire(at, silent)
	r.wantActions("expired 1 after 5100ms, last Keep Alive",
		fmt.Sprintf("close %d: keep alive timeout", io), fmt.Sprintf("close %d: keep alive timeout", c.Admin))
	if _, ok := r.target.NextExpiry(); ok {
		t.Error("a timer is still running")
	}
	if got := r.target.Controllers(); len(got) != 1 || got[0] != quiet {
		t.Errorf("controllers %v", got)
	}
}

func TestExpiryNamesTheConnectWhenNothingCameAfterIt(t *testing.T) {
	r := newRig(t)
	r.tryConnect(hostA, open, withKATO(1000))
	r.target.Expire(2000*ms, silent)
	if got := r.actions(); !strings.Contains(got, "last Fabrics") {
		t.Errorf("%q", got)
	}
}

func TestAnyCommandKeepsTheAssociationAlive(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open, withKATO(2000))
	for range 5 {
		r.now += 1900 * ms
		r.target.Expire(r.now, silent)
		r.noActions()
		r.property(c, nvme.PropCSTS)
	}
	// Traffic based keep alive: the driver has seen I/O, which the machine does not see.
	io := int64(0)
	for range 5 {
		r.now += 1900 * ms
		io = r.now
		r.target.Expire(r.now+1000*ms, func(*nvmeof.Controller) int64 { return io })
		r.noActions()
	}
	if at, ok := r.target.NextExpiry(); !ok || at != io+2100*ms {
		t.Errorf("next expiry %d ms after the last I/O", (at-io)/ms)
	}
	r.target.Expire(io+2100*ms, func(*nvmeof.Controller) int64 { return io })
	if !strings.HasPrefix(r.actions(), "expired") {
		t.Error("not expired after the I/O stopped")
	}
}

func TestKATOByFeatureTakesEffectAtOnce(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	if _, ok := r.target.NextExpiry(); ok {
		t.Fatal("a timer without KATO")
	}
	r.must(c, setFeature(nvme.FIDKeepAlive, 3000), nil)
	if at, _ := r.target.NextExpiry(); at != r.now+3100*ms {
		t.Errorf("expiry %d ms after the command", (at-r.now)/ms)
	}
	r.must(c, setFeature(nvme.FIDKeepAlive, 0), nil)
	if _, ok := r.target.NextExpiry(); ok {
		t.Error("KATO 0 left a timer running")
	}
}

func TestDiscoveryWithoutKATOEndsWhenIdle(t *testing.T) {
	r := newRig(t)
	d := r.connect(hostA, nvme.DiscoveryNQN)
	if at, _ := r.target.NextExpiry(); at != r.now+60100*ms {
		t.Errorf("expiry %d ms after Connect", (at-r.now)/ms)
	}
	persistent := r.connect(hostA, nvme.DiscoveryNQN, withKATO(120000))
	r.target.Expire(r.now+61000*ms, silent)
	r.wantActions(fmt.Sprintf("expired %d after 61000ms, last Fabrics", d.ID),
		fmt.Sprintf("close %d: keep alive timeout", d.Admin))
	if got := r.target.Controllers(); len(got) != 1 || got[0] != persistent {
		t.Errorf("controllers %v", got)
	}
}
