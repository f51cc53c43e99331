// Package fault wraps a device and injects faults: errors, delays, a drive that vanishes and returns, and power loss
// after which acknowledged writes that were not durable may be missing.
//
//	             ┌ rules: error, delay, crash at this request
//	Submit ──> judge ──> held (delayed) ──> apply ──> Poll
//	                                          │
//	       Config.LoseUnflushed:    overlay of unflushed blocks
//	                                          │ Flush, FUA, or luck at Crash
//	                                     wrapped device
//
// With LoseUnflushed the wrapped device holds only durable data. On Crash every unflushed block independently keeps its
// durable content or takes one of the versions written since. A write in flight is torn between blocks, never within
// one. All random choices come from the seed.
package fault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"jbofd/internal/ssd"
)

// Config holds what the daemon's configuration can set; tests add rules.
type Config struct {
	// Seed seeds the generator of all random choices.
	Seed uint64
	// ReadErrorProbability and the others are the probabilities, 0 to 1, that a request of that kind fails with
	// ErrMedia.
	ReadErrorProbability, WriteErrorProbability, FlushErrorProbability float64
	// DelayProbability is the probability that a request completes only after Delay.
	DelayProbability float64
	Delay            time.Duration
	// LoseUnflushed keeps unflushed writes in memory, so that Crash can lose them.
	LoseUnflushed bool
}

// ErrConfig is wrapped by New for a Config out of its bounds.
var ErrConfig = errors.New("fault: invalid configuration")

// Rule says what happens to requests that match it. The zero values of the match
// fields match everything.
type Rule struct {
	// Ops lists the operations that match; none: all.
	Ops []ssd.Op
	// Offset and Len select requests that touch that range of bytes; Len 0: all,
	// flushes included.
	Offset, Len int64
	// Nth fires on the n-th match only, counted from 1 since the rule was set; 0:
	// on every match.
	Nth uint64
	// Probability is the chance to fire on a match; 0 means 1.
	Probability float64

	// Err, if not nil, is the result of the request, which is then not carried out.
	Err error
	// Delay is how much later the request is carried out and completes; with
	// DelayPolls, only after that many calls of Poll (a Wait that blocks counts as
	// often as needed).
	Delay      time.Duration
	DelayPolls int
	// Hold keeps the request until Release: the device has it and does not complete it.
	Hold bool
	// Crash cuts the power while this request is in flight.
	Crash bool

	matches uint64
}

// Device wraps another device. Its own methods may be called from any goroutine.
type Device struct {
	inner ssd.Device
	info  ssd.Info
	cfg   Config

	mu       sync.Mutex
	rng      *rand.Rand
	rules    []Rule
	injected uint64
	vanished bool
	crashed  bool
	closed   bool
	queues   []*queue
	// held counts requests that wait for Release; heldMore is closed and made anew when there are more.
	held     int
	heldMore chan struct{}

	// The overlay; unused without LoseUnflushed.
	io ssd.Queue // on inner
	// unflushed holds, by block number, the versions written and acknowledged since
	// the block was last durable, oldest first.
	unflushed map[int64][][]byte
	// inFlight are the requests submitted and not completed, in order.
	inFlight []*held
	zeroes   []byte // one block
}

// held is a request that was submitted and not completed.
type held struct {
	req   ssd.Request
	err   error // complete with this error and do nothing
	due   time.Time
	polls int
	hold  bool // do not complete until Release
	start time.Time
}

// New wraps inner. The result owns it: Close closes it. After Crash the caller owns it again.
//
// Errors: ErrConfig; and inner's.
func New(inner ssd.Device, cfg Config) (*Device, error) {
	for _, p := range []struct {
		field string
		value float64
	}{
		{"ReadErrorProbability", cfg.ReadErrorProbability}, {"WriteErrorProbability", cfg.WriteErrorProbability},
		{"FlushErrorProbability", cfg.FlushErrorProbability}, {"DelayProbability", cfg.DelayProbability},
	} {
		if !(p.value >= 0 && p.value <= 1) {
			return nil, fmt.Errorf("%w: %s is %v, want 0 to 1", ErrConfig, p.field, p.value)
		}
	}
	if cfg.Delay < 0 {
		return nil, fmt.Errorf("%w: Delay is %v, want 0 or more", ErrConfig, cfg.Delay)
	}
	d := &Device{
		inner:     inner,
		info:      inner.Info(),
		cfg:       cfg,
		rng:       rand.New(rand.NewPCG(cfg.Seed, 0x6661756C74)),
		unflushed: make(map[int64][][]byte),
		heldMore:  make(chan struct{}),
	}
	d.zeroes = make([]byte, d.info.BlockSize)
	if cfg.LoseUnflushed {
		d.info.VolatileCache = true
		d.info.AtomicWriteBytes = d.info.BlockSize
		d.info.DeallocatedReadsZero = true
		d.info.Deallocates = true
		var err error
		if d.io, err = inner.OpenQueue(1); err != nil {
			return nil, err
		}
	}
	d.SetRules()
	return d, nil
}

// SetRules replaces all rules: those of the Config come first, then these. Counting for Nth starts anew. Every rule
// that fires applies to the request; of several errors the first counts.
func (d *Device) SetRules(rules ...Rule) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.rules = d.rules[:0]
	for _, r := range []Rule{
		{Ops: []ssd.Op{ssd.Read}, Probability: d.cfg.ReadErrorProbability, Err: errInjected},
		{Ops: []ssd.Op{ssd.Write, ssd.WriteZeroes, ssd.Deallocate}, Probability: d.cfg.WriteErrorProbability,
			Err: errInjected},
		{Ops: []ssd.Op{ssd.Flush}, Probability: d.cfg.FlushErrorProbability, Err: errInjected},
		{Probability: d.cfg.DelayProbability, Delay: d.cfg.Delay},
	} {
		if r.Probability > 0 {
			d.rules = append(d.rules, r)
		}
	}
	d.rules = append(d.rules, rules...)
}

var errInjected = fmt.Errorf("%w: injected", ssd.ErrMedia)

// Injected counts how often rules have fired.
func (d *Device) Injected() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.injected
}

// Release ends the hold of all requests that a rule with Hold has kept. The rule keeps later requests as before.
func (d *Device) Release() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, q := range d.queues {
		for _, h := range q.held {
			d.releaseHeld(h)
		}
	}
	d.wakeAll()
}

// releaseHeld ends the hold of a request. The caller holds mu.
func (d *Device) releaseHeld(h *held) {
	if h.hold {
		h.hold = false
		d.held--
	}
}

// AwaitHeld waits until at least n requests wait for Release.
//
// Errors: the context's.
func (d *Device) AwaitHeld(ctx context.Context, n int) error {
	for {
		d.mu.Lock()
		held, more := d.held, d.heldMore
		d.mu.Unlock()
		if held >= n {
			return nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return fmt.Errorf("%d requests held, want %d: %w", held, n, ctx.Err())
		}
	}
}

// Vanish makes the device answer ErrGone to everything, also to what is in
// flight, until Return.
func (d *Device) Vanish() { d.setVanished(true) }

// Return ends Vanish.
func (d *Device) Return() { d.setVanished(false) }

func (d *Device) setVanished(v bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.vanished = v
	d.wakeAll()
}

func (d *Device) wakeAll() {
	for _, q := range d.queues {
		q.wake()
	}
}

// Crash cuts the power: each unflushed block survives or not, at random. From then on the device answers ErrGone. The
// wrapped device holds what survived and can be wrapped again.
//
// Errors: the wrapped device's, while what survived is written to it.
func (d *Device) Crash() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.crash()
}

// Crashed reports whether the power was cut, by Crash or by a rule.
func (d *Device) Crashed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.crashed
}

func (d *Device) crash() error {
	if d.crashed || !d.cfg.LoseUnflushed {
		d.crashed = true
		d.wakeAll()
		return nil
	}
	d.crashed = true
	var errs []error
	bs := int64(d.info.BlockSize)
	for _, block := range d.blocks() {
		versions := d.unflushed[block]
		if k := d.rng.IntN(len(versions) + 1); k > 0 {
			errs = append(errs, d.do(ssd.Request{Op: ssd.Write, Offset: block * bs, Len: bs, Buf: versions[k-1]}))
		}
	}
	clear(d.unflushed)
	for _, h := range d.inFlight {
		r := &h.req
		if h.err != nil || r.Op == ssd.Read || r.Op == ssd.Flush || ssd.Validate(&d.info, r) != nil {
			continue
		}
		for at := int64(0); at < r.Len; at += bs {
			if d.rng.IntN(2) == 0 {
				errs = append(errs, d.do(ssd.Request{Op: ssd.Write, Offset: r.Offset + at, Len: bs,
					Buf: d.blockOf(r, at)}))
			}
		}
	}
	d.inFlight = nil
	errs = append(errs, d.do(ssd.Request{Op: ssd.Flush}))
	d.wakeAll()
	return errors.Join(errs...)
}

// blocks returns the numbers of all unflushed blocks in order, so that the outcome depends on the seed only.
func (d *Device) blocks() []int64 {
	blocks := make([]int64, 0, len(d.unflushed))
	for b := range d.unflushed {
		blocks = append(blocks, b)
	}
	slices.Sort(blocks)
	return blocks
}

// blockOf returns what a writing request stores in its block at offset at.
func (d *Device) blockOf(r *ssd.Request, at int64) []byte {
	if r.Op == ssd.Write {
		return r.Buf[at : at+int64(d.info.BlockSize)]
	}
	return d.zeroes
}

// do carries out a request on the wrapped device, for the overlay.
func (d *Device) do(r ssd.Request) error {
	if d.io.Submit([]ssd.Request{r}) != 1 {
		return ssd.ErrGone
	}
	var c [1]ssd.Completion
	for ssd.Await(d.io, c[:], -1) == 0 {
		if err := d.inner.Healthy(); err != nil {
			return err
		}
	}
	return c[0].Err
}

// flush makes the overlay durable. The caller holds mu.
func (d *Device) flush() error {
	bs := int64(d.info.BlockSize)
	for _, block := range d.blocks() {
		v := d.unflushed[block]
		if err := d.do(ssd.Request{Op: ssd.Write, Offset: block * bs, Len: bs, Buf: v[len(v)-1]}); err != nil {
			return err
		}
	}
	if err := d.do(ssd.Request{Op: ssd.Flush}); err != nil {
		return err
	}
	clear(d.unflushed)
	return nil
}

// apply carries out a request with the overlay. The caller holds mu.
func (d *Device) apply(r *ssd.Request) error {
	if err := ssd.Validate(&d.info, r); err != nil {
		return err
	}
	bs := int64(d.info.BlockSize)
	switch r.Op {
	case ssd.Read:
		if r.Flags&ssd.FUA != 0 {
			if err := d.flush(); err != nil {
				return err
			}
		}
		if err := d.do(*r); err != nil {
			return err
		}
		for at := int64(0); at < r.Len; at += bs {
			if v := d.unflushed[(r.Offset+at)/bs]; len(v) > 0 {
				copy(r.Buf[at:at+bs], v[len(v)-1])
			}
		}
		return nil
	case ssd.Flush:
		return d.flush()
	}
	if r.Flags&ssd.FUA != 0 {
		if err := d.do(*r); err != nil {
			return err
		}
		for at := int64(0); at < r.Len; at += bs {
			delete(d.unflushed, (r.Offset+at)/bs)
		}
		return nil
	}
	for at := int64(0); at < r.Len; at += bs {
		b := d.blockOf(r, at)
		if r.Op == ssd.Write {
			b = bytes.Clone(b)
		}
		block := (r.Offset + at) / bs
		d.unflushed[block] = append(d.unflushed[block], b)
	}
	return nil
}

// applyRules applies the rules to a request and reports whether one cuts the power. The caller holds mu.
func (d *Device) applyRules(h *held) (crash bool) {
	r := &h.req
	for i := range d.rules {
		rule := &d.rules[i]
		if len(rule.Ops) > 0 && !slices.Contains(rule.Ops, r.Op) {
			continue
		}
		if rule.Len > 0 && (r.Op == ssd.Flush || r.Offset >= rule.Offset+rule.Len || rule.Offset >= r.Offset+r.Len) {
			continue
		}
		rule.matches++
		if rule.Nth != 0 && rule.matches != rule.Nth {
			continue
		}
		if rule.Probability != 0 && d.rng.Float64() >= rule.Probability {
			continue
		}
		d.injected++
		if h.err == nil {
			h.err = rule.Err
		}
		h.polls = max(h.polls, rule.DelayPolls)
		if rule.Hold && !h.hold {
			h.hold = true
			d.held++
			close(d.heldMore)
			d.heldMore = make(chan struct{})
		}
		if rule.Delay > 0 {
			h.due = h.start.Add(rule.Delay)
		}
		crash = crash || rule.Crash
	}
	return crash
}

// Info implements ssd.Device.
func (d *Device) Info() ssd.Info { return d.info }

// Healthy implements ssd.Device.
func (d *Device) Healthy() error {
	d.mu.Lock()
	gone := d.isGone()
	d.mu.Unlock()
	if gone {
		return ssd.ErrGone
	}
	return d.inner.Healthy()
}

// Health implements ssd.HealthReporter, if the drive does.
func (d *Device) Health() (ssd.Health, bool) {
	if d.Healthy() != nil {
		return ssd.Health{}, false
	}
	return ssd.HealthOf(d.inner)
}

func (d *Device) isGone() bool { return d.vanished || d.crashed || d.closed }

// OpenQueue implements ssd.Device.
func (d *Device) OpenQueue(depth int) (ssd.Queue, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.isGone() {
		return nil, ssd.ErrGone
	}
	inner, err := d.inner.OpenQueue(depth)
	if err != nil {
		return nil, err
	}
	q := &queue{dev: d, inner: inner, depth: depth, passed: make(map[uint64]*held), buf: make([]ssd.Completion, depth)}
	d.queues = append(d.queues, q)
	return q, nil
}

// Close implements ssd.Device. It closes the wrapped device unless Crash has returned that to the caller.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	queues := slices.Clone(d.queues)
	d.wakeAll()
	d.mu.Unlock()
	var errs []error
	for _, q := range queues {
		errs = append(errs, q.Close())
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.io != nil {
		if !d.crashed { // an orderly stop loses nothing
			errs = append(errs, d.apply(&ssd.Request{Op: ssd.Flush}))
		}
		errs = append(errs, d.io.Close())
	}
	if !d.crashed {
		errs = append(errs, d.inner.Close())
	}
	return errors.Join(errs...)
}
