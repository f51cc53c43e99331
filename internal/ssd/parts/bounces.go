package parts

// Bounces are the bounce buffers of a queue, of BounceBytes each, for data that the device does not reach where they
// are. A buffer is allocated when all others are in use, up to maxBounces.
type Bounces struct {
	alloc func(n int) (memory []byte, at uint64, err error)
	all   []bounce
	free  []int16
}

type bounce struct {
	memory []byte
	at     uint64
}

const (
	// BounceBytes is the length of a bounce buffer.
	BounceBytes = 128 << 10
	// maxBounces is how many a queue has at most.
	maxBounces = 8
)

// NewBounces returns bounce buffers. alloc returns memory that the device reaches, with its address for the device.
func NewBounces(alloc func(n int) (memory []byte, at uint64, err error)) *Bounces {
	return &Bounces{alloc: alloc}
}

// take returns the number of a free buffer; -1: all are in use.
//
// Errors: those of alloc, if there is no buffer yet.
func (b *Bounces) take() (int16, error) {
	if n := len(b.free); n > 0 {
		i := b.free[n-1]
		b.free = b.free[:n-1]
		return i, nil
	}
	if len(b.all) == maxBounces {
		return -1, nil
	}
	memory, at, err := b.alloc(BounceBytes)
	switch {
	case err == nil:
		b.all = append(b.all, bounce{memory, at})
		return int16(len(b.all) - 1), nil
	case len(b.all) > 0:
		return -1, nil
	}
	return -1, err
}

func (b *Bounces) put(i int16) { b.free = append(b.free, i) }

// Release calls free for the memory of all buffers, none of which is in use.
func (b *Bounces) Release(free func(memory []byte)) {
	for _, one := range b.all {
		free(one.memory)
	}
	b.all, b.free = nil, nil
}
