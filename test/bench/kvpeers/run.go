package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Config is what to measure.
type Config struct {
	Engine, Dir           string
	Objects               int64
	ValueBytes            int
	Workers               int
	PhaseTime, SettleTime time.Duration
	// MemoryBytes is for a peer's caches and memtables; PageCacheBytes how much page cache its files may have, if
	// not negative.
	MemoryBytes, PageCacheBytes int64
	// Fill is the user bytes by the size of jbofd's partition.
	Fill float64
	Seed uint64
	// Profile is a directory for CPU profiles, or empty.
	Profile string
	// Recover makes a child open the store that a killed one has left; Kill lets it be killed in the end, in the
	// middle of PUTs.
	Recover, Kill bool
	// Program is what an engine in a process of its own runs, process that process; nil: the engine is in this one.
	Program string
	process *rocksdbProcess
}

// pid is the process of the engine.
func (c *Config) pid() int {
	if c.process != nil {
		return c.process.cmd.Process.Pid
	}
	return os.Getpid()
}

func (c *Config) dataBytes() int64 { return c.Objects * int64(keyBytes+c.ValueBytes) }

// Result is what was found out of one engine.
type Result struct {
	Engine         string
	Load, Get, Put Phase
	// OpenMS is how long opening took after loading and a clean stop.
	OpenMS float64
	// Settled says whether the work put off was done in time, after loading and after the PUTs.
	Settled [2]bool
	// Memory of the process: VmHWM, which counts mapped files as well; and the highest RssAnon, without what the
	// process had before it opened the engine.
	RSSPeakBytes, AnonPeakBytes int64
	// DiskBytes are those of the files in the end, PageCachePeakBytes the most that was found of them in memory during
	// the GETs.
	DiskBytes, PageCachePeakBytes int64
	// Written are bytes written per user byte that was put, from the begin of the PUTs until they had settled; 0: the
	// file system is in memory.
	Written float64
	// Checked is how many values were read and found right.
	Checked int64
	// Recoveries are how the store was opened after the process had been killed in the middle of PUTs, several times.
	Recoveries []Recovery
}

// Phase is the same operation for a while.
type Phase struct {
	Operations              int64
	Seconds, PerSec         float64
	P50US, P99US, P999US    float64
	CPUSeconds              float64
	ReadBytes, WrittenBytes int64
}

const (
	keyBytes = 16
	// minValueBytes is the header and eight bytes that prove it.
	minValueBytes = 24
)

// mix is SplitMix64's finaliser: a bijection that spreads every bit.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// putKey writes the key of an object: its number through a bijection, so that keys are loaded in no order.
func putKey(key *[keyBytes]byte, index int64) {
	x := mix(uint64(index))
	binary.BigEndian.PutUint64(key[:], x)
	binary.BigEndian.PutUint64(key[8:], mix(x))
}

// putValue writes a version of an object's value: both numbers, and noise drawn from them, which nothing compresses.
func putValue(b []byte, index int64, version uint64) {
	binary.LittleEndian.PutUint64(b, uint64(index))
	binary.LittleEndian.PutUint64(b[8:], version)
	x := mix(uint64(index)) ^ version
	at := 16
	for ; at+8 <= len(b); at += 8 {
		x = mix(x)
		binary.LittleEndian.PutUint64(b[at:], x)
	}
	for ; at < len(b); at++ {
		b[at] = byte(x >> (at % 8 * 8))
	}
}

// checkValue says what is wrong with an object's value, if it is none of those that were put, and returns its version.
func checkValue(b, scratch []byte, index int64) (version uint64, err error) {
	if len(b) != len(scratch) {
		return 0, fmt.Errorf("object %d: the value has %d bytes, want %d", index, len(b), len(scratch))
	}
	version = binary.LittleEndian.Uint64(b[8:])
	putValue(scratch, index, version)
	if string(b) != string(scratch) {
		return 0, fmt.Errorf("object %d: the value is not what was put", index)
	}
	return version, nil
}

// maxLatencyNS is the longest that the histograms know.
const maxLatencyNS = 60e9

// crowd is all who work in a phase.
type crowd struct {
	cfg *Config
	put bool
	// next is the number of the next object when loading, stop ends the other phases.
	loading bool
	next    atomic.Int64
	stop    atomic.Bool
	// checked counts values that were right.
	checked atomic.Int64
	// version of the next value.
	version atomic.Uint64

	mu   sync.Mutex
	hist *hdrhistogram.Histogram
	err  error
}

// worker brings operations and takes their answers.
type worker struct {
	*crowd
	random          uint64
	hist            *hdrhistogram.Histogram
	scratch         []byte
	checked         int64
	from, to        int64 // of the objects to load
	version, versTo uint64
	err             error
}

// loadRun is how many objects a worker takes at a time.
const loadRun = 64

func (c *crowd) worker(number int) *worker {
	// A histogram is small, or it would be their memory that is measured.
	return &worker{crowd: c, random: mix(c.cfg.Seed) ^ mix(uint64(number)<<1|1),
		hist: hdrhistogram.New(1000, maxLatencyNS, 2), scratch: make([]byte, c.cfg.ValueBytes)}
}

// begin fills in the next operation, if there is one.
func (w *worker) begin(o *op) bool {
	if w.err != nil || w.stop.Load() {
		return false
	}
	if w.loading {
		if w.from == w.to {
			w.from = w.next.Add(loadRun) - loadRun
			w.to = min(w.from+loadRun, w.cfg.Objects)
		}
		if w.from >= w.to {
			w.from = w.to
			return false
		}
		o.index = w.from
		w.from++
	} else {
		w.random = mix(w.random)
		o.index = int64(w.random % uint64(w.cfg.Objects))
	}
	o.put = w.put
	o.value = o.value[:w.cfg.ValueBytes]
	putKey(&o.key, o.index)
	if w.put {
		v := uint64(0)
		if !w.loading {
			if w.version == w.versTo {
				w.versTo = w.crowd.version.Add(loadRun)
				w.version = w.versTo - loadRun
			}
			w.version++
			v = w.version
		}
		putValue(o.value, o.index, v)
	}
	o.begun = time.Now()
	return true
}

// end takes the answer.
func (w *worker) end(o *op) {
	_ = w.hist.RecordValue(min(int64(time.Since(o.begun)), maxLatencyNS)) // it is within the bounds
	if o.err == nil && !w.put {
		_, o.err = checkValue(o.value, w.scratch, o.index)
		w.checked++
	}
	if o.err != nil {
		w.err = o.err
		w.stop.Store(true)
	}
}

// leave adds what the worker has counted to the crowd's.
func (w *worker) leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.crowd.hist.Merge(w.hist) // equal bounds: nothing is dropped
	w.crowd.checked.Add(w.checked)
	if w.crowd.err == nil {
		w.crowd.err = w.err
	}
}

// alone does one operation after the other.
func (w *worker) alone(s session) {
	o := op{value: make([]byte, w.cfg.ValueBytes)}
	for w.begin(&o) {
		s.do(&o)
		w.end(&o)
	}
}

// deep keeps as many outstanding as there are ops.
func (w *worker) deep(q queue, depth int) {
	free := make([]*op, 0, depth)
	for i := range depth {
		free = append(free, &op{slot: i, value: make([]byte, w.cfg.ValueBytes)})
	}
	for outstanding := 0; ; {
		n := 0
		for n < len(free) && w.begin(free[n]) {
			n++
		}
		q.submit(free[:n])
		outstanding += n
		free = free[:copy(free, free[n:])]
		if outstanding == 0 {
			return
		}
		for _, o := range q.wait() {
			w.end(o)
			free = append(free, o)
			outstanding--
		}
	}
}

// queues is how many goroutines share the depth of an engine that is driven in batches.
const queues = 2

// work runs the crowd until there is nothing to load any more, or the time is over.
func (c *crowd) work(ctx context.Context, e engine) (Phase, error) {
	c.hist = hdrhistogram.New(1000, maxLatencyNS, 2)
	var all sync.WaitGroup
	before := takeUsage(c.cfg.pid())
	var err error
	if o, ok := e.(outside); ok {
		err = o.phase(c)
	} else if c.cfg.Engine == "jbofd-batched" {
		for i := range queues {
			depth := (c.cfg.Workers + i) / queues
			q := e.(*jbofdStore).queue(depth)
			w := c.worker(i)
			all.Go(func() { w.deep(q, depth); w.leave() })
		}
	} else {
		for i := range c.cfg.Workers {
			s, w := e.session(), c.worker(i)
			all.Go(func() { w.alone(s); w.leave() })
		}
	}
	over := context.AfterFunc(ctx, func() { c.stop.Store(true) })
	defer over()
	if !c.loading {
		t := time.AfterFunc(c.cfg.PhaseTime, func() { c.stop.Store(true) })
		defer t.Stop()
	}
	all.Wait()
	after := takeUsage(c.cfg.pid())
	n := c.hist.TotalCount()
	seconds := after.at.Sub(before.at).Seconds()
	us := func(q float64) float64 { return float64(c.hist.ValueAtQuantile(q)) / 1e3 }
	return Phase{
		Operations: n, Seconds: seconds, PerSec: float64(n) / seconds, P50US: us(50), P99US: us(99), P999US: us(99.9),
		CPUSeconds: (after.cpu - before.cpu).Seconds(), ReadBytes: after.read - before.read,
		WrittenBytes: after.written - before.written,
	}, errors.Join(err, c.err, ctx.Err())
}

// profiled writes a CPU profile of f, if one is wanted.
func (c *Config) profiled(phase string, f func() error) error {
	if c.Profile == "" {
		return f()
	}
	out, err := os.Create(filepath.Join(c.Profile, c.Engine+"-"+phase+".pprof"))
	if err != nil {
		return err
	}
	if err := pprof.StartCPUProfile(out); err != nil {
		return errors.Join(err, out.Close())
	}
	err = f()
	pprof.StopCPUProfile()
	return errors.Join(err, out.Close())
}

// settle waits until the engine has done what it has put off.
func (c *Config) settle(ctx context.Context, e engine) bool {
	ctx, cancel := context.WithTimeout(ctx, c.SettleTime)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for quiet := 0; ; { // it may pause between two pieces of work
		if quiet++; !e.settled() {
			quiet = 0
		}
		if quiet == 10 {
			return true
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
}

// run measures the engine in this process. With Kill it does not return, unless it fails: report gets the result.
func run(ctx context.Context, cfg Config, report func(any) error) (err error) {
	var r Result
	r.Engine = cfg.Engine
	runtime.GC()
	watch := startWatch(&cfg)
	defer watch.close()
	open := engines[cfg.Engine]
	e, err := open(&cfg, false)
	if err != nil {
		return err
	}
	defer func() {
		if e != nil {
			err = errors.Join(err, e.close())
		}
	}()
	load := &crowd{cfg: &cfg, put: true, loading: true}
	if r.Load, err = load.work(ctx, e); err != nil {
		return fmt.Errorf("load: %w", err)
	}
	err, e = e.close(), nil
	if err != nil {
		return err
	}
	begin := time.Now()
	if e, err = open(&cfg, true); err != nil {
		return fmt.Errorf("reopen: %w", err)
	}
	r.OpenMS = float64(time.Since(begin).Microseconds()) / 1e3
	r.Settled[0] = cfg.settle(ctx, e)
	e.ready()

	get := &crowd{cfg: &cfg}
	watch.cachePeak.Store(0)
	err = cfg.profiled("get", func() error { r.Get, err = get.work(ctx, e); return err })
	if err != nil {
		return fmt.Errorf("GET: %w", err)
	}
	watch.note(watch.pageCache())
	r.PageCachePeakBytes = watch.cachePeak.Load()
	put := &crowd{cfg: &cfg, put: true}
	before := takeUsage(cfg.pid())
	err = cfg.profiled("put", func() error { r.Put, err = put.work(ctx, e); return err })
	if err != nil {
		return fmt.Errorf("PUT: %w", err)
	}
	r.Settled[1] = cfg.settle(ctx, e)
	if user := r.Put.Operations * int64(keyBytes+cfg.ValueBytes); user > 0 && !watch.inMemory {
		r.Written = float64(takeUsage(cfg.pid()).written-before.written) / float64(user)
	}

	// What was put is there.
	short := cfg
	short.PhaseTime = min(cfg.PhaseTime, 2*time.Second)
	check := &crowd{cfg: &short}
	if _, err := check.work(ctx, e); err != nil {
		return fmt.Errorf("check: %w", err)
	}
	r.Checked = get.checked.Load() + check.checked.Load()
	r.DiskBytes = diskBytes(cfg.Dir)
	watch.close()
	r.AnonPeakBytes = watch.anonPeak
	r.RSSPeakBytes = statusBytes(cfg.pid(), "VmHWM")
	if err := report(r); err != nil || !cfg.Kill {
		return err
	}
	return cfg.crash(ctx, e)
}
