package parts_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/parts"
)

var (
	seedFlag = flag.Uint64("seed", 0, "the random tests' seed; 0: a new one")
	runsFlag = flag.Int("runs", 300, "how many runs TestEveryRequestEndsOnce makes")
)

const block = 512

var info = ssd.Info{SizeBytes: 1 << 30, BlockSize: block}

// want is what is known of a request that was added.
type want struct {
	req      ssd.Request
	startNS  int64
	from, to int64 // what was not given to the driver yet
	ended    int64 // bytes that have ended without an error
	flying   int   // parts that have not ended
	err      error // the first
	endNS    int64 // of the last part
	over     bool
}

// model is a Requests beside a simple model of it.
type model struct {
	*testing.T
	rng      *rand.Rand
	q        parts.Requests
	now      int64
	depth    int
	places   int
	limit    int64 // bytes a command may have
	nextTag  uint64
	known    map[uint64]*want // by tag; no completion was polled yet
	flying   []parts.Part
	waiting  map[[2]uint64]int64 // when parts are due, by the tag and From
	tries    map[[2]uint64]uint8
	order    []uint64 // tags of the requests that have ended, in that order
	unsent   []uint64 // tags in order of their Add
	buffers  map[uint64][]byte
	bounced  int // parts that have a bounce buffer
	starving bool
}

var errMemory = errors.New("no memory")

func newModel(t *testing.T, rng *rand.Rand) *model {
	m := &model{T: t, rng: rng, depth: 1 + rng.IntN(12), places: 1 + rng.IntN(16), limit: int64(1+rng.IntN(8)) * block,
		known: map[uint64]*want{}, waiting: map[[2]uint64]int64{}, tries: map[[2]uint64]uint8{},
		buffers: map[uint64][]byte{}, starving: rng.IntN(8) == 0}
	m.q = parts.Make(parts.Config{Depth: m.depth, Places: m.places, Most: m.most,
		Bounces: parts.NewBounces(func(n int) ([]byte, uint64, error) {
			if m.starving && rng.IntN(2) == 0 {
				return nil, 0, errMemory
			}
			b := make([]byte, n)
			at := uint64(len(m.buffers)) + 1
			m.buffers[at] = b
			if len(m.buffers) > 8 {
				t.Fatal("more than 8 bounce buffers")
			}
			return b, at, nil
		})})
	return m
}

// most copies data of requests with an odd tag.
func (m *model) most(r *ssd.Request, from int64) (int64, bool) {
	if r.Op == ssd.Flush {
		return r.Len, false
	}
	return m.limit, r.Op <= ssd.Write && r.Tag%2 == 1
}

// pattern fills data of a request from a place on.
func pattern(b []byte, tag uint64, from int64) {
	for i := range b {
		b[i] = byte(tag*31 + uint64(from) + uint64(i) + uint64(i)>>8)
	}
}

func key(tag uint64, p *parts.Part) [2]uint64 { return [2]uint64{tag, uint64(p.From)} }

// over notes that a request has ended.
func (m *model) over(tag uint64, w *want) {
	w.over, w.endNS = true, m.now
	m.order = append(m.order, tag)
	for i, t := range m.unsent {
		if t == tag {
			m.unsent = append(m.unsent[:i], m.unsent[i+1:]...)
			break
		}
	}
}

func (m *model) add() {
	reqs := make([]ssd.Request, m.rng.IntN(2*m.depth))
	var gone error
	if m.rng.IntN(30) == 0 {
		gone = fmt.Errorf("%w: test", ssd.ErrGone)
	}
	for i := range reqs {
		r := &reqs[i]
		*r = ssd.Request{Op: ssd.Op(m.rng.IntN(int(ssd.Ops))), Tag: m.nextTag + uint64(i),
			Offset: m.rng.Int64N(1000) * block, Len: m.rng.Int64N(30) * block}
		if m.rng.IntN(20) == 0 {
			r.Offset++
		}
		if r.Op <= ssd.Write {
			r.Buf = make([]byte, r.Len)
		}
		if r.Op == ssd.Write {
			pattern(r.Buf, r.Tag, 0)
		}
	}
	n, room := m.q.Add(reqs, &info, gone, m.now), m.depth-len(m.known)
	if n != min(len(reqs), room) {
		m.Fatalf("Add took %d of %d, there is room for %d", n, len(reqs), room)
	}
	for _, r := range reqs[:n] {
		w := &want{req: r, startNS: m.now, to: r.Len}
		m.known[r.Tag] = w
		m.unsent = append(m.unsent, r.Tag)
		if w.err = ssd.Validate(&info, &r); w.err == nil {
			w.err = gone
		}
		if w.err != nil || r.Len == 0 && r.Op != ssd.Flush {
			m.over(r.Tag, w)
		}
	}
	m.nextTag += uint64(n)
}

// givenUp takes requests in front of unsent of which a part has failed out of it, as Next does. They end if no part of
// them is under way.
func (m *model) givenUp() {
	for len(m.unsent) > 0 {
		tag := m.unsent[0]
		w := m.known[tag]
		if w.err == nil {
			return
		}
		m.unsent = m.unsent[1:]
		w.from = w.to
		if w.flying == 0 && !w.over {
			m.over(tag, w)
		}
	}
}

func (m *model) next() {
	if len(m.flying) == m.places {
		return
	}
	due, first := false, int64(0)
	for _, at := range m.waiting {
		if at <= m.now && (!due || at < first) {
			due, first = true, at
		}
	}
	if m.q.Due(m.now) != due || m.q.Waiting() != (len(m.waiting) > 0) {
		m.Fatalf("Due is %v, Waiting %v; there are %v", m.q.Due(m.now), m.q.Waiting(), m.waiting)
	}
	bounces := len(m.buffers)
	p, ok := m.q.Next(m.now)
	if due {
		r := m.q.Of(&p)
		at, found := m.waiting[key(r.Tag, &p)]
		if !ok || !found || at != first {
			m.Fatalf("Next returned %v, %+v of %d, due at %d; one is due at %d", ok, p, r.Tag, at, first)
		}
		delete(m.waiting, key(r.Tag, &p))
		m.flying = append(m.flying, p)
		return
	}
	m.givenUp()
	for m.starving && bounces == 0 && len(m.unsent) > 0 { // there was perhaps no memory for the first bounce buffer
		tag := m.unsent[0]
		w := m.known[tag]
		if _, copied := m.most(&w.req, w.from); !copied || ok && m.q.Of(&p).Tag == tag {
			break
		}
		w.err = errMemory
		m.givenUp()
	}
	if len(m.unsent) == 0 {
		if ok || m.q.Unsent() {
			m.Fatalf("Next returned %+v, there is nothing", p)
		}
		return
	}
	tag := m.unsent[0]
	w := m.known[tag]
	_, copied := m.most(&w.req, w.from)
	if !ok {
		if !copied || m.bounced < len(m.buffers) || len(m.buffers) < 8 && !m.starving {
			m.Fatalf("Next returned nothing, with %d of %d buffers in use; %+v", m.bounced, len(m.buffers), w)
		}
		return
	}
	to := min(w.from+m.limit, w.to)
	if r := m.q.Of(&p); r.Tag != tag || p.From != w.from || w.req.Op != ssd.Flush && p.To != to {
		m.Fatalf("Next returned %d to %d of %d, want %d to %d of %d", p.From, p.To, r.Tag, w.from, to, tag)
	}
	at, has := m.q.Copied(&p)
	if has != copied {
		m.Fatalf("a bounce buffer: %v, want %v", has, copied)
	}
	if has {
		m.bounced++
		if w.req.Op == ssd.Write && !bytes.Equal(m.buffers[at][:p.To-p.From], w.req.Buf[p.From:p.To]) {
			m.Fatal("the bounce buffer of a write has other data")
		}
	}
	w.from = p.To
	w.flying++
	if w.from >= w.to || w.req.Op == ssd.Flush {
		m.unsent = m.unsent[1:]
		w.from = w.to
	}
	m.flying = append(m.flying, p)
}

// ended notes the end of a part.
func (m *model) ended(tag uint64, p *parts.Part, err error) {
	w := m.known[tag]
	w.flying--
	if _, has := m.q.Copied(p); has {
		m.bounced--
	}
	if err == nil {
		w.ended += p.To - p.From
	} else if w.err == nil {
		w.err = err
	}
	whole := w.from >= w.to
	if w.flying == 0 && whole {
		m.over(tag, w)
	}
}

// answer carries out one of the commands: it succeeds, fails, is to be sent again, or could not be sent.
func (m *model) answer() {
	if len(m.flying) == 0 {
		return
	}
	i := m.rng.IntN(len(m.flying))
	p := m.flying[i]
	m.flying = append(m.flying[:i], m.flying[i+1:]...)
	r := m.q.Of(&p)
	tag, k := r.Tag, key(r.Tag, &p)
	switch m.rng.IntN(8) {
	case 0:
		err := m.q.StatusError(&p, nvme.WriteFault)
		m.ended(tag, &p, err)
		m.q.End(&p, err, m.now)
	case 1, 2:
		at := int64(0)
		if m.rng.IntN(2) == 0 {
			at = m.now + m.rng.Int64N(50)
		}
		m.tries[k]++
		again := m.q.Again(&p, at)
		if want := m.tries[k] < parts.MaxTries; again != want {
			m.Fatalf("Again returned %v for try %d", again, m.tries[k])
		}
		if again {
			m.waiting[k] = at
			return
		}
		err := fmt.Errorf("%w: too often", ssd.ErrMedia)
		m.ended(tag, &p, err)
		m.q.End(&p, err, m.now)
	case 3:
		m.waiting[k] = 0
		m.q.Back(p)
	default:
		if at, has := m.q.Copied(&p); r.Op == ssd.Read {
			b := r.Buf[p.From:p.To]
			if has {
				b = m.buffers[at][:p.To-p.From]
			}
			pattern(b, tag, p.From)
		}
		m.ended(tag, &p, nil)
		m.q.End(&p, nil, m.now)
	}
}

func (m *model) poll() {
	comps := make([]ssd.Completion, m.rng.IntN(m.depth+1))
	if m.q.Done() != (len(m.order) > 0) || m.q.Open() != len(m.known)-len(m.order) {
		m.Fatalf("Done is %v and Open %d; %d have ended of %d", m.q.Done(), m.q.Open(), len(m.order), len(m.known))
	}
	n := m.q.Poll(comps)
	if n != min(len(comps), len(m.order)) {
		m.Fatalf("Poll returned %d of %d, %d have ended", n, len(comps), len(m.order))
	}
	for _, c := range comps[:n] {
		w := m.known[c.Tag]
		found := -1
		for i, tag := range m.order {
			if tag == c.Tag {
				found = i
			}
		}
		if w == nil || found < 0 {
			m.Fatalf("a completion of %d, which has not ended, or was polled", c.Tag)
		}
		if found != 0 && m.known[m.order[0]].endNS != w.endNS {
			m.Fatalf("a completion of %d before that of %d, which has ended earlier", c.Tag, m.order[0])
		}
		m.order = append(m.order[:found], m.order[found+1:]...)
		delete(m.known, c.Tag)
		if (c.Err == nil) != (w.err == nil) || c.Err != nil && c.Err.Error() != w.err.Error() &&
			!errors.Is(c.Err, w.err) {
			m.Fatalf("%d ends with %v, want %v", c.Tag, c.Err, w.err)
		}
		if c.LatencyNS != w.endNS-w.startNS {
			m.Fatalf("%d took %d, want %d", c.Tag, c.LatencyNS, w.endNS-w.startNS)
		}
		if c.Err != nil || w.req.Op == ssd.Flush {
			continue
		}
		if w.ended != w.req.Len {
			m.Fatalf("%d bytes of %d of %d have ended", w.ended, w.req.Len, c.Tag)
		}
		if w.req.Op == ssd.Read {
			for from := int64(0); from < w.req.Len; from += m.limit {
				part := w.req.Buf[from:min(from+m.limit, w.req.Len)]
				data := make([]byte, len(part))
				if pattern(data, c.Tag, from); !bytes.Equal(part, data) {
					m.Fatalf("other data at %d of the read %d", from, c.Tag)
				}
			}
		}
	}
}

// failWaiting ends what waits, and with all everything that is unsent, as drivers do when a device is gone.
func (m *model) failWaiting(all bool) {
	why := fmt.Errorf("%w: test", ssd.ErrGone)
	for k := range m.waiting {
		w := m.known[k[0]]
		p := parts.Part{From: int64(k[1])}
		w.flying--
		if _, copied := m.most(&w.req, p.From); copied {
			m.bounced--
		}
		if w.err == nil {
			w.err = why
		}
		if w.flying == 0 && w.from >= w.to {
			m.over(k[0], w)
		}
	}
	clear(m.waiting)
	if !all {
		m.q.FailWaiting(why, m.now)
		return
	}
	for len(m.unsent) > 0 {
		if w := m.known[m.unsent[0]]; w.err == nil {
			w.err = why
		}
		m.givenUp()
	}
	m.q.Fail(why, m.now)
}

func (m *model) step() {
	m.now += m.rng.Int64N(10)
	switch n := m.rng.IntN(100); {
	case n < 15:
		m.add()
	case n < 55:
		m.next()
	case n < 90:
		m.answer()
	case n < 98:
		m.poll()
	case n < 99:
		m.failWaiting(false)
	default:
		m.failWaiting(true)
	}
}

// Every request ends once, with its first error or all its bytes, at the right time, and gives its place back; parts
// follow each other, and those that are sent again come when they are due, the first one first; bounce buffers carry
// the data and come back.
func TestEveryRequestEndsOnce(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed=%d", seed)
	for run := range *runsFlag {
		m := newModel(t, rand.New(rand.NewPCG(seed, uint64(run))))
		for range 400 {
			m.step()
		}
		for i := 0; len(m.known) > 0; i++ {
			m.now += 10
			m.next()
			m.answer()
			m.poll()
			if i == 100_000 {
				t.Fatalf("run %d: %d requests do not end", run, len(m.known))
			}
		}
		if m.q.Open() != 0 || m.q.Done() || m.q.Unsent() || m.q.Waiting() || m.bounced != 0 {
			t.Fatalf("run %d: something is left", run)
		}
		if n := m.q.Add(make([]ssd.Request, m.depth+1), &info, nil, 0); n != m.depth {
			t.Fatalf("run %d: %d places came back, of %d", run, n, m.depth)
		}
	}
}

// What could not be sent goes before what became due later, whenever it was due itself.
func TestWhatCouldNotBeSentGoesFirst(t *testing.T) {
	q := parts.Make(parts.Config{Depth: 2, Places: 2, Bounces: parts.NewBounces(nil),
		Most: func(r *ssd.Request, _ int64) (int64, bool) { return r.Len, false }})
	q.Add([]ssd.Request{{Op: ssd.Flush, Tag: 1}, {Op: ssd.Flush, Tag: 2}}, &info, nil, 0)
	one, _ := q.Next(0)
	two, _ := q.Next(0)
	q.Again(&one, 5)
	one, _ = q.Next(5)
	q.Again(&two, 3)
	q.Back(one)
	if q.DueNS() != 0 {
		t.Errorf("the first part is due at %d, want 0", q.DueNS())
	}
	for _, tag := range []uint64{1, 2} {
		if p, ok := q.Next(5); !ok || q.Of(&p).Tag != tag {
			t.Errorf("Next returned %v, %+v, want a part of %d", ok, p, tag)
		}
	}
}

// A part that has ended twice is noticed.
func TestAPartEndsOnce(t *testing.T) {
	q := parts.Make(parts.Config{Depth: 2, Places: 2, Bounces: parts.NewBounces(nil),
		Most: func(r *ssd.Request, _ int64) (int64, bool) { return r.Len, false }})
	q.Add([]ssd.Request{{Op: ssd.Flush}}, &info, nil, 0)
	p, _ := q.Next(0)
	q.End(&p, nil, 0)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	q.End(&p, nil, 0)
}

// What is freed is what was allocated.
func TestReleaseFreesAllBounceBuffers(t *testing.T) {
	allocated, freed := 0, 0
	b := parts.NewBounces(func(n int) ([]byte, uint64, error) { allocated++; return make([]byte, n), 1, nil })
	q := parts.Make(parts.Config{Depth: 3, Places: 3, Bounces: b,
		Most: func(r *ssd.Request, _ int64) (int64, bool) { return r.Len, true }})
	q.Add([]ssd.Request{{Len: block, Buf: make([]byte, block)}, {Len: block, Buf: make([]byte, block)}}, &info, nil, 0)
	one, ok := q.Next(0)
	two, ok2 := q.Next(0)
	if !ok || !ok2 {
		t.Fatal("no part")
	}
	q.End(&one, nil, 0)
	q.End(&two, nil, 0)
	b.Release(func(memory []byte) {
		if len(memory) == parts.BounceBytes {
			freed++
		}
	})
	if allocated != 2 || freed != 2 {
		t.Errorf("%d were allocated and %d freed", allocated, freed)
	}
}

func TestRequestsAllocateNothing(t *testing.T) {
	q := parts.Make(parts.Config{Depth: 8, Places: 8,
		Bounces: parts.NewBounces(func(n int) ([]byte, uint64, error) { return make([]byte, n), 1, nil }),
		Most:    func(r *ssd.Request, _ int64) (int64, bool) { return block, r.Tag == 1 }})
	b := make([]byte, 4*block)
	reqs := []ssd.Request{{Len: 4 * block, Buf: b, Tag: 1}, {Op: ssd.Write, Len: 4 * block, Buf: b, Tag: 2}}
	var comps [2]ssd.Completion
	if n := testing.AllocsPerRun(100, func() {
		q.Add(reqs, &info, nil, 0)
		for tries := 0; ; tries++ {
			p, ok := q.Next(int64(tries))
			if !ok {
				break
			}
			if tries%3 == 0 && q.Again(&p, int64(tries)) {
				continue
			}
			q.End(&p, nil, 1)
		}
		if q.Poll(comps[:]) != 2 || comps[0].Err != nil || comps[1].Err != nil {
			t.Fatal("the requests have not ended")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A command is aborted once after its timeout, and asks for a reset after the grace.
func TestACommandIsOverdueOnce(t *testing.T) {
	c := parts.Command{StartNS: 1000}
	look := func(now int64) string {
		abort, err := c.Overdue(now, 100, 50)
		return fmt.Sprint(abort, err != nil)
	}
	if got := look(5000); got != "false false" {
		t.Errorf("a free slot: %s", got)
	}
	c.Busy = true
	for _, tc := range []struct {
		now  int64
		want string
	}{{1099, "false false"}, {1100, "true false"}, {1149, "false false"}, {1150, "false true"}, {9000, "false true"}} {
		if got := look(tc.now); got != tc.want {
			t.Errorf("at %d: %s, want %s", tc.now, got, tc.want)
		}
	}
	late := parts.Command{Busy: true} // a look that comes late aborts first
	if abort, err := late.Overdue(1000, 100, 50); !abort || err != nil {
		t.Errorf("%v, %v", abort, err)
	}
}

func TestStatuses(t *testing.T) {
	retried := map[nvme.Status]bool{nvme.NamespaceNotReady: true, nvme.CommandInterrupted: true,
		nvme.TransientTransportError: true, nvme.AbortRequested: true, nvme.AbortedPowerLoss: true,
		nvme.AbortedSQDeletion: true, nvme.AdminMediaNotReady: true, nvme.FormatInProgress: true}
	kinds := map[nvme.Status]error{nvme.LBAOutOfRange: ssd.ErrRange, nvme.CapacityExceeded: ssd.ErrNoSpace,
		nvme.InvalidOpcode: ssd.ErrUnsupported}
	q := parts.Make(parts.Config{Depth: 1, Places: 1, Bounces: parts.NewBounces(nil),
		Most: func(r *ssd.Request, _ int64) (int64, bool) { return block, false }})
	q.Add([]ssd.Request{{Op: ssd.Deallocate, Offset: 8 * block, Len: 2 * block}}, &info, nil, 0)
	p, _ := q.Next(0)
	q.End(&p, nil, 0)
	p, _ = q.Next(0)
	for code := range nvme.Status(0x800) {
		for _, st := range []nvme.Status{code, code | nvme.DNR, code | nvme.More} {
			if got, want := parts.MayRetry(st), retried[code] && !st.DNR(); got != want {
				t.Errorf("%v: a retry: %v, want %v", st, got, want)
			}
			kind := kinds[code]
			if kind == nil {
				kind = ssd.ErrMedia
			}
			if err := q.StatusError(&p, st); !errors.Is(err, kind) {
				t.Errorf("%v: %v, want %v", st, err, kind)
			}
		}
	}
	if got, want := q.StatusError(&p, nvme.WriteFault).Error(),
		"media error: deallocate of 512 bytes at 4608: "+nvme.WriteFault.String(); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
