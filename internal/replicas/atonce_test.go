package replicas_test

import (
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/partition"
	"jbofd/internal/replicas"
)

// slowStore answers in Submit, and lets time pass.
type slowStore struct {
	*partition.Partition
	passes func()
}

// Submit implements replicas.Store.
func (s *slowStore) Submit(b *partition.Batch) {
	work := !b.Empty()
	if s.Partition.Submit(b); work {
		s.passes()
	}
}

// TestAuthorityIsLookedAtBehindAFetchThatEndsAtOnce: a value that the store has returned in the same turn is not
// returned to a host if the authority of the node has ended meanwhile.
func TestAuthorityIsLookedAtBehindAFetchThatEndsAtOnce(t *testing.T) {
	var ahead, jump atomic.Int64
	g, m := setup{ranges: 1, atOnce: true,
		clock: func() int64 { return clock() + ahead.Load() },
		store: func(p *partition.Partition) replicas.Store {
			return &slowStore{p, func() { ahead.Add(jump.Load()) }}
		}}.oneNode(t)
	n := g.nodes[0]
	n.r.SetState(m, m)
	h := newHost()
	h.Request = replicas.Request{Key: crrsKey("key"), Op: kvstore.Put, Value: []byte("value")}
	h.want(n, nvme.Success, "")
	h.Kind, h.Value = replicas.Read, make([]byte, 8)
	h.want(n, nvme.Success, "value")
	jump.Store(int64(2 * time.Hour)) // for which nobody has given authority
	h.want(n, nvme.NamespaceNotReady, "")
}
