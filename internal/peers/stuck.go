package peers

import (
	"errors"
	"time"
)

// stuck finds a node whose connections can be made and answer keep-alives, but not long commands, as where the network
// drops long packets (a black hole of path MTU discovery). Each such connection holds up writes for Config.Timeout. As
// it is made again at once, the node would never count as out of reach (replicas.Config.Patience).
type stuck struct {
	// losses counts the connections in a row that have ended because a command got no answer, holds how often the node
	// was left alone for that.
	losses, holds int
}

const (
	// maxStuck is how many connections may end like that, each within stuckWithin.
	maxStuck    = 3
	stuckWithin = 30 * time.Second
	maxHold     = 10 * time.Minute
)

// after takes the end of a connection, and returns for how long there must not be another one, 0: there may be.
func (s *stuck) after(err error, lasted, hold time.Duration) time.Duration {
	if !errors.Is(err, errUnanswered) || lasted > stuckWithin {
		*s = stuck{}
		return 0
	}
	if s.losses++; s.losses < maxStuck {
		return 0
	}
	s.losses = maxStuck - 1 // the next one is enough
	s.holds++
	return min(hold<<min(s.holds-1, 20), max(hold, maxHold))
}

// hold waits, and does not end early for a redial.
func (n *node) hold(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-n.ctx.Done():
	}
}
