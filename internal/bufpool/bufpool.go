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
// its first buffer, and the last eighth of the pool, in blocks of MaxBytes, is
// a reserve for these first buffers: accounts that hold memory cannot take it,
// however many they are. Of the accounts of one source (AccountFrom), only so
// many use the reserve as hold less than MaxBytes together.
//
// GetOrWait queues an account that cannot have a buffer now. Freed memory goes to the account that
// holds least, among equals to the one that has waited longest, and within an
// account in FIFO order. When memory is free but in pieces too small for an
// entitled waiter, one region is closed to other accounts until the waiter's
// block has come together.
//
// Extra is for a caller that cannot wait, because the memory would come back
// only after it has gone on: a buffer beyond the bound.
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

// reserveShare is the part of the pool that is the reserve: one in reserveShare.
const reserveShare = 8

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
	// a multiple of MaxBytes. 0: 8 MiB or 2 MaxBytes, whichever is more, or TotalBytes if that is less.
	RegionBytes int
	// MinBytes and MaxBytes are the smallest and the largest buffer, powers of two;
	// MinBytes at least 4096. 0: 4 KiB and 1 MiB.
	MinBytes, MaxBytes int
	// ArenaBytes is the address space for arenas, which do not count against TotalBytes. 0: DefaultArenaBytes.
	ArenaBytes int64
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
	// avail[r/64][o] has bit r%64 set if region r has a free block of order o.
	avail [][maxOrders]uint64
	// totalBytes is the capacity. Invariant: inUse + free blocks = totalBytes.
	totalBytes, inUse, peak int64
	serial                  uint32
	accounts                map[string]*Account
	sources                 map[string]*source // those with names
	// whole counts free blocks of MaxBytes; keep is how many of them are the reserve.
	whole, keep int

	// waiting are the sources with accounts that wait for a block of each order.
	waiting [maxOrders]heap[*source]
	// waitingAccounts counts their accounts.
	waitingAccounts int
	accountRules    rules[*Account]
	sourceRules     [maxOrders]rules[*source]
	lastTurn        uint64
	// gatherFor is the entitled waiter for whose sake region gatherRegion is closed to
	// others, or nil.
	gatherFor    *Waiter
	gatherRegion int

	gets, failures, waits uint64

	extra Account // of all buffers beyond the bound

	arenas arenaSpace
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
		cfg.RegionBytes = max(DefaultRegionBytes, 2*cfg.MaxBytes)
		if cfg.TotalBytes < int64(cfg.RegionBytes) {
			cfg.RegionBytes = int(cfg.TotalBytes) / max(cfg.MaxBytes, 1) * cfg.MaxBytes
		}
	}
	powerOfTwo := func(n int) bool { return n > 0 && n&(n-1) == 0 }
	switch {
	case !powerOfTwo(cfg.MinBytes) || cfg.MinBytes < 4096:
		return nil, fmt.Errorf("%w: MinBytes is %d, want a power of two >= 4096", ErrConfig, cfg.MinBytes)
	case !powerOfTwo(cfg.MaxBytes) || cfg.MaxBytes < cfg.MinBytes || cfg.MaxBytes > cfg.MinBytes<<(maxOrders-1):
		return nil, fmt.Errorf("%w: MaxBytes is %d, want a power of two in [MinBytes, %d]", ErrConfig, cfg.MaxBytes,
			cfg.MinBytes<<(maxOrders-1))
	case cfg.TotalBytes < 4*int64(cfg.MaxBytes):
		return nil, fmt.Errorf("%w: TotalBytes is %d, want at least four times MaxBytes (%d)", ErrConfig,
			cfg.TotalBytes, 4*cfg.MaxBytes)
	case cfg.RegionBytes <= 0 || cfg.RegionBytes%cfg.MaxBytes != 0 || int64(cfg.RegionBytes) > cfg.TotalBytes:
		return nil, fmt.Errorf("%w: RegionBytes is %d, want a multiple of MaxBytes (%d) up to TotalBytes (%d)",
			ErrConfig, cfg.RegionBytes, cfg.MaxBytes, cfg.TotalBytes)
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
		sources:    make(map[string]*source),
	}
	if cfg.ArenaBytes == 0 {
		cfg.ArenaBytes = DefaultArenaBytes
	}
	if err := p.arenas.reserve(cfg.ArenaBytes, n); err != nil {
		return nil, errors.Join(err, unix.Munmap(arena))
	}
	p.extra = Account{pool: p, name: "beyond the bound", order: -1}
	p.makeRules()
	perRegion := cfg.RegionBytes / cfg.MaxBytes
	p.keep = min(max(n*perRegion/reserveShare, 1), perRegion-1)
	words := func(bits int) int { return (bits + 63) / 64 }
	top := p.orders - 1
	p.avail = make([][maxOrders]uint64, words(n))
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
func (p *Pool) Get(a *Account, size int) (b Buf, ok bool) { // hot: 0 allocs
	o := p.orderOf(size)
	p.mu.Lock()
	ok = a.first == nil && p.take(a, o, size, &b, nil)
	if !ok {
		p.failures++
		a.failures++
	}
	p.mu.Unlock()
	return b, ok
}

// Extra takes a buffer beyond the pool's bound, on nobody's share; it goes back by
// Put. The caller bounds how many there are. False: the system has no memory.
//
// Cost: a system call here and one in Put.
func (p *Pool) Extra(size int) (Buf, bool) {
	p.orderOf(size) // checks it
	m, err := unix.Mmap(-1, 0, (size+DefaultMinBytes-1)&^(DefaultMinBytes-1), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
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
// Cost: 0 allocs, one short mutex; the logarithm of how many accounts wait.
func (p *Pool) Put(b Buf) { // hot: 0 allocs
	if !p.comesBack(&b) {
		return
	}
	p.mu.Lock()
	p.takeBack(&b)
	p.unlockAndGrant()
}

// putAtOnce is how many buffers PutAll gives back under one lock.
const putAtOnce = 32

// PutAll is Put for several buffers.
//
// Cost: 0 allocs, one mutex for 32 of them.
func (p *Pool) PutAll(bufs []Buf) { // hot: 0 allocs
	for len(bufs) > 0 {
		some := bufs[:min(len(bufs), putAtOnce)]
		bufs = bufs[len(some):]
		for i := range some {
			if !p.comesBack(&some[i]) {
				some[i] = Buf{}
			}
		}
		p.mu.Lock()
		for i := range some {
			if !some[i].IsZero() {
				p.takeBack(&some[i])
			}
		}
		p.unlockAndGrant()
	}
}

// comesBack reports whether takeBack is to follow for a buffer. It unmaps one beyond the bound.
func (p *Pool) comesBack(b *Buf) bool {
	if b.acct == nil {
		return false
	}
	invariants.Check(b.acct.pool == p, "bufpool: buffer put into another pool")
	if b.order == orderExtra {
		p.putExtra(*b)
		return false
	}
	if invariants.Enabled {
		p.checkOwned(b)
		poison(b.B[:cap(b.B)])
	}
	return true
}

// takeBack frees the memory of a buffer. mu is held.
func (p *Pool) takeBack(b *Buf) {
	a, size, r := b.acct, int64(p.cfg.MinBytes)<<b.order, &p.regions[b.region]
	if r.serial[b.block] != b.serial {
		p.mu.Unlock()
		panic("invariant broken: bufpool: buffer put twice")
	}
	r.serial[b.block] = 0
	r.freeBytes += size
	p.release(int(b.region), int(b.order), int(b.block)>>b.order)
	p.charge(a, -size)
	p.dropIfUnused(a)
}

// unlockAndGrant hands free memory to those who wait, after it has released mu.
func (p *Pool) unlockAndGrant() {
	var granted *Waiter
	if p.waitingAccounts > 0 {
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

// poison fills b. It copies, because the race detector records each store of a byte.
func poison(b []byte) {
	for n := copy(b, poisoned[:]); n > 0 && n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

var poisoned = [...]byte{poisonByte, poisonByte, poisonByte, poisonByte, poisonByte, poisonByte, poisonByte, poisonByte}

// withinShare reports whether the account's share allows a block of that many
// bytes more.
func (p *Pool) withinShare(a *Account, size int64) bool {
	return a.inUse == 0 || a.inUse+size <= p.totalBytes-p.inUse-size
}

// place returns the region from which to cut a block of order o for a, and the order of the free block there; region -1
// if there is no free block that a may have. gatherRegion is for gatherFor; accounts that may use the reserve may take
// its whole blocks.
func (p *Pool) place(a *Account, o int, w *Waiter) (ri, order int) {
	highest := p.cfg.MinBytes<<o > largeBytes
	skip := -1
	if p.gatherFor != nil && p.gatherFor != w {
		skip = p.gatherRegion
	}
	top := p.orders - 1
	if p.whole > p.keep {
		return p.find(o, top, highest, skip)
	}
	ri, order = p.find(o, top-1, highest, skip)
	if ri < 0 && p.mayUseReserve(a) {
		ri, order = p.find(top, top, highest, -1)
	}
	return ri, order
}

// take cuts a block of order o for a and fills *b. The waiter is the one it is
// for, or nil.
func (p *Pool) take(a *Account, o, size int, b *Buf, w *Waiter) bool {
	block := int64(p.cfg.MinBytes) << o
	if p.closed || !p.withinShare(a, block) {
		return false
	}
	ri, from := p.place(a, o, w)
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
	p.charge(a, block)
	p.peak = max(p.peak, p.inUse)
	a.peak = max(a.peak, a.inUse)
	p.gets++
	a.gets++
	off := int64(ri)*int64(p.cfg.RegionBytes) + int64(first)*int64(p.cfg.MinBytes)
	b.B, b.acct = p.arena[off:off+int64(size):off+block], a
	b.serial, b.region, b.block, b.order = p.serial, uint32(ri), uint32(first), uint8(o)
	return true
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
	return errors.Join(unix.Munmap(p.arena), p.arenas.close())
}
