package kvstore

import (
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/buildtags"
	"jbofd/internal/kvstore/chunks"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/pipeline"
)

var seed = flag.Uint64("seed", 1, "seed of the random tests; the same each time, so that a failure repeats")

var errInjected = errors.New("injected")

// rig drives a Store on a device of its own: I/Os complete in any order, at the moment of their
// completion they happen.
type rig struct {
	t     testing.TB
	rng   *rand.Rand
	cfg   Config
	s     *Store
	disk  []byte
	now   int64
	io    []IO
	act   Actions
	reply func(Reply)
	// fail is the probability that an I/O fails.
	fail float64
	// crashIn is after how many further writes the power is lost, with a random part of the last in place; 0: never.
	crashIn         int
	crashed         bool
	writes          int
	reads, bytesOut int64
}

func newRig(t testing.TB, seed uint64, cfg Config) *rig {
	r := &rig{t: t, rng: rand.New(rand.NewPCG(seed, 7)), cfg: cfg, disk: make([]byte, cfg.PartitionBytes)}
	if cfg.SegTbl == nil {
		r.cfg.SegTbl = make([]byte, 5*100000)
	}
	r.cfg.Format, r.cfg.UUID, r.cfg.HashSeed = true, [16]byte{1, 2, 3}, 42
	r.open()
	r.cfg.Format = false
	return r
}

func (r *rig) open() {
	r.t.Helper()
	s, err := New(r.cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.s, r.crashed, r.io = s, false, nil
	r.act.IOs, r.act.Replies = nil, nil
	for !s.Ready() && s.Err() == nil && !r.crashed {
		r.step()
	}
	if s.Err() != nil {
		r.t.Fatalf("open: %v", s.Err())
	}
}

// turn lets the store act, once.
func (r *rig) turn() {
	r.s.Turn(r.now, &r.act)
	r.io = append(r.io, r.act.IOs...)
	for _, p := range r.act.Replies {
		r.reply(p)
	}
	r.act.IOs, r.act.Replies = r.act.IOs[:0], r.act.Replies[:0]
}

// step lets the store act and completes one I/O, any.
func (r *rig) step() bool {
	r.turn()
	if len(r.io) == 0 {
		if r.act.WakeNS > r.now {
			r.now = r.act.WakeNS
			return true
		}
		return false
	}
	r.now += r.rng.Int64N(20000)
	i := r.rng.IntN(len(r.io))
	q := r.io[i]
	r.io[i] = r.io[len(r.io)-1]
	r.io = r.io[:len(r.io)-1]
	fail := r.fail > 0 && r.rng.Float64() < r.fail
	block := r.cfg.BlockSize
	if q.Offset%int64(block) != 0 || len(q.Buf)%block != 0 || q.Offset+int64(len(q.Buf)) > int64(len(r.disk)) {
		r.t.Fatalf("I/O at %d, %d bytes", q.Offset, len(q.Buf))
	}
	switch q.Op {
	case pipeline.Read:
		r.reads++
		copy(q.Buf, r.disk[q.Offset:])
		if fail {
			clear(q.Buf)
		}
	case pipeline.Write:
		if !q.FUA {
			r.t.Fatal("a write without FUA to a device with a volatile cache")
		}
		r.writes++
		r.bytesOut += int64(len(q.Buf))
		if r.crashIn > 0 {
			if r.crashIn--; r.crashIn == 0 {
				r.crash(q)
				return false
			}
		}
		if fail {
			r.tear(q)
		} else {
			copy(r.disk[q.Offset:], q.Buf)
		}
	}
	var err error
	if fail {
		err = errInjected
	}
	r.s.Complete(q.Tag, err)
	return true
}

// tear writes any of the blocks.
func (r *rig) tear(q IO) {
	p := r.rng.Float64() * 1.5
	for at := 0; at < len(q.Buf); at += r.cfg.BlockSize {
		if r.rng.Float64() < p {
			copy(r.disk[q.Offset+int64(at):], q.Buf[at:at+r.cfg.BlockSize])
		}
	}
}

// crash loses the power: what is under way is torn.
func (r *rig) crash(q IO) {
	r.crashed = true
	r.tear(q)
	for _, q := range r.io {
		if q.Op == pipeline.Write {
			r.tear(q)
		}
	}
	r.io = nil
}

// do runs one request to its end.
func (r *rig) do(q Request) Reply {
	r.t.Helper()
	var got *Reply
	r.reply = func(p Reply) { got = &p }
	for !r.s.Submit(&q) {
		r.step()
	}
	for got == nil {
		if !r.step() && got == nil {
			r.t.Fatalf("%v of %x gets no answer", q.Op, q.Key)
		}
	}
	return *got
}

// idle waits until nothing is going on.
func (r *rig) idle() {
	r.t.Helper()
	for n := 0; !r.s.Idle() || n == 0; n++ {
		if !r.step() && !r.s.Idle() {
			r.t.Fatalf("the store neither acts nor is idle")
		}
		if r.crashed {
			return
		}
	}
}

// state describes a store that is stuck.
func (r *rig) state() string {
	s := r.s
	out := fmt.Sprintf("ios %d, free %d need %d reserve %d, ckpt %d busy %v spent %d retry %d, victims %+v nothing %v futile %d running %d, split %+v, dirty %d", len(s.ios)-len(s.freeIO), s.pool.Free, s.budget.Need, s.budget.Reserve(),
		s.ckpt.stage, s.ckpt.busy, s.pool.Spent, s.ckpt.retryNS-r.now, s.compact.slots, s.compact.nothing, s.compact.futile, s.compact.running, s.split, s.dirty.n)
	for l := range s.logs {
		log := &s.logs[l]
		out += fmt.Sprintf("\nlog %d: chunk %d tail %d opening %v starved %v open %d sealed %d free %d inflight %d", l, log.chunk, log.tail, log.opening, log.starved, log.open, log.sealed.n, log.free.n, log.inflight)
	}
	for _, head := range s.table {
		for i := head; i != nobody; i = s.segs[i].chain {
			a := &s.segs[i]
			out += fmt.Sprintf("\nsegment %d (%d): state %d dirty %v held %v force %v waiting %d writing %d", a.number, i, a.state, a.dirty, a.held, a.force, a.waiting.n, a.writing.n)
			for o := a.waiting.first; o != nobody; o = s.ops[o].next {
				out += fmt.Sprintf("\n  op %d: kind %d ready %v group %d", o, s.ops[o].kind, s.ops[o].ready, s.ops[o].group)
			}
		}
	}
	return out
}

// stop stops the store.
func (r *rig) stop() {
	r.s.Stop()
	for !r.s.Stopped() {
		if !r.step() && !r.s.Stopped() {
			r.t.Fatal("the store does not stop")
		}
	}
}

// value is the value of a key's version: version and pattern.
func value(key int, version uint32, n int) []byte {
	b := make([]byte, n)
	x := uint64(key)<<32 | uint64(version)
	for i := range b {
		if i%8 == 0 {
			x = x*6364136223846793005 + 1442695040888963407
		}
		b[i] = byte(x >> (8 * (uint(i % 8)) & 63))
	}
	return b
}

func digest(b []byte) uint64 {
	h := fnv.New64a()
	h.Write(b)
	return h.Sum64() ^ uint64(len(b))
}

// absent stands for no value.
const absent = 0

// keyModel is what a key may hold. Writes of one key that overlap end in any order.
type keyModel struct {
	may      []uint64
	batch    []uint64 // of the writes in progress and those that overlapped them
	failed   []uint64
	inflight int
	gets     []*request
	version  uint32
}

type request struct {
	op   Op
	key  int
	sum  uint64
	may  []uint64
	sure bool
	buf  []byte
}

// model is a store that cannot be wrong, and the requests that are checked against it.
type model struct {
	*rig
	keys  []keyModel
	reqs  map[uint64]*request
	tag   uint64
	size  func() int
	count [4]int
	full  int
}

func newModel(r *rig, keys int, size func() int) *model {
	m := &model{rig: r, keys: make([]keyModel, keys), reqs: map[uint64]*request{}, size: size}
	for i := range m.keys {
		m.keys[i].may = []uint64{absent}
	}
	r.reply = m.check
	return m
}

func keyOf(i int) []byte {
	n := 1 + i%16
	if n < 4 {
		n += 4
	}
	k := []byte(fmt.Sprintf("%04x", i))
	for len(k) < n {
		k = append(k, byte(i*len(k)))
	}
	return k[:n]
}

// submit sends one request at random.
func (m *model) submit(op Op, key int) bool {
	k := &m.keys[key]
	q := &request{op: op, key: key}
	r := Request{Op: op, Key: keyOf(key), Tag: m.tag}
	switch op {
	case Get, Exist:
		q.buf = make([]byte, m.s.MaxValueBytes())
		r.Value = q.buf
		q.may = append(append(slices.Clone(k.may), k.batch...), k.failed...)
	case Put:
		r.Value = value(key, k.version, m.size())
		q.sum = digest(r.Value)
	case Delete:
		q.sum = absent
		q.sure = k.inflight == 0 && len(k.gets) >= 0 && len(k.failed) == 0
		q.may = slices.Clone(k.may)
	}
	// The reply may come at once; the model knows the request before.
	m.reqs[m.tag] = q
	if !m.s.Submit(&r) {
		delete(m.reqs, m.tag)
		return false
	}
	m.tag++
	if op == Put || op == Delete {
		k.version++
		k.inflight++
		k.batch = append(k.batch, q.sum)
		for _, g := range k.gets {
			g.may = append(g.may, q.sum)
			g.sure = false
		}
		if k.inflight > 1 {
			for _, o := range m.reqs {
				if o.key == key {
					o.sure = false
				}
			}
		}
	} else {
		k.gets = append(k.gets, q)
	}
	return true
}

func (m *model) check(p Reply) {
	q := m.reqs[p.Tag]
	if q == nil {
		m.t.Fatalf("a reply to no request: %+v", p)
	}
	delete(m.reqs, p.Tag)
	k := &m.keys[q.key]
	m.count[q.op]++
	if p.Status == Corrupt || p.Status == DeviceError && m.fail == 0 {
		m.t.Fatalf("op %d of key %d: status %d", q.op, q.key, p.Status)
	}
	switch q.op {
	case Get, Exist:
		k.gets = slices.DeleteFunc(k.gets, func(g *request) bool { return g == q })
		got := uint64(absent)
		switch {
		case p.Status == DeviceError:
			return
		case p.Status == OK:
			got = digest(q.buf[:p.ValueLen])
		}
		if q.op == Exist && p.Status == OK {
			if !slices.ContainsFunc(q.may, func(v uint64) bool { return v != absent }) {
				m.t.Fatalf("key %d exists, want it absent", q.key)
			}
			return
		}
		if !slices.Contains(q.may, got) {
			m.t.Fatalf("op %d of key %d: status %d, length %d, digest %x, want one of %x", q.op, q.key, p.Status, p.ValueLen, got, q.may)
		}
	default:
		k.inflight--
		switch p.Status {
		case OK, NotFound:
			if q.sure && p.Status == OK && !slices.ContainsFunc(q.may, func(v uint64) bool { return v != absent }) {
				m.t.Fatalf("key %d was deleted, and was not there", q.key)
			}
			if q.sure && p.Status == NotFound && !slices.Contains(q.may, absent) {
				m.t.Fatalf("key %d was not found to delete, want one of %x", q.key, q.may)
			}
		case DeviceError:
			k.batch = slices.Delete(k.batch, slices.Index(k.batch, q.sum), slices.Index(k.batch, q.sum)+1)
			k.failed = append(k.failed, q.sum)
		case CapacityExceeded:
			if q.op == Delete {
				m.t.Fatalf("a Delete for want of space")
			}
			m.full++
			k.batch = slices.Delete(k.batch, slices.Index(k.batch, q.sum), slices.Index(k.batch, q.sum)+1)
		default:
			m.t.Fatalf("op %d of key %d: status %d", q.op, q.key, p.Status)
		}
		if k.inflight == 0 {
			if len(k.batch) > 0 {
				k.may, k.batch = k.batch, nil
				if len(k.failed) > 0 {
					k.may = append(k.may, k.failed...)
				}
				k.failed = nil
			}
		}
	}
}

// random runs n random requests, up to depth of them at once, and waits for them unless there is a crash.
func (m *model) random(n, depth int) {
	for i := 0; i < n && !m.crashed; {
		if len(m.reqs) < depth && m.rng.IntN(3) > 0 {
			op := [...]Op{Get, Put, Put, Put, Exist, Delete}[m.rng.IntN(6)]
			if m.submit(op, m.rng.IntN(len(m.keys))) {
				i++
				continue
			}
		}
		if !m.step() && !m.crashed && len(m.reqs) >= depth {
			m.t.Fatalf("%d requests in progress and nothing happens\n%s", len(m.reqs), m.state())
		}
	}
	for !m.crashed && len(m.reqs) > 0 {
		if !m.step() && !m.crashed && len(m.reqs) > 0 {
			m.t.Fatalf("%d requests get no answer\n%s", len(m.reqs), m.state())
		}
	}
}

// reopen opens the partition again after a crash, and compares: what was acknowledged is there, what was
// in progress is there whole or not at all.
func (m *model) reopen() {
	m.t.Helper()
	fail := m.fail
	m.fail, m.crashIn = 0, 0
	m.rig.open()
	m.reply = m.check
	clear(m.reqs)
	for i := range m.keys {
		k := &m.keys[i]
		k.may = append(append(k.may, k.batch...), k.failed...)
		k.batch, k.failed, k.gets, k.inflight = nil, nil, nil, 0
	}
	for i := range m.keys {
		k := &m.keys[i]
		var got uint64
		buf := make([]byte, m.s.MaxValueBytes())
		p := m.do(Request{Op: Get, Key: keyOf(i), Value: buf})
		switch p.Status {
		case OK:
			got = digest(buf[:p.ValueLen])
		case NotFound:
			got = absent
		default:
			m.t.Fatalf("after a restart key %d: status %d", i, p.Status)
		}
		if !slices.Contains(k.may, got) {
			m.t.Fatalf("after a restart key %d: status %d, length %d, digest %x, want one of %x", i, p.Status, p.ValueLen, got, k.may)
		}
		k.may = []uint64{got}
	}
	m.reply = m.check
	m.fail = fail
	m.audit(false)
}

// audit compares the counters with what the logs hold. exact: after no crash and no fault.
func (m *model) audit(exact bool) {
	m.t.Helper()
	s := m.s
	live := make([]int64, len(s.pool.Chunks))
	objects := int64(0)
	for n := range s.tbl.Len() {
		e := s.tbl.Get(n)
		if e == 0 {
			continue
		}
		seg := format.Segment(m.disk[e.Offset():])
		if err := seg.Check(s.pool.Seed(e.Offset())); err != nil {
			m.t.Fatalf("segment %d: %v", n, err)
		}
		live[s.pool.Of(e.Offset())] += int64(format.RoundUp(seg.LengthBytes(), format.KeyUnit))
		for at := format.SegmentHeaderBytes; at < seg.LengthBytes(); {
			it := seg.Item(at)
			at += it.LengthBytes()
			if s.tbl.Segment(format.HashKey(s.hashSeed, it.Key())) != n {
				continue
			}
			objects++
			if it.ValueLen() == 0 {
				continue
			}
			live[s.pool.Of(it.ValueOffset())] += int64(format.ValueBytes(it.ValueLen()))
		}
	}
	total, free := int64(0), 0
	for i := range s.pool.Chunks {
		c := s.pool.Chunks[i]
		if c.State == chunks.Free {
			free++
			c.Live = 0
		}
		total += int64(c.Live)
		if int64(c.Live) < live[i] || exact && int64(c.Live) != live[i] {
			m.t.Fatalf("chunk %d (state %d, kind %d) counts %d bytes live, has %d", i, c.State, c.Kind, c.Live, live[i])
		}
	}
	if total != s.pool.Live || free != s.pool.Free {
		m.t.Fatalf("%d bytes live in %d free chunks, want %d in %d", s.pool.Live, s.pool.Free, total, free)
	}
	if exact && objects != s.objects {
		m.t.Fatalf("%d objects, want %d", s.objects, objects)
	}
}

// plainOnly skips a test under the race detector, which makes it ten times slower and finds nothing in a machine of one goroutine. The plain
// build runs it.
func plainOnly(t *testing.T) {
	t.Helper()
	if buildtags.Race {
		t.Skip("the plain build runs it")
	}
}
