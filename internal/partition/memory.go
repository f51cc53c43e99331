package partition

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// memory is what a store has outside of the Go heap: buffers for the device, cut from mappings that grow, and
// the segment table, which is address space until the data need it. It is given back as a whole.
type memory struct {
	// bytes is what was taken for buffers.
	bytes    int64
	mappings [][]byte
	rest     []byte
}

const (
	pageBytes    = 4096
	mappingBytes = 1 << 20
	// segmentEntryBytes and leastObjectBytes bound the segment table: no more segments are ever of use than there are
	// objects of the least length in the partition, by KeysPerSegment.
	segmentEntryBytes = 5
	leastObjectBytes  = 32
	keysPerSegment    = 13
)

// segTblBytes is how long the segment table of a partition can become.
func segTblBytes(partitionBytes int64, keys int) int64 {
	if keys <= 0 {
		keys = keysPerSegment
	}
	n := partitionBytes/leastObjectBytes/int64(keys)*segmentEntryBytes + 1<<16
	return (n + pageBytes - 1) &^ (pageBytes - 1)
}

// reserve returns address space that becomes memory where it is touched.
func (m *memory) reserve(n int64) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", n, err)
	}
	m.mappings = append(m.mappings, b)
	return b, nil
}

// alloc returns n bytes that begin at a page. Without memory there is no going on.
func (m *memory) alloc(n int) []byte {
	size := (n + pageBytes - 1) &^ (pageBytes - 1)
	if size > len(m.rest) {
		b, err := m.reserve(int64(max(size, mappingBytes)))
		if err != nil {
			panic("partition: " + err.Error())
		}
		m.bytes += int64(len(b))
		m.rest = b
	}
	b := m.rest[:n:n]
	m.rest = m.rest[size:]
	return b
}

// free gives everything back.
func (m *memory) free() {
	for _, b := range m.mappings {
		_ = unix.Munmap(b) // it is ours and mapped
	}
	m.mappings, m.rest = nil, nil
}
