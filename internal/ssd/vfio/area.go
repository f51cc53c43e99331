package vfio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/vfio/pcie"
)

// The memory that a controller has beside its namespaces, offered as ssd.Area.

const (
	// areaPatience is how long Open waits at most until the memory is ready, whatever the controller says, and
	// resetPatience is it after a reset. Memory that takes longer is looked at again when the SMART log is read.
	// leastPatience is for controllers that say 0, and take some time all the same.
	areaPatience, resetPatience, leastPatience = 10 * time.Second, time.Second, 100 * time.Millisecond
	// areaStep is how much is moved under the lock, in bytes.
	areaStep = 4096
)

// The errors of areas, beside those of package ssd.
var (
	errNotReady = errors.New("the memory is not ready")
	errDropped  = errors.New("the controller was reset before what was written was flushed")
)

// area implements ssd.Area.
type area struct {
	dev    *Device
	region *pcie.Region
	// trouble is why the area cannot be written; nil: it can. notRestored: it was ready with PMRRestoreError.
	trouble     atomic.Pointer[error]
	notRestored atomic.Bool

	// mu guards what follows, and the region. The keeper holds it while the function is reset.
	mu sync.Mutex
	// gone: the drive is; the region is not touched any more. ready: it was ready once.
	gone, ready bool
	// dirty: there were stores since the last barrier, the last one at last. dropped: stores may have been lost
	// in a reset. No Flush has told of that yet.
	dirty, dropped bool
	last           int
}

// openAreas finds the controller's memory, and waits until it is ready, but not for long.
func (d *Device) openAreas() {
	for _, r := range d.ctrl.Regions() {
		d.areas = append(d.areas, &area{dev: d, region: r})
	}
	for _, a := range d.areas {
		a.mu.Lock()
		a.await(areaPatience)
		a.mu.Unlock()
	}
}

// await waits until the area is ready, for so long at most.
func (a *area) await(limit time.Duration) {
	end := time.Now().Add(min(max(a.region.Patience, leastPatience), limit))
	for a.look(); errors.Is(a.Healthy(), errNotReady) && time.Now().Before(end); a.look() {
		time.Sleep(time.Millisecond)
	}
}

// Areas implements ssd.AreaOwner.
func (d *Device) Areas() (all []ssd.Area) {
	for _, a := range d.areas {
		all = append(all, a)
	}
	return all
}

// Info implements ssd.Area.
func (a *area) Info() ssd.AreaInfo {
	i := ssd.AreaInfo{Kind: "cmb", SizeBytes: a.region.Bytes, Persistent: a.region.Persistent,
		BufferBytes: a.region.BufferBytes, NotRestored: a.notRestored.Load()}
	if a.region.Persistent {
		i.Kind = "pmr"
	}
	return i
}

// Healthy implements ssd.Area.
func (a *area) Healthy() error {
	if why := a.trouble.Load(); why != nil {
		return *why
	}
	return nil
}

// look asks the controller for the area's status, and returns why the area cannot be written.
func (a *area) look() error {
	if a.gone || a.region.Unusable != nil {
		return a.learn(0, nil)
	}
	return a.learn(a.region.Status())
}

// learn takes a status, and returns why the area cannot be written.
func (a *area) learn(s nvme.PMRSTS, err error) error {
	switch {
	case a.gone:
		err = ssd.ErrGone
	case err != nil:
		err = fmt.Errorf("%w: %w", ssd.ErrGone, err)
		a.dev.fn.Vector(0).Signal() // the keeper gives the drive up
	case a.region.Unusable != nil:
		err = fmt.Errorf("%w: %w", ssd.ErrMedia, a.region.Unusable)
	case s.NRDY():
		err = fmt.Errorf("%w: %w: PMRSTS is %#x", ssd.ErrMedia, errNotReady, uint32(s))
	case s.ERR() != 0:
		err = fmt.Errorf("%w: a write to the memory has failed: PMRSTS is %#x", ssd.ErrMedia, uint32(s))
	case s.HSTS() == nvme.PMRReadOnly:
		err = fmt.Errorf("the memory is %w: PMRSTS is %#x", ssd.ErrReadOnly, uint32(s))
	case s.HSTS() > nvme.PMRReadOnly:
		err = fmt.Errorf("%w: the memory is unreliable: PMRSTS is %#x", ssd.ErrMedia, uint32(s))
	}
	if !s.NRDY() && !a.ready && !a.gone {
		a.ready = true
		a.notRestored.Store(s.HSTS() == nvme.PMRRestoreError)
	}
	a.remember(err)
	return err
}

// remember keeps why the area cannot be written.
func (a *area) remember(why error) {
	if why == nil {
		a.trouble.Store(nil)
		return
	}
	kept := why // only this is allocated
	a.trouble.Store(&kept)
}

// inSteps reads or writes p at offset, so many bytes at a time that a reset does not wait for long.
//
// hot: 0 allocs
func (a *area) inSteps(p []byte, offset int64, step func(a *area, p []byte, at int) error) error {
	if a.region.Unusable != nil {
		return a.Healthy()
	}
	if err := ssd.CheckArea(a.region.Bytes, len(p), offset); err != nil {
		return err
	}
	for len(p) > 0 {
		n := min(len(p), areaStep)
		if err := step(a, p[:n], int(offset)); err != nil {
			return err
		}
		p, offset = p[n:], offset+int64(n)
	}
	return nil
}

// Read implements ssd.Area.
func (a *area) Read(p []byte, offset int64) error { return a.inSteps(p, offset, (*area).read) }

func (a *area) read(p []byte, at int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.Healthy(); err != nil && !errors.Is(err, ssd.ErrReadOnly) {
		return err
	}
	ones := false
	for i := 0; i < len(p); i += ssd.AreaWord {
		v := a.region.Memory.Load64(at + i)
		ones = ones || v == ^uint64(0)
		binary.LittleEndian.PutUint64(p[i:], v)
	}
	if !ones { // as everything reads if the device has vanished
		return nil
	}
	if err := a.look(); err != nil && !errors.Is(err, ssd.ErrReadOnly) {
		return err
	}
	return nil
}

// Write implements ssd.Area.
func (a *area) Write(p []byte, offset int64) error { return a.inSteps(p, offset, (*area).write) }

// write stores a step.
//
// hot: 0 allocs
func (a *area) write(p []byte, at int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.Healthy(); err != nil {
		return err
	}
	a.dirty = true
	for i := 0; i < len(p); i += ssd.AreaWord {
		a.last = at + i
		a.region.Memory.Store64(a.last, binary.LittleEndian.Uint64(p[i:]))
	}
	return nil
}

// Flush implements ssd.Area.
//
// hot: 0 allocs
func (a *area) Flush() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.gone || a.region.Unusable != nil {
		return a.Healthy()
	}
	err := a.barrier()
	if a.dropped && err == nil {
		a.dropped = false
		return fmt.Errorf("%w: %w", ssd.ErrMedia, errDropped)
	}
	return err
}

// barrier waits until what was stored has arrived.
func (a *area) barrier() error {
	s, err := a.region.Barrier(a.last)
	if err = a.learn(s, err); err == nil {
		a.dirty = false
	}
	return err
}

// holdAreas keeps others from the areas while the controller is reset, which may reset the function.
func (d *Device) holdAreas() {
	for _, a := range d.areas {
		a.mu.Lock()
		if a.dirty && !a.gone {
			a.dropped = a.barrier() != nil || a.dropped
		}
	}
}

// releaseAreas enables the areas again, and lets others use them. A volatile area has lost what was in it.
func (d *Device) releaseAreas() {
	for _, a := range d.areas {
		if !a.gone {
			a.region.Enable()
			a.dropped = a.dropped || !a.region.Persistent
			a.await(resetPatience)
		}
		a.mu.Unlock()
	}
}

// lookAtAreas asks for the status of all areas.
func (d *Device) lookAtAreas() {
	for _, a := range d.areas {
		a.mu.Lock()
		_ = a.look() // Healthy tells
		a.mu.Unlock()
	}
}

// failAreas ends all use of the areas, before Revoke.
func (d *Device) failAreas() {
	for _, a := range d.areas {
		a.mu.Lock()
		a.gone = true
		_ = a.learn(0, nil)
		a.mu.Unlock()
	}
}
