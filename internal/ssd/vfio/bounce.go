package vfio

// bounces are the bounce buffers of a queue, of bounceBytes each, for data in memory that is not mapped for the device,
// or not aligned to 4 bytes. A buffer is allocated when all others are in use, up to maxBounces. The queue's mu guards
// them.
type bounces struct {
	alloc func(n int) ([]byte, uint64, error)
	all   []bounce
	free  []int16
}

type bounce struct {
	memory []byte
	at     uint64 // IOVA
}

// maxBounces is how many bounce buffers a queue has at most.
const maxBounces = 8

// take returns the number of a free buffer; -1: all are in use.
//
// Errors: those of alloc, if the queue has no buffer yet.
func (b *bounces) take() (int16, error) {
	if n := len(b.free); n > 0 {
		i := b.free[n-1]
		b.free = b.free[:n-1]
		return i, nil
	}
	if len(b.all) == maxBounces {
		return -1, nil
	}
	memory, at, err := b.alloc(bounceBytes)
	switch {
	case err == nil:
		b.all = append(b.all, bounce{memory, at})
		return int16(len(b.all) - 1), nil
	case len(b.all) > 0:
		return -1, nil
	}
	return -1, err
}

func (b *bounces) put(i int16)            { b.free = append(b.free, i) }
func (b *bounces) memory(i int16) []byte  { return b.all[i].memory }
func (b *bounces) address(i int16) uint64 { return b.all[i].at }
