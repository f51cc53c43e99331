package cluster

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/nvme"
	"jbofd/internal/testutil/loopback"
)

func TestOperationsAreThoseOfANamespace(t *testing.T) {
	g := newRig(t, 3, 3)
	s, ctx := g.open(), testContext(t)
	buf := make([]byte, 100)
	for i := range 50 {
		key, value := fmt.Appendf(nil, "key%d", i), fmt.Appendf(nil, "value %d", i)
		if _, err := s.Get(ctx, key, buf); !errors.Is(err, kv.ErrKeyNotFound) || errors.Is(err, ErrUnavailable) {
			t.Fatalf("Get: %v", err)
		}
		if err := s.Put(ctx, key, value); err != nil {
			t.Fatal(err)
		}
		if n, err := s.Get(ctx, key, buf); err != nil || string(buf[:n]) != string(value) {
			t.Fatalf("Get: %q, %v", buf[:n], err)
		}
		o, err := s.GetVersion(ctx, key, buf)
		if err != nil || o.Size != len(value) || o.Version == 0 {
			t.Fatalf("GetVersion: %+v, %v", o, err)
		}
		v, err := s.PutIfVersion(ctx, key, []byte("new"), o.Version)
		if err != nil || v <= o.Version {
			t.Fatalf("PutIfVersion: %d, %v", v, err)
		}
		var ve *kv.VersionError
		if _, err := s.PutIfVersion(ctx, key, value, o.Version); !errors.Is(err, kv.ErrVersionMismatch) ||
			!errors.As(err, &ve) || ve.Current != v {
			t.Fatalf("PutIfVersion again: %v", err)
		}
		if err := s.PutIfAbsent(ctx, key, value); !errors.Is(err, kv.ErrKeyExists) {
			t.Fatalf("PutIfAbsent: %v", err)
		}
		if there, err := s.Exists(ctx, key); err != nil || !there {
			t.Fatalf("Exists: %t, %v", there, err)
		}
		if _, err := s.DeleteIfVersion(ctx, key, v); err != nil {
			t.Fatal(err)
		}
		if there, err := s.Exists(ctx, key); err != nil || there {
			t.Fatalf("Exists: %t, %v", there, err)
		}
		if err := s.PutIfPresent(ctx, key, value); !errors.Is(err, kv.ErrKeyNotFound) {
			t.Fatalf("PutIfPresent: %v", err)
		}
		if err := s.Delete(ctx, key); err != nil {
			t.Fatal(err)
		}
	}
	for what, err := range map[string]error{
		"no key":     s.Put(ctx, nil, nil),
		"a long key": s.Put(ctx, make([]byte, 17), nil),
	} {
		if !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := s.Put(ctx, []byte("k"), make([]byte, testValue+1)); !errors.Is(err, kv.ErrValueTooLarge) {
		t.Errorf("a long value: %v", err)
	}
	if _, err := s.PutWith(ctx, []byte("k"), nil, kv.PutOptions{If: kv.IfNewer, Version: 1}); !errors.Is(err,
		client.ErrUnsupported) {
		t.Errorf("IfNewer: %v", err)
	}
	if st := s.Stats(); st.WrongViews+st.Unavailable+st.Indeterminate != 0 || st.Epoch != 1 || st.Maps != 1 {
		t.Errorf("%+v", st)
	}
	if s.MaxValue() != testValue {
		t.Errorf("MaxValue is %d", s.MaxValue())
	}
	for i, n := range g.nodes {
		if n.count(nvme.CmdKVXStore) == 0 || n.count(nvme.CmdKVRetrieve) == 0 {
			t.Errorf("node %d has had %d Stores, %d Retrieves", i,
				n.count(nvme.CmdKVXStore), n.count(nvme.CmdKVRetrieve))
		}
	}
}

// TestAWriteIsCarriedOutOnceAlsoIfItsHeadIsLost: the ChainHead carries it out, or does not, and does not answer.
func TestAWriteIsCarriedOutOnceAlsoIfItsHeadIsLost(t *testing.T) {
	for name, c := range map[string]struct {
		how  verdict
		dies bool
	}{"silent, carried out": {holdDone, false}, "silent": {hold, false}, "dead, carried out": {holdDone, true},
		"dead": {hold, true}} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, 3, 3)
			s, ctx := g.open(), testContext(t)
			key := g.keyOf(0, 1)
			old, err := s.PutWith(ctx, key, []byte("old"), kv.PutOptions{})
			if err != nil {
				t.Fatal(err)
			}
			g.nodes[0].setScript(func(uint8) (verdict, nvme.Status) { return c.how, nvme.Success })
			ended := make(chan error, 1)
			var v uint64
			go func() {
				var err error
				v, err = s.PutIfVersion(ctx, key, []byte("new"), old)
				ended <- err
			}()
			until(t, "the write is at the ChainHead", func() bool { return g.nodes[0].heldCommands() > 0 })
			if c.dies {
				g.nodes[0].stop()
			}
			g.change(func(_ int, chain []int) []int { return without(chain, 0) })
			g.publish(1, 2)
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
			o, err := s.GetVersion(ctx, key, make([]byte, 10))
			if err != nil || o.Version != v || v != old+1 || g.most() != 1 {
				t.Errorf("version %d, reported %d; carried out %d times; %v", o.Version, v, g.most(), err)
			}
		})
	}
}

func TestAnUnknownOutcomeIsLearntWithTheIdentity(t *testing.T) {
	g := newRig(t, 3, 3)
	s, ctx := g.open(), testContext(t)
	for i, how := range []verdict{interrupt, refuse, interrupt, refuse} {
		key := g.keyOf(1, i)
		times := 0
		g.nodes[1].setScript(func(uint8) (verdict, nvme.Status) {
			if times++; times <= 3 {
				return how, nvme.CommandInterrupted
			}
			return carryOut, nvme.Success
		})
		if err := s.PutIfAbsent(ctx, key, []byte("value")); err != nil {
			t.Fatal(err)
		}
		g.nodes[1].setScript(nil)
	}
	if g.most() != 1 {
		t.Errorf("a write was carried out %d times", g.most())
	}
}

func TestErrorsTellWhetherAWriteMayHaveHappened(t *testing.T) {
	g := newRig(t, 3, 3)
	s := g.open(func(o *Options) { o.MaxTries = 6 })
	key := g.keyOf(2, 1)
	until(t, "the ChainHead is connected", func() bool { return s.Put(t.Context(), key, nil) == nil })
	for _, c := range []struct {
		what   string
		how    verdict
		status nvme.Status
		want   error
	}{
		{"wrong view", refuse, nvme.KVWrongView, ErrUnavailable},
		{"not ready", refuse, nvme.NamespaceNotReady, ErrUnavailable},
		{"unknown", interrupt, nvme.CommandInterrupted, client.ErrIndeterminate},
		{"no answer", hold, nvme.Success, client.ErrIndeterminate},
	} {
		g.nodes[2].setScript(func(uint8) (verdict, nvme.Status) { return c.how, c.status })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		before := s.Stats()
		ended := make(chan error, 1)
		go func() { ended <- s.Put(ctx, key, []byte("value")) }()
		if c.how == hold { // for the others MaxTries is the end
			until(t, "the write is at the ChainHead", func() bool { return g.nodes[2].heldCommands() > 0 })
			cancel()
		}
		err := <-ended
		for _, e := range []error{ErrUnavailable, client.ErrIndeterminate} {
			if errors.Is(err, e) != (e == c.want) {
				t.Errorf("%s: %v", c.what, err)
			}
		}
		if errors.Is(err, context.Canceled) != (c.how == hold) {
			t.Errorf("%s: %v", c.what, err)
		}
		if st := s.Stats(); st.Unavailable-before.Unavailable+st.Indeterminate-before.Indeterminate != 1 {
			t.Errorf("%s: %+v", c.what, st)
		}
		g.nodes[2].release(nvme.AbortedSQDeletion)
	}
}

func TestWrongViewsAreBounded(t *testing.T) {
	g := newRig(t, 3, 3)
	s := g.open(func(o *Options) { o.MaxTries = 12 })
	for _, n := range g.nodes {
		n.setScript(func(uint8) (verdict, nvme.Status) { return refuse, nvme.KVWrongView })
	}
	for _, write := range []bool{false, true} {
		before := s.Stats().Tries
		var err error
		if write {
			err = s.Put(t.Context(), []byte("k"), nil)
		} else {
			_, err = s.Get(t.Context(), []byte("k"), nil)
		}
		if tries := s.Stats().Tries - before; !errors.Is(err, ErrUnavailable) || tries > 12 {
			t.Errorf("write %t: %d tries, %v", write, tries, err)
		}
	}
}

func TestAStoreFollowsTheMap(t *testing.T) {
	g := newRig(t, 4, 2)
	s, ctx := g.open(func(o *Options) { o.Addresses = o.Addresses[:1] }), testContext(t)
	key := g.keyOf(0, 5)
	if err := s.Put(ctx, key, []byte("one")); err != nil {
		t.Fatal(err)
	}
	// The heads change places, and the nodes learn of it one after the other.
	g.change(func(_ int, c []int) []int { return []int{c[1], c[0]} })
	g.publish(0)
	ended := make(chan error, 1)
	go func() { ended <- s.Put(ctx, key, []byte("two")) }()
	until(t, "a node has another view", func() bool { return s.Stats().WrongViews > 0 })
	g.publish()
	if err := <-ended; err != nil || s.Stats().Epoch != 2 {
		t.Fatalf("epoch %d, %v", s.Stats().Epoch, err)
	}
	// A node comes back at another address.
	n := g.nodes[1]
	old := n.address
	n.stop()
	n.start(loopback.Listen(t))
	g.change(func(r int, c []int) []int { return []int{1, 2 + r%2} })
	g.publish()
	if err := s.Put(ctx, key, []byte("three")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 10)
	if n, err := s.Get(ctx, key, buf); err != nil || string(buf[:n]) != "three" {
		t.Errorf("%q, %v", buf[:n], err)
	}
	s.mu.Lock()
	for k := range s.nodes {
		if k.address == "tcp://"+old || len(s.nodes) != len(g.nodes) {
			t.Errorf("node %q of %d is still there", k, len(s.nodes))
		}
	}
	s.mu.Unlock()
	// An older map changes nothing.
	if err := s.adopt(olderMap()); err != nil || s.Stats().Epoch != 3 {
		t.Errorf("an older map: %v, epoch %d", err, s.Stats().Epoch)
	}
	other := nvme.NewClusterMap(nvme.ClusterMapHeader{Epoch: 9, Ranges: 16}).Seal()
	if err := s.adopt(other); !errors.Is(err, client.ErrProtocol) {
		t.Errorf("a map of another cluster: %v", err)
	}
}

func TestReadsGoOnAtOtherMembers(t *testing.T) {
	for name, lose := range map[string]func(n *testNode){
		"stopped": func(n *testNode) { n.stop() },
		"silent":  func(n *testNode) { n.setScript(func(uint8) (verdict, nvme.Status) { return hold, 0 }) },
		"not ready": func(n *testNode) {
			n.setScript(func(uint8) (verdict, nvme.Status) { return refuse, nvme.NamespaceNotReady })
		},
		"wrong view": func(n *testNode) {
			n.setScript(func(uint8) (verdict, nvme.Status) { return refuse, nvme.KVWrongView })
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, 3, 3)
			s, ctx := g.open(func(o *Options) { o.ReadTimeout = 50 * time.Millisecond }), testContext(t)
			if err := s.Put(ctx, []byte("k"), []byte("value")); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 10)
			for range 20 { // so that there are connections to all
				if _, err := s.Get(ctx, []byte("k"), buf); err != nil {
					t.Fatal(err)
				}
			}
			lose(g.nodes[0])
			lose(g.nodes[2])
			for range 10 {
				if n, err := s.Get(ctx, []byte("k"), buf); err != nil || string(buf[:n]) != "value" {
					t.Fatalf("%q, %v", buf[:n], err)
				}
			}
		})
	}
}

func TestReadsGoWhereFewestAreOutstanding(t *testing.T) {
	g := newRig(t, 2, 2)
	s, ctx := g.open(func(o *Options) { o.ReadTimeout = 20 * time.Second }), testContext(t)
	if err := s.Put(ctx, []byte("k"), []byte("value")); err != nil {
		t.Fatal(err)
	}
	until(t, "connections to both", func() bool {
		_, err := s.Get(ctx, []byte("k"), nil)
		return err == nil && g.nodes[0].count(nvme.CmdKVRetrieve) > 0 && g.nodes[1].count(nvme.CmdKVRetrieve) > 0
	})
	for _, n := range g.nodes {
		n.setScript(func(uint8) (verdict, nvme.Status) { return hold, 0 })
	}
	go func() { _, _ = s.Get(ctx, []byte("k"), make([]byte, 10)) }() // it is answered at the end
	until(t, "a read is held", func() bool { return g.nodes[0].heldCommands()+g.nodes[1].heldCommands() == 1 })
	busy, idle := g.nodes[0], g.nodes[1]
	if idle.heldCommands() > 0 {
		busy, idle = idle, busy
	}
	idle.setScript(nil)
	before := busy.count(nvme.CmdKVRetrieve)
	for range 30 {
		if _, err := s.Get(ctx, []byte("k"), nil); err != nil {
			t.Fatal(err)
		}
	}
	if n := busy.count(nvme.CmdKVRetrieve); n != before {
		t.Errorf("%d reads have gone to the member with one outstanding", n-before)
	}
	busy.release(nvme.AbortedSQDeletion)
}

func TestAllMembersAway(t *testing.T) {
	g := newRig(t, 3, 3)
	s := g.open(func(o *Options) { o.Timeout = 200 * time.Millisecond; o.ReadTimeout = 20 * time.Millisecond })
	until(t, "the nodes are connected", func() bool { return s.Put(t.Context(), []byte("k"), nil) == nil })
	for _, n := range g.nodes {
		n.stop()
	}
	until(t, "the Store has seen it", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, n := range s.nodes {
			if n.connected() != nil {
				return false
			}
		}
		return true
	})
	if _, err := s.Get(t.Context(), []byte("k"), nil); !errors.Is(err, ErrUnavailable) {
		t.Errorf("Get: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Put(ctx, []byte("k"), nil); !errors.Is(err, ErrUnavailable) || !errors.Is(err, context.Canceled) {
		t.Errorf("Put: %v", err)
	}
	for _, n := range g.nodes {
		n.restart()
	}
	until(t, "the nodes are back", func() bool { return s.Put(t.Context(), []byte("k"), nil) == nil })
	g.change(func(int, []int) []int { return nil })
	g.publish()
	if _, err := s.Get(t.Context(), []byte("k"), nil); !errors.Is(err, ErrUnavailable) {
		t.Errorf("a range without members: %v", err)
	}
}

func TestAHedgedReadTakesTheFirstAnswer(t *testing.T) {
	g := newRig(t, 2, 2)
	s, ctx := g.open(func(o *Options) { o.Hedge = time.Millisecond; o.ReadTimeout = 20 * time.Second }), testContext(t)
	if err := s.Put(ctx, []byte("k"), []byte("value")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 10)
	until(t, "connections to both", func() bool {
		_, err := s.Get(ctx, []byte("k"), buf)
		return err == nil && g.nodes[0].count(nvme.CmdKVRetrieve) > 0 && g.nodes[1].count(nvme.CmdKVRetrieve) > 0
	})
	for i := range 2 {
		g.nodes[i].setScript(func(uint8) (verdict, nvme.Status) { return hold, 0 })
		hedged := s.Stats().Hedged
		until(t, "a read has asked a second member", func() bool {
			clear(buf)
			if n, err := s.Get(ctx, []byte("k"), buf); err != nil || string(buf[:n]) != "value" {
				t.Fatalf("%q, %v", buf[:n], err)
			}
			o, err := s.GetVersion(ctx, []byte("k"), buf)
			if err != nil || o.Size != 5 || o.Version != 1 {
				t.Fatalf("%+v, %v", o, err)
			}
			return s.Stats().Hedged > hedged
		})
		g.nodes[i].release(nvme.AbortedSQDeletion)
	}
}

// olderMap is a map of the rig's cluster, of its first epoch.
func olderMap() nvme.ClusterMap {
	h := nvme.ClusterMapHeader{Epoch: 1, Ranges: testRanges}
	h.Cluster[0] = 9
	return nvme.NewClusterMap(h).Seal()
}
