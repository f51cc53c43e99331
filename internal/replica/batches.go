package replica

import (
	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
)

// Batches are the buffers for batches of passes, which the replicas of one partition share.
type Batches struct {
	// bytes is the length of each. outs are for batches that are copied out, fetched for those that are fetched.
	bytes         int
	outs, fetched buffers
}

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
	return b, err
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
