package drr

import (
	"flag"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"jbofd/internal/tenant"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

// paper has the constants of the paper's code.
var paper = Config{Slots: 8, SlotBytes: 131072, QuantumBytes: 131072, FirstIOs: 32, FirstUnits: 32}

// serve takes the next I/O, with the load returned by load.
func serve(s *Scheduler, load func(Tag) Load) (Tag, bool) {
	for {
		tag, ok := s.Head()
		if !ok {
			return 0, false
		}
		if s.Serve(load(tag)) {
			return tag, true
		}
	}
}

func TestTraceOfTheReleasedCode(t *testing.T) {
	// 3 reads of 128K, 70 of 4K, 10 writes of 4K, 3 of 128K; a write costs 9.
	s := New(paper)
	weighted := []int64{131072, 4096, 9 * 4096, 9 * 131072}
	var owner []int
	for ten, n := range []int{3, 70, 10, 3} {
		s.SetTenant(tenant.ID(ten), 1)
		for range n {
			s.Enqueue(tenant.ID(ten), Tag(len(owner)))
			owner = append(owner, ten)
		}
	}
	if s.MaxSlots() != 2 {
		t.Errorf("%d slots each, want 2", s.MaxSlots())
	}
	var order strings.Builder
	for {
		tag, ok := serve(s, func(tag Tag) Load { return Load{WeightedBytes: weighted[owner[tag]]} })
		if !ok {
			break
		}
		order.WriteByte("ABCD"[owner[tag]])
	}
	if got, want := order.String(), "AA"+strings.Repeat("B", 64)+strings.Repeat("C", 8)+"DD"; got != want {
		t.Errorf("order\n%s, want\n%s", got, want)
	}
	for ten := range tenant.ID(4) {
		if !s.Deferred(ten) || s.tenants[ten].deficit != 0 {
			t.Errorf("tenant %d: deferred %v with deficit %d, want true with 0", ten, s.Deferred(ten),
				s.tenants[ten].deficit)
		}
	}
}

func TestSlotsAreDividedAmongTheActive(t *testing.T) {
	s := New(paper)
	want := []int{8, 4, 2, 2, 1, 1, 1, 1, 1, 1}
	for i, w := range want {
		s.SetTenant(tenant.ID(i), 1)
		s.Enqueue(tenant.ID(i), Tag(i))
		if s.NumActive() != i+1 || s.MaxSlots() != w {
			t.Errorf("%d active with %d slots each, want %d with %d", s.NumActive(), s.MaxSlots(), i+1, w)
		}
	}
	for i := range want {
		s.Cancel(Tag(i))
	}
	if s.NumActive() != 0 || s.MaxSlots() != 8 {
		t.Errorf("%d active with %d slots each, want 0 with 8", s.NumActive(), s.MaxSlots())
	}
}

func TestSteadyIOsPerSlot(t *testing.T) {
	for _, c := range []struct {
		name             string
		weighted         int64
		perSlot, atATime int
	}{
		{"4K read", 4096, 32, 256},
		{"128K read", 131072, 1, 8},
		{"4K write at 9", 9 * 4096, 4, 32},
		{"4K write at 1", 4096, 32, 256},
		{"128K write at 9", 9 * 131072, 1, 8},
		{"100K read", 102400, 2, 16},
		{"127K read", 127 * 1024, 2, 16},
	} {
		s := New(paper)
		s.SetTenant(0, 1)
		var flight []Tag
		for tag := range Tag(512) {
			s.Enqueue(0, tag)
		}
		for range 1000 {
			for {
				tag, ok := serve(s, func(Tag) Load { return Load{WeightedBytes: c.weighted, Units: 3} })
				if !ok {
					break
				}
				flight = append(flight, tag)
			}
			if len(flight) != c.atATime {
				t.Fatalf("%s: %d in flight, want %d", c.name, len(flight), c.atATime)
			}
			for _, tag := range flight[:c.perSlot] {
				s.Complete(tag)
				s.Enqueue(0, tag)
			}
			flight = slices.Delete(flight, 0, c.perSlot)
		}
		if s.SlotIOs(0) != c.perSlot || s.SlotUnits(0) != int64(3*c.perSlot) {
			t.Errorf("%s: a slot held %d I/Os of %d units, want %d of %d", c.name, s.SlotIOs(0), s.SlotUnits(0),
				c.perSlot, 3*c.perSlot)
		}
	}
}

func TestIOsOfLengthZeroAreNeverStranded(t *testing.T) {
	s := New(paper)
	s.SetTenant(0, 1)
	s.SetTenant(1, 1)
	load := func(tag Tag) Load {
		if tag >= 100 { // a flush
			return Load{}
		}
		return Load{WeightedBytes: 131072}
	}
	// After the last read of a tenant whose slots are all full.
	for tag := range Tag(8) {
		s.Enqueue(0, tag)
	}
	for range 8 {
		serve(s, load)
	}
	s.Enqueue(0, 100)
	s.Enqueue(0, 101)
	if _, ok := serve(s, load); ok || !s.Deferred(0) {
		t.Fatal("the ninth slot was given out")
	}
	s.Complete(0)
	for want := range Tag(2) {
		if tag, ok := serve(s, load); !ok || tag != 100+want {
			t.Fatalf("served %d, %v, want the flush %d", tag, ok, 100+want)
		}
	}
	for _, tag := range []Tag{1, 2, 3, 4, 5, 6, 7, 100, 101} {
		s.Complete(tag)
	}
	if s.NumActive() != 0 {
		t.Errorf("%d active, want 0", s.NumActive())
	}
	// Flushes alone.
	for tag := Tag(100); tag < 110; tag++ {
		s.Enqueue(tagTenant(tag), tag)
	}
	for range 10 {
		tag, ok := serve(s, load)
		if !ok {
			t.Fatal("a flush is stranded")
		}
		s.Complete(tag)
	}
	if s.NumActive() != 0 {
		t.Errorf("%d active, want 0", s.NumActive())
	}
}

func tagTenant(tag Tag) tenant.ID { return tenant.ID(tag % 2) }

func TestWeightsScaleDeficits(t *testing.T) {
	cfg := paper
	cfg.SlotBytes = 1 << 40 // never full: the deficits decide
	s := New(cfg)
	for i := range tenant.ID(3) {
		s.SetTenant(i, 1<<i)
		for k := range Tag(64) {
			s.Enqueue(i, Tag(i)*64+k)
		}
	}
	var served [3]int
	for range 70_000 {
		tag, _ := serve(s, func(Tag) Load { return Load{WeightedBytes: 4096} })
		served[tag/64]++
		s.Complete(tag)
		s.Enqueue(tenant.ID(tag/64), tag)
	}
	for i, n := range served {
		if want := 10_000 << i; n < want-want/50 || n > want+want/50 {
			t.Errorf("weight %d: %d of 70000, want %d", 1<<i, n, want)
		}
	}
}

// model is the paper's pseudo-code over maps and slices.
type model struct {
	cfg     Config
	tenants map[tenant.ID]*modelTenant
	round   []tenant.ID
	active  int
}

type modelTenant struct {
	queue    []Tag
	inflight map[Tag]*modelSlot
	slots    []*modelSlot // in use
	open     *modelSlot
	quantum  int64
	deficit  int64
	ios      int
}

type modelSlot struct {
	weighted  int64
	ios, done int
}

func (m *model) max() int {
	if m.active == 0 {
		return m.cfg.Slots
	}
	return max(1, m.cfg.Slots/m.active)
}

func (m *model) set(t tenant.ID, weight int) {
	q := int64(weight) * m.cfg.QuantumBytes
	if ten := m.tenants[t]; ten != nil {
		ten.quantum = q
		return
	}
	open := &modelSlot{}
	m.tenants[t] = &modelTenant{inflight: map[Tag]*modelSlot{}, slots: []*modelSlot{open}, open: open, quantum: q,
		deficit: q, ios: m.cfg.FirstIOs}
}

func (m *model) remove(t tenant.ID) []Tag {
	ten := m.tenants[t]
	delete(m.tenants, t)
	m.leaveRound(t)
	if len(ten.queue)+len(ten.inflight) > 0 {
		m.active--
	}
	return ten.queue
}

func (m *model) leaveRound(t tenant.ID) {
	m.round = slices.DeleteFunc(m.round, func(x tenant.ID) bool { return x == t })
}

func (m *model) enqueue(t tenant.ID, tag Tag) {
	ten := m.tenants[t]
	if len(ten.queue) == 0 && ten.open != nil {
		m.round = append(m.round, t)
	}
	if len(ten.queue) == 0 && len(ten.inflight) == 0 {
		m.active++
		ten.deficit += ten.quantum
	}
	ten.queue = append(ten.queue, tag)
}

func (m *model) cancel(t tenant.ID, tag Tag) {
	ten := m.tenants[t]
	ten.queue = slices.DeleteFunc(slices.Clone(ten.queue), func(x Tag) bool { return x == tag })
	if len(ten.queue) == 0 {
		if ten.open != nil {
			ten.deficit = 0
		}
		m.leaveRound(t)
		if len(ten.inflight) == 0 {
			m.active--
		}
	}
}

func (m *model) serve(load func(Tag) Load) (Tag, bool) {
	for len(m.round) > 0 {
		t := m.round[0]
		ten := m.tenants[t]
		tag := ten.queue[0]
		w := load(tag).WeightedBytes
		if ten.deficit < w {
			ten.deficit += ten.quantum
			m.round = append(m.round[1:], t)
			continue
		}
		ten.deficit -= w
		ten.queue = ten.queue[1:]
		ten.open.weighted += w
		ten.open.ios++
		ten.inflight[tag] = ten.open
		if ten.open.weighted >= m.cfg.SlotBytes {
			ten.open = nil
			if len(ten.slots) < m.max() {
				ten.open = &modelSlot{}
				ten.slots = append(ten.slots, ten.open)
			}
		}
		if ten.open == nil || len(ten.queue) == 0 {
			ten.deficit = 0
			m.round = m.round[1:]
		}
		return tag, true
	}
	return 0, false
}

func (m *model) complete(t tenant.ID, tag Tag) {
	ten := m.tenants[t]
	sl := ten.inflight[tag]
	delete(ten.inflight, tag)
	sl.done++
	if sl != ten.open && sl.done == sl.ios {
		ten.ios = sl.ios
		ten.slots = slices.DeleteFunc(ten.slots, func(x *modelSlot) bool { return x == sl })
		if ten.open == nil && len(ten.slots) < m.max() {
			ten.open = &modelSlot{}
			ten.slots = append(ten.slots, ten.open)
			if len(ten.queue) > 0 {
				m.round = append(m.round, t)
			}
		}
	}
	if len(ten.queue)+len(ten.inflight) == 0 {
		m.active--
	}
}

// TestAgainstTheModel drives both with the same random events and compares their visible state after each.
func TestAgainstTheModel(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 0))
	for run := range 60 {
		cfg := Config{Slots: 1 + rng.IntN(12), SlotBytes: int64(1 + rng.IntN(20)),
			QuantumBytes: int64(1 + rng.IntN(20)), FirstIOs: 5}
		s, m := New(cfg), &model{cfg: cfg, tenants: map[tenant.ID]*modelTenant{}}
		weights := map[Tag]int64{}
		owner := map[Tag]tenant.ID{}
		orphans := map[Tag]bool{}
		var queued, inflight []Tag
		load := func(tag Tag) Load { return Load{WeightedBytes: weights[tag]} }
		freeTag := func() Tag {
			for {
				tag := Tag(rng.IntN(500))
				if !slices.Contains(queued, tag) && !slices.Contains(inflight, tag) {
					return tag
				}
			}
		}
		steps := 1500
		for step := range steps + 2000 {
			fail := func(format string, args ...any) {
				t.Fatalf("run %d, step %d: %s", run, step, fmt.Sprintf(format, args...))
			}
			k := rng.IntN(100)
			if step >= steps { // let all I/Os end
				k = 40 + k%60
			}
			ten := tenant.ID(rng.IntN(10))
			switch {
			case k < 6:
				weight := 1 + rng.IntN(3)
				s.SetTenant(ten, weight)
				m.set(ten, weight)
			case k < 36:
				if m.tenants[ten] == nil || len(queued)+len(inflight) > 300 {
					continue
				}
				tag := freeTag()
				weights[tag], owner[tag] = int64(rng.IntN(40)), ten
				if rng.IntN(4) == 0 {
					weights[tag] = 0
				}
				s.Enqueue(ten, tag)
				m.enqueue(ten, tag)
				queued = append(queued, tag)
			case k < 38:
				if m.tenants[ten] == nil {
					continue
				}
				got, want := s.Remove(ten, []Tag{4711}), m.remove(ten)
				if got[0] != 4711 || !slices.Equal(got[1:], want) {
					fail("removed %v, want %v", got[1:], want)
				}
				queued = slices.DeleteFunc(queued, func(x Tag) bool { return slices.Contains(want, x) })
				for _, tag := range inflight {
					if owner[tag] == ten {
						orphans[tag] = true
					}
				}
			case k < 40:
				if len(queued) == 0 {
					continue
				}
				tag := queued[rng.IntN(len(queued))]
				s.Cancel(tag)
				m.cancel(owner[tag], tag)
				queued = slices.DeleteFunc(queued, func(x Tag) bool { return x == tag })
			case k < 70:
				got, ok := serve(s, load)
				want, wantOK := m.serve(load)
				if got != want || ok != wantOK {
					fail("served %d, %v, want %d, %v", got, ok, want, wantOK)
				}
				if ok {
					queued = slices.DeleteFunc(queued, func(x Tag) bool { return x == got })
					inflight = append(inflight, got)
				}
			default:
				if len(inflight) == 0 {
					continue
				}
				i := rng.IntN(len(inflight))
				tag := inflight[i]
				inflight = slices.Delete(inflight, i, i+1)
				s.Complete(tag)
				if orphans[tag] {
					delete(orphans, tag)
				} else {
					m.complete(owner[tag], tag)
				}
			}
			if s.NumActive() != m.active || s.MaxSlots() != m.max() {
				fail("%d active with %d slots, want %d with %d", s.NumActive(), s.MaxSlots(), m.active, m.max())
			}
			for ten, want := range m.tenants {
				if s.Queued(ten) != len(want.queue) || s.Inflight(ten) != len(want.inflight) ||
					s.SlotsInUse(ten) != len(want.slots) ||
					s.Deferred(ten) != (want.open == nil) || s.SlotIOs(ten) != want.ios ||
					s.tenants[ten].deficit != want.deficit {
					fail("tenant %d: %+v, want %+v", ten, s.tenants[ten], *want)
				}
			}
		}
		if len(queued)+len(inflight) != 0 || s.NumActive() != 0 {
			t.Fatalf("run %d: stranded %d queued, %d in flight, %d active", run, len(queued), len(inflight),
				s.NumActive())
		}
		for ten := range m.tenants {
			if u := s.SlotsInUse(ten); u != 1 || bits.OnesCount64(s.tenants[ten].free) != cfg.Slots-1 {
				t.Fatalf("run %d: idle tenant %d uses %d slots, want the open one", run, ten, u)
			}
		}
	}
}

func TestWrongCallsPanic(t *testing.T) {
	for name, do := range map[string]func(*Scheduler){
		"config":            func(*Scheduler) { New(Config{Slots: 65, SlotBytes: 1, QuantumBytes: 1}) },
		"unknown tenant":    func(s *Scheduler) { s.SetTenant(5, 1); s.Enqueue(3, 1) },
		"removed tenant":    func(s *Scheduler) { s.Remove(0, nil); s.Enqueue(0, 1) },
		"tag twice":         func(s *Scheduler) { s.Enqueue(0, 0) },
		"complete queued":   func(s *Scheduler) { s.Complete(0) },
		"cancel free":       func(s *Scheduler) { s.Cancel(0); s.Cancel(0) },
		"complete twice":    func(s *Scheduler) { s.Head(); s.Serve(Load{}); s.Complete(0); s.Complete(0) },
		"cancel when taken": func(s *Scheduler) { s.Serve(Load{}); s.Cancel(0) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			s := New(paper)
			s.SetTenant(0, 1)
			s.Enqueue(0, 0)
			do(s)
		}()
	}
}

// crowd is a Scheduler with 64 tenants that have 4 I/Os of 4 KiB each.
func crowd() *Scheduler {
	s := New(paper)
	for t := range tenant.ID(64) {
		s.SetTenant(t, 1)
		for i := range Tag(4) {
			s.Enqueue(t, Tag(t)*4+i)
		}
	}
	return s
}

func turn(s *Scheduler) {
	for {
		tag, ok := s.Head()
		if !ok {
			panic("nothing queued")
		}
		if s.Serve(Load{WeightedBytes: 4096, Units: 1}) {
			s.Complete(tag)
			s.Enqueue(tenant.ID(tag/4), tag)
			return
		}
	}
}

func TestAllocatesNothing(t *testing.T) {
	s := crowd()
	if n := testing.AllocsPerRun(1000, func() { turn(s) }); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

func BenchmarkEnqueueServeComplete(b *testing.B) {
	s := crowd()
	b.ReportAllocs()
	for b.Loop() {
		turn(s)
	}
}
