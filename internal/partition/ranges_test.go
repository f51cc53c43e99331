package partition

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// ranged fills in a request for all positions, from a cursor on.
func (h *host) ranged(op kvstore.Op, from nvme.KVCursor, n int) *Request {
	r := h.add(op, 0, n)
	r.Range = kvstore.Range{Last: math.MaxUint64, From: from.Position}
	r.Key, r.KeyLen, r.Background, r.Version = from.Key, from.KeyLen, true, 0
	return r
}

// walk goes through all keys with an operation.
func (h *host) walk(t *testing.T, op kvstore.Op, n int, yield func(nvme.KVRange)) {
	t.Helper()
	for from, complete := (nvme.KVCursor{}), false; !complete; {
		h.ranged(op, from, n)
		h.p.Submit(&h.batch)
		r := h.wait()[0]
		if r.Status != kvstore.OK {
			t.Fatalf("op %d: status %d", op, r.Status)
		}
		b := nvme.KVRange(r.Value[:r.ValueLen])
		if err := b.Check(); err != nil {
			t.Fatal(err)
		}
		yield(b)
		from, complete = b.To(), b.Complete()
	}
}

// TestManyRangesKeepNoGetWaiting: the store takes only a few requests for ranges; the others wait, are served, and can
// be taken out.
func TestManyRangesKeepNoGetWaiting(t *testing.T) {
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	p := r.mustOpen(true)
	h := newHost(p, 1, 300, 4096)
	for key := range uint64(250) {
		fill(h.add(kvstore.Put, key, 1000).Value, key, 1)
	}
	p.Submit(&h.batch)
	for n := 0; n < 250; n += len(h.wait()) {
	}
	p.driver.Lock() // nobody runs the store meanwhile
	var aborted *Request
	for i := range 200 {
		q := h.ranged([]kvstore.Op{kvstore.Scan, kvstore.CopyOut, kvstore.Digest}[i%3], nvme.KVCursor{}, 4096)
		if i == 150 {
			aborted = q
		}
	}
	get := h.add(kvstore.Get, 7, 1000)
	p.Submit(&h.batch)
	if !aborted.Abort() {
		t.Error("a request that waits cannot be aborted")
	}
	p.driver.Unlock()
	p.driver.Run()
	at, done := -1, 0
	for done < 201 {
		for _, q := range h.wait() {
			switch {
			case q == get:
				at = done
			case q == aborted && q.Status != kvstore.Aborted, q != aborted && q.Status != kvstore.OK:
				t.Fatalf("op %d: status %d", q.Op, q.Status)
			}
			done++
		}
	}
	if at < 0 || at > 100 {
		t.Errorf("a Get ends as number %d of %d", at, done)
	}
	r.close(p)
}

// TestRangesAndSwappedKeys: keys that are in a swap area are copied and dropped like others, and a CopyIn wins over an
// older value that was swapped out.
func TestRangesAndSwappedKeys(t *testing.T) {
	t.Logf("-seed=%d", *seed)
	b := newBox(t, eager, inMemory(partitionBytes), inMemory(areaBytes))
	m := map[uint64][2]uint64{}
	rnd := rand.New(rand.NewPCG(*seed, 8))
	swapped := int64(0)
	for round := range 4 {
		h := newHost(b.p, 1, 24, 4000)
		for range 10 {
			if err := h.history(rnd, m, 0, 300, 200, 2000); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		st := b.p.Stats().Swap
		swapped += st.Swapped
		c, objects := newHost(b.p, 2, 1, 1<<20), 0
		var batches [][]byte
		c.walk(t, kvstore.CopyOut, 60000, func(r nvme.KVRange) {
			objects += r.Items()
			batches = append(batches, append([]byte(nil), r...))
		})
		if objects != len(m) {
			t.Fatalf("round %d: %d objects are copied, want %d", round, objects, len(m))
		}
		switch round % 2 {
		case 0:
			c.ranged(kvstore.Drop, nvme.KVCursor{}, 0)
			c.p.Submit(&c.batch)
			if r := c.wait()[0]; r.Status != kvstore.OK {
				t.Fatalf("a Drop: status %d", r.Status)
			}
			clear(m)
			b.all(m, 300)
		case 1:
			for _, batch := range batches {
				q := nvme.KVRange(batch)
				for at := nvme.KVRangeHeaderBytes; at < len(q); {
					e, next := q.EntryAt(at)
					e.SetVersion(e.Version() + 1e6)
					at = next
				}
				q.Seal()
				r := c.ranged(kvstore.CopyIn, nvme.KVCursor{}, len(batch))
				copy(r.Value, batch)
				c.p.Submit(&c.batch)
				if r = c.wait()[0]; r.Status != kvstore.OK || r.ValueLen != q.Items() {
					t.Fatalf("a CopyIn: status %d, %d of %d", r.Status, r.ValueLen, q.Items())
				}
			}
			b.all(m, 300)
		}
		b.close()
		b.open(false)
		b.all(m, 300)
	}
	if swapped == 0 {
		t.Error("nothing was swapped")
	}
	b.close()
}

// TestNoKeyIsSwappedOutDuringACopyIn: the partition's drive has stopped to read, so that Puts are swapped out. One that
// comes while there is a CopyIn waits for that drive, because the CopyIn may have a newer value of its key.
func TestNoKeyIsSwappedOutDuringACopyIn(t *testing.T) {
	policy := eager
	policy.UnlistNS = 1e15
	b := newBox(t, policy, failing(partitionBytes, fault.Config{Seed: 1}), inMemory(areaBytes))
	dev := b.source.dev.(*fault.Device)
	h, c := newHost(b.p, 1, 110, 4096), newHost(b.p, 2, 1, 64<<10)
	left := 0
	drain := func() {
		for left > 0 {
			left -= len(h.wait())
		}
	}
	for key := range uint64(50) {
		fill(h.add(kvstore.Put, key, 100).Value, key, 1)
		left++
	}
	b.p.Submit(&h.batch)
	drain()
	var copied nvme.KVRange
	c.walk(t, kvstore.CopyOut, 64<<10, func(r nvme.KVRange) { copied = append(copied, r...) })
	if copied.Check() != nil || copied.Items() != 50 {
		t.Fatalf("%d objects are copied at once, want 50", copied.Items())
	}
	// swaps reports whether a Put goes to the swap area. No other one that does is in progress.
	swaps := func(key uint64) bool {
		fill(h.add(kvstore.Put, key, 3000).Value, key, 1)
		left++
		b.p.driver.Lock()
		defer b.p.driver.Unlock()
		b.p.Submit(&h.batch)
		b.p.turn()
		return !b.p.swapping.source.NoRequests()
	}
	stop := func() { // the drive has much to do, and does nothing
		dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Read}, Hold: true})
		for key := range uint64(100) {
			h.add(kvstore.Get, key%50, 4096)
			left++
		}
		b.p.Submit(&h.batch)
	}
	for stop(); !swaps(1000); stop() { // the manifest must name the area first
		dev.SetRules()
		dev.Release()
		drain()
	}
	dev.SetRules()
	dev.Release()
	drain()
	for b.p.Stats().Swap.Keys > 0 { // a CopyIn waits until they have returned
		h.do(kvstore.Get, 0, 4096)
	}
	stop()
	r := c.ranged(kvstore.CopyIn, nvme.KVCursor{}, len(copied))
	for e := range copied.Entries() {
		e.SetVersion(e.Version() + 1e6)
	}
	copied.Seal()
	copy(r.Value, copied)
	b.p.driver.Lock()
	c.p.Submit(&c.batch)
	b.p.turn()
	copying := b.p.copying
	b.p.driver.Unlock()
	if copying != 1 {
		t.Fatalf("%d CopyIns are in progress, want one", copying)
	}
	if swaps(2000) {
		t.Error("a Put is swapped out during a CopyIn")
	}
	dev.SetRules()
	dev.Release()
	if r := c.wait()[0]; r.Status != kvstore.OK || r.ValueLen != 50 {
		t.Errorf("a CopyIn: status %d, %d objects, want 50", r.Status, r.ValueLen)
	}
	drain()
	b.close()
}

// TestACopyInThatWaitsKeepsNoOthersWaiting: a tenant has as many CopyIns as the store takes, and the drive does not
// end their writes, so that the CopyIn of a second tenant waits, which is the next to be served. A Scan, a Drop and a
// Get of a third one are taken nevertheless.
func TestACopyInThatWaitsKeepsNoOthersWaiting(t *testing.T) {
	r := newRig(t, partitionBytes, nil, failing(partitionBytes, fault.Config{Seed: 1}))
	p := r.mustOpen(true)
	dev := r.dev.(*fault.Device)
	const copies = kvstore.MaxCopyIns
	c, w, h := newHost(p, 1, copies, 64<<10), newHost(p, 2, 1, 64<<10), newHost(p, 3, 20, 64<<10)
	for key := range uint64(20) {
		fill(h.add(kvstore.Put, key, 1000).Value, key, 1)
	}
	p.Submit(&h.batch)
	for n := 0; n < 20; n += len(h.wait()) {
	}
	var batch nvme.KVRange
	h.walk(t, kvstore.CopyOut, 64<<10, func(b nvme.KVRange) { batch = append(batch, b...) })
	for e := range batch.Entries() {
		e.SetVersion(e.Version() + 1e6)
	}
	batch.Seal()
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Hold: true})
	for range copies {
		copy(c.ranged(kvstore.CopyIn, nvme.KVCursor{}, len(batch)).Value, batch)
	}
	p.Submit(&c.batch)
	p.driver.Lock() // nobody runs the store meanwhile
	p.turn()
	copy(w.ranged(kvstore.CopyIn, nvme.KVCursor{}, len(batch)).Value, batch)
	p.Submit(&w.batch)
	p.turn()
	waits := p.waiting()
	scan, get := h.ranged(kvstore.Scan, nvme.KVCursor{}, 4096), h.add(kvstore.Get, 7, 1000)
	drop := h.ranged(kvstore.Drop, nvme.KVCursor{}, 0)
	p.Submit(&h.batch)
	p.turn()
	for what, q := range map[string]*Request{"a Scan": scan, "a Get": get, "a Drop": drop} {
		if s := q.state.Load(); s == requestQueued {
			t.Errorf("%s waits behind a CopyIn", what)
		}
	}
	p.driver.Unlock()
	if waits != 1 {
		t.Errorf("%d Requests wait, want one CopyIn", waits)
	}
	dev.SetRules()
	dev.Release()
	p.driver.Run()
	drain := func(h *host, n int) {
		for n > 0 {
			for _, q := range h.wait() {
				if n--; q.Status != kvstore.OK && q.Op != kvstore.CopyIn {
					t.Errorf("op %d: status %d", q.Op, q.Status)
				}
			}
		}
	}
	drain(c, copies)
	drain(w, 1)
	drain(h, 3)
	r.close(p)
}

// TestARangeThatWaitsForSwappedKeysEndsEarly: keys are in a swap area and cannot return, because the partition's drive
// ends no write. A Scan waits for them, and ends when it is aborted.
func TestARangeThatWaitsForSwappedKeysEndsEarly(t *testing.T) {
	stay := eager
	stay.CalmNS = 1e15
	b := newBox(t, stay, failing(partitionBytes, fault.Config{Seed: 1}), inMemory(areaBytes))
	h, c := newHost(b.p, 1, 128, 4096), newHost(b.p, 2, 1, 4096)
	for b.p.Stats().Swap.Keys == 0 {
		for key := range uint64(128) {
			fill(h.add(kvstore.Put, key, 3000).Value, key, 1)
		}
		b.p.Submit(&h.batch)
		for n := 0; n < 128; n += len(h.wait()) {
		}
	}
	dev := b.source.dev.(*fault.Device)
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Hold: true})
	q := c.ranged(kvstore.Scan, nvme.KVCursor{}, 4096)
	b.p.Submit(&c.batch)
	b.p.driver.Lock()
	b.p.turn()
	b.p.driver.Unlock()
	if keys := b.p.Stats().Swap.Keys; keys == 0 || q.state.Load() != requestRanged {
		t.Errorf("%d keys are out, the Scan's state is %d", keys, q.state.Load())
	}
	q.Abort()
	b.p.driver.Lock()
	b.p.turn()
	b.p.driver.Unlock()
	c.mu.Lock()
	ended := len(c.done)
	c.mu.Unlock()
	if ended != 1 {
		t.Error("the Scan goes on to wait")
	}
	dev.SetRules()
	dev.Release()
	if c.wait(); q.Status != kvstore.Aborted || !q.Aborted {
		t.Errorf("the Scan ends with status %d", q.Status)
	}
	b.close()
}

// TestACopyInSaysHowMuchTheTimesOfDayDiffer: the store keeps identities for so much longer.
func TestACopyInSaysHowMuchTheTimesOfDayDiffer(t *testing.T) {
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	p := r.mustOpen(true)
	h := newHost(p, 1, 8, 1<<16)
	until := uint32(time.Now().Unix()) + 1000
	put := h.add(kvstore.Put, 1, 100)
	put.ID = kvstore.Identity{Client: 1, Seq: 1, KeepUntil: until}
	p.Submit(&h.batch)
	h.wait()
	var batch []byte
	copied := func() (keepUntil uint32) {
		h.walk(t, kvstore.CopyOut, 1<<16, func(b nvme.KVRange) {
			e, _ := b.EntryAt(nvme.KVRangeHeaderBytes)
			batch, keepUntil = append([]byte(nil), b...), e.Identity(0).KeepUntil
		})
		return keepUntil
	}
	for _, want := range []uint32{until, until + 77, until + 77} {
		if got := copied(); got != want {
			t.Fatalf("the identity is kept until %d, want %d", got, want)
		}
		in := h.ranged(kvstore.CopyIn, nvme.KVCursor{}, len(batch))
		copy(in.Value, batch)
		if in.AheadSeconds = 0; want == until {
			in.AheadSeconds = 77
		}
		p.Submit(&h.batch)
		if in = h.wait()[0]; in.Status != kvstore.OK {
			t.Fatalf("a CopyIn: status %d", in.Status)
		}
	}
	r.close(p)
}
