// Package pcie drives NVMe controllers through their registers and through queues in memory (NVMe Base 2.0, NVMe over
// PCIe Transport 1.0). The path of a command has no system calls: a Function gives it the registers, the memory and the
// interrupts.
//
//	             Ring, one for each pair of queues
//	SQE ──> submission queue ──> doorbell ══> controller
//	CQE <── completion queue, by its phase  <══ controller, with an interrupt
//
// Controller brings a controller up, makes and deletes rings, and resets the controller when commands do not end. Its
// methods are called by one goroutine, each waits no longer than it says, and none trusts the controller: what it
// answers is checked, so that a device that lies causes errors, and is reset. What it may write to is bounded by what
// the Function has mapped for it.
package pcie

import (
	"errors"

	"jbofd/internal/eventfd"
)

// Registers are those of BAR 0. Offsets are multiples of 4.
type Registers interface {
	Load32(offset int) uint32
	// Store32 writes a register after all memory that was written before.
	Store32(offset int, v uint32)
}

// Function is a PCI function, a controller, that this process owns.
type Function interface {
	Registers
	// Map gives the device access to memory that begins at a page, for ever, and returns at which address the device
	// sees it.
	//
	// Errors: the system's, ENOMEM if RLIMIT_MEMLOCK is used up.
	Map(memory []byte) (address uint64, err error)
	// Vectors is how many interrupts there are, at least 1.
	Vectors() int
	// Vector is the event that an interrupt signals.
	Vector(i int) *eventfd.Event
	// Removed is an event that says that the device is to be given up, because somebody removes it.
	Removed() *eventfd.Event
	// Reset resets the function, whatever state its controller is in.
	//
	// Errors: it cannot be reset.
	Reset() error
	// Revoke ends the device's access to all memory, whatever it is doing, and gives the device back. Registers read as
	// all ones then; events stay.
	Revoke()
	// Close revokes, and closes the events.
	Close() error
}

// The errors of a Controller.
var (
	// ErrGone: the device does not answer any more, or its registers read as all ones.
	ErrGone = errors.New("the device is gone")
	// ErrTimeout: the controller did not do something in time.
	ErrTimeout = errors.New("the controller has not answered in time")
	// ErrLies: the controller says what cannot be.
	ErrLies = errors.New("the controller's answer is invalid")
	// ErrUnsuited: the controller works, and lacks something that is needed.
	ErrUnsuited = errors.New("the controller is not suited")
)
