// Package host is what the transports of the host have in common: commands and their
// completions, and what a queue of any transport offers to those who share it out
// (hostconn.Queue), use it alone (client.QPair) or hold commands back (window.Pair).
//
//	Queue, QPair, Pair ──> Conn     joins a machine to a connection: Recv, Send, waiting
//	                        └─ Machine   commands in, completions out
//	                             hosttcp.Queue, hostrdma.Queue
package host

import (
	"errors"
	"time"

	"jbofd/internal/nvme"
)

// MaxDepth is the deepest queue: a CID is ten bits of slot and six of generation.
const MaxDepth = 1 << slotBits

const (
	slotBits    = 10
	slotMask    = MaxDepth - 1
	generations = 1<<(16-slotBits) - 1 // one less than fits: CID FFFFh is reserved
)

// CID makes the identifier of a command in a slot.
func CID(slot, generation uint16) uint16 { return generation<<slotBits | slot }

// SlotOf returns the slot, below Depth, of a command by its CID: what a driver keeps for
// outstanding commands it may index by that.
func SlotOf(cid uint16) int { return int(cid & slotMask) }

// GenerationOf is the other part of a CID.
func GenerationOf(cid uint16) uint16 { return cid >> slotBits }

// NextGeneration follows a slot's generation, round and round.
func NextGeneration(g uint16) uint16 {
	if g++; g == generations {
		return 0
	}
	return g
}

// Why Submit refuses a command. None of them harms the queue.
var (
	// ErrQueueFull: every slot is taken by a command whose completion was not yet
	// collected.
	ErrQueueFull = errors.New("queue is full")
	// ErrNotReady: the queue cannot take commands yet, or has failed.
	ErrNotReady = errors.New("queue is not ready")
	// ErrDataDirection: there is data but the opcode moves none, or moves it both ways.
	ErrDataDirection = errors.New("data does not fit the opcode's data direction")
	// ErrDataLength: more data than one command can carry over this transport.
	ErrDataLength = errors.New("data is too long for one command")
)

// Command is one command to submit.
type Command struct {
	// SQE carries opcode, fuse bits, NSID and CDWs as the caller set them. CID, PSDT and
	// the SGL are filled in by the queue.
	SQE nvme.SQE
	// Data is what the command transfers, in the direction its opcode names. It belongs
	// to the queue from Submit until the completion was collected.
	Data []byte
	// Tag comes back in the Completion; the queue does not look at it.
	Tag uint64
}

// Completion is the answer to one Command.
type Completion struct {
	Tag uint64
	// Result is DW0 and DW1 of the CQE, DW0 in the low half; 0 if the target used
	// the SUCCESS flag of NVMe/TCP instead of a CQE.
	Result uint64
	// Received is how many bytes of data from the target stand in Command.Data, from
	// its beginning. Less than was asked for, with a good Status, means that the target
	// sent less; over RDMA, where nobody counts them, a good Status means all.
	Received uint32
	// Status is the command's outcome. Data whose digest was wrong makes it
	// nvme.TransientTransportError.
	Status nvme.Status
	// CID is the command's identifier on the wire, for logs.
	CID uint16
}

// Direction is the data direction of a command; a fabrics command's is in its FCTYPE.
func Direction(e *nvme.SQE) (toTarget, toHost bool) {
	op := e.Opcode()
	if op == nvme.OpFabrics {
		op = e.FCTYPE()
	}
	return nvme.DataDirection(op)
}

// Machine is the host's end of one queue pair, of any transport. All its methods belong to
// one goroutine at a time.
type Machine interface {
	// Submit takes a command and returns its CID. The command itself is copied.
	//
	// Errors: those of Check; ErrQueueFull.
	//
	// Cost: 0 allocs.
	Submit(*Command) (cid uint16, err error)
	// Check tells why Submit would not take a command, other than for want of a slot.
	//
	// Errors: ErrNotReady, ErrDataDirection, ErrDataLength.
	Check(*Command) error
	// Completions moves finished commands to dst, in the order in which they finished,
	// and returns how many. Their slots are free again and their buffers the caller's.
	//
	// Cost: 0 allocs.
	Completions(dst []Completion) int
	// Depth is how many commands may be outstanding, Free how many Submit will take now,
	// Outstanding how many were submitted and not yet collected.
	Depth() int
	Free() int
	Outstanding() int
	// SetInCapsuleBytes sets how much data a command to the target may carry in its
	// capsule.
	SetInCapsuleBytes(int)
	// Detach gives the buffer of an outstanding command back to the caller at once. The command
	// itself goes on, keeps its slot, and completes as usual. False: cid is not outstanding.
	Detach(cid uint16) bool
	// Tick advances the queue's coarse clock and returns how many ticks ago the oldest
	// outstanding command, other than the Asynchronous Event Requests of an admin queue,
	// was submitted.
	Tick(admin bool) (oldest uint32)
}

// Conn joins a Machine to its connection. Its owner serialises all calls but Shutdown and
// SetReadDeadline.
type Conn interface {
	// Machine is the queue's, for the owner.
	Machine() Machine
	// Recv looks once, without blocking, for what the target has sent, and lets the machine work through
	// it; n is 0 if nothing was there. RecvWait waits for something, until the read deadline.
	//
	// Errors: os.ErrDeadlineExceeded, of RecvWait; the connection's end; the machine's.
	//
	// Cost: 0 allocs.
	Recv() (n int, err error)
	RecvWait() (n int, err error)
	// Send sends what the machine has to send, until nothing is left or the connection
	// takes no more (blocked).
	//
	// Cost: 0 allocs.
	Send() (blocked bool, err error)
	// Unsent reports whether Send left something because it was blocked.
	Unsent() bool
	// AwaitRecv calls step whenever Recv may find something, until it returns true; AwaitSend
	// when Send may get on. Each is called by one goroutine at a time, which need not own the Conn: step
	// makes it so.
	//
	// Errors: the connection is closed.
	AwaitRecv(step func() bool) error
	AwaitSend(step func() bool) error
	// PollBoth blocks until something can be received or sent or timeout has passed.
	PollBoth(timeout time.Duration) error
	// SetReadDeadline bounds RecvWait, a present one too.
	SetReadDeadline(time.Time) error
	// Shutdown makes every present and future Recv and Send fail or end; from any goroutine. When it
	// has returned, the target can reach none of the caller's memory any more. Close must still be called.
	Shutdown()
	Close() error
}
