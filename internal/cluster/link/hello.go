package link

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"time"
)

var (
	errHello   = errors.New("not a hello of this program")
	errRefused = errors.New("refused")
)

const (
	helloMagic   = "JBCH"
	helloVersion = 1
	maxName      = 223
	maxHello     = 6 + 4*(1+maxName)
	frameHeader  = 4
)

// hello begins a connection. It has the same layout in all versions as far as the version.
type hello struct{ cluster, from, to, refused string }

// frame returns the hello as it is sent.
func (h hello) frame() []byte {
	b := append(make([]byte, frameHeader, 64), helloMagic...)
	b = binary.LittleEndian.AppendUint16(b, helloVersion)
	for _, s := range []string{h.cluster, h.from, h.to, h.refused} {
		s = s[:min(len(s), maxName)]
		b = append(append(b, byte(len(s))), s...)
	}
	binary.LittleEndian.PutUint32(b, uint32(len(b)-frameHeader))
	return b
}

// decodeHello returns the hello of a frame.
//
// Errors: errHello.
func decodeHello(b []byte) (h hello, err error) {
	if len(b) < 6 || string(b[:4]) != helloMagic {
		return h, errHello
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != helloVersion {
		return h, fmt.Errorf("%w: version %d, this program has %d", errHello, v, helloVersion)
	}
	b = b[6:]
	for _, s := range []*string{&h.cluster, &h.from, &h.to, &h.refused} {
		if len(b) == 0 || int(b[0]) > len(b)-1 || b[0] > maxName {
			return hello{}, fmt.Errorf("%w: it is too short", errHello)
		}
		*s, b = string(b[1:1+b[0]]), b[1+int(b[0]):]
	}
	if len(b) > 0 {
		return hello{}, fmt.Errorf("%w: it is too long", errHello)
	}
	return h, nil
}

// readFrame reads what follows its length.
func readFrame(r io.Reader, most int) ([]byte, error) {
	var head [frameHeader]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n > uint32(most) {
		return nil, fmt.Errorf("%w: a frame of %d bytes, at most %d are allowed", errHello, n, most)
	}
	b := make([]byte, n)
	_, err := io.ReadFull(r, b)
	return b, err
}

// greet takes the hello of a connection that has come and checks who it is. If it is refused, that is answered.
func (l *Link) greet(raw net.Conn) (c net.Conn, from string, err error) {
	if err := errors.Join(raw.SetDeadline(time.Now().Add(l.helloTime())), setTimeouts(raw, l.cfg.Timeout)); err != nil {
		return nil, "", err
	}
	c = raw
	if l.cfg.TLS != nil {
		cfg := l.cfg.TLS.Clone()
		cfg.ClientAuth = tls.RequireAndVerifyClientCert
		c = tls.Server(raw, cfg)
	}
	b, err := readFrame(c, maxHello)
	if err != nil {
		return nil, "", err
	}
	h, err := decodeHello(b)
	if err != nil {
		return nil, "", err
	}
	answer := hello{cluster: l.cfg.Cluster, from: l.cfg.Name, to: h.from}
	if err = l.admits(c, h); err != nil {
		answer.refused = err.Error()
		_, failed := c.Write(answer.frame())
		return nil, "", errors.Join(err, failed)
	}
	return c, h.from, nil
}

// welcome answers the hello of a node.
func (l *Link) welcome(raw, c net.Conn, from string) error {
	_, err := c.Write(hello{cluster: l.cfg.Cluster, from: l.cfg.Name, to: from}.frame())
	return errors.Join(err, raw.SetDeadline(time.Time{}))
}

// helloTime is how long a connection may take to begin.
func (l *Link) helloTime() time.Duration { return max(2*l.cfg.Timeout, 2*time.Second) }

// admits decides whether a connection may be that of the node which it says.
func (l *Link) admits(c net.Conn, h hello) error {
	l.mu.Lock()
	address, known := l.nodes[h.from]
	l.mu.Unlock()
	switch {
	case h.cluster != l.cfg.Cluster:
		return fmt.Errorf("%w: cluster %q, this is a node of %q", errRefused, h.cluster, l.cfg.Cluster)
	case h.to != l.cfg.Name:
		return fmt.Errorf("%w: for node %q, this is %q", errRefused, h.to, l.cfg.Name)
	case !known:
		return fmt.Errorf("%w: node %q is not one of the others in the configuration of %s", errRefused, h.from,
			l.cfg.Name)
	}
	if t, ok := c.(*tls.Conn); ok {
		if err := t.ConnectionState().PeerCertificates[0].VerifyHostname(h.from); err != nil {
			return fmt.Errorf("%w: %w", errRefused, err)
		}
		return nil
	}
	return l.checkHost(c.RemoteAddr(), h.from, address)
}

// checkHost compares where a connection comes from with a node's address.
func (l *Link) checkHost(remote net.Addr, from, address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(l.ctx, l.helloTime()/2)
	defer cancel()
	hosts, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return fmt.Errorf("%w: %w", errRefused, err)
	}
	ap, err := netip.ParseAddrPort(remote.String())
	if err != nil {
		return err
	}
	came := ap.Addr().Unmap()
	if !slices.ContainsFunc(hosts, func(a netip.Addr) bool { return a.Unmap() == came.WithZone("") }) {
		return fmt.Errorf("%w: node %s comes from %s, not from %s", errRefused, from, came, host)
	}
	return nil
}
