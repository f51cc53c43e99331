package kvstore_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
)

// event is a Put or Delete of a key. It takes effect at some moment between start and end.
type event struct {
	version    uint32
	size       int32 // absent: -1
	start, end int
	state      eventState
	// given is the version that the store has given to the object, as far as a reply has told; 0: not known, or absent.
	given uint64
}

type eventState uint8

const (
	pending eventState = iota
	done
	failed // it may be found after a restart
)

const (
	absent = -1
	never  = 1 << 60
)

// history has the writes of a key that may still determine its content.
type history struct {
	name    []byte
	events  []event
	version uint32
	// open are the starts of requests in progress.
	open []int
}

// possible returns what the key may hold at some moment from start to end.
func (h *history) possible(start, end int, restarted bool) (out []event) {
	for i := range h.events {
		e := &h.events[i]
		if e.start > end || e.state == failed && !restarted {
			continue
		}
		over := false
		for j := range h.events {
			o := &h.events[j]
			over = over || o.state == done && o.start > e.end && o.end < start
		}
		if !over {
			out = append(out, *e)
		}
	}
	return out
}

// passes reports whether each passes over the key: it was never written.
func (m *model) passes(key int) bool {
	h := &m.keys[key]
	return !m.tolerant && m.damaged == 0 && key%16 != 0 && h.version == 0 && len(h.events) == 1 &&
		h.events[0].size == absent
}

// ended removes a request, and the events that no other request can have observed.
func (h *history) ended(start, now int) {
	h.open = slices.DeleteFunc(h.open, func(s int) bool { return s == start })
	if len(h.events) > 1 {
		h.events = h.possible(slices.Min(append(h.open, now)), now, true)
	}
}

// is reports whether a key's content is what an event wrote. got is the part of the value that fitted the buffer, given
// the version in the reply.
func (e *event) is(key int, got []byte, n int, given uint64) bool {
	got = got[:min(n, len(got))]
	return int(e.size) == n && (e.given == 0 || e.given == given) &&
		bytes.Equal(value(key, e.version, n)[:len(got)], got)
}

// value returns the content of a version of a key.
func value(key int, version uint32, n int) []byte {
	b := make([]byte, n+8)
	x := uint64(key)<<32 | uint64(version) | 1<<63
	for i := 0; i < n; i += 8 {
		x = x*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(b[i:], x^x>>29)
	}
	return b[:n]
}

type request struct {
	op    kvstore.Op
	cond  kvstore.Condition
	key   int
	start int
	// version of a Put or Delete.
	version uint32
	size    int
	buf     []byte
	// expected is the version that an IfVersion names.
	expected uint64
}

// model knows what each key may contain, and checks the replies of the store.
type model struct {
	*rig
	keys []history
	reqs map[uint64]*request
	tag  uint64
	// clock numbers submissions and replies in order.
	clock int
	// longest is the length of the longest value that is written in pieces, or 0.
	longest int
	// given are all versions that the store has given to objects and Deletes.
	given map[uint64]bool
	size  func() int
	// free are buffers for Gets, all zeroes.
	free [][]byte
	// ops are the operations that random draws from.
	ops []kvstore.Op
	// tolerant allows replies that report damage, of the keys in hurt if that is not nil.
	tolerant                              bool
	hurt                                  map[int]bool
	done, full, failed, damaged, noMemory int
	// since has all writes of each key since the last call of mark. It is nil before the first call. segments is how
	// many segments there were then. added are the keys whose segment a split has added since, as far as that matters.
	since    [][]event
	segments uint32
	added    []bool
}

var (
	mixed   = []kvstore.Op{kvstore.Get, kvstore.Put, kvstore.Put, kvstore.Put, kvstore.Exist, kvstore.Delete}
	updates = []kvstore.Op{kvstore.Put, kvstore.Put, kvstore.Put, kvstore.Put, kvstore.Get}
)

func newModel(r *rig, keys int, size func() int) *model {
	m := &model{rig: r, keys: make([]history, keys), reqs: map[uint64]*request{}, size: size, ops: mixed,
		given: map[uint64]bool{}}
	for i := range m.keys {
		name := fmt.Appendf(nil, "%x", i*7919)
		m.keys[i] = history{name: append(name, make([]byte, i%(format.MaxKey+1-len(name)))...),
			events: []event{{size: absent, state: done, end: 0}}}
	}
	r.reply = m.check
	return m
}

// on returns a copy of the model for another rig.
func (m *model) on(r *rig) *model {
	c := &model{rig: r, keys: slices.Clone(m.keys), reqs: map[uint64]*request{}, clock: m.clock, tag: m.tag,
		size: m.size, ops: m.ops, added: m.added, given: maps.Clone(m.given)}
	for i := range c.keys {
		c.keys[i].events = slices.Clone(c.keys[i].events)
	}
	r.reply = c.check
	return c
}

// buffer returns one for the longest value, all zeroes.
func (m *model) buffer() []byte {
	if n := len(m.free); n > 0 {
		b := m.free[n-1]
		m.free = m.free[:n-1]
		return b
	}
	return make([]byte, m.s.MaxValueBytes())
}

var zeroes [4096]byte

func zero(b []byte) bool {
	for len(b) > len(zeroes) {
		if !bytes.Equal(b[:len(zeroes)], zeroes[:]) {
			return false
		}
		b = b[len(zeroes):]
	}
	return bytes.Equal(b, zeroes[:len(b)])
}

// submit sends a request and reports whether the store took it.
func (m *model) submit(op kvstore.Op, cond kvstore.Condition, key, size int) bool {
	h := &m.keys[key]
	m.clock++
	q := &request{op: op, cond: cond, key: key, start: m.clock, version: h.version + 1, size: size}
	if cond == kvstore.IfVersion && m.rng.IntN(4) > 0 {
		q.expected = h.events[m.rng.IntN(len(h.events))].given
		if m.rng.IntN(8) == 0 {
			q.expected++
		}
	}
	r := kvstore.Request{Op: op, Condition: cond, Key: slices.Clone(h.name), Tag: m.tag, Version: q.expected}
	switch op {
	case kvstore.Get:
		n := m.s.MaxValueBytes()
		if m.rng.IntN(4) == 0 {
			n = m.rng.IntN(2000)
		}
		q.buf = m.buffer()[:n]
		r.Value = q.buf
	case kvstore.Put:
		r.Value = value(key, q.version, size)
	case kvstore.Delete:
		q.size = absent
	}
	// The model must know the request before Submit, because the reply may come at once.
	m.reqs[m.tag] = q
	write := op == kvstore.Put || op == kvstore.Delete
	h.open = append(h.open, q.start)
	if write {
		h.version++
		h.events = append(h.events, event{version: q.version, size: int32(q.size), start: q.start, end: never})
	}
	if !m.s.Submit(&r) {
		delete(m.reqs, m.tag)
		if op == kvstore.Get {
			m.free = append(m.free, q.buf[:cap(q.buf)])
		}
		h.open = h.open[:len(h.open)-1]
		if write {
			h.events = h.events[:len(h.events)-1]
		}
		return false
	}
	// Both were copied.
	clear(r.Key)
	if op == kvstore.Put {
		clear(r.Value)
	}
	m.tag++
	if write && m.since != nil {
		m.since[key] = append(m.since[key], h.events[len(h.events)-1])
	}
	return true
}

// mark starts to record all writes, beginning with the present content, which is durable.
func (m *model) mark() {
	m.since, m.segments = make([][]event, len(m.keys)), uint32(m.s.Stats().Segments)
	for i := range m.keys {
		m.since[i] = slices.Clone(m.keys[i].events)
	}
}

// rewound opens the partition after a loss of power that may have undone all writes since mark. Every key must have a
// value that it had at some time since then, or one that was being written.
func (m *model) rewound() {
	m.t.Helper()
	m.crashIn = 0
	clear(m.reqs)
	if err := m.open(); err != nil {
		m.t.Fatal(err)
	}
	if m.crashed {
		return
	}
	if err := m.s.Recount(m.dev.Visible, true); err != nil {
		m.t.Fatal(err)
	}
	for i := range m.keys {
		m.keys[i].open, m.keys[i].events = nil, slices.Clone(m.since[i])
		for j := range m.keys[i].events {
			m.keys[i].events[j].state, m.keys[i].events[j].end = failed, never
		}
	}
	m.compare(true)
}

// push submits a request as soon as the store takes it.
func (m *model) push(op kvstore.Op, key, size int) {
	m.t.Helper()
	for n, idle := 0, 0; !m.submit(op, kvstore.Always, key, size); n++ {
		if m.step() {
			idle = 0
		} else if idle++; idle > 1 || n > 1e6 {
			m.t.Fatalf("%d requests are in progress, none is taken and nothing happens: %+v", len(m.reqs), m.s.Stats())
		}
	}
}

func (m *model) check(p kvstore.Reply) {
	q := m.reqs[p.Tag]
	if q == nil {
		m.t.Fatalf("a reply to no request: %+v", p)
	}
	delete(m.reqs, p.Tag)
	m.clock++
	m.done++
	h := &m.keys[q.key]
	defer h.ended(q.start, m.clock)
	may := h.possible(q.start, m.clock, false)
	fail := func(format string, args ...any) {
		m.t.Helper()
		m.t.Fatalf("op %d condition %d of key %d (%x): status %d, length %d: %s, want one of %v; all: %v", q.op, q.cond,
			q.key, h.name, p.Status, p.ValueLen, fmt.Sprintf(format, args...), may, h.events)
	}
	m.checkVersion(q, p, may, fail)
	there := slices.ContainsFunc(may, func(e event) bool { return e.size != absent && (e.start != q.start) })
	missing := slices.ContainsFunc(may, func(e event) bool { return e.size == absent && (e.start != q.start) })
	switch p.Status {
	case kvstore.DeviceError:
		m.failed++
		// A record that is damaged where a later group is being written may be put right by that.
		if m.dev.Fault == nil && !m.isUnreadable(q.key) && !m.mayBeDamaged(q.key) {
			m.t.Logf("at %d: %+v\n%s", m.now, m.s.Stats(), m.s.State())
			fail("no I/O has failed")
		}
	case kvstore.Corrupt:
		m.damaged++
		if !m.mayBeDamaged(q.key) {
			fail("nothing of it was damaged")
		}
	}
	if q.op == kvstore.Get || q.op == kvstore.Exist {
		switch {
		case p.Status == kvstore.DeviceError || p.Status == kvstore.Corrupt:
		case p.Status == kvstore.NotFound && !missing, p.Status == kvstore.OK && !there:
			fail("wrong")
		case p.Status == kvstore.OK && q.op == kvstore.Get &&
			!slices.ContainsFunc(may, func(e event) bool { return e.is(q.key, q.buf, p.ValueLen, p.Version) }):
			fail("wrong value")
		case p.Status != kvstore.OK && p.Status != kvstore.NotFound:
			fail("wrong status")
		}
		if q.op == kvstore.Get {
			whole := q.buf[:cap(q.buf)]
			if p.Status != kvstore.OK {
				clear(whole)
			} else if n := min(p.ValueLen, len(q.buf)); !zero(whole[n:]) {
				fail("something is written behind the value")
			} else {
				clear(whole[:n])
			}
			m.free = append(m.free, whole)
		}
		return
	}
	at := slices.IndexFunc(h.events, func(e event) bool { return e.start == q.start })
	e := &h.events[at]
	e.state, e.end = done, m.clock
	switch p.Status {
	case kvstore.OK:
		e.given = p.Version
		// It is not known of a key that was lost whether it exists, so that its Delete succeeds in any case.
		if !there && (q.op == kvstore.Delete && !m.mayBeDamaged(q.key) || q.cond == kvstore.IfPresent) ||
			!missing && q.cond == kvstore.IfAbsent {
			fail("wrong")
		}
	case kvstore.NotFound:
		if !missing || q.op == kvstore.Put && q.cond != kvstore.IfPresent || q.expected != 0 {
			fail("wrong")
		}
		// The key does not exist, as if it had been deleted, and it must stay so.
		e.size = absent
	case kvstore.VersionMismatch:
		if q.cond != kvstore.IfVersion {
			fail("wrong")
		}
		h.events = slices.Delete(h.events, at, at+1)
	case kvstore.Exists:
		if !there || q.cond != kvstore.IfAbsent {
			fail("wrong")
		}
		h.events = slices.Delete(h.events, at, at+1)
	case kvstore.CapacityExceeded:
		m.full++
		if q.op == kvstore.Delete {
			m.t.Logf("%+v\n%s", m.s.Stats(), m.s.State())
			fail("a Delete for want of room")
		}
		h.events = slices.Delete(h.events, at, at+1)
	case kvstore.NoMemory:
		m.noMemory++
		if m.cfg.Alloc == nil {
			fail("there is memory")
		}
		h.events = slices.Delete(h.events, at, at+1)
	case kvstore.Corrupt:
		h.events = slices.Delete(h.events, at, at+1)
	case kvstore.DeviceError:
		e.state = failed
	default:
		fail("wrong status")
	}
}

// mayBeDamaged reports whether a reply may say that a key is damaged.
func (m *model) mayBeDamaged(key int) bool { return m.tolerant && (m.hurt == nil || m.hurt[key]) }

// isUnreadable reports whether a block of the segment of a key, or of its value, cannot be read.
func (m *model) isUnreadable(key int) bool {
	return slices.ContainsFunc(m.dev.UnreadableBlocks(), func(at int64) bool {
		return m.s.Hurts(m.dev.Visible, at, int64(m.dev.BlockSize()), m.keys[key].name)
	})
}

// exists reports whether a key exists. No request for it may be in progress.
func (m *model) exists(key int) bool {
	may := m.keys[key].possible(m.clock, m.clock, false)
	return len(may) == 1 && may[0].size != absent
}

// random runs n random requests, up to depth of them at once, and waits for them unless the process dies.
func (m *model) random(n, depth int) {
	m.t.Helper()
	for i := 0; i < n && !m.crashed; {
		if len(m.reqs) < depth && m.rng.IntN(4) > 0 {
			op := m.ops[m.rng.IntN(len(m.ops))]
			cond := kvstore.Always
			if op == kvstore.Put && m.rng.IntN(4) == 0 {
				cond = []kvstore.Condition{kvstore.IfAbsent, kvstore.IfPresent, kvstore.IfVersion}[m.rng.IntN(3)]
			} else if op == kvstore.Delete && m.rng.IntN(4) == 0 {
				cond = kvstore.IfVersion
			}
			key := m.rng.IntN(len(m.keys))
			if m.rng.IntN(5) == 0 {
				key = m.rng.IntN(min(4, len(m.keys)))
			}
			if m.submit(op, cond, key, m.size()) {
				i++
				continue
			}
		}
		if !m.step() && !m.crashed && len(m.reqs) >= depth {
			m.t.Fatalf("%d requests are in progress and nothing happens: %+v\n%s", len(m.reqs), m.s.Stats(),
				m.s.State())
		}
	}
	m.finish()
}

// finish waits until all requests are answered, or the process dies.
func (m *model) finish() {
	m.t.Helper()
	for n := 0; len(m.reqs) > 0 && !m.crashed; n++ {
		if !m.step() && !m.crashed && len(m.reqs) > 0 || n > 3e6 {
			m.t.Fatalf("%d requests get no answer: %+v\n%s", len(m.reqs), m.s.Stats(), m.s.State())
		}
	}
}

// do runs one request to its end.
func (m *model) do(q kvstore.Request) kvstore.Reply {
	m.t.Helper()
	var got *kvstore.Reply
	before := m.reply
	m.reply = func(p kvstore.Reply) {
		if p.Tag == 1<<63 {
			got = &p
		} else {
			before(p)
		}
	}
	q.Tag = 1 << 63
	for n := 0; !m.s.Submit(&q); n++ {
		if !m.step() || n > 1e6 {
			m.t.Fatalf("op %d of %x is not taken: %+v", q.Op, q.Key, m.s.Stats())
		}
	}
	for n := 0; got == nil; n++ {
		if !m.step() && got == nil || n > 1e6 {
			m.t.Fatalf("op %d of %x gets no answer: %+v", q.Op, q.Key, m.s.Stats())
		}
	}
	m.reply = before
	return *got
}

// reopen opens the partition again and compares all keys. Acknowledged writes are there; a write that was in progress
// is there completely or not at all.
func (m *model) reopen() {
	m.t.Helper()
	m.crashIn = 0
	clear(m.reqs)
	if err := m.open(); err != nil {
		m.t.Fatal(err)
	}
	if !m.tolerant {
		m.recount()
	}
	m.compare(true)
}

// recount compares the counters with the content of the SSD. No request may be in progress.
func (m *model) recount() {
	m.t.Helper()
	if err := m.s.Recount(m.dev.Visible, true); err != nil {
		m.t.Fatal(err)
	}
}

// small is a configuration in which compaction, splits and checkpoints happen early: chunks and groups are small, and
// the table grows.
func small(chunks int64) kvstore.Config {
	return kvstore.Config{PartitionBytes: chunks*(128<<10) + 128<<10, BlockSize: 512, ChunkBytes: 128 << 10,
		GroupBytes: 8 << 10, KeysPerSegment: 6, FUA: true, Requests: 64}
}

// variant is small with some fields changed, depending on the seed.
func variant(seed uint64, chunks int64) kvstore.Config {
	cfg := small(chunks)
	cfg.FUA = seed&1 == 0
	if seed&2 != 0 {
		cfg.BlockSize, cfg.GroupBytes = 4096, 16<<10
	} else if seed&4 != 0 {
		cfg.GroupBytes = 1 << 10
	}
	if seed&8 != 0 {
		cfg.CheckpointBytes = 300 << 10
	}
	if seed&16 != 0 {
		cfg.KeysPerSegment = 14
	}
	return cfg
}

// sizes draws lengths of values up to most, with lengths that have exposed bugs more often.
func sizes(rng *rand.Rand, most int) func() int {
	return func() int {
		s := [...]int{0, 1, 272, 304, 528, 1008, 256, 1024, 100, 2000, 4096, rng.IntN(3000)}
		if rng.IntN(100) == 0 {
			return rng.IntN(most + 1)
		}
		return min(most, s[rng.IntN(len(s))])
	}
}
