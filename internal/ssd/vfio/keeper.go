package vfio

import (
	"errors"
	"fmt"
	"time"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/vfio/pcie"
)

// The keeper is the goroutine that owns the controller: it creates and deletes queues, aborts commands that take too
// long, handles asynchronous events, reads the SMART log, resets the controller, and gives the device up.

// lookEvery is how often the keeper checks the outstanding commands and CSTS. If the device vanishes while commands are
// outstanding, they end with ssd.ErrGone within twice that. While none are outstanding the keeper sleeps: if the device
// vanishes then, that is noticed with the next command, or when the SMART log is read (Config.HealthEvery), and Healthy
// returns nil until then. An orderly removal (the request interrupt of VFIO) wakes the keeper.
const lookEvery = 400 * time.Millisecond

// keep runs until the device is closed.
func (d *Device) keep() {
	defer close(d.keeper)
	removed := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if d.fn.Removed().Wait(time.Time{}) {
			close(removed)
			d.fn.Vector(0).Signal()
		}
	}()
	for quiet := false; d.step(removed); {
		quiet = !d.fn.Vector(0).Wait(d.nextLook(quiet))
	}
	d.fn.Removed().Signal()
	<-ended
}

// step does the checks and the jobs, and returns whether the device is still open. The checks are first, so that the
// jobs wait if the controller has reported that it activates firmware.
func (d *Device) step(removed <-chan struct{}) bool {
	d.mu.Lock()
	jobs, closed := d.jobs, d.closed
	d.jobs = nil
	d.mu.Unlock()
	select {
	case <-removed:
		d.giveUp(errors.New("it is being removed"))
	default:
	}
	if !d.gone.Load() {
		d.look()
	}
	if d.activating() {
		d.mu.Lock()
		d.jobs = append(jobs, d.jobs...)
		d.mu.Unlock()
		return true
	}
	for _, job := range jobs {
		job()
	}
	if closed {
		d.end()
	}
	return !closed
}

// end shuts the controller down, and ends its access to memory.
func (d *Device) end() {
	if !d.gone.Swap(true) {
		// Errors are dropped: the device loses its access to memory anyway.
		_ = d.ctrl.Shutdown()
		_ = d.ctrl.Disable()
	}
	d.failAreas()
	d.fn.Revoke()
}

// nextLook returns when to check the commands again; the zero time: not before a signal. The keeper sleeps until a
// signal, or until it has to read the SMART log, only if no command was outstanding for a whole interval (quiet):
// otherwise a host with one command at a time would wake it for each of them.
func (d *Device) nextLook(quiet bool) time.Time {
	wait := d.lookIn()
	if wait == 0 && quiet {
		d.idle.Store(true) // before the queues are checked again: a command that is sent after that check resets it
		if wait = d.lookIn(); wait == 0 {
			return d.attendAt()
		}
		d.idle.Store(false)
	}
	if wait == 0 {
		wait = d.lookEvery()
	}
	at := time.Now().Add(wait)
	if attend := d.attendAt(); !attend.IsZero() && attend.Before(at) {
		at = attend
	}
	return at
}

func (d *Device) lookEvery() time.Duration {
	return min(lookEvery, max(d.cfg.Timeout/4, time.Millisecond))
}

// lookIn returns in what time the first queue has to be checked; 0: no command is outstanding, or waits to be sent
// again.
func (d *Device) lookIn() (wait time.Duration) {
	d.eachQueue(func(q *queue) {
		if w := q.lookIn(); w > 0 && (wait == 0 || w < wait) {
			wait = w
		}
	})
	return wait
}

func (d *Device) eachQueue(f func(q *queue)) {
	d.mu.Lock()
	queues := append([]*queue(nil), d.queues...)
	d.mu.Unlock()
	for _, q := range queues {
		if q != nil {
			f(q)
		}
	}
}

// look checks CSTS, handles asynchronous events, reads the SMART log when it is time for that, and checks the commands
// that are outstanding, unless the controller activates firmware. It resets the controller if one of these fails.
func (d *Device) look() {
	err := d.ctrl.Alive()
	paused := false
	if err == nil {
		paused, err = d.attend()
	}
	if err == nil && !paused {
		d.eachQueue(func(q *queue) {
			if err == nil {
				err = d.tend(q)
			}
		})
	}
	if err != nil {
		d.reset(err)
	}
}

// tend aborts commands of a queue that have been outstanding for Config.Timeout, and sends those again that are due. A
// controller may refuse an Abort; then AbortTimeout goes on.
//
// Errors: those after which the controller has to be reset.
func (d *Device) tend(q *queue) error {
	abort, err := q.overdue()
	if err != nil {
		return err
	}
	for _, cid := range abort {
		d.happened(ssd.EventTimeout, fmt.Sprintf("a command has not ended after %v", d.cfg.Timeout))
		var refused pcie.StatusError
		if err := d.ctrl.Abort(q.ring, cid); err != nil && !errors.As(err, &refused) {
			return err
		}
	}
	q.resend()
	return nil
}

// reset resets the controller because of an error, and sends the outstanding commands again. If that fails, it gives
// the device up.
func (d *Device) reset(why error) {
	if errors.Is(why, pcie.ErrGone) {
		d.giveUp(why)
		return
	}
	d.happened(ssd.EventReset, why.Error())
	d.eachQueue((*queue).stop)
	if err := d.renew(); err != nil {
		d.giveUp(fmt.Errorf("%w; its reset: %w", why, err))
		return
	}
	d.eachQueue(func(q *queue) { q.restart(why) })
}

// renew resets the controller, the function too if need be, and restarts it. The queues have been stopped. Who uses an
// area waits meanwhile.
//
// Errors: those of pcie.Controller.Disable and Function.Reset, and of restart.
func (d *Device) renew() error {
	d.holdAreas()
	defer d.releaseAreas()
	err := d.ctrl.Disable()
	if err != nil && !errors.Is(err, pcie.ErrGone) {
		if err = d.fn.Reset(); err == nil {
			err = d.ctrl.Disable()
		}
	}
	if err != nil {
		return err
	}
	return d.restart()
}

// restart enables the controller again, and creates the rings of all queues again.
//
// Errors: those of Enable, verify and CreateRing.
func (d *Device) restart() error {
	if err := d.ctrl.Enable(); err != nil {
		return err
	}
	d.attention.activated, d.attention.unheard = time.Time{}, nil
	err := d.verify()
	d.eachQueue(func(q *queue) {
		if err == nil {
			err = d.ctrl.CreateRing(q.ring, q.mem.at, q.vector)
		}
	})
	return err
}

// giveUp ends the device's access to memory, and then all requests, with ssd.ErrGone. The queues and the areas are
// stopped before Revoke, so that nobody uses the registers meanwhile.
func (d *Device) giveUp(why error) {
	if d.gone.Swap(true) {
		return
	}
	d.mu.Lock()
	d.why = fmt.Errorf("%w: %s: %w", ssd.ErrGone, d.cfg.Address, why)
	d.mu.Unlock()
	d.eachQueue((*queue).stop)
	d.failAreas()
	d.fn.Revoke()
	d.eachQueue((*queue).fail)
}
