package recovery

import (
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

// TestAPausedWalkReadsNoMoreThanItsBuffer: Piece is called repeatedly, and no records are taken.
func TestAPausedWalkReadsNoMoreThanItsBuffer(t *testing.T) {
	sb := make(format.Superblock, format.SuperblockBytes)
	sb.SetBlockSize(512)
	sb.SetChunkBytes(2 << 20)
	sb.SetPartitionBytes(64 << 20)
	pool := space.New(sb)
	i := pool.Take(format.ValueLog)
	w := NewWalk(pool, 512, make([]byte, WalkBytes(2<<20, 1<<20)))
	w.Begin(i)
	if rec, _, _ := w.Next(); rec != nil {
		t.Fatal("a record of nothing")
	}
	for range 100 {
		_, buf := w.Piece(true)
		if buf == nil {
			return
		}
		w.Read(true)
	}
	t.Error("there is no end of pieces")
}

// valueChunk is a chunk of values, each with its offset in the chunk as content.
type valueChunk struct {
	pool   *space.Pool
	number format.ChunkNumber
	bytes  []byte
	// bad are the numbers of blocks that cannot be read. reads counts reads.
	bad   []int
	reads int
	// damaged are the offsets of the damaged records that a walk has returned.
	damaged []int
}

const valueBlock = 512

func newValueChunk(size int) *valueChunk {
	sb := make(format.Superblock, format.SuperblockBytes)
	sb.SetBlockSize(valueBlock)
	sb.SetChunkBytes(int64(size))
	sb.SetPartitionBytes(64 << 20)
	pool := space.New(sb)
	return &valueChunk{pool: pool, number: pool.Take(format.ValueLog), bytes: make([]byte, size)}
}

// add writes a record of a value of n bytes, filled by fill, and returns its end.
func (c *valueChunk) add(at, n int, fill byte) (end int) {
	v := format.Value(c.bytes[at : at+format.ValueBytes(n)])
	v.SetValueLen(n)
	v.SetHash(uint64(at))
	v.SetVersion(1)
	for i := range v.Data() {
		v.Data()[i] = fill
	}
	v.Seal(c.pool.Seed(c.pool.At(c.number, format.ChunkOffset(at))))
	return at + len(v)
}

// readable reports whether the drive reads some bytes of the chunk.
func (c *valueChunk) readable(from, n int) bool {
	return !slices.ContainsFunc(c.bad, func(block int) bool {
		return block*valueBlock < from+n && (block+1)*valueBlock > from
	})
}

// walk returns the offsets of the sound records, and how often Next stopped in a search. It adds those of damaged ones
// to c.damaged.
func (c *valueChunk) walk(t *testing.T) (found []int, w Walk, stops int) {
	t.Helper()
	w = NewWalk(c.pool, valueBlock, make([]byte, WalkBytes(len(c.bytes), 1<<20)))
	w.Begin(c.number)
	for !w.Ended() && !w.Failed {
		if at, buf := w.Piece(true); buf != nil {
			from := int(c.pool.Within(at))
			ok := c.readable(from, len(buf))
			if c.reads++; ok {
				copy(buf, c.bytes[from:])
			}
			w.Read(ok)
		}
		for {
			rec, offset, sound := w.Next()
			if w.Searching {
				stops++
				continue
			}
			if rec == nil {
				break
			}
			if sound {
				found = append(found, int(c.pool.Within(offset)))
			} else {
				c.damaged = append(c.damaged, int(c.pool.Within(offset)))
			}
		}
	}
	return found, w, stops
}

// TestAWalkFindsEveryValuePastDamage: whatever is damaged, in whatever way, all other values are found, and that
// something is missing is seen.
func TestAWalkFindsEveryValuePastDamage(t *testing.T) {
	var places []int
	lay := func() *valueChunk {
		c := newValueChunk(128 << 10)
		places = places[:0]
		for at, n := valueBlock, 1; n < 60; n++ {
			places = append(places, at)
			at = c.add(at, n*7, byte(n))
			if n%9 == 0 { // a group ends
				at = format.RoundUp(at, valueBlock)
			}
		}
		return c
	}
	lay()
	for i := range places {
		for _, harm := range []struct {
			name string
			do   func(rec []byte)
		}{
			{"a bit of the checksum", func(rec []byte) { rec[1] ^= 4 }},
			{"the magic", func(rec []byte) { rec[4] ^= 1 }},
			{"a longer length", func(rec []byte) { rec[6] ^= 1 }},
			{"a length beyond the chunk", func(rec []byte) { rec[7] = 0xff }},
			{"the content", func(rec []byte) { rec[len(rec)-8] ^= 0x80 }},
			{"all of it", func(rec []byte) { clear(rec) }},
		} {
			c := lay()
			harm.do(c.bytes[places[i]:][:format.ValueBytes((i+1)*7)])
			found, w, _ := c.walk(t)
			if want := slices.Delete(slices.Clone(places), i, i+1); !slices.Equal(found, want) {
				t.Fatalf("%s of value %d is damaged: found at %v, want %v", harm.name, i, found, want)
			}
			// A group may have ended before a record that ends a block.
			end := places[i]%valueBlock + format.ValueBytes((i+1)*7)
			hidden := harm.name == "all of it" && (end == valueBlock || (i+1)%9 == 0 && end < valueBlock)
			if last := i == len(places)-1; w.Holes == 0 && !last && !hidden {
				t.Errorf("%s of value %d is damaged, and no hole is noticed", harm.name, i)
			}
		}
	}
	if found, w, _ := lay().walk(t); !slices.Equal(found, places) || w.Holes != 0 || w.Damaged != 0 {
		t.Errorf("nothing is damaged: %d of %d are found, %d holes", len(found), len(places), w.Holes)
	}
}

// TestAWalkReturnsDamagedValuesSideBySide, also if a group ends between them, and no place that is none.
func TestAWalkReturnsDamagedValuesSideBySide(t *testing.T) {
	for _, n := range []int{1, 2, 3, 20} {
		for first := range 60 - n {
			c := newValueChunk(128 << 10)
			var want, sound []int
			for at, i := valueBlock, 0; i < 60; i++ {
				end := c.add(at, 20+i*7, byte(i))
				if i >= first && i < first+n {
					c.bytes[at+format.ValueHeaderBytes+i%20] ^= 4
					want = append(want, at)
				} else {
					sound = append(sound, at)
				}
				if at = end; i%9 == 0 { // a group ends
					at = format.RoundUp(at, valueBlock)
				}
			}
			found, w, _ := c.walk(t)
			if !slices.Equal(c.damaged, want) || w.Damaged != n || !slices.Equal(found, sound) {
				t.Fatalf("%d values from number %d on: %d are damaged at %v, want %v", n, first, w.Damaged, c.damaged,
					want)
			}
		}
	}
}

// TestASearchIsBounded: a host has filled a value with what looks like the beginnings of long records, and the value is
// damaged. One call of Next checksums a bounded part of that.
func TestASearchIsBounded(t *testing.T) {
	c := newValueChunk(2 << 20)
	const long = 600 << 10
	end := c.add(valueBlock, long, 0)
	for at := valueBlock + format.ValueHeaderBytes; at < end-32; at += 8 {
		v := format.Value(c.bytes[at:])
		c.bytes[at+4] = 'v'
		v.SetValueLen(min(100<<10, end-at-24))
	}
	last := c.add(format.RoundUp(end, valueBlock), 100, 3)
	found, _, stops := c.walk(t)
	if want := []int{format.RoundUp(end, valueBlock)}; !slices.Equal(found, want) {
		t.Errorf("found at %v, want %v, up to %d", found, want, last)
	}
	if candidates := long / 8; stops < candidates/4 {
		t.Errorf("the search of %d candidates of up to 100 KiB stopped %d times", candidates, stops)
	}
}

// TestAWalkFindsSegmentsPastDamage: the beginning of a group did not reach the SSD. In the rest, a segment begins in
// the middle of a block, behind bytes that look like a segment.
func TestAWalkFindsSegmentsPastDamage(t *testing.T) {
	const block = 512
	sb := make(format.Superblock, format.SuperblockBytes)
	sb.SetBlockSize(block)
	sb.SetChunkBytes(128 << 10)
	sb.SetPartitionBytes(64 << 20)
	pool := space.New(sb)
	i := pool.Take(format.KeyLog)
	chunk := make([]byte, 128<<10)
	places := []int{block, block + 64, 3*block + 320, 3*block + 384, 7 * block}
	for n, at := range places {
		seg := format.Segment(chunk[at:])
		seg.Clear(uint32(n))
		seg.Recode(1, 0)
		seg.Insert([]byte("a key"))
		seg.Seal(pool.Seed(pool.At(i, format.ChunkOffset(at))))
	}
	// The end of a segment whose beginning is lost, with a key that looks like a segment.
	copy(chunk[3*block+256:], chunk[block:block+64])
	w := NewWalk(pool, block, make([]byte, WalkBytes(len(chunk), 1<<20)))
	w.Begin(i)
	var found []int
	for !w.Ended() {
		if at, buf := w.Piece(true); buf != nil {
			copy(buf, chunk[pool.Within(at):])
			w.Read(true)
		}
		for {
			rec, offset, sound := w.Next()
			if rec == nil {
				break
			}
			if !sound {
				t.Errorf("at %d there is said to be a damaged segment", pool.Within(offset))
				continue
			}
			found = append(found, int(pool.Within(offset)))
		}
	}
	if !slices.Equal(found, places) || w.Damaged != 0 {
		t.Errorf("segments are found at %v, want %v", found, places)
	}
}

// TestAWalkFindsEveryValueInBlocksThatCanBeRead: it takes few reads, and too many unreadable blocks end the walk.
func TestAWalkFindsEveryValueInBlocksThatCanBeRead(t *testing.T) {
	for _, bad := range [][]int{{1}, {77}, {77, 78}, {255}, {3, 100, 200, 254}, {0}} {
		c := newValueChunk(128 << 10)
		c.bad = bad
		var want []int
		for at, n := valueBlock, 1; at < 120<<10; n++ {
			end := c.add(at, 10+n%700, byte(n))
			if c.readable(at, end-at) {
				want = append(want, at)
			}
			at = end
		}
		found, w, _ := c.walk(t)
		if !slices.Equal(found, want) || w.Failed || w.Unreadable != len(bad) {
			t.Errorf("blocks %v: %+v, found %v, want %v", bad, w.Unreadable, found, want)
		}
		if most := 1 + 30*len(bad); c.reads > most {
			t.Errorf("blocks %v: %d reads, want at most %d", bad, c.reads, most)
		}
	}
	c := newValueChunk(128 << 10)
	for i := range MaxUnreadable + 1 {
		c.bad = append(c.bad, 2*i)
	}
	if _, w, _ := c.walk(t); !w.Failed {
		t.Error("the walk goes on")
	}
}
