package kvstore_test

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
	"jbofd/internal/kvstore/format"
	"jbofd/internal/pipeline"
)

var longFlag = flag.Bool("long", false, "crash at every write, flip every bit: minutes instead of seconds")

// seeds logs and returns the seed of a test.
func seeds(t *testing.T) uint64 {
	t.Helper()
	t.Logf("-seed %d", *kvstore.Seed)
	return *kvstore.Seed
}

// every returns n, or 1 if the run is to be long.
func every(n int) int {
	if *longFlag {
		return 1
	}
	return n
}

// times returns n, or many times that if the run is to be long.
func times(n int) int {
	if *longFlag {
		return 20 * n
	}
	return n
}

var errInjected = errors.New("injected")

// fault is what becomes of an I/O.
type fault uint8

const (
	noFault fault = iota
	// failUndone and failDone: it fails and nothing, or all, of it was done; failTorn: some blocks.
	failUndone
	failTorn
	failDone
)

// piece is a part of a write.
type piece struct {
	offset int64
	data   []byte
}

// flight is an I/O that the device has.
type flight struct {
	kvstore.IO
	due int64
	// seen is what a read returns, if it was looked up when it came and not when it ends; for a write what it was then.
	seen []byte
}

// device is a drive of bytes with a cache: a write is durable when it is complete and FUA or the cache is
// not volatile, else when a flush is. I/Os end in any order, some after very long.
type device struct {
	t   testing.TB
	rng *rand.Rand
	// volatile: the cache is.
	volatile bool
	block    int
	// durable is what outlives a loss of power, visible what is read.
	durable, visible []byte
	// cache are the blocks that are visible and not durable.
	cache   map[int64][]byte
	flights []flight
	// fault says what becomes of an I/O; nil: nothing fails.
	fault func(q *kvstore.IO) fault
	// hold is how much longer than others an I/O takes; nil: not at all.
	hold func(q *kvstore.IO) int64
	// slow is one I/O in how many that takes a hundred times as long; 0: none.
	slow int
	// written says as the how manyeth a block was written last, if not nil.
	written map[int64]int

	reads, writes, flushes int
	readBytes, writeBytes  int64
}

// take accepts an I/O.
func (d *device) take(now int64, q kvstore.IO) {
	if q.Offset < 0 || q.Offset%int64(d.block) != 0 || len(q.Buf)%d.block != 0 || q.Offset+int64(len(q.Buf)) > int64(len(d.visible)) || len(q.Buf) == 0 && q.Op != pipeline.Flush {
		d.t.Fatalf("I/O %d at %d, %d bytes", q.Op, q.Offset, len(q.Buf))
	}
	f := flight{IO: q, due: now + 5000 + d.rng.Int64N(60000)}
	if d.slow > 0 && d.rng.IntN(d.slow) == 0 {
		f.due += d.rng.Int64N(6e6)
	}
	if d.hold != nil {
		f.due += d.hold(&f.IO)
	}
	switch {
	case q.Op == pipeline.Read:
		if d.rng.IntN(2) == 0 {
			f.seen = slices.Clone(d.visible[q.Offset:][:len(q.Buf)])
		}
		// Nobody may look at it before its time.
		for i := 0; i < len(q.Buf); i += 64 {
			q.Buf[i] ^= 0xA5
		}
	case q.Op == pipeline.Write:
		f.seen = slices.Clone(q.Buf)
	}
	d.flights = append(d.flights, f)
}

// next is the index of the I/O that ends next, or -1.
func (d *device) next() int {
	best := -1
	for i := range d.flights {
		if best < 0 || d.flights[i].due < d.flights[best].due {
			best = i
		}
	}
	return best
}

// end ends an I/O.
func (d *device) end(i int) (kvstore.IO, error) {
	f := d.flights[i]
	d.flights = slices.Delete(d.flights, i, i+1)
	what := noFault
	if d.fault != nil {
		what = d.fault(&f.IO)
	}
	switch f.Op {
	case pipeline.Read:
		d.reads++
		d.readBytes += int64(len(f.Buf))
		switch {
		case what != noFault:
			for i := range f.Buf {
				f.Buf[i] = byte(d.rng.Uint32())
			}
		case f.seen != nil:
			copy(f.Buf, f.seen)
		default:
			copy(f.Buf, d.visible[f.Offset:])
		}
	case pipeline.Write:
		d.writes++
		d.writeBytes += int64(len(f.Buf))
		if !bytes.Equal(f.seen, f.Buf) {
			d.t.Fatalf("the buffer of a write at %d was changed while the device had it", f.Offset)
		}
		whole := piece{f.Offset, f.seen}
		switch {
		case what == failUndone:
		case what == failTorn:
			d.put(d.torn(whole), !d.volatile)
		default:
			d.put([]piece{whole}, !d.volatile || f.FUA)
		}
	case pipeline.Flush:
		d.flushes++
		if what == noFault || what == failDone {
			for at, b := range d.cache {
				copy(d.durable[at:], b)
			}
			clear(d.cache)
		}
	}
	if what != noFault {
		return f.IO, errInjected
	}
	return f.IO, nil
}

// put makes what was written visible, and durable or cached.
func (d *device) put(pieces []piece, durable bool) {
	for _, p := range pieces {
		copy(d.visible[p.offset:], p.data)
		for n := 0; n < len(p.data); n += d.block {
			at, b := p.offset+int64(n), p.data[n:n+d.block]
			if durable {
				copy(d.durable[at:], b)
				delete(d.cache, at)
			} else {
				d.cache[at] = b
			}
			if d.written != nil {
				d.written[at] = d.writes
			}
		}
	}
}

// torn returns nothing, all, a beginning or any of the blocks of a write.
func (d *device) torn(c piece) (pieces []piece) {
	keep := d.rng.Float64()
	end := d.rng.IntN(len(c.data)/d.block + 1)
	kind := d.rng.IntN(4)
	for at := 0; at < len(c.data); at += d.block {
		if kind == 0 || kind == 1 && at/d.block < end || kind == 2 && d.rng.Float64() < keep {
			pieces = append(pieces, piece{c.offset + int64(at), c.data[at : at+d.block]})
		}
	}
	return pieces
}

// kill ends the program: of what is under way anything may still arrive.
func (d *device) kill() {
	for _, f := range d.flights {
		if f.Op == pipeline.Write {
			d.put(d.torn(piece{f.Offset, f.seen}), !d.volatile)
		}
	}
	d.flights = nil
}

// powerLoss ends the program and takes what was not durable, or a part of it.
func (d *device) powerLoss() {
	d.kill()
	for at := int64(0); len(d.cache) > 0 && at < int64(len(d.durable)); at += int64(d.block) {
		if b := d.cache[at]; b != nil && d.rng.IntN(2) == 0 {
			copy(d.durable[at:], b)
		}
	}
	clear(d.cache)
	copy(d.visible, d.durable)
}

// rig drives a Store on a device, in its own time.
type rig struct {
	t     testing.TB
	rng   *rand.Rand
	dev   *device
	cfg   kvstore.Config
	s     *kvstore.Store
	now   int64
	act   kvstore.Actions
	reply func(kvstore.Reply)
	// crashIn is after how many more writes the program dies, 0: never; power: of a loss of power.
	crashIn        int
	power, crashed bool
	damage         []kvstore.Damage
}

// newRig formats a partition.
func newRig(t testing.TB, seed uint64, cfg kvstore.Config) *rig {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 7))
	r := &rig{t: t, rng: rng, cfg: cfg, dev: &device{cache: map[int64][]byte{}, t: t, rng: rng, volatile: cfg.FUA || cfg.Volatile, block: cfg.BlockSize, slow: 40}}
	r.dev.durable = make([]byte, cfg.PartitionBytes)
	for i := range r.dev.durable[:cfg.PartitionBytes/2] {
		r.dev.durable[i] = byte(rng.Uint32() >> 3)
	}
	r.dev.visible = slices.Clone(r.dev.durable)
	if cfg.SegTbl == nil {
		r.cfg.SegTbl = make([]byte, 5*20000)
	}
	r.cfg.Format, r.cfg.UUID, r.cfg.HashSeed = true, [16]byte{byte(seed), 2, 3}, seed*77
	if err := r.open(); err != nil {
		t.Fatal(err)
	}
	r.cfg.Format = false
	return r
}

// open makes a Store and waits until it is open, refuses, or the program dies.
func (r *rig) open() error {
	r.t.Helper()
	s, err := kvstore.New(r.cfg)
	if err != nil {
		return err
	}
	r.s, r.crashed, r.damage = s, false, nil
	r.act = kvstore.Actions{}
	for !s.Ready() && !r.crashed {
		if !r.step() && !s.Ready() && !r.crashed {
			if s.Err() == nil {
				r.t.Fatal("the store neither opens nor refuses")
			}
			return s.Err()
		}
	}
	return nil
}

// turn lets the store act, once.
func (r *rig) turn() {
	r.s.Turn(r.now, &r.act)
	for _, q := range r.act.IOs {
		r.dev.take(r.now, q)
	}
	r.act.IOs = r.act.IOs[:0]
	for _, p := range r.act.Replies {
		r.reply(p)
	}
	r.act.Replies = r.act.Replies[:0]
	r.damage = append(r.damage, r.act.Damage...)
	r.act.Damage = r.act.Damage[:0]
}

// step lets the store act, and ends an I/O or lets time pass. It returns false if there is nothing to wait for, or the program has died.
func (r *rig) step() bool {
	r.turn()
	i := r.dev.next()
	if wake := r.act.WakeNS; wake != 0 && (i < 0 || wake < r.dev.flights[i].due) {
		r.now = max(r.now+1, wake)
		return true
	}
	if i < 0 {
		return false
	}
	f := &r.dev.flights[i]
	r.now = max(r.now, f.due)
	if r.crashIn > 0 && f.Op == pipeline.Write {
		if r.crashIn--; r.crashIn == 0 {
			r.crash()
			return false
		}
	}
	q, err := r.dev.end(i)
	r.s.Complete(q.Tag, err)
	return true
}

func (r *rig) crash() {
	r.crashed, r.crashIn = true, 0
	if r.power {
		r.dev.powerLoss()
	} else {
		r.dev.kill()
	}
}

// settle goes on until nothing happens any more.
func (r *rig) settle() {
	r.t.Helper()
	for n := 0; !r.crashed && (n == 0 || !r.s.Idle()); n++ {
		if !r.step() && !r.crashed && !r.s.Idle() {
			r.t.Fatalf("the store neither acts nor is idle: %+v", r.s.Stats())
		}
		if n > 1e6 {
			r.t.Fatalf("the store does not come to rest: %+v", r.s.Stats())
		}
	}
}

// stop stops the store.
func (r *rig) stop() {
	r.t.Helper()
	r.s.Stop()
	for n := 0; !r.crashed && !r.s.Stopped(); n++ {
		if !r.step() && !r.crashed && !r.s.Stopped() || n > 1e6 {
			r.t.Fatalf("the store does not stop: %+v", r.s.Stats())
		}
	}
}

// event is a write of a key, to something or to nothing. It takes effect at some moment between start and end.
type event struct {
	version    uint32
	size       int32 // absent: -1
	start, end int
	state      eventState
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

// history is what was done to a key, as far as it may still matter.
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

// ended forgets a request, and what no other can have seen.
func (h *history) ended(start, now int) {
	h.open = slices.DeleteFunc(h.open, func(s int) bool { return s == start })
	if len(h.events) > 1 {
		h.events = h.possible(slices.Min(append(h.open, now)), now, true)
	}
}

// is reports whether a key's content is what an event wrote; got is as much of it as there was room for.
func (e *event) is(key int, got []byte, n int) bool {
	return int(e.size) == n && bytes.Equal(value(key, e.version, n)[:min(n, len(got))], got[:min(n, len(got))])
}

// value is what version of a key holds.
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
}

// model is a store that cannot be wrong, and the requests that are checked against it.
type model struct {
	*rig
	keys []history
	reqs map[uint64]*request
	tag  uint64
	// clock orders what is submitted and answered.
	clock int
	size  func() int
	// ops are drawn from.
	ops []kvstore.Op
	// tolerant: what is damaged may be said to be.
	tolerant                    bool
	done, full, failed, damaged int
	// since are all writes of each key since the last call of mark, if not nil.
	since [][]event
}

var (
	mixed   = []kvstore.Op{kvstore.Get, kvstore.Put, kvstore.Put, kvstore.Put, kvstore.Exist, kvstore.Delete}
	updates = []kvstore.Op{kvstore.Put, kvstore.Put, kvstore.Put, kvstore.Put, kvstore.Get}
)

func newModel(r *rig, keys int, size func() int) *model {
	m := &model{rig: r, keys: make([]history, keys), reqs: map[uint64]*request{}, size: size, ops: mixed}
	for i := range m.keys {
		name := fmt.Appendf(nil, "%x", i*7919)
		m.keys[i] = history{name: append(name, make([]byte, i%(format.MaxKey+1-len(name)))...), events: []event{{size: absent, state: done, end: 0}}}
	}
	r.reply = m.check
	return m
}

// on is the model continued on another rig, from what m knows now.
func (m *model) on(r *rig) *model {
	c := &model{rig: r, keys: slices.Clone(m.keys), reqs: map[uint64]*request{}, clock: m.clock, tag: m.tag, size: m.size, ops: m.ops}
	for i := range c.keys {
		c.keys[i].events = slices.Clone(c.keys[i].events)
	}
	r.reply = c.check
	return c
}

// submit sends a request and reports whether there was room for it.
func (m *model) submit(op kvstore.Op, cond kvstore.Condition, key, size int) bool {
	h := &m.keys[key]
	m.clock++
	q := &request{op: op, cond: cond, key: key, start: m.clock, version: h.version + 1, size: size}
	r := kvstore.Request{Op: op, Condition: cond, Key: slices.Clone(h.name), Tag: m.tag}
	switch op {
	case kvstore.Get:
		n := m.s.MaxValueBytes()
		if m.rng.IntN(4) == 0 {
			n = m.rng.IntN(2000)
		}
		q.buf = make([]byte, n)
		r.Value = q.buf
	case kvstore.Put:
		r.Value = value(key, q.version, size)
	case kvstore.Delete:
		q.size = absent
	}
	// The reply may come at once; the model knows the request before.
	m.reqs[m.tag] = q
	write := op == kvstore.Put || op == kvstore.Delete
	h.open = append(h.open, q.start)
	if write {
		h.version++
		h.events = append(h.events, event{version: q.version, size: int32(q.size), start: q.start, end: never})
	}
	if !m.s.Submit(&r) {
		delete(m.reqs, m.tag)
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

// mark begins to note all that is written, from what there is now and will not be lost.
func (m *model) mark() {
	m.since = make([][]event, len(m.keys))
	for i := range m.keys {
		m.since[i] = slices.Clone(m.keys[i].events)
	}
}

// rewound opens the partition after a loss of power that may have taken whatever was written since mark: every key has
// something that it had since then, or was to have.
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
	if err := m.s.Recount(m.dev.visible, true); err != nil {
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

// push submits a request as soon as there is room for it.
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
		m.t.Fatalf("op %d condition %d of key %d (%x): status %d, length %d: %s, want one of %v; all: %v", q.op, q.cond, q.key, h.name, p.Status, p.ValueLen, fmt.Sprintf(format, args...), may, h.events)
	}
	there := slices.ContainsFunc(may, func(e event) bool { return e.size != absent && (e.start != q.start) })
	missing := slices.ContainsFunc(may, func(e event) bool { return e.size == absent && (e.start != q.start) })
	switch p.Status {
	case kvstore.DeviceError:
		m.failed++
		if m.dev.fault == nil {
			fail("no I/O has failed")
		}
	case kvstore.Corrupt:
		m.damaged++
		if !m.tolerant {
			fail("nothing was damaged")
		}
	}
	if q.op == kvstore.Get || q.op == kvstore.Exist {
		switch {
		case p.Status == kvstore.DeviceError || p.Status == kvstore.Corrupt:
		case p.Status == kvstore.NotFound && !missing, p.Status == kvstore.OK && !there:
			fail("wrong")
		case p.Status == kvstore.OK && q.op == kvstore.Get && !slices.ContainsFunc(may, func(e event) bool { return e.is(q.key, q.buf, p.ValueLen) }):
			fail("wrong value")
		case p.Status != kvstore.OK && p.Status != kvstore.NotFound:
			fail("wrong status")
		}
		if p.Status == kvstore.OK && q.op == kvstore.Get {
			for _, b := range q.buf[min(p.ValueLen, len(q.buf)):] {
				if b != 0 {
					fail("something is written behind the value")
				}
			}
		}
		return
	}
	at := slices.IndexFunc(h.events, func(e event) bool { return e.start == q.start })
	e := &h.events[at]
	e.state, e.end = done, m.clock
	switch p.Status {
	case kvstore.OK:
		if !there && (q.op == kvstore.Delete || q.cond == kvstore.IfPresent) || !missing && q.cond == kvstore.IfAbsent {
			fail("wrong")
		}
	case kvstore.NotFound:
		if !missing || q.op == kvstore.Put && q.cond != kvstore.IfPresent {
			fail("wrong")
		}
		// As if it had been deleted: so it must remain.
		e.size = absent
	case kvstore.Exists:
		if !there || q.cond != kvstore.IfAbsent {
			fail("wrong")
		}
		h.events = slices.Delete(h.events, at, at+1)
	case kvstore.CapacityExceeded:
		m.full++
		if q.op == kvstore.Delete {
			fail("a Delete for want of room")
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

// exists reports whether a key, of which no request is in progress, is there.
func (m *model) exists(key int) bool {
	may := m.keys[key].possible(m.clock, m.clock, false)
	return len(may) == 1 && may[0].size != absent
}

// random runs n random requests, up to depth of them at once, and waits for them unless the program dies.
func (m *model) random(n, depth int) {
	m.t.Helper()
	for i := 0; i < n && !m.crashed; {
		if len(m.reqs) < depth && m.rng.IntN(4) > 0 {
			op := m.ops[m.rng.IntN(len(m.ops))]
			cond := kvstore.Always
			if op == kvstore.Put && m.rng.IntN(4) == 0 {
				cond = []kvstore.Condition{kvstore.IfAbsent, kvstore.IfPresent}[m.rng.IntN(2)]
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
			m.t.Fatalf("%d requests are in progress and nothing happens: %+v\n%s", len(m.reqs), m.s.Stats(), m.s.State())
		}
	}
	m.finish()
}

// finish waits until all requests are answered, or the program dies.
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

// reopen opens the partition again and compares. What was acknowledged is there; what was in progress is there
// as a whole or not at all.
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

// recount compares the counters with what is on the SSD, where nothing is under way.
func (m *model) recount() {
	m.t.Helper()
	if err := m.s.Recount(m.dev.visible, true); err != nil {
		m.t.Fatal(err)
	}
}

// compare reads all keys, and believes from then on what it has found.
func (m *model) compare(restarted bool) {
	m.t.Helper()
	buf := make([]byte, m.s.MaxValueBytes())
	objects := int64(0)
	for i := range m.keys {
		h := &m.keys[i]
		may := h.possible(m.clock, m.clock, restarted)
		p := m.do(kvstore.Request{Op: kvstore.Get, Key: h.name, Value: buf})
		at := slices.IndexFunc(may, func(e event) bool {
			return p.Status == kvstore.NotFound && e.size == absent || p.Status == kvstore.OK && e.is(i, buf, p.ValueLen)
		})
		if at < 0 && p.Status == kvstore.Corrupt && m.tolerant {
			m.damaged++
			continue
		}
		if at < 0 {
			m.t.Fatalf("key %d (%x): status %d, length %d, want one of %v; all: %v", i, h.name, p.Status, p.ValueLen, may, h.events)
		}
		h.open = nil
		h.events = []event{{version: may[at].version, size: may[at].size, state: done, start: m.clock, end: m.clock}}
		if may[at].size != absent {
			objects++
		}
	}
	m.clock++
	if m.damaged == 0 {
		m.audit(objects)
	}
}

// audit compares the counters with what is there, no request being in progress: the number of objects; and the live bytes, which are
// those of all values and keys, and of segments no more than they can be.
func (m *model) audit(objects int64) {
	m.t.Helper()
	st := m.s.Stats()
	if st.Objects != objects {
		m.t.Errorf("%d objects, want %d", st.Objects, objects)
	}
	least, most := int64(0), st.Segments*(format.SegmentHeaderBytes+format.KeyUnit-1)
	for i := range m.keys {
		h := &m.keys[i]
		e := h.events[0]
		// A key that a split took to another segment may be in both.
		most += 2 * int64(format.ItemHeaderBytes+len(h.name))
		if e.size == absent {
			continue
		}
		n := int64(format.ItemHeaderBytes + len(h.name))
		if e.size > 0 {
			n += int64(format.ValueBytes(int(e.size)))
		}
		least += n
		most += n
	}
	if st.LiveBytes < least || st.LiveBytes > most {
		m.t.Errorf("%d bytes live, want %d to %d", st.LiveBytes, least, most)
	}
}

// small is a configuration in which everything happens soon: chunks and groups are small, the table grows.
func small(chunks int64) kvstore.Config {
	return kvstore.Config{PartitionBytes: chunks*(128<<10) + 128<<10, BlockSize: 512, ChunkBytes: 128 << 10, GroupBytes: 8 << 10, KeysPerSegment: 6, FUA: true, Requests: 64}
}

// variant is small, with one thing or another changed.
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

// sizes draws lengths of values up to most, those often that have been somebody's undoing.
func sizes(rng *rand.Rand, most int) func() int {
	return func() int {
		s := [...]int{0, 1, 272, 304, 528, 1008, 256, 1024, 100, 2000, 4096, rng.IntN(3000)}
		if rng.IntN(100) == 0 {
			return rng.IntN(most + 1)
		}
		return min(most, s[rng.IntN(len(s))])
	}
}
