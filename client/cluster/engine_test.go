package cluster

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/client/internal/kvop"
	"jbofd/client/kv"
	"jbofd/internal/nvme"
)

// TestALateContextConcernsItsOwnOperationOnly: the context of an operation ends when its request has been taken for the
// next one.
func TestALateContextConcernsItsOwnOperationOnly(t *testing.T) {
	g := newRig(t, 1, 1)
	s := g.open(func(o *Options) { o.ReadTimeout = 20 * time.Second })
	if err := s.Put(t.Context(), []byte("k"), []byte("value")); err != nil {
		t.Fatal(err)
	}
	e := s.engine
	r := e.take()
	defer e.give(r)
	var uses []uint64
	begin := func() {
		t.Helper()
		if err := r.begin(&kvop.Args{Kind: kv.Get, Key: []byte("k"), Value: make([]byte, 10)}); err != nil {
			t.Fatal(err)
		}
		uses = append(uses, e.start(r))
	}
	begin()
	<-r.ended
	g.nodes[0].setScript(func(uint8) (verdict, nvme.Status) { return hold, 0 })
	begin()
	e.cancelOp(r, uses[0], context.Canceled)
	until(t, "the second one is at the node", func() bool { return g.nodes[0].heldCommands() == 1 })
	e.cancelOp(r, uses[0], context.Canceled)
	e.mu.Lock()
	if r.over != nil || r.phase != sent {
		t.Errorf("the second operation is to end, because of %v", r.over)
	}
	e.mu.Unlock()
	e.cancelOp(r, uses[1], context.Canceled)
	if <-r.ended; !errors.Is(r.err, context.Canceled) || !errors.Is(r.err, ErrUnavailable) {
		t.Errorf("its own context: %v", r.err)
	}
	g.nodes[0].release(nvme.AbortedSQDeletion)
}

// TestABatchIsSentTogether: the commands of one Submit that go to one node are one list.
func TestABatchIsSentTogether(t *testing.T) {
	g := newRig(t, 3, 3)
	s := g.open()
	q := openQueue(t, s, 64)
	results := make([]kv.Result, 64)
	var ops []kv.Op
	for i := range 60 {
		ops = append(ops, kv.Op{Kind: kv.Put, Key: fmt.Appendf(nil, "key%d", i), Value: []byte("value")})
	}
	drain := func(n int) {
		t.Helper()
		for n > 0 {
			k, err := q.Poll(results, -1)
			if err != nil || results[0].Err != nil {
				t.Fatal(err, results[0].Err)
			}
			n -= k
		}
	}
	if n, err := q.Submit(ops); n != 60 || err != nil { // which connects
		t.Fatal(n, err)
	}
	drain(60)
	e := s.engine
	e.mu.Lock()
	for i := range ops {
		r := q.free[len(q.free)-1]
		q.free = q.free[:len(q.free)-1]
		a := args(&ops[i])
		if err := r.begin(&a); err != nil {
			t.Error(err)
		}
		e.startLocked(r)
	}
	e.pump()
	n := 0
	for _, out := range e.out {
		for a := out.first; a != nil; a = a.Next {
			n++
		}
	}
	if len(e.out) != len(g.nodes) || n != len(ops) {
		t.Errorf("%d lists of %d commands, want one for each of %d nodes", len(e.out), n, len(g.nodes))
	}
	e.leave()
	drain(60)
}

// TestAQueueHasNoGoroutines of its own, however deep it is.
func TestAQueueHasNoGoroutines(t *testing.T) {
	g := newRig(t, 1, 1)
	s := g.open()
	if err := s.Put(t.Context(), []byte("k"), []byte("value")); err != nil {
		t.Fatal(err)
	}
	least := 1 << 30 // connections of the rig end and begin meanwhile
	for range 20 {
		before := runtime.NumGoroutine()
		q := openQueue(t, s, MaxDepth)
		least = min(least, runtime.NumGoroutine()-before)
		if err := q.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if least > 0 {
		t.Errorf("a queue has %d goroutines", least)
	}
}

// TestReadsAndWritesWaitForTokens of the drive that they go to; writes also for those of the other replicas.
func TestReadsAndWritesWaitForTokens(t *testing.T) {
	g := newRig(t, 3, 3)
	s := g.open(func(o *Options) { o.ReadTimeout = 20 * time.Second; o.ReadFrom = ReadTail })
	q := openQueue(t, s, 64)
	results := make([]kv.Result, 64)
	key := g.keyOf(0, 1) // from node 0 to node 2
	connectAll(t, g, s)
	s.setCredits(map[string]int{"n0": 100, "n1": 100, "n2": 3})
	for _, n := range g.nodes {
		n.setScript(func(uint8) (verdict, nvme.Status) { return hold, 0 })
	}
	get := kv.Op{Kind: kv.Get, Key: key, Value: make([]byte, 10)}
	put := kv.Op{Kind: kv.Put, Key: key, Value: []byte("value")}
	submit := func(op kv.Op, n int) {
		t.Helper()
		for range n {
			if k, err := q.Submit([]kv.Op{op}); k != 1 || err != nil {
				t.Fatal(k, err)
			}
		}
	}
	submit(get, 10)
	until(t, "three reads are at the ChainTail", func() bool { return g.nodes[2].heldCommands() == 3 })
	submit(put, 5)
	if st := s.Stats(); st.Waiting != 12 || g.nodes[0].heldCommands() != 0 {
		t.Errorf("%d operations wait, want 12; %d writes are at the ChainHead", st.Waiting, g.nodes[0].heldCommands())
	}
	for _, n := range g.nodes {
		n.release(nvme.AbortedSQDeletion) // each is tried again
	}
	for left := 15; left > 0; {
		n, err := q.Poll(results, -1)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range results[:n] {
			if r.Err != nil && !errors.Is(r.Err, kv.ErrKeyNotFound) {
				t.Error(r.Err)
			}
		}
		left -= n
	}
	if st := s.Stats(); st.Waiting != 0 || st.Waits < 12 {
		t.Errorf("%+v", st)
	}
}

// TestAWriteIsNotRepeatedAfterItsIdentity: it may have been done, and waits for tokens until nobody knows of it.
func TestAWriteIsNotRepeatedAfterItsIdentity(t *testing.T) {
	g := newRig(t, 1, 1)
	s := g.open()
	if err := s.Put(t.Context(), []byte("k"), []byte("value")); err != nil {
		t.Fatal(err)
	}
	e := s.engine
	for _, late := range []bool{true, false} {
		r := e.take()
		if err := r.begin(&kvop.Args{Kind: kv.Put, Key: []byte("k"), Value: []byte("again")}); err != nil {
			t.Fatal(err)
		}
		tries := s.Stats().Tries
		e.mu.Lock()
		e.startLocked(r)
		r.unknown, r.first = true, s.now()
		if late {
			r.first -= s.o.KeepFor + 1
		}
		e.pump()
		e.leave()
		<-r.ended
		if sent := s.Stats().Tries - tries; late != errors.Is(r.err, client.ErrIndeterminate) || late == (sent > 0) {
			t.Errorf("its time is over: %t; sent %d times, and ended with %v", late, sent, r.err)
		}
		e.give(r)
	}
}

// connectAll waits until all nodes are connected.
func connectAll(t *testing.T, g *rig, s *Store) {
	t.Helper()
	until(t, "all nodes are connected", func() bool {
		for i := range g.nodes {
			if err := s.Put(t.Context(), g.keyOf(i, 0), []byte("value")); err != nil {
				t.Fatal(err)
			}
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, n := range s.nodes {
			if n.connected() == nil {
				return false
			}
		}
		return len(s.nodes) == len(g.nodes)
	})
}

// setCredits sets the credits of the drives of nodes, as if they had come with completions.
func (s *Store) setCredits(units map[string]int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.engine.mu.Lock()
	for k, n := range s.nodes {
		for _, ssd := range n.ssds {
			s.engine.flow.Grant(int64(s.now()), ssd, units[k.name])
		}
	}
	s.engine.leave()
}

// TestATenantThatFloodsDoesNotStarveAnother: of the places that the connection to a node has.
func TestATenantThatFloodsDoesNotStarveAnother(t *testing.T) {
	g := newRig(t, 1, 1)
	const depth = 4
	s := g.open(func(o *Options) { o.ReadTimeout, o.Connection.QueueDepth = 20*time.Second, depth })
	if err := s.Put(t.Context(), []byte("k"), []byte("value")); err != nil {
		t.Fatal(err)
	}
	other, err := s.AddTenant(1)
	if err != nil {
		t.Fatal(err)
	}
	n := g.nodes[0]
	n.setScript(func(uint8) (verdict, nvme.Status) { return hold, 0 })
	const flood = 1000
	q := openQueue(t, s, flood)
	ops := make([]kv.Op, flood)
	for i := range ops {
		ops[i] = kv.Op{Kind: kv.Get, Key: []byte("k"), Value: make([]byte, 10)}
	}
	if k, err := q.Submit(ops); k != flood || err != nil {
		t.Fatal(k, err)
	}
	until(t, "the node has all that it takes", func() bool { return n.heldCommands() == depth })
	var wait sync.WaitGroup
	before := 0 // Retrieves that the node has had when the other tenant's operation comes
	n.setScript(func(op uint8) (verdict, nvme.Status) {
		if op == nvme.CmdKVExist {
			before = n.seen[nvme.CmdKVRetrieve]
		}
		return carryOut, 0
	})
	wait.Go(func() {
		if there, err := other.Exists(t.Context(), []byte("k")); !there || err != nil {
			t.Errorf("Exists: %t, %v", there, err)
		}
	})
	until(t, "it waits, too", func() bool { return s.Stats().Waiting == flood-depth+1 })
	n.answerHeld()
	wait.Wait()
	results := make([]kv.Result, flood)
	for left := flood; left > 0; {
		k, err := q.Poll(results, -1)
		if err != nil {
			t.Fatal(err)
		}
		left -= k
	}
	if before == 0 || before > 50 {
		t.Errorf("the node has had %d commands of the other tenant before", before)
	}
	for _, weight := range []int{0, 1001} {
		if _, err := s.AddTenant(weight); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("weight %d: %v", weight, err)
		}
	}
}

// answerHeld carries out what is held, and answers it. The script stays.
func (n *testNode) answerHeld() {
	n.g.mu.Lock()
	held := n.held
	n.held = nil
	for _, c := range held {
		c.Fail(nvme.Success)
		n.carryOut(c)
	}
	n.g.mu.Unlock()
	for _, c := range held {
		if p := c.Port; p.Done(c) {
			p.Kick()
		}
	}
}

// TestAReadDoesNotWaitForAPlaceAtASilentNode: the queues of both nodes are full when it comes, and only the other one
// answers.
func TestAReadDoesNotWaitForAPlaceAtASilentNode(t *testing.T) {
	g := newRig(t, 2, 2)
	const depth = 4
	s := g.open(func(o *Options) {
		o.ReadTimeout, o.Connection.QueueDepth, o.Connection.Credits = 20*time.Millisecond, depth, client.CreditsOff
	})
	connectAll(t, g, s)
	for _, n := range g.nodes {
		n.setScript(func(uint8) (verdict, nvme.Status) { return hold, 0 })
	}
	q := openQueue(t, s, 2*depth)
	for i := range 2 * depth {
		op := kv.Op{Kind: kv.Put, Key: g.keyOf(i%2, i), Value: []byte("value")}
		if k, err := q.Submit([]kv.Op{op}); k != 1 || err != nil {
			t.Fatal(k, err)
		}
	}
	until(t, "the nodes have all that they take", func() bool {
		return g.nodes[0].heldCommands() == depth && g.nodes[1].heldCommands() == depth
	})
	read := make(chan error, 1)
	go func() {
		_, err := s.Exists(context.Background(), []byte("k"))
		read <- err
	}()
	silent := ""
	until(t, "the read waits", func() bool {
		e := s.engine
		e.mu.Lock()
		defer e.mu.Unlock()
		for _, r := range e.all {
			if r.phase == waiting && r.a.flow.AtLink() {
				silent = r.a.members[r.a.flow.SentTo()].node.key.name
			}
		}
		return silent != ""
	})
	for i, n := range g.nodes {
		if fmt.Sprint("n", i) != silent {
			n.release(nvme.KeyExists | nvme.DNR)
		}
	}
	select {
	case err := <-read:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(8 * time.Second): // Options.Timeout is longer
		t.Error("the read still waits for a place at the silent node")
	}
	for _, n := range g.nodes {
		n.release(nvme.KeyExists | nvme.DNR)
	}
	results := make([]kv.Result, 2*depth)
	for left := 2 * depth; left > 0; {
		k, err := q.Poll(results, -1)
		if err != nil {
			t.Fatal(err)
		}
		left -= k
	}
}

// TestACrowdLeavesNoMemoryBehind: neither requests, nor values that they have copied.
func TestACrowdLeavesNoMemoryBehind(t *testing.T) {
	g := newRig(t, 1, 1)
	s := g.open(func(o *Options) { o.Hedge = time.Second })
	e := s.engine
	space := kvop.Space{NSID: 1, MaxKey: nvme.MaxKVKey, MaxValue: 1 << 20, MaxTransfer: 2 << 20, Extended: true}
	value := make([]byte, 1<<20)
	for _, long := range []bool{false, true, false} {
		n := 20 * maxFree
		if long {
			n = 3 * maxKept / len(value)
		}
		var crowd []*request
		for range n {
			r := e.take()
			if long {
				if err := r.op.Start(&space, &kvop.Args{Kind: kv.Put, Key: []byte("k"), Value: value, Client: 1, Seq: 1,
					WantVersion: true}); err != nil {
					t.Fatal(err)
				}
				if r.memory() < len(value) {
					t.Fatalf("a request with a value keeps %d bytes", r.memory())
				}
			}
			crowd = append(crowd, r)
		}
		e.give(crowd...)
		memory := 0
		for i, r := range e.all {
			memory += r.memory()
			if r.index != i {
				t.Fatalf("request %d has index %d", i, r.index)
			}
		}
		if len(e.all) > maxFree || len(e.all) != len(e.free) || memory > maxKept || memory != e.kept {
			t.Errorf("%d requests, %d free, keep %d bytes, counted are %d", len(e.all), len(e.free), memory, e.kept)
		}
	}
	if err := s.Put(t.Context(), []byte("k"), []byte("value")); err != nil {
		t.Error(err)
	}
}

// TestWhatWaitsForTokensFollowsTheMap: its range has moved, and the member whose tokens it has waited for is busy.
func TestWhatWaitsForTokensFollowsTheMap(t *testing.T) {
	g := newRig(t, 2, 1)
	s := g.open(func(o *Options) { o.ReadTimeout = 20 * time.Second })
	connectAll(t, g, s)
	busy, moves := g.keyOf(0, 1), g.keyOf(0, 2)
	for i := 3; rangeOf(moves) == rangeOf(busy); i++ {
		moves = g.keyOf(0, i)
	}
	s.setCredits(map[string]int{"n0": 1, "n1": 10})
	g.nodes[0].setScript(func(uint8) (verdict, nvme.Status) { return hold, 0 })
	q := openQueue(t, s, 3)
	for i, op := range []kv.Op{{Kind: kv.Exists, Key: busy}, {Kind: kv.Exists, Key: moves, Tag: 1},
		{Kind: kv.Put, Key: moves, Value: []byte("value"), Tag: 2}} {
		if n, err := q.Submit([]kv.Op{op}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		until(t, "it waits", func() bool { return g.nodes[0].heldCommands() == 1 && s.Stats().Waiting == i })
	}
	g.change(func(r int, c []int) []int {
		if r == rangeOf(moves) {
			return []int{1}
		}
		return c
	})
	g.publish()
	s.wantMap()
	results := make([]kv.Result, 3)
	for range 2 {
		n, err := q.Poll(results[:1], 8*time.Second)
		if err != nil || n == 0 {
			t.Fatalf("%d results, %v: it still waits for the tokens of a member that has not its range", n, err)
		}
		if r := results[0]; r.Tag == 0 || r.Err != nil && !errors.Is(r.Err, kv.ErrKeyNotFound) {
			t.Errorf("%+v", r)
		}
	}
	g.nodes[0].release(nvme.KeyDoesNotExist | nvme.DNR)
	if n, err := q.Poll(results, -1); n != 1 || err != nil {
		t.Error(n, err)
	}
}
