package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/bench/ycsb"
	"jbofd/internal/buildtags"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd/label"
)

// kvSetup is one drive with a block namespace and a key-value namespace.
func kvSetup(ssd string) setup {
	return setup{ssds: ssd, subsystems: `  - nqn: nqn.2026-11.example.jbofd:a
    allow_any_host: true
    namespaces:
      - {nsid: 1, ssd: ssd0, size: 16MiB}
      - {nsid: 2, ssd: ssd0, size: 96MiB, type: kv}
`}
}

func openKV(t testing.TB, c *client.Controller, nsid uint32) *kv.Namespace {
	t.Helper()
	n, err := kv.Open(ctx(t), c, nsid, kv.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// value returns the value of a key in a version.
func value(key string, version, n int) []byte {
	b := make([]byte, (n+511)&^511)
	fill(b, int64(len(key))<<32|int64(key[len(key)-1]), uint64(version)<<16|uint64(n))
	copy(b, key)
	return b[:n]
}

// TestKeysAndValues checks every command, before and after a stop, and after a kill -9.
func TestKeysAndValues(t *testing.T) {
	t.Parallel()
	d := start(t, kvSetup(fileSSD))
	c := d.connect(d.options(hostA, nqnA))
	n := openKV(t, c, 2)
	if i := n.Info(); i.MaxKey != 16 || i.MaxValue != 1<<20 || i.SizeBytes != 96<<20 {
		t.Errorf("%+v", i)
	}
	want := map[string][]byte{}
	put := func(key string, version, size int) {
		t.Helper()
		v := value(key, version, size)
		if err := n.Put(ctx(t), []byte(key), v); err != nil {
			t.Fatalf("put %q: %v", key, err)
		}
		want[key] = v
	}
	check := func(when string) {
		t.Helper()
		for key, v := range want {
			got, err := n.Value(ctx(t), []byte(key))
			if err != nil || !bytes.Equal(got, v) {
				t.Fatalf("%s: %q: %d bytes, %v; want the %d that were put", when, key, len(got), err, len(v))
			}
		}
		keys := map[string]bool{}
		for key, err := range n.Keys(ctx(t)) {
			if err != nil {
				t.Fatal(err)
			}
			keys[string(key)] = true
		}
		if len(keys) != len(want) {
			t.Errorf("%s: %d keys are listed, want %d", when, len(keys), len(want))
		}
		for key := range maps.Keys(want) {
			if !keys[key] {
				t.Errorf("%s: %q is not listed", when, key)
			}
		}
	}
	for i, size := range []int{0, 1, 255, 256, 304, 511, 512, 528, 1008, 4096, 100_000, 1 << 20} {
		put(fmt.Sprintf("size%d", i), 1, size)
	}
	for i := range 300 {
		put(fmt.Sprintf("k%d", i), 1, i)
	}
	put("a", 1, 10)
	put("a\x00", 1, 20)
	check("at first")

	key := []byte("k7")
	if err := n.PutIfAbsent(ctx(t), key, nil); !errors.Is(err, kv.ErrKeyExists) {
		t.Errorf("PutIfAbsent of a key that is there: %v", err)
	}
	if err := n.PutIfPresent(ctx(t), []byte("nobody"), nil); !errors.Is(err, kv.ErrKeyNotFound) {
		t.Errorf("PutIfPresent of a key that is not there: %v", err)
	}
	if err := n.PutIfAbsent(ctx(t), []byte("new"), []byte("x")); err != nil {
		t.Error(err)
	}
	want["new"] = []byte("x")
	if err := n.PutIfPresent(ctx(t), key, []byte("y")); err != nil {
		t.Error(err)
	}
	want["k7"] = []byte("y")
	if ok, err := n.Exists(ctx(t), key); !ok || err != nil {
		t.Errorf("Exists: %v, %v", ok, err)
	}
	part := make([]byte, 100)
	if size, err := n.Get(ctx(t), []byte("size10"), part); size != 100_000 || err != nil ||
		!bytes.Equal(part, want["size10"][:100]) {
		t.Errorf("a part of a value: %d, %v", size, err)
	}
	for _, key := range []string{"k8", "size11"} {
		if err := n.Delete(ctx(t), []byte(key)); err != nil {
			t.Error(err)
		}
		delete(want, key)
		if ok, err := n.Exists(ctx(t), []byte(key)); ok || err != nil {
			t.Errorf("after Delete: %v, %v", ok, err)
		}
		if _, err := n.Value(ctx(t), []byte(key)); !errors.Is(err, kv.ErrKeyNotFound) {
			t.Errorf("after Delete: %v", err)
		}
	}
	check("after changes")
	if objects := d.metric("jbof_kv_objects", "nsid", "2"); int(objects) != len(want) {
		t.Errorf("%v objects in the metrics, want %d", objects, len(want))
	}
	if puts := d.metric("jbof_io_completed_total", "op", "store", "ssd", "ssd0"); puts < 300 {
		t.Errorf("%v stores in the metrics", puts)
	}

	d.term()
	d.launch()
	check("after a stop")
	put("k9", 2, 900)
	d.kill()
	d.launch()
	check("after kill -9")
	// The block namespace on the same drive works, too.
	blocks := open(t, c, 1)
	sector := make([]byte, 4096)
	fill(sector, 0, 1)
	if _, err := blocks.WriteAt(ctx(t), sector, 0, 0); err != nil {
		t.Error(err)
	}
	if _, err := c.Namespace(ctx(t), 2); !errors.Is(err, client.ErrUnsupported) {
		t.Errorf("keys and values opened as blocks: %v", err)
	}
	if _, err := kv.Open(ctx(t), c, 1, kv.Options{}); !errors.Is(err, client.ErrUnsupported) {
		t.Errorf("blocks opened as keys and values: %v", err)
	}
	check("beside blocks")
}

// TestAFullKVNamespace: Put is refused, Delete makes room, and existing keys are kept.
func TestAFullKVNamespace(t *testing.T) {
	t.Parallel()
	d := start(t, kvSetup(memSSD))
	n := openKV(t, d.connect(d.options(hostA, nqnA)), 2)
	const workers, size = 16, 20_000
	var wg sync.WaitGroup
	last := make([]int, workers)
	for w := range workers {
		wg.Go(func() {
			for i := 0; ; i++ {
				err := n.Put(ctx(t), fmt.Appendf(nil, "%d-%d", w, i), value(fmt.Sprint(w, "-", i), 1, size))
				if errors.Is(err, kv.ErrCapacityExceeded) {
					last[w] = i
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	count := 0
	for _, n := range last {
		count += n
	}
	share := float64(count) * size / (96 << 20)
	t.Logf("%d values, %.1f %% of the namespace", count, 100*share)
	if share < 0.6 { // a large part of such a small partition is reserved
		t.Errorf("it was full with %.1f %% of its size in values", 100*share)
	}
	for w := range workers {
		for i := range last[w] / 2 {
			if err := n.Delete(ctx(t), fmt.Appendf(nil, "%d-%d", w, i)); err != nil {
				t.Fatalf("delete from a full namespace: %v", err)
			}
		}
	}
	for w := range workers {
		for i := range last[w] {
			key := fmt.Appendf(nil, "%d-%d", w, i)
			if i < last[w]/4 {
				if err := n.Put(ctx(t), key, value(fmt.Sprint(w, "-", i), 2, size)); err != nil {
					t.Fatalf("put when there is room again: %v", err)
				}
			}
			version := 1
			if i < last[w]/4 {
				version = 2
			}
			got, err := n.Value(ctx(t), key)
			switch gone := i >= last[w]/4 && i < last[w]/2; {
			case gone && !errors.Is(err, kv.ErrKeyNotFound):
				t.Fatalf("%s: %v, want it gone", key, err)
			case !gone && (err != nil || !bytes.Equal(got, value(fmt.Sprint(w, "-", i), version, size))):
				t.Fatalf("%s: %v, or another value than was put", key, err)
			}
		}
	}
}

// TestADamagedStoreIsLeftOut: the daemon reports the damage and serves everything else; nothing is written to the
// partition.
func TestADamagedStoreIsLeftOut(t *testing.T) {
	t.Parallel()
	d := start(t, kvSetup(fileSSD))
	c := d.connect(d.options(hostA, nqnA))
	if err := openKV(t, c, 2).Put(ctx(t), []byte("k"), []byte("v")); err != nil {
		t.Fatal(err)
	}
	d.term()
	path := filepath.Join(d.dir, "ssd0.img")
	image, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// The partition is the second extent.
	from, end := label.AlignBytes+16<<20, label.AlignBytes+112<<20
	for i := range 100 {
		image[from+i] ^= 0xff
		image[end-4096+i] ^= 0xff
	}
	if err := os.WriteFile(path, image, 0o600); err != nil {
		t.Fatal(err)
	}
	d.launch()
	var s status
	if err := d.admin("GET", "/v1/status", &s); err != nil {
		t.Fatal(err)
	}
	if s.Ready || len(s.Reasons) != 1 || !strings.Contains(s.Reasons[0].Reason, "superblock") {
		t.Errorf("the daemon says %+v", s)
	}
	if _, err := open(t, c, 1).ReadAt(ctx(t), make([]byte, 4096), 0); err != nil {
		t.Errorf("blocks beside it: %v", err)
	}
	if _, err := kv.Open(ctx(t), c, 2, kv.Options{}); err == nil {
		t.Error("the damaged namespace is there")
	}
	d.term()
	after, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(after[from:end], image[from:end]) {
		t.Error("the damaged partition has changed")
	}
	d.launch()
}

// TestKVNamespacesComeAndGo: reloads add, remove and resize key-value namespaces while others are used. A size for
// which the drive has no room is refused.
func TestKVNamespacesComeAndGo(t *testing.T) {
	t.Parallel()
	two := kvSetup("  - {name: ssd0, backend: mem, size: 256MiB}\n")
	one := two
	one.subsystems = strings.Replace(two.subsystems, "      - {nsid: 2, ssd: ssd0, size: 96MiB, type: kv}\n", "", 1)
	d := start(t, one)
	c := d.connect(d.options(hostA, nqnA))
	for round := range 3 {
		if !d.reload(two) {
			t.Fatal("a namespace of keys cannot be added")
		}
		n := openKV(t, c, 2)
		if round > 0 { // the extent and its contents remain
			if v, err := n.Value(ctx(t), []byte("round")); err != nil || int(v[0]) != round-1 {
				t.Errorf("round %d: %v, %v", round, v, err)
			}
		}
		if err := n.Put(ctx(t), []byte("round"), []byte{byte(round)}); err != nil {
			t.Error(err)
		}
		if !d.reload(one) {
			t.Fatal("a namespace of keys cannot be removed")
		}
		var status *client.StatusError
		if err := n.Put(ctx(t), []byte("k"), nil); !errors.As(err, &status) ||
			status.Status.Code() != nvme.InvalidNamespaceOrFormat.Code() {
			t.Errorf("a namespace that is gone: %v", err)
		}
	}
	if !d.reload(two) {
		t.Fatal("a namespace of keys cannot be added")
	}
	n := openKV(t, c, 2)
	for _, mib := range []int{128, 64, 97} {
		sized := two
		sized.subsystems = strings.Replace(two.subsystems, "96MiB", fmt.Sprintf("%dMiB", mib), 1)
		if !d.reload(sized) {
			t.Errorf("a namespace of keys does not get %d MiB", mib)
		}
		if got := d.extentBytes(2); got != int64(mib)<<20 {
			t.Errorf("a namespace of keys has %d bytes, want %d MiB", got, mib)
		}
	}
	large := two
	large.subsystems = strings.Replace(two.subsystems, "96MiB", "256MiB", 1) // as large as the drive
	if d.reload(large) {
		t.Error("a namespace of keys has room for 256 MiB beside another one on a drive of 256 MiB")
	}
	if v, err := n.Value(ctx(t), []byte("round")); err != nil || int(v[0]) != 2 {
		t.Errorf("after all sizes: %v, %v", v, err)
	}
	if got := d.extentBytes(2); got != 97<<20 {
		t.Errorf("after a reload that was refused the namespace has %d bytes, want 97 MiB", got)
	}
}

// TestKVUnderManyHosts compares the concurrent histories of several hosts with a map for each.
func TestKVUnderManyHosts(t *testing.T) {
	t.Parallel()
	d := start(t, kvSetup(memSSD))
	rng := random(t)
	var wg sync.WaitGroup
	for h := range 4 {
		c := d.connect(d.options(fmt.Sprintf("%s%d", hostA, h), nqnA))
		for w := range 4 {
			luck := rand.New(rand.NewPCG(rng.Uint64(), uint64(w)))
			n := openKV(t, c, 2)
			wg.Go(func() {
				model := map[string][]byte{}
				for i := range 400 {
					key := fmt.Sprintf("%d-%d-%d", h, w, luck.IntN(50))
					switch luck.IntN(4) {
					case 0:
						if err := n.Delete(ctx(t), []byte(key)); err != nil {
							t.Error(err)
							return
						}
						delete(model, key)
					case 1, 2:
						v := value(key, i, luck.IntN(5000))
						if err := n.Put(ctx(t), []byte(key), v); err != nil {
							t.Error(err)
							return
						}
						model[key] = v
					}
					got, err := n.Value(ctx(t), []byte(key))
					v, exists := model[key]
					if exists && (err != nil || !bytes.Equal(got, v)) || !exists && !errors.Is(err, kv.ErrKeyNotFound) {
						t.Errorf("%s: %d bytes, %v; want %d, there %t", key, len(got), err, len(v), exists)
						return
					}
				}
			})
		}
	}
	wg.Wait()
}

// TestAStoreOpensAtOnce: a daemon with a store is ready within a second after a clean stop, and soon after kill -9.
func TestAStoreOpensAtOnce(t *testing.T) {
	t.Parallel()
	d := start(t, kvSetup(fileSSD))
	n := openKV(t, d.connect(d.options(hostA, nqnA)), 2)
	for i := range 2000 {
		go func() { _ = n.Put(ctx(t), fmt.Appendf(nil, "%d", i), make([]byte, 1000)) }()
	}
	eventually(t, "all is there", func() bool { return d.metric("jbof_kv_objects") == 2000 })
	stop := func() { d.term() }
	restart := func(stop func()) time.Duration {
		stop()
		began := time.Now()
		d.launch()
		took := time.Since(began)
		if objects := d.metric("jbof_kv_objects"); objects != 2000 {
			t.Errorf("%v objects, want 2000", objects)
		}
		return took
	}
	t.Logf("ready after %v", restart(d.kill))
	limit := time.Second
	if buildtags.Race {
		limit = 5 * time.Second // the binary is ten times as slow
	}
	// On a busy machine it takes longer; then the test tries again.
	took := restart(stop)
	for attempt := 1; took > limit && attempt < 5; attempt++ {
		t.Logf("after a clean stop ready after %v", took)
		took = restart(stop)
	}
	if took > limit {
		t.Errorf("after a clean stop ready after %v, want %v at most", took, limit)
	}
}

// ycsbA is the workload of the kill -9 test.
const ycsbA = "readproportion=0.5\nupdateproportion=0.5\nrequestdistribution=zipfian\n" +
	"fieldcount=1\nfieldlength=700\nrecordcount=20000\nthreadcount=2\n"

// openYCSB opens a YCSB workload on the key-value namespace of the daemon. It is closed at the end of the test. The
// function returned fails the test if a phase has failed.
func openYCSB(t *testing.T, d *daemon, properties string, seconds, depth int, seed uint64) (b *ycsb.Bench,
	hold func(what string, p *ycsb.Phase, err error)) {
	t.Helper()
	props := ycsb.Properties{}
	if err := props.Read("properties", strings.NewReader(properties)); err != nil {
		t.Fatal(err)
	}
	props["maxexecutiontime"] = strconv.Itoa(seconds)
	w, _, err := props.Workload()
	if err != nil {
		t.Fatal(err)
	}
	o := d.options(hostA, nqnA)
	o.QPairs, o.QueueDepth = w.Threads, depth
	db, err := ycsb.NewWire(ctx(t), d.connect(o), 2, false)
	if err != nil {
		t.Fatal(err)
	}
	if b, err = ycsb.Open(ctx(t), db, w, ycsb.Config{Depth: depth, Seed: seed}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b, func(what string, p *ycsb.Phase, err error) {
		t.Helper()
		if err != nil || !p.OK() {
			t.Fatalf("%s: %v, %+v", what, err, p)
		}
	}
}

// TestKillUnderYCSB: kill -9 in the middle of YCSB-A, several times. Every read is verified, also across the reconnect.
// After each round all acknowledged writes are there.
func TestKillUnderYCSB(t *testing.T) {
	t.Parallel()
	d := start(t, kvSetup(fileSSD))
	rng := random(t)
	b, hold := openYCSB(t, d, ycsbA, 6, 32, rng.Uint64())
	p, err := b.Load(ctx(t))
	hold("load", p, err)
	kills := 0
	done := make(chan struct{})
	go func() {
		defer close(done)
		p, err = b.Run(ctx(t))
	}()
	for running := true; running; {
		select {
		case <-done:
			running = false
		case <-time.After(time.Duration(500+rng.IntN(700)) * time.Millisecond):
			d.kill()
			d.launch()
			kills++
		}
	}
	hold("run", p, err)
	q, err := b.Verify(ctx(t))
	hold("verify", q, err)
	t.Logf("%d kills, %d operations in %.1f s", kills, p.Operations, p.ElapsedSeconds)
	if kills < 2 || p.Operations < 1000 {
		t.Errorf("%d kills, %d operations: too few to say anything", kills, p.Operations)
	}
}

// sharing is an experiment with a host that retrieves values and a host that reads blocks, each with a weight.
type sharing struct {
	keys, blocks int
	// credits: both hosts observe credits. Otherwise commands of both hosts always wait at the drive.
	credits client.CreditMode
	// buffer is the buffer size of the first host for each value of 3000 bytes.
	buffer int
	// tolerance is the relative deviation from the share by weight that is allowed. With credits only a few commands
	// wait at the drive, so a host that is delayed by a busy processor loses a part of its share.
	tolerance float64
}

// TestKeysAndBlocksShareADrive: hosts that retrieve values and hosts that read blocks share the drive by their weights,
// whatever their sizes and depths, and with or without credits.
func TestKeysAndBlocksShareADrive(t *testing.T) {
	if raceEnabled {
		t.Skip("under the race detector processors are the bottleneck, not the drive; the plain build runs this")
	}
	for name, c := range map[string]sharing{
		"1-1":                    {1, 1, client.CreditsOff, 4096, 0.1},
		"3-1":                    {3, 1, client.CreditsOff, 4096, 0.1},
		"credits, large buffers": {1, 1, client.CreditsOn, 16384, 0.2},
	} {
		t.Run(name, func(t *testing.T) {
			want := float64(c.keys) / float64(c.keys+c.blocks)
			// A busy machine may not keep the drive busy; then the test tries again.
			for attempt := 1; ; attempt++ {
				got := c.share(t)
				t.Logf("keys had %.1f %% of the drive, by weight %.1f %%", 100*got, 100*want)
				if math.Abs(got-want) <= c.tolerance*want {
					return
				}
				if attempt == 4 {
					t.Fatalf("keys had %.1f %% of the drive, want %.1f", 100*got, 100*want)
				}
			}
		})
	}
}

// share returns the share of the drive's time that the host with keys gets. Both hosts request more than the drive can
// do.
func (c sharing) share(t *testing.T) float64 {
	t.Helper()
	s := kvSetup("  - {name: ssd0, backend: model, preset: dct983, condition: clean, size: 128MiB, slowdown: 60, " +
		"calibrate: false}\n")
	s.tenants = tenant("keys", hostA, fmt.Sprintf(", weight: %d", c.keys)) +
		tenant("blocks", hostB, fmt.Sprintf(", weight: %d", c.blocks))
	d := start(t, s)
	oa, ob := d.options(hostA, nqnA), d.options(hostB, nqnA)
	oa.Credits, ob.Credits = c.credits, c.credits
	keys := openKV(t, d.connect(oa), 2)
	blocks := d.namespace(ob, 1)
	// Values are spread over the flash. Each host alone has more outstanding than the drive admits and than credits
	// allow.
	const values, workers = 4000, 160
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			for i := w; i < values; i += workers {
				if err := keys.Put(ctx(t), fmt.Appendf(nil, "%d", i), make([]byte, 3000)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	stop, cancel := context.WithCancel(context.Background())
	for w := range workers {
		all.Go(func() {
			b := make([]byte, c.buffer)
			for i := w * 61; stop.Err() == nil; i += 611 {
				if _, err := keys.Get(stop, fmt.Appendf(nil, "%d", i%values), b); err != nil && stop.Err() == nil {
					t.Error(err)
				}
			}
		})
		all.Go(func() {
			b := make([]byte, 4096)
			for i := w * 61; stop.Err() == nil; i += 611 {
				if _, err := blocks.ReadAt(stop, b, int64(i%4000)*4096); err != nil && stop.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	pass(time.Second)
	before := [2]float64{d.metric("jbof_scheduler_device_seconds_total", "tenant", "keys"),
		d.metric("jbof_scheduler_device_seconds_total", "tenant", "blocks")}
	pass(2 * time.Second)
	a := d.metric("jbof_scheduler_device_seconds_total", "tenant", "keys") - before[0]
	b := d.metric("jbof_scheduler_device_seconds_total", "tenant", "blocks") - before[1]
	cancel()
	all.Wait()
	return a / (a + b)
}
