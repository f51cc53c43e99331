package space

import (
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"jbofd/internal/kvstore/format"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

// TestACheckpointSaysWhatWasLiveAtItsBeginning, however long it takes to note it, and frees what was obsolete then.
// Each call goes through few chunks.
func TestACheckpointSaysWhatWasLiveAtItsBeginning(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 1))
	sb := make(format.Superblock, format.SuperblockBytes)
	sb.SetPartitionBytes(500 << 20)
	sb.SetChunkBytes(1 << 20)
	p := New(sb)
	p.Sweep = 20
	n := len(p.Chunks)
	change := func() {
		i := format.ChunkNumber(rng.IntN(n))
		switch c := &p.Chunks[i]; c.State {
		case Free:
			if p.Free > 0 {
				p.Take([]format.Kind{format.KeyLog, format.ValueLog, format.ValueLog, format.Checkpoint}[rng.IntN(4)])
			}
		case Open, Sealed:
			switch k := rng.IntN(6); {
			case c.Kind == format.Checkpoint:
				p.Return(i)
			case k < 3 && c.State == Open:
				p.AddLive(i, 8*(1+rng.IntN(125)))
			case k == 3 && c.State == Open:
				p.Seal(i)
			case k == 4 && c.State == Sealed:
				p.SetLive(i, int64(8*rng.IntN(125)))
			case c.Live > 0:
				p.SubLive(p.At(i, 0), 8*(1+rng.IntN(int(c.Live/8))))
			}
		}
	}
	counted, freed := 0, 0
	for range 40 {
		for range rng.IntN(2000) {
			change()
		}
		if p.Hold = rng.IntN(2) == 0; rng.IntN(2) == 0 {
			p.KeyEpoch = rng.Uint64N(p.LastEpoch + 1)
		}
		before := slices.Clone(p.Chunks)
		p.BeginCheckpoint()
		for range 50 {
			if i := rng.IntN(n); before[i].Live > 0 && before[i].State == Sealed {
				p.Exclude(p.At(format.ChunkNumber(i), 0), 8)
				before[i].Live -= 8
			}
		}
		for calls := 1; !p.NoteLive(); calls++ {
			if calls > n/p.Sweep {
				t.Fatal("it takes too many calls")
			}
			for range rng.IntN(100) {
				change()
			}
		}
		for i, b := range before {
			want := noted(b.Live)
			if b.State == Free || b.State == Obsolete || b.Kind == format.Checkpoint {
				want = NotCounted
			} else {
				counted++
			}
			if got := p.Chunks[i].AtCheckpoint; got != want {
				t.Fatalf("chunk %d: %d bytes were live at the checkpoint, want %d (%+v)", i, got.Bytes(), want.Bytes(),
					b)
			}
		}
		for range rng.IntN(500) {
			change()
		}
		done := rng.IntN(3) > 0
		wasFree, calls := p.Free, 1
		for ; !p.EndCheckpoint(done); calls++ {
		}
		if calls < n/p.Sweep {
			t.Fatalf("%d calls for %d chunks", calls, n)
		}
		obsolete, free := 0, 0
		for i, b := range before {
			switch c := p.Chunks[i]; {
			case c.State == PendingFree, done && b.State == Obsolete && c.State == Obsolete && c.Epoch == b.Epoch:
				t.Fatalf("chunk %d, obsolete when the checkpoint began: %+v", i, c)
			case c.State == Obsolete:
				obsolete++
			case c.State == Free:
				free++
			}
		}
		freed += p.Free - wasFree
		if obsolete != p.Obsolete || free != p.Free {
			t.Fatalf("%d obsolete and %d free chunks, counted as %d and %d", obsolete, free, p.Obsolete, p.Free)
		}
	}
	if counted < 1000 || freed < 100 {
		t.Errorf("only %d chunks were live and %d freed", counted, freed)
	}
}

// TestAFullPartitionIsSearchedOnce: if nothing can be won, Choose compares no chunk again before something has changed,
// and it finds every victim that there is, whatever was compared before.
func TestAFullPartitionIsSearchedOnce(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 2))
	for _, n := range []int{100, 3*maxCompared + 100} {
		sb := make(format.Superblock, format.SuperblockBytes)
		sb.SetPartitionBytes(int64(n)<<20 + 1<<20)
		sb.SetChunkBytes(1 << 20)
		p := New(sb)
		n = len(p.Chunks)
		for range n {
			i := p.Take([]format.Kind{format.KeyLog, format.ValueLog}[rng.IntN(2)])
			p.AddLive(i, 1<<20-600)
			p.Seal(i)
		}
		w := Weights{Key: 256, Value: 256, Fill: 1<<20 - 600}
		all := []Kinds{{Keys: true}, {Values: true}, {Keys: true, Values: true}}
		// search chooses until nothing is compared any more.
		search := func(of Kinds) format.ChunkNumber {
			for range 2 + n/maxCompared {
				look, compared := p.look, p.search(of).compared
				if v := p.Choose(w, of); v != none {
					return v
				}
				if p.look == look && p.search(of).compared == compared {
					return none
				}
			}
			t.Fatalf("%+v: chunks are compared for ever in vain", of)
			return none
		}
		for range 300 {
			of := all[rng.IntN(len(all))]
			if v := search(of); v != none {
				t.Fatalf("%d chosen, in which nothing is to be won", v)
			}
			i := format.ChunkNumber(rng.IntN(n))
			c := &p.Chunks[i]
			switch rng.IntN(3) {
			case 0:
				p.SubLive(p.At(i, 0), 1<<19)
			case 1:
				p.SetLive(i, 1<<19)
			default:
				p.Pin(i)
				p.SubLive(p.At(i, 0), 1<<19)
				if v := search(of); v != none {
					t.Fatalf("%d chosen, which is pinned", v)
				}
				p.Unpin(i)
			}
			want := i
			if c.Kind == format.KeyLog && !of.Keys || c.Kind == format.ValueLog && !of.Values {
				want = none
			}
			if v := search(of); v != want {
				t.Fatalf("%+v: %d chosen, want %d", of, v, want)
			}
			if want != none { // it could not be emptied
				if v := search(of); v != none {
					t.Fatalf("%d chosen, want none", v)
				}
				p.Reseal(i)
				if v := search(of); v != i {
					t.Fatalf("%d chosen, want %d again", v, i)
				}
				p.Reseal(i)
			}
			p.SetLive(i, 1<<20-600)
		}
	}
}

// TestTheKeyLogDoesNotGetChunksThatAreUnreadable, unless all that are free are. Every free chunk is taken once, whoever
// takes it.
func TestTheKeyLogDoesNotGetChunksThatAreUnreadable(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 3))
	sb := make(format.Superblock, format.SuperblockBytes)
	sb.SetPartitionBytes(41 << 20)
	sb.SetChunkBytes(1 << 20)
	p := New(sb)
	n := len(p.Chunks)
	bad := map[format.ChunkNumber]bool{}
	for range n / 3 {
		i := format.ChunkNumber(rng.IntN(n))
		bad[i] = true
		p.NoteUnreadable(i)
	}
	free := map[format.ChunkNumber]bool{}
	for i := range n {
		free[format.ChunkNumber(i)] = true
	}
	passed := 0
	for range 5000 {
		switch k := rng.IntN(3); {
		case k < 2 && p.Free > 0:
			kind := []format.Kind{format.KeyLog, format.ValueLog, format.Checkpoint}[rng.IntN(3)]
			sound := false
			for i := range free {
				sound = sound || !bad[i]
			}
			i := p.Take(kind)
			if !free[i] {
				t.Fatalf("chunk %d is taken and was not free", i)
			}
			if kind == format.KeyLog && bad[i] && sound {
				t.Fatalf("the key log gets chunk %d, in which something is unreadable, of %v", i, free)
			}
			if kind == format.KeyLog && !bad[i] {
				passed++
			}
			delete(free, i)
		case len(free) < n:
			i := format.ChunkNumber(rng.IntN(n))
			for free[i] {
				i = (i + 1) % format.ChunkNumber(n)
			}
			if free[i] = true; rng.IntN(2) == 0 {
				p.Return(i)
			} else {
				p.ReturnBad(i)
			}
		}
		if p.Free != len(free) {
			t.Fatalf("%d chunks are free, want %d", p.Free, len(free))
		}
	}
	if passed < 100 {
		t.Errorf("the key log has taken a sound chunk only %d times", passed)
	}
}

// TestOldChunksOfValuesAreEmptiedBefore young ones that have somewhat less live: those will have even less soon.
func TestOldChunksOfValuesAreEmptiedBefore(t *testing.T) {
	sb := make(format.Superblock, format.SuperblockBytes)
	sb.SetPartitionBytes(200 << 20)
	sb.SetChunkBytes(1 << 20)
	p := New(sb)
	seal := func(live int) format.ChunkNumber {
		i := p.Take(format.ValueLog)
		p.AddLive(i, live)
		p.Seal(i)
		return i
	}
	old := seal(700 << 10)
	for range 100 {
		p.Return(p.Take(format.Checkpoint)) // time goes by
	}
	young, empty := seal(600<<10), seal(100<<10)
	w := Weights{Key: 10, Value: 1, Fill: p.Bytes()}
	for n, want := range []format.ChunkNumber{empty, old, young, none} {
		if got := p.Choose(w, Kinds{Values: true}); got != want {
			t.Errorf("victim %d is chunk %d, want %d", n, got, want)
		}
	}
}

// TestAPoolThatHasShrunkGivesMemoryBack: what it takes is what MemoryBytes says, give or take a page.
func TestAPoolThatHasShrunkGivesMemoryBack(t *testing.T) {
	sb := make(format.Superblock, format.SuperblockBytes)
	sb.SetPartitionBytes(1 << 40)
	sb.SetChunkBytes(1 << 20)
	p := New(sb)
	takes := func() int64 { return int64(cap(p.Chunks)*chunkBytes + 8*cap(p.noted) + 8*cap(p.unread)) }
	for _, n := range []int{len(p.Chunks), 10_000, 100} {
		for !p.Narrow(n) {
		}
		before := &p.Chunks[0]
		p.Truncate()
		if &p.Chunks[0] == before {
			t.Errorf("the table of %d chunks is in the memory of the longer one", n)
		}
		if got, want := takes(), MemoryBytes(n); len(p.Chunks) != n || got < want || got > want+8192 {
			t.Errorf("%d of %d chunks take %d bytes, want %d", len(p.Chunks), n, got, want)
		}
	}
	p.Extend(20_000)
	for !p.Widen() {
	}
	if p.Free != 20_000 || p.Unreadable(19_999) {
		t.Errorf("%d chunks are free, want 20000", p.Free)
	}
}
