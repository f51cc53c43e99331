package nvmeof_test

import (
	"fmt"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/units"
)

// grown is testState with namespace 2 larger.
func grown(to units.Bytes) nvmeof.State {
	st := testState()
	st.Subsystems[0].Namespaces[1] = block(2, 12, 16<<20, to)
	return st
}

// changedNamespaces reads the Changed Namespace List, which ends the event's mask
// unless retained.
func (r *rig) changedNamespaces(c *nvmeof.Controller, change ...func(*nvme.GetLogSQE)) string {
	r.t.Helper()
	_, data := r.must(c, getLog(nvme.LIDChangedNS, 4096, change...), nil)
	return fmt.Sprint(ids((*nvme.NSList)(data)))
}

func event(slot int, e nvme.AER) string { return fmt.Sprintf("event %d: %#x", slot, uint64(e)) }

func TestEventRequestsBeyondTheLimitAreRefused(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	for range 4 {
		r.aer(c)
	}
	reply, _ := r.do(c, 0, command(nvme.AdminAsyncEvent, nil), nil)
	wantStatus(t, "a fifth request", reply.Status, nvme.AERLimitExceeded|nvme.DNR)
}

func TestEventsComeOnlyWhereEnabled(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	r.aer(c)
	r.target.Apply(grown(20 << 20))
	r.noActions()
	if got := r.changedNamespaces(c); got != "[2]" {
		t.Errorf("changed namespaces %s: the list is kept without the event, too", got)
	}
	r.must(c, setFeature(nvme.FIDAsyncEvent, nvme.AECANA), nil)
	r.target.Apply(grown(24 << 20))
	r.wantActions(event(r.slot-2, nvme.AERANAChanged))
}

func TestNamespaceEventIsMaskedUntilItsLogIsRead(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	r.must(c, setFeature(nvme.FIDAsyncEvent, nvme.AECNamespace), nil)
	first := r.aer(c)
	second := r.aer(c)
	r.target.Apply(grown(20 << 20))
	r.wantActions(event(first, nvme.AERNamespaceChanged))
	r.target.Apply(grown(24 << 20))
	r.noActions() // masked
	if got := r.changedNamespaces(c, rae); got != "[2]" {
		t.Errorf("changed namespaces %s", got)
	}
	r.target.Apply(grown(28 << 20))
	r.noActions() // still masked: RAE
	if got := r.changedNamespaces(c); got != "[2]" {
		t.Errorf("changed namespaces %s", got)
	}
	if got := r.changedNamespaces(c); got != "[]" {
		t.Errorf("changed namespaces %s after they were read", got)
	}
	r.target.Apply(grown(32 << 20))
	r.wantActions(event(second, nvme.AERNamespaceChanged))
}

func TestAFailedReadOfTheLogForgetsNothing(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	r.must(c, setFeature(nvme.FIDAsyncEvent, nvme.AECNamespace), nil)
	r.aer(c)
	r.aer(c)
	r.target.Apply(grown(20 << 20))
	r.actions()
	r.do(c, 0, getLog(nvme.LIDChangedNS, 4, at(8192)), nil)
	r.target.Apply(grown(24 << 20))
	r.noActions()
	if got := r.changedNamespaces(c); got != "[2]" {
		t.Errorf("changed namespaces %s", got)
	}
}

func TestAnEventWaitsForARequest(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	r.must(c, setFeature(nvme.FIDAsyncEvent, nvme.AECNamespace|nvme.AECANA), nil)
	r.target.Apply(grown(20 << 20))
	r.target.Apply(grown(24 << 20))
	r.noActions()
	first := r.aer(c)
	r.wantActions(event(first, nvme.AERNamespaceChanged))
	second := r.aer(c)
	r.wantActions(event(second, nvme.AERANAChanged))
	r.aer(c)
	r.noActions()
}

func TestEventsReachOnlyHostsThatSeeTheChange(t *testing.T) {
	r := newRig(t)
	a, b, other := r.connect(hostA, open), r.connect(hostB, open), r.connect(hostA, shut)
	var slots []int
	for _, c := range []*nvmeof.Controller{a, b, other} {
		r.must(c, setFeature(nvme.FIDAsyncEvent, nvme.AECNamespace), nil)
		slots = append(slots, r.aer(c))
	}
	st := testState()
	st.Subsystems[0].Namespaces[2] = block(5, 12, 32<<20, 8<<20) // grown
	st.Subsystems[0].Namespaces[2].Hosts = []string{hostA}
	r.target.Apply(st)
	r.wantActions(event(slots[0], nvme.AERNamespaceChanged))
	st = testState()
	st.Subsystems[0].Namespaces[2] = block(5, 12, 32<<20, 8<<20)
	st.Subsystems[0].Namespaces[2].Hosts = []string{hostB} // handed over
	r.changedNamespaces(a)
	slots[0] = r.aer(a)
	r.target.Apply(st)
	r.wantActions(event(slots[0], nvme.AERNamespaceChanged), event(slots[1], nvme.AERNamespaceChanged))
	if got := r.changedNamespaces(b); got != "[5]" {
		t.Errorf("hostB: changed namespaces %s", got)
	}
}

func TestANAChangeIsReportedWithItsCount(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	other := r.connect(hostB, open)
	r.must(c, setFeature(nvme.FIDAsyncEvent, nvme.AECANA|nvme.AECNamespace), nil)
	slot := r.aer(c)
	st := testState()
	for _, n := range st.Subsystems[0].Namespaces {
		n.ANAState = nvme.ANAStateChange
	}
	r.target.Apply(st)
	r.wantActions(event(slot, nvme.AERANAChanged)) // attributes have not changed
	want := "change 1, 1:change[1 2 5]"
	if got := r.anaLog(c); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got := r.anaLog(other); got != "change 1, 1:change[1 2]" {
		t.Errorf("hostB: %s: one change counts once, however many controllers see it", got)
	}
	slot = r.aer(c)
	r.target.Apply(testState())
	r.wantActions(event(slot, nvme.AERANAChanged))
}

func TestANewNamespaceChangesItsANAGroup(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	r.must(c, setFeature(nvme.FIDAsyncEvent, nvme.AECANA), nil)
	slot := r.aer(c)
	st := testState()
	st.Subsystems[0].Namespaces = append(st.Subsystems[0].Namespaces, block(9, 12, 100<<20, 1<<20))
	r.target.Apply(st)
	r.wantActions(event(slot, nvme.AERANAChanged))
}

func TestDiscoveryChangeIsReportedToPersistentControllers(t *testing.T) {
	r := newRig(t)
	d := r.connect(hostA, nvme.DiscoveryNQN, withKATO(10000))
	quiet := r.connect(hostB, nvme.DiscoveryNQN)
	r.must(d, setFeature(nvme.FIDAsyncEvent, nvme.AECDiscovery), nil)
	slot := r.aer(d)
	r.aer(quiet)
	st := testState()
	st.Ports = st.Ports[1:]
	r.target.Apply(st)
	r.wantActions(event(slot, nvme.AERDiscoveryChanged))
	slot = r.aer(d)
	r.target.Apply(testState())
	r.noActions()
	r.must(d, getLog(nvme.LIDDiscovery, 1024), nil)
	r.target.Apply(st)
	r.wantActions(event(slot, nvme.AERDiscoveryChanged))
}

func TestAbortOfAnEventRequest(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	first, second, third := r.aer(c), r.aer(c), r.aer(c)
	if !r.target.AbortEvent(c, second) {
		t.Fatal("an outstanding request was not aborted")
	}
	r.wantActions(fmt.Sprintf("event %d: %v", second, nvme.AbortRequested))
	if r.target.AbortEvent(c, second) {
		t.Error("aborted twice")
	}
	r.must(c, setFeature(nvme.FIDAsyncEvent, nvme.AECNamespace|nvme.AECANA), nil)
	r.target.Apply(grown(20 << 20))
	// The event for access comes before the one for attributes, because a Linux host looks up the ANA group of a new
	// namespace.
	r.wantActions(event(first, nvme.AERANAChanged), event(third, nvme.AERNamespaceChanged))
}

func TestAbortIsHandedToTheDriver(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	reply, _ := r.do(c, 0, command(nvme.AdminAbort, func(s *nvme.SQE) { s.Abort().SetSQID(3); s.Abort().SetCID(77) }),
		nil)
	if !reply.Status.OK() || !reply.Abort || reply.AbortSQID != 3 || reply.AbortCID != 77 {
		t.Errorf("%+v", reply)
	}
}
