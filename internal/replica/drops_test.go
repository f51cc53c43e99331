package replica_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/replica"
)

const (
	dropRanges = 40
	dropBits   = 50
	dropAfter  = 1000 * ms
)

// dropRig is a model of a partition and of the views of its ranges, for Drops.
type dropRig struct {
	t   *testing.T
	rng *rand.Rand
	d   *replica.Drops
	now int64
	// views are what was told, since is when the chains were first seen as they are, and full without the partition.
	views [dropRanges]replica.Standing
	since [dropRanges]int64
	// has are the versions of each range in the store, in the order of positions. ending are Drops that are not over,
	// and when they are.
	has    [dropRanges][]uint64
	ending map[int]int64
	until  int64 // of the authority
	busy   [dropRanges]bool
	lost   int // a range of which something is lost, or -1
	// wide: the segment of what is lost is wider than the range so many times. refuses: it cannot be settled. settled
	// counts how often it was.
	wide, settled int
	refuses       bool
	asked         *kvstore.Request
	askedOf       int
	acts          replica.DropActions
	requests      int
	drops         int
	postponed     int
}

func newDropRig(t *testing.T, rng *rand.Rand) *dropRig {
	return &dropRig{t: t, rng: rng, now: 1, ending: map[int]int64{}, lost: -1,
		d: replica.NewDrops(replica.DropsConfig{Ranges: dropRanges, Bits: dropBits, AfterNS: dropAfter})}
}

// see tells of a view.
func (g *dropRig) see(number int, s replica.Standing) {
	left := !s.Member && s.Full
	if was := g.views[number]; !left || was.Member || !was.Full || was.Version != s.Version {
		g.since[number] = g.now
	}
	if s.Member && !g.d.Busy(number) && len(g.has[number]) < 5 { // it is filled
		g.has[number] = append(g.has[number], 1000*uint64(s.Version)+g.rng.Uint64N(900)+1)
	}
	g.views[number] = s
	g.d.See(g.now, number, s)
}

// turn takes a turn, and looks at what it asks for.
func (g *dropRig) turn() {
	a := &g.acts
	for again := true; again; {
		again = false
		g.d.Turn(g.now, g.now < g.until, a)
		if a.Asks {
			a.Asks = false
			again = g.request(a.Number, a.Request)
		}
		again = again || len(a.Looks) > 0
		g.look(a)
	}
	dropping := 0
	for number := range g.busy {
		if g.busy[number] = g.d.Busy(number); g.busy[number] {
			dropping++
		} else if _, ends := g.ending[number]; ends {
			g.t.Fatalf("range %d is not busy, and its Drop is on the list", number)
		}
	}
	if dropping > 16 {
		g.t.Fatalf("%d ranges are dropped at once", dropping)
	}
}

// look answers whether Drops are over.
func (g *dropRig) look(a *replica.DropActions) {
	for _, l := range a.Looks {
		if l.First != uint64(l.Number)<<dropBits || l.Last-l.First != 1<<dropBits-1 {
			g.t.Fatalf("looks at %x to %x for range %d", l.First, l.Last, l.Number)
		}
		at, dropping := g.ending[l.Number]
		if dropping && g.now >= at {
			delete(g.ending, l.Number)
			dropping = false
		}
		g.d.Looked(g.now, l.Number, dropping, a)
	}
	a.Looks = a.Looks[:0]
	for _, number := range a.Free {
		if !g.views[number].Member || g.d.Busy(number) || !g.busy[number] {
			g.t.Fatalf("range %d is said to be free: %+v", number, g.views[number])
		}
	}
	a.Free = a.Free[:0]
}

// request takes a request, or postpones it.
func (g *dropRig) request(number int, q kvstore.Request) (postponed bool) {
	s := g.views[number]
	forLosses := g.d.Busy(number) && q.Op != kvstore.Drop
	if g.asked != nil || g.now >= g.until || !forLosses && (s.Member || !s.Full || g.now-g.since[number] < dropAfter) {
		g.t.Fatalf("at %d: a request %v of range %d, which is %+v since %d, with authority until %d; one before: %v",
			g.now, q.Op, number, s, g.since[number], g.until, g.asked)
	}
	if (q.Range.First != uint64(number)<<dropBits || q.Range.Last-q.Range.First != 1<<dropBits-1) &&
		(q.Op != kvstore.Settle || q.Range.First>>dropBits != uint64(number)) || !q.Background {
		g.t.Fatalf("a request for range %d: %+v", number, q)
	}
	if g.rng.IntN(10) == 0 && g.lost < 0 {
		g.postponed++
		g.d.Postpone(g.now)
		return true
	}
	g.requests++
	switch q.Op {
	case kvstore.Scan:
	case kvstore.Settle:
		if number != g.lost || q.Version == 0 && q.Range.Width != 64-dropBits || q.Version != 0 && q.Range.Width != 60 {
			g.t.Fatalf("a Settle of range %d: %+v", number, q)
		}
	case kvstore.Drop:
		g.drops++
		if len(g.has[number]) == 0 || q.Version != slices.Max(g.has[number]) || number == g.lost {
			g.t.Fatalf("a Drop of range %d up to version %d, which has %v", number, q.Version, g.has[number])
		}
		g.ending[number] = 1 << 62
	default:
		g.t.Fatalf("a request %v", q.Op)
	}
	g.asked, g.askedOf = &q, number
	return false
}

// answer answers the request, a Scan with at most two objects.
func (g *dropRig) answer() {
	q, number := g.asked, g.askedOf
	g.asked = nil
	p := kvstore.Reply{}
	switch {
	case q.Op == kvstore.Settle && g.refuses:
		p.Status = kvstore.DeviceError
	case q.Op == kvstore.Settle && g.wide > 0:
		g.wide--
		p.Version, p.ValueLen = 7, 64-dropBits-1
	case q.Op == kvstore.Settle:
		p.Version, p.ValueLen = 7, 60
		if q.Version != 0 {
			g.settled++
			g.lost = dropRanges
		}
	case q.Op == kvstore.Drop:
		p.Status = []kvstore.Status{kvstore.OK, kvstore.OK, kvstore.DeviceError, kvstore.NoMemory}[g.rng.IntN(4)]
		if g.ending[number] = g.now + g.rng.Int64N(3000*ms); p.Status != kvstore.NoMemory {
			g.has[number] = slices.DeleteFunc(g.has[number], func(v uint64) bool { return v <= q.Version })
		}
	case g.rng.IntN(20) == 0 && g.lost < 0:
		p.Status = kvstore.NoMemory
	default:
		first := q.Range.First
		b := nvme.NewKVRange(q.Value, nvme.KVScan, first, q.Range.Last, nvme.KVCursorAt(q.Range.From, q.Key))
		begin := int(q.Range.From - first)
		end := min(begin+2, len(g.has[number]))
		for i := begin; i < end; i++ {
			var e nvme.KVEntry
			e, b, _ = b.Append(fmt.Appendf(nil, "%d", i), 10, 0)
			e.SetPosition(first + uint64(i))
			e.SetVersion(g.has[number][i])
		}
		b.SetItems(end - begin)
		b.SetTo(nvme.KVCursorAt(first+uint64(end), nil))
		if end == len(g.has[number]) {
			b.SetFlags(nvme.KVComplete)
		}
		if number == g.lost {
			p.Status = kvstore.Corrupt
			b.SetFlags(b.Flags() | nvme.KVLost)
			b.SetTo(nvme.KVCursorAt(first+uint64(max(end, 1)), nil))
		}
		b.Seal()
		p.ValueLen = b.LenBytes()
	}
	g.d.Answered(g.now, &p)
}

// TestDropsAgainstAModel: views, authority and answers come in any order. Nothing is asked for of a range that was not
// full without the partition for long enough; a Drop covers what is there and nothing else, and is waited for. In the
// end all is dropped that is others', and nothing more is asked for.
func TestDropsAgainstAModel(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	drops, postponed := 0, 0
	for nth := range uint64(30) {
		g := newDropRig(t, rand.New(rand.NewPCG(seed, nth)))
		for number := range g.has {
			for v := range g.rng.Uint64N(5) {
				g.has[number] = append(g.has[number], g.rng.Uint64N(900)+v+1)
			}
			if g.rng.IntN(20) == 0 {
				g.ending[number] = g.now + g.rng.Int64N(3000*ms)
				g.d.Resume(number)
			}
		}
		for range 4000 {
			switch g.rng.IntN(8) {
			case 0, 1:
				number := g.rng.IntN(dropRanges)
				s := g.views[number]
				if g.rng.IntN(2) == 0 {
					s.Version++
				}
				s.Member, s.Full = g.rng.IntN(3) == 0, g.rng.IntN(4) > 0
				g.see(number, s)
			case 2:
				if g.rng.IntN(4) == 0 {
					g.until = g.now + g.rng.Int64N(3000*ms)
				}
			case 3:
				g.now += g.rng.Int64N(200 * ms)
			default:
				if g.asked != nil {
					g.answer()
				}
			}
			g.turn()
		}
		g.settle()
		drops, postponed = drops+g.drops, postponed+g.postponed
		if g.drops == 0 {
			t.Error("nothing was dropped")
		}
	}
	t.Logf("%d Drops, %d times postponed", drops, postponed)
}

// settle lets everything end, at the times that are asked for.
func (g *dropRig) settle() {
	g.t.Helper()
	g.until = 1 << 62
	for number := range g.views {
		g.see(number, replica.Standing{Version: 1000 + g.views[number].Version, Full: true,
			Member: g.rng.IntN(3) == 0})
	}
	g.turn()
	for range 100_000 {
		switch {
		case g.asked != nil:
			g.answer()
		case g.acts.WakeNS == 0:
			for number, s := range g.views {
				if has := len(g.has[number]); has > 0 && !s.Member {
					g.t.Errorf("range %d still has %d objects", number, has)
				}
			}
			if s := g.d.Stats(); s.Left != 0 || len(g.ending) > 0 {
				g.t.Errorf("%+v, %d Drops are not over", s, len(g.ending))
			}
			return
		default:
			g.now = max(g.now, g.acts.WakeNS)
		}
		g.turn()
	}
	g.t.Errorf("it does not come to rest: %+v", g.d.Stats())
}

// TestWhatCannotBeReadIsNotDropped: a Drop of it would stay on the list of the store, and keep the partition from being
// filled. It is settled first: as soon as the store can do that, and when its segment has no positions of other ranges.
func TestWhatCannotBeReadIsNotDropped(t *testing.T) {
	g := newDropRig(t, rand.New(rand.NewPCG(1, 2)))
	g.lost, g.until, g.refuses, g.wide = 7, 1<<62, true, 3
	g.has[7] = []uint64{1, 2, 3}
	for number := range g.views {
		g.see(number, replica.Standing{Full: true})
	}
	run := func(ok func() bool) {
		t.Helper()
		for g.turn(); !ok(); g.turn() {
			if g.asked != nil {
				g.answer()
			} else if g.now = max(g.now, g.acts.WakeNS); g.acts.WakeNS == 0 {
				t.Fatal("it is not looked at again")
			}
		}
	}
	run(func() bool { return g.requests >= dropRanges+10 })
	if g.drops > 0 || g.now < dropAfter+3*10e9 {
		t.Errorf("%d Drops; it was looked at %d times within %d ms", g.drops, g.requests-dropRanges+1, g.now/ms)
	}
	g.refuses = false
	run(func() bool { return g.drops > 0 })
	if g.settled != 1 || g.wide != 0 {
		t.Errorf("it was settled %d times; the segment is %d times too wide", g.settled, g.wide)
	}
}

// TestALossBehindTheScanDoesNotKeepARangeFromComingBack: a Drop that takes long may have met a segment that cannot be
// read. It is settled, also while the chain has the partition again.
func TestALossBehindTheScanDoesNotKeepARangeFromComingBack(t *testing.T) {
	for _, back := range []bool{false, true} {
		g := newDropRig(t, rand.New(rand.NewPCG(1, 2)))
		g.lost, g.until = dropRanges, 1<<62
		g.has[7] = []uint64{1, 2, 3}
		g.see(7, replica.Standing{Full: true})
		for begin := int64(0); g.settled == 0; g.turn() {
			if g.asked != nil {
				drop := g.asked.Op == kvstore.Drop
				if g.answer(); drop {
					g.ending[7], begin = 1<<62, g.now
					if g.lost = 7; back {
						g.see(7, replica.Standing{Version: 1, Member: true, Full: true})
					}
				}
			} else if g.now = max(g.now, g.acts.WakeNS); begin != 0 && g.now > begin+20e9 {
				t.Fatalf("back %v: it is not settled in 20 s", back)
			}
		}
		g.ending[7] = g.now
		for i := 0; g.d.Busy(7); g.turn() {
			if i++; i > 100 {
				t.Fatalf("back %v: the range is busy for ever", back)
			}
			if g.asked != nil {
				g.answer()
			} else {
				g.now = max(g.now, g.acts.WakeNS)
			}
		}
	}
}

// TestThereIsTimeBetweenRangesThatHaveNothing: there may be tens of thousands.
func TestThereIsTimeBetweenRangesThatHaveNothing(t *testing.T) {
	g := newDropRig(t, rand.New(rand.NewPCG(1, 2)))
	g.lost, g.until = dropRanges, 1<<62
	for number := range g.views {
		g.see(number, replica.Standing{Full: true})
	}
	for g.turn(); g.acts.WakeNS != 0 || g.asked != nil; g.turn() {
		if g.asked != nil {
			g.answer()
		} else {
			g.now = max(g.now, g.acts.WakeNS)
		}
	}
	if took := g.now - dropAfter; g.requests != dropRanges || took < (dropRanges-1)*5*ms || took > dropRanges*6*ms {
		t.Errorf("%d requests for %d ranges within %d ms", g.requests, dropRanges, took/ms)
	}
}
