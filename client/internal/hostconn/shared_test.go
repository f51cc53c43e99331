package hostconn

import (
	"errors"
	"sync"
	"testing"

	"jbofd/client/internal/host"
)

// closableConn is a connection without a target. Its machine must not be used after Close.
type closableConn struct {
	Conn
	t      *testing.T
	once   sync.Once
	ended  chan struct{}
	closed bool
}

func (c *closableConn) Machine() host.Machine { return closableMachine{c: c} }

func (c *closableConn) AwaitRecv(step func() bool) error { return c.await(step) }
func (c *closableConn) AwaitSend(step func() bool) error { return c.await(step) }

func (c *closableConn) await(step func() bool) error {
	<-c.ended
	step()
	return nil
}

func (c *closableConn) Send() (bool, error) { return false, nil }
func (c *closableConn) Shutdown()           { c.once.Do(func() { close(c.ended) }) }

func (c *closableConn) Close() error {
	c.closed = true
	return nil
}

type closableMachine struct {
	host.Machine
	c *closableConn
}

func (m closableMachine) Depth() int                        { return 4 }
func (m closableMachine) Completions([]host.Completion) int { return 0 }

func (m closableMachine) Tick(bool) uint32 {
	if m.c.closed {
		m.c.t.Error("the machine of a closed connection is used: its memory is gone")
	}
	return 9
}

// Another Tick while the association is being closed has no effect.
func TestTickAfterCloseLeavesTheMachineAlone(t *testing.T) {
	why := errors.New("the test's end")
	failed := 0
	q := NewSharedQPair(&closableConn{t: t, ended: make(chan struct{})}, 0, func(error) { failed++ })
	q.Tick(0)
	if err := q.Close(why); err != nil {
		t.Fatal(err)
	}
	q.Tick(1)
	if failed != 1 || !errors.Is(q.failure(), why) {
		t.Errorf("the queue has failed %d times, of %v", failed, q.failure())
	}
}
