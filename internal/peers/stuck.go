package peers

import (
	"errors"
	"time"

	"jbofd/internal/cluster"
)

// stuck finds a node whose connections can be made and answer keep-alives, but not long commands, as where the network
// drops long packets (a black hole of path MTU discovery). Each such connection holds up writes for Config.Timeout. As
// it is made again at once, the node would never count as out of reach (replicas.Config.Patience).
//
// Long packets to the node are those of Forwards, and what is behind a lost one in a queue for writes gets no answer.
// Those queues wait for no drive. Ships, Compares and Fetches do, so that they do not count: one slow drive would cut
// off the partitions on all others. They are short, and their answers are not longer than what a connection begins with
// (Identify).
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
	if !errors.Is(err, errUnanswered) || errors.Is(err, errSlow) || lasted > stuckWithin {
		s.reset()
		return 0
	}
	if s.losses++; s.losses < maxStuck {
		return 0
	}
	s.losses = maxStuck - 1 // the next one is enough
	s.holds++
	return min(hold<<min(s.holds-1, 20), max(hold, maxHold))
}

// reset forgets what was.
func (s *stuck) reset() { *s = stuck{} }

// hold waits, and does not end early for a redial. It does when a view admits another process of the node than the one
// that there was, and returns true.
func (n *node) hold(d time.Duration, was cluster.Incarnation) (other bool) {
	t := time.NewTimer(d)
	defer t.Stop()
	for {
		if n.process() != was {
			return true
		}
		select {
		case <-t.C:
			return false
		case <-n.ctx.Done():
			return false
		case <-n.asked:
		}
	}
}

// process returns the node's process that the view admits; 0: none.
func (n *node) process() cluster.Incarnation {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.admitted
}
