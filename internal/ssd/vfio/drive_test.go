package vfio_test

import (
	"errors"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/ssdtest"
	"jbofd/internal/ssd/vfio"
	"jbofd/internal/ssd/vfio/pci"
)

// drives are addresses of NVMe controllers whose content the tests may overwrite, separated by spaces.
func drives(t *testing.T) []string {
	t.Helper()
	all := strings.Fields(os.Getenv("JBOFD_TEST_NVME"))
	if len(all) == 0 {
		t.Skip("no drive: JBOFD_TEST_NVME has no addresses of NVMe controllers that may be overwritten")
	}
	return all
}

// openDrive binds and opens a controller. Its first 4 MiB are zeroes.
func openDrive(t *testing.T, address string) *vfio.Device {
	t.Helper()
	if err := (pci.Bus{}).Bind(address, pci.Driver); err != nil {
		t.Fatal(err)
	}
	f, err := pci.Bus{}.Open(address)
	if err != nil {
		t.Fatal(err)
	}
	d, err := vfio.Open(vfio.Config{Name: "test", Address: address}, f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	q, err := d.OpenQueue(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.WriteZeroes, Len: 4 << 20}); err != nil {
		t.Fatal(err)
	}
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	return d
}

// A drive keeps the promises of package ssd.
func TestDriveConforms(t *testing.T) {
	for _, a := range drives(t) {
		t.Run(a, func(t *testing.T) {
			ssdtest.Conformance(t, func(t *testing.T) ssd.Device {
				d := openDrive(t, a)
				t.Logf("%+v", d.Info())
				return d
			})
		})
	}
}

// A drive that takes longer than it may has its commands aborted and its controller reset, and each command is answered
// once. The drive at JBOFD_TEST_SLOW_NVME takes a second for each.
func TestSlowDriveIsReset(t *testing.T) {
	address := os.Getenv("JBOFD_TEST_SLOW_NVME")
	if address == "" {
		t.Skip("no drive: JBOFD_TEST_SLOW_NVME has no address of a slow NVMe controller that may be overwritten")
	}
	var events [ssd.HealthEvents]atomic.Int64
	d, err := vfio.OpenAddress(vfio.Config{Name: "test", Address: address, Timeout: 400 * time.Millisecond,
		AbortTimeout: 200 * time.Millisecond, Event: func(kind ssd.HealthEvent, what string) {
			events[kind].Add(1)
			t.Log(kind, what)
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}()
	q, err := d.OpenQueue(16)
	if err != nil {
		t.Fatal(err)
	}
	var reqs []ssd.Request
	for i := range 16 {
		reqs = append(reqs, ssd.Request{Op: ssd.Write, Offset: int64(i) << 16, Len: 4096, Buf: make([]byte, 4096),
			Tag: uint64(i)})
	}
	if n := q.Submit(reqs); n != len(reqs) {
		t.Fatalf("%d of %d were taken", n, len(reqs))
	}
	answered, failed := map[uint64]int{}, 0
	var done [16]ssd.Completion
	for end := time.Now().Add(time.Minute); len(answered) < len(reqs) && time.Now().Before(end); {
		for _, c := range done[:ssd.Await(q, done[:], time.Second)] {
			answered[c.Tag]++
			if c.Err != nil {
				failed++
			}
			if answered[c.Tag] > 1 || c.Err != nil && !errors.Is(c.Err, ssd.ErrMedia) {
				t.Errorf("request %d is answered %d times: %v", c.Tag, answered[c.Tag], c.Err)
			}
		}
	}
	t.Logf("%d of %d are answered, %d by an error, after %d aborts and %d resets", len(answered), len(reqs), failed,
		events[ssd.EventTimeout].Load(), events[ssd.EventReset].Load())
	if len(answered) != len(reqs) || events[ssd.EventTimeout].Load() == 0 || events[ssd.EventReset].Load() == 0 {
		t.Error("that is not as it should be")
	}
	if err := d.Healthy(); err != nil {
		t.Error(err)
	}
}
