package connection

// Spinner decides whether waiting for data by asking again and again pays: it
// does where the next command comes within the time that parking and waking a
// goroutine take. It spins only while spinning is successful, and tries again
// now and then.
type Spinner struct {
	// credit counts the spins that may fail before spinning stops.
	credit int8
	// parks counts waits without spinning since it stopped.
	parks uint8
}

const (
	spinCredit = 8  // failures in a row before giving up
	spinRetry  = 64 // waits without before another try
)

// ShouldSpin reports whether to spin this time.
func (s *Spinner) ShouldSpin() bool {
	if s.credit > 0 {
		return true
	}
	if s.parks++; s.parks >= spinRetry {
		s.parks, s.credit = 0, 1
		return true
	}
	return false
}

// Result says whether spinning has found something.
func (s *Spinner) Result(success bool) {
	if success {
		s.credit = spinCredit
	} else {
		s.credit--
	}
}
