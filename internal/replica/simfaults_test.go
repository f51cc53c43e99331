package replica_test

import (
	"math/rand/v2"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/replica"
	"jbofd/internal/testutil/hunt"
)

// fault is a fault that is planted between the Replicas and their stores.
type fault uint8

const (
	sound fault = iota
	// missedWrite: a member that is filled acknowledges writes, and does not store them.
	missedWrite
	// lostIdentity: a ChainHead does not look whether the ChainHead before it has done a write.
	lostIdentity
	// noIdentity: writes that are forwarded leave no identity.
	noIdentity
)

// spoil returns what is left of requests to a node's store.
func (s *sim) spoil(n *node, qs []kvstore.Request) (left []kvstore.Request) {
	for _, q := range qs {
		write := q.Op == kvstore.Put || q.Op == kvstore.Delete
		switch {
		case s.fault == missedWrite && write && n.r.Role().Filling:
			p := kvstore.Reply{Tag: q.Tag, Version: q.Given}
			s.later(n, 1, func() { s.call(n, func(r *replica.Replica) { r.Stored(&p) }) })
			continue
		case s.fault == lostIdentity && write && s.epoch > 1:
			q.ID.Retry = false
		case s.fault == noIdentity && write && s.chain[0] != n.id:
			q.ID = kvstore.Identity{}
		}
		left = append(left, q)
	}
	return left
}

// TestPlantedFaultsAreFound: one history in fifteen, or more, shows each fault, so that one of 600 does.
func TestPlantedFaultsAreFound(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	for f, name := range map[fault]string{missedWrite: "missed write", lostIdentity: "lost identity",
		noIdentity: "no identity"} {
		t.Run(name, func(t *testing.T) {
			for i := range uint64(600) {
				found := hunt.Run(func(t hunt.Reporter) { history(t, seed, i, map[string]int{}, f) })
				if found != "" {
					t.Logf("history %d: %.300s", i, found)
					return
				}
			}
			t.Error("not found")
		})
	}
}
