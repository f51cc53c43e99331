package ycsb

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// ErrState is wrapped by errors about a state file that cannot be used.
var ErrState = errors.New("state file")

// The state file is a header of 4096 bytes, little endian, and then for each record, from 0 on, its
// versions: 4 bytes issued, 4 bytes floor, in the byte order of the machine, which is little endian
// wherever jbofd is tested.
//
//	 0 ..  7  magic "JBOFYCSB"
//	 8 .. 11  format version, 1
//	12 .. 15  length of the header
//	16 .. 19  life
//	20        1: insertorder is ordered
//	24 .. 27  CRC32C of bytes 0 to 23
const (
	stateMagic   = "JBOFYCSB"
	stateVersion = 1
	stateHeader  = 4096
)

// entry holds the versions of a record. Invariant: floor <= issued.
type entry struct {
	// issued is the highest version that was ever sent to the store; 0: the record was never written.
	issued atomic.Uint32
	// floor is the lowest version that a read may find from now on; 0: the record may be missing, or have a version of
	// an earlier life.
	floor atomic.Uint32
}

const entryBytes = 8

// shards is the number of locks, so that two threads seldom wait for each other.
const shards = 256

// versions records which versions of each record a read may return. With concurrent writers there may be several: any
// of the writes that overlap in time may be the last one, and a failed write may or may not have taken effect. A
// version is ruled out only by the acknowledgement of another version that was sent after the acknowledgement of the
// first.
//
// The table may lie in a file, whose pages the kernel keeps when this process or the store dies. All methods may be
// called from any goroutine.
type versions struct {
	life uint32
	// assumed: records below this exist, although their versions are not known.
	assumed uint64

	entries []entry
	memory  []byte
	file    *os.File // nil: none

	// limit is the end of the records that exist without a gap. Only settle moves it.
	limit atomic.Uint64

	shards [shards]struct {
		mu      sync.Mutex
		flights []flight // guarded by mu
		_       [32]byte // a cache line of its own
	}
}

// flight is a record with writes outstanding. They are counted in two groups, so that the older group ends even if new
// writers never stop coming.
type flight struct {
	record uint64
	// settled: this version and all before it are acknowledged.
	settled uint32
	// cut is the last version of the older group. old and young are the numbers of outstanding writes in the two
	// groups.
	cut        uint32
	old, young uint32
}

// newVersions makes a table for records below n, in the file at path if that is not empty. life is for a new table. An
// existing one keeps its own.
//
// Errors: ErrState; those of the file.
func newVersions(path string, n uint64, ordered bool, life uint32) (*versions, error) {
	v := &versions{life: life}
	if path == "" {
		m, err := unix.Mmap(-1, 0, int(max(n, 1)*entryBytes), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
		if err != nil {
			return nil, fmt.Errorf("memory for the versions of %d records: %w", n, err)
		}
		v.memory, v.entries = m, entriesOf(m)
		return v, nil
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if err := v.open(f, n, ordered); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return v, nil
}

// open maps f, which it creates or extends as needed.
func (v *versions) open(f *os.File, n uint64, ordered bool) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w %s: %s", ErrState, f.Name(), fmt.Sprintf(format, args...))
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return bad("in use by another process: %v", err)
	}
	st, err := f.Stat()
	if err != nil {
		return err
	}
	le := binary.LittleEndian
	h := make([]byte, stateHeader)
	if st.Size() == 0 {
		copy(h, stateMagic)
		le.PutUint32(h[8:], stateVersion)
		le.PutUint32(h[12:], stateHeader)
		le.PutUint32(h[16:], v.life)
		if ordered {
			h[20] = 1
		}
		le.PutUint32(h[24:], crc32.Checksum(h[:24], crc32.MakeTable(crc32.Castagnoli)))
		if _, err := f.WriteAt(h, 0); err != nil {
			return err
		}
	} else if _, err := f.ReadAt(h, 0); err != nil {
		return bad("its header: %v", err)
	}
	switch {
	case string(h[:8]) != stateMagic:
		return bad("not one: begins with % x", h[:8])
	case le.Uint32(h[8:]) != stateVersion:
		return bad("is of version %d, this program knows %d", le.Uint32(h[8:]), stateVersion)
	case le.Uint32(h[12:]) != stateHeader ||
		crc32.Checksum(h[:24], crc32.MakeTable(crc32.Castagnoli)) != le.Uint32(h[24:]):
		return bad("its header is damaged")
	case (h[20] == 1) != ordered:
		return bad("is of records with another insertorder")
	}
	v.life = le.Uint32(h[16:])
	size := max(int64(stateHeader+n*entryBytes), st.Size())
	if err := f.Truncate(size); err != nil {
		return err
	}
	m, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return bad("%v", err)
	}
	v.file, v.memory, v.entries = f, m, entriesOf(m[stateHeader:])
	return nil
}

// close unmaps the table. A file keeps it.
func (v *versions) close() error {
	if v.memory == nil {
		return nil
	}
	err := unix.Munmap(v.memory)
	v.memory, v.entries = nil, nil
	if v.file != nil {
		err = errors.Join(err, v.file.Close())
	}
	return err
}

// begin sets the first record, and assumes those below assumed to be written if nothing else is known about them. It
// returns the end of the records that exist.
func (v *versions) begin(start, assumed uint64) uint64 {
	v.assumed = max(start, assumed)
	v.limit.Store(v.assumed)
	v.advance()
	return v.limit.Load()
}

// advance moves the limit over the records that were acknowledged.
func (v *versions) advance() { // hot: 0 allocs
	for {
		n := v.limit.Load()
		if n >= uint64(len(v.entries)) || v.entries[n].floor.Load() == 0 {
			return
		}
		v.limit.CompareAndSwap(n, n+1)
	}
}

// write is one version that is being written.
type write struct {
	stamp
	// low: when this write is acknowledged, no version below is left.
	low uint32
}

// issue begins a write of the record.
func (v *versions) issue(record uint64) write { // hot: 0 allocs
	sh := &v.shards[record%shards]
	sh.mu.Lock()
	e := &v.entries[record]
	before := e.issued.Load()
	w := write{stamp: stamp{record: record, life: v.life, version: before + 1}}
	f := find(sh.flights, record)
	if f == nil {
		sh.flights = append(sh.flights, flight{record: record, settled: before, cut: w.version, old: 1})
		w.low = w.version
	} else {
		f.young++
		w.low = f.settled + 1
	}
	e.issued.Store(w.version)
	sh.mu.Unlock()
	return w
}

// outcome is how a write ended.
type outcome uint8

const (
	// done: the write was acknowledged.
	done outcome = iota
	// refused: the write has changed nothing and never will.
	refused
	// unknown: the write may have been done, or may still be done later.
	unknown
)

// settle ends a write. One whose outcome is unknown stays outstanding for good.
func (v *versions) settle(w write, how outcome) { // hot: 0 allocs
	if how == unknown {
		return
	}
	sh := &v.shards[w.record%shards]
	sh.mu.Lock()
	if e := &v.entries[w.record]; how == done && e.floor.Load() < w.low {
		e.floor.Store(w.low)
	}
	f := find(sh.flights, w.record)
	if w.version <= f.cut {
		f.old--
	} else {
		f.young--
	}
	if f.old == 0 {
		f.settled, f.cut = f.cut, v.entries[w.record].issued.Load()
		f.old, f.young = f.young, 0
		if f.old == 0 {
			last := len(sh.flights) - 1
			*f = sh.flights[last]
			sh.flights = sh.flights[:last]
		}
	}
	sh.mu.Unlock()
	if w.record == v.limit.Load() {
		v.advance()
	}
}

func find(flights []flight, record uint64) *flight { // hot: 0 allocs
	for i := range flights {
		if flights[i].record == record {
			return &flights[i]
		}
	}
	return nil
}

// floor returns what a read must remember when it begins.
func (v *versions) floor(record uint64) uint32 { return v.entries[record].floor.Load() }

// missing judges a read that began at floor and has found no value.
func (v *versions) missing(record uint64, floor uint32) error {
	switch {
	case floor > 0:
		return fmt.Errorf("missing: version %d or a later one was acknowledged", floor)
	case record < v.assumed:
		return errors.New("missing: it should have been loaded")
	}
	return nil
}

// check judges a read that began at floor and has found s.
func (v *versions) check(s stamp, floor uint32) error { // hot: 0 allocs while it holds
	issued := v.entries[s.record].issued.Load()
	switch {
	case s.life != v.life && floor == 0:
		return nil
	case s.life != v.life:
		return fmt.Errorf("a lost write: version %d of an earlier run, but version %d or a later one was acknowledged",
			s.version, floor)
	case s.version < floor:
		return fmt.Errorf("a lost write: version %d, but version %d or a later one was acknowledged", s.version, floor)
	case s.version > issued:
		return fmt.Errorf("version %d, which was never written: the last is %d", s.version, issued)
	}
	return nil
}

// found notes that a read has found version s while no write was outstanding, so that no later read may find an older
// one.
func (v *versions) found(s stamp) {
	if e := &v.entries[s.record]; s.life == v.life && s.version > e.floor.Load() {
		e.floor.Store(s.version)
	}
}
