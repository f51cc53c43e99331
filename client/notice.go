package client

import (
	"sync"
	"time"
)

// noAnswer is why a Connect takes long as long as the target has not answered.
const noAnswer = "no answer yet"

// slowNotice logs why a Connect takes long: nothing until Options.slowConnect has passed, then each reason once.
type slowNotice struct {
	opts  *Options
	timer *time.Timer

	mu     sync.Mutex
	slow   bool // the time has passed
	ended  bool
	reason string
	logged string // the reason that was logged last
}

// newSlowNotice starts the time. end must follow.
func newSlowNotice(o *Options) *slowNotice {
	n := &slowNotice{opts: o, reason: noAnswer}
	n.timer = time.AfterFunc(o.slowConnect, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.slow = true
		n.say()
	})
	return n
}

// because changes the reason.
func (n *slowNotice) because(reason string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.reason = reason
	n.say()
}

// say logs the reason if it is due and new. The caller holds mu.
func (n *slowNotice) say() {
	if n.slow && !n.ended && n.reason != n.logged {
		n.opts.Logger.Warn("still connecting", "address", n.opts.URL(), "subnqn", n.opts.SubNQN, "reason", n.reason)
		n.logged = n.reason
	}
}

// end ends the notice: nothing is logged after it.
func (n *slowNotice) end() {
	n.timer.Stop()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ended = true
}
