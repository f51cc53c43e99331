package client

import (
	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
	"jbofd/internal/units"
)

// Wire types of the NVMe specification.
type (
	// SQE is a submission queue entry; the host fills in CID, PSDT and SGL.
	SQE = nvme.SQE
	// Status is the status field of a completion. Status.Code strips DNR and More; compare its result with constants.
	Status = nvme.Status
	// Command is one command for a QPair or a passthrough.
	Command = host.Command
	// Completion is the outcome of a Command.
	Completion = host.Completion
	// StatusError reports a command that has completed with a status other than success. errors.Is matches it with
	// ErrCompareFailed, ErrUnsupported, ErrNamespaceGone or an error of package kv, according to the status.
	StatusError = host.StatusError
)

// Opcodes of the NVM command set, for commands of a QPair.
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

// Errors for errors.Is. They come wrapped in errors that say what has happened.
var (
	// ErrConnectionLost: the association has ended, and could not be restored in time or the operation must not be
	// repeated.
	ErrConnectionLost = host.ErrConnectionLost
	// ErrIndeterminate: a command that changes something was sent and was not answered, because the connection was
	// lost, the controller was closed or the context has ended. Whether it took effect is unknown. It may also take
	// effect after the call has returned, but not after the controller has reconnected (see Controller for the
	// conditions). It comes together with the error that says why there is no answer.
	ErrIndeterminate = host.ErrIndeterminate
	// ErrClosed: the controller or queue pair was closed by its user.
	ErrClosed = host.ErrClosed
	// ErrProtocol: the target has violated the protocol of NVMe or of the transport.
	ErrProtocol = host.ErrProtocol
	// ErrTimeout: the target has not answered a command in time.
	ErrTimeout = host.ErrTimeout
	// ErrInvalid: an argument is out of range; nothing was sent.
	ErrInvalid = host.ErrInvalid
	// ErrCompareFailed: Compare or CompareAndWrite found other data.
	ErrCompareFailed = host.ErrCompareFailed
	// ErrUnsupported: the controller or namespace does not support the command or feature, or this program does not
	// support the transport.
	ErrUnsupported = host.ErrUnsupported
	// ErrNamespaceGone: there is no such namespace, or no longer.
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
	c.SQE.SetSLBA(units.LBA(slba))
	c.SQE.SetNLB(units.Blocks(nlb))
}
