package bench

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"time"
)

// busyBit in job.gen marks a block with an outstanding I/O. unknownGen marks a block whose content is unknown after a
// failed write.
const (
	busyBit    = 1 << 31
	unknownGen = busyBit - 1
)

// job is the state of one goroutine that generates load.
type job struct {
	id    int
	r     *run
	q     Queue
	cfg   *Config
	rng   uint64
	start int64 // offset of the job's region in bytes
	count int64 // number of blocks in the region
	left  int64 // I/Os still to submit without a runtime; -1 with one

	frees []func() error // release the slots' buffers
	slots []slot
	free  []uint16
	ops   []Op
	dones []Done

	// perm visits the offsets of the region in random order, each once. next holds the positions of sequential reads
	// and writes.
	perm  permutation
	step  uint64
	next  [2]int64
	gen   []uint32 // with Verify: the generation of each block's last write, and busyBit
	since int      // writes since the last Flush

	pacer  Pacer
	worker *Worker
	keep   bool

	mu  sync.Mutex
	cur *stats
	old *stats // the statistics that take returned last
}

// slot is one outstanding operation.
type slot struct {
	buf   []byte
	block int64 // index in the region
	at    int64 // when the operation was due or was submitted
	gen   uint32
	kind  Kind
}

func newJob(ctx context.Context, r *run, i int, t Target) (*job, error) {
	cfg := &r.cfg
	bs := int64(cfg.BlockBytes)
	count := cfg.SizeBytes / bs / int64(cfg.Jobs)
	a, b := newStats(), newStats()
	j := &job{
		id: i, r: r, cfg: cfg, rng: mix(cfg.Seed ^ uint64(i)<<32), start: cfg.OffsetBytes + int64(i)*count*bs,
		count: count, left: count,
		slots: make([]slot, cfg.IODepth), ops: make([]Op, cfg.IODepth), dones: make([]Done, cfg.IODepth),
		free: make([]uint16, 0, cfg.IODepth),
		cur:  &a, old: &b,
	}
	if cfg.Runtime > 0 {
		j.left = -1
	}
	j.perm = newPermutation(uint64(count), mix(j.rng))
	if cfg.Verify {
		j.gen = make([]uint32, count)
	}
	for k := range j.slots {
		b, free, err := t.Buffer(cfg.BlockBytes)
		if err != nil {
			return nil, errors.Join(err, j.release())
		}
		j.frees = append(j.frees, free)
		j.slots[k].buf = b
		j.free = append(j.free, uint16(cfg.IODepth-1-k))
		if !cfg.Verify {
			// Fill the buffer with noise, so that the layers below cannot compress or deduplicate it.
			fillVerify(b, cfg.BlockBytes, cfg.Seed, j.start+int64(k), 0)
		}
	}
	var err error
	if j.q, err = t.OpenQueue(ctx, cfg.IODepth); err != nil {
		return nil, errors.Join(err, j.release())
	}
	j.worker = r.workers.Add(j.q)
	return j, nil
}

// close closes the queue and then releases the slots' buffers.
func (j *job) close() error { return errors.Join(j.q.Close(), j.release()) }

// release releases the slots' buffers.
func (j *job) release() error {
	var errs []error
	for _, free := range j.frees {
		errs = append(errs, free())
	}
	return errors.Join(errs...)
}

// take returns the statistics since the previous call. They are valid until the next call.
func (j *job) take() *stats {
	j.old.reset()
	j.mu.Lock()
	defer j.mu.Unlock()
	j.cur, j.old = j.old, j.cur
	return j.old
}

// load runs the main phase.
func (j *job) load() error {
	if c := j.cfg; c.RateIOPS > 0 && !j.pacer.On() { // otherwise the schedule continues after the ramp
		j.pacer = NewPacer(PacerConfig{PerSec: c.RateIOPS, Poisson: c.Poisson, BeginNS: j.r.workers.Now(), Worker: j.id,
			Workers: c.Jobs})
	}
	return j.loop(j.build)
}

// readBack reads every block that was written in this run, or every block with VerifyOnly.
func (j *job) readBack() error {
	j.next[Read] = 0
	j.pacer = Pacer{}
	return j.loop(j.buildReadBack)
}

// loop keeps the queue filled with the operations that build makes, until build returns false or the job is stopped.
func (j *job) loop(build func(*Op, *slot) bool) error { // hot: 0 allocs per I/O
	more := true
	queued := 0 // j.ops[:queued] are built and not yet submitted
	for {
		now := j.r.workers.Now()
		_, stopped := j.worker.Stopped()
		more = more && !stopped
		wait := time.Duration(-1)
		for more && len(j.free) > 0 {
			at, early := j.pacer.Due(now)
			if early > 0 {
				wait = early
				break
			}
			i := j.free[len(j.free)-1]
			s, o := &j.slots[i], &j.ops[queued]
			*o = Op{Tag: uint64(i), Buf: s.buf}
			if !build(o, s) {
				more = false
				break
			}
			if j.pacer.On() {
				j.pacer.Advance(float64(j.random()>>11+1) / (1 << 53))
			}
			s.at, s.kind = at, o.Kind
			j.free = j.free[:len(j.free)-1]
			queued++
		}
		if queued > 0 {
			n, err := j.q.Submit(j.ops[:queued])
			if err != nil {
				return err
			}
			queued = copy(j.ops, j.ops[n:queued])
		}
		out := len(j.slots) - len(j.free)
		if !more && (out == 0 || j.keep && stopped && queued == 0) {
			return nil
		}
		wait, ok := PollWait(wait, out)
		if !ok {
			continue
		}
		n, err := j.q.Poll(j.dones, wait)
		if n > 0 {
			if ierr := j.finish(j.dones[:n]); ierr != nil && !j.cfg.ContinueOnError {
				more = false
				j.keep = false
				j.r.workers.Stop()
			}
		}
		if err := j.worker.Interrupted(out-n, len(j.slots)); err != nil {
			return err
		}
		if err != nil {
			return err
		}
	}
}

func (j *job) random() uint64 {
	j.rng += 0x9e3779b97f4a7c15
	return mix(j.rng)
}

// finish processes completions. It returns the error of a failed I/O, if any.
func (j *job) finish(dones []Done) (failed error) { // hot: 0 allocs
	now := j.r.workers.Now()
	j.mu.Lock()
	defer j.mu.Unlock()
	st := j.cur
	for i := range dones {
		d := &dones[i]
		s := &j.slots[d.Tag]
		j.free = append(j.free, uint16(d.Tag))
		if d.Err != nil {
			failed = d.Err
			st.failed[s.kind]++
			st.note(fmt.Sprintf("%s at offset %d: %v", s.kind, j.start+s.block*int64(j.cfg.BlockBytes), d.Err))
			if s.kind == Write {
				s.gen = unknownGen
			}
			j.settle(s)
			continue
		}
		// RecordValue fails only for a value above the bound.
		if st.hist[s.kind].RecordValue(min(now-s.at, MaxLatencyNS)) != nil {
			st.failed[s.kind]++
		}
		if s.kind == Flush {
			continue
		}
		st.bytes[s.kind] += uint64(len(s.buf))
		j.settle(s)
		if s.kind == Read && j.gen != nil {
			j.check(st, s)
		}
	}
	return failed
}

// settle records the generation of the block whose I/O has ended.
func (j *job) settle(s *slot) {
	if j.gen != nil && s.kind != Flush {
		j.gen[s.block] = s.gen
	}
}

// check verifies the data of the read in s if the content of its block is known.
func (j *job) check(st *stats, s *slot) {
	want := uint64(s.gen)
	if j.cfg.VerifyOnly {
		want = anyGeneration
	} else if s.gen == 0 || s.gen == unknownGen {
		return
	}
	st.checked += uint64(len(s.buf))
	if err := checkVerify(s.buf, j.r.info.BlockSize, j.cfg.Seed, j.start+s.block*int64(len(s.buf)), want); err != nil {
		st.wrong++
		st.note("verify: " + err.Error())
	}
}

// build creates the next operation of the main phase.
func (j *job) build(o *Op, s *slot) bool { // hot: 0 allocs
	if j.cfg.FlushEvery > 0 && j.since >= j.cfg.FlushEvery {
		j.since = 0
		o.Kind, o.Buf = Flush, nil
		return true
	}
	if j.left == 0 {
		return false
	}
	o.Kind = j.kind()
	block := j.place(o.Kind)
	if j.gen != nil {
		// A read concurrent with a write of the same block may return either content, and the order of two concurrent
		// writes is undefined. Therefore choose a block without an outstanding I/O. There is one, because the region
		// has at least twice as many blocks as there are slots.
		for j.gen[block]&busyBit != 0 {
			if block++; block == j.count {
				block = 0
			}
		}
		s.gen = j.gen[block]
		j.gen[block] |= busyBit
	}
	s.block = block
	o.Offset = j.start + block*int64(j.cfg.BlockBytes)
	if o.Kind == Write {
		o.FUA = j.cfg.FUA
		j.since++
		if j.gen != nil {
			if s.gen++; s.gen >= unknownGen {
				s.gen = 1
			}
			fillVerify(s.buf, j.r.info.BlockSize, j.cfg.Seed, o.Offset, uint64(s.gen))
		}
	}
	if j.left > 0 {
		j.left--
	}
	return true
}

// kind chooses between read and write.
func (j *job) kind() Kind {
	switch j.cfg.Pattern {
	case "read", "randread":
		return Read
	case "write", "randwrite":
		return Write
	}
	// The high half of the product is uniform in [0, 100).
	hi, _ := bits.Mul64(j.random(), 100)
	if int(hi) < j.cfg.ReadPercent {
		return Read
	}
	return Write
}

// place chooses the block of an operation.
func (j *job) place(k Kind) int64 {
	switch {
	case !j.cfg.random():
		b := j.next[k]
		if j.next[k]++; j.next[k] == j.count {
			j.next[k] = 0
		}
		return b
	case j.cfg.NoRandomMap:
		hi, _ := bits.Mul64(j.random(), uint64(j.count))
		return int64(hi)
	}
	if j.step == uint64(j.count) {
		j.step = 0
		j.perm = newPermutation(uint64(j.count), j.random())
	}
	b := j.perm.at(j.step)
	j.step++
	return int64(b)
}

// buildReadBack creates the next read of the verification phase.
func (j *job) buildReadBack(o *Op, s *slot) bool {
	for b := j.next[Read]; b < j.count; b++ {
		g := j.gen[b]
		if !j.cfg.VerifyOnly && (g == 0 || g >= unknownGen) {
			continue
		}
		j.next[Read] = b + 1
		s.block, s.gen = b, g
		o.Kind, o.Offset = Read, j.start+b*int64(j.cfg.BlockBytes)
		return true
	}
	j.next[Read] = j.count
	return false
}

// permutation is a bijection on [0, n): a four-round Feistel network over the next even number of bits. A result
// outside of the range is permuted again.
type permutation struct {
	n    uint64
	half uint // bits of one half
	key  uint64
}

func newPermutation(n, key uint64) permutation {
	w := bits.Len64(n - 1)
	return permutation{n: n, half: uint(max(w+1, 2)) / 2, key: key}
}

func (p *permutation) at(i uint64) uint64 {
	mask := uint64(1)<<p.half - 1
	for {
		l, r := i>>p.half, i&mask
		for round := range uint64(4) {
			l, r = r, l^mix(r^p.key+round<<56)&mask
		}
		if i = l<<p.half | r; i < p.n {
			return i
		}
	}
}
