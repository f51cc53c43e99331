package main

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// watch looks at the engine's process while it is measured: at its memory, and at the page cache that its files have,
// which it empties when it is more than may be.
//
// A memory cgroup would be finer, but needs the machine's permission, and counts the page cache of one engine and the
// buffers of another as the same. With uniform keys and a page cache of a fortieth of the data it makes no difference
// which pages are dropped.
type watch struct {
	cfg *Config
	// inMemory: the file system is, so there is no page cache to limit.
	inMemory bool
	// anonPeak is the most RssAnon, beyond what it was before; final after close.
	anonBefore, anonPeak int64
	// cachePeak is the most page cache that was found since it was last cleared.
	cachePeak     atomic.Int64
	stop, stopped chan struct{}
	once          sync.Once
}

// watchPeriod is how often it looks: a fast drive reads 20 MB in that time. The memory is looked at every
// memoryPeriods.
const (
	watchPeriod   = 20 * time.Millisecond
	memoryPeriods = 5
)

func startWatch(cfg *Config) *watch {
	w := &watch{cfg: cfg, anonBefore: statusBytes(cfg.pid(), "RssAnon"), stop: make(chan struct{}),
		stopped: make(chan struct{})}
	var st unix.Statfs_t
	w.inMemory = unix.Statfs(cfg.Dir, &st) == nil && (st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC)
	go w.run()
	return w
}

// close ends the watch; its figures are final then. Idempotent.
func (w *watch) close() {
	w.once.Do(func() { close(w.stop) })
	<-w.stopped
}

// run looks at the files, which takes time when they are many, only after so much was read and written that the page
// cache may hold more than it should.
func (w *watch) run() {
	defer close(w.stopped)
	tick := time.NewTicker(watchPeriod)
	defer tick.Stop()
	var moved, held int64 // when the page cache was last looked at
	for n := 0; ; n++ {
		if n%memoryPeriods == 0 {
			w.anonPeak = max(w.anonPeak, statusBytes(w.cfg.pid(), "RssAnon")-w.anonBefore)
		}
		if u := takeUsage(w.cfg.pid()); !w.inMemory && w.cfg.PageCacheBytes >= 0 &&
			held+u.read+u.written-moved > w.cfg.PageCacheBytes {
			moved, held = u.read+u.written, w.pageCache()
			w.note(held)
			if held > w.cfg.PageCacheBytes {
				w.drop()
				held = 0
			}
		}
		select {
		case <-tick.C:
		case <-w.stop:
			return
		}
	}
}

// note remembers the highest.
func (w *watch) note(cached int64) {
	if cached > w.cachePeak.Load() {
		w.cachePeak.Store(cached)
	}
}

// pageCache returns how much of the files is in memory.
func (w *watch) pageCache() (total int64) {
	walk(w.cfg.Dir, func(path string, _ int64) {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return // it was deleted meanwhile
		}
		var st unix.Cachestat_t
		if unix.Cachestat(uint(fd), &unix.CachestatRange{}, &st, 0) == nil {
			total += int64(st.Cache) * pageBytes
		}
		_ = unix.Close(fd) // it was for reading
	})
	return total
}

// drop empties the page cache of the files, but for what is dirty.
func (w *watch) drop() {
	adviseMappings(w.cfg.Dir, unix.MADV_PAGEOUT) // mapped pages stay otherwise
	walk(w.cfg.Dir, func(path string, size int64) {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return
		}
		// Without the last page, which a log is about to go on in.
		if n := size &^ (pageBytes - 1); n > 0 {
			_ = unix.Fadvise(fd, 0, n, unix.FADV_DONTNEED) // if it does not, the next look says so
		}
		_ = unix.Close(fd)
	})
}

const pageBytes = 4096

// adviseMappings gives the kernel an advice about the files below dir that are mapped. It must be one that is harmless
// should a mapping have become another one meanwhile.
func adviseMappings(dir string, advice uintptr) {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return
	}
	for line := range bytes.Lines(maps) {
		if !bytes.Contains(line, []byte(dir)) {
			continue
		}
		var from, to uintptr
		if _, err := fmt.Sscanf(string(line), "%x-%x", &from, &to); err == nil {
			_, _, _ = unix.Syscall(unix.SYS_MADVISE, from, to-from, advice)
		}
	}
}

// walk calls f with every file below dir and its length.
func walk(dir string, f func(path string, size int64)) {
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil // files come and go
		}
		if info, err := d.Info(); err == nil {
			f(path, info.Size())
		}
		return nil
	})
}

// diskBytes returns how much disk space the files of a directory occupy, without their holes.
func diskBytes(dir string) (total int64) {
	walk(dir, func(path string, _ int64) {
		var st syscall.Stat_t
		if syscall.Stat(path, &st) == nil {
			total += st.Blocks * 512
		}
	})
	return total
}

// usage is what a process has used up at a moment.
type usage struct {
	at  time.Time
	cpu time.Duration
	// read and written count what went to and from the drive; writing to the page cache counts at once.
	read, written int64
}

func takeUsage(pid int) usage {
	u := usage{at: time.Now()}
	// The clock of a process's CPU time: clock_getcpuclockid(3).
	var cpu unix.Timespec
	if unix.ClockGettime(int32(^pid<<3|2), &cpu) == nil {
		u.cpu = time.Duration(cpu.Nano())
	}
	if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid)); err == nil {
		u.read, u.written = field(b, "read_bytes"), field(b, "write_bytes")-field(b, "cancelled_write_bytes")
	}
	return u
}

// statusBytes is a field of the process's status that is in kB.
func statusBytes(pid int, name string) int64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	return field(b, name) << 10
}

// field is the number that follows "name:" at the begin of a line, or 0.
func field(b []byte, name string) int64 {
	for line := range bytes.Lines(b) {
		if rest, ok := bytes.CutPrefix(line, []byte(name+":")); ok {
			if f := bytes.Fields(rest); len(f) > 0 {
				n, _ := strconv.ParseInt(string(f[0]), 10, 64) // 0 if it is no number
				return n
			}
		}
	}
	return 0
}
