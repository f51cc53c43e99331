//go:build spdk && cgo && spdktarget

package spdk_test

import (
	"flag"
	"fmt"
	"strings"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/spdk"
	"jbofd/internal/ssd/ssdtest"
)

// target is a namespace whose content is lost: TRANSPORT ADDRESS [PORT SUBNQN].
var target = flag.String("target", "", "the transport, the address, and the port and the NQN of a target")

// newTarget connects to the target.
func newTarget(t testing.TB) (ssd.Device, *bufpool.Pool) {
	t.Helper()
	f := append(strings.Fields(*target), "", "", "", "")
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	d, err := spdk.Open(spdk.Config{Name: "target", Pool: pool,
		TransportID: spdk.TransportID{Transport: f[0], Address: f[1], Service: f[2], SubNQN: f[3]}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d, pool
}

// A real SPDK, and a real target, keep the promises of package ssd.
func TestTargetConforms(t *testing.T) {
	ssdtest.Conformance(t, func(t *testing.T) ssd.Device {
		d, _ := newTarget(t)
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
	})
}

// TestTargetCosts prints what reads of 4 KiB cost this process, at several queue depths, and idling.
func TestTargetCosts(t *testing.T) {
	d, pool := newTarget(t)
	account := pool.Account("test")
	fmt.Printf("| depth | reads a second | CPU of this process a read | calls into C a read |\n|---|---|---|---|\n")
	for _, depth := range []int{1, 32, 128} {
		q, err := d.OpenQueue(depth)
		if err != nil {
			t.Fatal(err)
		}
		reqs := make([]ssd.Request, depth)
		for i := range reqs {
			b, ok := pool.Get(account, 4096)
			if !ok {
				t.Fatal("no buffer")
			}
			reqs[i] = ssd.Request{Op: ssd.Read, Offset: int64(i) * 4096, Len: 4096, Buf: b.B, Tag: uint64(i)}
		}
		done, next := make([]ssd.Completion, depth), make([]ssd.Request, 0, depth)
		before, start, calls, n := cpuTime(t), time.Now(), spdk.Crossings(q), 0
		q.Submit(reqs)
		underWay := depth
		for underWay > 0 {
			next = next[:0]
			over := time.Since(start) > 3*time.Second
			for _, c := range done[:ssd.Await(q, done, -1)] {
				if c.Err != nil {
					t.Fatal(c.Err)
				}
				n++
				underWay--
				if !over {
					next = append(next, reqs[c.Tag])
				}
			}
			underWay += q.Submit(next)
		}
		took, used := time.Since(start), cpuTime(t)-before
		fmt.Printf("| %d | %.0f | %.1f µs | %.2f |\n", depth, float64(n)/took.Seconds(), used.Seconds()*1e6/float64(n),
			float64(spdk.Crossings(q)-calls)/float64(n))
		if err := q.Close(); err != nil {
			t.Fatal(err)
		}
	}
	before := cpuTime(t)
	time.Sleep(3 * time.Second) // that nothing happens has no event
	fmt.Printf("idle: %v of CPU in 3 s\n", cpuTime(t)-before)
}
