package link

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"time"

	"jbofd/internal/cluster"
)

// peer is another node, to which messages are sent.
type peer struct {
	l             *Link
	name, address string
	// ctx ends with the link's, and when the node is not one of the cluster's any more.
	ctx    context.Context
	cancel context.CancelFunc
	// wake has a value if there may be messages.
	wake chan struct{}
	// mu guards waiting, the messages to be sent, oldest first, at most maxWaiting; and refused, why the node refuses
	// connections of this one, as it has said at the last attempt, empty: it does not.
	mu      sync.Mutex
	waiting []*cluster.Message
	refused string
}

func newPeer(l *Link, name, address string) *peer {
	p := &peer{l: l, name: name, address: address, wake: make(chan struct{}, 1)}
	p.ctx, p.cancel = context.WithCancel(l.ctx)
	return p
}

func (p *peer) send(m *cluster.Message) {
	p.mu.Lock()
	if len(p.waiting) == maxWaiting {
		copy(p.waiting, p.waiting[1:])
		p.waiting = p.waiting[:maxWaiting-1]
	}
	p.waiting = append(p.waiting, m)
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// take returns the messages that wait.
func (p *peer) take(dst []*cluster.Message) []*cluster.Message {
	p.mu.Lock()
	defer p.mu.Unlock()
	dst = append(dst[:0], p.waiting...)
	clear(p.waiting)
	p.waiting = p.waiting[:0]
	return dst
}

// run sends until its ctx ends. It connects when there is something to send.
func (p *peer) run() {
	defer p.l.wait.Done()
	defer p.cancel()
	var c *outgoing
	defer func() { c.close() }()
	backoff := minBackoff
	var batch []*cluster.Message
	for {
		select {
		case <-p.wake:
		case <-p.ctx.Done():
			return
		}
		if c == nil || c.over() {
			c.close()
			var err error
			if c, err = p.connect(); err != nil {
				c = nil
				p.setRefused(err)
				p.l.say("a node of the cluster cannot be reached", p.address, err)
				// Others that have lost the same node are not to come back at the same moment.
				select {
				case <-time.After(backoff/2 + rand.N(backoff)):
				case <-p.ctx.Done():
					return
				}
				backoff = min(2*backoff, maxBackoff)
				p.wakeAgain()
				continue
			}
			backoff = minBackoff
			p.setRefused(nil)
			p.l.mu.Lock()
			delete(p.l.said, p.address)
			p.l.mu.Unlock()
		}
		batch = p.take(batch)
		for _, m := range batch {
			if !c.write(m, p.l.cfg.Timeout) {
				// A part of the message may have been sent. The rest of the batch is lost.
				c.close()
				c = nil
				p.wakeAgain()
				break
			}
		}
		clear(batch)
	}
}

// setRefused takes the result of an attempt to connect.
func (p *peer) setRefused(err error) {
	text := ""
	if said, ok := errors.AsType[*refusal](err); ok {
		text = strings.TrimPrefix(said.text, errRefused.Error()+": ")
	}
	p.mu.Lock()
	p.refused = text
	p.mu.Unlock()
}

// refusal is the answer of a node that does not take connections of this one.
type refusal struct{ text string }

func (r *refusal) Error() string { return "it says: " + r.text }

// wakeAgain makes run look again, if there is something to send.
func (p *peer) wakeAgain() {
	p.mu.Lock()
	any := len(p.waiting) > 0
	p.mu.Unlock()
	if any {
		select {
		case p.wake <- struct{}{}:
		default:
		}
	}
}

// outgoing is a connection to a peer.
type outgoing struct {
	l   *Link
	raw net.Conn
	c   net.Conn
	// ended is closed when the peer has ended the connection.
	ended chan struct{}
}

// connect connects and exchanges hellos.
func (p *peer) connect() (*outgoing, error) {
	l := p.l
	ctx, cancel := context.WithTimeout(p.ctx, l.helloTime())
	defer cancel()
	// The other side looks from which address the connection comes.
	var d net.Dialer
	if host, _, err := net.SplitHostPort(l.own); err == nil {
		if ip := net.ParseIP(host); ip != nil && !ip.IsUnspecified() {
			d.LocalAddr = &net.TCPAddr{IP: ip}
		}
	}
	raw, err := d.DialContext(ctx, "tcp", p.address)
	if err != nil {
		return nil, err
	}
	if !l.adopt(raw) {
		return nil, net.ErrClosed
	}
	o := &outgoing{l: l, raw: raw, c: raw, ended: make(chan struct{})}
	if err := p.greet(o); err != nil {
		l.drop(raw)
		return nil, err
	}
	l.wait.Add(1)
	go o.watch()
	return o, nil
}

func (p *peer) greet(o *outgoing) error {
	l := p.l
	err := errors.Join(o.raw.SetDeadline(time.Now().Add(l.helloTime())), setTimeouts(o.raw, l.cfg.Timeout))
	if err != nil {
		return err
	}
	if l.cfg.TLS != nil {
		cfg := l.cfg.TLS.Clone()
		cfg.ServerName = p.name
		o.c = tls.Client(o.raw, cfg)
	}
	if _, err := o.c.Write(hello{cluster: l.cfg.Cluster, from: l.cfg.Name, to: p.name}.frame()); err != nil {
		return err
	}
	b, err := readFrame(o.c, maxHello)
	if err != nil {
		return err
	}
	h, err := decodeHello(b)
	switch {
	case err != nil:
		return err
	case h.refused != "":
		return &refusal{h.refused}
	case h.cluster != l.cfg.Cluster || h.from != p.name:
		return fmt.Errorf("%w: it is node %q of cluster %q, want %q of %q", errRefused, h.from, h.cluster, p.name,
			l.cfg.Cluster)
	}
	return o.raw.SetDeadline(time.Time{})
}

// watch waits for the end of the connection, on which the peer sends nothing.
func (o *outgoing) watch() {
	defer o.l.wait.Done()
	_, _ = io.CopyN(io.Discard, o.c, 1) // whatever has come of it, the connection is over
	close(o.ended)
	o.l.drop(o.raw)
}

func (o *outgoing) over() bool {
	select {
	case <-o.ended:
		return true
	default:
		return false
	}
}

// close closes the connection, if there is one.
func (o *outgoing) close() {
	if o != nil {
		o.l.drop(o.raw)
	}
}

// write sends a message, and reports whether the connection goes on.
func (o *outgoing) write(m *cluster.Message, timeout time.Duration) bool {
	b := m.Encode()
	if len(b) > cluster.MaxMessageBytes {
		return true // the peer would end the connection; the machine's limits do not lead here
	}
	frame := make([]byte, frameHeader, frameHeader+len(b))
	binary.LittleEndian.PutUint32(frame, uint32(len(b)))
	err := o.raw.SetWriteDeadline(time.Now().Add(timeout))
	if err == nil {
		_, err = o.c.Write(append(frame, b...))
	}
	return err == nil
}
