package drive

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/pipeline/jbof"
	"jbofd/internal/ssd"
	"jbofd/internal/turn"
)

const (
	// calibrationTime bounds a Calibrate; a common drive takes a quarter of a second.
	calibrationTime = 2 * time.Second
	// calibrationData is how many bytes must have been written to the drive, unless it is smaller. Less than that may
	// be read from a cache of the drive or of the host.
	calibrationData = 64 << 20
	// A calibration tolerates calibrationErrors failed reads, and one in a hundred more.
	calibrationErrors = 4
	// calibrationExtents bounds the search for written data.
	calibrationExtents = 4096
)

var (
	// ErrSlow: a drive did not answer enough reads within the time that calibration may take.
	ErrSlow = errors.New("the drive is too slow to be calibrated")
	// ErrBlank: too little was ever written to the drive. A drive reads blocks that were never written without its
	// medium.
	ErrBlank = errors.New("the drive holds too little data to be calibrated")
)

// Calibrate measures what reads cost on an idle device, before a Drive is made for it. Nothing is written. A device
// that completes within Submit has no queue to keep short: it is not measured, and its profile does not limit the IOs
// under way. The profile of a device with an error is zero.
//
// Errors: ErrSlow; ErrBlank; the drive's errors; bufpool has too little memory.
func Calibrate(env turn.Env, dev ssd.Device, pool *bufpool.Pool) (jbof.Profile, error) {
	info := dev.Info()
	q, err := dev.OpenQueue(jbof.CalibrationDepth)
	if err != nil {
		return jbof.Profile{}, err
	}
	if q.Synchronous() {
		return jbof.Profile{Fixed: true, Depth: jbof.CalibrationDepth, LargeDepth: jbof.CalibrationDepth}, q.Close()
	}
	if info.SizeBytes < 2*jbof.CalibrationBytes || info.BlockSize > jbof.CalibrationUnit {
		return jbof.Profile{}, q.Close()
	}
	data := dataOf(dev)
	if data.bytes < min(calibrationData, info.SizeBytes-2*jbof.CalibrationUnit) {
		return jbof.Profile{}, errors.Join(fmt.Errorf("%w: %d bytes of it in extents of %d or more", ErrBlank,
			data.bytes, jbof.CalibrationBytes), q.Close())
	}
	m := &measurement{env: env, q: q, name: info.Name, blockSize: int(info.BlockSize), data: &data, pool: pool,
		done: make(chan struct{})}
	env.Go(m.begin)
	// The measurement waits for a device that hangs, before it closes the queue; the caller must not.
	if !env.Wait(m.done, calibrationTime+time.Second) {
		return jbof.Profile{}, ErrSlow // the outcome is the measurement's still
	}
	return m.profile, m.err
}

// data is the part of a device that can be read for a calibration.
type data struct {
	// extents are of whole units, each long enough for the largest read; upTo holds the running sum of their lengths.
	extents []ssd.Extent
	upTo    []int64
	bytes   int64
}

// dataOf finds the written extents of a device.
func dataOf(dev ssd.Device) (d data) {
	const unit = jbof.CalibrationUnit
	looked := 0
	for e := range ssd.Data(dev) {
		e.Start, e.End = (e.Start+unit-1)&^(unit-1), e.End&^(unit-1)
		if e.End-e.Start >= jbof.CalibrationBytes {
			d.bytes += e.End - e.Start
			d.extents, d.upTo = append(d.extents, e), append(d.upTo, d.bytes)
		}
		if looked++; looked == calibrationExtents {
			break
		}
	}
	return d
}

// place maps a random number to an offset at which n bytes can be read.
func (d *data) place(random uint64, n int64) int64 {
	at := int64(random % uint64(d.bytes))
	i, _ := slices.BinarySearch(d.upTo, at+1)
	e := d.extents[i]
	return min((e.End-d.upTo[i]+at)&^(jbof.CalibrationUnit-1), e.End-n)
}

// measurement reads at random places of data, as jbof.Calibration asks for it, until that has enough or
// calibrationTime is over. If the queue is an ssd.Notifier, each completion brings a step; otherwise a goroutine waits
// for completions.
type measurement struct {
	env  turn.Env
	q    ssd.Queue
	name string
	// blockSize is the least length of a read.
	blockSize int
	data      *data
	pool      *bufpool.Pool
	// done is closed when profile and err are the outcome. Errors: ErrSlow; the device's; the pool has no memory.
	done    chan struct{}
	profile jbof.Profile
	err     error

	// woken: a step is about to run. Queues that notify may do so from any goroutine.
	woken atomic.Bool
	// mu guards the fields below, of a queue that notifies.
	mu          sync.Mutex
	m           jbof.Calibration
	account     *bufpool.Account
	buf         bufpool.Buf // all reads use it
	comps       [64]ssd.Completion
	rand        *rand.Rand
	tag         uint64
	outstanding int
	failed      int // reads
	beganNS     int64
	late        bool // calibrationTime is over
	over        bool
}

func (c *measurement) begin() {
	c.account = c.pool.Account("calibration:" + c.name)
	var ok bool
	if c.buf, ok = c.pool.Get(c.account, jbof.CalibrationBytes); !ok {
		c.err = fmt.Errorf("no buffer of %d bytes", jbof.CalibrationBytes)
	}
	c.beganNS = c.env.Now()
	// The places differ from start to start, because the drive may have the last ones in its cache.
	c.rand = rand.New(rand.NewPCG(uint64(c.beganNS), 0))
	if n, ok := c.q.(ssd.Notifier); ok {
		n.Notify(func() {
			if c.woken.CompareAndSwap(false, true) {
				c.env.Go(c.notified)
			}
		})
		c.mu.Lock()
		defer c.mu.Unlock()
		c.over = c.step(0)
		return
	}
	for n := 0; !c.step(n); {
		n = ssd.Await(c.q, c.comps[:], calibrationTime)
	}
}

// notified takes the completions of a queue that notifies.
func (c *measurement) notified() {
	c.woken.Store(false) // before Poll: what completes from here on brings another step
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.over {
		n := c.q.Poll(c.comps[:])
		if n == 0 {
			return
		}
		c.over = c.step(n)
	}
}

func (c *measurement) now() int64 { return c.env.Now() - c.beganNS + 1 }

// step accounts for the first n of comps and submits what is wanted next. It reports whether the measurement is over.
func (c *measurement) step(n int) bool {
	c.outstanding -= n
	for i := range c.comps[:n] {
		if err := c.comps[i].Err; err != nil {
			// Some blocks cannot be read; the others say how fast the drive is.
			if c.failed++; c.err == nil && c.failed > calibrationErrors+int(c.tag)/100 {
				c.err = err
			}
		}
		c.m.Complete(c.now(), c.comps[i].LatencyNS)
	}
	c.late = c.late || c.now() > int64(calibrationTime)
	for c.err == nil && !c.late {
		length, ok := c.m.Next(c.now())
		if !ok {
			break
		}
		length = max(length, int64(c.blockSize))
		req := [1]ssd.Request{{Op: ssd.Read, Offset: c.data.place(c.rand.Uint64(), length), Len: length,
			Buf: c.buf.B[:length], Tag: c.tag}}
		c.tag++
		if c.q.Submit(req[:]) != 1 {
			c.err = errors.New("its queue took less than its depth")
			break
		}
		c.outstanding++
	}
	if c.outstanding > 0 || c.err == nil && !c.late && !c.m.Done() {
		return false
	}
	c.end()
	return true
}

// end gives everything back.
func (c *measurement) end() {
	c.pool.Put(c.buf)
	c.account.Close()
	p := c.m.Profile()
	if c.err == nil && c.late && p == (jbof.Profile{}) {
		c.err = ErrSlow
	}
	if c.err == nil {
		c.profile = p // of fewer rounds, if time was over
	}
	c.err = errors.Join(c.err, c.q.Close())
	close(c.done)
}
