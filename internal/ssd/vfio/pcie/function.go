// Package pcie drives NVMe controllers through their registers and through queues in memory (NVMe Base 2.0, NVMe over
// PCIe Transport 1.0). Submitting and reaping a command on a Ring makes no system call. A Function provides the
// registers, the memory and the interrupts.
//
//	             Ring, one for each pair of queues
//	SQE ──> submission queue ──> doorbell ══> controller
//	CQE <── completion queue, by its phase  <══ controller, with an interrupt
//
// Controller enables and resets an NVMe controller, carries out admin commands, and creates and deletes rings. One
// goroutine calls its methods (see Controller for the exceptions), and each waits for a bounded time. What the
// controller answers is checked before it is used: an invalid answer is an error, after which the controller has to be
// reset. The device can access only the memory that the Function has mapped for it.
package pcie

import (
	"errors"

	"jbofd/internal/eventfd"
)

// Registers are those of BAR 0. Offsets are in bytes, multiples of 4.
type Registers interface {
	Load32(offset int) uint32
	// Store32 writes a register after all memory that was written before.
	Store32(offset int, v uint32)
}

// Memory is a range of a BAR behind which the device has memory. Accesses are not cached, nor combined, nor split.
// Offsets are in bytes, multiples of 8.
type Memory interface {
	Load64(offset int) uint64
	Store64(offset int, v uint64)
}

// Function is a PCI function, a controller, that this process owns.
type Function interface {
	Registers
	// Map gives the device access to memory that begins at a page boundary, until Revoke, and returns its IOVA: the
	// address at which the device finds it.
	//
	// Errors: the system's, ENOMEM if RLIMIT_MEMLOCK is used up; os.ErrClosed after Revoke.
	Map(memory []byte) (address uint64, err error)
	// Vectors is how many interrupts there are, at least 2: one for the admin queue, and one for an I/O queue.
	Vectors() int
	// Vector is the event that an interrupt signals.
	Vector(i int) *eventfd.Event
	// Mask keeps an interrupt from being sent, or lets it be sent again, and at once if it became due meanwhile. The
	// device has seen the end of a mask when the call returns. It may do nothing, see Unmasked.
	Mask(i int, on bool)
	// Unmasked returns why Mask does nothing; nil: it works.
	Unmasked() error
	// BARBytes is the size of a BAR that can be mapped; 0: it cannot, or there is none.
	BARBytes(bar uint8) int64
	// MapBAR maps a range of a BAR, until Revoke. The offset is a multiple of 4096.
	//
	// Errors: the range is not in the BAR, or cannot be mapped; os.ErrClosed after Revoke.
	MapBAR(bar uint8, offset, bytes int64) (Memory, error)
	// Removed is signalled when the device is to be given up, because it is being removed.
	Removed() *eventfd.Event
	// Reset resets the function, whatever state its controller is in.
	//
	// Errors: the function cannot be reset; the system's.
	Reset() error
	// Revoke ends the device's access to all memory, whatever it is doing, and gives the device back. Registers read as
	// all ones then; events stay.
	Revoke()
	// Close revokes, and closes the events.
	Close() error
}

// The errors of a Controller.
var (
	// ErrGone: CSTS reads as all ones: the device was removed, or Revoke was called.
	ErrGone = errors.New("the device is gone")
	// ErrTimeout: the controller has not completed an admin command, or changed CSTS, in time.
	ErrTimeout = errors.New("the controller has not answered in time")
	// ErrInvalidResponse: an answer of the controller is invalid, as a value that the specification excludes, or a
	// completion of a command that is not outstanding.
	ErrInvalidResponse = errors.New("the controller's answer is invalid")
	// ErrUnsuited: the controller works, but lacks something that is needed.
	ErrUnsuited = errors.New("the controller is not suited")
	// ErrFatal: the controller reports a fatal status (CSTS.CFS) and has to be reset.
	ErrFatal = errors.New("the controller has a fatal status")
)
