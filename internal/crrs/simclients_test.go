package crrs

import (
	"encoding/binary"
	"math"

	"jbofd/internal/crrs/linear"
)

// The clients.

// load is what clients there are.
type load uint8

const (
	mixed load = iota
	// crowd: many, which read most of the time.
	crowd
	// hot: one that writes one key all the time, and few that read. Stores do not fail: with so many writes, those of
	// all members would at once.
	hot
)

// clients is how many there are, without that of a hot key.
func (s *sim) clients() int {
	switch s.load {
	case crowd:
		return 64
	case hot:
		s.newHotClient()
		return 2
	}
	return 1 + s.rng.IntN(12)
}

// client does operations one after the other.
func (s *sim) client() {
	if s.calm && s.acked > 50 {
		return
	}
	reads := s.load == crowd && s.rng.IntN(8) > 0 || s.load == hot
	if reads || s.rng.IntN(2) > 0 {
		s.read()
	} else {
		s.write()
	}
}

// ask sends a request to a node, and calls done with its reply, or with Unknown after some time.
func (s *sim) ask(n *node, send func(tag uint64, out *Actions), done func(Reply)) {
	s.tags++
	tag := s.tags
	s.pending[tag] = done
	s.after(s.upTo(ms), func() { s.turn(n, func(out *Actions) { send(tag, out) }) })
	patience := 700 * ms
	if s.rng.IntN(3) == 0 {
		patience = 5 * lease
	}
	s.after(patience, func() {
		if s.pending[tag] != nil {
			delete(s.pending, tag)
			done(Reply{Status: Unknown})
		}
	})
}

func (s *sim) anyKey() (k Key) {
	k.Bytes[0], k.Len = byte(min(s.rng.IntN(keys), s.rng.IntN(keys))), 1 // some are hotter
	return k
}

func (s *sim) write() {
	w, o := s.newWrite(s.anyKey())
	w.Conditional, w.Expires = s.rng.IntN(5) == 0, uint32(s.rng.IntN(2))
	if s.rng.IntN(5) == 0 {
		w.Op = Delete
	}
	if w.Conditional {
		s.expected[s.values] = s.seen[w.Key.Bytes[0]]
	}
	s.open++
	s.writing++
	s.try(w, o, 0)
}

// newWrite is a Put of another value than all before.
func (s *sim) newWrite(k Key) (Write, linear.Operation) {
	s.values++
	return Write{Op: Put, Key: k, Position: position(int(k.Bytes[0])), ID: Identity{1, s.values}, KeepUntil: 1,
			Answered: s.begins(k.Bytes[0], s.values), Value: binary.LittleEndian.AppendUint64(nil, s.values)},
		linear.Operation{Write: true, Value: s.values, Begin: s.now, End: math.MaxInt64}
}

// try sends a write to the head of the chain, as far as the client knows, until it knows its outcome or gives up.
func (s *sim) try(w Write, o linear.Operation, tries int) {
	n := s.nodes[s.chain[0]]
	if s.rng.IntN(10) == 0 && !s.calm {
		n = s.nodes[s.rng.IntN(len(s.nodes))]
	}
	s.ask(n, func(tag uint64, out *Actions) {
		w.Tag = tag
		value := w.Value
		w.Value, w.Mem = n.remember(value)
		n.r.Write(w, out)
		w.Value = value
	}, func(r Reply) {
		if *traceSim {
			s.trace("write %d of key %d: %+v", w.ID.Seq, w.Key.Bytes[0], r)
		}
		switch again := tries < 20 || s.calm; {
		case r.Status == OK:
			s.answered(&w)
			o.End = s.now
			s.acked++
			s.seen[w.Key.Bytes[0]] = o.Value
			o.Swap, o.Replaced = w.Conditional, s.expected[w.ID.Seq]
		case r.Status == Refused:
			// It tells what the condition was judged by, as a read does.
			s.ops[w.Key.Bytes[0]] = append(s.ops[w.Key.Bytes[0]],
				linear.Operation{Value: s.judgedBy[w.ID.Seq], Begin: o.Begin, End: s.now})
			if w.Retry {
				break
			}
			s.answered(&w)
			s.writing--
			s.end(nil, 0) // it never happened
			return
		case r.Status == Unreadable && !w.Retry:
			s.answered(&w)
			s.writing--
			s.end(nil, 0)
			return
		case r.Status == Unknown && again && s.rng.IntN(4) > 0:
			w.Retry = true
			s.after(s.upTo(50*ms), func() { s.try(w, o, tries+1) })
			return
		case (r.Status == WrongView || r.Status == Unavailable) && again:
			s.after(s.upTo(50*ms), func() { s.try(w, o, tries+1) })
			return
		}
		s.writing--
		s.end(&o, w.Key.Bytes[0])
	})
}

func (s *sim) read() {
	k := s.anyKey()
	s.open++
	s.tryRead(k, s.now)
}

func (s *sim) tryRead(k Key, begin int64) {
	n := s.nodes[s.rng.IntN(len(s.nodes))]
	if s.calm {
		n = s.nodes[s.chain[s.rng.IntN(len(s.chain))]]
	}
	value := make([]byte, 8)
	s.ask(n, func(tag uint64, out *Actions) {
		s.reading(n, func() { n.r.Read(Read{Key: k, Value: value, Tag: tag}, out) })
	}, func(r Reply) {
		if *traceSim {
			s.trace("read of key %d at %d: %+v %v", k.Bytes[0], n.id, r, value)
		}
		o := linear.Operation{Begin: begin, End: s.now}
		switch r.Status {
		case OK:
			o.Value = binary.LittleEndian.Uint64(value)
		case NotFound:
			o.Value = s.byVersion[k.Bytes[0]][r.Version]
			if r.Version == 0 {
				o.Value = s.expired[k.Bytes[0]]
			}
		case Unreadable:
			s.end(nil, 0)
			return
		default:
			s.after(s.upTo(20*ms), func() { s.tryRead(k, begin) })
			return
		}
		s.acked++
		s.seen[k.Bytes[0]] = o.Value
		s.end(&o, k.Bytes[0])
	})
}

func (s *sim) end(o *linear.Operation, key byte) {
	if o != nil {
		s.ops[key] = append(s.ops[key], *o)
	}
	s.open--
	s.after(s.upTo(5*ms), s.client)
}

// valueOf is what a node's store has of a key.
func (s *sim) valueOf(n *node, k Key) uint64 {
	if o := n.store[k.Bytes[0]]; o.version > 0 {
		return o.value
	}
	return s.expired[k.Bytes[0]]
}
