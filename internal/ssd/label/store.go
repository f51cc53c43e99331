package label

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/ssd"
	"jbofd/internal/uuid"
)

// Store is the label of an open drive. Its methods may be called from any goroutine; all but Label wait for the drive.
//
// Safety depends on which copy is written first:
//
//	update: both copies sound      write A, flush, write B, flush
//	        one copy not sound     write that one first
//	        the device grew        first make both sound where they were, then write B at
//	                               the new end, flush, write A, flush
//
// A failed write ends the update, so one sound copy is always left. The drive may then have what was refused, or get it
// late, while users go on with the label in use. So the Store writes that one again, with a higher generation: at the
// next update, when the drive answers (it tries every second), or at the end by Close. Until then a crash, or the loss
// of the drive, leaves either of the two to the next Open.
type Store struct {
	dev ssd.Device

	// label is never changed in place. It changes with mu held, which is held while the drive is written, and is read
	// without: a drive that does not answer keeps nobody from knowing what it has.
	label atomic.Pointer[Label]

	mu    sync.Mutex
	queue ssd.Queue
	// tag is that of the latest request, from 1 on: the queue may still have one that was given up.
	tag uint64
	// given says that the queue has a request that was given up.
	given bool
	// behind says that the drive may have, or get, a newer label than the one in use: one that was refused.
	behind bool
	// retrying says that takeBack is called every now and then; closed ends that.
	retrying   bool
	retryEvery time.Duration
	closed     chan struct{}
	// sound[i] is whether copy i (A, B) on the drive is a whole label.
	// Invariant: at least one is.
	sound [2]bool
	// repaired are the copies that Open has written again.
	repaired [2]bool
}

// NewUUID returns a random (version 4) UUID.
func NewUUID() (u uuid.UUID) {
	rand.Read(u[:]) // never fails
	u[6] = u[6]&0x0F | 0x40
	u[8] = u[8]&0x3F | 0x80
	return u
}

// Open reads the drive's label, repairs a copy that a crash has left behind, and
// extends the label over a device that has grown.
//
// Errors: ErrBlank, ErrForeign (says what it looks like), ErrVersion,
// ErrCorrupt, ErrShrunk; and the device's own.
func Open(dev ssd.Device) (*Store, error) {
	s, err := open(dev)
	if err != nil {
		return nil, err
	}
	found, err := s.read()
	if err == nil {
		err = s.adopt(found)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Inspect reads the drive's label like Open, and changes nothing.
//
// Errors: as Open.
func Inspect(dev ssd.Device) (*Label, error) {
	s, err := open(dev)
	if err != nil {
		return nil, err
	}
	f, err := s.read()
	return f.label, errors.Join(err, s.Close())
}

// Format writes an empty label to a blank drive; with force to any drive.
//
// Errors: without force, whatever Open says unless that is ErrBlank, and
// ErrExists if there is a sound label; ErrInvalid if the device is too small;
// and the device's own.
func Format(dev ssd.Device, drive uuid.UUID, force bool) (*Store, error) {
	s, err := open(dev)
	if err != nil {
		return nil, err
	}
	found, err := s.read()
	switch {
	case force && (err == nil || isVerdict(err)):
		err = nil
	case err == nil:
		err = fmt.Errorf("%w: the drive has a label, UUID %v", ErrExists, found.label.DriveUUID)
	case errors.Is(err, ErrBlank):
		err = nil
	}
	if err == nil {
		// Above both generations that are there: a crash between the two copies must
		// not bring the old label back.
		l := &Label{DriveUUID: drive, Generation: found.generation, DeviceBytes: dev.Info().SizeBytes}
		err = s.write(l)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// isVerdict reports whether err is about the label, as opposed to a failure of the device.
func isVerdict(err error) bool {
	for _, v := range []error{ErrBlank, ErrForeign, ErrVersion, ErrCorrupt, ErrShrunk} {
		if errors.Is(err, v) {
			return true
		}
	}
	return false
}

func open(dev ssd.Device) (*Store, error) {
	if n := dev.Info().SizeBytes; n < MinDeviceBytes {
		return nil, fmt.Errorf("%w: device %q has %d bytes, a label needs at least %d", ErrInvalid, dev.Info().Name, n,
			MinDeviceBytes)
	}
	q, err := dev.OpenQueue(1)
	if err != nil {
		return nil, fmt.Errorf("label of %q: %w", dev.Info().Name, err)
	}
	return &Store{dev: dev, queue: q, retryEvery: time.Second, closed: make(chan struct{})}, nil
}

// Close releases the store's queue on the device. If the last update has failed, it first writes the label in use
// again, unless the device is gone. Idempotent.
//
// Errors: the device's.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.queue == nil {
		return nil
	}
	close(s.closed)
	var err error
	if s.behind && !errors.Is(s.dev.Healthy(), ssd.ErrGone) {
		err = s.write(s.label.Load().Clone())
	}
	err = errors.Join(err, s.queue.Close())
	s.queue = nil
	return err
}

// Repaired names the copies of the label, "first" and "last", that Open found missing or damaged and wrote again.
func (s *Store) Repaired() (copies []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, name := range [2]string{"first", "last"} {
		if s.repaired[i] {
			copies = append(copies, name)
		}
	}
	return copies
}

// Label returns the present content; the caller must not change it.
func (s *Store) Label() *Label {
	return s.label.Load()
}

// Update calls change with a copy of the label and, unless that returns an error,
// makes the changed copy durable before it returns.
//
// Errors: change's; ErrInvalid if the result breaks a rule; the device's. After
// an error Label is as before; the drive may have the new content until the Store has written the old one again, see
// there.
func (s *Store) Update(change func(*Label) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.queue == nil {
		return fmt.Errorf("label: %w", ssd.ErrGone)
	}
	l := s.label.Load().Clone()
	if err := change(l); err != nil {
		return err
	}
	l.Generation = s.label.Load().Generation
	err := s.write(l)
	if s.behind && !s.retrying {
		s.retrying = true
		go s.retry()
	}
	return err
}

// retry calls takeBack until there is no more to do.
func (s *Store) retry() {
	for wait := s.retryEvery; wait > 0; wait = s.takeBack() {
		select {
		case <-s.closed:
			return
		case <-time.After(wait):
		}
	}
}

// takeBack writes the label in use again if the drive may have a newer one and answers. It returns how long to wait
// before the next attempt; 0: none is needed, or the device is gone.
func (s *Store) takeBack() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.queue == nil || !s.behind || errors.Is(s.dev.Healthy(), ssd.ErrGone) {
		s.retrying = false
		return 0
	}
	var c [1]ssd.Completion
	if s.given && ssd.Await(s.queue, c[:], 0) == 0 {
		return s.retryEvery // an update is not to wait for this one
	}
	s.given = false
	if err := s.write(s.label.Load().Clone()); err != nil {
		return 10 * s.retryEvery
	}
	s.retrying = false
	return 0
}

// write makes l durable with the next generation and adopts it.
func (s *Store) write(l *Label) error {
	l.Generation++
	area := make([]byte, AreaBytes)
	if err := l.Encode(area); err != nil {
		return err
	}
	order := [2]int{0, 1}
	if !s.sound[1] && s.sound[0] {
		order = [2]int{1, 0}
	}
	for _, copyIndex := range order {
		if err := s.writeCopy(copyIndex, area, l.DeviceBytes); err != nil {
			// The new generation may be on the drive, so its number must not be used again for other content.
			if was := s.label.Load(); was != nil {
				was = was.Clone()
				was.Generation = l.Generation
				s.label.Store(was)
				// If the device has grown, both say the same but for its size: the next Open goes on.
				s.behind = s.behind || was.DeviceBytes == l.DeviceBytes
			}
			return err
		}
	}
	s.behind = false
	s.label.Store(l)
	return nil
}

func (s *Store) writeCopy(i int, area []byte, deviceBytes int64) error {
	off := int64(0)
	if i == 1 {
		off = TailOffset(deviceBytes)
	}
	s.sound[i] = false
	if err := s.do(ssd.Request{Op: ssd.Write, Offset: off, Len: AreaBytes, Buf: area}); err != nil {
		return err
	}
	if err := s.do(ssd.Request{Op: ssd.Flush}); err != nil {
		return err
	}
	s.sound[i] = true
	return nil
}

// found is the result of reading both ends of a drive.
type found struct {
	label *Label // the newest sound one
	sound [2]bool
	// generation is the highest seen in any sound label.
	generation uint64
}

// read looks at both ends of the drive.
func (s *Store) read() (found, error) {
	size := s.dev.Info().SizeBytes
	head := make([]byte, AlignBytes)
	tail := make([]byte, AlignBytes)
	tailStart := size - AlignBytes
	for _, r := range []ssd.Request{
		{Op: ssd.Read, Offset: 0, Len: AlignBytes, Buf: head},
		{Op: ssd.Read, Offset: tailStart, Len: AlignBytes, Buf: tail},
	} {
		if err := s.do(r); err != nil {
			return found{}, err
		}
	}
	areas := [2][]byte{head[:AreaBytes], tail[TailOffset(size)-tailStart:][:AreaBytes]}
	if !HasMagic(areas[1]) && HasMagic(areas[0]) {
		// If the device has grown, label B is where it ended before. The header of A says where that was; a write
		// cannot tear the header.
		old := int64(binary.LittleEndian.Uint64(areas[0][offDeviceBytes:]))
		if old >= MinDeviceBytes && old < size {
			areas[1] = make([]byte, AreaBytes)
			if err := s.do(ssd.Request{Op: ssd.Read, Offset: TailOffset(old), Len: AreaBytes,
				Buf: areas[1]}); err != nil {
				return found{}, err
			}
		}
	}

	var f found
	var labels [2]*Label
	var errs [2]error
	for i, area := range areas {
		if !HasMagic(area) {
			continue
		}
		if labels[i], errs[i] = Decode(area); errors.Is(errs[i], ErrVersion) {
			return found{}, errs[i] // even if the other copy is intact: a newer program has used the drive
		}
		if l := labels[i]; l != nil {
			f.generation = max(f.generation, l.Generation)
		}
	}
	a, b := labels[0], labels[1]
	switch {
	case a != nil && b != nil && a.Generation == b.Generation:
		if !bytes.Equal(areas[0], areas[1]) {
			return f, fmt.Errorf("%w: both copies have generation %d but differ (drive UUIDs %v and %v)", ErrCorrupt,
				a.Generation, a.DriveUUID, b.DriveUUID)
		}
		f.label, f.sound = a, [2]bool{true, true}
	case a != nil && (b == nil || a.Generation > b.Generation):
		f.label, f.sound = a, [2]bool{true, false}
	case b != nil:
		f.label, f.sound = b, [2]bool{false, true}
	case errs[0] != nil || errs[1] != nil:
		return f, errors.Join(copyError("first", errs[0]), copyError("last", errs[1]))
	case zero(head) && zero(tail):
		at, err := s.sample()
		if err != nil {
			return f, err
		}
		if at >= 0 {
			return f, fmt.Errorf("%w of an unknown kind: both ends are empty, but there is something at byte %d",
				ErrForeign, at)
		}
		return f, ErrBlank
	default:
		what := recognise(head)
		if what == "" {
			what = recogniseTail(tail)
		}
		if what == "" {
			return f, fmt.Errorf("%w of an unknown kind", ErrForeign)
		}
		return f, fmt.Errorf("%w: it looks like %s", ErrForeign, what)
	}
	if f.label.DeviceBytes > size {
		return f, fmt.Errorf("%w: it has %d bytes, the label says %d", ErrShrunk, size, f.label.DeviceBytes)
	}
	return f, nil
}

// Foreign data between the ends is looked for at this many places, evenly spread. Several reads are outstanding at a
// time, because a slow drive would take seconds for one after the other.
const (
	samples     = 1024
	sampleBytes = 64 << 10
	sampleDepth = 16
)

// sample returns the offset at which it found data between the ends of the drive, or -1. It reads a drive of up to
// samples*sampleBytes completely.
func (s *Store) sample() (foreign int64, err error) {
	info := s.dev.Info()
	q, err := s.dev.OpenQueue(sampleDepth)
	if err != nil {
		return -1, fmt.Errorf("label of %q: %w", info.Name, err)
	}
	at, end := int64(AlignBytes), info.SizeBytes-AlignBytes
	step := max((end-at)/samples/sampleBytes, 1) * sampleBytes
	var (
		reqs [sampleDepth]ssd.Request // by tag
		free []uint64
		c    [sampleDepth]ssd.Completion
	)
	for i := range reqs {
		reqs[i] = ssd.Request{Op: ssd.Read, Buf: make([]byte, sampleBytes), Tag: uint64(i)}
		free = append(free, uint64(i))
	}
	foreign = -1
	for {
		for ; at < end && len(free) > 0 && foreign < 0 && err == nil; at += step {
			r := &reqs[free[len(free)-1]]
			r.Offset, r.Len = at, min(sampleBytes, end-at)
			r.Buf = r.Buf[:r.Len]
			if q.Submit([]ssd.Request{*r}) == 0 {
				if err = s.dev.Healthy(); err != nil {
					err = fmt.Errorf("label of %q: %w", info.Name, err)
				}
				break
			}
			free = free[:len(free)-1]
		}
		if len(free) == sampleDepth && (at >= end || foreign >= 0 || err != nil) {
			break
		}
		wait := time.Duration(-1)
		if len(free) == sampleDepth {
			wait = 0 // the queue took no request: poll until the drive reports why
		}
		for _, x := range c[:ssd.Await(q, c[:], wait)] {
			r := &reqs[x.Tag]
			free = append(free, x.Tag)
			switch {
			case x.Err != nil:
				err = fmt.Errorf("label of %q: %v of %d bytes at %d: %w", info.Name, r.Op, r.Len, r.Offset, x.Err)
			case !zero(r.Buf) && (foreign < 0 || r.Offset < foreign):
				foreign = r.Offset
			}
		}
	}
	return foreign, errors.Join(err, q.Close())
}

func copyError(which string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s copy: %w", which, err)
}

// adopt takes over what was read. It first makes both copies intact at the places that the label names, then moves them
// if the device has grown.
func (s *Store) adopt(f found) error {
	s.label.Store(f.label)
	s.sound = f.sound
	if s.sound != [2]bool{true, true} {
		area := make([]byte, AreaBytes)
		if err := f.label.Encode(area); err != nil {
			return err
		}
		for i := range s.sound {
			if s.sound[i] {
				continue
			}
			if err := s.writeCopy(i, area, f.label.DeviceBytes); err != nil {
				return err
			}
			s.repaired[i] = true
		}
	}
	if size := s.dev.Info().SizeBytes; size > f.label.DeviceBytes {
		l := s.label.Load().Clone()
		l.DeviceBytes = size
		s.sound[1] = false // there is no copy at the new end yet
		return s.write(l)
	}
	return nil
}

// ErrUnanswered is wrapped by the error of a request that the device has not answered in time. What was asked for may
// take effect later, but before anything that is asked for afterwards.
var ErrUnanswered = errors.New("the device has not answered")

// patience is how long the device may take for a request. It is longer than one takes that works, retries included.
var patience = time.Minute

// do carries out one request and waits for it.
//
// Errors: ErrUnanswered; the device's.
func (s *Store) do(r ssd.Request) error {
	name, late := s.dev.Info().Name, time.Now().Add(patience)
	s.tag++
	r.Tag = s.tag
	unanswered := func() error {
		if err := s.dev.Healthy(); err != nil {
			return fmt.Errorf("label of %q: %w", name, err)
		}
		if !time.Now().Before(late) {
			return fmt.Errorf("label of %q: %v of %d bytes at %d: %w for %v", name, r.Op, r.Len, r.Offset,
				ErrUnanswered, patience)
		}
		return nil
	}
	var c [1]ssd.Completion
	for s.queue.Submit([]ssd.Request{r}) == 0 { // it has one that was given up
		if ssd.Await(s.queue, c[:], max(time.Until(late), 0)) == 0 {
			if err := unanswered(); err != nil {
				return err
			}
			continue
		}
		s.given = false
	}
	s.given = true
	for c[0] = (ssd.Completion{}); c[0].Tag != s.tag; {
		if ssd.Await(s.queue, c[:], max(time.Until(late), 0)) == 0 {
			if err := unanswered(); err != nil {
				return err
			}
		}
	}
	s.given = false
	if c[0].Err != nil {
		return fmt.Errorf("label of %q: %v of %d bytes at %d: %w", name, r.Op, r.Len, r.Offset, c[0].Err)
	}
	return nil
}
