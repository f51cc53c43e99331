package hostconn

import (
	"errors"
	"fmt"
	"io"
	"net"

	"golang.org/x/sys/unix"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hosttcp"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// Classify wraps the error of a connection with ErrConnectionLost, ErrProtocol or ErrClosed.
func Classify(err error) error {
	switch {
	case errors.Is(err, host.ErrConnectionLost), errors.Is(err, host.ErrClosed), errors.Is(err, host.ErrTimeout):
		return err
	case errors.Is(err, host.ErrProtocol):
		return fmt.Errorf("%w: %w", host.ErrConnectionLost, err)
	case isFatal(err):
		return fmt.Errorf("%w: %w: %w", host.ErrConnectionLost, host.ErrProtocol, err)
	case errors.Is(err, net.ErrClosed):
		return fmt.Errorf("%w: %w", host.ErrClosed, err)
	}
	return fmt.Errorf("%w: %w", host.ErrConnectionLost, err)
}

// isFatal reports whether err is a protocol violation: one that the TCP machine has found, or one that the target
// reports (C2HTermReq).
func isFatal(err error) bool {
	var f *pdu.FatalError
	return errors.As(err, &f) || errors.Is(err, hosttcp.ErrTermReq)
}

// EndedByPeer reports whether err says that the target has closed or reset the connection, so that the target
// knows of its end as well. Errors of other kinds leave that open.
func EndedByPeer(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE)
}
