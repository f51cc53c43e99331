package link

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/testutil/certs"
	"jbofd/internal/testutil/loopback"
)

const wait = time.Minute

// network has addresses for the nodes of a cluster.
type network map[string]string

func newNetwork(t *testing.T, names ...string) network {
	t.Helper()
	n := network{}
	for _, name := range names {
		host, _, err := net.SplitHostPort(loopback.Address())
		if err != nil {
			t.Fatal(err)
		}
		n[name] = host + ":7000"
	}
	return n
}

// end is a link with what it has received.
type end struct {
	*Link
	got chan *cluster.Message
	log *lines
}

// lines is a log.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// start starts the link of a node; change may change its configuration.
func (n network) start(t *testing.T, name string, change ...func(c *Config)) *end {
	t.Helper()
	e := &end{got: make(chan *cluster.Message, 1000), log: &lines{}}
	cfg := Config{Cluster: "test", Name: name, Nodes: n, Timeout: 10 * time.Second,
		Receive: func(m *cluster.Message) { e.got <- m }, Log: slog.New(slog.NewTextHandler(e.log, nil))}
	for _, f := range change {
		f(&cfg)
	}
	var err error
	if e.Link, err = Start(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// arrives sends a message again and again until it is there.
func arrives(t *testing.T, from *end, address string, to *end, seq uint64) {
	t.Helper()
	m := report(from.cfg.Name, seq)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(wait)
	for {
		from.Send(address, m)
		select {
		case got := <-to.got:
			if got.Report != nil && got.Report.Seq == seq && got.Report.Name == from.cfg.Name {
				return
			}
		case <-tick.C:
		case <-limit:
			t.Fatalf("message %d does not arrive; %s%s", seq, from.log, to.log)
		}
	}
}

func report(name string, seq uint64) *cluster.Message {
	return &cluster.Message{Report: &cluster.Report{Name: name, Seq: seq}}
}

// says sends from one node until its log has a text.
func (e *end) says(t *testing.T, address, want string) {
	t.Helper()
	for limit := time.Now().Add(wait); !strings.Contains(e.log.String(), want); {
		if time.Now().After(limit) {
			t.Fatalf("the log is %q, want %q", e.log, want)
		}
		e.Send(address, report(e.cfg.Name, 1))
		time.Sleep(10 * time.Millisecond) // between two looks at the log
	}
}

// TestMessagesArriveInTheirOrder sends both kinds in both directions, also after one side was away.
func TestMessagesArriveInTheirOrder(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, "a", "b")
	a, b := n.start(t, "a"), n.start(t, "b")
	arrives(t, a, n["b"], b, 1)
	for seq := uint64(2); seq < 10; seq++ {
		a.Send(n["b"], &cluster.Message{Answer: &cluster.Answer{Manager: cluster.Identity{Name: "a"}, Seq: seq,
			View: make([]byte, 1<<17)}})
	}
	for seq := uint64(2); seq < 10; {
		select {
		case m := <-b.got:
			if m.Report != nil {
				continue // the first message, once more
			}
			if m.Answer.Seq != seq || len(m.Answer.View) != 1<<17 {
				t.Fatalf("answer %d of %d bytes, want %d", m.Answer.Seq, len(m.Answer.View), seq)
			}
			seq++
		case <-time.After(wait):
			t.Fatalf("answer %d does not come", seq)
		}
	}
	arrives(t, b, n["a"], a, 20)
	b.Close()
	for range 10 {
		a.Send(n["b"], report("a", 21))
	}
	b = n.start(t, "b")
	arrives(t, a, n["b"], b, 22)
	a.Send("127.9.9.9:1", report("a", 23)) // an address of nobody
}

// TestWithTLSOnlyTheNamedNodeIsHeard has nodes with certificates for their own names, for another name, and of another
// authority. Where a connection comes from does not matter.
func TestWithTLSOnlyTheNamedNodeIsHeard(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, "a", "b", "c", "d")
	ca := certs.New(t)
	with := func(ca *certs.CA, name string) func(*Config) { return func(c *Config) { c.TLS = ca.Config(name) } }
	a, b := n.start(t, "a", with(ca, "a")), n.start(t, "b", with(ca, "b"))
	arrives(t, a, n["b"], b, 1)
	arrives(t, b, n["a"], a, 2)
	c := n.start(t, "c", with(ca, "a"))
	c.says(t, n["b"], "it says: refused: x509: certificate is valid for a, not c")
	d := n.start(t, "d", with(certs.New(t), "d"))
	d.says(t, n["b"], "unknown authority")
	// One that trusts the cluster's authority, and has a certificate of another one.
	d.Close()
	d = n.start(t, "d", func(c *Config) {
		c.TLS = certs.New(t).Config("d")
		c.TLS.RootCAs = ca.Config("d").RootCAs
	})
	d.says(t, n["b"], "tls: unknown certificate authority")
	a.says(t, n["c"], "valid for a, not c")
	for len(b.got) > 0 {
		if m := <-b.got; m.Report.Name != "a" {
			t.Errorf("%q is heard", m.Report.Name)
		}
	}
}

// TestWhoIsNotConfiguredIsRefused has connections of strangers.
func TestWhoIsNotConfiguredIsRefused(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, "a", "b", "c")
	b := n.start(t, "b")
	for _, e := range []struct {
		want  string
		start func(t *testing.T) *end
	}{
		{"it says: refused: cluster \\\"other\\\", this is a node of \\\"test\\\"", func(t *testing.T) *end {
			return n.start(t, "a", func(c *Config) { c.Cluster = "other" })
		}},
		{"it says: refused: node \\\"x\\\" is not one of the others", func(t *testing.T) *end {
			return network{"x": n["a"], "b": n["b"]}.start(t, "x")
		}},
		{"it says: refused: node a comes from ", func(t *testing.T) *end {
			return network{"a": n["c"], "b": n["b"]}.start(t, "a")
		}},
		{"it says: refused: for node \\\"c\\\", this is \\\"b\\\"", func(t *testing.T) *end {
			return network{"a": n["a"], "c": n["b"]}.start(t, "a")
		}},
	} {
		a := e.start(t)
		a.says(t, n["b"], e.want)
		a.Close()
	}
	if len(b.got) > 0 {
		t.Errorf("heard: %+v", <-b.got)
	}
}

// dial connects as a node that says what it likes.
func dial(t *testing.T, n network, from, to string) net.Conn {
	t.Helper()
	host, _, _ := net.SplitHostPort(n[from])
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(host)}}
	c, err := d.DialContext(t.Context(), "tcp", n[to])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(wait)); err != nil {
		t.Fatal(err)
	}
	return c
}

// greeted connects and is taken for a node.
func greeted(t *testing.T, n network, from, to string) net.Conn {
	t.Helper()
	c := dial(t, n, from, to)
	if _, err := c.Write(hello{"test", from, to, ""}.frame()); err != nil {
		t.Fatal(err)
	}
	b, err := readFrame(c, maxHello)
	if err != nil {
		t.Fatal(err)
	}
	if h, err := decodeHello(b); err != nil || h.refused != "" || h.from != to {
		t.Fatalf("%+v, %v", h, err)
	}
	return c
}

// ended waits for the end of a connection.
func ended(t *testing.T, c net.Conn, what string) {
	t.Helper()
	_, err := io.Copy(io.Discard, c)
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		t.Errorf("%s: the connection is still there", what)
	}
}

// TestWhatIsNotAMessageEndsTheConnection sends what a node does not send, before and after its hello. The other node
// goes on.
func TestWhatIsNotAMessageEndsTheConnection(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, "a", "b")
	b := n.start(t, "b")
	frame := func(b []byte) []byte { return append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...) }
	for what, bytes := range map[string][]byte{
		"a request of the web": []byte("GET / HTTP/1.1\r\n\r\n"),
		"a long hello":         frame(make([]byte, maxHello+1)),
		"an empty hello":       frame(nil),
		"another version":      frame([]byte("JBCH\x02\x00")),
	} {
		c := dial(t, n, "a", "b")
		if _, err := c.Write(bytes); err != nil {
			t.Fatal(err)
		}
		ended(t, c, what)
	}
	for what, bytes := range map[string][]byte{
		"a long message":       binary.LittleEndian.AppendUint32(nil, cluster.MaxMessageBytes+1),
		"no message":           frame([]byte("hello")),
		"a message of another": frame(report("b", 1).Encode()),
		"an answer of another": frame((&cluster.Message{Answer: &cluster.Answer{}}).Encode()),
		"a message of nobody":  frame(report("", 1).Encode()),
	} {
		c := greeted(t, n, "a", "b")
		if _, err := c.Write(bytes); err != nil {
			t.Fatal(err)
		}
		ended(t, c, what)
	}
	if len(b.got) > 0 {
		t.Errorf("heard: %+v", <-b.got)
	}
	arrives(t, n.start(t, "a"), n["b"], b, 1)
}

// TestConnectionsAreBounded opens more connections than may be at their hello, of one address and of all: those
// beyond are closed at once. A second connection of a node ends its first one.
func TestConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, "a", "b", "c", "d", "e", "f")
	b := n.start(t, "b", func(c *Config) { c.Timeout = wait })
	var silent []net.Conn
	greeting := func(want int) {
		t.Helper()
		for end := time.Now().Add(wait); ; {
			b.mu.Lock()
			now := len(b.greeting)
			b.mu.Unlock()
			if now == want {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%d connections are at their hello, want %d", now, want)
			}
			time.Sleep(time.Millisecond) // until they are accepted, or their end is seen
		}
	}
	for i, from := range []string{"a", "c", "d", "e"} {
		for range maxGreetingHost {
			silent = append(silent, dial(t, n, from, "b"))
		}
		greeting((i + 1) * maxGreetingHost)
		ended(t, dial(t, n, from, "b"), "one more from an address than is allowed")
	}
	ended(t, dial(t, n, "f", "b"), "one more than is allowed")
	for _, c := range silent {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	greeting(0)
	first := greeted(t, n, "a", "b")
	second := greeted(t, n, "a", "b")
	ended(t, first, "the first of two")
	m := report("a", 5).Encode()
	if _, err := second.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(m))), m...)); err != nil {
		t.Fatal(err)
	}
	select {
	case <-b.got:
	case <-time.After(wait):
		t.Fatal("the second connection is not heard")
	}
}

// TestANodeThatIsAwayHoldsUpNobody sends to a node that accepts and reads nothing, and to one that is not there: Send
// never waits, and the newest messages are kept.
func TestANodeThatIsAwayHoldsUpNobody(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, "a", "b", "c", "d")
	a := n.start(t, "a")
	var lc net.ListenConfig
	mute, err := lc.Listen(context.Background(), "tcp", n["b"])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mute.Close() })
	d := n.start(t, "d")
	for seq := range uint64(1000) {
		a.Send(n["b"], report("a", seq))
		a.Send(n["c"], report("a", seq))
	}
	arrives(t, a, n["d"], d, 1)
	p := a.peers[n["c"]]
	p.mu.Lock()
	if len(p.waiting) != maxWaiting || p.waiting[maxWaiting-1].Report.Seq != 999 {
		t.Errorf("%d messages wait", len(p.waiting))
	}
	p.mu.Unlock()
	c := n.start(t, "c")
	for seq := uint64(1000 - maxWaiting); seq < 1000; {
		a.Send("nobody", nil)
		select {
		case m := <-c.got:
			if m.Report.Seq < seq {
				t.Fatalf("message %d, want %d", m.Report.Seq, seq)
			}
			seq = m.Report.Seq + 1
		case <-time.After(wait):
			t.Fatalf("message %d does not come", seq)
		}
	}
}

// TestAWriteThatTakesTooLongEndsTheConnection has a node that reads nothing after its hello. What was sent in part is
// not followed by anything else, and the next connection begins anew.
func TestAWriteThatTakesTooLongEndsTheConnection(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, "a", "b")
	var lc net.ListenConfig
	b, err := lc.Listen(context.Background(), "tcp", n["b"])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	a := n.start(t, "a", func(c *Config) { c.Timeout = 200 * time.Millisecond })
	accepted := make(chan net.Conn)
	go func() {
		for {
			c, err := b.Accept()
			if err != nil {
				close(accepted)
				return
			}
			if _, err := readFrame(c, maxHello); err != nil {
				continue // its time was over
			}
			if _, err := c.Write(hello{"test", "b", "a", ""}.frame()); err != nil {
				continue
			}
			select {
			case accepted <- c:
			case <-t.Context().Done():
				return
			}
		}
	}()
	connection := func() net.Conn {
		t.Helper()
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		limit := time.After(wait)
		for {
			select {
			case c := <-accepted:
				return c
			case <-tick.C:
				a.Send(n["b"], &cluster.Message{Answer: &cluster.Answer{Manager: cluster.Identity{Name: "a"},
					View: make([]byte, 1<<20)}})
			case <-limit:
				t.Fatal("no connection")
			}
		}
	}
	first := connection()
	second := connection()
	for i, c := range []net.Conn{first, second} {
		if err := c.SetReadDeadline(time.Now().Add(wait)); err != nil {
			t.Fatal(err)
		}
		for whole := 0; ; whole++ {
			f, err := readFrame(c, cluster.MaxMessageBytes)
			if errors.Is(err, errHello) {
				t.Errorf("connection %d, behind %d messages: %v", i, whole, err)
			}
			if err != nil {
				break
			}
			if _, err := cluster.DecodeMessage(f); err != nil {
				t.Errorf("connection %d, message %d: %v", i, whole, err)
			}
			if i == 1 {
				break // it may go on for ever
			}
		}
		_ = c.Close()
	}
}

// TestOnlyTheNodeThatWasCalledIsSentTo has another node, and one of another cluster, at the address of a node.
func TestOnlyTheNodeThatWasCalledIsSentTo(t *testing.T) {
	t.Parallel()
	for _, answer := range []hello{{"test", "c", "a", ""}, {"other", "b", "a", ""}} {
		n := newNetwork(t, "a", "b")
		var lc net.ListenConfig
		b, err := lc.Listen(context.Background(), "tcp", n["b"])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = b.Close() })
		go func() {
			for {
				c, err := b.Accept()
				if err != nil {
					return
				}
				if _, err := readFrame(c, maxHello); err == nil {
					_, _ = c.Write(answer.frame())
				}
				if _, err := io.Copy(io.Discard, c); err == nil {
					_ = c.Close()
				}
			}
		}()
		n.start(t, "a").says(t, n["b"], "it is node ")
	}
}

// TestHellosReturn encodes and decodes a hello, and compares it with its dump.
func TestHellosReturn(t *testing.T) {
	h := hello{"test", "node-1", "node-2", ""}
	want := "1a0000004a42434801000474657374066e6f64652d31066e6f64652d3200"
	if got := hex.EncodeToString(h.frame()); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	long := hello{strings.Repeat("c", maxName), strings.Repeat("f", maxName), strings.Repeat("t", maxName),
		strings.Repeat("r", 1000)}
	for _, h := range []hello{h, {}, long} {
		b := h.frame()[frameHeader:]
		h.refused = h.refused[:min(len(h.refused), maxName)]
		if got, err := decodeHello(b); err != nil || got != h || len(b) > maxHello {
			t.Errorf("%+v, %v, %d bytes, want %+v", got, err, len(b), h)
		}
	}
}

// FuzzHello gives the decoder any bytes: what it takes is what it would send.
func FuzzHello(f *testing.F) {
	f.Add(hello{"test", "node-1", "node-2", "why"}.frame()[frameHeader:])
	f.Add([]byte("JBCH\x01\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := decodeHello(b); err == nil && !bytes.Equal(h.frame()[frameHeader:], b) {
			t.Fatalf("%+v", h)
		}
	})
}

// TestAConfigurationThatCannotBeIsRefused tries nodes and addresses.
func TestAConfigurationThatCannotBeIsRefused(t *testing.T) {
	for _, c := range []struct {
		nodes network
		want  string
	}{
		{network{"b": "h:1"}, "do not include \"a\""},
		{network{"a": "h"}, "missing port"},
		{network{"a": "127.0.0.1:1", "b": "127.0.0.1:1"}, "belongs to two nodes"},
		{network{"a": "127.0.0.1:1", "b": "h:1", "c": "h:1"}, "belongs to two nodes"},
		{network{"a": "127.0.0.1:1", strings.Repeat("b", 300): "h:1"}, "at most 223 bytes"},
		{network{"a": "203.0.113.1:1"}, "listening"},
	} {
		l, err := Start(Config{Cluster: "test", Name: "a", Nodes: c.nodes})
		if err == nil {
			l.Close()
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %s", c.nodes, err, fmt.Sprint(c.want))
		}
	}
}
