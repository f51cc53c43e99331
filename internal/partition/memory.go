package partition

import (
	"fmt"

	"golang.org/x/sys/unix"

	"jbofd/internal/bufpool"
	"jbofd/internal/kvstore/lookup"
)

const (
	pageBytes = 4096
	// minObjectBytes bounds the SegTbl: the table never needs more segments than there are
	// objects of the least length in the partition, divided by KeysPerSegment.
	minObjectBytes = 32
	keysPerSegment = 13
)

// memory is what a store has outside of the Go heap: an arena of the buffer pool for I/O, and its SegTbl, which no
// device touches.
type memory struct {
	*bufpool.Arena
	segTbl []byte
	// touched is how much of segTbl the entries of the table have taken since the rest was returned to the kernel.
	touched int64
}

// newMemory opens an arena in the pool of a drive. The name appears in the pool's statistics.
func newMemory(pool *bufpool.Pool, name string) *memory { return &memory{Arena: pool.Arena(name)} }

// segTblBytes returns an upper bound of the length of a partition's SegTbl, rounded up to whole pages.
func segTblBytes(partitionBytes int64, keys int) int64 {
	if keys <= 0 {
		keys = keysPerSegment
	}
	n := lookup.TableBytes(partitionBytes/minObjectBytes/int64(keys)) + 1<<16
	return roundUpPage(n)
}

// reserveSegTbl reserves n bytes of address space for the SegTbl. The kernel allocates its pages as the table grows.
func (m *memory) reserveSegTbl(n int64) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|
		unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("address space of %d bytes for the SegTbl: %w", n, err)
	}
	m.segTbl = b
	return b, nil
}

// returnBytes is the least that returnSegTbl returns: a call for less would cost more than it is worth.
const returnBytes = 1 << 20

// returnSegTbl returns the memory of the SegTbl to the kernel of which the entries, which take so many bytes, make no
// use any more. What is returned is zero.
func (m *memory) returnSegTbl(used int64) {
	if m.touched = max(m.touched, used); m.touched-used < returnBytes {
		return
	}
	from, to := roundUpPage(used), min(roundUpPage(m.touched), int64(len(m.segTbl)))
	m.touched = used
	if from < to {
		_ = unix.Madvise(m.segTbl[from:to], unix.MADV_DONTNEED) // otherwise the memory stays where it is
	}
}

func roundUpPage(n int64) int64 { return (n + pageBytes - 1) &^ (pageBytes - 1) }

// abandon is used instead of free if the device may still be using the memory. The memory is never returned, because a
// late DMA transfer could otherwise overwrite data of another user.
func (m *memory) abandon() { m.Abandon() }

// free returns the memory to the pool and to the kernel. No I/O that uses it may be in flight.
func (m *memory) free() {
	m.unmap()
	m.Free()
}

// unmap returns the memory of the SegTbl.
func (m *memory) unmap() {
	if m.segTbl != nil {
		_ = unix.Munmap(m.segTbl) // cannot fail: reserveSegTbl has mapped exactly this range
		m.segTbl = nil
	}
}
