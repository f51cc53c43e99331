package demo

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"jbofd/client"
	"jbofd/client/cluster"
	"jbofd/internal/admin"
	"jbofd/internal/bench"
)

// ClusterConfig is a demonstration of a cluster: three daemons, each with a server of etcd, of which one is killed
// under load and comes back.
type ClusterConfig struct {
	// Daemon is the path of jbofd, which has the server of etcd.
	Daemon string
	// Dir is where ./data/cluster is made.
	Dir string
	// Hosts are the addresses of the three nodes, on loopback, without ports.
	Hosts [3]string
	// Runtime is how long the load runs at least, before and after the node is lost.
	Runtime time.Duration
	// Environ is the daemons' environment, KEY=value.
	Environ []string
	// Out is where progress and results go.
	Out io.Writer
}

// What the demonstration does.
const (
	clusterNQN     = "nqn.2026-11.example.jbofd:cluster"
	clusterKeys    = 4096
	clusterValue   = 1024
	clusterWorkers = 32
	clusterReads   = 95 // per cent
	clusterSkew    = 0.99
	clusterWait    = 2 * time.Minute
	lost           = 1 // the node that is killed
)

// clusterDemo is a demonstration that runs.
type clusterDemo struct {
	cfg   ClusterConfig
	out   *progress
	dir   string
	nodes [3]*process
	admin [3]*admin.Client
	store *cluster.Store

	// acked is the newest write of each key that was acknowledged. Each key is written by one worker.
	acked [clusterKeys]atomic.Uint64
	// reads, writes and failed count operations, stale reads that are older than what was acknowledged before they
	// began.
	reads, writes, failed, stale atomic.Uint64
	// lastWrite is when the last write was acknowledged, worst the longest time without one; in ns since began.
	mu                     sync.Mutex
	lastWrite              time.Time
	worst                  time.Duration
	kinds                  map[string]int
	latency                []time.Duration // of the present second
	before, without, after phase
	// busy is the load of the machine before the demonstration.
	busy string
}

// phase is what was done in a part of the demonstration.
type phase struct {
	ops  uint64
	took time.Duration
}

// lockDir keeps other demonstrations from a directory, whose parent it makes; the lock is beside it.
func lockDir(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(dir+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("another demonstration runs in %s", dir)
		}
		return nil, fmt.Errorf("locking %s: %w", f.Name(), err)
	}
	return func() { _ = f.Close() }, nil
}

func (p phase) rate() float64 { return float64(p.ops) / max(p.took.Seconds(), 0.001) }

// RunCluster runs the demonstration. Whatever happens, the daemons are stopped.
//
// Errors: what failed, with the last words of a daemon if it was one; an acknowledged write that was lost; a stale
// read.
func RunCluster(ctx context.Context, cfg ClusterConfig) (err error) {
	d := &clusterDemo{cfg: cfg, out: &progress{w: cfg.Out, began: time.Now()},
		dir: filepath.Join(cfg.Dir, "data", "cluster"), kinds: map[string]int{},
		busy: machineLoad()}
	unlock, err := lockDir(d.dir)
	if err != nil {
		return err
	}
	defer unlock()
	defer func() { err = errors.Join(err, d.stop()) }()
	if err := os.RemoveAll(d.dir); err != nil { // of an earlier one
		return err
	}
	for i := range d.nodes {
		if err := d.start(i); err != nil {
			return err
		}
	}
	d.out.printf("three jbofd, each with a server of etcd: %s; their configurations are in %s",
		strings.Join(cfg.Hosts[:], ", "), d.dir)
	if err := d.form(ctx); err != nil {
		return err
	}
	d.store, err = cluster.Open(ctx, cluster.Options{SubNQN: clusterNQN, Addresses: d.addresses(),
		Timeout: clusterWait})
	if err != nil {
		return fmt.Errorf("the client: %w", err)
	}
	if err := d.fill(ctx); err != nil {
		return err
	}
	if err := d.load(ctx); err != nil {
		return err
	}
	return d.verdict()
}

func (d *clusterDemo) addresses() (all []string) {
	for _, h := range d.cfg.Hosts {
		all = append(all, "tcp://"+h+":4420")
	}
	return all
}

// stop stops the client and all daemons in order.
func (d *clusterDemo) stop() (err error) {
	if d.store != nil {
		err = d.store.Close()
	}
	errs := make([]error, len(d.nodes))
	var ends sync.WaitGroup
	for i, n := range d.nodes {
		if n != nil {
			ends.Go(func() { errs[i] = n.stop() })
		}
	}
	ends.Wait()
	return errors.Join(append(errs, err)...)
}

// start starts a node, with what it has on its drive.
func (d *clusterDemo) start(i int) error {
	dir := filepath.Join(d.dir, fmt.Sprint("n", i+1))
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	var members, nodes strings.Builder
	for j, h := range d.cfg.Hosts {
		fmt.Fprintf(&members, "        - {name: n%d, client_url: \"http://%[2]s:2379\", "+
			"peer_url: \"http://%[2]s:2380\"}\n", j+1, h)
		fmt.Fprintf(&nodes, "    - {name: n%d, address: \"%[2]s:4430\", target: \"tcp://%[2]s:4420\"}\n", j+1, h)
	}
	text := fmt.Sprintf(`node: {name: n%d, data_dir: .}
admin: {socket: admin.sock}
metrics: {address: "%[2]s:9420"}
discovery: {address: "%[2]s:8009"}
listeners: [{address: "%[2]s:4420"}]
ssds: [{name: ssd0, path: ssd0.img, size: 256MiB, create: true}]
subsystems:
  - nqn: %[3]s
    allow_any_host: true
    namespaces: [{nsid: 1, ssd: ssd0, size: 192MiB, type: kv, replicated: true}]
cluster:
  name: demo
  subsystem: %[3]s
  etcd:
    embedded:
      members:
%[4]s  nodes:
%[5]s`, i+1, d.cfg.Hosts[i], clusterNQN, members.String(), nodes.String())
	if err := os.WriteFile(filepath.Join(dir, "jbofd.yaml"), []byte(text), 0o600); err != nil {
		return err
	}
	p, err := startProcess(d.cfg.Daemon, dir, filepath.Join(dir, "jbofd.log"), d.cfg.Environ,
		[]string{"--config", "jbofd.yaml"})
	d.nodes[i], d.admin[i] = p, admin.NewClient(filepath.Join(dir, "admin.sock"))
	return err
}

// form makes the cluster and waits until it has all of its copies.
func (d *clusterDemo) form(ctx context.Context) error {
	err := d.await(ctx, "the cluster is made", func(ctx context.Context) error {
		_, err := d.admin[0].InitCluster(ctx, admin.InitCluster{Replicas: 3, Ranges: 64})
		return err
	})
	if err == nil {
		d.out.printf("the cluster is made: each key on three nodes, 64 ranges")
		err = d.await(ctx, "all ranges are served", d.full)
	}
	return err
}

// full reports, as an error, what is missing of the copies.
func (d *clusterDemo) full(ctx context.Context) error {
	a, err := d.admin[0].Cluster(ctx)
	if err == nil && (a.Ranges.Total == 0 || a.Ranges.Full < a.Ranges.Total) {
		err = fmt.Errorf("%d of %d ranges have all copies; %s", a.Ranges.Full, a.Ranges.Total, a.Problem)
	}
	return err
}

func (d *clusterDemo) await(ctx context.Context, what string, f func(ctx context.Context) error) error {
	for end := time.Now().Add(clusterWait); ; {
		try, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := f(try)
		cancel()
		if err == nil {
			return nil
		}
		for i, n := range d.nodes {
			if n == nil {
				continue
			}
			select {
			case <-n.exited:
				return n.logTailError(fmt.Sprintf("jbofd n%d ended", i+1))
			default:
			}
		}
		if time.Now().After(end) {
			return fmt.Errorf("not within %v: %s: %w", clusterWait, what, err)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func clusterKey(k int) []byte { return fmt.Appendf(make([]byte, 0, 16), "user%d", k) }

// put writes a key whose worker this is.
func (d *clusterDemo) put(ctx context.Context, k int, value []byte) error {
	n := d.acked[k].Load() + 1
	binary.LittleEndian.PutUint64(value, n)
	err := d.store.Put(ctx, clusterKey(k), value)
	if err == nil {
		d.acked[k].Store(n)
		d.writes.Add(1)
		d.wrote()
	}
	return err
}

// get reads a key and looks whether the value is as new as what was acknowledged before.
func (d *clusterDemo) get(ctx context.Context, k int, value []byte) error {
	least := d.acked[k].Load()
	size, err := d.store.Get(ctx, clusterKey(k), value)
	switch {
	case err != nil:
		return err
	case size != clusterValue || binary.LittleEndian.Uint64(value) < least:
		d.stale.Add(1)
	}
	d.reads.Add(1)
	return nil
}

// wrote notes that a write was acknowledged.
func (d *clusterDemo) wrote() {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	if !d.lastWrite.IsZero() {
		d.worst = max(d.worst, now.Sub(d.lastWrite))
	}
	d.lastWrite = now
}

// workers runs a function for each worker with the keys that are its own: k, k + clusterWorkers, …
func (d *clusterDemo) workers(f func(worker int)) *sync.WaitGroup {
	var all sync.WaitGroup
	for w := range clusterWorkers {
		all.Go(func() { f(w) })
	}
	return &all
}

// fill writes all keys once.
func (d *clusterDemo) fill(ctx context.Context) error {
	began := time.Now()
	var failed atomic.Pointer[error]
	d.workers(func(w int) {
		value := make([]byte, clusterValue)
		for k := w; k < clusterKeys && failed.Load() == nil; k += clusterWorkers {
			if err := d.put(ctx, k, value); err != nil {
				failed.Store(&err)
			}
		}
	}).Wait()
	if err := failed.Load(); err != nil {
		return fmt.Errorf("loading: %w", *err)
	}
	d.out.printf("%d keys of %s are stored: %.0f writes/s, each acknowledged by three nodes", clusterKeys,
		bench.FormatSize(clusterValue), clusterKeys/time.Since(began).Seconds())
	return nil
}

// hot draws a key: the k-th most popular one with a probability in proportion to k^-clusterSkew, as YCSB does.
func hot(rng *rand.Rand) int {
	const e = 1 - clusterSkew
	x := math.Pow((math.Pow(clusterKeys, e)-1)*rng.Float64()+1, 1/e) // of a continuous distribution
	// Popular keys are spread over all ranges and workers.
	return int(uint64(x)*2654435761) % clusterKeys
}

// load runs the load while a node is killed and comes back.
func (d *clusterDemo) load(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var over atomic.Bool
	all := d.workers(func(w int) {
		rng := rand.New(rand.NewPCG(rand.Uint64(), uint64(w)))
		value := make([]byte, clusterValue)
		for !over.Load() && ctx.Err() == nil {
			k, began := hot(rng), time.Now()
			var err error
			if rng.IntN(100) < clusterReads {
				err = d.get(ctx, k, value)
			} else {
				err = d.put(ctx, k/clusterWorkers*clusterWorkers+w, value)
			}
			d.done(err, time.Since(began))
		}
	})
	err := d.script(ctx)
	over.Store(true)
	if err != nil {
		cancel()
	}
	all.Wait()
	return err
}

func (d *clusterDemo) done(err error, took time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil {
		d.latency = append(d.latency, took)
		return
	}
	d.failed.Add(1)
	switch {
	case errors.Is(err, client.ErrIndeterminate):
		d.kinds["outcome unknown"]++
	case errors.Is(err, cluster.ErrUnavailable):
		d.kinds["unavailable"]++
	default:
		d.kinds[err.Error()]++
	}
}

// script is what happens during the load.
func (d *clusterDemo) script(ctx context.Context) error {
	d.mu.Lock()
	d.worst, d.lastWrite = 0, time.Now()
	d.mu.Unlock()
	var err error
	d.out.printf("%d workers: %d %% reads, %d %% writes, keys as in YCSB-B (zipf %.2f)", clusterWorkers, clusterReads,
		100-clusterReads, clusterSkew)
	if d.before, err = d.watch(ctx, d.cfg.Runtime, nil); err != nil {
		return err
	}
	n := d.nodes[lost]
	d.out.printf("kill -9 of n%d", lost+1)
	if err := n.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-n.exited
	d.nodes[lost] = nil
	if d.without, err = d.watch(ctx, d.cfg.Runtime, nil); err != nil {
		return err
	}
	d.out.printf("n%d is started again, and is filled with what it has missed", lost+1)
	if err := d.start(lost); err != nil {
		return err
	}
	began := time.Now()
	if _, err = d.watch(ctx, clusterWait, d.full); err != nil {
		return err
	}
	d.out.printf("all copies are there again after %.1f s", time.Since(began).Seconds())
	d.after, err = d.watch(ctx, d.cfg.Runtime/2, nil)
	return err
}

// watch shows how the load does, for a time or until f returns nil.
func (d *clusterDemo) watch(ctx context.Context, most time.Duration, f func(context.Context) error) (phase, error) {
	began, first := time.Now(), d.reads.Load()+d.writes.Load()
	var err error
	for time.Since(began) < most {
		reads, writes, failed, at := d.reads.Load(), d.writes.Load(), d.failed.Load(), time.Now()
		select {
		case <-time.After(min(time.Second, max(most-time.Since(began), time.Millisecond))):
		case <-ctx.Done():
			return phase{}, ctx.Err()
		}
		s := time.Since(at).Seconds()
		copies := "?"
		if a, err := d.admin[0].Cluster(ctx); err == nil {
			copies = fmt.Sprintf("%d of %d ranges have all copies", a.Ranges.Full, a.Ranges.Total)
		}
		d.out.printf("  %6.0f reads/s %5.0f writes/s  p99 %-7s %d errors  %s", float64(d.reads.Load()-reads)/s,
			float64(d.writes.Load()-writes)/s, d.p99(), d.failed.Load()-failed, copies)
		if f != nil {
			if err = f(ctx); err == nil {
				break
			}
		}
	}
	if f == nil {
		err = nil
	}
	return phase{d.reads.Load() + d.writes.Load() - first, time.Since(began)}, err
}

// p99 is that of the operations since the last call.
func (d *clusterDemo) p99() string {
	d.mu.Lock()
	all := d.latency
	d.latency = nil
	d.mu.Unlock()
	if len(all) == 0 {
		return "-"
	}
	slices.Sort(all)
	return bench.FormatNS(float64(all[len(all)*99/100]))
}

// kindsOf lists how many operations have failed, and how.
func kindsOf(kinds map[string]int) (text string) {
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		text += fmt.Sprintf(", %s: %d", kind, kinds[kind])
	}
	return text
}

// machineLoad says how busy the machine is: what else runs on it makes the rates differ from one part of the
// demonstration to the next.
func machineLoad() string {
	b, err := os.ReadFile("/proc/loadavg")
	if f := strings.Fields(string(b)); err == nil && len(f) > 0 {
		return fmt.Sprintf("%s, of %d CPUs; the rates are good for a comparison if it is well below", f[0],
			runtime.NumCPU())
	}
	return "unknown"
}

// verdict reads all keys once more and says how it went.
func (d *clusterDemo) verdict() error {
	var missing atomic.Uint64
	d.workers(func(w int) {
		value := make([]byte, clusterValue)
		for k := w; k < clusterKeys; k += clusterWorkers {
			size, err := d.store.Get(context.Background(), clusterKey(k), value)
			if err != nil || size != clusterValue || binary.LittleEndian.Uint64(value) < d.acked[k].Load() {
				missing.Add(1)
			}
		}
	}).Wait()
	d.mu.Lock()
	worst, kinds := d.worst, d.kinds
	d.mu.Unlock()
	_, err := fmt.Fprintf(d.cfg.Out, `
reads                          %d
writes acknowledged            %d
operations a second            %.0f; %.0f without n%d; %.0f after its return
load of this machine before    %s
longest time without a write   %.1f s
operations that failed         %d%s
stale reads                    %d
acknowledged writes lost       %d of %d keys
`, d.reads.Load(), d.writes.Load(), d.before.rate(), d.without.rate(), lost+1, d.after.rate(), d.busy, worst.Seconds(), d.failed.Load(),
		kindsOf(kinds), d.stale.Load(), missing.Load(), clusterKeys)
	if lost, stale := missing.Load(), d.stale.Load(); err == nil && lost+stale > 0 {
		err = fmt.Errorf("FAIL: %d keys have lost acknowledged writes, %d reads were stale", lost, stale)
	}
	if err == nil {
		d.out.printf("PASS: nothing that was acknowledged is lost, no read was stale")
	}
	return err
}
