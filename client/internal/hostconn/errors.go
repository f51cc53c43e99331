package hostconn

import (
	"errors"
	"fmt"
	"net"

	"jbofd/client/internal/hosttcp"
	"jbofd/internal/nvmeof/tcp/pdu"
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
)

// Classify wraps a connection's error with the sentinel to decide by.
func Classify(err error) error {
	switch {
	case errors.Is(err, ErrConnectionLost), errors.Is(err, ErrProtocol), errors.Is(err, ErrClosed), errors.Is(err, ErrTimeout):
		return err
	case isFatal(err):
		return fmt.Errorf("%w: %w: %w", ErrConnectionLost, ErrProtocol, err)
	case errors.Is(err, net.ErrClosed):
		return fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return fmt.Errorf("%w: %w", ErrConnectionLost, err)
}

// isFatal reports whether err is the machine's verdict over the target.
func isFatal(err error) bool {
	var f *pdu.FatalError
	return errors.As(err, &f) || errors.Is(err, hosttcp.ErrTermReq)
}
