// Package host holds what the transports of the host have in common: commands, completions, errors, and the interface
// of a queue pair's state machine. It is pure, as the machines are.
//
//	hostconn.SharedQPair, client.QPair, window.Pair ──> hostconn.Conn   joins a machine to its connection
//	                                                      └─ Machine    commands in, completions out
//	                                                           hosttcp.QPair, hostrdma.QPair
package host

import (
	"errors"

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

// SlotOf returns the slot of an outstanding command, which is less than Depth. Drivers may index their own state by it.
func SlotOf(cid uint16) int { return int(cid & slotMask) }

// GenerationOf returns the generation, which tells the successive commands of a slot apart.
func GenerationOf(cid uint16) uint16 { return cid >> slotBits }

// NextGeneration returns the generation that follows g. It wraps around.
func NextGeneration(g uint16) uint16 {
	if g++; g == generations {
		return 0
	}
	return g
}

// Errors of Submit for one command. The queue pair goes on.
var (
	// ErrQueueFull: every slot holds a command whose completion was not collected yet.
	ErrQueueFull = errors.New("queue is full")
	// ErrNotReady: the queue cannot take commands yet, or has failed.
	ErrNotReady = errors.New("queue is not ready")
	// ErrDataDirection: there is data but the opcode transfers none, or transfers it both ways.
	ErrDataDirection = errors.New("data does not fit the opcode's data direction")
	// ErrDataLength: one command cannot transfer so much data over this transport.
	ErrDataLength = errors.New("data is too long for one command")
)

// Command is one command to submit.
type Command struct {
	// SQE has opcode, fuse bits, NSID and CDWs. The queue fills in CID, PSDT and the SGL.
	SQE nvme.SQE
	// Data is the buffer that the command transfers, in the direction of its opcode. It belongs to the queue from
	// Submit until the completion was collected.
	Data []byte
	// Tag is copied to the Completion.
	Tag uint64
}

// Completion is the outcome of one Command.
type Completion struct {
	Tag uint64
	// Result is DW0 and DW1 of the CQE, DW0 in the low half; 0 if the target has used the SUCCESS flag of NVMe/TCP
	// instead of a CQE.
	Result uint64
	// Received is how many bytes the target has written to Command.Data, from its beginning. A target may send less
	// than was asked for and report success. Over RDMA the host cannot count bytes: success counts as all of them.
	Received uint32
	// Status is the command's outcome. Data whose digest was wrong makes it
	// nvme.TransientTransportError.
	Status nvme.Status
	// CID is the command's identifier on the wire, for logs.
	CID uint16
	// SQID is that field of the CQE, which only commands of extended key-value use (nvme.KVVersioned).
	SQID uint16
}

// Direction is the data direction of a command; a fabrics command's is in its FCTYPE.
func Direction(e *nvme.SQE) (toTarget, toHost bool) {
	op := e.Opcode()
	if op == nvme.OpFabrics {
		op = e.FCTYPE()
	}
	return nvme.DataDirection(op)
}

// Machine is the state machine of the host's end of one queue pair, of any transport. One goroutine at a time may call
// its methods.
type Machine interface {
	// Submit takes a command and returns its CID. The command itself is copied.
	//
	// Errors: those of Check; ErrQueueFull.
	//
	// Cost: 0 allocs.
	Submit(*Command) (cid uint16, err error)
	// Check returns the error with which Submit would refuse a command, other than ErrQueueFull.
	//
	// Errors: ErrNotReady, ErrDataDirection, ErrDataLength.
	Check(*Command) error
	// Completions moves finished commands to dst, in the order in which they finished,
	// and returns how many. Their slots are free again and their buffers the caller's.
	//
	// Cost: 0 allocs.
	Completions(dst []Completion) int
	// Depth returns how many commands may be outstanding, Free how many Submit accepts now, Outstanding how many were
	// submitted and not yet collected.
	Depth() int
	Free() int
	Outstanding() int
	// SetInCapsuleBytes sets how many bytes of data a capsule may carry to the target.
	SetInCapsuleBytes(int)
	// Detach returns the buffer of an outstanding command to the caller at once. The command itself goes on, keeps its
	// slot and completes as usual. Detach returns false if cid is not outstanding.
	Detach(cid uint16) bool
	// Tick advances the coarse clock of the queue and returns the age in ticks of the oldest outstanding command. The
	// Asynchronous Event Requests of an admin queue do not count.
	Tick(admin bool) (oldest uint32)
}
