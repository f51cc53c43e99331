package vfio

// bounces are buffers for data that is in memory which the device does not see. They are made when they are needed
// first.
type bounces struct {
	alloc func(n int) ([]byte, uint64, error)
	all   []bounce
	free  []int16
}

type bounce struct {
	memory []byte
	at     uint64
}

// maxBounces is how many a queue has at most.
const maxBounces = 8

// take returns the number of a buffer; -1: all are in use.
//
// Errors: there is none, and no memory for one.
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
