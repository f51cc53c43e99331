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
// Long packets to the node are those of Forwards. Commands after a lost one in a queue for writes get no answer either.
// Those queues wait for no drive. Ships, Compares and Fetches do, so that they do not count: one slow drive would cut
// off the partitions on all others. They are short, and their answers are not longer than those with which a connection
// begins (Identify).
type stuck struct {
	// losses counts the connections in a row that have ended because a command got no answer, holds how often there was
	// a pause (Config.Hold) for that.
	losses, holds int
}

const (
	// maxStuck connections may end like that, each within stuckWithin.
	maxStuck    = 3
	stuckWithin = 30 * time.Second
	maxHold     = 10 * time.Minute
)

// after handles the end of a connection that has lasted for some time, and returns for how long no other one may be
// made; 0: one may. hold is Config.Hold.
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

// reset sets the counts to 0.
func (s *stuck) reset() { *s = stuck{} }

// hold waits. A redial does not end it early. It ends early, and returns true, when a view admits another process of
// the node than was.
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
