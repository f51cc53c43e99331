//go:build costs

package vfio_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/bufpool"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/file"
	"jbofd/internal/ssd/vfio"
	"jbofd/internal/ssd/vfio/pci"
)

// TestCostsOfBackends prints what reads of 4 KiB cost: by the kernel's driver and io_uring on one drive, and by this
// driver on another one of the same kind. JBOFD_TEST_COSTS has the block device, and the address of the other drive.
// It is run by hand: docs/benchmarks.md has the figures.
func TestCostsOfBackends(t *testing.T) {
	path, address, ok := strings.Cut(os.Getenv("JBOFD_TEST_COSTS"), " ")
	if !ok {
		t.Fatal("JBOFD_TEST_COSTS has no block device and address of drives to compare")
	}
	if err := (pci.Bus{}).Bind(address, pci.Driver); err != nil {
		t.Fatal(err)
	}
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for name, open := range map[string]func() (ssd.Device, error){
			"file": func() (ssd.Device, error) {
				return file.Open(file.Config{Name: "file", Path: path, Engine: file.EngineURing, Pool: pool})
			},
			"nvme": func() (ssd.Device, error) {
				return vfio.OpenAddress(vfio.Config{Name: "nvme", Address: address, Pool: pool})
			},
		} {
			before, began := resident(t), time.Now()
			d, err := open()
			if err != nil {
				t.Fatal(err)
			}
			took, memory := time.Since(began), resident(t)-before
			idle := usage(t)
			time.Sleep(3 * time.Second)
			idle = usage(t) - idle
			t.Logf("%s: opened in %v, %d KiB, idle %.3f %%", name, took.Round(time.Millisecond), memory>>10,
				100*idle.Seconds()/3)
			what := "nvme"
			if name == "nvme" {
				what = "(" + address + ")"
			}
			for _, depth := range []int{1, 32, 128} {
				costs(t, name, what, d, pool, depth)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// costs reads at random for some seconds, as a drive of the daemon does: it looks for completions for a while, and then
// waits.
func costs(t *testing.T, name, irqs string, d ssd.Device, pool *bufpool.Pool, depth int) {
	q, err := d.OpenQueue(depth)
	if err != nil {
		t.Fatal(err)
	}
	account := pool.Account("costs")
	defer account.Close()
	reqs, comps := make([]ssd.Request, depth), make([]ssd.Completion, depth)
	for i := range reqs {
		b, ok := pool.Get(account, 4096)
		if !ok {
			t.Fatal("no buffer")
		}
		defer pool.Put(b)
		reqs[i] = ssd.Request{Op: ssd.Read, Len: 4096, Buf: b.B, Tag: uint64(i)}
	}
	blocks := d.Info().SizeBytes / 4096
	var spin ssd.Spin
	polled := d.Info().Polled
	batch, n := make([]ssd.Request, 0, depth), 0
	run := func(limit time.Duration) {
		n = 0
		for i := range reqs {
			reqs[i].Offset = rand.Int64N(blocks) * 4096
		}
		q.Submit(reqs)
		under := depth
		for end := time.Now().Add(limit); under > 0; {
			k := q.Poll(comps)
			if k == 0 {
				if w := spin.WindowNS(true); polled && w > 0 {
					for look := time.Now(); k == 0 && time.Since(look) < time.Duration(w); k = q.Poll(comps) {
						runtime.Gosched()
					}
					spin.Looked(k > 0)
				}
				if k == 0 {
					q.Wait(time.Second)
					spin.Slept()
					continue
				}
			}
			n += k
			under -= k
			batch = batch[:0]
			for _, c := range comps[:k] {
				if c.Err != nil {
					t.Fatal(c.Err)
				}
				if time.Now().Before(end) {
					r := &reqs[c.Tag]
					r.Offset = rand.Int64N(blocks) * 4096
					batch = append(batch, *r)
				}
			}
			under += q.Submit(batch)
		}
	}
	run(500 * time.Millisecond)
	calls := countCalls(t)
	interrupts, cpu, began := irqCount(t, irqs), usage(t), time.Now()
	run(4 * time.Second)
	took, cpu, interrupts := time.Since(began), usage(t)-cpu, irqCount(t, irqs)-interrupts
	t.Logf("%s QD %3d: %6.0f IOPS, %5.1f us CPU, %5.2f calls, %5.3f interrupts each", name, depth,
		float64(n)/took.Seconds(), cpu.Seconds()*1e6/float64(n), float64(calls())/float64(n),
		float64(interrupts)/float64(n))
	if err := q.Close(); err != nil {
		t.Error(err)
	}
}

// usage is the CPU time of the process.
func usage(t *testing.T) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// resident is the resident memory of the process in bytes.
func resident(t *testing.T) int {
	runtime.GC()
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.Fields(string(text))[1])
	if err != nil {
		t.Fatal(err)
	}
	return n * os.Getpagesize()
}

// irqCount sums the interrupts whose line in /proc/interrupts has a text.
func irqCount(t *testing.T, what string) (n int) {
	text, err := os.ReadFile("/proc/interrupts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if !strings.Contains(line, what) {
			continue
		}
		for _, f := range strings.Fields(line)[1:] {
			k, err := strconv.Atoi(f)
			if err != nil {
				break
			}
			n += k
		}
	}
	return n
}

// countCalls counts system calls of the process from now on, by a tracepoint of the kernel.
func countCalls(t *testing.T) (calls func() uint64) {
	const dir = "/sys/kernel/tracing"
	_ = unix.Mount("tracefs", dir, "tracefs", 0, "") // it may be there
	text, err := os.ReadFile(dir + "/events/raw_syscalls/sys_enter/id")
	if err != nil {
		t.Fatal(err)
	}
	id, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	var fds []int
	for _, th := range threads {
		tid, err := strconv.Atoi(th.Name())
		if err != nil {
			t.Fatal(err)
		}
		attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_TRACEPOINT, Config: id, Bits: unix.PerfBitInherit,
			Size: uint32(binary.Size(unix.PerfEventAttr{}))}
		fd, err := unix.PerfEventOpen(&attr, tid, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
		if err != nil {
			t.Fatal(fmt.Errorf("thread %d: %w", tid, err))
		}
		fds = append(fds, fd)
	}
	return func() (n uint64) {
		for _, fd := range fds {
			var b [8]byte
			if _, err := unix.Read(fd, b[:]); err != nil {
				t.Fatal(err)
			}
			n += binary.LittleEndian.Uint64(b[:])
			_ = unix.Close(fd)
		}
		return n
	}
}
