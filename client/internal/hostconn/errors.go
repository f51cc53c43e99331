package hostconn

import (
	"errors"
	"fmt"
	"net"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hosttcp"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// Classify wraps a connection's error with the sentinel to decide by.
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

// isFatal reports whether err is the TCP machine's verdict over the target.
func isFatal(err error) bool {
	var f *pdu.FatalError
	return errors.As(err, &f) || errors.Is(err, hosttcp.ErrTermReq)
}
