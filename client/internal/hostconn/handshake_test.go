package hostconn

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"

	"jbofd/client/internal/hosttcp"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/testutil/loopback"
)

// TestAHandshakeCancelledAtItsEndFails: either Handshake returns the context's error, or the connection lives on.
func TestAHandshakeCancelledAtItsEndFails(t *testing.T) {
	ln := loopback.Listen(t)
	defer ln.Close()
	for range 300 {
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- answerAndCancel(ln, cancel) }()
		c, err := DialTCP(context.Background(), ln.Addr().String(), netip.Addr{}, hosttcp.Options{Depth: 4})
		if err != nil {
			t.Fatal(err)
		}
		err = c.Handshake(ctx)
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if err == nil {
			if _, err := c.conn.Write([]byte{0}); err != nil {
				t.Fatalf("the connection is unusable after a handshake without an error: %v", err)
			}
		}
		c.Close()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
}

// answerAndCancel answers an ICReq, cancels, and reads until the connection ends.
func answerAndCancel(ln net.Listener, cancel func()) error {
	defer cancel()
	c, err := ln.Accept()
	if err != nil {
		return err
	}
	defer c.Close()
	var ic pdu.IC
	if _, err := io.ReadFull(c, ic[:]); err != nil {
		return err
	}
	ic.Common().Set(pdu.TypeICResp, 0, pdu.ICLen, 0, pdu.ICLen)
	ic.SetMAXH2CDATA(4096)
	if _, err := c.Write(ic[:]); err != nil {
		return err
	}
	cancel()
	_, err = io.Copy(io.Discard, c)
	return err
}
