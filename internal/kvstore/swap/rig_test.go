package swap

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/swap/guest"
	"jbofd/internal/pipeline"
)

var seed = flag.Uint64("seed", 1, "seed of the random tests; the same each time, so that a failure repeats")

var errInjected = errors.New("injected")

const (
	testBlock  = 512
	testValue  = 2000
	testGroup  = 2048
	homeBytes  = 64 << 10
	storeDepth = 6
)

// world is a box: homes with stores that are maps, and areas. Everything that is under way ends in any order, but
// messages between a home and an area, which keep theirs.
type world struct {
	t     testing.TB
	rng   *rand.Rand
	now   int64
	homes []*testHome
	areas []*testArea
	// fail is the probability that a device's or a store's request fails.
	fail float64
	// crashIn is after how many further writes of areas and books the power is lost; 0: never.
	crashIn int
	crashed bool
	writes  int
	keys    int
	policy  Policy
	entries int
	// long: values are; fickle: the stores become full and empty.
	long, fickle bool
	laps         uint64
	// slow: the stores are.
	slow bool
	// lists are answered; sum counts what has happened.
	lists int
	sum   struct{ swapped, returned, moved, reads, refused, errors, doubts int64 }
	// stop: no more crash.
}

type testArea struct {
	disk []byte
	m    *Area
	io   []IO
	in   []Append // not taken yet
	act  AreaActions
}

type testHome struct {
	disk     []byte
	m        *Home
	io       []IO
	act      Actions
	out      [][]Append  // to each area
	replies  [][]Outcome // from each area
	released []AreaRelease
	store    testStore
	busy     bool
	reqs     map[uint64]*testReq
	tag      uint64
	keys     []*linear
	next     []int32 // versions
}

type testReq struct {
	r    kvstore.Request
	key  int
	slot int
	buf  []byte
	down bool // the store has it
}

// testStore is a store that loses nothing: durable at once, but under way in any order.
type testStore struct {
	values map[string]string
	queue  []*storeReq
	ghosts []*storeReq // writes that have failed and may be found after a restart
	full   bool
}

type storeReq struct {
	r     kvstore.Request
	key   string
	value string
	own   bool // of the Home
}

func newWorld(t testing.TB, seed uint64, homes, areas, keys int) *world {
	w := &world{t: t, rng: rand.New(rand.NewPCG(seed, 11)), keys: keys, policy: Policy{BeginGap: 10, EndGap: 5, CalmNS: 1e6, UnlistNS: 3e6}, entries: 64}
	cfg := w.areaConfig()
	for i := range areas {
		a := &testArea{disk: make([]byte, cfg.AreaBytes)}
		for k := range a.disk { // what a former user left
			a.disk[k] = byte(w.rng.Uint32())
		}
		if err := FormatArea(cfg, [16]byte{0xA0, byte(i)}, w.rng.Uint64(), func(offset int64, b []byte) error {
			copy(a.disk[offset:], b)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		w.areas = append(w.areas, a)
	}
	for i := range homes {
		h := &testHome{disk: make([]byte, homeBytes), store: testStore{values: map[string]string{}}}
		if err := FormatBook([16]byte{0xB0, byte(i)}, func(offset int64, b []byte) error {
			copy(h.disk[offset:], b)
			return nil
		}, heap); err != nil {
			t.Fatal(err)
		}
		for range keys {
			h.keys = append(h.keys, newLinear())
		}
		h.next = make([]int32, keys)
		w.homes = append(w.homes, h)
	}
	w.open()
	return w
}

func heap(n int) []byte { return make([]byte, n) }

func (w *world) areaConfig() AreaConfig {
	return AreaConfig{AreaBytes: guest.LogStart + 64<<10, BlockSize: testBlock, GroupBytes: testGroup, MaxValueBytes: testValue, FUA: true}
}

func readFrom(disk []byte) Read {
	return func(offset int64, b []byte) error {
		copy(b, disk[offset:])
		return nil
	}
}

// openHome makes the Home of a partition from what is durable.
func (w *world) openHome(i int) (*Home, error) {
	h := w.homes[i]
	book, err := LoadBook(readFrom(h.disk), heap)
	if err != nil {
		return nil, err
	}
	cfg := HomeConfig{Book: book, UUID: [16]byte{0xB0, byte(i)}, BlockSize: testBlock, FUA: true, Keys: w.entries, Requests: 16, MaxValueBytes: testValue, Policy: w.policy}
	for _, a := range w.areas {
		at, err := a.m.Attach(cfg.UUID)
		if err != nil {
			return nil, err
		}
		cfg.Areas = append(cfg.Areas, HomeArea{UUID: a.m.UUID(), Log: a.m.Log(), BlockSize: testBlock, Attachment: at})
	}
	return NewHome(cfg)
}

// open starts the box from what is durable.
func (w *world) open() {
	w.t.Helper()
	w.crashed = false
	for i, a := range w.areas {
		m, err := OpenArea(w.areaConfig(), readFrom(a.disk))
		if err != nil {
			w.t.Fatalf("area %d: %v", i, err)
		}
		*a = testArea{disk: a.disk, m: m}
	}
	for i, h := range w.homes {
		// A copy of the book that becomes damaged does no harm once both say the same.
		a, b := h.disk[guest.BookOffsets[0]:][:guest.BookBytes], h.disk[guest.BookOffsets[1]:][:guest.BookBytes]
		if bytes.Equal(a, b) && w.rng.IntN(3) == 0 {
			[][]byte{a, b}[w.rng.IntN(2)][w.rng.IntN(100)] ^= 1
		}
		m, err := w.openHome(i)
		if err != nil {
			w.t.Fatalf("home %d: %v", i, err)
		}
		h.m, h.io, h.act, h.released = m, nil, Actions{}, nil
		h.out, h.replies = make([][]Append, len(w.areas)), make([][]Outcome, len(w.areas))
		h.reqs, h.busy = map[uint64]*testReq{}, false
	}
}

// crash loses the power.
func (w *world) crash() {
	w.crashed = true
	for _, a := range w.areas {
		for _, q := range a.io {
			w.tear(a.disk, q)
		}
	}
	for _, h := range w.homes {
		for _, q := range h.io {
			if q.Area < 0 {
				w.tear(h.disk, q)
			}
		}
		for _, s := range append(h.store.ghosts, h.store.queue...) { // what has failed was before
			if w.rng.IntN(2) == 0 {
				h.store.apply(s)
			}
		}
		h.store.queue, h.store.ghosts = nil, nil
		w.count(h)
		for _, k := range h.keys {
			k.crash()
		}
	}
}

func (w *world) count(h *testHome) {
	for _, a := range w.areas {
		w.laps = max(w.laps, a.m.tail/a.m.log.LenBytes)
	}
	s := h.m.Stats()
	w.sum.swapped += s.Swapped
	w.sum.returned += s.Returned
	w.sum.moved += s.Moved
	w.sum.reads += s.Reads
	w.sum.refused += s.Refused
}

// tear writes any of the blocks.
func (w *world) tear(disk []byte, q IO) {
	if q.Op != pipeline.Write {
		return
	}
	p := w.rng.Float64() * 1.5
	for at := 0; at < len(q.Buf); at += testBlock {
		if w.rng.Float64() < p {
			copy(disk[q.Offset+int64(at):], q.Buf[at:at+testBlock])
		}
	}
}

func (s *testStore) apply(q *storeReq) (kvstore.Status, string) {
	v, exists := s.values[q.key]
	switch q.r.Op {
	case kvstore.Get, kvstore.Exist:
		if !exists {
			return kvstore.NotFound, ""
		}
		return kvstore.OK, v
	case kvstore.Delete:
		if !exists {
			return kvstore.NotFound, ""
		}
		delete(s.values, q.key)
	case kvstore.Put:
		switch {
		case exists && q.r.Condition == kvstore.IfAbsent:
			return kvstore.Exists, ""
		case !exists && q.r.Condition == kvstore.IfPresent:
			return kvstore.NotFound, ""
		}
		s.values[q.key] = q.value
	}
	return kvstore.OK, ""
}

func (s *testStore) submit(r *kvstore.Request, own bool) bool {
	if len(s.queue) >= storeDepth {
		return false
	}
	q := &storeReq{r: *r, key: string(r.Key), own: own}
	if r.Op == kvstore.Put {
		q.value = string(r.Value)
	}
	s.queue = append(s.queue, q)
	return true
}

// end ends a request of the store.
func (w *world) endStore(h *testHome, i int) {
	s := &h.store
	q := s.queue[i]
	s.queue = append(s.queue[:i], s.queue[i+1:]...)
	st, v := kvstore.OK, ""
	write := q.r.Op == kvstore.Put || q.r.Op == kvstore.Delete
	switch {
	case w.fail > 0 && w.rng.Float64() < w.fail:
		st = kvstore.DeviceError
		if write {
			s.ghosts = append(s.ghosts, q)
		}
	case q.r.Op == kvstore.Put && s.full:
		st = kvstore.CapacityExceeded
	default:
		st, v = s.apply(q)
		if write {
			for k := 0; k < len(s.ghosts); k++ { // a later write of the key buries them
				if s.ghosts[k].key == q.key {
					s.ghosts = append(s.ghosts[:k], s.ghosts[k+1:]...)
					k--
				}
			}
		}
		if q.r.Op == kvstore.Get {
			copy(q.r.Value, v)
		}
	}
	if q.own {
		h.m.Stored(q.r.Tag, st, len(v))
		return
	}
	if write {
		h.m.Ended(uint32(q.r.Tag))
	}
	w.reply(h, kvstore.Reply{Tag: q.r.Tag, Status: st, ValueLen: len(v)})
}

// turn lets a home act.
func (w *world) turn(h *testHome) {
	for {
		var r kvstore.Request
		for h.m.NextForStore(&r) {
			if !h.store.submit(&r, true) {
				break
			}
			h.m.TakenByStore()
		}
		var loads []Load
		for _, a := range w.areas {
			loads = append(loads, Load{Used: a.m.Used(), Failing: a.m.Failing()})
		}
		waiting := 0
		if h.busy {
			waiting = 100
		}
		h.m.Observe(w.now, waiting, 1<<40, loads)
		h.m.Turn(w.now, &h.act)
		h.io = append(h.io, h.act.IOs...)
		for _, a := range h.act.Appends {
			h.out[a.Area] = append(h.out[a.Area], a.Append)
		}
		h.released = append(h.released, h.act.Releases...)
		replies := h.act.Replies
		h.act.IOs, h.act.Appends, h.act.Releases, h.act.Replies = nil, nil, nil, nil
		for _, p := range replies {
			w.reply(h, p)
		}
		if len(replies) == 0 && !(h.m.NextForStore(&r) && len(h.store.queue) < storeDepth) {
			return
		}
	}
}

// areaTurn lets an area act.
func (w *world) areaTurn(a *testArea) {
	for len(a.in) > 0 && a.m.Submit(&a.in[0]) {
		a.in = a.in[1:]
	}
	a.m.Turn(w.now, &a.act)
	a.io = append(a.io, a.act.IOs...)
	for _, o := range a.act.Outcomes {
		if o.Result == Doubtful {
			w.sum.doubts++
		}
		for _, h := range w.homes {
			if i := slices.Index(w.areas, a); h.m.areas[i].Home == o.Home {
				h.replies[i] = append(h.replies[i], o)
			}
		}
	}
	a.act.IOs, a.act.Outcomes = nil, nil
}

// device does an I/O of a disk, and reports whether the power is lost at it.
func (w *world) device(disk []byte, q IO) (err error, lost bool) {
	if q.Offset%testBlock != 0 || len(q.Buf)%testBlock != 0 || q.Offset+int64(len(q.Buf)) > int64(len(disk)) {
		w.t.Fatalf("I/O at %d, %d bytes", q.Offset, len(q.Buf))
	}
	if w.fail > 0 && w.rng.Float64() < w.fail {
		err = errInjected
	}
	if q.Op == pipeline.Read {
		if err == nil {
			copy(q.Buf, disk[q.Offset:])
		}
		return err, false
	}
	if !q.FUA {
		w.t.Fatal("a write without FUA to a device with a volatile cache")
	}
	w.writes++
	if w.crashIn > 0 {
		if w.crashIn--; w.crashIn == 0 {
			w.tear(disk, q)
			return nil, true
		}
	}
	if err != nil {
		w.tear(disk, q)
		return err, false
	}
	copy(disk[q.Offset:], q.Buf)
	return nil, false
}

// step does one thing, any.
func (w *world) step() {
	w.now += w.rng.Int64N(20000)
	for _, h := range w.homes {
		w.turn(h)
	}
	for _, a := range w.areas {
		w.areaTurn(a)
	}
	type event func()
	var events []event
	for _, h := range w.homes {
		for i := range h.store.queue {
			if w.slow && w.rng.IntN(30) > 0 {
				continue
			}
			events = append(events, func() { w.endStore(h, i) })
		}
		for i := range h.io {
			events = append(events, func() {
				q := h.io[i]
				disk := h.disk
				if q.Area >= 0 {
					disk = w.areas[q.Area].disk
				}
				err, lost := w.device(disk, q)
				h.io = append(h.io[:i], h.io[i+1:]...)
				if lost {
					w.crash()
					return
				}
				h.m.Complete(q.Tag, err)
			})
		}
		for i := range w.areas {
			if len(h.out[i]) > 0 {
				events = append(events, func() {
					w.areas[i].in = append(w.areas[i].in, h.out[i][0])
					h.out[i] = h.out[i][1:]
				})
			}
			if len(h.replies[i]) > 0 {
				events = append(events, func() {
					o := h.replies[i][0]
					h.replies[i] = h.replies[i][1:]
					h.m.Outcome(&o)
				})
			}
		}
		if len(h.released) > 0 {
			events = append(events, func() {
				q := h.released[0]
				h.released = h.released[1:]
				w.areas[q.Area].m.Release(q.Home, q.Place)
			})
		}
	}
	for _, a := range w.areas {
		for i := range a.io {
			events = append(events, func() {
				q := a.io[i]
				err, lost := w.device(a.disk, q)
				a.io = append(a.io[:i], a.io[i+1:]...)
				if lost {
					w.crash()
					return
				}
				a.m.Complete(q.Tag, err)
			})
		}
	}
	if len(events) == 0 {
		w.now += 1e5
		return
	}
	events[w.rng.IntN(len(events))]()
}

// value is that of a key's version.
func value(key int, version int32, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(int(version)*7 + key*13 + i)
	}
	binary.LittleEndian.PutUint32(b, uint32(version))
	return b
}

func keyOf(i int) []byte {
	k := []byte(fmt.Sprintf("%02x", i))
	for len(k) < 1+i%16 {
		k = append(k, byte(i*len(k)))
	}
	return k
}

// submit sends a request; false: there is no room for it.
func (w *world) submit(h *testHome, do kvstore.Op, cond kvstore.Condition, key, size int) bool {
	q := &testReq{key: key, r: kvstore.Request{Op: do, Condition: cond, Tag: h.tag, Key: keyOf(key)}}
	op := &linOp{do: do, cond: cond}
	switch do {
	case kvstore.Put:
		op.version = h.next[key] + 1
		q.r.Value = value(key, op.version, size)
	case kvstore.Get, kvstore.List:
		q.buf = make([]byte, 4*testValue)
		q.r.Value = q.buf
	}
	if do != kvstore.List {
		slot, ok := h.keys[key].invoke(op, w.fail == 0 || do == kvstore.Get)
		if !ok {
			h.keys[key].tidy()
			return false
		}
		q.slot = slot
	}
	// The store's tags are few.
	tag := uint64(0)
	for h.reqs[tag] != nil {
		tag++
	}
	q.r.Tag = tag
	h.reqs[tag] = q
	undo := func() bool {
		delete(h.reqs, tag)
		if do != kvstore.List {
			h.keys[key].nothing(q.slot)
		}
		return false
	}
	switch h.m.Submit(&q.r) {
	case Full:
		return undo()
	case ToStore:
		if !h.store.submit(&q.r, false) {
			return undo()
		}
		if do == kvstore.Put || do == kvstore.Delete {
			h.m.Began(uint32(tag), q.r.Key)
		}
	}
	if do == kvstore.Put {
		h.next[key]++
	}
	return true
}

// reply checks an answer.
func (w *world) reply(h *testHome, p kvstore.Reply) {
	q := h.reqs[p.Tag]
	if q == nil {
		w.t.Fatalf("a reply to no request: %+v", p)
	}
	delete(h.reqs, p.Tag)
	if q.r.Op == kvstore.List {
		if p.Status == kvstore.OK {
			w.lists++
		}
		return
	}
	l := h.keys[q.key]
	if p.Status == kvstore.DeviceError || p.Status == kvstore.Corrupt {
		if w.fail == 0 || p.Status == kvstore.Corrupt {
			w.t.Fatalf("op %d of key %d: status %d", q.r.Op, q.key, p.Status)
		}
		w.sum.errors++
		l.fail(q.slot)
		l.tidy()
		return
	}
	if p.Status == kvstore.CapacityExceeded {
		if !l.nothing(q.slot) {
			w.t.Fatalf("key %d: a write without effect has had one", q.key)
		}
		return
	}
	met := int32(p.Status)
	switch {
	case q.r.Op == kvstore.Get && p.Status == kvstore.NotFound, q.r.Op == kvstore.Exist && p.Status == kvstore.NotFound:
		met = 0
	case q.r.Op == kvstore.Get:
		met = int32(binary.LittleEndian.Uint32(q.buf))
		if string(q.buf[:p.ValueLen]) != string(value(q.key, met, p.ValueLen)) {
			w.t.Fatalf("key %d: not what was put", q.key)
		}
	case q.r.Op == kvstore.Exist:
		met = 1
	}
	before := l.values()
	if !l.respond(q.slot, met) {
		w.t.Fatalf("key %d: op %d (condition %d) has met %d, nothing explains that; before it was one of %v", q.key, q.r.Op, q.r.Condition, met, before)
	}
	l.tidy()
}

// random runs n requests, up to depth of them at once, and waits for them unless there is a crash.
func (w *world) random(n, depth int) {
	w.t.Helper()
	idle := 0
	for done := 0; !w.crashed; {
		for _, h := range w.homes {
			if w.rng.IntN(400) == 0 {
				h.busy = !h.busy
			}
			h.store.full = w.fickle && (h.store.full != (w.rng.IntN(1500) == 0))
			if done >= n || len(h.reqs) >= depth || w.rng.IntN(3) > 0 {
				continue
			}
			do := [...]kvstore.Op{kvstore.Get, kvstore.Put, kvstore.Put, kvstore.Put, kvstore.Put, kvstore.Exist, kvstore.Delete}[w.rng.IntN(7)]
			cond := kvstore.Always
			if do == kvstore.Put && w.rng.IntN(5) == 0 {
				cond = kvstore.Condition(1 + w.rng.IntN(2))
			}
			size := 4 + w.rng.IntN(300)
			switch k := w.rng.IntN(20); {
			case k == 0 || w.long:
				size = 4 + w.rng.IntN(testValue-4)
			case k == 1:
				size = testValue + 1 + w.rng.IntN(testValue) // comes home first
			}
			if w.rng.IntN(2000) == 0 {
				do = kvstore.List
			}
			if w.submit(h, do, cond, w.rng.IntN(w.keys), size) {
				done++
			}
		}
		pending := 0
		for _, h := range w.homes {
			pending += len(h.reqs)
		}
		if done >= n && pending == 0 {
			return
		}
		before := pending
		w.step()
		idle++
		after := 0
		for _, h := range w.homes {
			after += len(h.reqs)
		}
		if after != before {
			idle = 0
		}
		if idle > 400000 {
			w.t.Fatalf("%d requests get no answer\n%s", pending, w.state())
		}
	}
}

func (w *world) state() string {
	out := ""
	for i, h := range w.homes {
		out += fmt.Sprintf("home %d: used %d sweep n %d open %d stage %d area %d book %+v toStore %d atStore %d load.to %d\n", i, h.m.used, h.m.sweep.n, h.m.sweep.open, h.m.sweep.stage, h.m.sweep.area, h.m.book.dirty, h.m.toStore.N, h.m.atStore, h.m.load.to)
		for _, m := range h.m.sweep.members[:h.m.sweep.n] {
			e := h.m.entries[m.entry]
			out += fmt.Sprintf("  member %+v appends %d doubts %d waiting %d\n", m, e.appends, e.doubts, e.waiting.N)
		}
		for k := range h.m.areas {
			a := &h.m.areas[k]
			out += fmt.Sprintf("  area %d: entries %d appends %d wanted %d listed %v/%v floor %d acked %d\n", k, a.entries, a.appends, a.wanted, a.listed, a.wantListed, a.floor, a.acked)
		}
		for _, q := range h.reqs {
			out += fmt.Sprintf("  request op %d key %d len %d\n", q.r.Op, q.key, len(q.r.Value))
		}
	}
	for i, a := range w.areas {
		out += fmt.Sprintf("area %d: head %d tail %d durable %d in %d io %d failures %d homes %+v\n", i, a.m.head, a.m.tail, a.m.durable, len(a.in), len(a.io), a.m.failures, a.m.homes)
	}
	return out
}

// verify gets every key: what was acknowledged is there.
func (w *world) verify() {
	w.t.Helper()
	for _, h := range w.homes {
		for key := range h.keys {
			for !w.submit(h, kvstore.Get, kvstore.Always, key, 0) {
				w.step()
			}
			for n := 0; len(h.reqs) > 0; n++ {
				w.step()
				if n > 400000 {
					w.t.Fatalf("a Get gets no answer\n%s", w.state())
				}
			}
		}
	}
}

// settle waits until nothing is in doubt: what is tried again succeeds.
func (w *world) settle() {
	for range 3 {
		w.now += retryNS
		for range 200 {
			w.step()
		}
	}
}
