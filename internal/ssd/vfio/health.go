package vfio

import (
	"errors"
	"fmt"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/vfio/pcie"
)

// What the keeper does for the drive's own reports: its SMART log, and events.

const (
	defaultHealthEvery = time.Minute
	// listenEvery bounds how often the controller is asked for more events after some, so that one that reports
	// without end does not keep the keeper busy.
	listenEvery = 100 * time.Millisecond
	// maxSilent is how often in a row the SMART log may not be answered, and the controller be reset for that, until it
	// is not asked for any more.
	maxSilent = 3
	// minActivation is how long an activation of firmware may take if the controller does not say.
	minActivation = 10 * time.Second
)

// attention is the state of the keeper for reports.
type attention struct {
	// healthAt is when the SMART log is read next, listenAt when events are asked for again.
	healthAt, listenAt time.Time
	// silent is how often in a row the SMART log was not answered.
	silent int
	// activated is until when firmware may be activated; the zero time: none is. Meanwhile no command is aborted, and
	// the keeper sends none of its own.
	activated time.Time
}

// attend hears what the drive reports, and reads its SMART log when it is time for that. paused: the controller does
// not process commands for now.
//
// Errors: the controller has to be reset.
func (d *Device) attend() (paused bool, err error) {
	a, now := &d.attention, time.Now()
	if !a.activated.IsZero() {
		if d.ctrl.Paused() && now.Before(a.activated) {
			return true, nil
		}
		a.activated = time.Time{}
		if err := d.clearEvent(nvme.LIDFirmwareSlot); err != nil {
			return false, err
		}
	}
	events, err := d.ctrl.Events()
	if err != nil {
		return false, err
	}
	if len(events) > 0 {
		a.listenAt = now.Add(listenEvery)
	}
	for _, e := range events {
		if err := d.hear(e); err != nil {
			return false, err
		}
	}
	if !a.activated.IsZero() {
		return true, nil
	}
	if !now.Before(a.healthAt) {
		if err := d.readHealth(); err != nil {
			return false, err
		}
	}
	if !now.Before(a.listenAt) {
		d.ctrl.Listen()
	}
	return false, nil
}

// attendAt is when attend has something to do next; the zero time: never.
func (d *Device) attendAt() time.Time {
	a, now := &d.attention, time.Now()
	switch {
	case d.gone.Load():
		return time.Time{}
	case d.ctrl.Heard():
		return now
	case !a.activated.IsZero():
		return now.Add(d.lookEvery())
	}
	at := a.healthAt
	if !d.ctrl.Listening() && a.listenAt.Before(at) {
		at = a.listenAt
	}
	if at.Before(now) {
		return now
	}
	return at
}

// hear takes an event. It reads the log page that explains the event, so that the drive reports the next one.
//
// Errors: the controller has to be reset.
func (d *Device) hear(e nvme.AER) error {
	kind := ssd.EventOther
	switch e.Type() {
	case nvme.AERTypeError:
		kind = ssd.EventError
	case nvme.AERTypeSMART:
		kind = ssd.EventSMART
	case nvme.AERTypeNotice:
		kind = ssd.EventNotice
	}
	d.heard[kind].Add(1)
	if d.cfg.Event != nil {
		d.cfg.Event(kind, e.String())
	}
	switch e {
	case nvme.AERFirmwareActivation:
		d.attention.activated = time.Now().Add(max(d.props.Activation, minActivation))
		return nil
	case nvme.AERNamespaceChanged:
		if err := d.clearEvent(e.LID()); err != nil {
			return err
		}
		return d.verify()
	}
	if e.LID() == nvme.LIDSMART {
		return d.readHealth()
	}
	return d.clearEvent(e.LID())
}

// clearEvent reads a log page. It does not matter if the controller does not have the page.
func (d *Device) clearEvent(lid uint8) error {
	_, err := d.ctrl.Log(lid)
	var refused pcie.StatusError
	if errors.As(err, &refused) {
		return nil
	}
	return err
}

// readHealth reads the SMART log. A drive that refuses to tell has no health.
//
// Errors: the controller has to be reset.
func (d *Device) readHealth() error {
	d.attention.healthAt = time.Now().Add(d.cfg.HealthEvery)
	if d.attention.silent >= maxSilent {
		return nil
	}
	b, err := d.ctrl.Log(nvme.LIDSMART)
	var refused pcie.StatusError
	switch {
	case err == nil:
		d.health.Store(&ssd.Health{At: time.Now(), SMART: nvme.SMARTLog(b), WarningKelvin: d.props.WarningKelvin,
			CriticalKelvin: d.props.CriticalKelvin})
	case errors.As(err, &refused):
		d.health.Store(nil)
	default:
		d.health.Store(nil)
		d.attention.silent++
		return err
	}
	d.attention.silent = 0
	return nil
}

// Health implements ssd.HealthReporter.
func (d *Device) Health() (ssd.Health, bool) {
	last := d.health.Load()
	if last == nil || d.gone.Load() {
		return ssd.Health{}, false
	}
	h := *last
	for kind := range h.Events {
		h.Events[kind] = d.heard[kind].Load()
	}
	return h, true
}

// verify looks whether the controller and the namespace are those that were opened.
//
// Errors: they are not; those of pcie.Controller.Namespace.
func (d *Device) verify() error {
	was, block, size := d.props, d.info.BlockSize, d.info.SizeBytes
	nsid, id, err := d.ctrl.Namespace(d.nsid)
	if err != nil {
		return err
	}
	now := d.ctrl.Properties()
	bytes, _ := id.NSZE().Bytes(id.Format().Shift())
	if now.Serial != was.Serial || now.Model != was.Model || 1<<id.Format().Shift() != block || int64(bytes) != size ||
		nsid != d.nsid || d.ctrl.Queues() < len(d.queues) {
		return fmt.Errorf("%w: it was %s %s of %d bytes in blocks of %d, and is %s %s of %d in %d", pcie.ErrLies,
			was.Model, was.Serial, size, block, now.Model, now.Serial, bytes, 1<<id.Format().Shift())
	}
	return nil
}
