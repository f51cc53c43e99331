package serve

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/rdma/wr"
	"jbofd/internal/tenant"
)

// memory is the buffer pool as a device sees it: each region is registered once, when the first
// of its buffers is used.
type memory struct {
	domain  verbs.Domain
	pool    *bufpool.Pool
	log     *slog.Logger
	regions []atomic.Pointer[region]

	mu      sync.Mutex // held while a region is registered
	failing bool       // the last attempt has failed, and the log says so
}

// region is a registered region of the pool.
type region struct {
	mr   verbs.MR
	addr uint64
	lkey uint32
}

func newMemory(d verbs.Domain, p *bufpool.Pool, log *slog.Logger) *memory {
	return &memory{domain: d, pool: p, log: log, regions: make([]atomic.Pointer[region], p.Regions())}
}

// locate returns the address and key of a buffer; not ok if it is not the pool's, or cannot
// be registered.
//
// hot: 0 allocs, but for the first buffer of a region
func (m *memory) locate(b []byte) (addr uint64, lkey uint32, ok bool) {
	i, base, ok := m.pool.RegionOf(b)
	if !ok {
		return 0, 0, false
	}
	r := m.regions[i].Load()
	if r == nil {
		if r = m.register(i, base); r == nil {
			return 0, 0, false
		}
	}
	return r.addr + uint64(bufpool.OffsetIn(base, b)), r.lkey, true
}

// register makes region i known to the device; nil if that fails.
func (m *memory) register(i int, base []byte) *region {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r := m.regions[i].Load(); r != nil {
		return r
	}
	mr, err := m.domain.Register(base, verbs.LocalWrite)
	if err != nil {
		if !m.failing { // a line for each command would be too many
			m.log.Error("buffers cannot be registered with the RDMA device; commands that need them fail", "bytes",
				len(base), "error", err)
		}
		m.failing = true
		return nil
	}
	m.failing = false
	r := &region{mr: mr, addr: mr.Addr(), lkey: mr.LKey()}
	m.regions[i].Store(r)
	return r
}

// close ends the registrations.
func (m *memory) close() error {
	var errs []error
	for i := range m.regions {
		if r := m.regions[i].Load(); r != nil {
			errs = append(errs, r.mr.Close())
		}
	}
	return errors.Join(errs...)
}

// chunkBytes is the unit in which the memory below is taken and registered, unless one piece is
// larger.
const chunkBytes = 1 << 20

// chunk is registered memory of the transport's own.
type chunk struct {
	b    []byte
	mr   verbs.MR
	addr uint64
	lkey uint32
}

// newChunk takes and registers memory.
func newChunk(d verbs.Domain, n int) (chunk, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return chunk{}, fmt.Errorf("%d bytes of memory: %w", n, err)
	}
	mr, err := d.Register(b, verbs.LocalWrite)
	if err != nil {
		return chunk{}, errors.Join(fmt.Errorf("registering %d bytes of memory: %w", n, err), unix.Munmap(b))
	}
	return chunk{b: b, mr: mr, addr: mr.Addr(), lkey: mr.LKey()}, nil
}

func (c *chunk) close() error { return errors.Join(c.mr.Close(), unix.Munmap(c.b)) }

// slab is registered memory in pieces of one size.
type slab struct {
	domain verbs.Domain
	size   int

	mu     sync.Mutex
	chunks []chunk
	free   []piece
}

// piece is one of a slab's.
type piece struct {
	b    []byte
	addr uint64
	lkey uint32
}

func newSlab(d verbs.Domain, size int) *slab {
	return &slab{domain: d, size: (size + 63) &^ 63}
}

// get takes a piece.
func (s *slab) get() (piece, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.free) == 0 {
		c, err := newChunk(s.domain, max(chunkBytes, s.size))
		if err != nil {
			return piece{}, err
		}
		s.chunks = append(s.chunks, c)
		for at := 0; at+s.size <= len(c.b); at += s.size {
			s.free = append(s.free, piece{b: c.b[at : at+s.size : at+s.size], addr: c.addr + uint64(at), lkey: c.lkey})
		}
	}
	p := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	return p, nil
}

// put gives a piece back.
func (s *slab) put(p piece) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, p)
}

func (s *slab) close() error {
	var errs []error
	for i := range s.chunks {
		errs = append(errs, s.chunks[i].close())
	}
	return errors.Join(errs...)
}

// receives is a device's shared receive queue. It grows with the connections, up to its bound;
// what was posted once is posted again and again.
type receives struct {
	domain verbs.Domain
	srq    verbs.SRQ
	bound  int
	stride int

	// chunks hold perChunk receives each; read without the lock by whoever has a number, for its
	// chunk was there before.
	perChunk int
	chunks   []atomic.Pointer[chunk]

	mu     sync.Mutex
	wanted int // by the connections' queues together
	n      int // posted or taken
	// held counts receives of commands that wait, by tenant; heldAll is their sum.
	held    map[tenant.ID]int
	heldAll int
}

// minHeld is how many receives a tenant can hold whatever others do.
const minHeld = 8

// hold keeps a receive for a command of t that must wait, and reports whether it may. As with buffers, a tenant may
// hold no more than what is left for all others: so none can take the whole queue.
func (r *receives) hold(t tenant.ID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held[t] >= minHeld && r.held[t] >= r.bound-r.heldAll {
		return false
	}
	r.held[t]++
	r.heldAll++
	return true
}

// release ends what hold began.
func (r *receives) release(t tenant.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.heldAll--
	if r.held[t]--; r.held[t] == 0 {
		delete(r.held, t)
	}
}

// heldCount is how many receives are held.
func (r *receives) heldCount() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.heldAll
}

// recvKind marks the work request identifiers of receives; see rdma.Conn.Completed for the others.
const recvKind = 3 << 32

func newReceives(d verbs.Domain, bound, inCapsuleBytes int) (*receives, error) {
	r := &receives{domain: d, bound: bound, held: map[tenant.ID]int{}, stride: (64 + inCapsuleBytes + 63) &^ 63}
	r.perChunk = max(chunkBytes/r.stride, 1)
	r.chunks = make([]atomic.Pointer[chunk], (bound+r.perChunk-1)/r.perChunk)
	var err error
	if r.srq, err = d.CreateSRQ(bound); err != nil {
		return nil, fmt.Errorf("shared receive queue of %d entries: %w", bound, err)
	}
	return r, nil
}

// want makes room for a queue of so many entries; a negative number takes the room of a closed queue back.
//
// Errors: there is no memory for even one receive.
func (r *receives) want(entries int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wanted += entries
	for r.n < min(r.wanted, r.bound) {
		if err := r.grow(); err != nil {
			if r.n > 0 {
				return nil // fewer for all: senders are told to try again
			}
			r.wanted -= entries
			return err
		}
	}
	return nil
}

// grow posts one more chunk of receives, or what is left of one that could not be posted whole.
func (r *receives) grow() error {
	at := r.n / r.perChunk
	if r.chunks[at].Load() == nil {
		c, err := newChunk(r.domain, r.perChunk*r.stride)
		if err != nil {
			return err
		}
		r.chunks[at].Store(&c)
	}
	batch := make([]wr.Recv, 0, r.perChunk)
	for i := r.n; i < min((at+1)*r.perChunk, r.bound); i++ {
		batch = append(batch, r.request(i))
	}
	n, err := r.postLocked(batch)
	r.n += n
	return err
}

// request is the work request of receive i.
//
// hot: 0 allocs
func (r *receives) request(i int) wr.Recv {
	c := r.chunks[i/r.perChunk].Load()
	return wr.Recv{ID: recvKind | uint64(i), Addr: c.addr + uint64(i%r.perChunk*r.stride), Len: uint32(r.stride),
		LKey: c.lkey}
}

// message returns the n bytes that came into receive i.
//
// hot: 0 allocs
func (r *receives) message(i, n int) []byte {
	at := i % r.perChunk * r.stride
	return r.chunks[i/r.perChunk].Load().b[at : at+n]
}

// post posts receives again.
func (r *receives) post(batch []wr.Recv) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, err := r.postLocked(batch)
	return err
}

func (r *receives) postLocked(batch []wr.Recv) (int, error) {
	n, err := r.srq.PostRecv(batch)
	if err == nil && n < len(batch) {
		err = verbs.ErrQueueFull
	}
	return n, err
}

// count is how many receives there are.
func (r *receives) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.n
}

func (r *receives) close() error { return r.srq.Close() }

// free ends the registrations, after the queues that use the memory were closed.
func (r *receives) free() error {
	var errs []error
	for i := range r.chunks {
		if c := r.chunks[i].Load(); c != nil {
			errs = append(errs, c.close())
		}
	}
	return errors.Join(errs...)
}
