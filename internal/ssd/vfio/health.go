package vfio

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/vfio/pcie"
)

// The keeper's handling of the drive's own reports: its SMART log, and asynchronous events.

const (
	defaultHealthEvery = time.Minute
	// listenEvery is the time from events to the next event requests, so that a controller that reports events all the
	// time does not keep the keeper busy.
	listenEvery = 100 * time.Millisecond
	// maxSilent is for how many times in a row reading a log page may fail with another error than a status, for each
	// of which the controller is reset. After that the page is not read any more.
	maxSilent = 3
)

// attention is the state of the keeper for reports.
type attention struct {
	// healthAt is when the SMART log is read next, listenAt the earliest time of the next event requests.
	healthAt, listenAt time.Time
	// silent is for how many times in a row reading a log page, by its LID, has failed with another error than a
	// status.
	silent [256]uint8
	// activated is until when firmware may be activated; the zero time: it is not. Meanwhile no command is aborted, and
	// attend sends none: the controller would not answer it in time.
	activated time.Time
	// unheard are events that wait for that end, or for the next call of attend. There are no more of them than there
	// were event requests: new ones are sent only if there are none.
	unheard []nvme.AER
}

// attend handles events, and reads the SMART log when it is time for that. paused: the controller does not process
// commands for now, because it activates firmware.
//
// Errors: those after which the controller has to be reset.
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
	a.unheard = append(a.unheard, events...)
	if i := slices.Index(a.unheard, nvme.AERFirmwareActivation); i > 0 {
		a.unheard[0], a.unheard[i] = a.unheard[i], a.unheard[0] // the log pages of the others cannot be read now
	}
	for len(a.unheard) > 0 && a.activated.IsZero() {
		if time.Since(now) > d.lookEvery() { // a page takes long: commands are checked first
			return false, nil
		}
		e := a.unheard[0]
		a.unheard = a.unheard[1:]
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
	case !a.activated.IsZero(): // also if there are events, for which attend has no use until the end
		return now.Add(d.lookEvery())
	case d.ctrl.Heard(), len(a.unheard) > 0:
		return now
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

// hear handles an event. It reads the log page that explains the event, so that the drive reports the next one.
//
// Errors: those after which the controller has to be reset.
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
	d.happened(kind, e.String())
	switch e {
	case nvme.AERFirmwareActivation:
		d.attention.activated = time.Now().Add(d.props.Activation)
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

// happened counts an event, and tells of it.
func (d *Device) happened(kind ssd.HealthEvent, what string) {
	d.heard[kind].Add(1)
	if d.cfg.Event != nil {
		d.cfg.Event(kind, what)
	}
}

// clearEvent reads a log page, and thereby clears its event. That the controller refuses the page is no error.
//
// Errors: those after which the controller has to be reset.
func (d *Device) clearEvent(lid uint8) error {
	_, err := d.readLog(lid)
	var refused pcie.StatusError
	if errors.As(err, &refused) || errors.Is(err, errSilent) {
		return nil
	}
	return err
}

// errSilent: the controller has not answered for a log page maxSilent times, and is not asked any more.
var errSilent = errors.New("the log page is not read any more")

// readLog reads a log page.
//
// Errors: errSilent; those of pcie.Controller.Log.
func (d *Device) readLog(lid uint8) ([]byte, error) {
	silent := &d.attention.silent[lid]
	if *silent >= maxSilent {
		return nil, errSilent
	}
	b, err := d.ctrl.Log(lid)
	var refused pcie.StatusError
	if err != nil && !errors.As(err, &refused) {
		*silent++
		return nil, err
	}
	*silent = 0
	return b, err
}

// activating reports whether the controller activates firmware.
func (d *Device) activating() bool { return !d.attention.activated.IsZero() && !d.gone.Load() }

// readHealth reads the SMART log, and the status of the controller's memory. A drive that refuses the log has no
// Health.
//
// Errors: those after which the controller has to be reset.
func (d *Device) readHealth() error {
	d.attention.healthAt = time.Now().Add(d.cfg.HealthEvery)
	d.lookAtAreas()
	b, err := d.readLog(nvme.LIDSMART)
	var refused pcie.StatusError
	switch {
	case err == nil:
		d.health.Store(&ssd.Health{At: time.Now(), SMART: nvme.SMARTLog(b), WarningKelvin: d.props.WarningKelvin,
			CriticalKelvin: d.props.CriticalKelvin})
	case errors.As(err, &refused), errors.Is(err, errSilent):
		d.health.Store(nil)
	default:
		d.health.Store(nil)
		return err
	}
	return nil
}

// firstHealth reads the SMART log when the device is opened. A drive that does not answer is reset, and is not asked
// any more: it may work all the same, and would go on doing so if it were open already.
//
// Errors: those of readHealth but pcie.ErrTimeout, and of renew.
func (d *Device) firstHealth() error {
	err := d.readHealth()
	if !errors.Is(err, pcie.ErrTimeout) {
		return err
	}
	d.attention.silent[nvme.LIDSMART] = maxSilent
	d.happened(ssd.EventReset, err.Error())
	if again := d.renew(); again != nil {
		return fmt.Errorf("%w; its reset: %w", err, again)
	}
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

// verify checks that the controller and the namespace are those that were opened.
//
// Errors: pcie.ErrInvalidResponse, if model, serial number, size or block size have changed, or if the controller
// grants fewer queues; those of pcie.Controller.Namespace.
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
		return fmt.Errorf("%w: it was %s %s of %d bytes in blocks of %d, and is %s %s of %d in %d",
			pcie.ErrInvalidResponse, was.Model, was.Serial, size, block, now.Model, now.Serial, bytes,
			1<<id.Format().Shift())
	}
	return nil
}
