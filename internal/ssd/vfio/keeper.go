package vfio

import (
	"errors"
	"fmt"
	"time"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/vfio/pcie"
)

// The keeper is the goroutine that owns the controller: it makes and deletes queues, looks for commands that take too
// long, hears events, resets the controller, and gives it up.

// lookEvery is how often the keeper looks after commands that are under way, and whether the device is still there: its
// removal is answered within twice as long. It sleeps while there are none.
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

// step does what there is to do, and returns whether the device is still open.
func (d *Device) step(removed <-chan struct{}) bool {
	d.mu.Lock()
	jobs, closed := d.jobs, d.closed
	d.jobs = nil
	d.mu.Unlock()
	select {
	case <-removed:
		if !closed {
			d.giveUp(errors.New("it is being removed"))
		}
	default:
	}
	for _, job := range jobs {
		job()
	}
	if closed {
		d.end()
		return false
	}
	if !d.gone.Load() {
		d.look()
	}
	return true
}

// end brings the controller down.
func (d *Device) end() {
	if !d.gone.Swap(true) {
		// It is no error of anybody's if the controller does not shut down: it loses its memory anyway.
		_ = d.ctrl.Shutdown()
		_ = d.ctrl.Disable()
	}
	d.fn.Revoke()
}

// nextLook is when to look again; the zero time: not before somebody signals. The keeper sleeps until the SMART log is
// to be read only when a look has found nothing that was under way (quiet): otherwise a host with one command at a time
// would wake it for each of them.
func (d *Device) nextLook(quiet bool) time.Time {
	wait := d.lookIn()
	if wait == 0 && quiet {
		d.idle.Store(true) // before the queues are looked at again: a command that they do not have yet resets it
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

// lookIn is when a queue has to be looked after, from now; 0: nothing is under way.
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

// look looks for commands that take too long, and hears what the controller tells.
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

// tend looks after the commands of a queue.
//
// Errors: the controller has to be reset.
func (d *Device) tend(q *queue) error {
	abort, err := q.overdue()
	if err != nil {
		return err
	}
	for _, cid := range abort {
		var refused pcie.StatusError
		if err := d.ctrl.Abort(q.ring, cid); err != nil && !errors.As(err, &refused) {
			return err
		}
	}
	q.resend()
	return nil
}

// reset resets the controller because of an error, and sends again what was under way.
func (d *Device) reset(why error) {
	if errors.Is(why, pcie.ErrGone) {
		d.giveUp(why)
		return
	}
	d.eachQueue((*queue).stop)
	err := d.ctrl.Disable()
	if err != nil && !errors.Is(err, pcie.ErrGone) {
		if err = d.fn.Reset(); err == nil {
			err = d.ctrl.Disable()
		}
	}
	if err == nil {
		err = d.restart()
	}
	if err != nil {
		d.giveUp(fmt.Errorf("%w; its reset: %w", why, err))
		return
	}
	d.eachQueue(func(q *queue) { q.restart(why) })
}

// restart brings the controller up again, with the rings that it had.
//
// Errors: it is not the drive that it was, too.
func (d *Device) restart() error {
	if err := d.ctrl.Enable(); err != nil {
		return err
	}
	d.attention.activated = time.Time{}
	err := d.verify()
	d.eachQueue(func(q *queue) {
		if err == nil {
			err = d.ctrl.CreateRing(q.ring, q.mem.at, q.vector)
		}
	})
	return err
}

// giveUp ends the device's access to memory, and then all requests.
func (d *Device) giveUp(why error) {
	if d.gone.Swap(true) {
		return
	}
	d.mu.Lock()
	d.why = fmt.Errorf("%w: %s: %w", ssd.ErrGone, d.cfg.Address, why)
	d.mu.Unlock()
	d.eachQueue((*queue).stop)
	d.fn.Revoke()
	d.eachQueue((*queue).fail)
}
