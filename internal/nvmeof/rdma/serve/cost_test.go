package serve_test

import (
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvmeof/rdma/memverbs"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// eventually waits until a condition holds.
func eventually(t testing.TB, what string, so func() bool) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for !so() {
		select {
		case <-deadline:
			t.Fatalf("waiting for %s took too long", what)
		case <-time.After(time.Millisecond):
		}
	}
}

// settle waits until nothing is in flight at the target.
func (r *rig) settle(t testing.TB) {
	t.Helper()
	last := r.target.Stats()
	same := 0
	eventually(t, "silence", func() bool {
		now := r.target.Stats()
		if now != last {
			last, same = now, 0
		}
		same++
		return same > 20
	})
}

// verbsOf returns the operations of the target's device for the commands that run executes.
func (r *rig) verbsOf(t *testing.T, n uint64, run func()) memverbs.Stats {
	t.Helper()
	r.settle(t)
	before := r.target.Stats()
	run()
	r.settle(t)
	after := r.target.Stats()
	return memverbs.Stats{Recvs: (after.Recvs - before.Recvs) / n, Sends: (after.Sends - before.Sends) / n,
		Writes: (after.Writes - before.Writes) / n, Reads: (after.Reads - before.Reads) / n,
		Completions: (after.Completions - before.Completions) / n}
}

// A 4 KiB read is 1 RECV, 1 WRITE and 1 SEND; a write 1 RECV, 1 SEND, and 1 READ where its data is not in
// the capsule.
func TestVerbsPerCommandAreMinimal(t *testing.T) {
	for _, tc := range []struct {
		name     string
		opcode   uint8
		bytes    int
		capsules int
		want     memverbs.Stats
	}{
		{"read 4K", client.OpRead, 4096, 8192, memverbs.Stats{Recvs: 1, Writes: 1, Sends: 1, Completions: 2}},
		{"write 4K in-capsule", client.OpWrite, 4096, 8192, memverbs.Stats{Recvs: 1, Sends: 1, Completions: 2}},
		{"write 16K", client.OpWrite, 16384, 8192, memverbs.Stats{Recvs: 1, Reads: 1, Sends: 1, Completions: 3}},
		{"write 1M", client.OpWrite, 1 << 20, 8192, memverbs.Stats{Recvs: 1, Reads: 1, Sends: 1, Completions: 3}},
		{"read 1M", client.OpRead, 1 << 20, 8192, memverbs.Stats{Recvs: 1, Writes: 1, Sends: 1, Completions: 2}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, func(s *setup) { s.serve.InCapsuleBytes = tc.capsules })
			o := r.options()
			o.QPairs, o.QueueDepth, o.KATO = 1, 8, -1
			l := newLoad(t, r.connect(t, o), tc.opcode, tc.bytes, 8)
			const n = 400
			got := r.verbsOf(t, n, func() {
				if err := l.Run(n); err != nil {
					t.Fatal(err)
				}
			})
			if got != tc.want {
				t.Errorf("per command %+v, want %+v", got, tc.want)
			}
		})
	}
}

// For any number of commands that come at once, the target polls once, posts receives once and work requests once, and
// rings one doorbell for each of the two.
func TestABatchCostsAsManyCrossingsAsOneCommand(t *testing.T) {
	for _, tc := range []struct {
		name   string
		opcode uint8
		bytes  int
		// rounds is the number of kinds of completions of the batch: receives, READs, SENDs.
		rounds int64
		want   cost
	}{
		{"32 reads of 4K", client.OpRead, 4096, 2, cost{polls: 2, completions: 64, sends: 1, sendWRs: 64, recvs: 1,
			recvWRs: 32, doorbells: 2}},
		{"32 writes of 4K, in-capsule", client.OpWrite, 4096, 2,
			cost{polls: 2, completions: 64, sends: 1, sendWRs: 32, recvs: 1, recvWRs: 32, doorbells: 2}},
		{"32 writes of 16K", client.OpWrite, 16384, 3, cost{polls: 3, completions: 96, sends: 2, sendWRs: 64, recvs: 1,
			recvWRs: 32, doorbells: 3}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := &gated{}
			r := newRig(t, func(s *setup) {
				s.wrap = func(p verbs.Provider) verbs.Provider { g.Provider = p; return g }
				s.attr.MaxInitiatorDepth, s.hostAttr.MaxResponderResources = 64, 64
			})
			o := r.options()
			o.QPairs, o.QueueDepth, o.KATO = 1, 32, -1
			l := newLoad(t, r.connect(t, o), tc.opcode, tc.bytes, 32)
			if got := r.runBatch(t, g, l, tc.rounds); got != tc.want {
				t.Errorf("%+v\nwant %+v", got, tc.want)
			}
		})
	}
}

// What is registered is exact: a chunk of receives, a chunk for responses, and those regions of the
// pool that were used.
func TestRegisteredMemoryIsThePoolOnceAndAChunkOfEachKind(t *testing.T) {
	r := newRig(t, nil)
	o := r.options()
	o.QPairs, o.QueueDepth = 1, 8
	l := newLoad(t, r.connect(t, o), client.OpRead, 4096, 8)
	if err := l.Run(100); err != nil {
		t.Fatal(err)
	}
	const (
		receives  = 127 * (64 + 8192) // as many as fit into 1 MiB
		responses = 1 << 20
		region    = 8 << 20
	)
	if got, want := r.server.Stats().RegisteredBytes, int64(receives+responses+region); got != want {
		t.Errorf("%d bytes are registered, want %d", got, want)
	}
	if got := r.target.Counts().MRs; got != 3 {
		t.Errorf("%d memory regions, want 3", got)
	}
	for range 3 { // it stays so when hosts connect and leave
		o := r.options()
		o.QueueDepth = 8
		c := r.connect(t, o)
		if _, err := c.Identity(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if got := r.target.Counts().MRs; got != 3 {
		t.Errorf("after other hosts %d memory regions, want 3", got)
	}
}

// An idle target sleeps: it polls no more.
func TestAnIdleTargetDoesNotPoll(t *testing.T) {
	r := newRig(t, nil)
	o := r.options()
	o.QPairs, o.QueueDepth, o.KATO = 1, 1, -1
	l := newLoad(t, r.connect(t, o), client.OpRead, 4096, 1)
	if err := l.Run(100); err != nil {
		t.Fatal(err)
	}
	r.settle(t)
	eventually(t, "the last spin", func() bool {
		before := r.target.Crossings()
		<-time.After(200 * time.Millisecond)
		return r.target.Crossings() == before
	})
}
