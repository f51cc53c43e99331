package replica

import (
	"math/bits"

	"jbofd/internal/crrs"
	"jbofd/internal/slab"
)

// Tables are the memory for what is under way at the Replicas of one partition, beside that of values: see crrs.Tables.
type Tables struct {
	crrs    *crrs.Tables
	clients *slab.Pool[client]
	values  *slab.Pool[value]
	ops     *slab.Pool[storeOp]
	asked   *slab.Pool[asked]
	// spare is memory for values that are needed although there is none in the partition's, by spareClass of its
	// length. It is never given up, so that none is longer than its value needs.
	spare [spareClasses][][]byte
	// works are those that no Replica needs. low is the smallest number of them since the last Trim.
	works []*work
	low   int
}

// NewTables returns Tables for at most that many writes and reads of clients, as crrs.NewTables does.
func NewTables(writes, reads int) *Tables {
	return &Tables{crrs: crrs.NewTables(writes, reads), clients: slab.NewPool[client](16),
		values: slab.NewPool[value](16), ops: slab.NewPool[storeOp](8), asked: slab.NewPool[asked](8)}
}

// Dirty is that of crrs.Tables.
func (t *Tables) Dirty() int { return t.crrs.Dirty() }

// Trim gives up the memory that was not needed since the last Trim, and reports whether there may be more to give up.
// The driver calls it now and then, until there is no more.
func (t *Tables) Trim() (more bool) {
	n := min(t.low, max(len(t.works)-1, 0))
	left := copy(t.works, t.works[n:]) // those at the beginning were not used
	clear(t.works[left:])
	t.works, t.low = t.works[:left], left
	more = left > 1
	for _, m := range [5]bool{t.crrs.Trim(), t.clients.Trim(), t.values.Trim(), t.ops.Trim(), t.asked.Trim()} {
		more = more || m
	}
	return more
}

// Spare memory has 4 KiB, or twice as much again and again, or is as long as the longest value.
const (
	spareShift   = 12
	spareClasses = 12
)

// spareClass is the class of spare memory for n bytes.
func spareClass(n int) int { return min(bits.Len(uint(n-1)>>spareShift), spareClasses-1) }

// takeSpare returns memory that is not in use for n bytes, or nil.
func (t *Tables) takeSpare(n int) (buf []byte) {
	for c := spareClass(n); c < spareClasses; c++ {
		if last := len(t.spare[c]) - 1; last >= 0 {
			buf, t.spare[c] = t.spare[c][last], t.spare[c][:last]
			return buf
		}
	}
	return nil
}

// putSpare takes back what takeSpare has returned, or new memory.
func (t *Tables) putSpare(buf []byte) {
	c := spareClass(len(buf))
	t.spare[c] = append(t.spare[c], buf)
}

// work is what a Turn is to do.
type work struct {
	acts    crrs.Actions
	traffic crrs.Traffic
	replies []Reply
	// ended are clients that have a Reply: their places are free when the Turn has made its Requests, which need their
	// conditions.
	ended []uint32
	// lost are the tags of Commands that found no buffer.
	lost []uint32
}

// takeWork returns one with nothing to do. It allocates when more Replicas than before have something to do.
//
// hot: 0 allocs
func (t *Tables) takeWork() *work {
	n := len(t.works) - 1
	if n < 0 {
		return &work{}
	}
	w := t.works[n]
	t.works, t.low = t.works[:n], min(t.low, n)
	return w
}

// putWork takes back one that is done.
func (t *Tables) putWork(w *work) { t.works = append(t.works, w) }

// begin lets the Replica have something to do in the next Turn.
//
// hot: 0 allocs
func (r *Replica) begin() {
	if r.work == nil {
		r.work = r.tables.takeWork()
	}
}
