package peers

import (
	"errors"
	"time"
)

// stuck tells connections that work for short commands and not for long ones from those that are lost. Each of them
// would hold up writes for Config.Timeout, and the patience with the node would never end.
type stuck struct {
	// losses counts those in a row for want of an answer, holds how often the node was left alone for them.
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

// hold waits, whoever is in a hurry.
func (n *node) hold(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-n.ctx.Done():
	}
}
