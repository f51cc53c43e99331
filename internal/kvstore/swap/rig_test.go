package swap

import (
	"bytes"
	"errors"
	"flag"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/lab"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

var seed = flag.Uint64("seed", 1, "seed of the random tests; the same each time, so that a failure repeats")

var errInjected = errors.New("injected")

const (
	testBlock   = 512
	testValue   = 2000
	testGroup   = 2048
	sourceBytes = 64 << 10
	storeDepth  = 6
)

// world is a node: sources whose stores are maps, and areas. Everything in progress completes in random order, except
// that messages between a source and an area keep theirs.
type world struct {
	// toStore, if set, is shown what quick passes to the store.
	toStore func(*kvstore.Request)
	t       testing.TB
	rng     *rand.Rand
	now     int64
	sources []*testSource
	areas   []*testArea
	// fail is the probability that a device's or a store's request fails.
	fail float64
	// crashIn is the number of further writes of areas and manifests after which the power is lost; 0: never.
	crashIn int
	crashed bool
	writes  int
	keys    int
	policy  Policy
	entries int
	// long: values are long; fickle: the stores become full and empty.
	long, fickle bool
	laps         uint64
	// slow: the stores are slow.
	slow bool
	// lists counts the Lists answered; sum has the sum of all statistics.
	lists int
	sum   struct{ swapped, returned, moved, reads, refused, errors, indeterminate int64 }
	// stop: no more crash.
}

type testArea struct {
	disk *lab.Drive
	m    *Area
	io   []IO
	in   []Append // not taken yet
	act  AreaActions
}

type testSource struct {
	disk     *lab.Drive
	m        *Source
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
	// given has the store's version of each value: by key, and the test's version.
	given map[[2]int32]uint64
}

type testReq struct {
	r    kvstore.Request
	key  int
	slot int
	buf  []byte
	down bool // the store has it
}

// testStore is a store that loses nothing: its writes are durable at once, but complete in any order.
type testStore struct {
	values map[string]string
	// versions are those of the keys, clock is the greatest that was given. A restart knows only what was stored.
	versions map[string]uint64
	clock    uint64
	queue    []*storeReq
	ghosts   []*storeReq // writes that have failed and may be found after a restart
	full     bool
}

type storeReq struct {
	r     kvstore.Request
	key   string
	value string
	own   bool // of the Home
	// version is the one that the write was given when it failed.
	version uint64
}

// NextVersion implements Versions.
func (s *testStore) NextVersion() uint64 {
	s.clock++
	return s.clock
}

// NoteVersion implements Versions.
func (s *testStore) NoteVersion(v uint64) { s.clock = max(s.clock, v) }

func newWorld(t testing.TB, seed uint64, sources, areas, keys int) *world {
	w := &world{t: t, rng: rand.New(rand.NewPCG(seed, 11)), keys: keys,
		policy: Policy{BeginGap: 10, EndGap: 5, CalmNS: 1e6, UnlistNS: 3e6}, entries: 64}
	cfg := w.areaConfig()
	for i := range areas {
		a := &testArea{disk: w.newDisk(cfg.AreaBytes)}
		former := make([]byte, cfg.AreaBytes) // content left by an earlier user
		for k := range former {
			former[k] = byte(w.rng.Uint32())
		}
		a.disk.Store(0, former)
		if err := FormatArea(cfg, [16]byte{0xA0, byte(i)}, w.rng.Uint64(), func(offset units.ExtentOffset,
			b []byte) error {
			a.disk.Store(int64(offset), b)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		w.areas = append(w.areas, a)
	}
	for i := range sources {
		h := &testSource{disk: w.newDisk(sourceBytes),
			store: testStore{values: map[string]string{}, versions: map[string]uint64{}},
			given: map[[2]int32]uint64{}}
		if err := FormatManifest([16]byte{0xB0, byte(i)}, func(offset units.ExtentOffset, b []byte) error {
			h.disk.Store(int64(offset), b)
			return nil
		}, heap); err != nil {
			t.Fatal(err)
		}
		for range keys {
			h.keys = append(h.keys, newLinear())
		}
		h.next = make([]int32, keys)
		w.sources = append(w.sources, h)
	}
	w.open()
	return w
}

func heap(n int) ([]byte, error) { return make([]byte, n), nil }

func (w *world) areaConfig() AreaConfig {
	return AreaConfig{AreaBytes: format.SwapLogStart + 64<<10, BlockSize: testBlock, GroupBytes: testGroup,
		MaxValueBytes: testValue, FUA: true}
}

func readFrom(disk []byte) Read {
	return func(offset units.ExtentOffset, b []byte) error {
		copy(b, disk[offset:])
		return nil
	}
}

// openSource makes the Source of a partition from its durable state.
func (w *world) openSource(i int) (*Source, error) {
	h := w.sources[i]
	manifest, err := LoadManifest(readFrom(h.disk.Visible), heap)
	if err != nil {
		return nil, err
	}
	cfg := SourceConfig{Manifest: manifest, UUID: [16]byte{0xB0, byte(i)}, BlockSize: testBlock, FUA: true,
		Keys: w.entries, Requests: 16, MaxValueBytes: testValue, Policy: w.policy, Versions: &h.store}
	for _, a := range w.areas {
		at, err := a.m.Attach(cfg.UUID)
		if err != nil {
			return nil, err
		}
		cfg.Areas = append(cfg.Areas, AreaRef{UUID: a.m.UUID(), Log: a.m.Log(), BlockSize: testBlock, Attachment: at})
	}
	return NewSource(cfg)
}

// open starts the node from the durable state.
func (w *world) open() {
	w.t.Helper()
	w.crashed = false
	for i, a := range w.areas {
		m, err := OpenArea(w.areaConfig(), readFrom(a.disk.Visible))
		if err != nil {
			w.t.Fatalf("area %d: %v", i, err)
		}
		*a = testArea{disk: a.disk, m: m}
	}
	for i, h := range w.sources {
		// Damage of one copy of the manifest does no harm once both copies are equal.
		at := format.SwapManifestOffsets
		a, b := h.disk.Visible[at[0]:][:format.SwapManifestBytes], h.disk.Visible[at[1]:][:format.SwapManifestBytes]
		if bytes.Equal(a, b) && w.rng.IntN(3) == 0 {
			h.disk.Flip(int64(at[w.rng.IntN(2)])+w.rng.Int64N(100), 0)
		}
		w.begin(i)
	}
}

// begin opens a source.
func (w *world) begin(i int) {
	w.t.Helper()
	m, err := w.openSource(i)
	if err != nil {
		w.t.Fatalf("source %d: %v", i, err)
	}
	h := w.sources[i]
	h.m, h.io, h.act, h.released = m, nil, Actions{}, nil
	h.out, h.replies = make([][]Append, len(w.areas)), make([][]Outcome, len(w.areas))
	h.reqs, h.busy = map[uint64]*testReq{}, false
}

// crash loses the power.
func (w *world) crash() {
	w.crashed = true
	for _, a := range w.areas {
		for _, q := range a.io {
			tear(a.disk, q)
		}
		a.disk.PowerLoss()
	}
	for _, h := range w.sources {
		w.lose(h)
	}
}

// lose ends a source as a loss of power does.
func (w *world) lose(h *testSource) {
	for _, q := range h.io {
		if q.Area < 0 {
			tear(h.disk, q)
		}
	}
	h.disk.PowerLoss()
	for _, s := range append(h.store.ghosts, h.store.queue...) { // failed operations took effect before
		if w.rng.IntN(2) == 0 {
			h.store.apply(s)
		}
	}
	h.store.queue, h.store.ghosts, h.store.clock = nil, nil, 0
	for _, v := range h.store.versions {
		h.store.NoteVersion(v)
	}
	w.count(h)
	for _, k := range h.keys {
		k.crash()
	}
}

func (w *world) count(h *testSource) {
	for _, a := range w.areas {
		w.laps = max(w.laps, uint64(a.m.tail)/a.m.log.LenBytes)
	}
	s := h.m.Stats()
	w.sum.swapped += s.Swapped
	w.sum.returned += s.Returned
	w.sum.moved += s.Moved
	w.sum.reads += s.Reads
	w.sum.refused += s.Refused
}

// newDisk makes a drive with a volatile cache.
func (w *world) newDisk(n int64) *lab.Drive {
	return lab.NewDrive(lab.DriveConfig{SizeBytes: n, BlockSize: testBlock, Volatile: true, Rand: w.rng,
		Misuse: func(what string) { w.t.Fatal(what) }})
}

// request converts an I/O to a request for the drive.
func request(q *IO) ssd.Request {
	r := ssd.Request{Op: ssd.Op(q.Op), Offset: int64(q.Offset), Len: int64(len(q.Buf)), Buf: q.Buf}
	if q.FUA {
		r.Flags = ssd.FUA
	}
	return r
}

// tear writes a random subset of the blocks.
func tear(disk *lab.Drive, q IO) {
	if q.Op == pipeline.Write {
		disk.Tear(request(&q))
	}
}

func (s *testStore) apply(q *storeReq) (kvstore.Status, string) {
	v, exists := s.values[q.key]
	version := q.version
	switch {
	case q.r.Op != kvstore.Put && q.r.Op != kvstore.Delete:
	case q.r.Condition == kvstore.IfNewer && q.r.Version <= s.versions[q.key]:
		return kvstore.Superseded, ""
	case q.r.Condition == kvstore.IfNewer:
		version = q.r.Version
	case version == 0:
		version = s.NextVersion()
	}
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
		q.version, s.versions[q.key] = version, version
	case kvstore.Put:
		switch {
		case exists && q.r.Condition == kvstore.IfAbsent:
			return kvstore.Exists, ""
		case !exists && q.r.Condition == kvstore.IfPresent:
			return kvstore.NotFound, ""
		}
		s.values[q.key] = q.value
		q.version, s.versions[q.key] = version, version
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

// endStore ends a request of the store.
func (w *world) endStore(h *testSource, i int) {
	s := &h.store
	q := s.queue[i]
	s.queue = append(s.queue[:i], s.queue[i+1:]...)
	st, v := kvstore.OK, ""
	write := q.r.Op == kvstore.Put || q.r.Op == kvstore.Delete
	switch {
	case w.fail > 0 && w.rng.Float64() < w.fail:
		st = kvstore.DeviceError
		if write {
			q.version = s.NextVersion()
			s.ghosts = append(s.ghosts, q)
		}
	case q.r.Op == kvstore.Put && s.full:
		st = kvstore.CapacityExceeded
	default:
		st, v = s.apply(q)
		if write {
			for k := 0; k < len(s.ghosts); k++ { // a later write of the key supersedes them
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
		h.m.Stored(q.r.Tag, s.replyTo(q, st, v))
		return
	}
	if write {
		h.m.RequestEnded(uint32(q.r.Tag))
	}
	w.reply(h, s.replyTo(q, st, v))
}

func (s *testStore) replyTo(q *storeReq, st kvstore.Status, v string) kvstore.Reply {
	r := kvstore.Reply{Tag: q.r.Tag, Status: st, ValueLen: len(v)}
	switch {
	case st != kvstore.OK:
	case q.r.Op == kvstore.Get || q.r.Op == kvstore.Exist:
		r.Version = s.versions[q.key]
	default:
		r.Version = q.version
	}
	return r
}

// turn lets a source act.
func (w *world) turn(h *testSource) {
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
		if o.Result == Indeterminate {
			w.sum.indeterminate++
		}
		for _, h := range w.sources {
			if i := slices.Index(w.areas, a); h.m.areas[i].Source == o.Source {
				h.replies[i] = append(h.replies[i], o)
			}
		}
	}
	a.act.IOs, a.act.Outcomes = nil, nil
}

// device carries out an I/O of a disk, and reports whether the power is lost during it.
func (w *world) device(disk *lab.Drive, q IO) (err error, lost bool) {
	failed := w.fail > 0 && w.rng.Float64() < w.fail
	if q.Op == pipeline.Read {
		if failed {
			return errInjected, false
		}
		return disk.Do(request(&q)), false
	}
	if !q.FUA {
		w.t.Fatal("a write without FUA to a device with a volatile cache")
	}
	w.writes++
	if w.crashIn > 0 {
		if w.crashIn--; w.crashIn == 0 {
			tear(disk, q)
			return nil, true
		}
	}
	if failed {
		tear(disk, q)
		return errInjected, false
	}
	return disk.Do(request(&q)), false
}

// step does one random thing.
func (w *world) step() {
	w.now += w.rng.Int64N(20000)
	for _, h := range w.sources {
		w.turn(h)
	}
	for _, a := range w.areas {
		w.areaTurn(a)
	}
	type event func()
	var events []event
	for _, h := range w.sources {
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
				w.areas[q.Area].m.Release(q.Source, q.Place)
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
