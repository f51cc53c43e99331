package host

import (
	"errors"
	"fmt"

	"jbofd/internal/nvme"
)

// Errors for errors.Is; package client exports them.
var (
	// ErrConnectionLost: the connection has ended.
	ErrConnectionLost = errors.New("connection lost")
	// ErrClosed: the user has closed the controller or queue pair.
	ErrClosed = errors.New("closed")
	// ErrProtocol: the target has violated the protocol.
	ErrProtocol = errors.New("protocol violation by the target")
	// ErrTimeout: the target has not answered a command in time.
	ErrTimeout = errors.New("command timed out")
	// ErrInvalid: an argument is out of range.
	ErrInvalid = errors.New("invalid argument")
	// ErrUnsupported: the target, or this program, does not support what was asked for.
	ErrUnsupported = errors.New("not supported")
	// ErrIndeterminate: a command was sent and its answer did not come; whether it took effect is unknown.
	ErrIndeterminate = errors.New("outcome unknown")
	// ErrCompareFailed: Compare has found other data.
	ErrCompareFailed = errors.New("compare failed")
	// ErrNamespaceGone: there is no such namespace.
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
	// ErrCapacityExceeded: there is no space for the value.
	ErrCapacityExceeded = errors.New("capacity exceeded")
	// ErrVersionMismatch: the key has another version.
	ErrVersionMismatch = errors.New("version mismatch")
	// ErrSuperseded: the key has the same version or a newer one.
	ErrSuperseded = errors.New("superseded by a newer version")
	// ErrValueTooLarge: the value is larger than the namespace or one command allows.
	ErrValueTooLarge = errors.New("value too large")
)

// SentError marks the failure of an operation whose commands were sent, at least in part, and not answered.
type SentError struct{ Err error }

func (e *SentError) Error() string { return e.Err.Error() }

// Unwrap implements errors.Is.
func (e *SentError) Unwrap() error { return e.Err }

// StatusError reports a command that has completed with a status other than success. errors.Is matches it with the
// error that OfStatus returns.
type StatusError struct {
	// Command is the name of the command, such as "Read".
	Command string
	Status  nvme.Status
}

func (e *StatusError) Error() string { return fmt.Sprintf("%s: %s", e.Command, e.Status) }

// Is implements errors.Is.
func (e *StatusError) Is(target error) bool {
	err := OfStatus(e.Status)
	return err != nil && target == err
}

// CheckStatus returns nil for success, or else a *StatusError.
func CheckStatus(command string, s nvme.Status) error {
	if s.OK() {
		return nil
	}
	return &StatusError{Command: command, Status: s}
}

// OfStatus returns the error variable that corresponds to a status, or nil.
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
	case nvme.KVVersionMismatch:
		return ErrVersionMismatch
	case nvme.KVSuperseded:
		return ErrSuperseded
	case nvme.KVIndeterminate:
		return ErrIndeterminate
	}
	return nil
}

// Passing reports whether a status is transient, so that the same command may succeed later.
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
