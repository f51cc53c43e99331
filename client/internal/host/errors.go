package host

import (
	"errors"
	"fmt"

	"jbofd/internal/nvme"
)

// Errors to decide by; package client exports them.
var (
	// ErrConnectionLost: the connection has ended.
	ErrConnectionLost = errors.New("connection lost")
	// ErrClosed: closed by its user.
	ErrClosed = errors.New("closed")
	// ErrProtocol: the target broke the protocol.
	ErrProtocol = errors.New("protocol violation by the target")
	// ErrTimeout: no answer to a command in time.
	ErrTimeout = errors.New("command timed out")
	// ErrInvalid: an argument is out of range.
	ErrInvalid = errors.New("invalid argument")
	// ErrUnsupported: the other side, or this program, lacks what is needed.
	ErrUnsupported = errors.New("not supported")
	// ErrCompareFailed: Compare found other data.
	ErrCompareFailed = errors.New("compare failed")
	// ErrNamespaceGone: the namespace is not there.
	ErrNamespaceGone = errors.New("no such namespace")
)

// Errors of key value namespaces.
var (
	// ErrKeyNotFound: there is no such key.
	ErrKeyNotFound = errors.New("key not found")
	// ErrKeyExists: there is such a key.
	ErrKeyExists = errors.New("key exists")
	// ErrKeyCollision: another key has the same hash.
	ErrKeyCollision = errors.New("another key has the same hash")
	// ErrForeignValue: the value was not stored with a long key.
	ErrForeignValue = errors.New("the value was not stored with a long key")
	// ErrCapacityExceeded: there is no space.
	ErrCapacityExceeded = errors.New("capacity exceeded")
	// ErrValueTooLarge: the namespace, or one command, takes no value of this size.
	ErrValueTooLarge = errors.New("value too large")
)

// StatusError is a command that completed with a status other than success. errors.Is
// matches it with the error that OfStatus returns.
type StatusError struct {
	// Command names it: "Read", "Identify".
	Command string
	Status  nvme.Status
}

func (e *StatusError) Error() string { return fmt.Sprintf("%s: %s", e.Command, e.Status) }

// Is implements errors.Is.
func (e *StatusError) Is(target error) bool {
	err := OfStatus(e.Status)
	return err != nil && target == err
}

// CheckStatus returns nil for success, else a *StatusError.
func CheckStatus(command string, s nvme.Status) error {
	if s.OK() {
		return nil
	}
	return &StatusError{Command: command, Status: s}
}

// OfStatus is the error to decide by that a status stands for; nil if there is none.
func OfStatus(s nvme.Status) error { // hot: 0 allocs
	switch s.Code() {
	case nvme.CompareFailure:
		return ErrCompareFailed
	case nvme.InvalidOpcode, nvme.InvalidLogPage:
		return ErrUnsupported
	case nvme.InvalidNamespaceOrFormat:
		return ErrNamespaceGone
	case nvme.KeyDoesNotExist:
		return ErrKeyNotFound
	case nvme.KeyExists:
		return ErrKeyExists
	case nvme.CapacityExceeded:
		return ErrCapacityExceeded
	case nvme.InvalidValueSize:
		return ErrValueTooLarge
	}
	return nil
}

// Passing reports whether a status is of the kind that goes away by itself.
func Passing(s nvme.Status) bool {
	if s.DNR() {
		return false
	}
	switch s.Code() {
	case nvme.NamespaceNotReady, nvme.CommandInterrupted, nvme.TransientTransportError, nvme.ANATransition,
		nvme.AbortedSQDeletion, nvme.AdminMediaNotReady:
		return true
	}
	return false
}
