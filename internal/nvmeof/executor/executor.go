// Package executor is the interface between the connection of a queue pair and the executors of its I/O commands. An
// executor carries out commands of one kind: those for the blocks of a drive (executor/block) or for the keys of a
// partition (executor/kv). nvmeof.PlanIO validates a command and names its kind; the connection passes the command to
// the executor that is registered for that kind and knows nothing else about it.
//
//	connection                                 executor
//	    │ ── Batch.Begin ──────────────────────>  │   waits for its turn, for memory
//	    │ ── Executor.Abort ───────────────────>  │   takes the command out if it has not started
//	    │ <───────────────────── Port.NeedData ── │   has memory, wants the host's data
//	    │ ── Batch.DataReady ──────────────────>  │   device, store, program
//	    │ <───────────────────────── Port.Done ── │
//
// The rules are the same for every kind of command:
//
//   - Memory. The executor asks for a command's buffer, and only when the command is about to use it: a deep queue must
//     not take all memory. Payer.Account pays. Data that came in the capsule has its buffer before Begin. A command
//     that waits for memory waits in the pool's queue and holds up no other command.
//   - Abort. A command that has not started (it waits for its turn, or for memory) is taken out and ends with Abort
//     Requested. A command whose data is on its way, or that a device has, runs to completion. An executor whose
//     commands take several steps may end an aborted command between two of them.
//   - Lost data. The connection returns a command whose data is damaged or lost with DataReady and a Status that is not
//     Success. The command then ends with that Status and changes nothing.
//   - Done. Each command that has begun is Done exactly once, also when its connection is closing, and its Buf is then
//     the connection's.
//
// The test package executortest holds an executor to these rules.
package executor

import (
	"jbofd/internal/bufpool"
	"jbofd/internal/fence"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/tenant"
)

// MaxOps is how many operations an executor may have.
const MaxOps = 16

// Executor carries out the I/O commands of one kind. Its methods may be called from any goroutine.
type Executor interface {
	// Ops returns the names of the operations in metrics, at most MaxOps. Command.Op is an index of it.
	Ops() []string
	// NewContext makes the executor's own state of a command. The connection calls it for each of its slots when it has
	// its first command of this kind, keeps what it returns and sets Command.Context to it for every command of this
	// kind in that slot.
	NewContext(c *Command) any
	// NewBatch makes a Batch. A connection, or a group of connections that share a lock, has one for each kind that
	// it uses.
	NewBatch() Batch
	// Abort takes out a command that has begun but not started, and reports whether it did: then Port.Done follows with
	// Abort Requested and nothing else does. Otherwise the command runs to completion. The caller holds the locks of
	// the command's connection, so Port.Kick must come from another goroutine.
	Abort(c *Command) bool
}

// Batch collects commands and hands them to the executor together. One goroutine uses it at a time. Begin and DataReady
// are called with the connection's lock held; they call no method of Port.
type Batch interface {
	// Begin adds a new command. From Submit to Port.Done it belongs to the executor.
	//
	// hot: 0 allocs
	Begin(c *Command)
	// DataReady returns a command for which the executor has called Port.NeedData: the host's data is in Buf.B. If
	// Status is not Success the data will not come, or the command's namespace has changed: then the command must
	// end with that Status. The Payer is that of Begin, even if the host belongs to another
	// tenant now.
	//
	// hot: 0 allocs
	DataReady(c *Command)
	// Submit hands over everything that was added and empties the batch. On return commands may be Done already. It
	// may call Port.Kick, also if its caller holds a lock that Kick takes: Kick does not wait for it.
	//
	// hot: 0 allocs
	Submit()
}

// Port receives commands back. The goroutine that drives the executor calls it, perhaps with locks of the executor
// held: NeedData and Done only put the command into a list. They report whether the caller must call Kick once it holds
// no lock any more; one Kick suffices for many commands of one port.
type Port interface {
	// NeedData says that the command is ready for the data that the host still has. Its buffer is in Buf: ToController
	// bytes long, or twice that for a fused pair, the Compare's data first. Batch.DataReady follows, at once if the
	// host has nothing more to send: an executor whose command has waited for memory uses this to have the command
	// judged again by the namespaces of now.
	NeedData(c *Command) (kick bool)
	// Done ends the command. The fields below "Outcome" are set.
	Done(c *Command) (kick bool)
	// Kick follows calls of which one asked for it.
	Kick()
	// Deliver is Kick by a goroutine that has the time to answer the host itself, which costs a system call or two and
	// spares waking another goroutine.
	Deliver()
}

// Payer is on whose behalf a command is executed.
type Payer struct {
	// Account pays for buffers.
	Account *bufpool.Account
	// Tenant is charged for device time.
	Tenant tenant.ID
	// Credited: the host keeps to the tenant's credit.
	Credited bool
}

// Access is how the SMART log counts a command that has succeeded.
type Access uint8

// Values of Access.
const (
	AccessOther Access = iota
	AccessRead
	AccessWrite
)

// Command is one I/O command. The connection has one in each slot of its queue and uses it again and again. Between
// Batch.Submit and Port.Done it belongs to the executor, but for the time between Port.NeedData and Batch.DataReady.
type Command struct {
	// SQE and Plan are the command and what PlanIO has made of it; both are the slot's.
	SQE  *nvme.SQE
	Plan *nvmeof.Plan
	// Payer is who pays, and Pass the right in whose name the command is executed: the executor passes it on with each
	// request to a device, and a request whose Pass is stale does not reach the device.
	Payer
	Pass fence.Pass
	// Fetch: data of the command is still with the host. Without it, all data to the controller is in Buf.
	Fetch bool
	// Buf holds the command's data. In-capsule data is at its beginning, before Begin; the connection owns such a
	// buffer and the executor does not replace it. Otherwise the executor sets it, before NeedData or Done.
	Buf bufpool.Buf
	// Host is the NQN of the host. It is the same for all commands of a slot.
	Host string
	// Port is where the command returns, and Slot the connection's number for it.
	Port Port
	Slot uint32
	// Context is what NewContext has returned for this slot.
	Context any
	// Next links the command into lists of the executor.
	Next *Command

	// Outcome. Status is how the command ended. For the second command of a fused pair, which stands for both, it
	// is its own, and FirstStatus that of the first.
	Status, FirstStatus nvme.Status
	// Op is the operation for metrics; Begin sets it. Access is how the SMART log counts the command, and Bytes how
	// much data it has moved.
	Op     uint8
	Access Access
	Bytes  int64
	// AnswerBytes of Buf.B go to the host, if Status is Success.
	AnswerBytes int
	// Result is DW0 of the completion, or DW0 and DW1 if Plan.Wide is set.
	Result uint64
	// CreditUnits is what the tenant should have outstanding at this SSD at most, in units of 4 KiB; 0: the policy
	// does not say.
	CreditUnits int
}

// Fail sets the outcome of a command that was not executed.
func (c *Command) Fail(s nvme.Status) {
	c.Status, c.FirstStatus = s, s
	c.Access, c.Bytes, c.AnswerBytes, c.Result, c.CreditUnits = AccessOther, 0, 0, 0, 0
}

// Notices are calls of Ports that a Batch must not make before Submit. The zero Notices is empty.
type Notices struct {
	needData, done list
	ports          []Port // scratch
}

// NeedData adds a call of Port.NeedData.
//
// hot: 0 allocs
func (n *Notices) NeedData(c *Command) { n.needData.push(c) }

// Done adds a call of Port.Done.
//
// hot: 0 allocs
func (n *Notices) Done(c *Command) { n.done.push(c) }

// Send makes the calls, then the Kicks that they ask for.
//
// hot: 0 allocs
func (n *Notices) Send() {
	for c := n.needData.pop(); c != nil; c = n.needData.pop() {
		if p := c.Port; p.NeedData(c) {
			n.ports = append(n.ports, p)
		}
	}
	for c := n.done.pop(); c != nil; c = n.done.pop() {
		if p := c.Port; p.Done(c) {
			n.ports = append(n.ports, p)
		}
	}
	for i, p := range n.ports {
		n.ports[i] = nil
		p.Kick()
	}
	n.ports = n.ports[:0]
}

// list is a FIFO of commands linked by Next.
type list struct{ first, last *Command }

func (l *list) push(c *Command) {
	c.Next = nil
	if l.last == nil {
		l.first = c
	} else {
		l.last.Next = c
	}
	l.last = c
}

func (l *list) pop() *Command {
	c := l.first
	if c == nil {
		return nil
	}
	if l.first = c.Next; l.first == nil {
		l.last = nil
	}
	c.Next = nil
	return c
}
