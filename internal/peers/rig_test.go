package peers_test

import (
	"bytes"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/nvme"
	"jbofd/internal/peers"
	"jbofd/internal/uuid"
)

const (
	// hostNQN is that of node a, which sends.
	hostNQN  = "nqn.2026-11.example.jbofd:node-a"
	maxValue = 512 << 10
	wait     = 20 * time.Second
)

// sink gathers commands that have ended.
type sink struct {
	mu    sync.Mutex
	done  []*peers.Command
	kicks chan struct{}
}

func newSink() *sink { return &sink{kicks: make(chan struct{}, 1)} }

func (s *sink) PeerDone(c *peers.Command) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done = append(s.done, c)
	return len(s.done) == 1
}

func (s *sink) Kick() {
	select {
	case s.kicks <- struct{}{}:
	default:
	}
}

func (s *sink) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.done)
}

// await waits until n commands have ended, and takes them.
func (s *sink) await(t testing.TB, n int) []*peers.Command {
	t.Helper()
	var all []*peers.Command
	late := time.After(wait)
	for {
		s.mu.Lock()
		all = append(all, s.done...)
		s.done = s.done[:0]
		s.mu.Unlock()
		if len(all) >= n {
			if len(all) > n {
				t.Fatalf("%d commands have ended, want %d", len(all), n)
			}
			return all
		}
		select {
		case <-s.kicks:
		case <-late:
			t.Fatalf("%d of %d commands have ended after %s", len(all), n, wait)
		}
	}
}

// rig is node a with other nodes.
type rig struct {
	*peers.Peers
	sink      *sink
	connected chan string
	// lost has what Disconnected was called with.
	lost  chan peers.Loss
	log   *logged
	batch peers.Batch
}

// logged is what was logged.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logged) count(what string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), what)
}

// rig makes node a, with the boxes as its other nodes.
func (w *world) rig(t testing.TB, change func(*peers.Config), boxes ...*box) *rig {
	t.Helper()
	var nodes []peers.Node
	for _, b := range boxes {
		nodes = append(nodes, b.node())
	}
	return newRig(t, func(c *peers.Config) {
		if w.rdma {
			c.RDMA = w.host
		}
		if change != nil {
			change(c)
		}
	}, nodes...)
}

func newRig(t testing.TB, change func(*peers.Config), nodes ...peers.Node) *rig {
	t.Helper()
	r := &rig{sink: newSink(), connected: make(chan string, 1000), lost: make(chan peers.Loss, 1000), log: &logged{}}
	// A machine that is busy with other tests must not count as a node that does not answer.
	cfg := peers.Config{Name: "a", HostNQN: hostNQN, Nodes: nodes, MinPause: 10 * time.Millisecond,
		MaxPause: 100 * time.Millisecond, Timeout: time.Minute, KATO: time.Minute,
		Connected: func(node string) { r.connected <- node },
		Disconnected: func(_ string, l peers.Loss) {
			select {
			case r.lost <- l:
			default: // tests that look for it have few losses
			}
		},
		Log: slog.New(slog.NewTextHandler(io.MultiWriter(r.log, t.Output()), nil))}
	if change != nil {
		change(&cfg)
	}
	var err error
	if r.Peers, err = peers.New(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

// place says where partitions are.
type place struct {
	node string
	id   uuid.UUID
}

// mapOf makes a map of partitions, numbered from 0. It has the nodes a, b and c.
func mapOf(places ...place) *cluster.Map {
	v := &view.View{Nodes: []view.Node{{Name: "a"}, {Name: "b"}, {Name: "c"}}}
	for _, p := range places {
		i := slices.IndexFunc(v.Nodes, func(n view.Node) bool { return n.Name == p.node })
		v.Partitions = append(v.Partitions, view.Partition{ID: p.id, Node: uint16(i)})
	}
	return &cluster.Map{View: v}
}

// see sets a view of the partitions of boxes, numbered from 0.
func (r *rig) see(boxes ...*box) {
	var places []place
	for _, b := range boxes {
		for _, id := range b.ids {
			places = append(places, place{b.name, id})
		}
	}
	r.SetView(mapOf(places...))
}

// awaitConnected waits until Connected was called for the node.
func (r *rig) awaitConnected(t testing.TB, node string) {
	t.Helper()
	select {
	case got := <-r.connected:
		if got != node {
			t.Fatalf("connected to %s, want %s", got, node)
		}
	case <-time.After(wait):
		t.Fatalf("not connected to %s after %s", node, wait)
	}
}

// send sends commands.
func (r *rig) send(cmds ...*peers.Command) {
	for _, c := range cmds {
		r.batch.Add(c)
	}
	r.Send(&r.batch)
}

// message makes a command with n bytes of data.
func (r *rig) message(op uint8, to view.PartitionID, seq uint64, n int) *peers.Command {
	c := &peers.Command{To: to, Sink: r.sink, Tag: uint32(seq)}
	c.SQE.SetOpcode(op)
	k := c.SQE.KVReplica()
	k.SetEpoch(1)
	k.SetLenBytes(uint32(n))
	switch op {
	case nvme.CmdKVForward:
		k.SetSequence(seq)
		k.SetKeyLen(1)
	case nvme.CmdKVShip:
		k.SetKey([]byte("k"))
	case nvme.CmdKVFetch:
		k.SetBits(48)
	}
	if n > 0 {
		c.Data = bytes.Repeat([]byte{byte(seq)}, n)
	}
	return c
}

func (r *rig) forward(to view.PartitionID, seq uint64, n int) *peers.Command {
	return r.message(nvme.CmdKVForward, to, seq, n)
}

// forwards is how many places of a queue Forwards may have.
func forwards(depth int) int { return depth - depth/4 }

// eventually polls for what cannot be waited for otherwise.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	late := time.After(wait)
	for !ok() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("not within %s: %s", wait, what)
		}
	}
}

func contains(err error, what string) bool { return strings.Contains(err.Error(), what) }
