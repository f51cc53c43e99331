// Package publish makes namespaces visible to hosts and takes them away again: the part of a reload that touches what
// hosts use.
//
//	Publish ──> new stores are registered ──> tenants ──> target.Service.Apply ──> stores without namespace are closed
//	Erase   ──> DrainDrive ──> zeroes ──> flush
//
// What a namespace lies on is the caller's affair: the daemon finds it in the labels of its drives. The caller also
// sees to it that only one Publish or Erase is under way.
package publish

import (
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/drive"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/partition"
	"jbofd/internal/uuid"
)

// closeTimeout is how long a store may take to stop whose namespace was removed.
const closeTimeout = 10 * time.Second

// Store is the open partition of a key-value namespace.
type Store struct {
	*partition.Partition
	// UUID is that of the namespace's extent, NQN its subsystem.
	UUID uuid.UUID
	NQN  string
	NSID uint32
	// number is the partition's number in the target service; -1 before the service has it.
	number int
}

// NewStore describes a partition that was opened. Publish registers it.
func NewStore(p *partition.Partition, id uuid.UUID, nqn string, nsid uint32) *Store {
	return &Store{Partition: p, UUID: id, NQN: nqn, NSID: nsid, number: -1}
}

// Config describes a Publisher.
type Config struct {
	Service *target.Service
	// Closed is told how a store was closed; see partition.Partition.Close. CloseAll calls it from several goroutines.
	Closed func(s *Store, err error)
	// MDTSBytes bounds the data of a command; 0: nothing does.
	MDTSBytes uint32
	// Stopping is closed when the node is to stop; see Publisher.Close. Nil: it never is.
	Stopping <-chan struct{}
}

// Publisher knows the stores that are open. Its methods may be called from any goroutine.
type Publisher struct {
	cfg Config
	// mu guards what follows.
	mu   sync.Mutex
	open map[uuid.UUID]*Store
	// published are the namespaces that hosts have.
	published map[uuid.UUID]bool
	// undrained are drives that may have requests of a store that was not closed in time, or of an Erase that has
	// failed, with the number of the latest such end: a Drain that began before it does not count for it.
	undrained map[*drive.Drive]uint64
	// ends is the latest of those numbers.
	ends uint64
}

// New returns a Publisher that has published nothing.
func New(cfg Config) *Publisher {
	return &Publisher{cfg: cfg, open: map[uuid.UUID]*Store{}, undrained: map[*drive.Drive]uint64{}}
}

// Publication is what hosts are to see.
type Publication struct {
	// State is what the target serves. Publish fills in the stores of its key-value namespaces and leaves those out
	// that have none.
	State   nvmeof.State
	Tenants []target.TenantConfig
	// Stores are the stores of namespaces in State. A namespace of keys and values that is not in it is left out.
	Stores map[*nvmeof.Namespace]*Store
}

// Publish puts a Publication in place of the one before. When it returns, no command of a namespace that was removed
// starts any more, and the stores of removed namespaces are closed. A drive may still have commands: see Erase.
func (p *Publisher) Publish(what Publication) {
	p.register(&what)
	p.cfg.Service.SetTenants(what.Tenants)
	p.cfg.Service.Apply(what.State)
	published := map[uuid.UUID]bool{}
	for _, st := range what.State.Subsystems {
		for _, ns := range st.Namespaces {
			published[ns.UUID] = true
		}
	}
	p.mu.Lock()
	p.published = published
	p.mu.Unlock()
	p.retire(what.Stores)
}

// register gives new stores their numbers, namespaces the numbers of their stores, and leaves out namespaces without.
func (p *Publisher) register(what *Publication) {
	p.mu.Lock()
	defer p.mu.Unlock()
	what.State.Subsystems = slices.Clone(what.State.Subsystems)
	for i := range what.State.Subsystems {
		st := &what.State.Subsystems[i]
		all := st.Namespaces
		st.Namespaces = nil
		for _, ns := range all {
			s := what.Stores[ns]
			if s == nil && ns.CSI == nvme.CSIKV {
				continue
			}
			if s != nil {
				if s.number < 0 {
					s.number = p.cfg.Service.AddPartition(s)
					p.open[s.UUID] = s
				}
				ns.Partition, ns.MaxValueBytes, ns.UsedBytes = s.number, s.MaxValueBytes(), s.UsedBytes
				if ns.Executor == nvmeof.KindReplica {
					ns.MaxValueBytes = nvmeof.MaxReplicatedValue(ns.MaxValueBytes, p.cfg.MDTSBytes)
				}
			}
			st.Namespaces = append(st.Namespaces, ns)
		}
	}
}

// retire closes the stores that no namespace uses any more.
func (p *Publisher) retire(used map[*nvmeof.Namespace]*Store) {
	keep := map[uuid.UUID]bool{}
	for _, s := range used {
		keep[s.UUID] = true
	}
	p.mu.Lock()
	var gone []*Store
	for id, s := range p.open {
		if !keep[id] {
			gone = append(gone, s)
			delete(p.open, id)
		}
	}
	p.mu.Unlock()
	slices.SortFunc(gone, func(a, b *Store) int { return a.number - b.number })
	for _, s := range gone {
		p.cfg.Service.RemovePartition(s.number)
		p.Close(s, closeTimeout)
	}
}

// Close closes a store that hosts do not use, and tells Config.Closed. It is for stores that were opened and are not
// published. Once the node is to stop, it waits only for the last checkpoint: for half a second, or longer while the
// checkpoint makes progress (partition.MinCheckpointRate).
func (p *Publisher) Close(s *Store, patience time.Duration) {
	p.closed(s, s.CloseWith(partition.CloseOptions{Patience: patience, Stop: p.cfg.Stopping}))
}

// closed notes how a store was closed.
func (p *Publisher) closed(s *Store, err error) {
	if err != nil && !errors.Is(err, partition.ErrKeysSwapped) {
		p.leftover(s.Drive())
	}
	p.cfg.Closed(s, err)
}

// leftover notes that a drive may have requests that nobody waits for any more.
func (p *Publisher) leftover(d *drive.Drive) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ends++
	p.undrained[d] = p.ends
}

// Published reports whether hosts have the namespace with that UUID.
func (p *Publisher) Published(id uuid.UUID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.published[id]
}

// Vacate waits until a drive has no requests any more of stores that were not closed in time, or of an Erase that has
// failed. It is called before a part of the drive gets a user, who may have had it before: when a namespace gets an
// extent or a longer one, is published again, or its store is opened. A late write would damage what they have written.
//
// Errors: those of target.Service.DrainDrive.
func (p *Publisher) Vacate(d *drive.Drive, stop <-chan struct{}) error {
	p.mu.Lock()
	_, undrained := p.undrained[d]
	p.mu.Unlock()
	if !undrained {
		return nil
	}
	return p.Drain(d, stop)
}

// Drain waits until a drive has nothing that was sent before, and so nothing that Vacate waits for.
//
// Errors: those of target.Service.DrainDrive.
func (p *Publisher) Drain(d *drive.Drive, stop <-chan struct{}) error {
	p.mu.Lock()
	before := p.ends
	p.mu.Unlock()
	if err := p.cfg.Service.DrainDrive(d, stop); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.undrained[d] <= before {
		delete(p.undrained, d)
	}
	return nil
}

// Undrained is how many drives may have requests that Vacate waits for.
func (p *Publisher) Undrained() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.undrained)
}

// CloseAll closes all stores. There are no requests to them any more. Beyond the patience, which each store has, it
// takes CheckpointTime at most.
func (p *Publisher) CloseAll(patience time.Duration) {
	p.mu.Lock()
	open := p.open
	p.open = map[uuid.UUID]*Store{}
	p.mu.Unlock()
	sharing := map[*drive.Drive]int{}
	for _, s := range open {
		sharing[s.Drive()]++
	}
	env, left, done := p.cfg.Service.Env(), atomic.Int64{}, make(chan struct{})
	if left.Store(int64(len(open))); len(open) == 0 {
		return
	}
	for _, s := range slices.SortedFunc(maps.Values(open), func(a, b *Store) int { return a.number - b.number }) {
		env.Go(func() {
			p.closed(s, s.CloseWith(partition.CloseOptions{Patience: patience, Sharing: sharing[s.Drive()]}))
			if left.Add(-1) == 0 {
				close(done)
			}
		})
	}
	env.Wait(done, -1)
}

// CheckpointTime is how long the last checkpoints of all open stores take, if they are written as slowly as they may
// be.
func (p *Publisher) CheckpointTime() time.Duration {
	byDrive := map[*drive.Drive]int64{}
	longest := int64(0)
	for _, s := range p.Stores() {
		byDrive[s.Drive()] += s.LastCheckpointBytes()
		longest = max(longest, byDrive[s.Drive()])
	}
	return time.Duration(longest * int64(time.Second) / partition.MinCheckpointRate)
}

// Store returns the store on the extent with that UUID; nil if it is not open.
func (p *Publisher) Store(id uuid.UUID) *Store {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.open[id]
}

// Stores returns the open stores, in any order.
func (p *Publisher) Stores() []*Store {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Values(p.open))
}
