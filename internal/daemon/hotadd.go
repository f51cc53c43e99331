package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/config"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/publish"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/label"
	"jbofd/internal/ssd/spdk"
	"jbofd/internal/ssd/vfio/pci"
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

// hotAdd is what attends to the drives.
type hotAdd struct {
	// now has a value for each drive that is to be opened at once if it is not served.
	now []chan struct{}
	// attending is for the goroutines of the drives, and those that open devices.
	attending sync.WaitGroup
	// mu guards the rest: how many openings of each drive are under way, and whether nobody waits for their end any
	// more.
	mu    sync.Mutex
	under map[string]int
	left  bool
}

const (
	// lookForDrivesEvery is how often drives are looked for that are not served.
	lookForDrivesEvery = time.Second
	// maxOpenWait bounds the time between two tries to open a drive that is there, and cannot be opened.
	maxOpenWait = 10 * time.Second
)

// awaited is a drive that is looked for, or checked.
type awaited struct {
	// at is the earliest time of the next try, or the one at which it was taken into service. wait is the time between
	// the last two tries, also if the drive was in service between them: one that vanishes again at once does not come
	// back each second.
	at   time.Time
	wait time.Duration
	// refused: it has another label than it may have. It is not tried again before it has vanished, or a reload.
	refused bool
	// asked: a reload wants it to be tried, also if earlier tries have not ended.
	asked bool
	// said is the last error that is in the log.
	said string
	// flushed is where the outcome of a Flush comes that has not been answered yet; nil: there is none.
	flushed chan error
}

// again has all drives that are not served be opened at once.
func (h *hotAdd) again() {
	for _, now := range h.now {
		select {
		case now <- struct{}{}:
		default:
		}
	}
}

// attendDrives begins to attend to drives that appear and vanish, each in a goroutine of its own: one that hangs does
// not keep the others from anything. They end with n.stopping. Once awaitChange has seen the end of the changes they
// change nothing any more.
func (n *Node) attendDrives() {
	for i, d := range n.drives() {
		w := &awaited{refused: pointless(d.err)}
		n.hot.attending.Go(func() { n.attend(i, w) })
	}
}

// attend attends to one drive.
func (n *Node) attend(i int, w *awaited) {
	tick := time.NewTicker(n.lookEvery())
	defer tick.Stop()
	for {
		select {
		case <-n.stopping:
			return
		case <-tick.C:
		case <-n.hot.now[i]:
			w.at, w.refused, w.asked = time.Time{}, false, true
		}
		if !n.isStopping() {
			n.attendDrive(i, w)
		}
	}
}

// attendDrive opens a drive that is not served, and withdraws one that is gone.
func (n *Node) attendDrive(i int, w *awaited) {
	d, now := n.drives()[i], time.Now()
	switch {
	case now.Before(w.at):
	case d.serves():
		w.asked = false
		if !errors.Is(d.dev.Healthy(), ssd.ErrGone) {
			if now.Sub(w.at) > maxOpenWait {
				w.wait = 0
			}
			return
		}
		if n.heldAtStart(n.config().SSDs[i], d.label.Label()) {
			return
		}
		w.at = now.Add(n.longer(w))
		if w.isGone(d) {
			n.withdraw(i, d)
			*w = awaited{at: w.at, wait: w.wait}
		}
	case (!w.refused || errors.Is(n.present(i), os.ErrNotExist)) && n.mayOpen(d.name, w.asked):
		w.refused, w.asked = false, false
		if o := n.open(n.config().SSDs[i], d.label == nil); o != nil {
			n.arrived(i, w, o)
		}
	}
}

// isGone reports whether a drive fails what it is asked, because it is gone. A file that was deleted works all the
// same.
func (w *awaited) isGone(d *openSSD) bool {
	if w.flushed == nil {
		w.flushed = make(chan error, 1)
		go func(flushed chan<- error) { flushed <- publish.Flush(d.drive) }(w.flushed)
	}
	select {
	case err := <-w.flushed:
		w.flushed = nil
		return errors.Is(err, ssd.ErrGone)
	case <-time.After(lookForDrivesEvery):
		return false
	}
}

func (n *Node) lookEvery() time.Duration {
	return cmp.Or(n.opts.LookForDrivesEvery, lookForDrivesEvery)
}

// longer is how long to wait for the next try.
func (n *Node) longer(w *awaited) time.Duration {
	w.wait = min(max(2*w.wait, n.lookEvery()), maxOpenWait)
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
	if sc.Backend == "spdk" {
		return nil // only an attempt to connect tells
	}
	_, err := os.Stat(sc.Path)
	return err
}

// absent reports whether a device cannot be opened because it is not there. Trying again costs little.
func absent(err error) bool {
	for _, is := range []error{os.ErrNotExist, unix.ENXIO, unix.ENODEV, unix.ENOMEDIUM, pci.ErrAbsent, pci.ErrDriver,
		spdk.ErrAttach} {
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

// errBusy: a change that is under way still uses what the drive was before.
var errBusy = errors.New("a namespace that was on it is still being resized or erased")

// errNamespaces: its namespaces cannot be made as the configuration says, for good (unfit) or for now.
var errNamespaces = errors.New("its namespaces cannot be served")

// pointless reports whether trying again does not help, because of what is on the drive.
func pointless(err error) bool {
	for _, is := range []error{label.ErrForeign, label.ErrCorrupt, label.ErrVersion, label.ErrBlank, errOther,
		errAtStart} {
		if errors.Is(err, is) {
			return true
		}
	}
	return errors.As(err, new(unfit))
}

// arrived takes a drive into service that was opened, or says why it cannot be.
func (n *Node) arrived(i int, w *awaited, o *openedDevice) {
	*w = awaited{wait: w.wait, said: w.said}
	sc := n.config().SSDs[i]
	err := o.err
	if err == nil {
		err = n.takeIntoService(i, sc, o)
	}
	switch {
	case err == nil:
		*w = awaited{at: time.Now(), wait: w.wait}
		n.resizeReturned(sc)
		return
	case errors.Is(err, errStopping):
		return
	case absent(err):
		w.at = time.Now().Add(n.lookEvery())
		return
	}
	w.at, w.refused = time.Now().Add(n.longer(w)), pointless(err)
	if w.said != err.Error() {
		w.said = err.Error()
		n.log.Warn("a drive that is not in service cannot be opened", "ssd", sc.Name, "error", err)
	}
	n.stillOut(i, sc, err)
}

// stillOut notes why a drive is not in service.
func (n *Node) stillOut(i int, sc config.SSD, err error) {
	n.reload.Lock()
	defer n.reload.Unlock()
	if d := *n.drives()[i]; !d.serves() && !n.isStopping() {
		d.err = fmt.Errorf("ssd %s: %w", sc.Name, err)
		n.setDrive(i, &d)
		n.missing(sc, err)
	}
}

// takeIntoService makes a drive of a device that was opened, and gives hosts its namespaces. On error nothing of it
// stays open.
//
// Errors: errStopping, errOther, errAtStart, errBusy, errNamespaces; those of openDrive and DrainDrive.
func (n *Node) takeIntoService(i int, sc config.SSD, o *openedDevice) (err error) {
	if err := n.mayServe(n.drives()[i], sc, o.label.Label()); err != nil {
		o.close()
		return err
	}
	d, err := n.openDrive(sc, o)
	if err != nil {
		return err
	}
	d.returns = true
	out, err := n.exchange(i, sc, d)
	for _, d := range out { // not before: the drive may take its time
		n.release(d)
	}
	return err
}

// exchange puts a drive in place of the one that is gone, and returns those that hosts do not use any more.
func (n *Node) exchange(i int, sc config.SSD, d *openSSD) (out []*openSSD, err error) {
	if err := n.beginDriveChange("the opening of ssd " + sc.Name); err != nil {
		d.opened.close()
		return nil, err
	}
	defer n.endDriveChange()
	if before := n.drives()[i]; before.drive != nil {
		err := errBusy
		if n.working != before.drive {
			err = n.publisher.Drain(before.drive, n.stopping)
		}
		if err != nil {
			d.opened.close()
			return nil, err
		}
		out = append(out, before)
	}
	n.service.ReplaceSSD(i, d.drive)
	n.setDrive(i, d)
	n.measure(d)
	if err := n.apply(n.cfg, lenient); err != nil {
		// Without it, as before: the namespaces of the others must not depend on it.
		err = fmt.Errorf("%w: %w", errNamespaces, err)
		without := *d
		without.withdrawn, without.err = true, fmt.Errorf("ssd %s: %w", sc.Name, err)
		n.setDrive(i, &without)
		n.missing(sc, err)
		return append(out, d), err
	}
	return out, nil
}

// release closes a drive that hosts do not use any more, as soon as it has answered what it has. A stop ends that: then
// it is closed with the others if it is still among Node.drives; if another one has its place, the end of the process
// closes it.
func (n *Node) release(d *openSSD) {
	for said := false; ; said = true {
		err := n.publisher.Drain(d.drive, n.stopping)
		if err == nil {
			d.opened.close()
			return
		}
		if errors.Is(err, target.ErrStopped) {
			return
		}
		if !said {
			n.log.Error("a drive that is not in service has not answered and stays open", "ssd", d.name, "error", err)
		}
	}
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
	if n.beginDriveChange("the withdrawal of ssd "+sc.Name) != nil {
		return
	}
	defer n.endDriveChange()
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
