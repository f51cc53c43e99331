// Package link carries the messages of the membership between the nodes of a cluster, over TCP.
//
// Each node listens, and has a connection to each node that it sends to, on which only it sends. A connection begins
// with a hello in both directions:
//
//	length  u32, little endian: of what follows
//	magic   4 B  "JBCH"
//	version u16  1
//	cluster, from, to, refused: each u8 n, n B
//
//	1a 00 00 00  4a 42 43 48  01 00  04 74 65 73 74  06 6e 6f 64 65 2d 31  06 6e 6f 64 65 2d 32  00
//	             "JBCH"       1      "test"          "node-1"              "node-2"              not refused
//
// Then the one who has connected sends messages, each a u32 of its length and its encoding (cluster.Message).
//
// Who may join is decided by the configuration, which names all nodes with their addresses. With TLS, both sides show a
// certificate of the cluster's authority for the name that they say. Without, a connection must come from the host that
// the name has in the configuration, so that the network must not let others use that address. A message counts only if
// its sender is who the connection belongs to.
//
// Everything is bounded: connections that have not said hello, their time for it, one connection for each node, the
// length of a message, and how many wait for a node that cannot be reached. Then the oldest are lost, as the machine
// allows.
package link

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/cluster"
)

// Config describes a Link.
type Config struct {
	// Cluster and Name are those of this node.
	Cluster, Name string
	// Nodes has the address of each node of the cluster, host and port, also of this one, by its name. SetNodes changes
	// the others.
	Nodes map[string]string
	// Listen is where to listen; empty: at the node's own address.
	Listen string
	// TLS has the node's certificate and the cluster's authority, as RootCAs and ClientCAs; nil: none.
	TLS *tls.Config
	// Timeout bounds a connection's beginning, and for how long sent data may be unacknowledged: about a lease.
	Timeout time.Duration
	// Receive takes a message, which belongs to it. It may wait, but not for Close. That holds up the sender only.
	// Several goroutines call it, until Close returns.
	Receive func(m *cluster.Message)
	Log     *slog.Logger
}

const (
	// maxGreeting is how many connections may be at their hello, maxGreetingHost how many of them from one address, so
	// that a stranger does not keep nodes out.
	maxGreeting, maxGreetingHost = 16, 4
	maxSaid                      = 64
	// maxWaiting is how many messages wait for a node.
	maxWaiting = 16
	// The time between attempts to connect grows between these, with jitter.
	minBackoff, maxBackoff = 20 * time.Millisecond, 500 * time.Millisecond
)

// Link sends and receives.
type Link struct {
	cfg      Config
	listener net.Listener
	ctx      context.Context
	cancel   context.CancelFunc
	wait     sync.WaitGroup
	own      string // the address of this node

	// mu guards what follows.
	mu sync.Mutex
	// nodes has the addresses of the other nodes by their names, peers those nodes by their addresses.
	nodes map[string]string
	peers map[string]*peer
	// greeting has the connections at their hello, with their addresses.
	greeting map[net.Conn]string
	// incoming has the connection that each node sends on; open all connections. Close closes them.
	incoming map[string]net.Conn
	open     map[net.Conn]bool
	closed   bool
	// said has the last problem with each address that was logged, so that one who comes again and again does not fill
	// the log. At most maxSaid.
	said map[string]string
}

// Start listens, and returns.
func Start(cfg Config) (*Link, error) {
	own, ok := cfg.Nodes[cfg.Name]
	if !ok {
		return nil, fmt.Errorf("the nodes of the cluster do not include %q, this one", cfg.Name)
	}
	if cfg.Listen == "" {
		cfg.Listen = own
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	l := &Link{cfg: cfg, own: own, greeting: map[net.Conn]string{}, said: map[string]string{},
		incoming: map[string]net.Conn{}, open: map[net.Conn]bool{}}
	if err := l.CheckNodes(cfg.Nodes); err != nil {
		return nil, err
	}
	var err error
	if l.listener, err = net.Listen("tcp", cfg.Listen); err != nil {
		return nil, fmt.Errorf("listening for the nodes of the cluster: %w", err)
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.mu.Lock()
	l.setNodesLocked(cfg.Nodes)
	l.mu.Unlock()
	l.wait.Add(1)
	go l.accept()
	return l, nil
}

// CheckNodes returns the error that SetNodes would return.
func (l *Link) CheckNodes(nodes map[string]string) error {
	if nodes[l.cfg.Name] != l.own {
		return fmt.Errorf("the address of %s, this node, is %q, and cannot become %q", l.cfg.Name, l.own,
			nodes[l.cfg.Name])
	}
	names := map[string]string{}
	for name, address := range nodes {
		if len(name) > maxName || len(address) > maxName {
			return fmt.Errorf("node %q at %q: name and address must have at most %d bytes", name, address, maxName)
		}
		if _, _, err := net.SplitHostPort(address); err != nil {
			return fmt.Errorf("address of node %s: %w", name, err)
		}
		if names[address] != "" {
			return fmt.Errorf("address %s belongs to two nodes", address)
		}
		names[address] = name
	}
	return nil
}

// SetNodes changes which nodes there are, with their addresses. The connections of those that are not among them any
// more, or have another address, end, and what waits for them is lost. This node's own address cannot change. After
// Close it does nothing.
//
// Errors: what is wrong with an address; nothing has changed then.
func (l *Link) SetNodes(nodes map[string]string) error {
	if err := l.CheckNodes(nodes); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.setNodesLocked(nodes)
	}
	return nil
}

// setNodesLocked is SetNodes with addresses that were checked. The caller holds mu.
func (l *Link) setNodesLocked(nodes map[string]string) {
	l.nodes = maps.Clone(nodes)
	delete(l.nodes, l.cfg.Name)
	peers := make(map[string]*peer, len(l.nodes))
	for name, address := range l.nodes {
		p := l.peers[address]
		if p == nil || p.name != name {
			p = newPeer(l, name, address)
			l.wait.Add(1)
			go p.run()
		}
		peers[address] = p
	}
	for address, p := range l.peers {
		if peers[address] != p {
			p.cancel()
			if c := l.incoming[p.name]; c != nil {
				c.Close() // if the node has another address now, it comes again
			}
		}
	}
	l.peers = peers
}

// Refusals returns why other nodes refuse connections of this one, as they have said at the last attempt, by their
// names.
func (l *Link) Refusals() map[string]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := map[string]string{}
	for _, p := range l.peers {
		p.mu.Lock()
		if p.refused != "" {
			all[p.name] = p.refused
		}
		p.mu.Unlock()
	}
	return all
}

// Close ends all connections and waits until nothing is received any more. Idempotent.
func (l *Link) Close() {
	l.cancel()
	l.listener.Close()
	l.mu.Lock()
	l.closed = true
	for c := range l.open {
		c.Close()
	}
	l.mu.Unlock()
	l.wait.Wait()
}

// Send sends a message to a node, if there is one with that address; otherwise it is lost. It does not wait.
func (l *Link) Send(address string, m *cluster.Message) {
	l.mu.Lock()
	p := l.peers[address]
	l.mu.Unlock()
	if p != nil {
		p.send(m)
	}
}

// admit takes a connection that has come, if there may be one more at its hello.
func (l *Link) admit(c net.Conn) bool {
	host := hostOf(c)
	l.mu.Lock()
	defer l.mu.Unlock()
	same := 0
	for _, h := range l.greeting {
		if h == host {
			same++
		}
	}
	if l.closed || len(l.greeting) == maxGreeting || same == maxGreetingHost {
		c.Close()
		return false
	}
	l.greeting[c], l.open[c] = host, true
	return true
}

func hostOf(c net.Conn) string {
	host, _, err := net.SplitHostPort(c.RemoteAddr().String())
	if err != nil {
		return c.RemoteAddr().String()
	}
	return host
}

// adopt notes a connection that Close is to close. It returns false, and closes the connection, after Close.
func (l *Link) adopt(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		c.Close()
		return false
	}
	l.open[c] = true
	return true
}

// drop closes a connection.
func (l *Link) drop(c net.Conn) {
	c.Close()
	l.mu.Lock()
	delete(l.open, c)
	l.mu.Unlock()
}

// accept takes connections until the listener is closed.
func (l *Link) accept() {
	defer l.wait.Done()
	for {
		c, err := l.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // for want of file descriptors, for instance
			select {
			case <-time.After(maxBackoff):
			case <-l.ctx.Done():
			}
			continue
		}
		if l.admit(c) { // otherwise it comes again
			l.wait.Add(1)
			go l.receive(c)
		}
	}
}

// receive reads what a node sends, until its connection ends or the node has another one.
func (l *Link) receive(raw net.Conn) {
	defer l.wait.Done()
	defer l.drop(raw)
	c, from, err := l.greet(raw)
	l.mu.Lock()
	delete(l.greeting, raw)
	l.mu.Unlock()
	if err != nil {
		l.refused(raw, err)
		return
	}
	l.mu.Lock()
	if last := l.incoming[from]; last != nil {
		last.Close()
	}
	if _, known := l.nodes[from]; !known { // SetNodes has removed it after its hello
		l.mu.Unlock()
		return
	}
	l.incoming[from] = raw
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		if l.incoming[from] == raw {
			delete(l.incoming, from)
		}
		l.mu.Unlock()
	}()
	// Only after the registration: if a node opens two connections, the one that is answered last must be the one that
	// was registered last.
	if err := l.welcome(raw, c, from); err != nil {
		return
	}
	for {
		b, err := readFrame(c, cluster.MaxMessageBytes)
		if err != nil {
			return
		}
		m, err := cluster.DecodeMessage(b)
		if err == nil && sender(m) != from {
			err = fmt.Errorf("a message of %q from %q", sender(m), from)
		}
		if err != nil {
			l.refused(raw, err)
			return
		}
		l.cfg.Receive(m)
	}
}

// sender is the name of the node that a message says to come from.
func sender(m *cluster.Message) string {
	if m.Report != nil {
		return m.Report.Name
	}
	return m.Answer.Manager.Name
}

// refused logs why a connection was refused.
func (l *Link) refused(c net.Conn, err error) {
	l.say("a connection of the cluster is refused", hostOf(c), err)
}

// say logs a problem with an address, unless it was the last one with it.
func (l *Link) say(what, host string, err error) {
	text := err.Error()
	if op, ok := errors.AsType[*net.OpError](err); ok {
		text = op.Op + op.Err.Error() // without the ports, which are others each time
	}
	l.mu.Lock()
	again := l.closed || l.said[host] == text
	if len(l.said) == maxSaid {
		clear(l.said)
	}
	l.said[host] = text
	l.mu.Unlock()
	if !again {
		l.cfg.Log.Warn(what, "host", host, "error", err)
	}
}

// setTimeouts makes the kernel end a connection that does not acknowledge, also while nothing is sent.
func setTimeouts(c net.Conn, timeout time.Duration) error {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return nil
	}
	second := max(timeout, time.Second)
	raw, err := t.SyscallConn()
	if err != nil {
		return err
	}
	alive := net.KeepAliveConfig{Enable: true, Idle: second, Interval: second, Count: 3}
	if err := t.SetKeepAliveConfig(alive); err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(timeout.Milliseconds()))
	})
	return errors.Join(err, failed)
}
