package swap

import "jbofd/internal/kvstore"

// linear checks the history of one key for linearizability while it is recorded. It keeps every state that the key can
// be in, each with the values that pending operations have observed if they have taken effect.
type linear struct {
	states map[linState]struct{}
	ops    [linSlots]*linOp
	clock  int
}

const (
	linSlots = 7
	linMost  = 6         // more than that have too many orders
	linOpen  = int32(-1) // has not taken effect
	linDead  = int32(-2) // will not
)

type linState struct {
	value int32 // 0: absent
	met   [linSlots]int32
}

type linOp struct {
	do      kvstore.Op
	cond    kvstore.Condition
	version int32
	begun   int
	failed  int // when its outcome became unknown for good; 0: it has not
}

func newLinear() *linear {
	var s linState
	for i := range s.met {
		s.met[i] = linOpen
	}
	return &linear{states: map[linState]struct{}{s: {}}}
}

// invoke begins an operation. surely says that it cannot fail. ok is false if too many are pending.
func (l *linear) invoke(op *linOp, surely bool) (slot int, ok bool) {
	l.clock++
	op.begun = l.clock
	free, used, failed := 0, 0, 0
	for i, o := range l.ops {
		if o == nil {
			free = i
			continue
		}
		used++
		if o.failed != 0 {
			failed++
		}
	}
	if used == linSlots || used >= linMost && (failed < used || !surely) {
		return 0, false
	}
	l.ops[free] = op
	return free, true
}

// step is the state after an operation takes effect.
func (l *linear) step(s linState, slot int) linState {
	o := l.ops[slot]
	met := int32(kvstore.OK)
	switch {
	case o.do == kvstore.Get:
		met = s.value
	case o.do == kvstore.Exist:
		met = min(s.value, 1)
	case o.do == kvstore.Delete && s.value == 0, o.cond == kvstore.IfPresent && s.value == 0:
		met = int32(kvstore.NotFound)
	case o.do == kvstore.Put && o.cond == kvstore.IfAbsent && s.value != 0:
		met = int32(kvstore.Exists)
	default:
		s.value = o.version
		// An operation that had failed before this one began does not take effect after it.
		for i, z := range l.ops {
			if z != nil && z.failed != 0 && z.failed < o.begun && s.met[i] == linOpen {
				s.met[i] = linDead
			}
		}
	}
	s.met[slot] = met
	return s
}

// closure adds the states that pending operations can reach without a response.
func (l *linear) closure() {
	var todo []linState
	for s := range l.states {
		todo = append(todo, s)
	}
	for len(todo) > 0 {
		s := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for i, o := range l.ops {
			if o == nil || s.met[i] != linOpen {
				continue
			}
			n := l.step(s, i)
			if _, known := l.states[n]; !known {
				l.states[n] = struct{}{}
				todo = append(todo, n)
			}
		}
	}
}

// keep replaces the states by the results of f, and drops those that f rejects.
func (l *linear) keep(f func(linState) (linState, bool)) bool {
	next := map[linState]struct{}{}
	for s := range l.states {
		if n, ok := f(s); ok {
			next[n] = struct{}{}
		}
	}
	l.states = next
	return len(next) > 0
}

// respond ends an operation that has observed met. False: no order of the operations explains it.
func (l *linear) respond(slot int, met int32) bool {
	l.clock++
	l.closure()
	l.ops[slot] = nil
	return l.keep(func(s linState) (linState, bool) {
		ok := s.met[slot] == met
		s.met[slot] = linOpen
		return s, ok
	})
}

// nothing ends an operation that had no effect.
func (l *linear) nothing(slot int) bool { return l.respond(slot, linOpen) }

// fail ends an operation that may yet take effect; a read is forgotten.
func (l *linear) fail(slot int) {
	l.clock++
	if o := l.ops[slot]; o.do == kvstore.Put || o.do == kvstore.Delete {
		o.failed = l.clock
		// An operation that can take effect in no state is over.
		l.closure()
		for s := range l.states {
			if s.met[slot] == linOpen {
				return
			}
		}
	}
	l.ops[slot] = nil
	l.keep(func(s linState) (linState, bool) {
		s.met[slot] = linOpen
		return s, true
	})
}

// tidy removes failed operations that can no longer take effect.
func (l *linear) tidy() {
	for i, o := range l.ops {
		if o == nil || o.failed == 0 {
			continue
		}
		open := false
		for s := range l.states {
			open = open || s.met[i] == linOpen
		}
		if !open {
			l.ops[i] = nil
			l.keep(func(s linState) (linState, bool) {
				s.met[i] = linOpen
				return s, true
			})
		}
	}
}

// crash ends all operations: a pending one has taken effect or never will.
func (l *linear) crash() {
	l.closure()
	l.ops = [linSlots]*linOp{}
	l.keep(func(s linState) (linState, bool) {
		for i := range s.met {
			s.met[i] = linOpen
		}
		return s, true
	})
}

// values are what a Get may find now.
func (l *linear) values() []int32 {
	var out []int32
	for s := range l.states {
		out = append(out, s.value)
	}
	return out
}
