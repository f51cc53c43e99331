package cluster

import (
	"time"

	"jbofd/internal/nvme"
)

// hedgeTime is when a read asks a second member. It is void once the request has begun another operation (use) or
// another try (tries).
type hedgeTime struct {
	r     *request
	use   uint64
	tries int
	at    time.Duration
}

// hedgeAt notes that a read was sent that may have to ask a second member.
func (e *engine) hedgeAt(now time.Duration, r *request) { // hot: 0 allocs
	at := now + e.s.o.Hedge
	e.hedges = append(e.hedges, hedgeTime{r, r.use, r.tries, at})
	e.setTimer(now, at)
}

// hedge asks second members for the reads whose time has come, and sets the timer for the next one.
func (e *engine) hedge(now time.Duration) {
	n := 0
	for n < len(e.hedges) && e.hedges[n].at <= now {
		h := &e.hedges[n]
		if h.r.phase == sent && h.r.use == h.use && h.r.tries == h.tries {
			h.r.askSecond(now)
		}
		n++
	}
	e.hedges = e.hedges[:copy(e.hedges, e.hedges[n:])]
	if len(e.hedges) > 0 {
		e.setTimer(now, e.hedges[0].at)
	}
}

// askSecond queues a second command of a read, for another member than the one that was asked first, if one has the
// tokens for it now; pump sends it. If none has, the read is not hedged: it is not worth it to wait for tokens, because
// the first member may answer in the meantime.
//
// It does nothing if the first command has ended or was cancelled, if a second one is outstanding or queued, or if the
// read has its answer.
func (r *request) askSecond(now time.Duration) {
	h := r.second
	if r.phase != sent || r.write() || !r.a.open || r.a.why != nil || h.open || !h.flow.Idle() || r.winner != nil {
		return
	}
	last := r.last // choose overwrites it when it finds no member, but no try has failed
	ok := h.choose(r.a.x)
	r.last = last
	if !ok {
		return
	}
	if !r.e.flow.Add(int64(now), &h.flow) {
		r.e.flow.Remove(int64(now), &h.flow)
		return
	}
	// Both commands may be reading at the same time, so that each needs its own buffer.
	if n := len(r.op.Cmd.Data); cap(h.buf) < n || h.buf == nil {
		h.buf = make([]byte, n)
	}
	h.buf = h.buf[:cap(h.buf)]
	r.s.stats.hedged.Add(1)
}

// raced handles the end of one of the commands of a read that may be hedged. It returns the one whose outcome is that
// of the read, once all have ended; nil before that.
func (r *request) raced(now time.Duration, at *attempt) *attempt {
	if r.winner == nil && at.io.Err == nil && answers(at.io.Comp.Status) {
		r.winner = at
	}
	other := &r.a
	if at == other {
		other = r.second
	}
	if r.open > 0 {
		if r.winner != nil {
			other.cancel(now, errHedged) // which may call raced again
		} else {
			r.tried = append(r.tried, at.x)
		}
		return nil
	}
	if r.winner != nil {
		at = r.winner
		r.winner = nil
	}
	if at == r.second {
		copy(r.op.Cmd.Data, at.buf)
	}
	at.take()
	return at
}

// answers reports whether a read's status is its answer: the value, or that the key does not exist. Another final
// status does not win against the other command.
func answers(st nvme.Status) bool { return st.OK() || st.Code() == nvme.KeyDoesNotExist }
