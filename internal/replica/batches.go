package replica

import (
	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
)

// Batches are the buffers for batches of passes, which the replicas of one partition share.
//
// They also set the pace of the passes. A buffer has a batch from when the batch is asked for until it is stored, which
// takes longer if the drives of both members are busier. Then the buffer rests in proportion to that, except for passes
// that need not spare the clients. So a pass uses a fixed share of the time whatever a drive can do: it slows down as
// the drives get busier, and is fast on idle drives.
type Batches struct {
	// bytes is the length of each. outs are for batches that are copied out, fetched for those that are fetched.
	bytes         int
	outs, fetched buffers
	// takenNS is when each of fetched was taken, busyNS for how long it was used then, until endedNS.
	takenNS, busyNS, endedNS []int64
}

// Share is the part of the time for which the buffers of a pass are used, in percent, 1 to 100.
type Share uint8

// restMostNS is how long a buffer rests at most, so that a pass ends in bounded time also if each batch takes long.
const restMostNS = 2e9

// NewBatches returns outs buffers for batches that are copied out, and fetched for those that are fetched. bytes is how
// long a batch may be, at least the longest value and nvme.KVEntryOverhead. It is the same at all nodes.
//
// Errors: those of alloc.
func NewBatches(outs, fetched, bytes int, alloc func(n int) ([]byte, error)) (*Batches, error) {
	invariants.Check(bytes >= nvme.KVEntryOverhead, "replica: batches without room for an object")
	b := &Batches{bytes: bytes}
	var err error
	if b.outs, err = newBuffers(outs, bytes, alloc); err == nil {
		b.fetched, err = newBuffers(fetched, bytes, alloc)
	}
	b.takenNS, b.busyNS, b.endedNS = make([]int64, fetched), make([]int64, fetched), make([]int64, fetched)
	return b, err
}

// fetch takes a buffer for a batch of a pass of that share. If there is none, it returns noBuffer, and when to try
// again.
func (b *Batches) fetch(now int64, share Share) (i int32, againNS int64) {
	againNS = now + retryNS
	for n, i := range b.fetched.free {
		rested := b.endedNS[i] + min(b.busyNS[i]*int64(100-share)/int64(share), restMostNS)
		if rested <= now {
			b.fetched.free = append(b.fetched.free[:n], b.fetched.free[n+1:]...)
			b.takenNS[i] = now
			return i, 0
		}
		if n == 0 || rested < againNS {
			againNS = rested
		}
	}
	return noBuffer, againNS
}

// putFetched gives a buffer back that fetch has taken.
func (b *Batches) putFetched(i int32, now int64) {
	b.busyNS[i], b.endedNS[i] = now-b.takenNS[i], now
	b.fetched.put(i)
}

// buffers are memory for batches.
type buffers struct {
	all  [][]byte
	free []int32
}

func newBuffers(n, bytes int, alloc func(int) ([]byte, error)) (b buffers, err error) {
	for i := range n {
		buf, err := alloc(bytes)
		if err != nil {
			return b, err
		}
		b.all, b.free = append(b.all, buf), append(b.free, int32(i))
	}
	return b, nil
}

// take takes one, or returns noBuffer.
func (b *buffers) take() int32 {
	n := len(b.free) - 1
	if n < 0 {
		return noBuffer
	}
	i := b.free[n]
	b.free = b.free[:n]
	return i
}

func (b *buffers) put(i int32) { b.free = append(b.free, i) }
