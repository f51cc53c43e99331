package cluster

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"jbofd/client"
	store "jbofd/client/cluster"
	"jbofd/client/kv"
	"jbofd/internal/buildtags"
	"jbofd/internal/crrs/linear"
	"jbofd/internal/nvme"
)

const keys = 24

// load is clients that write and read, and what they have seen.
type load struct {
	t    *testing.T
	all  boxes
	over atomic.Bool
	done sync.WaitGroup
	// store is that of some of the clients, or of all.
	store  *store.Store
	stores bool
	// closing are connections that were given up.
	closing sync.WaitGroup

	callers, value atomic.Uint64
	mu             sync.Mutex
	seen           [keys][]linear.Operation
	// written is when a write of a key was acknowledged last.
	written [keys]time.Time
	acked   int
	// unknown counts writes whose outcome no client knows.
	unknown int
	// longest is how long a write by a Store has taken at most, in nanoseconds.
	longest atomic.Int64
	// readOnly: nothing is written for now.
	readOnly atomic.Bool
}

// startLoad starts clients. Half of them know all nodes and find out which of them serves a key, the others have a
// Store in common.
func startLoad(t *testing.T, all boxes, clients int) *load {
	l := &load{t: t, all: all}
	l.store = l.openStore()
	for i := range clients {
		if i%2 == 0 {
			l.done.Go(l.run)
		} else {
			l.done.Go(func() { l.runStore(l.store) })
		}
	}
	return l
}

// startStores starts clients that have a Store in common, as is needed where nodes have several partitions.
func startStores(t *testing.T, all boxes, clients int) *load {
	l := &load{t: t, all: all, stores: true}
	l.store = l.openStore()
	for range clients {
		l.done.Go(func() { l.runStore(l.store) })
	}
	return l
}

// stop ends the load, reads each key once more, and checks all histories.
func (l *load) stop() {
	l.t.Helper()
	l.over.Store(true)
	l.done.Wait()
	c := newCaller(l)
	for k := range keys {
		l.all.eventually("the last read", func() error {
			if l.stores {
				return l.readStore(l.store, k)
			}
			return c.read(k, c.rng.IntN(len(c.nodes)))
		})
	}
	c.close()
	l.closing.Wait()
	l.t.Logf("the Store: %+v", l.store.Stats())
	_ = l.store.Close() // of nodes that may have been away
	for k, ops := range l.seen {
		if err := linear.Check(ops); err != nil {
			l.t.Errorf("key %d: %v", k, err)
		}
	}
	l.t.Logf("%d writes acknowledged, the outcome of %d is not known", l.acked, l.unknown)
	if l.acked < 2*keys {
		l.t.Errorf("only %d writes were acknowledged", l.acked)
	}
}

// allWritten waits until a write of each key was acknowledged that began after the call, and returns how long that
// took.
func (l *load) allWritten() time.Duration {
	l.t.Helper()
	begin := time.Now()
	l.all.eventually("writes of all keys", func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		for k, at := range l.written {
			if at.Before(begin) {
				return fmt.Errorf("key %d was not written", k)
			}
		}
		return nil
	})
	return time.Since(begin)
}

// caller is a client with a connection to each node.
type caller struct {
	l     *load
	name  string
	rng   *rand.Rand
	nodes []connection
	// closed: it connects to nobody any more.
	closed bool
	// head is the node that has taken the last write of a key.
	head [keys]int
}

func newCaller(l *load) *caller {
	return &caller{l: l, name: fmt.Sprintf("nqn.2026-11.example.host:%d", l.callers.Add(1)),
		rng: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())), nodes: make([]connection, len(l.all))}
}

func (l *load) run() {
	c := newCaller(l)
	defer c.close()
	for !l.over.Load() {
		k := c.rng.IntN(keys)
		if l.reads(c.rng) {
			_ = c.read(k, c.rng.IntN(len(c.nodes))) // another one follows
		} else {
			c.write(k)
		}
	}
}

// reads draws whether an operation reads: half of them do. With -long it is three of four, because a write costs the
// machine several times as much as a read, and it is reads that show what is wrong.
func (l *load) reads(rng *rand.Rand) bool {
	of := 2
	if *opsFlag > 0 {
		of = 4
	}
	return rng.IntN(of) > 0 || l.readOnly.Load()
}

// close gives up all connections when the caller has ended; load.closing waits for that.
func (c *caller) close() {
	c.closed = true
	c.l.closing.Go(func() {
		for i := range c.nodes {
			for s := &c.nodes[i]; ; time.Sleep(time.Millisecond) {
				s.mu.Lock()
				dialing := s.dialing
				s.mu.Unlock()
				if !dialing {
					break
				}
			}
			c.drop(i)
		}
	})
}

// opTimeout is how long an operation may take before the client gives it up.
const opTimeout = time.Second

// connection is a caller's to a node.
type connection struct {
	mu      sync.Mutex
	con     *client.Controller
	ns      *kv.Namespace // nil: not connected
	dialing bool
}

// node returns the connection to a node, or nil and connects in the background: a node that is paused answers late.
func (c *caller) node(i int) *kv.Namespace {
	s := &c.nodes[i]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ns == nil && !s.dialing && !c.closed {
		s.dialing = true
		c.l.closing.Go(func() { c.dial(i) })
	}
	return s.ns
}

func (c *caller) dial(i int) {
	s := &c.nodes[i]
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	con, err := client.Connect(ctx, client.Options{Address: "tcp://" + c.l.all[i].host + ":4420", SubNQN: subNQN,
		HostNQN: c.name, CtrlLossTimeout: -1, MaxRetries: -1, ConnectTimeout: time.Second})
	var ns *kv.Namespace
	if err == nil {
		if ns, err = kv.Open(ctx, con, partition, kv.Options{}); err != nil {
			_ = con.Close() // of a node that is away
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dialing = false; err == nil {
		s.con, s.ns = con, ns
	}
}

// drop gives up the connection to a node. The node may be away, so that it is not waited for.
func (c *caller) drop(i int) {
	s := &c.nodes[i]
	s.mu.Lock()
	defer s.mu.Unlock()
	if con := s.con; con != nil {
		c.l.closing.Go(func() { _ = con.Close() })
	}
	s.con, s.ns = nil, nil
}

// elsewhere reports whether a node has done nothing, because another one is to be asked, or it later.
func elsewhere(err error) bool {
	var st *client.StatusError
	return errors.As(err, &st) && (st.Status.Code() == nvme.KVWrongView || st.Status.Code() == nvme.NamespaceNotReady)
}

func now() int64 { return int64(time.Since(started)) + 1 }

var started = time.Now()

// read asks a node.
func (c *caller) read(k, i int) error {
	ns := c.node(i)
	if ns == nil {
		time.Sleep(time.Millisecond)
		return errors.New("not connected")
	}
	o := linear.Operation{Begin: now()}
	buf := make([]byte, maxValue)
	ctx, cancel := context.WithTimeout(context.Background(), opTimeout)
	size, err := ns.Get(ctx, key(k), buf)
	cancel()
	switch {
	case err == nil:
		o.Value = c.l.decode(k, buf[:size])
	case errors.Is(err, kv.ErrKeyNotFound):
	case elsewhere(err):
		time.Sleep(time.Millisecond)
		return err
	default:
		if st := (*client.StatusError)(nil); errors.As(err, &st) {
			c.l.t.Errorf("reading key %d at %s: %v", k, c.l.all[i].name, err)
		}
		c.drop(i)
		return err
	}
	o.End = now()
	c.l.mu.Lock()
	c.l.seen[k] = append(c.l.seen[k], o)
	c.l.mu.Unlock()
	return nil
}

// write asks one node after the other until one has taken the write, or its outcome is not known.
func (c *caller) write(k int) {
	o := linear.Operation{Write: true, Value: c.l.value.Add(1), Begin: now(), End: math.MaxInt64}
	begin := time.Now()
	value := encode(o.Value)
	for tries := 0; ; tries++ {
		i := c.head[k]
		if tries > 0 {
			i = c.rng.IntN(len(c.nodes))
		}
		ns := c.node(i)
		if ns == nil {
			if c.l.over.Load() {
				return // never sent
			}
			time.Sleep(time.Millisecond)
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), opTimeout)
		err := ns.Put(ctx, key(k), value)
		cancel()
		if elsewhere(err) && !c.l.over.Load() {
			time.Sleep(time.Millisecond)
			continue
		}
		if elsewhere(err) {
			return // it was never done
		}
		c.l.mu.Lock()
		defer c.l.mu.Unlock()
		if err == nil {
			c.head[k] = i
			o.End = now()
			c.l.acked++
			if begin.After(c.l.written[k]) {
				c.l.written[k] = begin
			}
		} else {
			c.l.unknown++
			c.drop(i)
		}
		c.l.seen[k] = append(c.l.seen[k], o)
		return
	}
}

// Values have their number, a mark by which they are found on drives, and a text whose length depends on the number.
const (
	mark     = "\x8a test \x1c"
	maxValue = 2048
)

func encode(value uint64) []byte {
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, maxValue), value)
	b = append(b, mark...)
	for n := 16 + value*2654435761%(maxValue-16); uint64(len(b)) < n; {
		b = append(b, byte(value>>(len(b)%5)), byte(len(b)))
	}
	return b
}

// decode returns the number of a value that was read, which must be as it was written.
func (l *load) decode(k int, b []byte) uint64 {
	if len(b) < 16 {
		l.t.Errorf("key %d has a value of %d bytes", k, len(b))
		return math.MaxUint64
	}
	value := binary.LittleEndian.Uint64(b)
	if !bytes.Equal(b, encode(value)) {
		l.t.Errorf("key %d has a value that nobody has written: %x", k, b)
	}
	return value
}

func key(k int) []byte { return fmt.Appendf(nil, "key%d", k) }

// few returns the first n nodes, or one: with the race detector everything takes several times as long.
func few(all boxes, n int) boxes {
	if buildtags.Race {
		n = 1
	}
	return all[:n]
}

// TestNodesAreKilled: each node of three is killed under load, one after the other, and comes back. Nothing that was
// acknowledged is lost, no reader goes back in time, writes go on soon, and reads of what nobody writes all the time.
func TestNodesAreKilled(t *testing.T) {
	all := newBoxes(t, 3, 3)
	l := startLoad(t, all, 6)
	l.allWritten()
	r := l.startReader()
	for _, b := range few(all, 3) {
		quiet, what := r.pause(), ""
		if a, err := all[0].admin.Cluster(t.Context()); err == nil && a.Manager == b.name {
			what = ", the manager,"
		}
		b.kill()
		written := l.allWritten().Round(time.Millisecond)
		t.Logf("%s%s killed: all keys are written again after %v; no read took longer than %v, and %v before", b.name,
			what, written, r.pause(), quiet)
		b.start()
		all.full()
	}
	r.stop()
	l.stop()
}

// TestPausedNodesServeNothingStale: nodes are paused for longer than all leases, under load, and woken.
func TestPausedNodesServeNothingStale(t *testing.T) {
	all := newBoxes(t, 3, 3)
	l := startLoad(t, all, 6)
	l.allWritten()
	for _, b := range few(all, 2) {
		b.signal(syscall.SIGSTOP)
		t.Logf("%s paused: all keys are written again after %v", b.name, l.allWritten().Round(time.Millisecond))
		b.signal(syscall.SIGCONT)
		all.full()
	}
	l.stop()
}
