package serve

import (
	"fmt"
	"time"

	"jbofd/internal/nvmeof/target/connection"
)

// sweep closes connections whose hosts have stopped in the middle of a PDU, or do
// not send what an R2T asked for, or send it at less than MinBytesPerSec: they hold
// buffers.
func (s *Server) sweep() {
	tick := time.NewTicker(max(s.cfg.StallTimeout/4, 10*time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-s.done:
			return
		case <-tick.C:
		}
		now := s.service.Clock()
		s.mu.Lock()
		for c := range s.conns {
			if c.stuck(now) {
				c.shut(fmt.Sprintf("the host stopped in the middle of a transfer for %v, or went on at less than %d "+
					"bytes per second",
					s.cfg.StallTimeout, s.cfg.MinBytesPerSec))
			}
		}
		s.mu.Unlock()
	}
}

// limits are how slow the host may be.
func (s *Server) limits() connection.StallLimits {
	return connection.StallLimits{Timeout: s.cfg.StallTimeout, BytesPerSec: s.cfg.MinBytesPerSec}
}

// stuck reports whether the host has owed something for too long.
func (c *conn) stuck(now int64) bool {
	limits := c.srv.limits()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.Closing() || c.m.Closed() {
		return false
	}
	if c.partial && (now-c.partialNS > int64(limits.Timeout) ||
		now-c.partialSince > int64(limits.Allows(int(c.srv.cfg.Machine.MaxH2CDataBytes)))) {
		return true
	}
	return c.Stuck(now, limits)
}
