package vfio_test

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"jbofd/internal/ssd"
)

// interrupts is how many the kernel has counted for the I/O queues of a controller.
func interrupts(t *testing.T, address string) (n int) {
	t.Helper()
	text, err := os.ReadFile("/proc/interrupts")
	if err != nil {
		t.Fatal(err)
	}
	vectors := 0
	for line := range strings.Lines(string(text)) {
		if !strings.Contains(line, "vfio-msix[") || !strings.Contains(line, "("+address+")") ||
			strings.Contains(line, "vfio-msix[0]") {
			continue
		}
		vectors++
		for _, f := range strings.Fields(line)[1:] {
			k, err := strconv.Atoi(f)
			if err != nil {
				break
			}
			n += k
		}
	}
	if vectors == 0 {
		t.Fatalf("no interrupts of %s in /proc/interrupts:\n%s", address, text)
	}
	return n
}

// A drive sends no interrupts while its completions are found by looking, and sends them to a Wait that blocks.
func TestDriveIsQuietWhileItIsBusy(t *testing.T) {
	for _, a := range drives(t) {
		t.Run(a, func(t *testing.T) {
			d := openDrive(t, a)
			if err := d.Fallback(); err != nil {
				t.Fatal(err)
			}
			for _, depth := range []int{1, 32, 128} {
				t.Run(fmt.Sprintf("QD %d", depth), func(t *testing.T) { quietWhileBusy(t, a, d, depth) })
			}
		})
	}
}

func quietWhileBusy(t *testing.T, address string, d ssd.Device, depth int) {
	q, err := d.OpenQueue(depth)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := q.Close(); err != nil {
			t.Error(err)
		}
	}()
	reqs, comps := make([]ssd.Request, depth), make([]ssd.Completion, depth)
	for i := range reqs {
		reqs[i] = ssd.Request{Op: ssd.Read, Offset: int64(i) * 4096, Len: 4096, Buf: make([]byte, 4096), Tag: uint64(i)}
	}
	batch := func(poll func() int) {
		if n := q.Submit(reqs); n != depth {
			t.Fatalf("Submit took %d", n)
		}
		for left, end := depth, time.Now().Add(20*time.Second); left > 0; {
			if left -= poll(); time.Now().After(end) {
				t.Fatalf("%d reads are not answered", left)
			}
		}
	}
	look := func() int {
		runtime.Gosched()
		return q.Poll(comps)
	}
	wait := func() int { return ssd.Await(q, comps, 20*time.Second) }
	const batches = 50
	batch(wait)
	batch(look)
	batch(look)
	// The last interrupt of before may be counted by another processor, later than its completion is found.
	before := -1
	for n := interrupts(t, address); n != before; n = interrupts(t, address) {
		before = n
		time.Sleep(50 * time.Millisecond)
	}
	for range batches {
		batch(look)
	}
	busy := interrupts(t, address) - before
	before += busy
	for range batches {
		batch(wait)
	}
	waiting := interrupts(t, address) - before
	t.Logf("interrupts of %d reads: %d while busy, %d if each wait blocks", batches*depth, busy, waiting)
	if busy > 0 {
		t.Errorf("%d interrupts while it was busy", busy)
	}
	if waiting == 0 {
		t.Error("no interrupt for those that wait")
	}
}
