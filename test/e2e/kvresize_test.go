package e2e

import (
	"bytes"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// resizeSetup is a daemon with a namespace of keys of that size.
func resizeSetup(mib int) setup {
	return setup{ssds: "  - {name: ssd0, backend: file, path: @DIR@/ssd0.img, size: 320MiB, create: true, " +
		"calibrate: false}\n",
		subsystems: fmt.Sprintf("  - nqn: %s\n    allow_any_host: true\n    namespaces:\n"+
			"      - {nsid: 1, ssd: ssd0, size: %dMiB, type: kv}\n", nqnA, mib)}
}

// extentBytes returns how long the extent of a namespace is, 0 if it has none.
func (d *daemon) extentBytes(nsid uint32) int64 {
	d.t.Helper()
	var drives struct {
		Items []struct {
			Extents []struct {
				NSID        uint32
				LengthBytes int64
			}
		}
	}
	if err := d.admin("GET", "/v1/ssds", &drives); err != nil {
		d.t.Fatal(err)
	}
	for _, drive := range drives.Items {
		for _, e := range drive.Extents {
			if e.NSID == nsid {
				return e.LengthBytes
			}
		}
	}
	return 0
}

// TestAKVNamespaceIsResizedUnderLoadAndKills: it shrinks and grows while a host writes, and the daemon is killed in
// between. What was acknowledged is there, and after each start the namespace gets the size that is configured.
func TestAKVNamespaceIsResizedUnderLoadAndKills(t *testing.T) {
	t.Parallel()
	d := start(t, resizeSetup(300))
	n := openKV(t, d.connect(d.options(hostA, nqnA)), 1)
	const keys = 400
	versions := [keys]int{}
	round, acknowledged := 0, atomic.Int64{}
	// work overwrites all keys and notes what was acknowledged, until a Put fails.
	work := func() {
		round++
		var all sync.WaitGroup
		for w := range 8 {
			all.Go(func() {
				for i := w; i < keys; i += 8 {
					if n.Put(ctx(t), fmt.Appendf(nil, "k%d", i), value(fmt.Sprint(i), round, 60_000)) != nil {
						return
					}
					versions[i] = round
					acknowledged.Add(1)
				}
			})
		}
		all.Wait()
	}
	check := func() {
		t.Helper()
		for i, version := range versions {
			got, err := n.Value(ctx(t), fmt.Appendf(nil, "k%d", i))
			ok := false
			for v := version; v <= round && err == nil; v++ { // a later one may have been written but not answered
				ok = ok || bytes.Equal(got, value(fmt.Sprint(i), v, 60_000))
			}
			if !ok {
				t.Fatalf("key %d: %d bytes, %v, want version %d", i, len(got), err, version)
			}
		}
	}
	sized := func(mib int) {
		t.Helper()
		within(t, 4*wait, "the namespace has the size that is configured",
			func() bool { return d.extentBytes(1) == int64(mib)<<20 })
	}
	work()
	for i, mib := range []int{80, 300, 90, 240} {
		d.write(resizeSetup(mib))
		d.signal(syscall.SIGHUP)
		working := make(chan struct{})
		go func() {
			defer close(working)
			work()
		}()
		if i%2 == 0 {
			from, more := acknowledged.Load(), int64(5+30*i)
			within(t, wait, "the host writes", func() bool { return acknowledged.Load() >= from+more })
			d.kill() // somewhere in the resize
			d.launch()
		}
		<-working
		sized(mib)
		check()
	}
	work()
	check()
}
