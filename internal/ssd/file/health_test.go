package file

import (
	"testing"
	"time"

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
			return errStatus
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
	<-d.watch.ended
	errs = unix.ENODEV
	if d.watch.read() != errs {
		t.Error("a drive that is gone has told")
	}
	if h, ok := d.Health(); ok {
		t.Errorf("a drive that is gone: %+v", h)
	}
	for _, d := range []*Device{{}, {block: true}} { // a regular file, and a drive that cannot be asked
		d.watchHealth()
		if d.watch != nil {
			<-d.watch.ended
		}
		if _, ok := d.Health(); ok || d.block != (d.watch != nil) {
			t.Error("a device that cannot tell has health")
		}
		d.unwatchHealth()
	}
}

// TestCloseDoesNotWaitForADriveThatIsSlowToTell: neither does Open. The daemon has less than a second to close all
// drives, and one without requests is not one that it knows to hang.
func TestCloseDoesNotWaitForADriveThatIsSlowToTell(t *testing.T) {
	defer func(was func(int, *nvme.SQE, []byte) error) { adminCommand = was }(adminCommand)
	answer := make(chan struct{})
	var late error
	adminCommand = func(fd int, e *nvme.SQE, _ []byte) error {
		if e.Opcode() == nvme.AdminGetLogPage {
			<-answer
			var st unix.Stat_t
			late = unix.Fstat(fd, &st)
		}
		return nil
	}
	d := open(t, Config{})
	d.block = true
	closed := make(chan error, 1)
	go func() {
		d.watchHealth()
		closed <- d.Close()
	}()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("Open or Close waits for the SMART log")
	}
	close(answer)
	<-d.watch.ended
	if late != nil {
		t.Errorf("the drive was asked by a descriptor that Close has closed: %v", late)
	}
	var st unix.Stat_t
	if err := unix.Fstat(d.watch.fd, &st); err != unix.EBADF {
		t.Errorf("the descriptor is still open: %v", err)
	}
}

// TestADriveThatDoesNotAnswerIsNotAskedForEver: each time the kernel resets its controller.
func TestADriveThatDoesNotAnswerIsNotAskedForEver(t *testing.T) {
	defer func(was func(int, *nvme.SQE, []byte) error) { adminCommand = was }(adminCommand)
	for name, answers := range map[string][]error{
		"at once": {unix.EINTR},
		"later": {nil, unix.EINTR, unix.EINTR, nil, unix.EINTR, unix.EINTR, errStatus, errStatus, errStatus, errStatus,
			unix.EINTR, unix.EINTR, unix.EINTR},
	} {
		asked := 0
		adminCommand = func(_ int, e *nvme.SQE, _ []byte) error {
			if e.Opcode() != nvme.AdminGetLogPage {
				return nil
			}
			asked++
			if asked > len(answers) {
				return nil
			}
			return answers[asked-1]
		}
		fd, err := unix.Dup(0)
		if err != nil {
			t.Fatal(err)
		}
		w := newWatch(&Device{}, fd)
		tick := make(chan time.Time)
		go w.run(tick)
		for ticks, on := 0, true; on; ticks++ {
			if ticks > len(answers) {
				close(w.stop)
				<-w.ended
				t.Errorf("%s: it is asked for ever", name)
				break
			}
			select {
			case tick <- time.Time{}:
			case <-w.ended:
				on = false
			}
		}
		if asked != len(answers) {
			t.Errorf("%s: it was asked %d times, want %d", name, asked, len(answers))
		}
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
