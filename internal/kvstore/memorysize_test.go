package kvstore

import (
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
)

// bytesAnObject is what an object with a key of 16 bytes takes of a partition at rest: its value, and its part of a
// segment.
func bytesAnObject(valueLen int) float64 {
	const keys, width, changes = 13, 3, 8
	segment := format.SegmentHeaderBytes + keys*(format.ItemHeaderBytes+format.MaxKey+width) + changes
	return float64(format.ValueBytes(valueLen)) + float64(format.RoundUp(segment, format.KeyUnit))/keys
}

// TestMemoryByPartitionSize: docs/operations.md has a table of what a partition takes of memory that is full to 80 %.
// Buffers are those that a store of that size takes when it is formatted; the tables are computed with the functions
// that the metric uses.
func TestMemoryByPartitionSize(t *testing.T) {
	docs, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []struct {
		name  string
		bytes int64
	}{{"1 GiB", 1 << 30}, {"100 GiB", 100 << 30}, {"4 TiB", 4 << 40}} {
		buffers, mem := int64(0), make([]byte, lookup.EntryBytes*lookup.FirstSegments)
		s, err := New(Config{PartitionBytes: p.bytes, BlockSize: 4096, SegTbl: mem, Format: true, HashSeed: 1,
			UUID: [16]byte{1}, Alloc: func(n int) ([]byte, error) {
				buffers += int64(n)
				return make([]byte, n), nil
			}})
		if err != nil {
			t.Fatal(err)
		}
		if d := (&instant{s: s, sparse: sparse{}}); true {
			d.run()
		}
		chunks := space.MemoryBytes(len(s.pool.Chunks))
		if got := s.TableBytes() - lookup.MemoryBytes(s.tbl.Len(), s.tbl.Max()); got != chunks || !s.Ready() {
			t.Fatalf("%s: ready %v, the chunks take %d bytes, want %d", p.name, s.Ready(), got, chunks)
		}
		for _, v := range []int{256, 1024} {
			objects := 0.8 * float64(p.bytes) / bytesAnObject(v)
			most := p.bytes / 32 / int64(s.cfg.KeysPerSegment)
			table := lookup.MemoryBytes(uint32(objects/float64(s.cfg.KeysPerSegment)), int(most))
			const mib = 1 << 20
			all := float64(table + chunks + buffers)
			want := []float64{objects / 1e6, float64(table) / mib, float64(chunks) / mib, float64(buffers) / mib,
				all / mib, float64(table+chunks) / objects}
			row := fmt.Sprintf("| %s | %d B |", p.name, v)
			_, rest, found := strings.Cut(string(docs), row)
			line, _, _ := strings.Cut(rest, "\n")
			cells := strings.Split(strings.Trim(line, " |"), "|")
			text := row
			for i, w := range want {
				text += fmt.Sprintf(" %.3g |", w)
				if !found || len(cells) != len(want) {
					continue
				}
				got, err := strconv.ParseFloat(strings.ReplaceAll(strings.TrimSpace(cells[i]), ",", ""), 64)
				if err != nil || math.Abs(got-w) > 0.05*w {
					t.Errorf("%s: column %d of the table is %q, want about %.3g", row, i+3, cells[i], w)
				}
			}
			if t.Log(text); !found || len(cells) != len(want) {
				t.Errorf("docs/operations.md has no such line: %s", row)
			}
		}
	}
}

// TestAnObjectTakesAsMuchAsTheTableOfMemorySays fills a partition to 80 %.
func TestAnObjectTakesAsMuchAsTheTableOfMemorySays(t *testing.T) {
	for _, v := range []int{256, 1024} {
		d := newInstant(t, Config{PartitionBytes: 32 << 20, BlockSize: 512, ChunkBytes: 256 << 10})
		n := int(0.8 * (32 << 20) / bytesAnObject(v))
		if v == 256 {
			n = n * 8 / 10 // it is full at 72 % of user bytes
		}
		if got := d.put(0, n, func(i int) uint64 { return uint64(i) }, make([]byte, v), 32); got != n {
			t.Fatalf("%d of %d objects of %d B fit", got, n, v)
		}
		st := d.s.Stats()
		// The keys of this test have 8 bytes.
		got, want := float64(st.LiveBytes)/float64(st.Objects)+format.MaxKey-8, bytesAnObject(v)
		if math.Abs(got-want) > 0.05*want || math.Abs(float64(st.Segments)*13/float64(st.Objects)-1) > 0.05 {
			t.Errorf("an object of %d B takes %.1f bytes, want about %.1f; %d segments for %d", v, got, want,
				st.Segments, st.Objects)
		}
	}
}
