package nvmeof_test

import (
	"bytes"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
)

// clusterMap is a map of an epoch, of some nodes.
func clusterMap(epoch uint64, nodes int) nvme.ClusterMap {
	b := nvme.NewClusterMap(nvme.ClusterMapHeader{Epoch: epoch, Ranges: 16})
	for range nodes {
		b = b.AppendNode(nvme.ClusterMapNode{Name: "node", Address: "tcp://192.0.2.1:4420", SubNQN: open})
	}
	return b.Seal()
}

func TestTheClusterMapIsAnnouncedAndReadInItsSubsystemOnly(t *testing.T) {
	r := newRig(t)
	clusterOf := func(c *nvmeof.Controller) (announced, listed, read bool) {
		_, data := r.must(c, identify(nvme.CNSController, 0), nil)
		_, bits, _ := (*nvme.IdentifyController)(data).Extension()
		_, data = r.must(c, getLog(nvme.LIDSupported, 1024), nil)
		reply, _ := r.do(c, 0, getLog(nvme.LIDClusterMap, 64), nil)
		if !reply.Status.OK() && reply.Status != nvme.InvalidLogPage|nvme.DNR {
			t.Errorf("the page is answered %s", reply.Status)
		}
		return bits&nvme.ExtClusterMap != 0, (*nvme.SupportedLogPages)(data).LID(nvme.LIDClusterMap) != 0,
			reply.Status.OK()
	}
	for _, x := range []struct {
		sub         string
		set, remove bool
	}{{open, false, false}, {open, true, false}, {shut, true, false}, {nvme.DiscoveryNQN, true, false},
		{open, true, true}} {
		if x.set {
			r.target.SetClusterMap(open, clusterMap(1, 2))
		}
		if x.remove {
			r.target.SetClusterMap(open, nil)
		}
		want := x.sub == open && x.set && !x.remove
		if a, l, read := clusterOf(r.connect(hostA, x.sub)); a != want && x.sub != nvme.DiscoveryNQN || l != want ||
			read != want {
			t.Errorf("%+v: announced %t, in the list of pages %t, read %t", x, a, l, read)
		}
	}
	r.target.SetClusterMap("nqn.2026-11.example.jbofd:later", clusterMap(1, 2))
	s := testState()
	s.Subsystems[0].NQN = "nqn.2026-11.example.jbofd:later"
	r.target.Apply(s)
	r.take() // the end of the controllers of open
	if a, l, read := clusterOf(r.connect(hostA, s.Subsystems[0].NQN)); !a || !l || !read {
		t.Error("a map that was set before its subsystem is not there")
	}
}

// TestAMapThatChangesBetweenPartsIsNoticed: by the generation in its header.
func TestAMapThatChangesBetweenPartsIsNoticed(t *testing.T) {
	r := newRig(t)
	r.target.SetClusterMap(open, clusterMap(1, 20))
	c := r.connect(hostA, open)
	read := func(from, to int) []byte {
		_, data := r.must(c, getLog(nvme.LIDClusterMap, uint64(to-from), at(uint64(from))), nil)
		return bytes.Clone(data)
	}
	whole := func(change func()) (m nvme.ClusterMap, same bool) {
		m = read(0, 64)
		if err := m.CheckHeader(); err != nil {
			t.Fatal(err)
		}
		for len(m) < m.LenBytes() {
			m = append(m, read(len(m), min(len(m)+256, m.LenBytes()))...)
			if change != nil {
				change()
				change = nil
			}
		}
		return m, nvme.ClusterMap(read(0, 64)).Generation() == m.Generation()
	}
	first, same := whole(nil)
	if err := first.Check(); err != nil || !same {
		t.Fatalf("%v, same generation %t", err, same)
	}
	changed, same := whole(func() { r.target.SetClusterMap(open, clusterMap(2, 20)) })
	if same || changed.Check() == nil {
		t.Errorf("a change between two parts: same generation %t, %v", same, changed.Check())
	}
	second, same := whole(func() { r.target.SetClusterMap(open, clusterMap(2, 20)) })
	if err := second.Check(); err != nil || !same || second.Epoch() != 2 {
		t.Errorf("the same map, set again: same generation %t, %v, epoch %d", same, err, second.Epoch())
	}
	r.target.SetClusterMap(open, clusterMap(1, 20)) // as the first one, but later
	if m, _ := whole(nil); m.Generation() == first.Generation() {
		t.Error("an earlier map has its earlier generation")
	}
}
