package kvstore

// scarce reports that there is not much more than emptying the key log needs: then nothing else is emptied.
func (s *Store) scarce() bool { return s.pool.Free <= s.need+2 }

// tight reports that writers that would only write to the key log have to wait for compaction, as Puts have begun to
// before.
func (s *Store) tight() bool { return s.scarce() && !s.compact.nothing && !s.stopping }

// gate lets a writer without a value wait.
func (s *Store) gate(i int32) {
	l := &s.gated
	s.ops[i].nextValue = nobody
	if l.n == 0 {
		l.first = i
	} else {
		s.ops[l.last].nextValue = i
	}
	l.last = i
	l.n++
}

// openGate lets them go on as soon as there is room, or nobody who makes some.
func (s *Store) openGate() {
	for l := &s.gated; l.n > 0 && !s.tight(); {
		i := l.first
		l.first = s.ops[i].nextValue
		l.n--
		s.ops[i].ready = true
		s.considerWriter(i)
	}
}
