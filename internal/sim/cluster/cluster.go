// Package cluster runs a cluster of boxes in virtual time: hosts that schedule by tokens, a network, and for each box
// the store, the replicas and the pipeline that the daemon has, on an emulated SSD. It repeats the experiments of
// LEED's evaluation in which several boxes take part. A run reads no clock, and the same seed gives the same result.
//
//	host: flowctl ── NetworkNS ──> replicas ──> partition ──> drive ──> flash.Drive
//	      ^                          │ ^ NetworkNS
//	      └── NetworkNS, credit ──── ┘ └──────> other boxes
//
// Processors and the bandwidth of the network are not simulated: the SSDs are what is short.
package cluster

import (
	"fmt"
	"math/rand/v2"

	"jbofd/internal/bench/ycsb"
	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/flowctl"
	"jbofd/internal/lab"
	"jbofd/internal/nvme"
	"jbofd/internal/pipeline/jbof"
	"jbofd/internal/sim"
	"jbofd/internal/ssd/model/flash"
	"jbofd/internal/uuid"
)

// Lab is what runs share: a preconditioned drive, and its calibration.
type Lab struct {
	sizeBytes int64
	drive     *flash.Drive
	profile   jbof.Profile
}

// NewLab prepares a drive of a preset, all of whose times are multiplied by slowdown.
//
// Errors: flash.ErrConfig.
func NewLab(preset string, sizeBytes int64, slowdown int, seed uint64) (*Lab, error) {
	cfg, err := flash.Preset(preset, sizeBytes)
	if err != nil {
		return nil, err
	}
	cfg.Seed, cfg.Slowdown = seed, slowdown
	l := &Lab{sizeBytes: sizeBytes}
	if l.drive, err = flash.New(cfg); err != nil {
		return nil, err
	}
	l.drive.Precondition(flash.Clean)
	l.profile = sim.Calibrate(l.drive.Clone(), sizeBytes, seed)
	return l, nil
}

// Event is what happens to a box in the middle of a run.
type Event string

// Events, to the last box.
const (
	// Join: it was not there, and is now.
	Join Event = "join"
	// Leave: it is drained.
	Leave Event = "leave"
	// Die: it is gone at once, and its ranges find new copies elsewhere.
	Die Event = "die"
)

// Scenario is one run.
type Scenario struct {
	// Row and Name name it. Figure is the one of the paper that it repeats.
	Row, Name, Figure string
	Nodes, Replicas   int
	// Ranges is a power of two.
	Ranges, Records, ValueBytes int
	// Reads is the share of reads, Theta the skew of YCSB's zipfian distribution; 0: all records alike.
	Reads, Theta float64
	// OneKey: all operations are of one key.
	OneKey bool
	// Hosts have Depth operations under way each.
	Hosts, Depth int
	// ReadTail: only the ChainTail is read, as without CRRS.
	ReadTail bool
	// NoTokens: hosts send what they want when they want.
	NoTokens bool
	Choice   flowctl.Choice
	// FIFO: drives take requests in order of arrival, as many as come, instead of keeping to what they do well with.
	FIFO bool
	// Locked: one write of a key at a time is in its chain, as if it were locked.
	Locked bool
	// NetworkNS is the time of a message from box to box, or between a host and a box.
	NetworkNS int64
	// AgeNS is before WarmNS: hosts only write, so that logs have wrapped, and compaction and the garbage collection of
	// the drives have the part that they have in the long run.
	AgeNS int64
	// WarmNS is before MeasuredNS; BinNS is the resolution of Result.Series. Event happens to the last box when AtNS of
	// the measured time have passed.
	WarmNS, MeasuredNS, BinNS, AtNS int64
	Event                           Event
	Seed                            uint64
}

// Result is what a run has measured.
type Result struct {
	Scenario Scenario `json:"scenario"`
	// OpsPerSec is of the measured time. Reads and Writes are latencies as the application sees them: they count the
	// wait for tokens.
	OpsPerSec     float64 `json:"ops_per_s"`
	Reads, Writes sim.Latency
	// ForwardsPerWrite is how many messages with a value a write has cost, ShippedPercent which reads were passed on to
	// the ChainTail.
	ForwardsPerWrite float64 `json:"forwards_per_write"`
	ShippedPercent   float64 `json:"shipped_percent"`
	// DriveReadBytes is what all drives have read for an operation, compaction and copies for other boxes included.
	DriveReadBytes float64 `json:"drive_read_bytes"`
	// Series are the operations per second of each bin. FullNS is how long after the Event all ranges had all their
	// copies again, FilledBytes what was copied for it.
	Series      []float64 `json:"series,omitempty"`
	FullNS      int64     `json:"full_ns,omitempty"`
	FilledBytes int64     `json:"filled_bytes,omitempty"`
	// Retries are operations that were sent again, Failed those that ended with an error, Failure one of these.
	Retries int         `json:"retries"`
	Failed  int         `json:"failed"`
	Failure nvme.Status `json:"-"`
}

// run is a run under way.
type run struct {
	sc      *Scenario
	lab     *Lab
	sim     *lab.Sim
	nodes   []*node
	view    *view.View
	reports []map[int]view.Report // by partition and range
	hosts   []*host
	// ops are all operations, made how many there were, carried the commands between nodes.
	ops     map[*op]bool
	made    int
	carried map[*delivery]bool

	// loading counts the operations that load records, loaded the records; underWay those of the hosts.
	loading, underWay int
	loaded            uint64
	aging             bool
	measuring, over   bool
	fromNS            int64
	bin               []int
	done, writes      int
	reads, puts       sim.Latencies

	forwards, shipped, retries, failed int
	filledBytes                        int64
	driveBytes                         int64 // what all drives had read when the measured time began
	failure                            nvme.Status
}

// travel runs f when a message has arrived.
func (r *run) travel(f func()) { r.sim.After(r.sc.NetworkNS, f) }

// chooser returns what draws the records of a host's operations.
func (sc *Scenario) chooser(rng *rand.Rand) func() uint64 {
	switch {
	case sc.OneKey:
		return func() uint64 { return 0 }
	case sc.Theta == 0:
		return func() uint64 { return rng.Uint64N(uint64(sc.Records)) }
	}
	return ycsb.Zipfian(uint64(sc.Records), sc.Theta, rng)
}

const (
	// manageNS is how often the manager looks at the cluster.
	manageNS = 20e6
	// patienceNS is how long anything may take that must end.
	patienceNS = 600e9
	loaders    = 64
)

// Run runs a scenario.
//
// Errors: a box does not start or end, or something does not end at all.
func (l *Lab) Run(sc Scenario) (*Result, error) {
	r := &run{sc: &sc, lab: l, sim: lab.NewSim(sc.Seed), reads: sim.NewLatencies(), puts: sim.NewLatencies(),
		ops: map[*op]bool{}, carried: map[*delivery]bool{}}
	if err := r.start(); err != nil {
		return nil, err
	}
	if err := r.load(); err != nil {
		return nil, err
	}
	res, err := r.measure()
	if err != nil {
		return nil, err
	}
	for _, n := range r.nodes {
		if n.up {
			if err := n.close(); err != nil {
				return nil, err
			}
		}
	}
	return res, nil
}

// start starts the boxes and waits until all ranges have their replicas.
func (r *run) start() error {
	sc := r.sc
	r.view = &view.View{Cluster: uuid.UUID{1}, Epoch: 1, Replicas: sc.Replicas, HashSeed: hashSeed,
		Chains: make([]view.Chain, sc.Ranges), ChainEpochs: make([]uint32, sc.Ranges)}
	for i := range sc.Nodes {
		r.view.Nodes = append(r.view.Nodes, view.Node{Name: nodeName(i), Out: sc.Event == Join && i == sc.Nodes-1})
		r.view.Partitions = append(r.view.Partitions, view.Partition{ID: uuid.UUID{2, byte(i)}, Node: uint16(i),
			Weight: 1})
		n, err := r.newNode(i)
		if err != nil {
			return err
		}
		n.up = true
		r.nodes = append(r.nodes, n)
		r.reports = append(r.reports, nil)
	}
	m := &cluster.Map{View: r.view}
	for _, n := range r.nodes {
		n.reps.SetState(m, m)
	}
	r.tick()
	return r.await("the ranges to have all replicas", r.full)
}

// tick lets the manager look at the cluster again and again.
func (r *run) tick() {
	r.manage()
	r.sim.After(manageNS, r.tick)
}

func (r *run) await(what string, done func() bool) error {
	if !r.sim.Run(patienceNS, done) {
		return fmt.Errorf("waited %d s in vain for %s", int64(patienceNS)/1e9, what)
	}
	return nil
}

// load stores all records.
func (r *run) load() error {
	h := r.newHost(0)
	r.loading = loaders
	for range loaders {
		o := h.newOp()
		o.loads = true
		r.next(o)
	}
	if err := r.await("the records to be stored", func() bool { return r.loading == 0 }); err != nil {
		return err
	}
	if r.failed > 0 {
		return fmt.Errorf("%d records could not be stored: %v", r.failed, r.failure)
	}
	return nil
}

// measure lets the hosts work.
func (r *run) measure() (*Result, error) {
	sc := r.sc
	for i := range sc.Hosts {
		h := r.newHost(i)
		r.hosts = append(r.hosts, h)
		for range sc.Depth {
			o := h.newOp()
			r.underWay++
			r.sim.After(1+h.rng.Int64N(sc.NetworkNS+1), func() { h.begin(o) })
		}
	}
	r.aging = true
	r.pass(sc.AgeNS)
	r.aging = false
	r.pass(sc.WarmNS)
	r.measuring, r.fromNS = true, r.sim.Now()
	r.forwards, r.shipped, r.retries, r.failed, r.filledBytes = 0, 0, 0, 0, 0
	r.driveBytes = r.driveReadBytes()
	fullAt := int64(0)
	if sc.Event != "" {
		r.sim.After(sc.AtNS, func() {
			r.happen()
			r.awaitFull(&fullAt)
		})
	}
	r.pass(sc.MeasuredNS)
	res := r.result()
	r.measuring, r.over = false, true
	if sc.Event != "" {
		if err := r.await("all copies to be there", func() bool { return fullAt != 0 }); err != nil {
			return nil, err
		}
		res.FullNS, res.FilledBytes = fullAt-r.fromNS-sc.AtNS, r.filledBytes
	}
	return res, r.await("the operations to end", func() bool { return r.underWay == 0 })
}

// pass lets time pass.
func (r *run) pass(ns int64) {
	end := r.sim.Now() + ns
	r.sim.Run(ns, func() bool { return r.sim.Now() >= end })
}

// awaitFull notes when all ranges have all copies, looking when the manager has looked.
func (r *run) awaitFull(at *int64) {
	r.sim.After(manageNS, func() {
		if r.full() {
			*at = r.sim.Now()
			return
		}
		r.awaitFull(at)
	})
}

// happen lets the event happen.
func (r *run) happen() {
	last := len(r.nodes) - 1
	next := *r.view
	next.Nodes = append([]view.Node(nil), r.view.Nodes...)
	switch r.sc.Event {
	case Join:
		next.Nodes[last].Out = false
	case Leave:
		next.Nodes[last].Out = true
	case Die:
		r.nodes[last].up = false
		r.lost(r.nodes[last])
		r.loseCommands(r.nodes[last])
		next.Nodes[last].Out = true // as if it had been away for too long
	}
	r.view = &next
}

// count counts an operation that has ended well.
func (r *run) count(o *op) {
	if !r.measuring {
		return
	}
	now := r.sim.Now()
	r.done++
	if o.Kind == 0 {
		r.writes++
		r.puts.Observe(now - o.bornNS)
	} else {
		r.reads.Observe(now - o.bornNS)
	}
	if r.sc.BinNS > 0 {
		i := int((now - r.fromNS) / r.sc.BinNS)
		for len(r.bin) <= i {
			r.bin = append(r.bin, 0)
		}
		r.bin[i]++
	}
}

// driveReadBytes is what all drives have read so far.
func (r *run) driveReadBytes() (n int64) {
	for _, box := range r.nodes {
		n += box.dev.readBytes
	}
	return n
}

func (r *run) result() *Result {
	sc := r.sc
	res := &Result{Scenario: *sc, OpsPerSec: float64(r.done) / (float64(sc.MeasuredNS) / 1e9), Reads: r.reads.Sum(),
		Writes: r.puts.Sum(), Retries: r.retries, Failed: r.failed, Failure: r.failure}
	if r.writes > 0 {
		res.ForwardsPerWrite = float64(r.forwards) / float64(r.writes)
	}
	res.DriveReadBytes = float64(r.driveReadBytes()-r.driveBytes) / float64(max(1, r.done))
	if n := r.done - r.writes; n > 0 {
		res.ShippedPercent = 100 * float64(r.shipped) / float64(n)
	}
	for _, n := range r.bin {
		res.Series = append(res.Series, float64(n)/(float64(sc.BinNS)/1e9))
	}
	return res
}
