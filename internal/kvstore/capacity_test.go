package kvstore

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/units"
)

// sparse is the content of a large device, by block of 4 KiB. It has no blocks of zeroes, so that values of zeroes take
// little memory.
type sparse map[int64]*[sparseBlock]byte

const sparseBlock = 4096

var zeroes [sparseBlock]byte

// each calls f for the part of buf in each block.
func (d sparse) each(offset units.ExtentOffset, buf []byte, f func(block int64, within int, part []byte)) {
	for at := int64(offset); len(buf) > 0; {
		within := int(at % sparseBlock)
		n := min(len(buf), sparseBlock-within)
		f(at/sparseBlock, within, buf[:n])
		at, buf = at+int64(n), buf[n:]
	}
}

func (d sparse) read(buf []byte, offset units.ExtentOffset) {
	d.each(offset, buf, func(block int64, within int, part []byte) {
		if b := d[block]; b != nil {
			copy(part, b[within:])
		} else {
			clear(part)
		}
	})
}

func (d sparse) write(offset units.ExtentOffset, buf []byte) {
	d.each(offset, buf, func(block int64, within int, part []byte) {
		b := d[block]
		if b == nil {
			if bytes.Equal(part, zeroes[:len(part)]) {
				return
			}
			b = new([sparseBlock]byte)
			d[block] = b
		}
		if copy(b[within:], part); *b == zeroes {
			delete(d, block)
		}
	})
}

// fullStore is a store that has refused a Put because it is full.
type fullStore struct {
	*instant
	sizes func(i int) int
	zero  []byte
}

// fill puts values, of the sizes that sizes returns, until a Put is refused.
func fill(tb testing.TB, cfg Config, sizes func(i int) int, prepare func(s *Store)) *fullStore {
	f := &fullStore{instant: newInstant(tb, cfg), sizes: sizes, zero: make([]byte, format.MaxValue)}
	prepare(f.s)
	for i := 0; f.put(i, 32); i += 32 {
		if int64(i) > cfg.PartitionBytes { // each value has a byte
			tb.Fatalf("%d Puts into %d bytes, and none was refused for lack of space", i, cfg.PartitionBytes)
		}
	}
	return f
}

// put puts the values of n keys at once, and reports whether none was refused.
func (f *fullStore) put(first, n int) bool {
	before := f.refused
	for i := first; i < first+n; {
		for i < first+n {
			binary.LittleEndian.PutUint64(f.k[:], uint64(i))
			if !f.s.Submit(&Request{Op: Put, Key: f.k[:], Value: f.zero[:f.sizes(i)]}) {
				break
			}
			i++
		}
		f.run()
	}
	return f.refused == before
}

// usable is the share of the partition that live records take, with the two fifths of the keys again that the key log
// needs to be emptied.
func (f *fullStore) usable() float64 {
	return float64(f.s.pool.Live+f.s.pool.KeyLive*2/5) / float64(f.s.cfg.PartitionBytes)
}

// TestThePartitionIsUsableAtAnySize: values of one size, and mixes of sizes, fill the partition.
func TestThePartitionIsUsableAtAnySize(t *testing.T) {
	PlainOnly(t)
	t.Parallel()
	const kib, mib = 1 << 10, 1 << 20
	rng := rand.New(rand.NewPCG(FixedSeed(t), 1))
	type row struct {
		name  string
		sizes func(int) int
		small bool // a small part of a chunk
	}
	var rows []row
	for _, n := range Sized([]int{1, 60, 400, 3000, 4 * kib, 4*kib + 1,
		16*kib + 1, 32 * kib, 32*kib + 1, 50_000, 64*kib + 1, 100 * kib, 128*kib + 1, 200 * kib, 256*kib + 1, 300_000,
		400 * kib, 512 * kib, 512*kib + 1, 600 * kib, 700 * kib, 800 * kib, mib - 24, mib - 1, mib},
		[]int{1, 400, 4*kib + 1, 32 * kib, 64*kib + 1, 300_000, 512*kib + 1, mib}) {
		rows = append(rows, row{fmt.Sprint(n, " B"), func(int) int { return n }, n <= 4*kib+1})
	}
	rows = append(rows,
		row{"1 KiB and 1 MiB", func(i int) int { return []int{kib, mib}[i%2] }, false},
		row{"1 B to 1 MiB", func(int) int { return 1 + rng.IntN(mib) }, false},
		row{"100 B, 64 KiB + 1, 700 KiB", func(i int) int { return []int{100, 64*kib + 1, 700 * kib}[i%3] }, false})
	for _, r := range rows {
		// A chunk is 1/128 of the partition. Values that are a small part of a chunk are measured with small chunks.
		cfg := Config{PartitionBytes: 257 * mib, BlockSize: 512, ChunkBytes: 2 * mib}
		if r.small {
			cfg = Config{PartitionBytes: 33 * mib, BlockSize: 512, ChunkBytes: 256 * kib, GroupBytes: 16 * kib}
		}
		f := fill(t, cfg, r.sizes, func(*Store) {})
		st := f.s.Stats()
		t.Logf("%s: %.1f %% of the partition is usable, %.1f %% user bytes, %.2f bytes written per user byte, %d free",
			r.name, 100*f.usable(), 100*float64(st.UserBytes)/float64(cfg.PartitionBytes),
			float64(f.wbytes)/float64(st.UserBytes), st.FreeChunks)
		if got := f.usable(); got < 0.85 {
			t.Errorf("%s: %.1f %% of the partition is usable, want 85 %%", r.name, 100*got)
		}
	}
}

// TestRefusedPutsWearNoDrive: while a full partition refuses Puts for an hour (a quarter of one in `make test`),
// compaction writes next to nothing, because it cannot win anything.
func TestRefusedPutsWearNoDrive(t *testing.T) {
	PlainOnly(t)
	t.Parallel()
	const kib, mib = 1 << 10, 1 << 20
	for _, c := range []struct {
		name    string
		size    int
		prepare func(s *Store)
	}{
		{"as many live bytes as there may be", 4 * kib, func(*Store) {}},
		{"chunks that cannot be used", 4 * kib, func(s *Store) {
			for range 5 {
				s.pool.Take(format.ValueLog)
			}
		}},
		{"values that fill half of a chunk", mib, func(s *Store) { s.pieceBytes = format.MaxValue }},
		{"values that fill two thirds of a chunk", 690 * kib, func(s *Store) { s.pieceBytes = format.MaxValue }},
		{"values that fill nine tenths of a chunk", 205 * kib, func(s *Store) { s.pieceBytes = format.MaxValue }},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := Config{PartitionBytes: 129 * mib, BlockSize: 512, ChunkBytes: 2 * mib}
			f := fill(t, cfg, func(int) int { return c.size }, c.prepare)
			seconds := Sized(3600, 900)
			before, refused, objects := f.wbytes, f.refused, int(f.s.Stats().Objects)
			for i := range seconds {
				f.put(objects+1000+i, 8)
				for end := f.now + 1e9; f.now < end; {
					f.run()
					wake := f.act.WakeNS
					if wake == 0 || wake > end {
						wake = end
					}
					f.now = max(f.now, wake)
				}
				// A few requests find a place in a key log that was emptied.
				if got := f.wbytes - before; got > int64(seconds)*16*mib/3600 {
					t.Fatalf("%.0f MiB were written while %d Puts were refused in %d s", float64(got)/mib,
						f.refused-refused, i+1)
				}
			}
			t.Logf("%d Puts were refused, %.1f MiB were written", f.refused-refused, float64(f.wbytes-before)/mib)
			if f.refused-refused < seconds*20_000/3600 {
				t.Errorf("%d Puts were refused, want more", f.refused-refused)
			}
		})
	}
}
