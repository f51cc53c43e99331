package swap

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/swap/guest"
)

// AreaConfig describes an Area.
type AreaConfig struct {
	// AreaBytes is the length of the area, a multiple of BlockSize, which is the device's, 512 to 4096.
	AreaBytes int64
	BlockSize int
	// GroupBytes is the size at which a group of records is written at the latest; 0: 64 KiB.
	GroupBytes int
	// MaxValueBytes is the longest value that is taken; 0: MaxValueBytes.
	MaxValueBytes int
	// FUA asks for writes that survive a loss of power: for devices with a volatile cache.
	FUA bool
	// Alloc returns n bytes for I/O, block-aligned; nil: make.
	Alloc func(n int) []byte

	tenant, flightTenant uint32 // of the first record of the open group and of that under way
}

// MaxValueBytes is the longest value that is swapped: what is longer costs the home its length, not its I/Os.
const MaxValueBytes = 64 << 10

// What Open and Attach may say.
var (
	// ErrConfig: out of bounds.
	ErrConfig = errors.New("swap: invalid configuration")
	// ErrArea: the area cannot be opened, or is not what a home's book says; nothing has been written.
	ErrArea = errors.New("swap: cannot open the area")
	// ErrAttached: the home has been there since the area was opened and has guests: open the area again.
	ErrAttached = errors.New("swap: the home has guests that were handed out already")
	// ErrBook: both copies of the book are damaged, or it names an area that is not there.
	ErrBook = errors.New("swap: cannot open the home")
)

// Read is how an opening reads: n is whole blocks.
type Read func(offset int64, buf []byte) error

// Write is how a formatting writes; it returns when what was written is durable.
type Write func(offset int64, buf []byte) error

// Guest is a record that was found.
type Guest struct {
	Key     [format.MaxKey]byte
	KeyLen  uint8
	Deleted bool
	// ValueLen, Place and At are the record's.
	ValueLen uint32
	Place    uint64
	At       uint32
}

type guestKey struct {
	key [format.MaxKey]byte
	len uint8
}

// inOrder returns guests in the order of the log.
func inOrder(m map[guestKey]Guest) []Guest {
	out := make([]Guest, 0, len(m))
	for _, g := range m {
		out = append(out, g)
	}
	slices.SortFunc(out, func(a, b Guest) int { return cmp.Compare(a.Place, b.Place) })
	return out
}

// setDefaults fills in and checks.
func (c *AreaConfig) setDefaults() error {
	if c.GroupBytes == 0 {
		c.GroupBytes = 64 << 10
	}
	if c.MaxValueBytes == 0 {
		c.MaxValueBytes = MaxValueBytes
	}
	if c.Alloc == nil {
		c.Alloc = func(n int) []byte { return make([]byte, n) }
	}
	invalid := func(field string, got, want any) error {
		return fmt.Errorf("%w: %s is %v, want %v", ErrConfig, field, got, want)
	}
	switch {
	case c.BlockSize < 512 || c.BlockSize > guest.SuperblockBytes || c.BlockSize&(c.BlockSize-1) != 0:
		return invalid("BlockSize", c.BlockSize, "a power of two from 512 to 4096")
	case c.GroupBytes < 512 || c.groupBuf() > guest.MaxGroupBytes:
		return invalid("GroupBytes", c.GroupBytes, "512 and more, with the longest value at most 256 KiB")
	case c.AreaBytes%int64(c.BlockSize) != 0 || c.AreaBytes-guest.LogStart < int64(8*c.groupBuf()):
		return invalid("AreaBytes", c.AreaBytes, fmt.Sprintf("whole blocks, at least %d", guest.LogStart+8*c.groupBuf()))
	}
	return nil
}

// groupBuf is how long a group can become.
func (c *AreaConfig) groupBuf() int {
	return format.RoundUp(guest.GroupHeaderBytes+c.GroupBytes+guest.RecordBytes(c.MaxValueBytes), guest.SuperblockBytes)
}

// FormatArea makes an empty area, whatever is there. The salt should be random and secret, so that nobody can choose
// a value that looks like a record.
//
// Errors: ErrConfig, and what write says.
func FormatArea(cfg AreaConfig, uuid [16]byte, salt uint64, write Write) error {
	if err := cfg.setDefaults(); err != nil {
		return err
	}
	b := guest.Superblock(cfg.Alloc(guest.SuperblockBytes))
	clear(b)
	b.SetBlockSize(cfg.BlockSize)
	b.SetUUID(uuid)
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

// OpenArea reads an area and finds what homes have there. It writes nothing.
//
// Errors: ErrConfig; ErrArea, wrapping what the check of the format or read said.
func OpenArea(cfg AreaConfig, read Read) (*Area, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	super, err := readSuper(&cfg, read)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrArea, err)
	}
	a := &Area{cfg: cfg, log: guest.NewLog(super), super: super}
	a.cfg.BlockSize = super.BlockSize()
	a.head = super.LogHead()
	a.tail = a.head
	for _, g := range []*group{&a.open, &a.flight} {
		g.buf = cfg.Alloc(cfg.groupBuf())
		g.of = make([]recordOf, 0, cfg.GroupBytes/guest.RecordHeaderBytes+2)
	}
	s := scan{area: a, read: read, buf: cfg.Alloc(scanBytes)}
	if err := s.run(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrArea, err)
	}
	a.durable = a.tail
	return a, nil
}

// readSuper returns the valid superblock with the higher generation.
func readSuper(cfg *AreaConfig, read Read) (guest.Superblock, error) {
	var best guest.Superblock
	var errs []error
	for i := range int64(2) {
		b := guest.Superblock(cfg.Alloc(guest.SuperblockBytes))
		err := read(i*guest.SuperblockBytes, b)
		if err == nil {
			err = b.Check(cfg.AreaBytes)
		}
		if err == nil && b.BlockSize() < cfg.BlockSize {
			err = fmt.Errorf("%w: blocks of %d bytes, the device has %d", guest.ErrCorrupt, b.BlockSize(), cfg.BlockSize)
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

// scan goes through a log from its head.
type scan struct {
	area *Area
	read Read
	buf  []byte
	// from is the place of the first byte in buf, n how many there are.
	from uint64
	n    int
}

// bytes returns what is at place, n bytes or as many as there are in its lap.
func (s *scan) bytes(place uint64, n int) ([]byte, error) {
	log := &s.area.log
	n = int(min(uint64(n), log.Rest(place)))
	if place < s.from || place+uint64(n) > s.from+uint64(s.n) {
		s.from, s.n = place, int(min(scanBytes, log.Rest(place)))
		if err := s.read(log.Offset(place), s.buf[:s.n]); err != nil {
			s.n = 0
			return nil, fmt.Errorf("guest log at %d: %w", log.Offset(place), err)
		}
	}
	at := place - s.from
	return s.buf[at : at+uint64(n)], nil
}

// run collects the guests and sets the tail. A read that fails ends it: behind may be what counts.
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
		if n == 0 || place+n > a.head+a.log.LenBytes {
			break
		}
		a.tail = place + n
	}
	return s.beyond()
}

// group takes in the group at place and returns its length, or 0 if there is none.
func (s *scan) group(place uint64) (uint64, error) {
	a := s.area
	block := a.super.BlockSize()
	b, err := s.bytes(place, block)
	if err != nil {
		return 0, err
	}
	g := guest.Group(b)
	if g.CheckHeader(a.log.Seed(place), block) != nil || g.Place() != place || uint64(g.LengthBytes()) > a.log.Rest(place) {
		return 0, nil
	}
	if b, err = s.bytes(place, g.LengthBytes()); err != nil {
		return 0, err
	}
	g = guest.Group(b)
	if g.CheckContent() != nil {
		return 0, nil
	}
	at := guest.GroupHeaderBytes
	for range g.Records() {
		if at >= len(g) {
			return 0, nil
		}
		r := guest.Record(g[at:])
		if r.Check(a.log.Seed(place+uint64(at))) != nil || r.Place() != place+uint64(at) || int(r.At()) != at {
			return 0, nil
		}
		at += guest.RecordBytes(r.ValueLen())
	}
	for at, i := guest.GroupHeaderBytes, 0; i < g.Records(); i++ {
		r := guest.Record(g[at:])
		s.found(r, place)
		at += guest.RecordBytes(r.ValueLen())
	}
	return uint64(g.LengthBytes()), nil
}

// found remembers the newest record of a key.
func (s *scan) found(r guest.Record, group uint64) {
	h := &s.area.homes[s.area.homeOf(r.Home())]
	if h.guests == nil {
		h.guests = map[guestKey]Guest{}
		h.released = group
	}
	h.last = r.Place()
	k := guestKey{len: uint8(r.KeyLen())}
	copy(k.key[:], r.Key())
	h.guests[k] = Guest{Key: k.key, KeyLen: k.len, Deleted: r.Kind() == guest.Delete, ValueLen: uint32(r.ValueLen()), Place: r.Place(), At: r.At()}
}

// beyond looks behind the end for a group that was written later than it: then the end is none, but damage,
// or the superblock is older than the log. A group can be no further away than one is long.
func (s *scan) beyond() error {
	a := s.area
	block := uint64(a.super.BlockSize())
	for _, from := range []uint64{a.tail, a.log.NextLap(a.tail)} {
		for place := from; place < from+guest.MaxGroupBytes+block && place < a.tail+a.log.LenBytes; place += block {
			b, err := s.bytes(place, int(block))
			if err != nil {
				return err
			}
			g := guest.Group(b)
			at := g.Place()
			// One at the beginning of the next lap may be the last, torn, for which this lap had no room.
			if at <= a.tail || at == a.log.NextLap(a.tail) || at%a.log.LenBytes != place%a.log.LenBytes || g.CheckHeader(a.log.Seed(at), int(block)) != nil {
				continue
			}
			return fmt.Errorf("%w: the guest log ends at %d, but there is a group at %d", guest.ErrCorrupt, a.tail, at)
		}
	}
	return nil
}
