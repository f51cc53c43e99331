package host

import "errors"

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
)
