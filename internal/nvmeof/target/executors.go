package target

import (
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
}

func newExecutors(cfg *Config) (e executors) {
	e.partitions = kv.New(cfg.Env, cfg.Pool)
	e.byKind[nvmeof.KindBlock] = block.New(cfg.SSDs)
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
func (s *Service) SSDName(i int) string { return s.cfg.SSDs[i].Device().Info().Name }
