package target

import (
	"jbofd/internal/drive"
	"jbofd/internal/invariants"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/nvmeof/executor/block"
	"jbofd/internal/nvmeof/executor/kv"
)

// executors carry out I/O commands, by the kind that their plans name.
type executors struct {
	byKind     [nvmeof.Kinds]executor.Executor
	partitions *kv.Executor
	blocks     *block.Executor
}

func newExecutors(cfg *Config) (e executors) {
	e.partitions = kv.New(cfg.Env, cfg.Pool)
	e.blocks = block.New(cfg.SSDs)
	e.byKind[nvmeof.KindBlock] = e.blocks
	e.byKind[nvmeof.KindKV] = e.partitions
	return e
}

// Register gives the commands of one more kind their executor. It is called before the first connection.
func (s *Service) Register(k nvmeof.Kind, e executor.Executor) {
	invariants.Check(s.executors.byKind[k] == nil, "target: two executors of one kind")
	invariants.Check(len(e.Ops()) <= executor.MaxOps, "target: an executor with too many operations")
	s.executors.byKind[k] = e
}

// Executor returns the executor of the kind; nil if there is none.
//
// hot: 0 allocs
func (s *Service) Executor(k nvmeof.Kind) executor.Executor { return s.executors.byKind[k] }

// AddPartition numbers a partition for nvmeof.Namespace.Partition.
func (s *Service) AddPartition(p kv.Partition) (number int) { return s.executors.partitions.Add(p) }

// RemovePartition forgets a partition whose namespaces are gone: after the Apply that has removed them, it gets no more
// Requests, and only those that it has are to be waited for.
func (s *Service) RemovePartition(number int) { s.executors.partitions.Remove(number) }

// SSDName returns the name of a drive.
func (s *Service) SSDName(i int) string { return s.SSD(i).Device().Info().Name }

// ReplaceSSD puts a drive in place of the one of that number, which may be nil. The Apply before has taken away its
// namespaces, and DrainDrive has waited for their commands; the next one may bring namespaces of the new drive. The old
// drive gets no more requests, but those of shutdowns that have begun a flush: the caller must drain it again before it
// closes it. One goroutine at a time calls it.
func (s *Service) ReplaceSSD(number int, d *drive.Drive) {
	s.tenants.mu.Lock()
	for _, all := range []map[string]*tenantState{s.tenants.configured, s.tenants.alone} {
		for _, t := range all {
			d.SetTenant(t.Number, t.Settings)
		}
	}
	s.executors.blocks.Replace(number, d)
	s.tenants.mu.Unlock()
	s.mu.Lock()
	next := newFlusher(s, d)
	if before := s.ends.flushers[number]; before != nil {
		next.waiting, before.waiting = before.waiting, nil
	}
	s.ends.flushers[number] = next
	s.mu.Unlock()
	next.start()
}
