package replicas

import (
	"jbofd/internal/kvstore"
	"jbofd/internal/partition"
	"jbofd/internal/turn"
)

// storeRequest is a request of a replica to the store; or, if m is nil, of something else.
type storeRequest struct {
	partition.Request
	g    *Replicas
	m    *member
	of   asksStore
	kind kind
	tag  uint64
	look uint32 // the one before it
	atNS int64  // when the store was given it
	node turn.Node[storeRequest]
	next *storeRequest
}

// asksStore is what asks the store, if it is no replica.
type asksStore uint8

const (
	someDrops asksStore = iota
	knownLosses
	haltedRanges
)

// KVDone implements partition.Sink.
func (s *storeRequest) KVDone(*partition.Request) (kick bool) { return s.g.stored.Push(&s.node) }

// Kick implements partition.Sink.
func (s *storeRequest) Kick() { s.g.driver.Run() }

// store makes a request to the store. It allocates when there are more than before.
//
// hot: 0 allocs
func (g *Replicas) store(m *member, q *kvstore.Request) *storeRequest {
	s := g.freeStore
	if g.storeSpares.take(); s == nil {
		s = &storeRequest{g: g}
		s.node.Item, s.Sink = s, s
	} else {
		g.freeStore = s.next
	}
	s.m, s.of, s.tag, s.next = m, someDrops, q.Tag, nil
	s.Op, s.Condition, s.Value, s.Version, s.Given = q.Op, q.Condition, q.Value, q.Version, q.Given
	s.Expires, s.Tombstone, s.ID, s.Range, s.Background, s.Tenant = q.Expires, q.Tombstone, q.ID, q.Range, q.Background,
		q.Tenant
	s.Sound, s.AheadSeconds = q.Sound, q.AheadSeconds
	s.KeyLen = uint8(copy(s.Key[:], q.Key))
	s.kind = kindOf(q.Op)
	s.look, s.atNS = g.silence.began(s.kind), g.clockNS
	g.atStore++
	g.toStore.Add(&s.Request)
	return s
}

// takeStored takes the store's answer to its replica.
func (g *Replicas) takeStored(s *storeRequest) {
	g.atStore--
	g.silence.ended(s.kind, s.look)
	p := kvstore.Reply{Tag: s.tag, Status: s.Status, ValueLen: s.ValueLen, Version: s.ObjectVersion,
		Expires: s.ObjectExpires}
	switch {
	case g.closed:
	case s.m != nil:
		g.failing.wrote(s)
		g.touch(s.m).Stored(&p)
	case s.of == knownLosses:
		g.losses.Looked(&p)
	case s.of == haltedRanges:
		g.countedHalted(&p)
	default:
		g.dropAnswered(&p)
	}
	s.m, s.Value, s.next = nil, nil, g.freeStore
	g.freeStore = s
	g.storeSpares.n++
}
