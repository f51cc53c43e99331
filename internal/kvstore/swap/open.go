package swap

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// AreaConfig describes an Area.
type AreaConfig struct {
	// AreaBytes is the length of the area, a multiple of BlockSize. BlockSize is that of the device, 512 to 4096.
	AreaBytes int64
	BlockSize int
	// GroupBytes is the length at which a group of records is closed; 0: 64 KiB.
	GroupBytes int
	// MaxValueBytes is the longest value that the area takes; 0: MaxValueBytes.
	MaxValueBytes int
	// FUA asks for writes that survive a loss of power. It is for devices with a volatile cache.
	FUA bool
	// Alloc returns memory for I/O; nil: the heap's.
	Alloc space.Alloc

	tenant, flightTenant tenant.ID // of the first record of the open group and of that under way
}

// MaxValueBytes is the longest value that is swapped. Longer values cost the source bandwidth, which swapping does not
// save.
const MaxValueBytes = 64 << 10

// Errors of OpenArea, Attach, LoadManifest and NewSource.
var (
	// ErrConfig: a field of a configuration is out of bounds.
	ErrConfig = errors.New("swap: invalid configuration")
	// ErrArea: the area cannot be opened. It has not been written to.
	ErrArea = errors.New("swap: cannot open the area")
	// ErrAttached: the source has attached before and has records in the area, which must be found first: see
	// Area.Search.
	ErrAttached = errors.New("swap: the source has attached already")
	// ErrManifest: both copies of the manifest are damaged, or it names an area that is not there or has lost records.
	ErrManifest = errors.New("swap: cannot open the source")
)

// Read reads whole blocks for an opening.
type Read func(offset units.ExtentOffset, buf []byte) error

// Write writes for a formatting. It returns when what was written is durable.
type Write func(offset units.ExtentOffset, buf []byte) error

// FoundRecord is a record that an opening has found.
type FoundRecord struct {
	Key     [format.MaxKey]byte
	KeyLen  uint8
	Deleted bool
	// ValueLen, Place and At are those of the record.
	ValueLen uint32
	Place    format.LogOffset
	At       uint32
	// Version is that of the object; 0 in a record of version 1 of the format.
	Version uint64
}

type recordKey struct {
	key [format.MaxKey]byte
	len uint8
}

// inOrder returns records in the order of the log.
func inOrder(m map[recordKey]FoundRecord) []FoundRecord {
	out := make([]FoundRecord, 0, len(m))
	for _, g := range m {
		out = append(out, g)
	}
	slices.SortFunc(out, func(a, b FoundRecord) int { return cmp.Compare(a.Place, b.Place) })
	return out
}

// setDefaults fills in the defaults and checks the rest.
func (c *AreaConfig) setDefaults() error {
	if c.GroupBytes == 0 {
		c.GroupBytes = 64 << 10
	}
	if c.MaxValueBytes == 0 {
		c.MaxValueBytes = MaxValueBytes
	}
	if c.Alloc == nil {
		c.Alloc = space.HeapAlloc
	}
	invalid := func(field string, got, want any) error {
		return fmt.Errorf("%w: %s is %v, want %v", ErrConfig, field, got, want)
	}
	switch {
	case c.BlockSize < 512 || c.BlockSize > format.SuperblockBytes || c.BlockSize&(c.BlockSize-1) != 0:
		return invalid("BlockSize", c.BlockSize, "a power of two from 512 to 4096")
	case c.GroupBytes < 512 || c.groupBuf() > format.MaxSwapGroupBytes:
		return invalid("GroupBytes", c.GroupBytes, "512 and more, with the longest value at most 256 KiB")
	case c.AreaBytes%int64(c.BlockSize) != 0 || c.AreaBytes-format.SwapLogStart < int64(8*c.groupBuf()):
		return invalid("AreaBytes", c.AreaBytes,
			fmt.Sprintf("whole blocks, at least %d", format.SwapLogStart+8*c.groupBuf()))
	}
	return nil
}

// groupBuf is the longest that a group can become.
func (c *AreaConfig) groupBuf() int {
	return format.RoundUp(format.SwapGroupHeaderBytes+c.GroupBytes+format.SwapRecordBytes(c.MaxValueBytes),
		format.SuperblockBytes)
}

// FormatArea makes an empty area, whatever is there. The salt should be random and secret, so that nobody can choose a
// value that looks like a record.
//
// Errors: ErrConfig; space.ErrNoMemory; those of write.
func FormatArea(cfg AreaConfig, id uuid.UUID, salt uint64, write Write) error {
	if err := cfg.setDefaults(); err != nil {
		return err
	}
	mem := space.Buffers{Alloc: cfg.Alloc}
	b := format.AreaSuperblock(mem.Take("the superblock of a swap area", format.SuperblockBytes))
	if mem.Err != nil {
		return mem.Err
	}
	b.SetBlockSize(cfg.BlockSize)
	b.SetUUID(id)
	b.SetAreaBytes(cfg.AreaBytes)
	b.SetSalt(salt)
	for generation := range uint64(2) {
		b.SetGeneration(generation + 1)
		b.Seal()
		if err := write(superOffset(generation+1), b); err != nil {
			return err
		}
	}
	return nil
}

// OpenArea reads an area and finds the records of sources in it. It writes nothing. An area of an older version takes
// no records before both superblocks have the present one, because older programs would take those for the end of the
// log.
//
// Errors: ErrConfig; ErrArea, wrapping the error of the format's check, of read, or space.ErrNoMemory.
func OpenArea(cfg AreaConfig, read Read) (*Area, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	mem := space.Buffers{Alloc: cfg.Alloc}
	super, err := readSuper(&cfg, &mem, read)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrArea, err)
	}
	a := &Area{cfg: cfg, log: format.NewSwapLog(super), super: super}
	a.cfg.BlockSize = super.BlockSize()
	a.head = super.LogHead()
	if super.Version() < format.AreaVersion {
		a.upgrades = 2
	}
	a.tail = a.head
	for _, g := range []*group{&a.open, &a.flight} {
		g.buf = mem.Take("a group of swapped records", cfg.groupBuf())
		g.of = make([]recordOf, 0, cfg.GroupBytes/format.SwapRecordHeaderBytes+2)
	}
	s := scan{area: a, read: read, buf: mem.Take("a part of the swap log", scanBytes)}
	if mem.Err != nil {
		return nil, fmt.Errorf("%w: %w", ErrArea, mem.Err)
	}
	if err := s.run(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrArea, err)
	}
	a.durable = a.tail
	return a, nil
}

// readSuper returns the valid superblock with the higher generation.
func readSuper(cfg *AreaConfig, mem *space.Buffers, read Read) (format.AreaSuperblock, error) {
	var best format.AreaSuperblock
	var errs []error
	for i := range units.ExtentOffset(2) {
		b := format.AreaSuperblock(mem.Take("the superblock of a swap area", format.SuperblockBytes))
		if mem.Err != nil {
			return nil, mem.Err
		}
		err := read(i*format.SuperblockBytes, b)
		if err == nil {
			err = b.Check(cfg.AreaBytes)
		}
		if err == nil && b.BlockSize() < cfg.BlockSize {
			err = fmt.Errorf("%w: blocks of %d bytes, the device has %d", format.ErrCorrupt, b.BlockSize(),
				cfg.BlockSize)
		}
		switch {
		case err != nil:
			errs = append(errs, err)
		case best == nil || b.Generation() > best.Generation():
			best = b
		}
	}
	if best == nil {
		return nil, errors.Join(errs...)
	}
	return best, nil
}

// scanBytes is how much of the log is read at once.
const scanBytes = 1 << 20

// scan goes through a log, starting at its head.
type scan struct {
	area *Area
	read Read
	buf  []byte
	// from is the place of the first byte in buf, n their number.
	from format.LogOffset
	n    int
}

// bytes returns n bytes at place, or as many as there are in its lap.
func (s *scan) bytes(place format.LogOffset, n int) ([]byte, error) {
	log := &s.area.log
	n = int(min(uint64(n), log.Rest(place)))
	if place < s.from || place.Add(n) > s.from.Add(s.n) {
		s.from, s.n = place, int(min(scanBytes, log.Rest(place)))
		if err := s.read(log.Offset(place), s.buf[:s.n]); err != nil {
			s.n = 0
			return nil, fmt.Errorf("swap log at %d: %w", log.Offset(place), err)
		}
	}
	return s.buf[place.Sub(s.from):][:n], nil
}

// run collects the records and sets the tail. A failed read ends it, because records that count may follow.
func (s *scan) run() error {
	a := s.area
	for {
		place := a.tail
		n, err := s.group(place)
		if err == nil && n == 0 && place != a.log.NextLap(place) {
			place = a.log.NextLap(place)
			n, err = s.group(place)
		}
		if err != nil {
			return err
		}
		if n == 0 || place.Add(n) > a.log.LapEnd(a.head) {
			break
		}
		a.tail = place.Add(n)
	}
	return s.checkPastEnd()
}

// group handles the group at place and returns its length, or 0 if there is no valid one.
func (s *scan) group(place format.LogOffset) (int, error) {
	a := s.area
	block := a.super.BlockSize()
	b, err := s.bytes(place, block)
	if err != nil {
		return 0, err
	}
	g := format.SwapGroup(b)
	if g.CheckHeader(a.log.Seed(place), block) != nil || g.Place() != place ||
		uint64(g.LengthBytes()) > a.log.Rest(place) {
		return 0, nil
	}
	if b, err = s.bytes(place, g.LengthBytes()); err != nil {
		return 0, err
	}
	g = format.SwapGroup(b)
	if g.CheckContent() != nil {
		return 0, nil
	}
	at := format.SwapGroupHeaderBytes
	for range g.Records() {
		if at >= len(g) {
			return 0, nil
		}
		r := format.SwapRecord(g[at:])
		if r.Check(a.log.Seed(place.Add(at))) != nil || r.Place() != place.Add(at) || int(r.At()) != at {
			return 0, nil
		}
		at += r.LengthBytes()
	}
	for at, i := format.SwapGroupHeaderBytes, 0; i < g.Records(); i++ {
		r := format.SwapRecord(g[at:])
		s.found(r, place)
		at += r.LengthBytes()
	}
	return g.LengthBytes(), nil
}

// found notes the newest record of a key.
func (s *scan) found(r format.SwapRecord, group format.LogOffset) {
	st := &s.area.sources[s.area.sourceOf(r.Source())]
	if st.records == nil {
		st.records = map[recordKey]FoundRecord{}
		st.released = group
	}
	st.last = r.Place()
	k := recordKey{len: uint8(r.KeyLen())}
	copy(k.key[:], r.Key())
	st.records[k] = FoundRecord{Key: k.key, KeyLen: k.len, Deleted: r.Kind() == format.SwapDelete,
		ValueLen: uint32(r.ValueLen()), Place: r.Place(), At: r.At(), Version: r.Version()}
}

// checkPastEnd looks behind the end of the log for a group that was written later. If there is one, the end is damage,
// or the superblock is older than the log. The group can be no further away than a group is long.
func (s *scan) checkPastEnd() error {
	a := s.area
	block := a.super.BlockSize()
	for _, from := range []format.LogOffset{a.tail, a.log.NextLap(a.tail)} {
		for place := from; place < from.Add(format.MaxSwapGroupBytes+block) &&
			place < a.log.LapEnd(a.tail); place = place.Add(block) {
			b, err := s.bytes(place, block)
			if err != nil {
				return err
			}
			g := format.SwapGroup(b)
			at := g.Place()
			// A group at the beginning of the next lap may be the last one, torn, which did not fit into this lap.
			if at <= a.tail || at == a.log.NextLap(a.tail) || a.log.Offset(at) != a.log.Offset(place) ||
				g.CheckHeader(a.log.Seed(at), block) != nil {
				continue
			}
			return fmt.Errorf("%w: the swap log ends at %d, but there is a group at %d", format.ErrCorrupt, a.tail, at)
		}
	}
	return nil
}
