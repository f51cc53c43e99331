package nvmeof_test

import (
	"fmt"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/uuid"
)

func TestFeaturesKeepWhatIsSetAndKnowTheirDefaults(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	const changeable, perNS = nvme.FeatureChangeable, nvme.FeatureNSSpecific
	cases := []struct {
		name          string
		fid           uint8
		nsid          uint32
		set           uint32
		current, deft uint64
		caps          uint64
	}{
		{"arbitration", nvme.FIDArbitration, 0, 0x07070703, 0x07070703, 0, changeable},
		{"power management", nvme.FIDPowerManagement, 0, 0, 0, 0, changeable},
		{"temperature over", nvme.FIDTemperatureThreshold, 0, 400, 400, 343, changeable},
		{"error recovery", nvme.FIDErrorRecovery, 1, 0x1234, 0x1234, 0, changeable | perNS},
		{"volatile write cache", nvme.FIDVolatileWriteCache, 0, 1, 1, 1, 0},
		{"number of queues", nvme.FIDNumberOfQueues, 0, nvme.NumberOfQueues(2, 3), uint64(nvme.NumberOfQueues(2, 2)),
			uint64(nvme.NumberOfQueues(4, 4)), changeable},
		{"write atomicity", nvme.FIDWriteAtomicity, 0, 1, 1, 0, changeable},
		{"event configuration", nvme.FIDAsyncEvent, 0, nvme.AECNamespace, nvme.AECNamespace, 0, changeable},
		{"keep alive", nvme.FIDKeepAlive, 0, 5001, 5100, 0, changeable},
		{"command set profile", nvme.FIDIOCommandSetProfile, 0, 0, 0, 0, 0},
		{"extensions, two of them known", nvme.FIDExtensions, 0,
			nvme.ExtCredits | nvme.ExtPushdown | nvme.ExtKV | 1<<31, nvme.ExtCredits | nvme.ExtKV, 0, changeable},
	}
	for _, x := range cases {
		sqe := setFeature(x.fid, x.set)
		sqe.SetNSID(x.nsid)
		r.must(c, sqe, nil)
		for sel, want := range []uint64{x.current, x.deft, x.deft, x.caps} {
			sqe := getFeature(x.fid, uint8(sel))
			sqe.SetNSID(x.nsid)
			if got, _ := r.must(c, sqe, nil); got != want {
				t.Errorf("%s, SEL %d: %#x, want %#x", x.name, sel, got, want)
			}
		}
	}
	for _, sel := range []uint8{4, 7} {
		reply, _ := r.do(c, 0, getFeature(nvme.FIDArbitration, sel), nil)
		wantStatus(t, fmt.Sprintf("SEL %d", sel), reply.Status, nvme.InvalidField|nvme.DNR)
	}
}

func TestFeaturesRefuse(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	d := r.connect(hostA, nvme.DiscoveryNQN)
	with := func(sqe *nvme.SQE, nsid uint32) *nvme.SQE { sqe.SetNSID(nsid); return sqe }
	save := func(sqe *nvme.SQE) *nvme.SQE { sqe.Features().SetSV(true); return sqe }
	value := func(sqe *nvme.SQE, v uint32) *nvme.SQE { sqe.Features().SetValue(v); return sqe }
	cases := []struct {
		name string
		sqe  *nvme.SQE
		want nvme.Status
	}{
		{"save", save(setFeature(nvme.FIDArbitration, 0)), nvme.FeatureNotSaveable},
		{"set per namespace what is not", with(setFeature(nvme.FIDArbitration, 0), 1),
			nvme.FeatureNotNamespaceSpecific},
		{"set for no namespace", setFeature(nvme.FIDErrorRecovery, 1), nvme.InvalidNamespaceOrFormat},
		{"set for an absent namespace", with(setFeature(nvme.FIDErrorRecovery, 1), 9), nvme.InvalidNamespaceOrFormat},
		{"get of an absent namespace", with(getFeature(nvme.FIDErrorRecovery, 0), 9), nvme.InvalidNamespaceOrFormat},
		{"DULBE without support", with(setFeature(nvme.FIDErrorRecovery, nvme.ErrorRecoveryDULBE), 1),
			nvme.InvalidField},
		{"save extensions", save(setFeature(nvme.FIDExtensions, 1)), nvme.FeatureNotSaveable},
		{"extensions per namespace", with(setFeature(nvme.FIDExtensions, 1), 1), nvme.FeatureNotNamespaceSpecific},
		{"unknown, set", setFeature(0x55, 0), nvme.InvalidField},
		{"unknown, get", getFeature(0x55, 0), nvme.InvalidField},
		{"unknown, capabilities", getFeature(0x55, nvme.SELSupported), nvme.InvalidField},
		{"interrupts do not exist over fabrics", setFeature(nvme.FIDInterruptCoalescing, 0), nvme.InvalidField},
		{"power state 1", setFeature(nvme.FIDPowerManagement, 1), nvme.InvalidField},
		{"write cache off", setFeature(nvme.FIDVolatileWriteCache, 0), nvme.FeatureNotChangeable},
		{"65536 queues", setFeature(nvme.FIDNumberOfQueues, 0xFFFF), nvme.InvalidField},
		{"65536 completion queues", setFeature(nvme.FIDNumberOfQueues, 0xFFFF0000), nvme.InvalidField},
		{"temperature of a sensor, set", setFeature(nvme.FIDTemperatureThreshold, 1<<16), nvme.InvalidField},
		{"temperature of a sensor, get", value(getFeature(nvme.FIDTemperatureThreshold, 0), 1<<16), nvme.InvalidField},
		{"reserved kind of temperature", value(getFeature(nvme.FIDTemperatureThreshold, 0), 2<<20), nvme.InvalidField},
		{"host identifier comes with Connect", setFeature(nvme.FIDHostIdentifier, 1), nvme.CommandSequenceError},
		{"64-bit host identifier", getFeature(nvme.FIDHostIdentifier, 0), nvme.InvalidField},
		{"another combination of command sets", setFeature(nvme.FIDIOCommandSetProfile, 1), nvme.InvalidIOCommandSet},
	}
	for _, x := range cases {
		reply, _ := r.do(c, 0, x.sqe, nil)
		wantStatus(t, x.name, reply.Status, x.want|nvme.DNR)
	}
	bad := make([]byte, 512)
	bad[0] = 2
	reply, _ := r.do(c, 0, setFeature(nvme.FIDHostBehavior, 0), bad)
	wantStatus(t, "ACRE 2", reply.Status, nvme.InvalidField|nvme.DNR)
	for _, sqe := range []*nvme.SQE{getFeature(nvme.FIDExtensions, 0), setFeature(nvme.FIDExtensions, 1),
		getFeature(nvme.FIDNumberOfQueues, 0), setFeature(nvme.FIDArbitration, 0), getFeature(nvme.FIDTimestamp, 0)} {
		reply, _ := r.do(d, 0, sqe, nil)
		wantStatus(t, fmt.Sprintf("feature %#x at discovery", sqe.Features().FID()), reply.Status,
			nvme.InvalidField|nvme.DNR)
	}
}

func TestErrorRecoveryIsKeptPerNamespace(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	set := func(nsid, v uint32) {
		sqe := setFeature(nvme.FIDErrorRecovery, v)
		sqe.SetNSID(nsid)
		r.must(c, sqe, nil)
	}
	want := func(nsid uint32, sel uint8, v uint64) {
		t.Helper()
		sqe := getFeature(nvme.FIDErrorRecovery, sel)
		sqe.SetNSID(nsid)
		if got, _ := r.must(c, sqe, nil); got != v {
			t.Errorf("namespace %d, SEL %d: %d, want %d", nsid, sel, got, v)
		}
	}
	set(1, 11)
	want(1, nvme.SELCurrent, 11)
	want(1, nvme.SELDefault, 0)
	want(2, nvme.SELCurrent, 0)
	set(nvme.NSIDBroadcast, 22)
	want(1, nvme.SELCurrent, 22)
	want(2, nvme.SELCurrent, 22)
	set(2, 33)
	want(1, nvme.SELCurrent, 22)
	want(2, nvme.SELCurrent, 33)
}

func TestNumberOfQueuesIsSetBeforeThereAreAny(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	for _, x := range []struct{ sqs, cqs, want uint16 }{{1, 1, 1}, {64, 64, 4}, {3, 2, 2}, {2, 3, 2}} {
		got, _ := r.must(c, setFeature(nvme.FIDNumberOfQueues, nvme.NumberOfQueues(x.sqs, x.cqs)), nil)
		if uint32(got) != nvme.NumberOfQueues(x.want, x.want) {
			t.Errorf("asked for %d and %d: %#x", x.sqs, x.cqs, got)
		}
	}
	wantStatus(t, "a queue beyond", r.tryConnect(hostA, open, queue(c, 3)).Status, nvme.ConnectInvalidParameters|
		nvme.DNR)
	r.tryConnect(hostA, open, queue(c, 2))
	reply, _ := r.do(c, 0, setFeature(nvme.FIDNumberOfQueues, 0), nil)
	wantStatus(t, "after a queue exists", reply.Status, nvme.CommandSequenceError|nvme.DNR)
}

func TestTimestampCountsOnFromWhatTheHostSet(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	read := func(sel uint8) *nvme.Timestamp {
		_, data := r.must(c, getFeature(nvme.FIDTimestamp, sel), nil)
		return (*nvme.Timestamp)(data)
	}
	r.now = 5000 * ms
	if ts := read(nvme.SELCurrent); ts.UnixMS() != 1_005_000 || ts.Origin() != nvme.TimestampFromReset {
		t.Errorf("%d ms, origin %d before it was set", ts.UnixMS(), ts.Origin())
	}
	var ts nvme.Timestamp
	ts.SetUnixMS(nvme.MaxTimestampMS)
	r.must(c, setFeature(nvme.FIDTimestamp, 0), ts[:])
	r.now += 3 * ms
	if ts := read(nvme.SELCurrent); ts.UnixMS() != 2 || ts.Origin() != nvme.TimestampFromHost {
		t.Errorf("%d ms, origin %d, want 2: it wraps at 48 bits", ts.UnixMS(), ts.Origin())
	}
	if ts := read(nvme.SELDefault); ts.Origin() != nvme.TimestampFromReset {
		t.Errorf("default has origin %d", ts.Origin())
	}
}

func TestHostBehaviourAndIdentifierReadBack(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	var b nvme.HostBehavior
	b.SetACRE(1)
	b.SetLBAFEE(1)
	r.must(c, setFeature(nvme.FIDHostBehavior, 0), b[:])
	if _, data := r.must(c, getFeature(nvme.FIDHostBehavior, nvme.SELCurrent), nil); *(*nvme.HostBehavior)(data) != b {
		t.Error("host behaviour differs")
	}
	if _, data := r.must(c, getFeature(nvme.FIDHostBehavior, nvme.SELDefault),
		nil); *(*nvme.HostBehavior)(data) != (nvme.HostBehavior{}) {
		t.Error("the default is not zeroes")
	}
	sqe := getFeature(nvme.FIDHostIdentifier, 0)
	sqe.Features().SetValue(nvme.HostIdentifierEXHID)
	if _, data := r.must(c, sqe, nil); uuid.UUID(data) != c.HostID {
		t.Errorf("host identifier %x, want %x", data, c.HostID)
	}
	other := r.connect(hostA, open)
	if _, data := r.must(other, getFeature(nvme.FIDHostBehavior, 0), nil); data[0] != 0 {
		t.Error("one controller's features show in another")
	}
}
