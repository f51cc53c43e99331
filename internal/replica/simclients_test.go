package replica_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"

	"jbofd/internal/crrs"
	"jbofd/internal/crrs/linear"
	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/replica"
)

// The clients. Each write has a number, which its value begins with. As a Delete leaves nothing that names it, a key
// has one at most, after its first write was done.

func valueOf(number uint64, length int) []byte {
	v := binary.LittleEndian.AppendUint64(nil, number)
	for len(v) < length {
		v = append(v, byte(number)+byte(len(v)))
	}
	return v
}

func (s *sim) client() {
	switch {
	case s.calm && s.acked >= 50:
	case s.rng.IntN(2) == 0:
		s.write()
	default:
		s.open++
		s.read(s.anyKey(), s.Now())
	}
}

func (s *sim) anyKey() int { return min(s.rng.IntN(keys), s.rng.IntN(keys)) }

// names are those of keys. They are at two parts of the range, of 64, so that a copy of one takes several batches.
// narrowNames are those of keys in narrowRange of 256 ranges.
var names, narrowNames = namesIn(0, 0), namesIn(narrowRange, 8)

const narrowRange = 3

// namesIn returns names of keys of a range, where so many bits of a position say of which one it is.
func namesIn(number uint64, width int) (names [keys]string) {
	n := 0
	for k := range names {
		for ; names[k] == ""; n++ {
			name := fmt.Sprint("key", n)
			at := bits.Reverse64(format.HashKey(hashSeed, []byte(name)))
			if at>>(58-width) == number<<6+uint64(5*(k%2)) {
				names[k] = name
			}
		}
	}
	return names
}

func (s *sim) keyOf(k int) (key crrs.Key) {
	key.Len = uint8(copy(key.Bytes[:], s.names[k]))
	return key
}

// ask sends a request to a node, and calls done with its reply, or with Unknown after some time.
func (s *sim) ask(n *node, send func(r *replica.Replica, tag uint64), done func(replica.Reply)) {
	s.tags++
	tag := s.tags
	s.pending[tag] = done
	s.later(n, s.upTo(ms/4), func() { s.call(n, func(r *replica.Replica) { send(r, tag) }) })
	patience := lease / 2
	if s.rng.IntN(3) == 0 {
		patience = 5 * lease
	}
	s.After(patience, func() {
		if s.pending[tag] != nil {
			delete(s.pending, tag)
			done(replica.Reply{Status: crrs.Unknown})
		}
	})
}

func (s *sim) write() {
	s.values++
	k := s.anyKey()
	st := &s.keys[k]
	length := 8
	if s.rng.IntN(3) == 0 {
		length += s.rng.IntN(longest - 8)
	}
	w := replica.Write{Op: kvstore.Put, Key: s.keyOf(k), Value: valueOf(s.values, length),
		ID: kvstore.Identity{Client: 1, Seq: s.values, KeepUntil: 2e9}}
	o := linear.Operation{Write: true, Value: s.values, Begin: s.Now(), End: math.MaxInt64}
	switch s.rng.IntN(8) {
	case 0:
		if st.deleted == 0 && st.there != 0 {
			st.deleted = s.values
			w.Op, w.Value = kvstore.Delete, nil
		}
	case 1:
		w.Condition = kvstore.IfAbsent
	case 2:
		w.Condition = kvstore.IfPresent
	}
	if st.last != 0 && s.rng.IntN(4) == 0 {
		w.Condition, w.Version, o.Replaced = kvstore.IfVersion, st.last, st.versions[st.last]
	}
	s.open++
	s.try(k, w, o, 0)
}

// try sends a write to the ChainHead, as far as the client knows, until it knows its outcome or gives up.
func (s *sim) try(k int, w replica.Write, o linear.Operation, tries int) {
	n := s.nodes[s.chain[0]]
	if s.rng.IntN(10) == 0 && !s.calm {
		n = s.nodes[s.rng.IntN(len(s.nodes))]
	}
	st := &s.keys[k]
	s.ask(n, func(r *replica.Replica, tag uint64) {
		q := w
		q.Tag, q.Value = tag, bytes.Clone(w.Value)
		r.Write(&q)
		clear(q.Value) // it was copied
	}, func(p replica.Reply) {
		s.trace("write %d of key %d: %+v", o.Value, k, p)
		s.counts[fmt.Sprint("write ", p.Status, " ", p.Refusal)]++
		switch again := tries < 20 || s.calm; {
		case p.Status == crrs.OK:
			o.End = s.Now()
			s.acked++
			s.done(k, w, &o, p.Version)
		case p.Status == crrs.Refused && !w.ID.Retry:
			if st.deleted == o.Value {
				st.deleted = 0
			}
			s.end(k, nil) // it never happened
			return
		case p.Status == crrs.Unknown && again && s.rng.IntN(4) > 0:
			w.ID.Retry = true
			s.After(s.upTo(lease/10), func() { s.try(k, w, o, tries+1) })
			return
		case (p.Status == crrs.WrongView || p.Status == crrs.Unavailable) && again:
			s.After(s.upTo(lease/10), func() { s.try(k, w, o, tries+1) })
			return
		}
		s.end(k, &o)
	})
}

// done notes that a write was done.
func (s *sim) done(k int, w replica.Write, o *linear.Operation, version uint64) {
	st := &s.keys[k]
	if was, known := st.versions[version]; known && was != o.Value {
		s.t.Fatalf("version %d of key %d is of writes %d and %d", version, k, was, o.Value)
	}
	st.versions[version], st.last = o.Value, version
	if st.there == 0 {
		st.there = s.Now()
	}
	s.counts["write done"]++
	if o.Swap = w.Condition == kvstore.IfVersion; o.Swap {
		s.counts["swapped"]++
	}
	if w.ID.Retry {
		s.counts["retry done"]++
	}
	if w.Op == kvstore.Delete {
		s.counts["deleted"]++
	}
}

// read reads a key at any node until one has an answer.
func (s *sim) read(k int, begin int64) {
	n := s.nodes[s.rng.IntN(len(s.nodes))]
	if s.calm {
		n = s.nodes[s.chain[s.rng.IntN(len(s.chain))]]
	}
	value := make([]byte, 8+s.rng.IntN(longest))
	s.ask(n, func(r *replica.Replica, tag uint64) { r.Read(s.keyOf(k), value, 5, tag) }, func(p replica.Reply) {
		s.trace("read of key %d at %d: %+v", k, n.id, p)
		st := &s.keys[k]
		o := linear.Operation{Begin: begin, End: s.Now()}
		switch {
		case p.Status == crrs.OK:
			o.Value = binary.LittleEndian.Uint64(value)
			got := value[:min(p.ValueLen, len(value))]
			if !bytes.Equal(got, valueOf(o.Value, p.ValueLen)[:len(got)]) {
				s.t.Fatalf("key %d has a value of %d bytes that nobody has written: % x", k, p.ValueLen, got[:8])
			}
			if was, known := st.versions[p.Version]; known && was != o.Value {
				s.t.Fatalf("version %d of key %d is of writes %d and %d", p.Version, k, was, o.Value)
			}
			st.versions[p.Version], st.last = o.Value, p.Version
		case p.Status == crrs.NotFound && st.deleted != 0 && begin < st.there:
			s.end(k, nil) // before the first write, or behind the Delete
			return
		case p.Status == crrs.NotFound:
			o.Value = st.deleted
		default:
			s.After(s.upTo(lease/20), func() { s.read(k, begin) })
			return
		}
		s.acked++
		s.counts["read"]++
		s.end(k, &o)
	})
}

func (s *sim) end(k int, o *linear.Operation) {
	if o != nil {
		s.keys[k].ops = append(s.keys[k].ops, *o)
	}
	s.open--
	s.After(s.upTo(5*ms), s.client)
}
