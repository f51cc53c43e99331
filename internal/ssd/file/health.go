package file

import (
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
)

// healthEvery is how often the health of an NVMe drive is read.
const healthEvery = time.Minute

// adminCommand carries out an admin command of the NVMe drive that is open as fd, and puts its data into data. Tests
// replace it.
var adminCommand = nvmeAdmin

// watchHealth begins to read the SMART log of a block device that is an NVMe drive, if the kernel lets this process
// send admin commands (CAP_SYS_ADMIN). The log is read until d.unwatch is closed.
func (d *Device) watchHealth() {
	var id nvme.IdentifyController
	identify := nvme.SQE{}
	identify.SetOpcode(nvme.AdminIdentify)
	identify.Identify().SetCNS(nvme.CNSController)
	if !d.block || adminCommand(d.fd, &identify, id[:]) != nil || !d.readHealth(&id) {
		return
	}
	d.unwatch = make(chan struct{})
	d.watching.Go(func() {
		tick := time.NewTicker(healthEvery)
		defer tick.Stop()
		for {
			select {
			case <-d.unwatch:
				return
			case <-tick.C:
				d.readHealth(&id)
			}
		}
	})
}

// readHealth reads the SMART log, and reports whether the drive has told.
func (d *Device) readHealth(id *nvme.IdentifyController) bool {
	h := ssd.Health{At: time.Now(), WarningKelvin: id.WCTEMP(), CriticalKelvin: id.CCTEMP()}
	e := nvme.SQE{}
	e.SetOpcode(nvme.AdminGetLogPage)
	e.SetNSID(nvme.NSIDBroadcast)
	e.GetLog().SetLID(nvme.LIDSMART)
	e.GetLog().SetLenBytes(uint64(len(h.SMART)))
	// The kernel hears the drive's events. It must find what it has not heard of yet.
	e.GetLog().SetRAE(true)
	if adminCommand(d.fd, &e, h.SMART[:]) != nil {
		d.health.Store(nil)
		return false
	}
	d.health.Store(&h)
	return true
}

// Health implements ssd.HealthReporter: NVMe drives have some, if the process may ask them.
func (d *Device) Health() (ssd.Health, bool) {
	h := d.health.Load()
	if h == nil || d.gone.Load() {
		return ssd.Health{}, false
	}
	return *h, true
}

// unwatchHealth ends what watchHealth has begun.
func (d *Device) unwatchHealth() {
	if d.unwatch != nil {
		close(d.unwatch)
	}
	d.watching.Wait()
}

// nvmeAdminMS is how long an admin command may take.
const nvmeAdminMS = 5000

// nvmeAdmin asks the kernel to carry out an admin command.
//
// Errors: the kernel's, such as ENOTTY if it is no NVMe drive, and EACCES; EIO for a status other than success.
func nvmeAdmin(fd int, e *nvme.SQE, data []byte) error {
	if _, err := unix.IoctlRetInt(fd, nvmeIoctlID); err != nil {
		return err // asked first, because other drivers may take the other number for something else
	}
	return passAdmin(fd, e, data)
}
