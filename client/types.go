package client

import (
	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
)

// Wire types of the NVMe specification, as the rest of jbofd has them.
type (
	// SQE is a submission queue entry; the host fills in CID, PSDT and SGL.
	SQE = nvme.SQE
	// Status is a command's status field; Status.Code strips DNR and More, and is what
	// the Status constants compare to.
	Status = nvme.Status
	// Command is one command for a QPair or a passthrough.
	Command = host.Command
	// Completion is a command's outcome.
	Completion = host.Completion
	// StatusError is a command that completed with a status other than success. errors.Is matches it with
	// ErrCompareFailed, ErrUnsupported and ErrNamespaceGone where the status says so, and with the errors of
	// package kv.
	StatusError = host.StatusError
)

// Opcodes for Command.SQE that a QPair's user needs most.
const (
	OpFlush       = nvme.CmdFlush
	OpWrite       = nvme.CmdWrite
	OpRead        = nvme.CmdRead
	OpCompare     = nvme.CmdCompare
	OpWriteZeroes = nvme.CmdWriteZeroes
	OpDSM         = nvme.CmdDSM
	OpVerify      = nvme.CmdVerify

	// CDW12FUA is the Force Unit Access bit in CDW12 of a Write.
	CDW12FUA = nvme.CDW12FUA
)

// Errors to decide by. They come wrapped with what happened.
var (
	// ErrConnectionLost: the association ended and could not be restored in time, or the
	// operation must not be repeated blindly; whether a command outstanding then took
	// effect is unknown.
	ErrConnectionLost = host.ErrConnectionLost
	// ErrClosed: the controller or queue pair was closed by its user.
	ErrClosed = host.ErrClosed
	// ErrProtocol: the target broke the protocol of NVMe or of the transport.
	ErrProtocol = host.ErrProtocol
	// ErrTimeout: the target did not answer a command in time.
	ErrTimeout = host.ErrTimeout
	// ErrInvalid: an argument is out of range; nothing was sent.
	ErrInvalid = host.ErrInvalid
	// ErrCompareFailed: Compare or CompareAndWrite found other data.
	ErrCompareFailed = host.ErrCompareFailed
	// ErrUnsupported: the controller or namespace lacks the command or feature; or this program
	// the transport.
	ErrUnsupported = host.ErrUnsupported
	// ErrNamespaceGone: the namespace is not there (any more).
	ErrNamespaceGone = host.ErrNamespaceGone
)

// SetRW fills c with opcode (OpRead, OpWrite, OpCompare, ...) for nlb blocks from LBA slba of
// namespace nsid. nlb is 1 to 65536.
//
// Cost: 0 allocs.
func SetRW(c *Command, opcode uint8, nsid uint32, slba uint64, nlb uint32) { // hot: 0 allocs
	c.SQE = SQE{}
	c.SQE.SetOpcode(opcode)
	c.SQE.SetNSID(nsid)
	c.SQE.SetSLBA(slba)
	c.SQE.SetNLB(nlb)
}
