package serve_test

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// cpuTime is the processor time that this process has used.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// cpuTimeOf is the processor time that a process has used.
func cpuTimeOf(pid int) (time.Duration, error) {
	var ts unix.Timespec
	// The clock of a process, as clock_getcpuclockid(3) makes it.
	if err := unix.ClockGettime(int32(^pid<<3|2), &ts); err != nil {
		return 0, os.NewSyscallError("clock_gettime", err)
	}
	return time.Duration(ts.Nano()), nil
}
