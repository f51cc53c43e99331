package file

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
)

const (
	// healthEvery is how often the health of an NVMe drive is read.
	healthEvery = time.Minute
	// firstWait is how long Open waits for the health, and lastWait how long Close waits for an answer under way. An
	// answer takes milliseconds, but one that hangs has the kernel's timeout (nvme_core.admin_timeout, 60 s).
	firstWait, lastWait = time.Second, 100 * time.Millisecond
	// maxSilent is for how many times in a row a drive may fail to answer. Each time the kernel resets its controller.
	// After that the drive is not asked any more.
	maxSilent = 3
)

// adminCommand carries out an admin command of the NVMe drive that is open as fd, and puts its data into data. Tests
// replace it.
var adminCommand = nvmeAdmin

// watch is the goroutine that reads the SMART log.
type watch struct {
	dev *Device
	// fd is the device, also after that is closed.
	fd int
	id nvme.IdentifyController
	// stop ends the goroutine. first is closed when it has read the log once, or could not; ended, when it has ended.
	stop, first, ended chan struct{}
}

func newWatch(d *Device, fd int) *watch {
	return &watch{dev: d, fd: fd, stop: make(chan struct{}), first: make(chan struct{}),
		ended: make(chan struct{})}
}

// watchHealth begins to read the SMART log of a block device that is an NVMe drive, if the kernel lets this process
// send admin commands (CAP_SYS_ADMIN).
func (d *Device) watchHealth() {
	if !d.block {
		return
	}
	fd, err := unix.FcntlInt(uintptr(d.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return
	}
	w := newWatch(d, fd)
	d.watch = w
	tick := time.NewTicker(healthEvery)
	go func() {
		defer tick.Stop()
		w.run(tick.C)
	}()
	within(firstWait, w.first)
}

// unwatchHealth ends what watchHealth has begun. An answer that is under way for longer is not waited for.
func (d *Device) unwatchHealth() {
	if d.watch != nil {
		close(d.watch.stop)
		within(lastWait, d.watch.ended)
	}
}

// within waits for done, but not for longer than limit.
func within(limit time.Duration, done <-chan struct{}) {
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	}
}

// run reads the SMART log at once and with each tick, until stop is closed, or the drive has not answered maxSilent
// times in a row. One that does not tell at once is not asked again.
func (w *watch) run(tick <-chan time.Time) {
	defer close(w.ended)
	defer unix.Close(w.fd)
	identify := nvme.SQE{}
	identify.SetOpcode(nvme.AdminIdentify)
	identify.Identify().SetCNS(nvme.CNSController)
	tells := adminCommand(w.fd, &identify, w.id[:]) == nil && w.read() == nil
	close(w.first)
	for silent := 0; tells && silent < maxSilent; {
		select {
		case <-w.stop:
			return
		case <-tick:
		}
		switch w.read() {
		case nil, errStatus:
			silent = 0
		default:
			silent++
		}
	}
}

// read reads the SMART log.
//
// Errors: those of nvmeAdmin.
func (w *watch) read() error {
	h := ssd.Health{At: time.Now(), WarningKelvin: w.id.WCTEMP(), CriticalKelvin: w.id.CCTEMP()}
	e := nvme.SQE{}
	e.SetOpcode(nvme.AdminGetLogPage)
	e.SetNSID(nvme.NSIDBroadcast)
	e.GetLog().SetLID(nvme.LIDSMART)
	e.GetLog().SetLenBytes(uint64(len(h.SMART)))
	// The kernel hears the drive's events. It must find what it has not heard of yet.
	e.GetLog().SetRAE(true)
	if err := adminCommand(w.fd, &e, h.SMART[:]); err != nil {
		w.dev.health.Store(nil)
		return err
	}
	w.dev.health.Store(&h)
	return nil
}

// Health implements ssd.HealthReporter: NVMe drives have some, if the process may ask them.
func (d *Device) Health() (ssd.Health, bool) {
	h := d.health.Load()
	if h == nil || d.gone.Load() {
		return ssd.Health{}, false
	}
	return *h, true
}

// errStatus: the drive has answered with another status than success.
var errStatus = errors.New("status other than success")

// nvmeAdmin asks the kernel to carry out an admin command.
//
// Errors: errStatus; the kernel's, such as ENOTTY if it is no NVMe drive, EACCES, and EINTR if the drive has not
// answered in time.
func nvmeAdmin(fd int, e *nvme.SQE, data []byte) error {
	if _, err := unix.IoctlRetInt(fd, nvmeIoctlID); err != nil {
		return err // asked first, because other drivers may take the other number for something else
	}
	return passAdmin(fd, e, data)
}
