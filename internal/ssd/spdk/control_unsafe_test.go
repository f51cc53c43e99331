//go:build spdk && cgo && spdkstandin

package spdk_test

import (
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"jbofd/internal/bufpool"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/spdk"
	"jbofd/internal/ssd/ssdtest"
)

// The words of the stand-in's first page: enum words of standin/standin.h.
const (
	flags = iota
	blockShift
	maxTransfer
	delayNS
	hang
	fail
	failStatus
	noMemory
	refuse
	atomics
	entries
	noQueue
)

// Those that the stand-in counts in.
const (
	submits = iota + 16
	turns
	completions
	aborts
	resets
	violations
	violation
	registered
	admins
	detaches
	fuas
	deacs
	flushes
	dsms
	sends
	qpairs
)

// The flags of the stand-in.
const (
	writeZeroes uint64 = 1 << iota
	dsm
	readsZero
	cache
	noInterrupts
	noTranslation
	noRegister
	resetFails
	abortIgnored
	removed
	cut
	twice
	metadata
	backwards
	shrunk
	refusedConnect
	otherUUID
	otherNGUID
	otherEUI64
	noUUID
)

// rig is a drive on the stand-in's controller.
type rig struct {
	*testing.T
	words []uint64
	data  []byte
	dev   ssd.Device
	pool  *bufpool.Pool
	acct  *bufpool.Account
}

// standin is a controller of the stand-in.
type standin struct {
	flags     uint64
	shift     uint64 // 0: 9
	transfer  uint64 // 0: 128 KiB
	delay     time.Duration
	atomics   uint64
	sizeBytes int
	entries   uint64 // of a queue; 0: 1024
}

func pcie() spdk.Config {
	return spdk.Config{TransportID: spdk.TransportID{Transport: "pcie", Address: "0000:03:00.0"}}
}

func tcp() spdk.Config {
	return spdk.Config{TransportID: spdk.TransportID{Transport: "tcp", Address: "127.0.0.1", Service: "4420",
		SubNQN: "nqn.2026-11.example.jbofd:standin"}}
}

// newController makes a controller, which the next Open finds.
func newController(t *testing.T, s standin) *rig {
	t.Helper()
	if s.shift == 0 {
		s.shift = 9
	}
	if s.transfer == 0 {
		s.transfer = 128 << 10
	}
	if s.entries == 0 {
		s.entries = 1024
	}
	if s.sizeBytes == 0 {
		s.sizeBytes = 8 << 20
	}
	path := filepath.Join(t.TempDir(), "controller")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(int64(4096 + s.sizeBytes)); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(int(f.Fd()), 0, 4096+s.sizeBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	t.Setenv("SPDK_STANDIN", path)
	r := &rig{T: t, words: unsafe.Slice((*uint64)(unsafe.Pointer(&b[0])), 512), data: b[4096:]}
	r.words[flags], r.words[blockShift], r.words[maxTransfer] = s.flags, s.shift, s.transfer
	r.words[delayNS], r.words[atomics], r.words[entries] = uint64(s.delay), s.atomics, s.entries
	if r.pool, err = bufpool.New(bufpool.Config{TotalBytes: 16 << 20}); err != nil {
		t.Fatal(err)
	}
	r.acct = r.pool.Account("test")
	return r
}

// open opens the controller, and checks at the end what the stand-in has seen.
func (r *rig) open(cfg spdk.Config) (ssd.Device, error) {
	cfg.Name, cfg.Pool, cfg.Environment.PCI = "test", r.pool, true
	d, err := spdk.Open(cfg)
	if err != nil {
		return nil, err
	}
	r.Cleanup(func() {
		if err := d.Close(); err != nil {
			r.Error(err)
		}
		if n := r.get(violations); n > 0 {
			r.Errorf("%d violations of what SPDK allows, the last one in line %d of standin.c", n, r.get(violation))
		}
		if n := r.get(registered); n != 0 {
			r.Errorf("%d regions are still registered", n)
		}
		open, err := filepath.Glob("/proc/self/fd/*")
		for _, name := range open {
			if of, _ := os.Readlink(name); of == "anon_inode:[timerfd]" { // the interrupt of a queue pair
				err = fmt.Errorf("%s is still open", name)
			}
		}
		if err != nil {
			r.Error(err)
		}
	})
	return d, nil
}

func newRig(t *testing.T, s standin, cfg spdk.Config) *rig {
	t.Helper()
	r := newController(t, s)
	var err error
	if r.dev, err = r.open(cfg); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) get(word int) uint64    { return atomic.LoadUint64(&r.words[word]) }
func (r *rig) set(word int, n uint64) { atomic.StoreUint64(&r.words[word], n) }
func (r *rig) raise(f uint64)         { atomic.OrUint64(&r.words[flags], f) }
func (r *rig) lower(f uint64)         { atomic.AndUint64(&r.words[flags], ^f) }
func (r *rig) queue(depth int) ssd.Queue {
	r.Helper()
	return ssdtest.OpenQueue(r, r.dev, depth)
}

// buffer returns memory of the pool.
func (r *rig) buffer(n int) []byte {
	r.Helper()
	return ssdtest.Buffer(r, r.pool, r.acct, n)
}
