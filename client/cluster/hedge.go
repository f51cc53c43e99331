package cluster

import (
	"sync"
	"time"

	"jbofd/client"
	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
)

// hedge asks a second member for what a request reads, if the first one does not answer soon. It belongs to a request,
// and has a command and a buffer of its own.
type hedge struct {
	r     *request
	timer *time.Timer
	cmd   host.Command
	buf   []byte
	ctx   attempt

	mu sync.Mutex
	// m, first and place (the position of the key) are of the read that is under way; m is nil if there is none, or it
	// is too late.
	m     *clusterMap
	first *member
	place uint64
	// running: the second member is asked; ended, of capacity 1, tells the end. won: comp is the answer.
	running, won bool
	comp         client.Completion
	ended        chan struct{}
}

func newHedge(r *request) *hedge {
	h := &hedge{r: r, ended: make(chan struct{}, 1)}
	h.timer = time.AfterFunc(time.Hour, h.ask)
	h.timer.Stop()
	return h
}

// do sends the request's command to a member, and if need be to a second one.
func (h *hedge) do(m *clusterMap, x *member, c *client.Controller) (client.Completion, error) {
	r := h.r
	h.mu.Lock()
	h.m, h.first, h.place, h.running, h.won = m, x, r.position, false, false
	h.mu.Unlock()
	h.timer.Reset(r.s.o.Hedge)
	comp, err := c.Do(&r.attempt, r.op.Kind().String(), false, &r.op.Cmd)
	h.timer.Stop()
	h.mu.Lock()
	h.m = nil // ask does not begin any more
	running := h.running
	h.mu.Unlock()
	if !running {
		return comp, err
	}
	late := err == nil && answers(comp.Status)
	if late {
		h.ctx.cancel(errHedged)
	}
	<-h.ended
	if !late && h.won {
		copy(r.op.Cmd.Data, h.cmd.Data)
		return h.comp, nil
	}
	return comp, err
}

// ask asks the second member. It runs in a goroutine of its own.
func (h *hedge) ask() {
	h.mu.Lock()
	if h.m == nil || h.running { // a timer that has fired at the end of an earlier read may be that late
		h.mu.Unlock()
		return
	}
	x, c := h.second()
	if x == nil {
		h.mu.Unlock()
		return
	}
	h.running = true
	h.ctx.reset()
	h.cmd = h.r.op.Cmd
	if n := len(h.cmd.Data); cap(h.buf) < n {
		h.buf = make([]byte, n)
	}
	h.cmd.Data = h.buf[:len(h.cmd.Data)]
	h.mu.Unlock()
	h.r.s.stats.hedged.Add(1)
	h.r.s.stats.tries.Add(1)
	if sp := x.space.Load(); sp != nil {
		h.cmd.SQE.SetNSID(sp.NSID)
		x.outstanding.Add(1)
		comp, err := c.Do(&h.ctx, h.r.op.Kind().String(), false, &h.cmd)
		x.outstanding.Add(-1)
		if err == nil && answers(comp.Status) {
			h.won, h.comp = true, comp
			h.r.attempt.cancel(errHedged)
		}
	}
	h.ended <- struct{}{}
}

// second returns the member to ask besides the first one. mu is held.
func (h *hedge) second() (best *member, bestC *client.Controller) {
	var bestScore score
	for _, x := range h.m.chainOf(h.place).members {
		c, sp := x.node.connected(), x.space.Load()
		if x == h.first || c == nil || sp == nil {
			continue
		}
		if sc := x.score(c, sp); best == nil || sc.before(bestScore) {
			best, bestC, bestScore = x, c, sc
		}
	}
	return best, bestC
}

// answers reports whether a status says something of the key.
func answers(st nvme.Status) bool { return st.OK() || st.Code() == nvme.KeyDoesNotExist }
