package crrs

import (
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"slices"
	"sort"
	"testing"
)

const objectBytes = 128

// rangeStore is a store for a pass without writes: the versions of objects, by their positions.
type rangeStore struct {
	positions []uint64
	version   map[uint64]uint64
}

func newRangeStore(version map[uint64]uint64) *rangeStore {
	return &rangeStore{slices.Sorted(maps.Keys(version)), version}
}

func (s *rangeStore) set(at, version uint64) {
	if i, found := slices.BinarySearch(s.positions, at); !found {
		s.positions = slices.Insert(s.positions, i, at)
	}
	s.version[at] = version
}

func (s *rangeStore) remove(at uint64) {
	i, _ := slices.BinarySearch(s.positions, at)
	s.positions = slices.Delete(s.positions, i, i+1)
	delete(s.version, at)
}

// within returns the positions of a part behind its From.
func (s *rangeStore) within(p *Part) []uint64 {
	first, last := p.First, p.First+(1<<p.Bits-1)
	if p.From != (Cursor{}) {
		first = p.From.Position + 1
	}
	from := sort.Search(len(s.positions), func(i int) bool { return s.positions[i] >= first })
	to := sort.Search(len(s.positions), func(i int) bool { return s.positions[i] > last })
	return s.positions[from:max(from, to)]
}

func (s *rangeStore) do(op *RangeOp) {
	switch op.Kind {
	case Digest:
		op.Sums = make([]Sum, 1<<min(op.Bits, fanBits))
		for _, at := range s.within(&op.Part) {
			sum := &op.Sums[(at-op.First)>>(op.Bits-min(op.Bits, fanBits))]
			sum.Count++
			sum.Hash += (at ^ s.version[at]*0x9E3779B97F4A7C15) * 0xD6E8FEB86659FD93
		}
	case CopyOut:
		found := s.within(&op.Part)
		op.Last = len(found) <= 16
		for _, at := range found[:min(len(found), 16)] {
			op.Data = binary.LittleEndian.AppendUint64(op.Data, at)
			op.Data = binary.LittleEndian.AppendUint64(op.Data, s.version[at])
			op.Data = append(op.Data, make([]byte, objectBytes-16)...)
			op.To.Position = at
		}
	case CopyIn:
		for _, at := range slices.Clone(s.within(&op.Part)) {
			if (op.Last || at <= op.To.Position) && s.version[at] <= op.Clock {
				s.remove(at)
			}
		}
		for d := op.Data; len(d) > 0; d = d[objectBytes:] {
			at, v := binary.LittleEndian.Uint64(d), binary.LittleEndian.Uint64(d[8:])
			s.set(at, max(s.version[at], v))
		}
	}
}

// fillOnce fills a member from another one and returns what was done. At no time more than most batches and digests are
// under way.
func fillOnce(t *testing.T, copier, filling *rangeStore, most int) Progress {
	t.Helper()
	stores := []*rangeStore{copier, filling}
	cfg := Config{Window: 8, Reads: 1, Version: 1 << 20, Bits: 64, Parts: most, Leaf: 1}
	replicas := []*Replica{New(cfg), New(cfg)}
	outs := make([]Actions, 2)
	replicas[0].SetRole(Role{Epoch: 1, Member: true, Predecessor: NoPeer, Successor: 1, ChainTail: NoPeer}, &outs[0])
	replicas[1].SetRole(Role{Epoch: 1, Member: true, Filling: true, Since: 1, Successor: NoPeer, ChainTail: NoPeer},
		&outs[1])
	for step := 0; !replicas[1].Complete(); step++ {
		if step > 1e6 {
			t.Fatalf("not complete: %+v", replicas[1].Progress())
		}
		for i, r := range replicas {
			r.Flush(&outs[i])
			out := outs[i]
			outs[i] = Actions{}
			asked := 0
			for _, m := range out.Sends {
				if m.Kind == Compare || m.Kind == Fetch {
					asked++
				}
				replicas[m.To].Receive(Peer(i), &m.Message, &outs[m.To])
			}
			if asked+len(out.Ranges) > most {
				t.Fatalf("%d parts are asked for, %d digested or stored; want at most %d", asked, len(out.Ranges), most)
			}
			for _, op := range out.Ranges {
				stores[i].do(&op)
				r.Ranged(&op, Done, &outs[i])
			}
		}
	}
	return replicas[1].Progress()
}

// TestOnlyTheDifferenceIsShipped fills a member that was away while some objects were written and others were deleted,
// and that has some that were never acknowledged.
func TestOnlyTheDifferenceIsShipped(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	const objects = 10000
	for _, c := range []struct {
		name                       string
		changed, deleted, leftover int
	}{
		{"nothing", 0, 0, 0},
		{"one object", 1, 0, 0},
		{"one deleted", 0, 1, 0},
		{"one leftover", 0, 0, 1},
		{"a hundredth", objects / 100, 50, 20},
		{"a tenth", objects / 10, 500, 200},
	} {
		source, had := map[uint64]uint64{}, map[uint64]uint64{}
		for i := range objects {
			at := rng.Uint64()
			source[at], had[at] = 5, 5
			switch {
			case i < c.changed:
				had[at] = rng.Uint64N(10) % 9 // older, newer but never acknowledged, or missing
				if had[at] == 5 || had[at] == 0 {
					delete(had, at)
				}
			case i < c.changed+c.deleted:
				delete(source, at)
			}
		}
		for range c.leftover {
			had[rng.Uint64()] = 9
		}
		copier, filling := newRangeStore(source), newRangeStore(had)
		p := fillOnce(t, copier, filling, 4)
		if !slices.Equal(copier.positions, filling.positions) {
			t.Errorf("%s: other objects: %d, want %d", c.name, len(filling.positions), len(copier.positions))
		}
		for at, v := range source {
			if had[at] != v {
				t.Fatalf("%s: version %d at %x, want %d", c.name, had[at], at, v)
			}
		}
		differ := c.changed + c.deleted + c.leftover
		if most := uint64(c.changed*objectBytes) * 11 / 10; p.Bytes > most {
			t.Errorf("%s: %d bytes were shipped, want at most %d", c.name, p.Bytes, most)
		}
		if most := uint64(1 + 3*differ); p.Compared > most {
			t.Errorf("%s: %d parts were compared, want at most %d", c.name, p.Compared, most)
		}
	}
}

// TestAnEmptyMemberIsCopiedOnce looks for what is compared or copied in vain when a member has nothing.
func TestAnEmptyMemberIsCopiedOnce(t *testing.T) {
	source := map[uint64]uint64{}
	rng := rand.New(rand.NewPCG(3, 4))
	for range 5000 {
		source[rng.Uint64()] = 3
	}
	copier, filling := newRangeStore(source), newRangeStore(map[uint64]uint64{})
	p := fillOnce(t, copier, filling, 3)
	if !slices.Equal(copier.positions, filling.positions) || p.Compared != 1 || p.Bytes != 5000*objectBytes {
		t.Errorf("%d of 5000 objects, %+v", len(filling.positions), p)
	}
}

// TestAFewObjectsAreCopiedInFewBatches: a batch that is asked for takes much longer than a few objects in it. Live
// writes of the member are few, too.
func TestAFewObjectsAreCopiedInFewBatches(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 5))
	for _, c := range []struct{ objects, live, compared, batches int }{
		{200, 0, 1, 200/16 + 1},
		{200, 5, 6, 40},
		{1500, 75, 12, 180},
	} {
		source, had := map[uint64]uint64{}, map[uint64]uint64{}
		for i := range c.objects {
			at := rng.Uint64()
			if source[at] = 3; i < c.live {
				source[at], had[at] = 1<<20+9, 1<<20+9
			}
		}
		copier, filling := newRangeStore(source), newRangeStore(had)
		p := fillOnce(t, copier, filling, 2)
		t.Logf("%d objects, %d of them live: %+v", c.objects, c.live, p)
		if !slices.Equal(copier.positions, filling.positions) || p.Compared > uint64(c.compared) ||
			p.Batches > uint64(c.batches) {
			t.Errorf("%d of %d objects, %+v; want at most %d digests and %d batches", len(filling.positions), c.objects,
				p, c.compared, c.batches)
		}
	}
}

// TestWhatIsCopiedWithoutAComparisonIsNew: at most 1.1 times of what the member lacks is copied, if that is more than a
// few objects.
func TestWhatIsCopiedWithoutAComparisonIsNew(t *testing.T) {
	for theirs := uint64(1); theirs < 2000; theirs++ {
		for own := range theirs + 1 {
			lacked := theirs - own
			if few := theirs < 4*spared; lacksMost(own, theirs) && (!few && 10*theirs > 11*lacked || few && own > 4) {
				t.Fatalf("%d objects are copied to a member that has %d", theirs, own)
			}
		}
		if !lacksMost(0, theirs) || lacksMost(theirs, theirs) {
			t.Fatalf("%d objects: copied if none is there: %v, if all are: %v", theirs, lacksMost(0, theirs),
				lacksMost(theirs, theirs))
		}
	}
}

// TestPartsAreWhatDiffers draws digests and looks at the parts that are made of them: each sub-range that differs is in
// one of them, and one that does not differ only if there is nothing in it.
func TestPartsAreWhatDiffers(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 6))
	for range 2000 {
		bits := uint8(1 + rng.IntN(64))
		n := 1 << min(bits, fanBits)
		part := Part{First: rng.Uint64() &^ (1<<bits - 1), Bits: bits, Sums: make([]Sum, n)}
		if bits == 64 {
			part.First = 0
		}
		own := make([]Sum, n)
		most := 1 + rng.Uint64N(1<<rng.IntN(12))
		for i := range n {
			if part.Sums[i].Count = rng.Uint64N(most); part.Sums[i].Count > 0 {
				part.Sums[i].Hash = 1
			}
			if own[i] = part.Sums[i]; rng.IntN(3) > 0 {
				own[i] = Sum{Count: rng.Uint64N(1 + most*rng.Uint64N(3)/2), Hash: 2}
			}
		}
		r := New(Config{Window: 8, Reads: 1, Bits: 64, Parts: 1, Leaf: 1})
		theirs := part.Sums
		first := &task{Part: part}
		r.compare(first, own)
		seen := make([]int, n)
		var next task
		for r.pass.take(&next) {
			width := bits - min(bits, fanBits)
			from, count := (next.First-part.First)>>width, 1<<(next.Bits-width)
			objects := uint64(0)
			if next.Bits < 64 && next.First&(1<<next.Bits-1) != 0 || int(from)+count > n {
				t.Fatalf("part %x of %d bits in %x of %d", next.First, next.Bits, part.First, bits)
			}
			for i := range count {
				seen[int(from)+i]++
				objects += theirs[int(from)+i].Count
			}
			if count > 1 && (!next.copied || objects > joinedMost) {
				t.Fatalf("%d sub-ranges with %d objects together, copied: %v", count, objects, next.copied)
			}
		}
		for i := range n {
			differs := own[i] != theirs[i]
			if differs && seen[i] != 1 || seen[i] > 1 || !differs && seen[i] > 0 && own[i].Count > 0 {
				t.Fatalf("sub-range %d is in %d parts; differs: %v, %d objects", i, seen[i], differs, own[i].Count)
			}
		}
	}
}

// TestAPartWithoutUsableDigestsIsCopied: a copier that answers with too few digests, or too many, would do so again.
func TestAPartWithoutUsableDigestsIsCopied(t *testing.T) {
	for _, n := range []int{0, 63, 65} {
		var out Actions
		r := New(Config{Window: 8, Reads: 1, Bits: 64, Parts: 2, Leaf: 1})
		r.SetRole(Role{Epoch: 1, Member: true, Filling: true, Since: 1, Successor: NoPeer, ChainTail: NoPeer}, &out)
		r.Receive(0, &Message{Kind: Durable, Epoch: 1, Clock: 100}, &out)
		asked := func(kind MessageKind) (m *Message) {
			t.Helper()
			r.Flush(&out)
			if m = &out.Sends[len(out.Sends)-1].Message; m.Kind != kind || m.Part.Bits != 64 {
				t.Fatalf("%d digests: %+v, want kind %d for everything", n, m, kind)
			}
			return m
		}
		sums := &Message{Kind: Sums, Epoch: 1, Tag: asked(Compare).Tag, Part: &Part{Sums: make([]Sum, n)}}
		r.Receive(0, sums, &out)
		fetch := asked(Fetch)
		r.Receive(0, sums, &out) // the same again is late
		r.Receive(0, &Message{Kind: Batch, Epoch: 1, Tag: fetch.Tag, Part: &Part{Last: true}}, &out)
		if len(out.Ranges) != 1 || out.Ranges[0].Kind != CopyIn {
			t.Fatalf("%d digests: %+v, want a CopyIn", n, out.Ranges)
		}
		r.Ranged(&out.Ranges[0], Done, &out)
		if r.Flush(&out); !r.Complete() {
			t.Errorf("%d digests: not complete after the copy", n)
		}
	}
}

// TestAPassWaitsForWhatTheStoreStillHas gives a member a new membership while its store has a write and a batch of the
// last one. Either would bring back what the new pass has removed.
func TestAPassWaitsForWhatTheStoreStillHas(t *testing.T) {
	var out Actions
	r := New(Config{Window: 8, Reads: 1, Bits: 64, Parts: 2, Leaf: 1})
	join := func(epoch uint64) {
		r.SetRole(Role{Epoch: epoch, Member: true, Filling: true, Since: epoch, Successor: NoPeer, ChainTail: NoPeer},
			&out)
		r.Receive(0, &Message{Kind: Durable, Epoch: epoch, Clock: epoch * 100}, &out)
	}
	// asked returns the Compare or the Fetch that is sent.
	asked := func() (m *Message) {
		r.Flush(&out)
		for i := range out.Sends {
			if out.Sends[i].Part != nil {
				m = &out.Sends[i].Message
			}
		}
		out.Sends = nil
		return m
	}
	join(1)
	compare := asked()
	sums := append(make([]Sum, 63), Sum{1, 1})
	r.Receive(0, &Message{Kind: Sums, Epoch: 1, Tag: compare.Tag, Part: &Part{Sums: sums}}, &out)
	digest := out.Ranges[0]
	digest.Sums = make([]Sum, 64)
	r.Ranged(&digest, Done, &out)
	fetch := asked()
	r.Receive(0, &Message{Kind: Batch, Epoch: 1, Tag: fetch.Tag, Part: &Part{Last: true}}, &out)
	batch := out.Ranges[1]
	r.Receive(0, &Message{Kind: Forward, Epoch: 1, Seq: 1, Op: Put, Version: 101}, &out)
	write := out.Stores[0]
	join(2)
	if m := asked(); m != nil {
		t.Errorf("%+v while the store has a write and a batch", m)
	}
	r.Stored(write.Slot, Done, 101, &out)
	if m := asked(); m != nil {
		t.Errorf("%+v while the store has a batch", m)
	}
	join(3)
	r.Receive(0, &Message{Kind: Forward, Epoch: 3, Seq: 1, Op: Put, Version: 301}, &out)
	write = out.Stores[1]
	join(4)
	r.Ranged(&batch, Done, &out)
	if m := asked(); m != nil {
		t.Errorf("%+v while the store has a write", m)
	}
	r.Stored(write.Slot, Done, 301, &out)
	if m := asked(); m == nil || m.Kind != Compare || m.Epoch != 4 || m.Part.Bits != 64 || m.Part.From != (Cursor{}) {
		t.Errorf("%+v when the store has nothing, want a Compare of everything", m)
	}
	if r.Writes() != 0 || r.Complete() {
		t.Errorf("%d writes of earlier memberships are under way, complete: %v", r.Writes(), r.Complete())
	}
}

// TestVersionsGrowWithEpochs makes replicas ChainHead that know any of the versions that were given before: their
// processes are new ones. What another one was given meanwhile may come back when its store is filled.
func TestVersionsGrowWithEpochs(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	given := []uint64{0}
	for epoch := uint64(1); epoch < 100; epoch++ {
		var out Actions
		r := New(Config{Window: 8, Reads: 1, Version: given[rng.IntN(len(given))], Parts: 1})
		r.Extend(1)
		r.SetRole(Role{Epoch: epoch, Member: true, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}, &out)
		r.Write(Write{Op: Put}, &out)
		v := out.Stores[0].Version
		if v <= slices.Max(given) {
			t.Fatalf("epoch %d: version %d, want more than %d", epoch, v, slices.Max(given))
		}
		given = append(given, v)
	}
}

// TestAChainHeadThatHasMissedAViewBeginsAboveIt: another member may have led in that, and given versions to writes that
// nobody else has seen, and that its store still has when it is filled.
func TestAChainHeadThatHasMissedAViewBeginsAboveIt(t *testing.T) {
	var out Actions
	r := New(Config{Window: 8, Reads: 4, Bits: 64, Parts: 1})
	r.Advance(1)
	r.Extend(1 << 60)
	r.SetRole(headOfTwo, &out)
	role := headOfTwo
	role.Epoch += 2
	r.SetRole(role, &out)
	r.Write(Write{Op: Put, Key: Key{Len: 1}, Tag: 1}, &out)
	if v := out.Stores[0].Version; v <= firstVersion(role.Epoch-1)+versionGap {
		t.Errorf("version %d in epoch %d; the ChainHead of the epoch before began with %d", v, role.Epoch,
			firstVersion(role.Epoch-1))
	}
}
