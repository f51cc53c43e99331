// Package hostconn joins the state machine of a host's queue pair to its connection. Conn is the interface that every
// transport implements; TCPConn implements it for TCP, hostverbs for RDMA. SharedQPair lets any number of goroutines
// use the queue pair of a Conn.
package hostconn

import (
	"time"

	"jbofd/client/internal/host"
)

// Conn joins the state machine of a queue pair to a connection. The owner of a Conn serialises all calls but Shutdown
// and SetReadDeadline.
type Conn interface {
	// Machine returns the state machine; only the owner of the Conn may use it.
	Machine() host.Machine
	// Recv receives once, without blocking, and passes what has arrived to the machine; n is 0 if nothing has. RecvWait
	// waits until something has arrived, or until the read deadline.
	//
	// Errors: os.ErrDeadlineExceeded (RecvWait only); the end of the connection; the machine's.
	//
	// Cost: 0 allocs.
	Recv() (n int, err error)
	RecvWait() (n int, err error)
	// Send sends what the machine has to send, until nothing is left or the connection takes no more (blocked).
	//
	// Cost: 0 allocs.
	Send() (blocked bool, err error)
	// Unsent reports whether Send left something because it was blocked.
	Unsent() bool
	// AwaitRecv calls step whenever Recv may find something, until step returns true. AwaitSend does so when Send may
	// be able to go on. One goroutine at a time may call each; it need not own the Conn, but step must acquire it.
	//
	// Errors: the connection is closed.
	AwaitRecv(step func() bool) error
	AwaitSend(step func() bool) error
	// PollBoth blocks until something can be received or sent or timeout has passed.
	PollBoth(timeout time.Duration) error
	// SetReadDeadline bounds RecvWait, also one that is waiting already.
	SetReadDeadline(time.Time) error
	// Shutdown ends the connection: Recv and Send, also those that are waiting, fail. When Shutdown has returned, the
	// target can no longer reach memory of the caller. Any goroutine may call it. Close must still be called.
	Shutdown()
	Close() error
}
