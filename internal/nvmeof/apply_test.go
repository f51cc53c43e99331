package nvmeof_test

import (
	"fmt"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
)

func TestAHostThatLosesAccessIsDisconnected(t *testing.T) {
	r := newRig(t)
	st := testState()
	st.Subsystems[1].Hosts = []string{hostA, hostB}
	r.target.Apply(st)
	a, b := r.connect(hostA, shut), r.connect(hostB, shut)
	r.tryConnect(hostB, shut, queue(b, 1))
	io := r.last
	r.target.Apply(testState())
	reason := "host " + hostB + " is no longer allowed"
	r.wantActions(fmt.Sprintf("close %d: %s", io, reason), fmt.Sprintf("close %d: %s", b.Admin, reason))
	if got := r.target.Controllers(); len(got) != 1 || got[0] != a {
		t.Errorf("controllers %v", got)
	}
	wantStatus(t, "connect again", r.tryConnect(hostB, shut).Status, nvme.ConnectInvalidHost|nvme.DNR)
}

func TestRemovingASubsystemDisconnectsItsHosts(t *testing.T) {
	r := newRig(t)
	a, b, stays := r.connect(hostA, open), r.connect(hostB, open), r.connect(hostA, shut)
	d := r.connect(hostA, nvme.DiscoveryNQN)
	st := testState()
	st.Subsystems = st.Subsystems[1:]
	r.target.Apply(st)
	reason := "subsystem " + open + " was removed"
	r.wantActions(fmt.Sprintf("close %d: %s", a.Admin, reason), fmt.Sprintf("close %d: %s", b.Admin, reason))
	if got := r.target.Controllers(); len(got) != 2 || got[0] != stays || got[1] != d {
		t.Errorf("controllers %v", got)
	}
	// When it is added again, it is a new subsystem.
	r.target.Apply(testState())
	r.noActions()
	r.connect(hostA, open)
}

func TestIOQueuesAreGivenTheNewNamespaces(t *testing.T) {
	r := newRig(t)
	a, b := r.connect(hostA, open), r.connect(hostB, open)
	first := r.tryConnect(hostA, open, queue(a, 1))
	qa := r.last
	r.tryConnect(hostB, open, queue(b, 1))
	qb := r.last
	st := testState()
	st.Subsystems[0].Namespaces = st.Subsystems[0].Namespaces[1:] // 1 is removed
	r.target.Apply(st)
	actions := r.take()
	if len(actions) != 2 || actions[0].Conn != qa || actions[1].Conn != qb {
		t.Fatalf("actions %+v", actions)
	}
	for _, x := range actions {
		if x.Kind != nvmeof.ActionTable || x.Version <= first.Version || x.Table.Get(1) != nil ||
			x.Table.Get(2) == nil {
			t.Errorf("action %+v", x)
		}
	}
	if actions[0].Table.Count() != 2 || actions[1].Table.Count() != 1 {
		t.Errorf("hostA sees %d, hostB %d namespaces", actions[0].Table.Count(), actions[1].Table.Count())
	}
	// A queue connected later starts from the new table.
	later := r.tryConnect(hostA, open, queue(a, 2))
	if later.Table.Get(1) != nil || later.Version != actions[0].Version {
		t.Errorf("version %d, the tables had %d", later.Version, actions[0].Version)
	}
}

func TestAGrownNamespaceIsSeenAtOnce(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	r.target.Apply(grown(20 << 20))
	_, data := r.must(c, identify(nvme.CNSNamespace, 2), nil)
	if n := (*nvme.IdentifyNamespace)(data).NSZE(); n != 20<<20>>12 {
		t.Errorf("NSZE %d", n)
	}
}

func TestApplyingAnUnchangedStateHasNoEffect(t *testing.T) {
	r := newRig(t)
	c, d := r.connect(hostA, open), r.connect(hostA, nvme.DiscoveryNQN)
	r.must(c, setFeature(nvme.FIDAsyncEvent, nvme.AECNamespace|nvme.AECANA), nil)
	r.must(d, setFeature(nvme.FIDAsyncEvent, nvme.AECDiscovery), nil)
	r.aer(c)
	r.aer(d)
	r.target.Apply(testState())
	r.noActions()
	if got := r.changedNamespaces(c); got != "[]" {
		t.Errorf("changed namespaces %s", got)
	}
}

func TestTheTableFindsItsNamespacesOnly(t *testing.T) {
	private := block(5, 12, 0, 1<<20)
	private.Hosts = []string{hostA}
	nobody := block(6, 12, 0, 1<<20)
	nobody.Hosts = []string{}
	all := []*nvmeof.Namespace{block(nvmeof.MaxNSID, 9, 0, 1<<20), block(1, 9, 0, 1<<20), private, nobody}
	table := nvmeof.NewNamespaceTable(all, hostB)
	for _, nsid := range []uint32{0, 2, 5, 6, nvmeof.MaxNSID + 1, nvme.NSIDBroadcast, 1 << 31} {
		if table.Get(nsid) != nil {
			t.Errorf("found namespace %d", nsid)
		}
	}
	if table.Get(1) != all[1] || table.Get(nvmeof.MaxNSID) != all[0] || table.Count() != 2 {
		t.Errorf("%d namespaces", table.Count())
	}
	if got := table.AppendIDs(nil, 0, 1); fmt.Sprint(got) != "[1]" {
		t.Errorf("at most one: %v", got)
	}
}
