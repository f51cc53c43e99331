//go:build spdk && cgo

package spdk

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/parts"
)

// The keeper is the goroutine that looks after the controller: SPDK sends keep alives and learns of a lost controller
// only when it is asked for admin completions.

// lookEvery is how often the keeper looks.
const lookEvery = 400 * time.Millisecond

// resetTries is how often a reset over a fabric is tried in AbortTimeout.
const resetTries = 20

func (d *Device) keep() {
	defer close(d.keeper)
	for {
		d.mu.Lock()
		closed := d.closed
		d.mu.Unlock()
		if closed {
			return
		}
		d.look()
		d.event.Wait(time.Now().Add(min(lookEvery, max(d.cfg.Timeout/4, time.Millisecond))))
	}
}

// look asks for admin completions, checks the queues, and resets the controller if need be.
func (d *Device) look() {
	if d.gone.Load() {
		return
	}
	d.admin.Lock()
	defer d.admin.Unlock()
	err := admin(d.ctrl)
	for _, q := range d.openQueues() {
		if err == nil {
			err = q.tend()
		}
	}
	if err != nil {
		d.reset(err)
	}
}

// reset stops all queues, resets the controller, connects the queues again, and has their outstanding commands sent
// again. Over a fabric it tries for AbortTimeout, and OpenQueue and Close wait meanwhile. If that fails, or the
// namespace has changed, it gives the device up. The caller holds d.admin.
func (d *Device) reset(why error) {
	d.happened(ssd.EventReset, why.Error())
	for _, q := range d.openQueues() {
		q.stop()
	}
	id, err := reset(d.ctrl)
	// A target that is started again takes a moment.
	for end := time.Now().Add(d.cfg.AbortTimeout); err != nil && d.cfg.Transport != "pcie" && time.Now().Before(end); {
		time.Sleep(d.cfg.AbortTimeout / resetTries)
		id, err = reset(d.ctrl)
	}
	if err == nil && (id.blocks != d.id.blocks || id.blockBytes != d.id.blockBytes || id.serial != d.id.serial ||
		id.names != d.id.names) {
		err = errors.New("it is another namespace now")
	}
	for _, q := range d.openQueues() {
		if err == nil {
			err = q.restart(why)
		}
	}
	if err != nil {
		d.giveUp(fmt.Errorf("%w; its reset: %w", why, err))
	}
}

// giveUp ends all requests with ssd.ErrGone.
func (d *Device) giveUp(why error) {
	d.mu.Lock()
	d.why = fmt.Errorf("%w: %s: %w", ssd.ErrGone, d.cfg.Address, why)
	d.mu.Unlock()
	d.gone.Store(true)
	for _, q := range d.openQueues() {
		q.fail()
	}
}

func (d *Device) happened(kind ssd.HealthEvent, what string) {
	if d.cfg.Event != nil {
		d.cfg.Event(kind, what)
	}
}

// What the keeper does to a queue.

// tend takes completions, sends what is due, and aborts commands that have been outstanding for Config.Timeout.
//
// Errors: those after which the controller has to be reset.
func (q *queue) tend() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.busy() {
		q.turn()
	}
	q.notifyDone()
	if q.lost != nil {
		return fmt.Errorf("a queue pair does not work: %w", q.lost)
	}
	now := q.now()
	for i := range q.commands {
		late, err := q.commands[i].Overdue(now, q.dev.cfg.Timeout, q.dev.cfg.AbortTimeout)
		if err != nil {
			return err
		}
		if !late {
			continue
		}
		q.dev.happened(ssd.EventTimeout, fmt.Sprintf("a command has not ended after %v", q.dev.cfg.Timeout))
		if err := queueAbort(q.handle, i); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOMEM) {
			return fmt.Errorf("an Abort cannot be sent: %w", err)
		}
	}
	return nil
}

// stop keeps the queue from using its queue pair, before the controller is reset. Over fabrics its connection ends, so
// that nothing accesses the data of outstanding commands any more.
func (q *queue) stop() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.down = true
	queueDisconnect(q.handle)
}

// restart connects the queue pair again, and sends the outstanding commands again.
func (q *queue) restart(why error) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	fd, err := queueReconnect(q.handle)
	if err == nil {
		err = q.follow(fd)
	}
	if err != nil {
		return err
	}
	q.down, q.lost = false, nil
	q.take(true) // SPDK has ended the commands that were outstanding
	now := q.now()
	for i := range q.commands {
		c := &q.commands[i]
		if !c.Busy {
			continue
		}
		// SPDK has not ended this command yet. Its slot stays taken until it does.
		c.Aborted, c.StartNS = false, now
		if c.Tries++; c.Tries == parts.MaxTries {
			return fmt.Errorf("a command has survived %d resets: %w", parts.MaxTries, why)
		}
	}
	q.turn()
	q.notify()
	return nil
}

// fail ends all requests, because the device is gone.
func (q *queue) fail() {
	why := q.dev.Healthy()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.gone, q.down = why, true
	queueEnd(q.handle)
	// Nothing is to be read from what irq stands for any more. Failing costs time of the processor at most.
	_ = q.follow(q.event.FD())
	q.take(true)
	now := q.now()
	for i := range q.commands {
		if q.commands[i].Busy {
			p := q.freeSlot(i)
			q.requests.End(&p, why, now)
		}
	}
	q.requests.Fail(why, now)
	q.notify()
}
