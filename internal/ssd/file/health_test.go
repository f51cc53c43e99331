package file

import (
	"testing"

	"golang.org/x/sys/unix"

	"jbofd/internal/nvme"
)

// What the kernel's NVMe driver answers is the health of the drive. A drive that does not answer any more has none.
func TestHealthOfAnNVMeDrive(t *testing.T) {
	defer func(was func(int, *nvme.SQE, []byte) error) { adminCommand = was }(adminCommand)
	var want nvme.SMARTLog
	want.SetTemperature(333)
	want.SetAvailableSpare(12)
	var errs error
	adminCommand = func(_ int, e *nvme.SQE, data []byte) error {
		switch {
		case errs != nil:
			return errs
		case e.Opcode() == nvme.AdminIdentify && len(data) == nvme.IdentifySize:
			var id nvme.IdentifyController
			id.SetWCTEMP(350)
			id.SetCCTEMP(360)
			copy(data, id[:])
		case e.Opcode() == nvme.AdminGetLogPage && e.GetLog().LID() == nvme.LIDSMART && e.GetLog().RAE() &&
			e.GetLog().LenBytes() == uint64(len(data)) && e.NSID() == nvme.NSIDBroadcast:
			copy(data, want[:])
		default:
			return unix.EIO
		}
		return nil
	}
	d := &Device{block: true}
	d.watchHealth()
	h, ok := d.Health()
	if !ok || h.SMART != want || h.WarningKelvin != 350 || h.CriticalKelvin != 360 || h.At.IsZero() {
		t.Errorf("%+v, %v", h, ok)
	}
	d.unwatchHealth()
	errs = unix.ENODEV
	var id nvme.IdentifyController
	if d.readHealth(&id) {
		t.Error("a drive that is gone has told")
	}
	if h, ok := d.Health(); ok {
		t.Errorf("a drive that is gone: %+v", h)
	}
	for _, d := range []*Device{{}, {block: true}} { // a regular file, and a drive that cannot be asked
		d.watchHealth()
		if _, ok := d.Health(); ok || d.unwatch != nil {
			t.Error("a device that cannot tell has health")
		}
		d.unwatchHealth()
	}
}

// A file is no NVMe drive: the kernel says so.
func TestAdminCommandsOfAFile(t *testing.T) {
	var fds [2]int
	if err := unix.Pipe(fds[:]); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	if err := nvmeAdmin(fds[0], &nvme.SQE{}, make([]byte, 512)); err != unix.ENOTTY {
		t.Errorf("%v, want ENOTTY", err)
	}
	if nvmeIoctlID != 0x4e40 || nvmeIoctlAdmin != 0xc0484e41 {
		t.Errorf("requests %#x and %#x", nvmeIoctlID, nvmeIoctlAdmin)
	}
}
