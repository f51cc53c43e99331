//go:build spdk && cgo

package spdk_test

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// cpuTime is what this process has used of processors.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
