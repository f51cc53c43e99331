package serve

import (
	"fmt"
	"time"
)

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
	limit := c.srv.cfg.StallTimeout
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.Closing() || c.m.Closed() {
		return false
	}
	return c.partial && now-c.partialNS > int64(limit) || c.Stuck(now, limit)
}
