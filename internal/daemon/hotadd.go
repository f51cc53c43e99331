package daemon

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/config"
	"jbofd/internal/publish"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/label"
	"jbofd/internal/ssd/vfio/pci"
	"jbofd/internal/telemetry"
	"jbofd/internal/uuid"
)

// A drive that is not there at the start, or vanishes, is taken into service when it appears:
//
//	left out ── it can be opened ──> opened: Apply brings its namespaces <──┐
//	                                   │ Healthy: ErrGone, and a Flush, too   │ it can be opened, and has
//	                                   └──> withdrawn: its namespaces are     │ the UUID that it had
//	                                        taken away, its stores closed ────┘
//
// Namespaces are taken away because a drive that has lost its power may have lost writes that no Flush has made
// durable. A host must not go on as if it had them.

// hotAdd is what attendDrives knows.
type hotAdd struct {
	// now has a value when all drives that are not served are to be opened at once.
	now chan struct{}
}

const (
	// lookForDrivesEvery is how often drives are looked for that are not served.
	lookForDrivesEvery = time.Second
	// maxOpenWait bounds the time between two tries to open a drive that is there, and cannot be opened.
	maxOpenWait = 10 * time.Second
	// openingPatience is how long a stop waits for drives that are being opened.
	openingPatience = 500 * time.Millisecond
)

// awaited is a drive that attendDrives looks for, or checks.
type awaited struct {
	// opening: a goroutine opens it. at is the earliest time of the next try, or the one at which it was taken into
	// service. wait is the time between the last two tries, also if the drive was in service between them: one that
	// vanishes again at once does not come back each second.
	opening bool
	at      time.Time
	wait    time.Duration
	// refused: it has another label than it may have. It is not tried again before it has vanished, or a reload.
	refused bool
	// said is the last error that is in the log.
	said string
}

// arrival is a device that was opened, or why not.
type arrival struct {
	number int
	*openedDevice
}

// again has all drives that are not served be opened at once.
func (h *hotAdd) again() {
	select {
	case h.now <- struct{}{}:
	default:
	}
}

// attendDrives attends to drives that appear and vanish, until the node stops. It returns what ends that, and waits for
// the end.
func (n *Node) attendDrives() (end func()) {
	ended := make(chan struct{})
	var opening sync.WaitGroup
	go func() {
		defer close(ended)
		tick := time.NewTicker(lookForDrivesEvery)
		defer tick.Stop()
		all, arrived := make([]awaited, len(n.drives())), make(chan arrival)
		for i, d := range n.drives() {
			all[i].refused = pointless(d.err)
		}
		for {
			select {
			case <-n.stopping:
				return
			case <-tick.C:
			case <-n.hot.now:
				for i := range all {
					all[i].at, all[i].refused = time.Time{}, false
				}
			case a := <-arrived:
				n.arrived(&all[a.number], a)
			}
			for i := range all {
				n.attendDrive(i, &all[i], arrived, &opening)
			}
		}
	}()
	return func() {
		n.beginStop()
		<-ended
		opened := make(chan struct{})
		go func() {
			defer close(opened)
			opening.Wait()
		}()
		within(openingPatience, opened)
	}
}

// attendDrive begins to open a drive that is not served, and withdraws one that is gone.
func (n *Node) attendDrive(i int, w *awaited, arrived chan<- arrival, opening *sync.WaitGroup) {
	d, now := n.drives()[i], time.Now()
	switch {
	case w.opening || now.Before(w.at):
	case d.serves():
		if !errors.Is(d.dev.Healthy(), ssd.ErrGone) {
			if now.Sub(w.at) > maxOpenWait {
				w.wait = 0
			}
			return
		}
		if n.heldAtStart(n.config().SSDs[i], d.label.Label()) {
			return
		}
		w.at = now.Add(w.longer())
		if isGone(d) {
			n.withdraw(i, d)
			*w = awaited{at: w.at, wait: w.wait}
		}
	case !w.refused || errors.Is(n.present(i), os.ErrNotExist):
		w.opening, w.refused = true, false
		sc := n.config().SSDs[i]
		opening.Go(func() {
			o := &openedDevice{}
			if o.err = n.openDevice(o, sc, d.label == nil); o.err != nil {
				o.close()
			}
			select {
			case arrived <- arrival{i, o}:
			case <-n.stopping:
				o.close()
			}
		})
	}
}

// isGone reports whether a drive fails what it is asked, because it is gone. A file that was deleted works all the
// same.
func isGone(d *openSSD) bool {
	flushed := make(chan error, 1)
	go func() { flushed <- publish.Flush(d.drive) }()
	select {
	case err := <-flushed:
		return errors.Is(err, ssd.ErrGone)
	case <-time.After(lookForDrivesEvery):
		return false
	}
}

// longer is how long to wait for the next try.
func (w *awaited) longer() time.Duration {
	w.wait = min(max(2*w.wait, lookForDrivesEvery), maxOpenWait)
	return w.wait
}

// present returns an error that wraps os.ErrNotExist if a drive is not there.
func (n *Node) present(i int) error {
	sc := n.config().SSDs[i]
	if sc.Backend == "nvme" {
		f, err := (pci.Bus{}).Find(sc.Address)
		if errors.Is(err, pci.ErrAbsent) || err == nil && f.Driver != pci.Driver {
			return os.ErrNotExist
		}
		return nil
	}
	_, err := os.Stat(sc.Path)
	return err
}

// absent reports whether a device cannot be opened because it is not there. Trying again costs little.
func absent(err error) bool {
	for _, is := range []error{os.ErrNotExist, unix.ENXIO, unix.ENODEV, unix.ENOMEDIUM, pci.ErrAbsent, pci.ErrDriver} {
		if errors.Is(err, is) {
			return true
		}
	}
	return false
}

// errOther: it is not the drive that had the name before.
var errOther = errors.New("it is another drive than the one that was there before")

// errAtStart: the drive has something that only a start takes into service.
var errAtStart = errors.New("it is taken into service when jbofd is restarted")

// errNamespaces: its namespaces cannot be made as the configuration says.
var errNamespaces = errors.New("its namespaces cannot be served")

// pointless reports whether trying again does not help, because of what is on the drive.
func pointless(err error) bool {
	for _, is := range []error{label.ErrForeign, label.ErrCorrupt, label.ErrVersion, label.ErrBlank, errOther,
		errAtStart, errNamespaces} {
		if errors.Is(err, is) {
			return true
		}
	}
	return false
}

// arrived takes a drive into service that was opened, or notes why it cannot be.
func (n *Node) arrived(w *awaited, a arrival) {
	*w = awaited{wait: w.wait, said: w.said}
	sc := n.config().SSDs[a.number]
	err := a.err
	if err == nil {
		err = n.takeIntoService(a.number, sc, a.openedDevice)
	}
	switch {
	case err == nil:
		*w = awaited{at: time.Now(), wait: w.wait}
		return
	case errors.Is(err, errStopping):
		return
	case absent(err):
		w.at = time.Now().Add(lookForDrivesEvery)
		return
	}
	w.at, w.refused = time.Now().Add(w.longer()), pointless(err)
	if w.said != err.Error() {
		w.said = err.Error()
		n.log.Warn("a drive that is not in service cannot be opened", "ssd", sc.Name, "error", err)
	}
}

// takeIntoService makes a drive of a device that was opened, and gives hosts its namespaces. On error nothing of it is
// open.
//
// Errors: errStopping, errOther, errAtStart, errNamespaces; those of openDrive and DrainDrive.
func (n *Node) takeIntoService(i int, sc config.SSD, o *openedDevice) (err error) {
	defer func() {
		if err != nil {
			o.close()
		}
	}()
	before := n.drives()[i]
	if err := n.mayServe(before, sc, o.label.Label()); err != nil {
		return err
	}
	if err := n.beginChange("the opening of ssd " + sc.Name); err != nil {
		return err
	}
	defer n.endChange()
	if before.drive != nil {
		if err := n.publisher.Drain(before.drive, n.stopping); err != nil {
			return err
		}
	}
	d, err := n.openDrive(sc, o)
	if err != nil {
		return err
	}
	d.returns = true
	n.service.ReplaceSSD(i, d.drive)
	n.setDrive(i, d)
	if before.drive != nil {
		n.release(before)
	}
	if err := n.apply(n.cfg, lenient); err != nil {
		// Without it, as before: the namespaces of the others must not depend on it.
		err = fmt.Errorf("%w: %w", errNamespaces, err)
		without := *d
		without.withdrawn, without.err = true, fmt.Errorf("ssd %s: %w", sc.Name, err)
		n.setDrive(i, &without)
		n.tel.SetSSD(telemetry.SSD{Info: d.dev.Info(), Healthy: func() error { return err }})
		n.release(d)
		return err
	}
	return nil
}

// release closes a drive that hosts do not use any more.
func (n *Node) release(d *openSSD) {
	if err := n.publisher.Drain(d.drive, n.stopping); err != nil {
		n.log.Error("a drive that is not in service stays open", "ssd", d.name, "error", err)
		return
	}
	d.opened.close()
}

// mayServe checks that a drive may be taken into service while the daemon runs.
//
// Errors: errOther; errAtStart, if it has swap areas or partitions of the cluster.
func (n *Node) mayServe(before *openSSD, sc config.SSD, l *label.Label) error {
	if before.label != nil {
		if was := before.label.Label().DriveUUID; l.DriveUUID != was {
			return fmt.Errorf("%w: uuid %v, and it had %v; restart jbofd to use it", errOther, uuid.UUID(l.DriveUUID),
				uuid.UUID(was))
		}
	}
	if n.heldAtStart(sc, l) {
		return fmt.Errorf("%w: it has a swap area, or a partition of the cluster", errAtStart)
	}
	return nil
}

// heldAtStart reports whether a drive has, or is to have, something that stays open from the start to the end of the
// daemon: a swap area, or a partition of the cluster.
func (n *Node) heldAtStart(sc config.SSD, l *label.Label) bool {
	for _, e := range l.Extents {
		if e.Use == label.Swap {
			return true
		}
	}
	for _, sub := range n.config().Subsystems {
		for _, nc := range sub.Namespaces {
			if nc.SSD == sc.Name && nc.Replicated {
				return true
			}
		}
	}
	return sc.KVSwap > 0
}

// withdraw takes the namespaces of a drive away that is gone, until it comes back.
func (n *Node) withdraw(i int, d *openSSD) {
	sc := n.config().SSDs[i]
	if n.beginChange("the withdrawal of ssd "+sc.Name) != nil {
		return
	}
	defer n.endChange()
	gone := *d
	gone.withdrawn, gone.err = true, fmt.Errorf("ssd %s: %w", sc.Name, d.dev.Healthy())
	n.setDrive(i, &gone)
	n.log.Warn("a drive is gone; its namespaces are withdrawn until it is back", "ssd", sc.Name, "error", gone.err)
	if err := n.apply(n.cfg, lenient); err != nil {
		n.log.Error("the namespaces of a drive that is gone cannot be withdrawn", "ssd", sc.Name, "error", err)
	}
}

// setDrive puts a drive in place of another one. n.reload is held.
func (n *Node) setDrive(i int, d *openSSD) {
	all := append([]*openSSD(nil), n.drives()...)
	all[i] = d
	n.ssds.Store(&all)
}
