package kvstore

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/nvme"
)

// TestCopiesLeaveOthersTheirLatency: a copy has few I/Os in flight, so that Gets and Puts take not much longer beside
// it, although nothing in this device prefers them. Two stores with the same drive copy to each other all the time.
func TestCopiesLeaveOthersTheirLatency(t *testing.T) {
	PlainOnly(t)
	const n, value, depth, copies, rangeTag = 10000, 512, 16, 2, 1 << 32
	cfg := Config{PartitionBytes: 24 << 20, BlockSize: 512, ChunkBytes: 256 << 10}
	rng := rand.New(rand.NewPCG(FixedSeed(t), 5))
	fast := newInstant(t, cfg)
	fast.put(0, n, func(i int) uint64 { return uint64(i) }, make([]byte, value), 64)
	d := &paced{s: fast.s, disk: fast.disk, now: fast.now, channels: make([]int64, 16)}
	var sent [depth]int64
	var took []int64
	var ranges [copies]Request
	busy := [copies]bool{}
	copied, batches := 0, [copies][]byte{}
	d.reply = func(p Reply) {
		if p.Tag < rangeTag {
			took = append(took, d.now-sent[p.Tag])
			sent[p.Tag] = 0
			return
		}
		c := p.Tag - rangeTag
		busy[c] = false
		q := &ranges[c]
		switch {
		case p.Status != OK:
			t.Fatalf("op %d: status %d", q.Op, p.Status)
		case q.Op == CopyIn:
			*q = Request{Op: CopyOut, Tag: p.Tag, Range: q.Range, Key: q.Key, Value: batches[c], Background: true}
			return
		}
		b := nvme.KVRange(q.Value[:p.ValueLen])
		copied += b.Items()
		to := b.To()
		if q.Range.From, q.Key = to.Position, slices.Clone(to.Key[:to.KeyLen]); b.Complete() {
			q.Range.From, q.Key = 0, nil
		}
		// Half of the copies come back with versions that are newer, so that they are written.
		for at := nvme.KVRangeHeaderBytes; at < len(b) && c == 0; {
			e, next := b.EntryAt(at)
			e.SetVersion(e.Version() + 1)
			at = next
		}
		b.Seal()
		*q = Request{Op: CopyIn, Tag: p.Tag, Range: q.Range, Key: q.Key, Value: b, Background: true}
	}
	var p50, p999 [2]int64
	for with := range 2 {
		for c := range ranges {
			batches[c] = make([]byte, 128<<10)
			ranges[c] = Request{Op: CopyOut, Tag: rangeTag + uint64(c), Range: Range{Last: math.MaxUint64},
				Value: batches[c], Background: true}
		}
		took = took[:0]
		begin, buf := d.now, make([]byte, value)
		for len(took) < 4000 {
			for i := range sent {
				var k [16]byte
				binary.LittleEndian.PutUint64(k[:], rng.Uint64N(n))
				q := Request{Op: Get, Key: k[:], Value: buf, Tag: uint64(i)}
				if i%2 == 0 {
					q.Op = Put
				}
				if sent[i] == 0 && d.s.Submit(&q) {
					sent[i] = d.now
				}
			}
			for c := range ranges {
				if with == 1 && !busy[c] {
					busy[c] = d.s.Submit(&ranges[c])
				}
			}
			d.turn()
			d.step()
		}
		slices.Sort(took)
		p50[with], p999[with] = took[len(took)/2], took[len(took)*999/1000]
		t.Logf("%d copies: p50 %d µs, p99.9 %d µs, at most %d µs; %.0f objects/s copied", with*copies,
			p50[with]/1000, p999[with]/1000, took[len(took)-1]/1000, float64(copied)/float64(d.now-begin)*1e9)
	}
	if copied < 1000 || p50[1] > 3*p50[0] || p999[1] > 3*p999[0] {
		t.Errorf("with copies p50 is %d and p99.9 %d ns, without %d and %d; %d objects are copied", p50[1], p999[1],
			p50[0], p999[0], copied)
	}
}
