package kvstore

import (
	"container/heap"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/pipeline"
)

// paced is a device in virtual time with a number of channels. Each channel serves one I/O at a time. Its service time
// depends on the kind of I/O and on its length.
type paced struct {
	s        *Store
	disk     []byte
	now      int64
	channels []int64 // when each becomes free
	due      dueIOs
	act      Actions
	reply    func(Reply)
}

type dueIO struct {
	atNS int64
	io   IO
}

type dueIOs []dueIO

func (d dueIOs) Len() int           { return len(d) }
func (d dueIOs) Less(i, j int) bool { return d[i].atNS < d[j].atNS }
func (d dueIOs) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *dueIOs) Push(x any)        { *d = append(*d, x.(dueIO)) }
func (d *dueIOs) Pop() any {
	x := (*d)[len(*d)-1]
	*d = (*d)[:len(*d)-1]
	return x
}

func (d *paced) turn() {
	d.s.Turn(d.now, &d.act)
	for _, p := range d.act.Replies {
		d.reply(p)
	}
	for _, q := range d.act.IOs {
		c := 0
		for i := range d.channels {
			if d.channels[i] < d.channels[c] {
				c = i
			}
		}
		cost := int64(80_000) + int64(len(q.Buf))/4
		if q.Op == pipeline.Write {
			cost = 20_000 + int64(len(q.Buf))/4
		}
		d.channels[c] = max(d.channels[c], d.now) + cost
		heap.Push(&d.due, dueIO{d.channels[c], q})
	}
	d.act.IOs, d.act.Replies = d.act.IOs[:0], d.act.Replies[:0]
}

// step advances to the next event.
func (d *paced) step() {
	if len(d.due) == 0 || d.act.WakeNS > 0 && d.act.WakeNS < d.due[0].atNS {
		d.now = max(d.now, d.act.WakeNS)
		d.turn()
		return
	}
	d.now = max(d.now, d.due[0].atNS)
	for len(d.due) > 0 && d.due[0].atNS <= d.now {
		q := heap.Pop(&d.due).(dueIO).io
		if q.Op == pipeline.Read {
			copy(q.Buf, d.disk[q.Offset:])
		} else {
			copy(d.disk[q.Offset:], q.Buf)
		}
		d.s.Complete(q.Tag, nil)
	}
	d.turn()
}

// TestPutLatencyIsSmooth: compaction keeps up in small steps, so that no Put waits for a whole chunk to be emptied.
func TestPutLatencyIsSmooth(t *testing.T) {
	PlainOnly(t)
	t.Parallel()
	const value = 1024
	cfg := Config{PartitionBytes: 128 << 20, BlockSize: 512, ChunkBytes: 256 << 10}
	fast := newInstant(t, cfg)
	fill := int64(80)
	n := int(cfg.PartitionBytes / 100 * fill / value)
	val := make([]byte, value)
	rng := rand.New(rand.NewPCG(FixedSeed(t), 3))
	fast.put(0, n, func(i int) uint64 { return uint64(i) }, val, 128)
	fast.put(0, n/2, func(int) uint64 { return rng.Uint64N(uint64(n)) }, val, 128)

	for _, depth := range []int{1, 16, 128} {
		d := &paced{s: fast.s, disk: fast.disk, now: fast.now, channels: make([]int64, 16)}
		sent := make([]int64, depth)
		var took []int64
		busy := 0
		d.reply = func(p Reply) {
			if p.Status != OK {
				t.Fatalf("status %d", p.Status)
			}
			took = append(took, d.now-sent[p.Tag])
			sent[p.Tag] = 0
			busy--
		}
		begin, puts := d.now, 3000+n/8
		for len(took) < puts {
			for i := range sent {
				var k [16]byte
				binary.LittleEndian.PutUint64(k[:], rng.Uint64N(uint64(n)))
				if sent[i] == 0 && d.s.Submit(&Request{Op: Put, Key: k[:], Value: val, Tag: uint64(i)}) {
					sent[i] = d.now
					busy++
				}
			}
			d.turn()
			d.step()
		}
		for busy > 0 || len(d.due) > 0 {
			d.step()
		}
		fast.now = d.now
		slices.Sort(took)
		p50, p999, worst := took[len(took)/2], took[len(took)*999/1000], took[len(took)-1]
		t.Logf("%d in flight: p50 %d µs, p99.9 %d µs (%.1f times), at most %d µs, %.0f PUT/s", depth, p50/1000,
			p999/1000, float64(p999)/float64(p50), worst/1000, float64(len(took))/float64(d.now-begin)*1e9)
		if p999 > 10*p50 {
			t.Errorf("%d in flight: p99.9 is %.1f times p50, want at most 10", depth, float64(p999)/float64(p50))
		}
	}
}
