package crrs

import (
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/crrs/linear"
	"jbofd/internal/kvstore/format"
)

// A hot key, in the simulated chain: one client has many writes of it under way, as client/cluster does. It has one map
// for all of them: when that changes, writes at other nodes than the ChainHead are cancelled, and those that pause go
// on, all together. When a node is lost, all that are there are lost with it. What has to be sent again pauses for up
// to 100 ms, each write for itself; other writes do not begin meanwhile, nor when one was overtaken too often.

const (
	// hotDepth is how many writes of the key are under way, hotAhead by how many one may be overtaken.
	hotDepth = 32
	hotAhead = 62
	hotKey   = 0
)

// hotClient is that client.
type hotClient struct {
	s *sim
	// head is the ChainHead by the client's map.
	head int
	// sent are the writes that are at a node, by tag. paused pause, held have not begun because others are late.
	sent         map[uint64]*hotWrite
	paused, held []*hotWrite
	late         int
	// retried counts the writes that were sent again as retries, moved the maps that the client has had.
	retried, moved int
}

type hotWrite struct {
	Write
	o     linear.Operation
	node  int
	begun bool
	late  bool
	pause int // counts its pauses
}

func (s *sim) newHotClient() {
	h := &hotClient{s: s, head: s.chain[0], sent: map[uint64]*hotWrite{}}
	s.hot = h
	for range hotDepth {
		s.after(s.upTo(ms), h.begin)
	}
}

// begin begins another operation.
func (h *hotClient) begin() {
	if h.s.calm && h.s.acked > 50 {
		return
	}
	h.s.open++
	h.next(&hotWrite{})
}

// next sends a write to the ChainHead, as far as the client knows it.
func (h *hotClient) next(w *hotWrite) {
	s := h.s
	if !w.begun {
		if h.mustWait() {
			h.held = append(h.held, w)
			return
		}
		s.writing++
		w.begun = true
		w.Write, w.o = s.newWrite(Key{Bytes: [16]byte{hotKey}, Len: 1})
	}
	s.tags++
	tag := s.tags
	w.node, h.sent[tag] = h.head, w
	n := s.nodes[w.node]
	s.pending[tag] = func(r Reply) { h.answer(tag, r) }
	s.after(s.upTo(ms), func() {
		s.turn(n, func(out *Actions) {
			q := w.Write
			q.Tag = tag
			q.Value, q.Mem = n.remember(w.Value)
			n.r.Write(q, out)
		})
	})
}

// mustWait reports whether no write may begin.
func (h *hotClient) mustWait() bool {
	u := h.s.unanswered[hotKey]
	return h.s.fault != hasty && (h.late > 0 || len(u) > 0 && h.s.values+1-u[0] >= hotAhead)
}

// answer handles the answer to a write; Unknown: there is none.
func (h *hotClient) answer(tag uint64, r Reply) {
	s, w := h.s, h.sent[tag]
	if w == nil {
		return // it was cancelled meanwhile
	}
	delete(h.sent, tag)
	delete(s.pending, tag)
	if r.Status == OK {
		s.answered(&w.Write)
		w.o.End = s.now
		s.acked++
		s.seen[hotKey] = w.o.Value
		s.ops[hotKey] = append(s.ops[hotKey], w.o)
		s.open--
		s.writing--
		if w.late {
			h.late--
		}
		for len(h.held) > 0 && !h.mustWait() {
			o := h.held[0]
			h.held = h.held[1:]
			h.next(o)
		}
		s.after(s.upTo(ms), h.begin)
		return
	}
	if r.Status == Unknown {
		w.Retry = true
		h.retried++
	}
	if !w.late {
		w.late = true
		h.late++
	}
	w.pause++
	pause := w.pause
	h.paused = append(h.paused, w)
	s.after(50*ms+s.upTo(50*ms), func() {
		if i := slices.Index(h.paused, w); i >= 0 && w.pause == pause {
			h.paused = slices.Delete(h.paused, i, i+1)
			h.next(w)
		}
	})
}

// lost notes that the connection to a node is lost.
func (h *hotClient) lost(gone func(node int) bool) {
	tags := []uint64{}
	for tag, w := range h.sent {
		if gone(w.node) {
			tags = append(tags, tag)
		}
	}
	slices.Sort(tags)
	for _, tag := range tags {
		h.answer(tag, Reply{Status: Unknown})
	}
}

// learn has the client read the map a little later.
func (h *hotClient) learn() {
	s := h.s
	s.after(s.upTo(20*ms), func() {
		if h.head == s.chain[0] {
			return
		}
		h.moved++
		h.head = s.chain[0]
		h.lost(func(node int) bool { return node != h.head })
		paused := h.paused
		h.paused = nil
		for _, w := range paused {
			h.next(w)
		}
	})
}

// TestTheIdentitiesOfAHotKeyAreFew: stores need not drop any before its time, whatever becomes of the ChainHeads. If
// writes begin while others have to be sent again, they must.
func TestTheIdentitiesOfAHotKeyAreFew(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	for _, f := range []fault{sound, hasty} {
		most, ops, moved, retried := 0, 0, 0, 0
		for i := range min(*runsFlag, 40) {
			if i >= 16 && f == sound || most > format.MaxIdentities {
				break
			}
			s := run(t, seed, *nthFlag+4*i+i%2, hot, f) // not those that lose segments
			most = max(most, s.most)
			ops, moved, retried = ops+len(s.ops[hotKey]), moved+s.hot.moved, retried+s.hot.retried
		}
		t.Logf("fault %d: at most %d identities, %d writes, %d other ChainHeads, %d retries", f, most, ops, moved,
			retried)
		if few := most <= format.MaxIdentities; few != (f == sound) && (*runsFlag >= 40 || !few) {
			t.Errorf("fault %d: %d identities of a key were to be kept, at most %d are", f, most, format.MaxIdentities)
		}
		if f == sound && (moved == 0 || retried == 0) && *runsFlag >= 40 {
			t.Error("no ChainHead was lost")
		}
	}
}
