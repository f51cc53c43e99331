package member

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/etcd"
	"jbofd/internal/uuid"
)

func is(err, want error) bool { return errors.Is(err, want) }

// TestALostNodeIsReplaced stops one node after the other, the manager first, and starts each again. The others act on a
// view without it.
func TestALostNodeIsReplaced(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3, "a", "b", "c")
	w.startAll()
	for i := range 3 {
		gone, others := w.manager()
		kind := "the manager"
		if i > 0 {
			gone, others[0], kind = others[0], gone, "another node"
		}
		before := w.members[others[0]].State().Active.Epoch
		w.members[gone].Close()
		if w.members[gone].authority() {
			t.Errorf("%s has authority after it was closed", gone)
		}
		t.Logf("%s is lost: the others serve after %v", kind, w.serving(others...))
		if after := w.members[others[0]].State().Active.Epoch; after <= before {
			t.Errorf("epoch %d after %d", after, before)
		}
		last := w.members[gone].Incarnation()
		w.members[gone].start()
		if now := w.members[gone].Incarnation(); now != last+1 {
			t.Errorf("process %d after %d", now, last)
		}
		t.Logf("all serve again after %v", w.serving("a", "b", "c"))
	}
}

// TestWithoutEtcdTheMapIsFrozen kills etcd: authority goes on, and no view is written. When etcd is back, a node joins.
func TestWithoutEtcdTheMapIsFrozen(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, "a", "b", "c", "d")
	late := w.members["d"]
	delete(w.members, "d")
	w.startAll()
	epoch := w.members["a"].State().Newest.Epoch
	w.etcd.Kill()
	for range 2 {
		w.granted("a", "b", "c")
	}
	w.members["d"] = late
	late.start()
	w.problem(late, cluster.ErrUnreachable)
	if !strings.Contains(late.State().Problem.Error(), "etcd") || late.authority() {
		t.Errorf("the node that has come: %v", late.State().Problem)
	}
	for _, name := range []string{"a", "b", "c"} {
		if now := w.members[name].State().Newest.Epoch; now != epoch {
			t.Errorf("%s: epoch %d after %d, without etcd", name, now, epoch)
		}
	}
	w.etcd.Restart()
	w.serving("a", "b", "c", "d")
}

// TestANodeWithoutEtcdGoesOn cuts the manager off from etcd: another node takes over, and nobody is given up.
func TestANodeWithoutEtcdGoesOn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3, "a", "b", "c")
	w.startAll()
	first, _ := w.manager()
	w.members[first].proxy.cut()
	w.eventually("another manager", func() error {
		if now, _ := w.manager(); now == first || now == "" {
			return errors.New("the manager is " + now)
		}
		return nil
	})
	w.granted("a", "b", "c")
	w.members[first].proxy.heal()
	w.serving("a", "b", "c")
}

// TestACompactedWatchIsReadAgain cuts all nodes off from etcd while their settings are changed and the change's history
// is compacted. All see the change afterwards.
func TestACompactedWatchIsReadAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3, "a", "b", "c")
	w.startAll()
	raw := w.raw()
	for _, n := range w.members {
		n.proxy.cut()
	}
	s := cluster.Settings{Cluster: w.uuid, Protocol: cluster.Protocol, Replicas: 2}
	w.put(raw, "config", s.Encode())
	last := w.put(raw, "config", s.Encode())
	if _, err := raw.Compact(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	for _, n := range w.members {
		n.proxy.heal()
	}
	w.eventually("two replicas", func() error {
		for name, n := range w.members {
			if m := n.State().Active; m == nil || m.Replicas != 2 {
				return errors.New(name + " has another view")
			}
		}
		return nil
	})
}

// TestABackupThatIsRestoredFreezesTheMap sets etcd back to before the loss of a node: the others say so and go on. A
// new process of one of them says so, too. When the newer state is put back, all goes on.
func TestABackupThatIsRestoredFreezesTheMap(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3, "a", "b", "c")
	w.startAll()
	before, after := filepath.Join(t.TempDir(), "before"), filepath.Join(t.TempDir(), "after")
	w.etcd.Kill()
	w.etcd.Save(before)
	w.etcd.Restart()
	gone, others := w.manager()
	if gone == "" {
		gone, others = "a", []string{"b", "c"}
	}
	w.members[gone].Close()
	w.serving(others...)
	w.etcd.Kill()
	w.etcd.Save(after)
	w.etcd.Load(before)
	w.etcd.Restart()
	for _, name := range others {
		w.problem(w.members[name], cluster.ErrWentBack)
	}
	w.granted(others...)
	again := w.members[others[0]]
	again.Close()
	again.start()
	w.problem(again, cluster.ErrWentBack)
	if again.authority() {
		t.Errorf("%s has authority", again.name)
	}
	w.etcd.Kill()
	w.etcd.Load(after)
	w.etcd.Restart()
	w.serving(others...)
	w.members[gone].start()
	w.serving("a", "b", "c")
}

// TestWhatDoesNotBelongIsRefused starts nodes against an etcd, or a cluster, that they must not use.
func TestWhatDoesNotBelongIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1, "a", "b", "c", "d", "e")
	raw := w.raw()
	named := w.members["a"]
	named.cfg.Etcd.Cluster = "other"
	named.start()
	labelled := w.members["b"]
	labelled.cfg.Node.Cluster = uuid.UUID{8}
	labelled.start()
	w.problem(named, cluster.ErrNoCluster)
	w.problem(labelled, cluster.ErrForeign)

	good := cluster.Settings{Cluster: w.uuid, Protocol: cluster.Protocol, Replicas: 1}
	other := good
	other.Protocol++
	w.put(raw, "config", other.Encode())
	newer := w.members["c"]
	newer.start()
	w.problem(newer, cluster.ErrProtocol)
	w.put(raw, "config", good.Encode())
	w.serving("c") // the problem has ended

	w.put(raw, "registry/pods/1", []byte("{}"))
	foreign := w.members["d"]
	foreign.start()
	w.problem(foreign, cluster.ErrForeign)
	for _, n := range []*node{named, labelled, foreign} {
		if n.authority() || n.State().Manages || n.State().Active != nil {
			t.Errorf("%s takes part: %+v", n.name, n.State())
		}
	}

	twice := w.members["e"]
	twice.cfg.Dir = named.cfg.Dir
	if err := twice.tryStart(); !errors.Is(err, ErrInUse) {
		t.Errorf("two processes with a state directory: %v", err)
	}
	at := etcd.Config{Endpoints: []string{w.etcd.URL}, Cluster: "test", Timeout: wait}
	err := Create(t.Context(), at, good, 1, 16)
	if !errors.Is(err, ErrExists) {
		t.Errorf("a cluster that there is: %v", err)
	}
}

// TestTheSecondNodeOfANameIsRefused starts a node with the name of another one, at another address. It says so, and
// the first one goes on.
func TestTheSecondNodeOfANameIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, "a", "b")
	w.startAll()
	second := &node{w: w, name: "a", cfg: w.members["a"].cfg, part: uuid.UUID{10}}
	second.cfg.Dir = t.TempDir()
	second.cfg.Changed = nil
	second.cfg.Link.Nodes = map[string]string{"a": host() + ":7000", "b": w.nodes["b"]}
	second.start()
	w.problem(second, cluster.ErrDuplicateName)
	if second.authority() {
		t.Error("the second node has authority")
	}
	w.granted("a", "b")
	w.serving("a", "b")
}

// TestAStateDirectoryCountsItsProcesses opens one several times, and damages it.
func TestAStateDirectoryCountsItsProcesses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	first, err := openState(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openState(dir); !errors.Is(err, ErrInUse) {
		t.Errorf("while it is open: %v", err)
	}
	if err := first.setSeen(77); err != nil {
		t.Fatal(err)
	}
	first.close()
	second, err := openState(dir)
	if err != nil {
		t.Fatal(err)
	}
	if second.seen != 77 || second.incarnation() != first.incarnation()+1 || second.node == 0 || second.node >= 1<<40 {
		t.Errorf("%+v after %+v", second, first)
	}
	second.process = maxProcess
	if err := second.setSeen(78); err != nil {
		t.Fatal(err)
	}
	second.close()
	third, err := openState(dir)
	if err != nil {
		t.Fatal(err)
	}
	if third.process != 1 || third.node == second.node || third.seen != 78 {
		t.Errorf("%+v after the last process of %+v", third, second)
	}
	third.close()
	good := third.encode()
	for bit := range len(good) * 8 {
		bad := append([]byte(nil), good...)
		bad[bit/8] ^= 1 << (bit % 8)
		if err := os.WriteFile(third.file(), bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := openState(dir); err == nil || !strings.Contains(err.Error(), third.file()) {
			t.Fatalf("with bit %d flipped: %v", bit, err)
		}
	}
	for _, bad := range [][]byte{nil, good[:9], good[:stateBytes-1], append(good, 0)} {
		if err := (&stateDir{}).decode(bad); err == nil {
			t.Errorf("%d bytes are taken", len(bad))
		}
	}
}
