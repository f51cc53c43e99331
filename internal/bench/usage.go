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

// usage is what this process and the target's have used up at a moment.
type usage struct {
	at       time.Time
	self     time.Duration
	target   time.Duration
	targetOK bool
	mallocs  uint64
	gcs      uint32
	credit   client.Credit
}

// takeUsage looks at both processes and at the target's credit.
func (r *run) takeUsage() usage {
	u := processUsage(r.cfg.TargetPID)
	if r.credit != nil {
		u.credit = r.credit()
	}
	return u
}

func processUsage(pid int) usage {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	u := usage{at: time.Now(), mallocs: m.Mallocs, gcs: m.NumGC}
	var ru unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &ru) == nil {
		u.self = time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
	}
	if pid != 0 {
		if d, err := processCPU(pid); err == nil {
			u.target, u.targetOK = d, true
		}
	}
	return u
}

// clockTick is the unit of times in /proc/PID/stat: USER_HZ, 100 on every Linux architecture
// that Go knows.
const clockTick = 10 * time.Millisecond

// processCPU returns the user and system time that a process has used.
func processCPU(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The second field, the name, may hold spaces and parentheses; the last ")" ends it. utime and
	// stime are fields 14 and 15, the 12th and 13th after it.
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
