package e2e

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/nvme"
)

// rangeHost is a host with a key-value namespace of a daemon.
type rangeHost struct {
	*daemon
	c *client.Controller
	n *kv.Namespace
}

func (d *daemon) rangeHost() *rangeHost {
	c := d.connect(d.options(hostA, nqnA))
	return &rangeHost{d, c, openKV(d.t, c, 2)}
}

// change makes writes of random keys of n, and returns the last version.
func (h *rangeHost) change(rng *rand.Rand, writes, n int) (last uint64) {
	h.t.Helper()
	for range writes {
		key, err := fmt.Appendf(nil, "key %d", rng.IntN(n)), error(nil)
		version := uint64(0)
		switch rng.IntN(8) {
		case 0:
			version, err = h.n.DeleteWith(ctx(h.t), key, kv.DeleteOptions{})
		case 1:
			version, err = h.n.DeleteWith(ctx(h.t), key, kv.DeleteOptions{Tombstone: true})
		case 2:
			version, err = h.n.PutWith(ctx(h.t), key, value("v", 1, 100), kv.PutOptions{TTL: time.Hour})
		default:
			version, err = h.n.PutWith(ctx(h.t), key, value("v", rng.IntN(1000), rng.IntN(16<<10)), kv.PutOptions{})
		}
		if err != nil && !errors.Is(err, kv.ErrKeyNotFound) {
			h.t.Fatal(err)
		}
		last = max(last, version)
	}
	return last
}

// identified makes a write with an identity, or a retry of it, and returns its version.
func (h *rangeHost) identified(seq uint64, flags uint8) uint64 {
	h.t.Helper()
	cmd := client.Command{Data: make([]byte, nvme.KVWriteHeaderSize+8)}
	cmd.SQE.SetOpcode(nvme.CmdKVXStore)
	cmd.SQE.SetNSID(2)
	cmd.SQE.KV().SetKey(fmt.Appendf(nil, "write %d", seq))
	cmd.SQE.KV().SetLenBytes(uint32(len(cmd.Data)))
	w := (*nvme.KVWriteHeader)(cmd.Data)
	w.SetClient(4711)
	w.SetSequence(seq)
	w.SetKeep(3600)
	w.SetFlags(flags)
	comp, err := h.c.Do(ctx(h.t), "a write", false, &cmd)
	if err != nil || !comp.Status.OK() {
		h.t.Fatalf("%v, %v", comp.Status, err)
	}
	return comp.Result
}

// copied is what a CopyOut of a range has, by key. The digest must be the same if and only if this is.
func (h *rangeHost) copied(r kv.Range, at time.Time) (all map[string]string, sums []kv.Sum) {
	h.t.Helper()
	all = map[string]string{}
	for b, err := range h.n.CopyOut(ctx(h.t), r) {
		if err != nil {
			h.t.Fatal(err)
		}
		for e := range nvme.KVRange(b).Entries() {
			all[string(e.Key())] = string(e)
		}
	}
	sums, err := h.n.Digest(ctx(h.t), r, 16, at)
	if err != nil {
		h.t.Fatal(err)
	}
	return all, sums
}

// sameRange fails unless two daemons have the same in a range, or something else if that is wanted.
func sameRange(t *testing.T, when string, a, b *rangeHost, r kv.Range, want bool) {
	t.Helper()
	at := time.Now().Add(time.Minute)
	x, sumX := a.copied(r, at)
	y, sumY := b.copied(r, at)
	sums := slices.EqualFunc(sumX, sumY, func(a, b kv.Sum) bool { return a.Count == b.Count && a.Sum == b.Sum })
	if entries := maps.Equal(x, y); entries != want || sums != want {
		t.Errorf("%s: %d and %d entries are the same: %v; digests: %v", when, len(x), len(y), entries, sums)
	}
}

// restart begins something that takes a while, kills the daemon meanwhile, starts it again, and waits for the end.
func (d *daemon) restart(after time.Duration, run func() error) {
	d.t.Helper()
	began, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		close(began)
		ended <- run()
	}()
	<-began
	<-time.After(after) // some time within what is going on; every time is as good
	d.relaunch()
	if err := <-ended; err != nil {
		d.t.Fatal(err)
	}
}

// relaunch kills the daemon and starts it again when the kernel has released its drive, which may take seconds on a
// busy machine after the process has ended.
func (d *daemon) relaunch() {
	d.t.Helper()
	d.kill()
	d.awaitRelease()
	d.launch()
}

// awaitRelease waits until nobody has the drive of a daemon that has ended.
func (d *daemon) awaitRelease() {
	d.t.Helper()
	f, err := os.Open(filepath.Join(d.dir, "ssd0.img"))
	if err != nil {
		d.t.Fatal(err)
	}
	defer f.Close()
	eventually(d.t, "the drive is released", func() bool {
		return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil
	})
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_UN); err != nil {
		d.t.Fatal(err)
	}
}

// TestARangeIsCopiedToAnotherDaemon: two daemons have a partition with the same hash seed, and different histories.
// After copies and drops, during which the second one is killed, it has what the first one has.
func TestARangeIsCopiedToAnotherDaemon(t *testing.T) {
	t.Parallel()
	rng := random(t)
	first, second := start(t, kvSetup(fileSSD)), newDaemon(t, kvSetup(fileSSD))
	first.rangeHost().change(rng, 50, 200)
	first.term()
	image, err := os.ReadFile(filepath.Join(first.dir, "ssd0.img"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(second.dir, "ssd0.img"), image, 0o600); err != nil {
		t.Fatal(err)
	}
	first.launch()
	second.launch()
	a, b := first.rangeHost(), second.rangeHost()
	sameRange(t, "at the beginning", a, b, kv.All(), true)
	// A version is of one write (docs/ranges.md), so those of the second daemon begin where the first does not come.
	apart := kv.PutOptions{If: kv.IfNewer, Version: 1 << 20}
	if _, err := b.n.PutWith(ctx(t), []byte("key 0"), nil, apart); err != nil {
		t.Fatal(err)
	}
	clock := max(a.change(rng, 300, 300), b.change(rng, 200, 400))
	if clock <= apart.Version {
		t.Fatalf("versions up to %d are those of both daemons", clock)
	}
	var versions [3]uint64
	for i := range versions {
		versions[i] = a.identified(uint64(i), 0)
		clock = max(clock, versions[i])
	}
	sameRange(t, "after different writes", a, b, kv.All(), false)

	upper, lower := kv.Range{First: 1 << 63, Last: math.MaxUint64}, kv.Range{Last: 1<<63 - 1}
	copyIn := func(r kv.Range, clock uint64) func() error {
		return func() error {
			for batch, err := range a.n.CopyOut(ctx(t), r) {
				if err != nil {
					return err
				}
				if _, err := b.n.CopyIn(ctx(t), batch, clock); err != nil {
					return err
				}
			}
			return nil
		}
	}
	second.restart(time.Duration(rng.IntN(8))*time.Millisecond, copyIn(upper, 0))
	want, _ := a.copied(upper, time.Time{})
	got, _ := b.copied(upper, time.Time{})
	for key, e := range want {
		if got[key] == "" || nvme.KVEntry(got[key]).Version() < nvme.KVEntry(e).Version() {
			t.Errorf("%q is older in the copy", key)
		}
	}
	second.restart(time.Duration(rng.IntN(20))*time.Millisecond, copyIn(kv.All(), clock))
	sameRange(t, "after an exact copy", a, b, kv.All(), true)
	for i, v := range versions {
		if again := b.identified(uint64(i), nvme.KVRetry); again != v {
			t.Errorf("a retry at the copy has version %d, want %d", again, v)
		}
	}

	if _, err := a.n.DropRange(ctx(t), lower, clock); err != nil {
		t.Fatal(err)
	}
	second.restart(time.Duration(rng.IntN(3))*time.Millisecond, func() error {
		_, err := b.n.DropRange(ctx(t), lower, clock)
		return err
	})
	second.relaunch() // while it is swept
	for _, h := range []*rangeHost{a, b} {
		if n, err := h.n.Count(ctx(t), lower); err != nil || n.Objects+n.Tombstones > 0 {
			t.Errorf("after a drop: %+v, %v", n, err)
		}
	}
	sameRange(t, "after a drop", a, b, kv.All(), true)
	if again := a.change(rng, 50, 300); again <= clock {
		t.Errorf("version %d after a drop with clock %d", again, clock)
	}
	sameRange(t, "after more writes", a, b, kv.All(), false)
}
