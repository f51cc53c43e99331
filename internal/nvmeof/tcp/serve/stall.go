package serve

import (
	"fmt"
	"time"
)

// stall is what a sweep remembers of a connection.
type stall struct {
	// slot, askedNS and got are the oldest R2T that is not answered whole and how much
	// of it was, sinceNS when that changed last.
	slot, got        int
	askedNS, sinceNS int64
}

// sweep closes connections whose hosts have stopped in the middle of a PDU, or do
// not send what an R2T asked for: they hold buffers. A host that answers its R2Ts in
// their order may take as long as it likes for all of them, as it goes on.
func (s *Server) sweep() {
	tick := time.NewTicker(max(s.cfg.StallTimeout/4, 10*time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-s.done:
			return
		case <-tick.C:
		}
		now := s.fabric.Clock()
		s.mu.Lock()
		for c := range s.conns {
			if c.stuck(now) {
				c.shut(fmt.Sprintf("the host stopped in the middle of a transfer for %v", s.cfg.StallTimeout))
			}
		}
		s.mu.Unlock()
	}
}

// stuck reports whether the host has owed something for StallTimeout.
func (c *conn) stuck(now int64) bool {
	limit := int64(c.srv.cfg.StallTimeout)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing || c.m.Closed() {
		return false
	}
	if c.partial && now-c.seen.Load() > limit {
		return true
	}
	oldest := stall{slot: -1}
	c.m.Awaited(func(i, got int) {
		if asked := c.slots[i].askedNS; oldest.slot < 0 || asked < oldest.askedNS {
			oldest = stall{slot: i, got: got, askedNS: asked}
		}
	})
	last := &c.stall
	if oldest.slot < 0 || oldest.slot != last.slot || oldest.got != last.got || oldest.askedNS != last.askedNS {
		*last = oldest
		last.sinceNS = now
		return false
	}
	return now-last.sinceNS > limit
}
