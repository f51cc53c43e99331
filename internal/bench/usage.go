package bench

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/client"
)

// Usage is the resource usage of this process up to a point in time.
type Usage struct {
	At      time.Time
	CPU     time.Duration
	Mallocs uint64
	GCs     uint32
}

// TakeUsage returns the current usage of this process.
func TakeUsage() Usage {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	u := Usage{At: time.Now(), Mallocs: m.Mallocs, GCs: m.NumGC}
	var ru unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &ru) == nil {
		u.CPU = time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
	}
	return u
}

// CPUPercentSince returns the CPU usage since from, in percent of one processor.
func (u *Usage) CPUPercentSince(from *Usage) float64 {
	return percent(u.CPU-from.CPU, u.At.Sub(from.At))
}

// AllocsPer returns the number of allocations since from, divided by n operations.
func (u *Usage) AllocsPer(n uint64, from *Usage) float64 {
	if n == 0 {
		return 0
	}
	return float64(u.Mallocs-from.Mallocs) / float64(n)
}

func percent(part, whole time.Duration) float64 { return 100 * part.Seconds() / whole.Seconds() }

// usage is the resource usage of this process and of the target's process up to a point in time, and the target's
// credit.
type usage struct {
	Usage
	target   time.Duration
	targetOK bool
	credit   client.Credit
}

// takeUsage returns the current usage of both processes and the target's credit.
func (r *run) takeUsage() usage {
	u := usage{Usage: TakeUsage()}
	if r.credit != nil {
		u.credit = r.credit()
	}
	if pid := r.cfg.TargetPID; pid != 0 {
		if d, err := processCPU(pid); err == nil {
			u.target, u.targetOK = d, true
		}
	}
	return u
}

// clockTick is the unit of times in /proc/PID/stat: USER_HZ, which is 100 on all Linux architectures that Go supports.
const clockTick = 10 * time.Millisecond

// processCPU returns the user and system time that a process has used.
func processCPU(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The second field, the name, may contain spaces and parentheses; it ends at the last ")". The fields utime and
	// stime are fields 14 and 15, which are the 12th and 13th after the name.
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields after the name", pid, len(f))
	}
	ut, err1 := strconv.ParseInt(string(f[11]), 10, 64)
	st, err2 := strconv.ParseInt(string(f[12]), 10, 64)
	if err1 != nil || err2 != nil {
		return 0, fmt.Errorf("/proc/%d/stat: utime %q, stime %q", pid, f[11], f[12])
	}
	return time.Duration(ut+st) * clockTick, nil
}
