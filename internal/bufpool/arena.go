package bufpool

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"jbofd/internal/invariants"
)

// An Arena is I/O memory that one owner keeps for a long time: the buffers of a key-value store, for example. Arenas
// lie beside the data buffers, in address space of their own:
//
//	┌──────────┬──────────┬──────────┬─ ─ ─ ─ ─ ─ ─ ─ ─ ─┬──────────┐
//	│ arena A  │ arena A  │ arena B  │   not yet taken    │          │   regions of ArenaRegionBytes
//	└──────────┴──────────┴──────────┴─ ─ ─ ─ ─ ─ ─ ─ ─ ─┴──────────┘
//
// A store cannot work with fewer buffers than it has, so that arenas do not count against Config.TotalBytes and take no
// part in its fairness: what bounds them is the number and the configuration of the stores. They are accounted for all
// the same (AppendAccounts, Stats.ArenaBytes), and their regions are registered with devices as those of data buffers
// are (RegionOf).
//
// A region that an arena has given back keeps its pages, because a device may still have them registered: a later arena
// gets the region with the same pages, and clears what it hands out.
type Arena struct {
	space *arenaSpace
	name  string

	// Below here: guarded by space.mu.
	bytes int64  // in whole regions
	spans []span // of regions that belong to the arena
	rest  []byte // what is left of the last one
	dirty bool   // rest is of regions that an arena had before
	freed bool   // Free was called
}

// span is n regions from first on.
type span struct{ first, n int }

const (
	// ArenaRegionBytes is the unit in which arenas take memory and in which devices register it. A device that
	// registers a region pins all of its pages, touched or not. A store touches a third of its buffers, as most of them
	// are as long as the longest value, so that regions of 2 MiB would treble its memory.
	ArenaRegionBytes = 256 << 10
	// DefaultArenaBytes is the address space for arenas, which costs nothing until it is used: some 170 stores with the
	// default limits.
	DefaultArenaBytes = 4 << 30

	arenaPage = 4096
)

// ErrNoMemory is wrapped by Arena.Alloc when there is no memory.
var ErrNoMemory = errors.New("no memory for buffers")

// arenaSpace is the address space of all arenas of a pool.
type arenaSpace struct {
	memory []byte
	base   uintptr
	// first is the index of the first region, which follows those of the data buffers.
	first int
	// taken: the region has been made accessible, which it stays until the pool is closed.
	taken []atomic.Bool

	// mu guards what follows and the arenas.
	mu     sync.Mutex
	inUse  []bool // by region
	arenas []*Arena
	bytes  int64 // of all arenas, abandoned ones included
	// abandoned: a device may be using memory of an arena that is no more.
	abandoned bool
	// accessible counts the regions that are taken.
	accessible int
}

// reserve makes the address space.
func (s *arenaSpace) reserve(n int64, firstRegion int) error {
	regions := int(n / ArenaRegionBytes)
	if regions == 0 {
		return nil
	}
	memory, err := unix.Mmap(-1, 0, regions*ArenaRegionBytes, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|
		unix.MAP_NORESERVE)
	if err != nil {
		return fmt.Errorf("bufpool: reserve %d bytes of address space for arenas: %w", n, err)
	}
	s.memory, s.base, s.first = memory, addrOf(memory), firstRegion
	s.taken, s.inUse = make([]atomic.Bool, regions), make([]bool, regions)
	return nil
}

// region returns the memory of the region with that index of the pool.
func (s *arenaSpace) region(index int) ([]byte, bool) {
	i := index - s.first
	if i < 0 || i >= len(s.taken) || !s.taken[i].Load() {
		return nil, false
	}
	return s.memory[i*ArenaRegionBytes : (i+1)*ArenaRegionBytes : (i+1)*ArenaRegionBytes], true
}

// regionOf is Pool.RegionOf for memory of arenas.
//
// hot: 0 allocs
func (s *arenaSpace) regionOf(b []byte) (index int, base []byte, ok bool) {
	off := addrOf(b) - s.base // wraps far beyond the length if b lies below
	if off >= uintptr(len(s.memory)) || off%ArenaRegionBytes+uintptr(len(b)) > ArenaRegionBytes {
		return 0, nil, false
	}
	index = s.first + int(off/ArenaRegionBytes)
	base, ok = s.region(index)
	return index, base, ok
}

// Arena opens an arena, which is an account of that name in the statistics.
func (p *Pool) Arena(name string) *Arena {
	s := &p.arenas
	a := &Arena{space: s, name: name}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.arenas = append(s.arenas, a)
	return a
}

// Alloc returns n zeroed bytes that begin at a page. They belong to the caller until Free. It may be called from any
// goroutine.
//
// Errors: ErrNoMemory, with the kernel's error if that is the reason. The arena is as it was before.
func (a *Arena) Alloc(n int) ([]byte, error) {
	invariants.Check(n > 0, "bufpool: an arena was asked for no bytes")
	s := a.space
	size := (n + arenaPage - 1) &^ (arenaPage - 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	invariants.Check(!a.freed, "bufpool: memory of an arena that was freed")
	// A buffer lies within one region, or begins one: a device can use the registration of a region only for I/Os that
	// lie in it.
	rest := a.rest
	if left := len(rest) % ArenaRegionBytes; size > left {
		rest = rest[left:]
	}
	if size > len(rest) {
		more, dirty, err := s.take(a, (size+ArenaRegionBytes-1)/ArenaRegionBytes)
		if err != nil {
			return nil, fmt.Errorf("%w: %d bytes for %s, which has %d: %w", ErrNoMemory, n, a.name, a.bytes, err)
		}
		rest, a.dirty = more, dirty
	}
	b := rest[:n:n]
	if a.dirty {
		clear(b)
	}
	a.rest = rest[size:]
	return b, nil
}

// errArenaSpace is the reason when the address space is used up.
var errArenaSpace = errors.New("the address space for arenas is used up")

// take returns n adjacent regions, and whether they have been used before.
func (s *arenaSpace) take(a *Arena, n int) (memory []byte, dirty bool, err error) {
	run := 0
	for i := range s.inUse {
		if run++; s.inUse[i] {
			run = 0
		}
		if run < n {
			continue
		}
		first := i + 1 - n
		if dirty, err = s.open(first, n); err != nil {
			return nil, false, err
		}
		for k := first; k <= i; k++ {
			s.inUse[k] = true
		}
		a.spans = append(a.spans, span{first, n})
		a.bytes += int64(n) * ArenaRegionBytes
		s.bytes += int64(n) * ArenaRegionBytes
		return s.memory[first*ArenaRegionBytes : (first+n)*ArenaRegionBytes], dirty, nil
	}
	return nil, false, fmt.Errorf("%w: %d of %d bytes", errArenaSpace, s.bytes, len(s.memory))
}

// open makes regions accessible, and reports whether one of them already was.
func (s *arenaSpace) open(first, n int) (dirty bool, err error) {
	for i := first; i < first+n; i++ {
		if s.taken[i].Load() {
			dirty = true
			continue
		}
		memory := s.memory[i*ArenaRegionBytes : (i+1)*ArenaRegionBytes]
		if err := unix.Mprotect(memory, unix.PROT_READ|unix.PROT_WRITE); err != nil {
			return false, fmt.Errorf("mprotect of %d bytes: %w", len(memory), err)
		}
		s.taken[i].Store(true)
		s.accessible++
	}
	return dirty, nil
}

// Bytes is the memory that the arena has taken.
func (a *Arena) Bytes() int64 {
	a.space.mu.Lock()
	defer a.space.mu.Unlock()
	return a.bytes
}

// Free gives everything back; no device may be using it. Idempotent.
func (a *Arena) Free() {
	s := a.space
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.freed {
		return
	}
	a.freed = true
	for _, p := range a.spans {
		for i := p.first; i < p.first+p.n; i++ {
			if invariants.Enabled {
				poison(s.memory[i*ArenaRegionBytes : (i+1)*ArenaRegionBytes])
			}
			s.inUse[i] = false
		}
	}
	s.bytes -= a.bytes
	a.bytes, a.spans, a.rest = 0, nil, nil
	s.arenas = slices.DeleteFunc(s.arenas, func(b *Arena) bool { return b == a })
}

// Abandon leaves the memory to the end of the process, because a device may still be using it: nobody gets it again,
// and the pool does not unmap the arenas when it is closed. It no longer counts as a leak. Idempotent, as Free is.
func (a *Arena) Abandon() {
	s := a.space
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.freed {
		return
	}
	a.freed, s.abandoned = true, true
	a.rest = nil
	s.arenas = slices.DeleteFunc(s.arenas, func(b *Arena) bool { return b == a })
}

// appendAccounts appends the figures of each arena that has memory.
func (s *arenaSpace) appendAccounts(dst []AccountStats) []AccountStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.arenas {
		if a.bytes > 0 {
			dst = append(dst, AccountStats{Name: a.name, InUseBytes: a.bytes, PeakBytes: a.bytes})
		}
	}
	return dst
}

// stats adds the figures of all arenas.
func (s *arenaSpace) stats(to *Stats) {
	s.mu.Lock()
	defer s.mu.Unlock()
	to.ArenaBytes = s.bytes
	to.TakenBytes += int64(s.accessible) * ArenaRegionBytes
}

// close unmaps the address space.
func (s *arenaSpace) close() error {
	for i := range s.taken {
		s.taken[i].Store(false)
	}
	if s.memory == nil || s.abandoned {
		return nil
	}
	return unix.Munmap(s.memory)
}
