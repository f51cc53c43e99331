package lab

import (
	"bytes"
	"fmt"
	"maps"
	"math/bits"
	"math/rand/v2"
	"slices"

	"jbofd/internal/ssd"
)

// Fault model of Drive:
//
//   - Requests complete in any order, each after a random delay. One in SlowOneIn takes up to a hundred times as long.
//     Hold adds a delay to the requests that it chooses; to simulate a fail-slow drive, it adds one to every request.
//   - A read returns the data at the time of its submission or at that of its completion.
//   - With a volatile cache, a completed write survives a loss of power only if it had FUA, or if it was complete
//     before the submission of a flush that has completed. Otherwise a block has, after a loss of power, either its
//     durable data or that of any write since. Each block is chosen separately, so that writes are torn and reordered.
//   - Of a write in flight at a loss of power or the end of the process, any subset of its blocks may be written.
//   - Fault chooses the Outcome of a request: it fails although none, some or all of it was done; a write is lost (it
//     succeeds and nothing is written) or misdirected (it overwrites another range).
//   - Unreadable makes reads of blocks fail until they are written; Flip flips a bit.
//   - A drive that has vanished (Vanish) fails every request, including those in flight, of which any part may have
//     been done. It may return, and has then lost its power meanwhile.
//
// The model guarantees that no block is torn, that a successful read returns only data that was written (except after
// Flip), and that blocks change only by requests and the calls above.

// Outcome is how a request ends.
type Outcome uint8

// Outcomes. A request that fails has the error ErrInjected.
const (
	// Good: the request succeeds, unless a block is unreadable or the drive has vanished.
	Good Outcome = iota
	// FailUndone, FailTorn and FailDone: the request fails, and none, some or all of its blocks were written.
	FailUndone
	FailTorn
	FailDone
	// Lost: a write succeeds, but nothing was written.
	Lost
	// Misdirected: a write succeeds, but another range was written.
	Misdirected
)

// ErrInjected is the error of requests that Fault has failed.
var ErrInjected = fmt.Errorf("%w: injected", ssd.ErrMedia)

// Flight is a request in flight: from Submit to End.
type Flight struct {
	ssd.Request
	// DueNS is when the request completes.
	DueNS int64
	// submitted is the number of writes that were complete at the submission: a flush makes these durable.
	submitted int
	// queue is the Device's queue that has submitted it, if one has.
	queue *queue
	// seen is the data of a write. Of a read it is the data to return if that was taken at the submission, else nil.
	seen []byte
}

// version is the data of one write to a block in the volatile cache.
type version struct {
	write int // Drive.Writes when the write completed
	data  []byte
}

// maxVersions limits the versions of one block in the cache. Dropping the oldest only reduces the outcomes of a loss of
// power; it adds none that a real drive could not have.
const maxVersions = 4

// Drive is a simulated drive as a state machine: Submit takes a request, Next returns the request that completes next,
// and End completes it. A test of another machine calls these itself; Device calls them in the virtual time of a Sim.
type Drive struct {
	rng   *rand.Rand
	block int
	// Volatile: the drive has a volatile write cache.
	Volatile bool
	// Durable is the data that survives a loss of power, Visible the data that reads return.
	Durable, Visible []byte
	// Flights are the requests in flight.
	Flights []Flight
	// Fault is called when a request completes and returns its Outcome; nil: always Good.
	Fault func(r *ssd.Request) Outcome
	// Hold returns an additional delay of a request in nanoseconds; nil: none.
	Hold func(r *ssd.Request) int64
	// Observe, if not nil, is called with each request at its submission.
	Observe func(r *ssd.Request)
	// Harmed, if not nil, is called with each range that holds other data than requests have left there: after a lost
	// or misdirected write and after Flip.
	Harmed func(offset, length int64)
	// SlowOneIn makes one request in so many take up to a hundred times as long as the others; 0: none.
	SlowOneIn int
	// LastWrite, if not nil, maps the offset of each block to the number of the last write to it, as counted by Writes.
	LastWrite map[int64]int
	// Misuse is called for requests that break the rules of ssd.Queue, and for write buffers that were changed in
	// flight.
	Misuse func(what string)

	// Reads, Writes and Flushes count completed requests.
	Reads, Writes, Flushes int
	ReadBytes, WriteBytes  int64

	// cache holds, by offset, the versions of a block that are not durable, oldest first.
	cache      map[int64][]version
	unreadable map[int64]bool
	gone       bool
	// spare are buffers for the data of requests, by the log2 of their length.
	spare [32][][]byte
}

// DriveConfig describes a Drive.
type DriveConfig struct {
	SizeBytes int64
	BlockSize int
	Volatile  bool
	Rand      *rand.Rand
	Misuse    func(what string)
}

// NewDrive returns a drive of zeroes.
func NewDrive(cfg DriveConfig) *Drive {
	return &Drive{
		rng: cfg.Rand, block: cfg.BlockSize, Volatile: cfg.Volatile, Misuse: cfg.Misuse,
		Durable: make([]byte, cfg.SizeBytes), Visible: make([]byte, cfg.SizeBytes),
		cache: map[int64][]version{}, unreadable: map[int64]bool{},
	}
}

// BlockSize is the size of a block in bytes.
func (d *Drive) BlockSize() int { return d.block }

// Clone returns a copy of the drive, without the requests in flight. The copy draws its random choices from rng.
func (d *Drive) Clone(rng *rand.Rand) *Drive {
	c := *d
	c.rng, c.Flights, c.spare = rng, nil, [32][][]byte{}
	c.Durable, c.Visible = slices.Clone(d.Durable), slices.Clone(d.Visible)
	c.cache, c.unreadable = maps.Clone(d.cache), maps.Clone(d.unreadable)
	for at, v := range c.cache {
		c.cache[at] = slices.Clone(v)
	}
	return &c
}

// Submit accepts a request; the data of a write is in r.Buf[:r.Len].
func (d *Drive) Submit(nowNS int64, r ssd.Request) {
	if r.Op != ssd.Flush && (r.Offset < 0 || r.Len <= 0 || r.Offset%int64(d.block) != 0 || r.Len%int64(d.block) != 0 ||
		r.Offset+r.Len > int64(len(d.Visible))) {
		d.Misuse(fmt.Sprintf("%v of %d bytes at %d", r.Op, r.Len, r.Offset))
	}
	if d.Observe != nil {
		d.Observe(&r)
	}
	f := Flight{Request: r, DueNS: nowNS + 5000 + d.rng.Int64N(60000), submitted: d.Writes}
	if d.SlowOneIn > 0 && d.rng.IntN(d.SlowOneIn) == 0 {
		f.DueNS += d.rng.Int64N(6e6)
	}
	if d.Hold != nil {
		f.DueNS += d.Hold(&f.Request)
	}
	switch r.Op {
	case ssd.Read:
		if d.rng.IntN(2) == 0 {
			f.seen = d.copied(d.Visible[r.Offset:][:r.Len])
		}
		for i := int64(0); i < r.Len; i += 64 { // so that use of the buffer before the completion is detected
			r.Buf[i] ^= 0xA5
		}
	case ssd.Write:
		f.seen = d.copied(r.Buf[:r.Len])
	case ssd.WriteZeroes:
		f.seen = make([]byte, r.Len)
	}
	d.Flights = append(d.Flights, f)
}

// copied returns a copy of b, in a spare buffer if there is one.
func (d *Drive) copied(b []byte) []byte {
	class := classOf(b)
	if n := len(d.spare[class]); n > 0 {
		c := d.spare[class][n-1]
		d.spare[class] = d.spare[class][:n-1]
		return append(c, b...)
	}
	return append(make([]byte, 0, 1<<class), b...)
}

// release takes back what copied has returned, when nothing refers to it any more.
func (d *Drive) release(b []byte) {
	if class := classOf(b); cap(b) == 1<<class {
		d.spare[class] = append(d.spare[class], b[:0])
	}
}

// classOf is the log2 of the length of a spare buffer for b.
func classOf(b []byte) int { return bits.Len(uint(max(len(b), 1) - 1)) }

// Next returns the index in Flights of the request that completes next, or -1.
func (d *Drive) Next() int {
	best := -1
	for i := range d.Flights {
		if best < 0 || d.Flights[i].DueNS < d.Flights[best].DueNS {
			best = i
		}
	}
	return best
}

// End completes the request at index i of Flights.
func (d *Drive) End(i int) (ssd.Request, error) {
	f := d.Flights[i]
	d.Flights = slices.Delete(d.Flights, i, i+1)
	if d.gone {
		if f.Op == ssd.Read {
			d.scribble(f.Buf[:f.Len])
		}
		return f.Request, ssd.ErrGone
	}
	what := Good
	if d.Fault != nil {
		what = d.Fault(&f.Request)
	}
	switch f.Op {
	case ssd.Read:
		d.Reads++
		d.ReadBytes += f.Len
		if what == Good && d.anyUnreadable(f.Offset, f.Len) {
			what = FailUndone
		}
		if what == Good && f.Flags&ssd.FUA != 0 {
			d.destage(f.submitted)
		}
		switch {
		case what >= FailUndone && what <= FailDone:
			d.scribble(f.Buf[:f.Len])
		case f.seen != nil:
			copy(f.Buf, f.seen)
		default:
			copy(f.Buf[:f.Len], d.Visible[f.Offset:])
		}
		d.release(f.seen)
	case ssd.Write, ssd.WriteZeroes:
		d.Writes++
		d.WriteBytes += f.Len
		if f.Op == ssd.Write && !bytes.Equal(f.seen, f.Buf[:f.Len]) {
			d.Misuse(fmt.Sprintf("the buffer of a write at %d was changed while the drive had it", f.Offset))
		}
		d.endWrite(&f, what)
		if !d.Volatile || f.Flags&ssd.FUA != 0 && what != FailTorn { // otherwise the cache may refer to it
			d.release(f.seen)
		}
	case ssd.Deallocate: // each block reads as zeroes or as before from now on
		for at := f.Offset; at < f.Offset+f.Len && what == Good; at += int64(d.block) {
			if d.rng.IntN(2) == 0 {
				d.put(at, make([]byte, d.block), !d.Volatile)
			}
		}
	case ssd.Flush:
		d.Flushes++
		if what == Good || what == FailDone {
			d.destage(f.submitted)
		}
	}
	if what >= FailUndone && what <= FailDone {
		return f.Request, ErrInjected
	}
	return f.Request, nil
}

// Do submits a request and completes it at once, for tests that keep track of the requests in flight themselves.
func (d *Drive) Do(r ssd.Request) error {
	d.Submit(0, r)
	_, err := d.End(len(d.Flights) - 1)
	return err
}

// Tear writes a random subset of the blocks of a write, as a crash or loss of power does while the write is in flight.
func (d *Drive) Tear(r ssd.Request) {
	d.Writes++
	d.putTorn(r.Offset, slices.Clone(r.Buf[:r.Len]))
}

// Store changes the data, durably and without a request. Tests use it to format the drive, or for the data of a former
// user.
func (d *Drive) Store(offset int64, b []byte) {
	copy(d.Durable[offset:], b)
	copy(d.Visible[offset:], b)
}

// endWrite changes the data as a write with the given Outcome does. It is part of End, which reports the error.
func (d *Drive) endWrite(f *Flight, what Outcome) {
	at, durable := f.Offset, !d.Volatile || f.Flags&ssd.FUA != 0
	switch what {
	case FailUndone:
		return
	case Lost:
		d.harmed(at, f.Len)
		return
	case FailTorn:
		d.putTorn(at, f.seen)
		return
	case Misdirected:
		d.harmed(at, f.Len)
		at = d.rng.Int64N((int64(len(d.Visible))-f.Len)/int64(d.block)+1) * int64(d.block)
		d.harmed(at, f.Len)
	}
	d.put(at, f.seen, durable)
}

func (d *Drive) harmed(offset, length int64) {
	if d.Harmed != nil {
		d.Harmed(offset, length)
	}
}

// scribble fills b with random bytes, because a failed read may leave anything in its buffer.
func (d *Drive) scribble(b []byte) {
	for i := range b {
		b[i] = byte(d.rng.Uint32())
	}
}

// put writes whole blocks, so that reads find them, and makes unreadable blocks readable again. With durable they
// survive a loss of power. Otherwise the volatile cache keeps the latest maxVersions of each block, from which a loss
// of power chooses.
func (d *Drive) put(offset int64, data []byte, durable bool) {
	copy(d.Visible[offset:], data)
	for n := 0; n < len(data); n += d.block {
		at, b := offset+int64(n), data[n:n+d.block]
		delete(d.unreadable, at)
		if durable {
			copy(d.Durable[at:], b)
			delete(d.cache, at)
		} else {
			v := append(d.cache[at], version{d.Writes, b})
			if len(v) > maxVersions {
				v = slices.Delete(v, 0, 1)
			}
			d.cache[at] = v
		}
		if d.LastWrite != nil {
			d.LastWrite[at] = d.Writes
		}
	}
}

// putTorn writes none, all, the first few or a random subset of the blocks. With a volatile cache none of them is
// durable, even with FUA, because the write did not succeed.
func (d *Drive) putTorn(offset int64, data []byte) {
	keep := d.rng.Float64()
	end := d.rng.IntN(len(data)/d.block + 1)
	kind := d.rng.IntN(4)
	for n := 0; n < len(data); n += d.block {
		if kind == 0 || kind == 1 && n/d.block < end || kind == 2 && d.rng.Float64() < keep {
			d.put(offset+int64(n), data[n:n+d.block], !d.Volatile)
		}
	}
}

// destage makes the cached data durable, up to the write whose number is write.
func (d *Drive) destage(write int) {
	for at, versions := range d.cache {
		n := 0
		for n < len(versions) && versions[n].write <= write {
			n++
		}
		if n == 0 {
			continue
		}
		copy(d.Durable[at:], versions[n-1].data)
		if n == len(versions) {
			delete(d.cache, at)
		} else {
			d.cache[at] = versions[n:]
		}
	}
}

// Kill simulates the end of the process that uses the drive: any part of the writes in flight may still be done.
func (d *Drive) Kill() {
	if !d.gone { // otherwise Vanish has done it
		d.tearFlights()
	}
	d.Flights = nil
}

// tearFlights does any part of the writes in flight.
func (d *Drive) tearFlights() {
	for _, f := range d.Flights {
		if f.Op == ssd.Write || f.Op == ssd.WriteZeroes {
			d.Writes++
			d.putTorn(f.Offset, f.seen)
		}
	}
}

// PowerLoss simulates a loss of power: it does what Kill does, and each block loses all, some or none of its data that
// was not durable.
func (d *Drive) PowerLoss() {
	d.Kill()
	for _, at := range slices.Sorted(maps.Keys(d.cache)) { // sorted, so that the seed determines the result
		versions := d.cache[at]
		if i := d.rng.IntN(2 * len(versions)); i < len(versions) {
			copy(d.Durable[at:], versions[len(versions)-1-i].data)
		}
	}
	for at := range d.cache {
		copy(d.Visible[at:][:d.block], d.Durable[at:])
	}
	clear(d.cache)
}

// Unreadable makes the blocks of a range fail reads until they are written.
func (d *Drive) Unreadable(offset, length int64) {
	for at := offset &^ int64(d.block-1); at < offset+length; at += int64(d.block) {
		d.unreadable[at] = true
	}
}

// UnreadableBlocks returns the offsets of the blocks that cannot be read.
func (d *Drive) UnreadableBlocks() []int64 { return slices.Sorted(maps.Keys(d.unreadable)) }

func (d *Drive) anyUnreadable(offset, length int64) bool {
	if len(d.unreadable) == 0 {
		return false
	}
	for at := offset; at < offset+length; at += int64(d.block) {
		if d.unreadable[at] {
			return true
		}
	}
	return false
}

// Flip inverts a bit of the stored data, in the cache too.
func (d *Drive) Flip(offset int64, bit uint) {
	d.Durable[offset] ^= 1 << bit
	d.Visible[offset] ^= 1 << bit
	versions := d.cache[offset&^int64(d.block-1)]
	for i := range versions {
		b := slices.Clone(versions[i].data) // a clone of the drive may share it
		b[offset&int64(d.block-1)] ^= 1 << bit
		versions[i].data = b
	}
	d.harmed(offset&^int64(d.block-1), int64(d.block))
}

// Vanish removes the drive: every request fails from now on.
func (d *Drive) Vanish() {
	d.tearFlights()
	d.gone = true
}

// Gone reports that the drive has vanished.
func (d *Drive) Gone() bool { return d.gone }

// Return plugs a vanished drive in again. Its cache has had a loss of power.
func (d *Drive) Return() {
	d.PowerLoss()
	d.gone = false
}
