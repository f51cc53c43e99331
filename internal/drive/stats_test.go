package drive

import (
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// countingSink compares the drive's counters with the number of IOs that are Done.
type countingSink struct {
	*benchSink
	t *testing.T
}

func (s *countingSink) Done(io *IO) bool {
	kick := s.benchSink.Done(io)
	if n := s.r.o.Stats().Requests[ssd.Read].Load(); n < int64(s.done) {
		s.t.Errorf("%d reads are done, the counters say %d", s.done, n)
	}
	return kick
}

// A host that has its answer finds its I/O in the counters: a batch of completions is counted before the first Done.
func TestCountersHaveAnIOBeforeItIsDone(t *testing.T) {
	r := newRig(t, rigConfig{}, memory)
	s := &countingSink{&benchSink{r: r, acct: r.pool.Account("host")}, t}
	t.Cleanup(s.acct.Close)
	const depth = 16
	for i := range depth {
		io := &IO{Op: pipeline.Read, Len: 4096, Offset: units.DriveOffset(i) * 4096, Account: s.acct}
		io.Init(s, uint32(i))
		s.ios = append(s.ios, io)
	}
	for range 4 {
		s.round()
	}
	st := r.o.Stats()
	if n, bytes := st.Requests[ssd.Read].Load(), st.Bytes[ssd.Read].Load(); n != 4*depth || bytes != 4*depth*4096 {
		t.Errorf("%d reads of %d bytes were counted, want %d of %d", n, bytes, 4*depth, 4*depth*4096)
	}
	for _, io := range s.ios {
		if r.o.Abort(io) {
			t.Error("Abort says that it takes out an IO that is done")
		}
	}
}
