// Package bufpool holds the daemon's data buffers: page-aligned memory outside
// the Go heap, bounded in total, shared fairly by accounts (tenants).
//
//	 reserved address range, Config.TotalBytes
//	┌──────────┬──────────┬─ ─ ─ ─ ─ ─ ─ ─ ─ ─┬──────────┬──────────┐
//	│ region 0 │ region 1 │   not yet taken    │ region n │ region N │
//	└──────────┴──────────┴─ ─ ─ ─ ─ ─ ─ ─ ─ ─┴──────────┴──────────┘
//	 small buffers, upward ──>             <── large buffers, downward
//
// A region is a buddy allocator over power-of-two blocks from MinBytes to
// MaxBytes. Requests up to 64 KiB come from the lowest region that can serve
// them, larger ones from the highest, so that small buffers do not fragment the
// memory that large ones need. A region becomes accessible memory when the
// first buffer is cut from it and stays so until Close; devices register
// regions, not buffers, by RegionOf.
//
// # Fairness
//
// A Get succeeds if afterwards the account holds no more than what is left
// free. One greedy account thus leaves half of the pool free, N of them leave
// 1/(N+1) to a newcomer, without any configured quota (the dynamic threshold
// of Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory
// packet switches", 1998). An account that holds nothing is always entitled to
// its first buffer. Who was refused may wait: GetOrWait hands freed memory
// over in FIFO order within an account and round robin over accounts. When
// memory is free but in pieces too small for an entitled waiter, one region is
// closed to everybody else until the waiter's block has come together.
//
// Who must not wait, because the memory that he would wait for cannot come back
// before he has gone on, takes one buffer beyond the bound: Extra.
package bufpool

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"jbofd/internal/invariants"
)

// Defaults of Config.
const (
	DefaultRegionBytes = 8 << 20
	DefaultMinBytes    = 4 << 10
	DefaultMaxBytes    = 1 << 20
)

// largeBytes divides the requests served from low regions (up to it) from those
// served from high ones.
const largeBytes = 64 << 10

// poisonByte fills released buffers in test builds.
const poisonByte = 0xDB

// maxOrders bounds MaxBytes/MinBytes to 2^(maxOrders-1).
const maxOrders = 16

// Config sizes a Pool.
type Config struct {
	// TotalBytes is the bound on all buffers together: at least four MaxBytes; it
	// is rounded down to whole regions.
	TotalBytes int64
	// RegionBytes is the unit in which memory is taken and registered with devices;
	// a multiple of MaxBytes. 0: 8 MiB, or TotalBytes if that is less.
	RegionBytes int
	// MinBytes and MaxBytes are the smallest and the largest buffer, powers of two;
	// MinBytes at least 4096. 0: 4 KiB and 1 MiB.
	MinBytes, MaxBytes int
}

// ErrConfig is wrapped by New for a Config out of its bounds.
var ErrConfig = errors.New("bufpool: invalid configuration")

// Pool is a bounded set of buffers. All its methods may be called from any
// goroutine.
type Pool struct {
	cfg    Config
	orders int    // number of block sizes, MinBytes<<0 ... MinBytes<<(orders-1)
	arena  []byte // the whole reserved range; only taken regions may be touched
	base   uintptr
	taken  []atomic.Bool // by region; false -> true once

	mu      sync.Mutex
	closed  bool
	regions []region
	// avail[o] has bit r set if region r has a free block of order o.
	avail [maxOrders][]uint64
	// totalBytes is the capacity. Invariant: inUse + free blocks = totalBytes.
	totalBytes, inUse, peak int64
	serial                  uint32
	accounts                map[string]*Account

	// waitRing is a circular list of the accounts that have waiters; it points at the
	// one whose turn is next.
	waitRing *Account
	// gatherFor is the entitled waiter for whose sake region gatherRegion is closed to
	// others, or nil.
	gatherFor    *Waiter
	gatherRegion int

	gets, failures, waits uint64

	extra Account // of all buffers beyond the bound
}

// region is one buddy allocator.
type region struct {
	// free[o] is a bitmap of the free blocks of order o.
	free [maxOrders][]uint64
	// count[o] is how many bits of free[o] are set.
	count [maxOrders]int32
	// serial holds, at the first minimal block of an allocated buffer, that
	// buffer's serial number, and 0 elsewhere: what tells a double Put.
	serial    []uint32
	freeBytes int64
}

// Buf is a buffer out of a Pool. It is a value: copies name the same memory, of
// which exactly one goes back by Put.
type Buf struct {
	// B is the memory, len(B) the size asked for, cap(B) the block. Its content is
	// whatever the last user left.
	B []byte

	acct   *Account
	serial uint32
	region uint32
	block  uint32 // index of its first minimal block in the region
	order  uint8
}

// orderExtra marks a buffer beyond the bound.
const orderExtra = 0xFF

// IsZero reports whether b is no buffer at all (the zero Buf, or one given back).
func (b *Buf) IsZero() bool { return b.acct == nil }

// IsExtra reports whether b came from Extra.
func (b *Buf) IsExtra() bool { return b.acct != nil && b.order == orderExtra }

// Account is one tenant's share of a Pool.
type Account struct {
	pool *Pool
	name string

	// Below here: guarded by pool.mu.
	refs                  int
	inUse, peak           int64
	gets, failures, waits uint64
	first, last           *Waiter  // FIFO of waiters
	ringNext, ringPrev    *Account // in pool.waitRing while first != nil
}

// Name is what the account was opened with.
func (a *Account) Name() string { return a.name }

// Waiter is a place in the queue for a buffer. The caller owns the memory,
// usually as a part of a larger struct, and must not copy or reuse it between
// GetOrWait and the call of Wake or a successful Cancel.
type Waiter struct {
	// Size is the buffer's length in bytes.
	Size int
	// Buf is set before Wake is called and then belongs to the waiter.
	Buf Buf
	// Wake tells that Buf is there. It is called without locks by the goroutine
	// that released the memory; it must not block.
	Wake func()

	acct       *Account
	next, prev *Waiter // prev is of no meaning for the first
	waiting    bool
}

// New reserves address space for a pool; memory is used only as buffers are.
//
// Errors: ErrConfig, or the kernel's refusal to reserve.
func New(cfg Config) (*Pool, error) {
	if cfg.MinBytes == 0 {
		cfg.MinBytes = DefaultMinBytes
	}
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = DefaultMaxBytes
	}
	if cfg.RegionBytes == 0 {
		cfg.RegionBytes = DefaultRegionBytes
		if cfg.TotalBytes < DefaultRegionBytes {
			cfg.RegionBytes = int(cfg.TotalBytes) / max(cfg.MaxBytes, 1) * cfg.MaxBytes
		}
	}
	powerOfTwo := func(n int) bool { return n > 0 && n&(n-1) == 0 }
	switch {
	case !powerOfTwo(cfg.MinBytes) || cfg.MinBytes < 4096:
		return nil, fmt.Errorf("%w: MinBytes is %d, want a power of two >= 4096", ErrConfig, cfg.MinBytes)
	case !powerOfTwo(cfg.MaxBytes) || cfg.MaxBytes < cfg.MinBytes || cfg.MaxBytes > cfg.MinBytes<<(maxOrders-1):
		return nil, fmt.Errorf("%w: MaxBytes is %d, want a power of two in [MinBytes, %d]", ErrConfig, cfg.MaxBytes, cfg.MinBytes<<(maxOrders-1))
	case cfg.TotalBytes < 4*int64(cfg.MaxBytes):
		return nil, fmt.Errorf("%w: TotalBytes is %d, want at least four times MaxBytes (%d)", ErrConfig, cfg.TotalBytes, 4*cfg.MaxBytes)
	case cfg.RegionBytes <= 0 || cfg.RegionBytes%cfg.MaxBytes != 0 || int64(cfg.RegionBytes) > cfg.TotalBytes:
		return nil, fmt.Errorf("%w: RegionBytes is %d, want a multiple of MaxBytes (%d) up to TotalBytes (%d)", ErrConfig, cfg.RegionBytes, cfg.MaxBytes, cfg.TotalBytes)
	}
	n := int(cfg.TotalBytes / int64(cfg.RegionBytes))
	cfg.TotalBytes = int64(n) * int64(cfg.RegionBytes)

	arena, err := unix.Mmap(-1, 0, int(cfg.TotalBytes), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("bufpool: reserve %d bytes of address space: %w", cfg.TotalBytes, err)
	}
	p := &Pool{
		cfg:        cfg,
		orders:     bits.TrailingZeros(uint(cfg.MaxBytes/cfg.MinBytes)) + 1,
		arena:      arena,
		base:       addrOf(arena),
		taken:      make([]atomic.Bool, n),
		regions:    make([]region, n),
		totalBytes: cfg.TotalBytes,
		accounts:   make(map[string]*Account),
	}
	p.extra = Account{pool: p, name: "beyond the bound"}
	words := func(bits int) int { return (bits + 63) / 64 }
	top := p.orders - 1
	for o := range p.orders {
		p.avail[o] = make([]uint64, words(n))
	}
	blocks := cfg.RegionBytes / cfg.MinBytes
	for i := range p.regions {
		r := &p.regions[i]
		for o := range p.orders {
			r.free[o] = make([]uint64, words(blocks>>o))
		}
		r.serial = make([]uint32, blocks)
		r.freeBytes = int64(cfg.RegionBytes)
		for b := range blocks >> top {
			p.setFree(i, top, b)
		}
	}
	return p, nil
}

// Config returns the pool's sizes with all defaults filled in.
func (p *Pool) Config() Config { return p.cfg }

// Account opens the account of that name, a new one or another reference to it.
func (p *Pool) Account(name string) *Account {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.accounts[name]
	if a == nil {
		a = &Account{pool: p, name: name}
		p.accounts[name] = a
	}
	a.refs++
	return a
}

// Close gives up one reference. An account without references disappears from
// the statistics when its last buffer has come back.
func (a *Account) Close() {
	p := a.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	invariants.Check(a.refs > 0, "bufpool: account closed more often than opened")
	a.refs--
	p.dropIfUnused(a)
}

func (p *Pool) dropIfUnused(a *Account) {
	if a.refs == 0 && a.inUse == 0 && a.first == nil && p.accounts[a.name] == a {
		delete(p.accounts, a.name)
	}
}

// orderOf returns the order of the smallest block that holds size bytes.
func (p *Pool) orderOf(size int) int {
	invariants.Check(size > 0 && size <= p.cfg.MaxBytes, "bufpool: size outside (0, MaxBytes]")
	return bits.Len(uint((size - 1) / p.cfg.MinBytes))
}

// Get takes a buffer of size bytes, 0 < size <= MaxBytes, on the account's share.
// It fails when that would exceed the share, when no block is free, or when
// others of the account wait already.
//
// Cost: 0 allocs, one short mutex.
func (p *Pool) Get(a *Account, size int) (Buf, bool) { // hot: 0 allocs
	o := p.orderOf(size)
	p.mu.Lock()
	var b Buf
	ok := a.first == nil && p.take(a, o, size, &b, nil)
	if !ok {
		p.failures++
		a.failures++
	}
	p.mu.Unlock()
	return b, ok
}

// GetOrWait takes a buffer like Get, or else queues w; then w.Buf is set and
// w.Wake called later, unless Cancel removes w before. It reports whether the
// buffer is in w.Buf now (Wake is not called then).
//
// Cost: 0 allocs, one short mutex.
func (p *Pool) GetOrWait(a *Account, w *Waiter) bool { // hot: 0 allocs
	o := p.orderOf(w.Size)
	p.mu.Lock()
	defer p.mu.Unlock()
	invariants.Check(!w.waiting, "bufpool: waiter queued twice")
	if a.first == nil && p.take(a, o, w.Size, &w.Buf, nil) {
		return true
	}
	p.failures++
	a.failures++
	p.waits++
	a.waits++
	w.acct, w.next, w.waiting, w.Buf = a, nil, true, Buf{}
	if a.first == nil {
		a.first = w
		p.ringAdd(a)
	} else {
		a.last.next, w.prev = w, a.last
	}
	a.last = w
	p.gatherIfEntitled(a)
	return false
}

// Cancel removes w from its queue and reports whether it was there. False means
// that the buffer has been handed over: Wake has been or is being called, and
// the buffer must be used or Put after it.
//
// Cost: 0 allocs, one short mutex, and a look at each account that waits.
func (p *Pool) Cancel(w *Waiter) bool {
	p.mu.Lock()
	if !w.waiting {
		p.mu.Unlock()
		return false
	}
	a := w.acct
	if a.first == w {
		a.first = w.next
	} else {
		w.prev.next = w.next
	}
	if a.last == w {
		a.last = w.prev
	} else {
		w.next.prev = w.prev
	}
	if a.first == nil {
		a.last = nil
		p.ringRemove(a)
	}
	w.next, w.prev, w.waiting = nil, nil, false
	if p.gatherFor == w {
		p.gatherFor = nil
	}
	p.dropIfUnused(a)
	granted := p.grant()
	p.mu.Unlock()
	wake(granted)
	return true
}

// Extra takes a buffer beyond the pool's bound, on nobody's share; it goes back by
// Put. The caller bounds how many there are. False: the system has no memory.
//
// Cost: a system call here and one in Put.
func (p *Pool) Extra(size int) (Buf, bool) {
	p.orderOf(size) // checks it
	m, err := unix.Mmap(-1, 0, (size+DefaultMinBytes-1)&^(DefaultMinBytes-1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return Buf{}, false
	}
	p.mu.Lock()
	p.extra.inUse += int64(len(m))
	p.mu.Unlock()
	return Buf{B: m[:size], acct: &p.extra, order: orderExtra}, true
}

// putExtra unmaps what Extra gave.
func (p *Pool) putExtra(b Buf) {
	m := b.B[:cap(b.B)]
	err := unix.Munmap(m)
	invariants.Check(err == nil, "bufpool: buffer put twice")
	p.mu.Lock()
	p.extra.inUse -= int64(len(m))
	p.mu.Unlock()
}

// Put gives a buffer back and hands its memory to those who wait. A buffer given
// back twice, or to another pool, panics. The zero Buf is ignored.
//
// Cost: 0 allocs, one short mutex, and a look at each account that waits.
func (p *Pool) Put(b Buf) { // hot: 0 allocs
	a := b.acct
	if a == nil {
		return
	}
	invariants.Check(a.pool == p, "bufpool: buffer put into another pool")
	if b.order == orderExtra {
		p.putExtra(b)
		return
	}
	if invariants.Enabled {
		p.checkOwned(&b)
		poison(b.B[:cap(b.B)])
	}
	size := int64(p.cfg.MinBytes) << b.order

	p.mu.Lock()
	r := &p.regions[b.region]
	if r.serial[b.block] != b.serial {
		p.mu.Unlock()
		panic("invariant broken: bufpool: buffer put twice")
	}
	r.serial[b.block] = 0
	r.freeBytes += size
	p.release(int(b.region), int(b.order), int(b.block)>>b.order)
	p.inUse -= size
	a.inUse -= size
	p.dropIfUnused(a)
	var granted *Waiter
	if p.waitRing != nil {
		granted = p.grant()
	}
	p.mu.Unlock()
	wake(granted)
}

// checkOwned panics if b is not an allocated buffer, before it is poisoned.
func (p *Pool) checkOwned(b *Buf) {
	p.mu.Lock()
	owned := p.regions[b.region].serial[b.block] == b.serial
	p.mu.Unlock()
	invariants.Check(owned, "bufpool: buffer put twice")
}

func poison(b []byte) {
	for i := range b {
		b[i] = poisonByte
	}
}

// wake calls the Wake of each waiter in the list.
func wake(w *Waiter) {
	for w != nil {
		next := w.next
		w.next = nil // before Wake: the owner may queue it again at once
		w.Wake()
		w = next
	}
}

// entitled reports whether the account's share allows a block of that many
// bytes more.
func (p *Pool) entitled(a *Account, size int64) bool {
	return a.inUse == 0 || a.inUse+size <= p.totalBytes-p.inUse-size
}

// take cuts a block of order o for a and fills *b. The waiter is the one it is
// for, or nil: only gatherFor may take from gatherRegion.
func (p *Pool) take(a *Account, o, size int, b *Buf, w *Waiter) bool {
	block := int64(p.cfg.MinBytes) << o
	if p.closed || !p.entitled(a, block) {
		return false
	}
	skip := -1
	if p.gatherFor != nil && p.gatherFor != w {
		skip = p.gatherRegion
	}
	ri, from := p.find(o, block > largeBytes, skip)
	if ri < 0 || !p.ensureTaken(ri) {
		return false
	}
	r := &p.regions[ri]
	i := firstBit(r.free[from])
	p.clearFree(ri, from, i)
	for from > o { // split, keep the lower half
		from--
		i <<= 1
		p.setFree(ri, from, i+1)
	}
	p.serial++
	if p.serial == 0 {
		p.serial = 1
	}
	first := i << o
	r.serial[first] = p.serial
	r.freeBytes -= block
	p.inUse += block
	a.inUse += block
	p.peak = max(p.peak, p.inUse)
	a.peak = max(a.peak, a.inUse)
	p.gets++
	a.gets++
	off := int64(ri)*int64(p.cfg.RegionBytes) + int64(first)*int64(p.cfg.MinBytes)
	*b = Buf{
		B:      p.arena[off : off+int64(size) : off+block],
		acct:   a,
		serial: p.serial,
		region: uint32(ri),
		block:  uint32(first),
		order:  uint8(o),
	}
	return true
}

// find returns the region, lowest or highest first, that has a free block of
// order o or more, and the smallest such order there; region -1 if none has.
func (p *Pool) find(o int, highest bool, skip int) (ri, order int) {
	words := len(p.avail[0])
	for k := range words {
		w := k
		if highest {
			w = words - 1 - k
		}
		var any uint64
		for q := o; q < p.orders; q++ {
			any |= p.avail[q][w]
		}
		if skip >= 0 && skip/64 == w {
			any &^= 1 << (skip % 64)
		}
		if any == 0 {
			continue
		}
		bit := bits.TrailingZeros64(any)
		if highest {
			bit = 63 - bits.LeadingZeros64(any)
		}
		q := o
		for p.avail[q][w]&(1<<bit) == 0 {
			q++
		}
		return w*64 + bit, q
	}
	return -1, 0
}

// ensureTaken makes the region's memory accessible.
func (p *Pool) ensureTaken(ri int) bool {
	if p.taken[ri].Load() {
		return true
	}
	n := p.cfg.RegionBytes
	if err := unix.Mprotect(p.arena[ri*n:(ri+1)*n], unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return false // out of commit: as good as an empty pool; counted as a failure
	}
	p.taken[ri].Store(true)
	return true
}

// release marks a block free and merges it with its free buddies.
func (p *Pool) release(ri, o, i int) {
	r := &p.regions[ri]
	for o < p.orders-1 {
		buddy := i ^ 1
		if r.free[o][buddy/64]&(1<<(buddy%64)) == 0 {
			break
		}
		p.clearFree(ri, o, buddy)
		i >>= 1
		o++
	}
	p.setFree(ri, o, i)
}

func (p *Pool) setFree(ri, o, i int) {
	r := &p.regions[ri]
	r.free[o][i/64] |= 1 << (i % 64)
	r.count[o]++
	p.avail[o][ri/64] |= 1 << (ri % 64)
}

func (p *Pool) clearFree(ri, o, i int) {
	r := &p.regions[ri]
	r.free[o][i/64] &^= 1 << (i % 64)
	r.count[o]--
	if r.count[o] == 0 {
		p.avail[o][ri/64] &^= 1 << (ri % 64)
	}
}

func firstBit(set []uint64) int {
	for w, v := range set {
		if v != 0 {
			return w*64 + bits.TrailingZeros64(v)
		}
	}
	panic("invariant broken: bufpool: free count without a free block")
}

// grant serves waiters, one per account in turn, until a whole round serves
// nobody, and returns them as a list to wake without the lock.
func (p *Pool) grant() (list *Waiter) {
	var tail *Waiter
	for {
		served := false
		n := 0
		for a := p.waitRing; a != nil; a = a.ringNext {
			n++
			if a.ringNext == p.waitRing {
				break
			}
		}
		for ; n > 0 && p.waitRing != nil; n-- {
			a := p.waitRing
			p.waitRing = a.ringNext
			w := a.first
			if !p.take(a, p.orderOf(w.Size), w.Size, &w.Buf, w) {
				p.gatherIfEntitled(a)
				continue
			}
			served = true
			if p.gatherFor == w {
				p.gatherFor = nil
			}
			a.first = w.next
			if a.first == nil {
				a.last = nil
				p.ringRemove(a)
			}
			w.next, w.prev, w.waiting = nil, nil, false
			if tail == nil {
				list = w
			} else {
				tail.next = w
			}
			tail = w
		}
		if !served {
			return list
		}
	}
}

// gatherIfEntitled closes the emptiest region to others if a's first waiter has
// the right to a block but none is whole.
func (p *Pool) gatherIfEntitled(a *Account) {
	w := a.first
	if p.closed || p.gatherFor != nil || !p.entitled(a, int64(p.cfg.MinBytes)<<p.orderOf(w.Size)) {
		return
	}
	best := 0
	for i := range p.regions {
		if p.regions[i].freeBytes > p.regions[best].freeBytes {
			best = i
		}
	}
	p.gatherFor, p.gatherRegion = w, best
}

func (p *Pool) ringAdd(a *Account) {
	if p.waitRing == nil {
		a.ringNext, a.ringPrev = a, a
		p.waitRing = a
		return
	}
	next := p.waitRing // before the one whose turn is next: last in the round
	prev := next.ringPrev
	a.ringNext, a.ringPrev = next, prev
	prev.ringNext, next.ringPrev = a, a
}

func (p *Pool) ringRemove(a *Account) {
	if a.ringNext == a {
		p.waitRing = nil
	} else {
		a.ringPrev.ringNext, a.ringNext.ringPrev = a.ringNext, a.ringPrev
		if p.waitRing == a {
			p.waitRing = a.ringNext
		}
	}
	a.ringNext, a.ringPrev = nil, nil
}

// Regions is how many regions the pool may come to have; indices below it are
// valid for Region.
func (p *Pool) Regions() int { return len(p.taken) }

// Region returns region i's memory, or false while it has not been taken into
// use. Without locks.
func (p *Pool) Region(i int) ([]byte, bool) {
	if !p.taken[i].Load() {
		return nil, false
	}
	n := p.cfg.RegionBytes
	return p.arena[i*n : (i+1)*n : (i+1)*n], true
}

// RegionOf returns which region b lies in, wholly, and that region's memory; ok
// is false for memory that is not the pool's.
//
// Cost: 0 allocs, no lock: an address comparison.
func (p *Pool) RegionOf(b []byte) (index int, base []byte, ok bool) { // hot: 0 allocs
	if len(b) == 0 {
		return 0, nil, false
	}
	off := addrOf(b) - p.base // wraps far beyond len(arena) if b lies below
	if off >= uintptr(len(p.arena)) {
		return 0, nil, false
	}
	n := uintptr(p.cfg.RegionBytes)
	index = int(off / n)
	if off%n+uintptr(len(b)) > n || !p.taken[index].Load() {
		return 0, nil, false
	}
	return index, p.arena[index*int(n) : (index+1)*int(n)], true
}

// OffsetIn returns where b begins in base, both memory of one region.
func OffsetIn(base, b []byte) int { return int(addrOf(b) - addrOf(base)) }

// AccountStats are one account's figures.
type AccountStats struct {
	Name                  string
	InUseBytes, PeakBytes int64
	// Gets succeeded; Failures were refused, of which Waits queued.
	Gets, Failures, Waits uint64
	Waiting               int
}

// Stats are a pool's figures at one moment.
type Stats struct {
	TotalBytes, InUseBytes, PeakBytes int64
	// TakenBytes is what has ever been made accessible: the bound on the memory used.
	TakenBytes            int64
	Gets, Failures, Waits uint64
}

// Stats returns the pool's figures.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Stats{TotalBytes: p.totalBytes, InUseBytes: p.inUse, PeakBytes: p.peak, Gets: p.gets, Failures: p.failures, Waits: p.waits}
	for i := range p.taken {
		if p.taken[i].Load() {
			s.TakenBytes += int64(p.cfg.RegionBytes)
		}
	}
	return s
}

// AppendAccounts appends every account's figures to dst, in no order.
func (p *Pool) AppendAccounts(dst []AccountStats) []AccountStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.accounts {
		s := AccountStats{Name: a.name, InUseBytes: a.inUse, PeakBytes: a.peak, Gets: a.gets, Failures: a.failures, Waits: a.waits}
		for w := a.first; w != nil; w = w.next {
			s.Waiting++
		}
		dst = append(dst, s)
	}
	if n := p.extra.inUse; n > 0 {
		dst = append(dst, AccountStats{Name: p.extra.name, InUseBytes: n})
	}
	return dst
}

// Leaks returns an error that names the accounts with buffers outstanding or
// waiters queued, or nil.
func (p *Pool) Leaks() error {
	var err error
	for _, s := range p.AppendAccounts(nil) {
		if s.InUseBytes != 0 || s.Waiting != 0 {
			err = errors.Join(err, fmt.Errorf("bufpool: account %q holds %d bytes and has %d waiters", s.Name, s.InUseBytes, s.Waiting))
		}
	}
	return err
}

// TB is the part of testing.TB that CloseTest needs.
type TB interface {
	Helper()
	Errorf(format string, args ...any)
}

// CloseTest closes the pool at the end of a test and fails the test if buffers
// are outstanding.
func (p *Pool) CloseTest(t TB) {
	t.Helper()
	if err := p.Leaks(); err != nil {
		t.Errorf("%v", err)
		return // the memory may still be in use: better leaked than unmapped
	}
	if err := p.Close(); err != nil {
		t.Errorf("bufpool: close: %v", err)
	}
}

// Close unmaps the memory. Idempotent.
//
// Errors: buffers are outstanding; then nothing was unmapped.
func (p *Pool) Close() error {
	if err := p.Leaks(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	for i := range p.taken {
		p.taken[i].Store(false)
	}
	return unix.Munmap(p.arena)
}
