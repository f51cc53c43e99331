package replica_test

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"

	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/lab"
	"jbofd/internal/nvme"
	"jbofd/internal/pipeline"
	"jbofd/internal/replica"
	"jbofd/internal/ssd"
)

// node is a node with a drive, a store and a Replica.
type node struct {
	sim   *sim
	id    int
	rate  float64 // of its clock
	drive *lab.Drive
	ios   map[uint64]kvstore.IO
	store *kvstore.Store
	sacts kvstore.Actions
	r     *replica.Replica
	acts  replica.Actions
	mem   *replica.Memory
	// requests are for the store, which has not taken them yet.
	requests []kvstore.Request
	lives    byte // of the store: how often it was formatted
	life     int  // counts the processes that it has been
	dead     bool
	paused   bool
	flips    int // reads of the store before which bits of its drive flip
	backlog  []func()
	slow     bool  // its drive takes long
	failed   bool  // its store has failed
	faultNS  int64 // when its drive has failed a request last
	brokenNS int64 // until when its drive fails writes
	known    bool  // its damage was seen
	empty    bool  // its data is gone, and the view has not seen that
	heard    int64
	wakeNS   int64
	// drops gives back what the node has when it is drained. held adopts the view that waits for that. until is its
	// authority, seen the newest epoch that it knows.
	drops    *replica.Drops
	dropActs replica.DropActions
	held     func()
	until    int64
	seen     uint64
	fresh    bool // the process is a new one, and was a member when it began
	// sent are commands that have not completed, by tag. came are those of others that are not answered, by handle.
	sent map[uint32]departed
	came map[uint64]arrived
}

// departed is a command that was sent over a connection.
type departed struct{ to, connection int }

// arrived is a command that came from another node. buf is where the host wants the data of the completion, data the
// memory for it here.
type arrived struct {
	from, connection int
	tag              uint32
	buf, data        []byte
}

func sorted[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

func (n *node) clock(now int64) int64 { return int64(float64(now) * n.rate) }

// on runs do, when the node is not paused.
func (n *node) on(do func()) {
	switch {
	case n.dead:
	case n.paused:
		n.backlog = append(n.backlog, do)
	default:
		do()
	}
}

const (
	chunkBytes     = 128 << 10
	partitionBytes = 28 * chunkBytes
	blockBytes     = 512
	hashSeed       = 77
	longest        = 16000 // value that is written
	batchBytes     = longest + nvme.KVEntryOverhead
)

// format gives the node an empty drive.
func (n *node) format() {
	s := n.sim
	n.lives++
	n.drive = lab.NewDrive(lab.DriveConfig{SizeBytes: partitionBytes, BlockSize: blockBytes,
		Volatile: s.rng.IntN(2) == 0, Rand: s.rng, Misuse: func(what string) { s.t.Fatalf("%s", what) }})
	n.drive.SlowOneIn = 60
	n.drive.Hold = func(*ssd.Request) int64 {
		if n.slow && s.rng.IntN(8) == 0 {
			return s.upTo(60 * ms)
		}
		return 0
	}
	n.drive.Fault = func(r *ssd.Request) lab.Outcome {
		if s.Now() < n.brokenNS && n.store.Ready() && r.Op != ssd.Read {
			s.counts["write failed"]++
			return lab.FailUndone + lab.Outcome(s.rng.IntN(3))
		}
		if s.calm || !n.store.Ready() || s.rng.IntN(3000) > 0 || !s.others(n.id) || !s.mayFault(n) {
			return lab.Good
		}
		s.counts["drive fault"]++
		n.faultNS = s.Now()
		return lab.FailUndone + lab.Outcome(s.rng.IntN(3))
	}
	n.open(true)
}

// open opens the store, or formats it.
func (n *node) open(format bool) {
	n.ios, n.requests, n.sacts = map[uint64]kvstore.IO{}, nil, kvstore.Actions{}
	store, err := kvstore.New(kvstore.Config{PartitionBytes: partitionBytes, BlockSize: blockBytes,
		ChunkBytes: chunkBytes, GroupBytes: 8 << 10, KeysPerSegment: 4, Requests: 16, SegTbl: make([]byte, 5*2000),
		FUA: n.drive.Volatile, Compactions: 2, Format: format, UUID: [16]byte{byte(n.id), n.lives}, HashSeed: hashSeed})
	if err != nil {
		n.sim.t.Fatalf("%v", err)
	}
	n.store = store
	for !store.Ready() { // it takes no virtual time
		n.storeTurn()
		i := n.drive.Next()
		if i < 0 && n.id == n.sim.hurt && !format {
			n.sim.counts["lost"]++
			n.empty = true
			n.format()
			return
		}
		if i < 0 {
			n.sim.t.Fatalf("node %d: the store does not open: %v", n.id, store.Err())
		}
		n.endIO(i)
	}
}

// start begins a new process.
func (n *node) start() {
	s := n.sim
	n.life++
	n.paused, n.backlog, n.dead, n.failed, n.fresh = false, nil, false, false, false
	n.known = false
	n.sent, n.came = map[uint32]departed{}, map[uint64]arrived{}
	alloc := func(b int) ([]byte, error) { return make([]byte, b), nil }
	size := 64 << 10
	if s.rng.IntN(2) == 0 {
		size = 16 << 10 // one long value
	}
	var err error
	if n.mem, err = replica.NewMemory(3, size, alloc); err != nil {
		s.t.Fatalf("%v", err)
	}
	parts := 1 + s.rng.IntN(3)
	batches, err := replica.NewBatches(1+s.rng.IntN(2), parts+1, batchBytes, alloc)
	if err != nil {
		s.t.Fatalf("%v", err)
	}
	n.r = replica.New(replica.Config{HashSeed: hashSeed, Memory: n.mem, Batches: batches,
		TombstoneSeconds: 3600, Alloc: alloc,
		PortConfig: crrs.PortConfig{Range: 3, Keep: uint8(1 + s.rng.IntN(4)), Requests: 8 + s.rng.IntN(30),
			Served: 2 + s.rng.IntN(8), Config: crrs.Config{Window: 8, Reads: 8, First: s.first, Bits: s.bits,
				Parts: parts, Leaf: 1 + s.rng.Uint64N(4)}}})
	n.acts = replica.Actions{}
	n.r.SetTime(n.clock(s.Now()), wall(s.Now()))
	n.startDrops()
	s.storeTurn(n)
}

// die ends the process. Some time later the same happens as after a loss of power, or the drive keeps what it has.
func (n *node) die() {
	n.life++
	n.dead, n.paused, n.backlog = true, false, nil
	if n.sim.rng.IntN(2) == 0 {
		n.drive.PowerLoss()
	} else {
		n.drive.Kill()
	}
	n.sim.trace("node %d dies", n.id)
}

// restart begins a new process, with what the store has made durable, or on an empty drive.
func (n *node) restart(empty bool) {
	n.sim.counts["restarted"]++
	if empty {
		n.sim.counts["emptied"]++
		n.empty = true
		n.format()
	} else {
		n.open(false)
	}
	n.start()
}

// revive begins a new process of a node that has died.
func (n *node) revive() {
	if !n.dead {
		return
	}
	n.sim.trace("node %d is back", n.id)
	n.restart(n.failed && n.sim.rng.IntN(2) == 0)
	n.fresh = true
	n.sim.reconnectAll(n.id)
}

func (n *node) resume() {
	n.paused = false
	for len(n.backlog) > 0 && !n.paused {
		do := n.backlog[0]
		n.backlog = n.backlog[1:]
		do()
	}
}

// storeTurn takes a turn of the store: its I/Os go to the drive, its replies are returned.
func (n *node) storeTurn() []kvstore.Reply {
	now := n.sim.Now()
	n.store.SetWall(wall(now))
	n.store.Turn(now, &n.sacts)
	for _, q := range n.sacts.IOs {
		if n.flips > 0 && q.Op == pipeline.Read {
			n.flipBefore(&q)
		}
		n.ios[uint64(q.Tag)] = q
		r := ssd.Request{Op: ssd.Op(q.Op), Offset: int64(q.Offset), Len: int64(len(q.Buf)), Buf: q.Buf,
			Tag: uint64(q.Tag)}
		if q.FUA {
			r.Flags = ssd.FUA
		}
		n.drive.Submit(now, r)
	}
	n.sacts.IOs = n.sacts.IOs[:0]
	replies := slices.Clone(n.sacts.Replies)
	n.sacts.Replies, n.sacts.Damage = n.sacts.Replies[:0], n.sacts.Damage[:0]
	return replies
}

func (n *node) endIO(i int) {
	q, err := n.drive.End(i)
	n.store.Complete(uint32(q.Tag), err)
}

// storeTurn gives the store what it takes, and lets it act until it asks for nothing more.
func (s *sim) storeTurn(n *node) {
	for len(n.requests) > 0 && n.store.Submit(&n.requests[0]) {
		n.requests = n.requests[1:]
	}
	replies := n.storeTurn()
	if i := n.drive.Next(); i >= 0 {
		s.later(n, max(1, n.drive.Flights[i].DueNS-s.Now()), func() {
			if i := n.drive.Next(); i >= 0 && n.drive.Flights[i].DueNS <= s.Now() {
				n.endIO(i)
			}
			s.storeTurn(n)
		})
	}
	if at := n.sacts.WakeNS; at != 0 && at != n.wakeNS {
		n.wakeNS = at
		s.later(n, max(1, at-s.Now()), func() {
			n.wakeNS = 0
			s.storeTurn(n)
		})
	}
	if len(replies) == 0 {
		return
	}
	s.call(n, func(r *replica.Replica) {
		for i := range replies {
			if !s.takeDropReply(n, &replies[i]) {
				r.Stored(&replies[i])
			}
		}
	})
}

// contents is what the store has of each key, identities included.
func (n *node) contents() map[string]string {
	all := map[string]string{}
	q := kvstore.Request{Op: kvstore.CopyOut, Range: n.sim.all(), Value: make([]byte, 1<<20)}
	n.askStore(&q, func(b nvme.KVRange) {
		for e := range b.Entries() {
			var ids []nvme.KVIdentity
			for i := range e.Identities() {
				ids = append(ids, e.Identity(i))
			}
			all[string(e.Key())] = fmt.Sprintf("version %d tombstone %v value %d %x identities %v evicted %v",
				e.Version(), e.Tombstone(), e.ValueLen(), e.Value()[:min(8, e.ValueLen())], ids, e.Evicted())
		}
	})
	return all
}

// askStore asks the store for something of a range, which takes no virtual time, until that is complete.
func (n *node) askStore(q *kvstore.Request, take func(b nvme.KVRange)) {
	q.Tag = math.MaxUint64
	for done := false; !done; {
		if !n.store.Submit(q) {
			n.sim.t.Fatalf("the store takes no request %v", q.Op)
		}
		for answered := false; !answered; {
			for _, p := range n.storeTurn() {
				b := nvme.KVRange(q.Value)
				if p.Status != kvstore.OK || b.Check() != nil {
					n.sim.t.Fatalf("node %d: %v: %+v", n.id, q.Op, p)
				}
				b = b[:b.LenBytes()]
				take(b)
				to := b.To()
				answered, done = true, b.Complete()
				q.Range.From, q.Key = to.Position, to.Key[:to.KeyLen]
			}
			if i := n.drive.Next(); i >= 0 {
				n.endIO(i)
			}
		}
	}
}
