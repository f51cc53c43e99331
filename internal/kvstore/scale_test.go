package kvstore

import (
	"fmt"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/recovery"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
)

// bigPool is the pool of a partition of 4 TiB: 1 M chunks. Most of them are sealed.
func bigPool() *space.Pool {
	sb := make(format.Superblock, format.SuperblockBytes)
	sb.SetPartitionBytes(format.MaxPartitionBytes)
	sb.SetChunkBytes(4 << 20)
	p := space.New(sb)
	for i := range p.Chunks {
		if i%16 > 0 {
			p.Chunks[i] = space.Chunk{Epoch: space.NewEpoch(uint64(i)), Live: 3 << 20, State: space.Sealed,
				Kind: format.ValueLog}
			if i%64 == 1 {
				p.Chunks[i].Kind = format.KeyLog
			}
		}
	}
	p.Recovered()
	return p
}

// bigSegments is how many segments that partition may have: 2 GB of SegTbl.
const bigSegments = 400 << 20

// BenchmarkAt4TiB measures all that a turn of the store does whose time follows the size of the partition, or would
// without a bound. docs/decisions/0007 has the figures.
func BenchmarkAt4TiB(b *testing.B) {
	p := bigPool()
	mem := make([]byte, lookup.TableBytes(bigSegments))
	for i := 0; i < len(mem); i += 4096 { // otherwise all pages are the same one
		mem[i] = 1
	}
	tbl := lookup.NewSegTbl(mem)
	tbl.Grow(bigSegments)
	run := func(name string, f func()) {
		b.Run(name, func(b *testing.B) {
			for range b.N {
				f()
			}
		})
	}
	run("8192 chunks when a checkpoint begins", func() {
		if p.NoteLive() {
			p.BeginCheckpoint()
		}
	})
	for !p.NoteLive() {
	}
	run("8192 chunks when it ends", func() { p.EndCheckpoint(true) })
	sum := make(format.Summary, format.SummaryBytes)
	sum.SetSegments(bigSegments)
	page, n := make(format.Page, format.PageBytes), int64(0)
	begin := func() *recovery.CheckpointStream {
		return &recovery.CheckpointStream{Summary: sum, Pool: p, Table: &tbl}
	}
	stream := begin()
	run("a page of chunks", func() {
		if n++; n%300 == 0 {
			stream = begin()
		}
		stream.Fill(page.Payload())
		page.Seal()
	})
	stream = begin()
	for range 1 + len(p.Chunks)*format.ChunkEntryBytes/format.PagePayloadBytes {
		stream.Fill(page.Payload())
	}
	run("a page of segments", func() {
		stream.Fill(page.Payload())
		page.Seal()
	})
	change := func(every uint32) {
		for i := uint32(0); i < tbl.Len(); i += every {
			tbl.Set(i, lookup.NewEntry(format.AreaStart, 100))
		}
		stream = begin()
		stream.Increment = true
	}
	for _, every := range []uint32{4, 1000, 1 << 20} {
		b.Run(fmt.Sprintf("a step to a page of an increment, 1 in %d changed", every), func(b *testing.B) {
			change(every)
			b.ResetTimer()
			for b.Loop() {
				if stream.Fill(page.Payload()) {
					page.Seal()
				}
				if stream.Ended() {
					b.StopTimer()
					change(every)
					b.StartTimer()
				}
			}
		})
	}
	taken := make([]format.ChunkNumber, 400)
	run("400 chunks of a checkpoint are taken and freed", func() {
		for i := range taken {
			taken[i] = p.Take(format.Checkpoint)
		}
		for _, i := range taken {
			p.Return(i)
		}
	})
	run("a victim is chosen", func() {
		if v := p.Choose(space.Weights{Key: 192 * 13, Value: 256, Fill: 4 << 20},
			space.Kinds{Keys: true, Values: true}); v >= 0 {
			p.Chunks[v].State = space.Sealed
		}
	})
	benchmarkSkips(b, p, &tbl)
	for _, n := range []int{8, 1000} {
		benchmarkWalk(b, p, n)
	}
	run("all: recovery counts the chunks", p.Recovered)
	run("all: recovery loads the table, a page", func() {
		n = (n + 1) % 60000
		tbl.Load(n*format.PagePayloadBytes, page.Payload())
	})
}

// noHost is a lookup.Host whose reads are counted only.
type noHost struct{ reads int }

func (h *noHost) ReadFor(int32, tenant.ID, bool, units.ExtentOffset, []byte) { h.reads++ }
func (h *noHost) Done(uint64, lookup.Result, lookup.Object)                  {}
func (h *noHost) Checked(uint64, lookup.Result)                              {}
func (h *noHost) Damaged(units.ExtentOffset, int, uint32, uint64) lookup.Result {
	return lookup.Corrupt
}

// benchmarkSkips measures what a turn does for a List of a table that was full and is empty.
func benchmarkSkips(b *testing.B, p *space.Pool, tbl *lookup.SegTbl) {
	h := &noHost{}
	m, err := lookup.New(lookup.Config{Host: h, Table: tbl, Pool: p, BlockSize: 512, Requests: 1,
		MaxExtentBytes: 4096, Alloc: space.HeapAlloc})
	if err != nil {
		b.Fatal(err)
	}
	// One segment of each class is not empty, so that none is skipped as a whole.
	for i := range uint32(1 << 17) {
		tbl.Set(tbl.Len()-1-i, lookup.NewEntry(format.AreaStart, 100))
	}
	defer func() {
		for i := range uint32(1 << 17) {
			tbl.Set(tbl.Len()-1-i, 0)
		}
	}()
	value := make([]byte, 4096)
	b.Run("a turn of a List", func(b *testing.B) {
		m.Begin(&lookup.Request{Op: lookup.List, Value: value})
		for b.Loop() {
			if m.Continue(); h.reads > 0 {
				h.reads = 0
				m.Read(0, false)
				m.Begin(&lookup.Request{Op: lookup.List, Value: value})
			}
		}
	})
}

// benchmarkWalk measures what a turn does for the scrub, with values of n bytes.
func benchmarkWalk(b *testing.B, p *space.Pool, n int) {
	const chunk = 100
	disk := make([]byte, 1<<20)
	size := format.ValueBytes(n)
	for at := 512; at+size <= len(disk); at += size {
		v := format.Value(disk[at:])
		v.SetValueLen(n)
		v.Seal(p.Seed(p.At(chunk, format.ChunkOffset(at))))
	}
	w := recovery.NewWalk(p, 512, make([]byte, len(disk)))
	again := func() {
		w.Begin(chunk)
		for {
			offset, buf := w.Piece(true)
			if buf == nil {
				break
			}
			copy(buf, disk[offset-p.At(chunk, 0):])
			w.Read(true)
		}
	}
	b.Run(fmt.Sprintf("256 records of the scrub, of %d bytes", size), func(b *testing.B) {
		for b.Loop() {
			for range scrubRecords {
				if rec, _, _ := w.Next(); rec == nil {
					b.StopTimer()
					again()
					b.StartTimer()
				}
			}
		}
	})
}
