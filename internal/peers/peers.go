// Package peers has the connections of a cluster's node to the other nodes, as their NVMe-oF host: what the replicas of
// a chain send each other are commands (docs/wire-extensions.md, replication). A node with several partitions is
// connected to itself as well.
//
//	Send ─ mailbox ─> queues ─────> client.QPair ···> node      Forward, Durable, Sync
//	                  queue ──────> client.QPair ···> node      Ship
//	                  queue ──────> client.QPair ···> node      Compare, Fetch
//	                    │              │
//	                    │    goroutine that waits for completions
//	Sink.PeerDone <─────┴──────────────┘
//
// Each node has one association with three kinds of I/O queues. A Forward may stay unanswered until its write is
// committed. What else there is must not wait behind it: a Ship is answered by a node that waits for nobody, and a
// filling member must not hold up writes. So there is no cycle of nodes that wait for each other's queues.
//
// For the same reason Forwards that are kept must not take all places of their queue. Each range may keep at least one,
// of those that this node sends to the other. So there are as many queues for writes as their number calls for, up to
// eight, and a Forward asks for no more to be kept than its range's share of the half of its queue.
//
// A queue is a machine that is driven by whoever has something for it (turn.Driver): the goroutine that sends a command
// also puts it on the wire. No goroutine is blocked for a command.
//
// A goroutine for each node connects, finds the partitions of the node by the UUIDs of its namespaces, and looks after
// the connection.
//
// # Losses
//
// When a connection ends, all of its commands end with Lost at once. The client package otherwise repeats a write only
// behind a fence, when nothing can be left of its first copy (client.Controller). Here that is not needed: a command
// carries the epoch of its chain, and a Forward its place in the order of writes, its version and identity, so that
// one that arrives late, or twice, does nothing (docs/decisions/0013, 0015). So there is no wait before the next
// connection, either.
package peers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/turn"
	"jbofd/internal/uuid"
)

// Command is a command to a partition of another node. From Send until Sink.PeerDone it belongs to Peers. It is used
// again and again; a Command must not be copied after its first Send.
type Command struct {
	// To is the partition, in the view of the last SetView before Send.
	To view.PartitionID
	// SQE lacks NSID, CID, PSDT and SGL.
	SQE nvme.SQE
	// Data is transferred in the direction of the opcode; may be nil.
	Data []byte
	// Sink gets the Command back when it has ended. Tag is for the Sink.
	Sink Sink
	Tag  uint32

	// Outcome. Lost: it was not sent, or its connection has ended; the node may have carried it out, or do so still.
	// Nothing else is set then. Connected of Config follows when it can be sent again.
	Lost   bool
	Status nvme.Status
	// Result is DW0 and DW1 of the completion.
	Result uint64
	// Received is how many bytes of Data have come. RDMA does not count them: with Success, it is all of Data.
	Received int
	// Next is for lists of the Sink after PeerDone.
	Next *Command

	link   turn.Node[Command]
	target *target
	next   *Command // in a fifo of the queue
}

// Sink takes commands back.
type Sink interface {
	// PeerDone ends a command. The goroutine that drives the connection calls it, with a lock, or one that sends: it
	// only puts the command into a list. It returns whether Kick must be called when the lock is released.
	PeerDone(c *Command) (kick bool)
	// Kick follows calls of PeerDone of which one asked for it. It may take locks and send commands.
	Kick()
}

// Node is a node of the cluster.
type Node struct {
	// Name is that of the node in views.
	Name string
	// Address is that of client.Options: tcp://host:port, rdma://host:port.
	Address string
	// SubNQN is the subsystem of that node to which the nodes of the cluster may connect as hosts.
	SubNQN string
}

// Config describes Peers. The zero value of every field but Name, HostNQN and Nodes stands for a default.
type Config struct {
	// Name is that of this node in views.
	Name string
	// HostNQN is the one under which the other nodes know this node.
	HostNQN string
	// Nodes are the others, and this one: its partitions talk with each other over a connection as well. If this one is
	// missing they do not.
	Nodes []Node
	// LocalAddress is the address of this machine that TCP connections come from; the zero Addr: any.
	LocalAddress netip.Addr
	// LocalRDMA is the same for RDMA: that of a device.
	LocalRDMA netip.Addr
	// Connected is called each time that partitions of a node can be reached which could not before: the node was
	// connected, or has more partitions. What was outstanding has then ended. Connected and Disconnected are called one
	// at a time for a node, in the order of what they tell. They may send commands and call Redial, but not Close,
	// SetNodes or SetView.
	Connected func(node string)
	// Disconnected is called when the connection to a node has ended, and when there was none and it could not be made.
	// As Connected. SetView and SetNodes call it, too.
	Disconnected func(node string, l Loss)

	// QueueDepth is how many commands may be outstanding in each of a node's queues, 1 to 1024; the node may allow
	// fewer. More wait in order, and Forwards already when they have three quarters. Default 128.
	QueueDepth int
	// Timeout: a connection is closed if a command other than a Forward gets no answer for Timeout, or if a full queue
	// gets no completion for Timeout. That is checked four times per Timeout, so that it may be a quarter later. For a
	// Ship, Compare or Fetch it is eight times as long, because these may wait for a drive, until the node answers them
	// without data. It also bounds each attempt to connect. Default 5 s.
	Timeout time.Duration
	// KATO is the keep-alive timeout: the connection to a node that answers nothing is closed within 1.5 times as long.
	// Default 2 s.
	KATO time.Duration
	// MinPause and MaxPause bound the pause between attempts to connect: it doubles each time, and is shortened by up
	// to a half at random. Defaults 100 ms and 2 s.
	MinPause, MaxPause time.Duration
	// Hold is for how long no connection to a node is made after three in a row have ended, each within half a minute,
	// because a command that waits for no drive got no answer. It doubles with each further one, up to ten minutes, and
	// ends when a view admits another process of the node. Default 30 s.
	Hold time.Duration
	// RDMA gives access to RDMA devices, and BounceBytes bounds the registered memory for each node, through which the
	// data of its commands is moved (client.Options). All Forwards that may be unanswered must find room there.
	RDMA        verbs.Provider
	BounceBytes int64
	// Log: nil: none.
	Log *slog.Logger
}

// Peers are the connections to all other nodes. All methods may be called from any goroutine.
type Peers struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	// closing is for Close.
	closing sync.Once
	// routes has the partitions of the present view, by number; nil for those of nodes that are not in Config.Nodes,
	// and for the only one of this node.
	routes atomic.Pointer[[]*target]

	// setting is for one SetNodes or SetView at a time, with their calls of Disconnected: a later one may connect to a
	// node that is called disconnected here.
	setting sync.Mutex

	mu    sync.Mutex
	nodes map[string]*node
	// view is that of the last SetView; nil: none.
	view *cluster.Map
	// unknown has the nodes of views that are not in the configuration; each is logged once.
	unknown map[string]bool
	closed  bool
}

// target is a partition of another node, to which commands go.
type target struct {
	node *node
	id   uuid.UUID
	// nsid is its namespace in the present connection; 0: not known. The node's goroutine and SetView set it; whoever
	// finds that it does not exist clears it.
	nsid atomic.Uint32
	// ships and fills are its shares of the queues for these, each owned by the owner of the queue.
	ships, fills held
}

// New returns Peers without a view: nothing is connected before SetView. Close must be called.
//
// Errors: ErrInvalid naming the field.
func New(cfg Config) (*Peers, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	p := &Peers{cfg: cfg, unknown: map[string]bool{}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.routes.Store(&[]*target{})
	if err := p.SetNodes(cfg.Nodes); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// SetNodes changes which nodes the others are. The connections of those that are not among them any more, or have
// another address or subsystem, end like lost ones. Disconnected has been called for them when it returns, if the view
// has them. After Close it does nothing.
//
// Errors: ErrInvalid naming the field; and what a new node needs of the machine. Nothing has changed then.
func (p *Peers) SetNodes(nodes []Node) error {
	if err := p.CheckNodes(nodes); err != nil {
		return err
	}
	p.setting.Lock()
	defer p.setting.Unlock()
	c, err := p.setNodes(nodes)
	for _, n := range c.ended {
		n.retire()
	}
	for _, name := range c.lost {
		p.cfg.Disconnected(name, Loss{})
	}
	for _, n := range c.added {
		go n.run() // after Disconnected, which its Connected would contradict
	}
	return err
}

// CheckNodes returns the ErrInvalid of SetNodes.
func (p *Peers) CheckNodes(nodes []Node) error { return checkNodes(nodes) }

// nodesChange is what a SetNodes has changed: the nodes that take part no more; the names of those in the view that are
// lost by that, or that the configuration does not have; and nodes to be run.
type nodesChange struct {
	ended []*node
	lost  []string
	added []*node
}

// setNodes is SetNodes without what is called and run.
func (p *Peers) setNodes(nodes []Node) (c nodesChange, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return c, nil
	}
	now := make(map[string]*node, len(nodes))
	for _, cfg := range nodes {
		n := p.nodes[cfg.Name]
		if n == nil || n.Node != cfg {
			if n, err = newNode(p, cfg); err != nil {
				for _, n := range c.added {
					n.closeQueues()
				}
				return nodesChange{}, err
			}
			c.added = append(c.added, n)
		}
		now[cfg.Name] = n
	}
	for name, n := range p.nodes {
		if now[name] == n {
			continue
		}
		c.ended = append(c.ended, n)
		if now[name] != nil && n.wanted() {
			c.lost = append(c.lost, name)
		}
	}
	p.nodes = now
	for _, n := range c.added {
		delete(p.unknown, n.Name)
		p.wg.Add(1)
	}
	if p.view != nil {
		c.lost = append(c.lost, p.setViewLocked(p.view)...)
	}
	return c, nil
}

// ErrInvalid is wrapped by the errors of New and SetNodes.
var ErrInvalid = errors.New("connections to other nodes")

// check fills in defaults.
func (c *Config) check() error {
	if err := nvme.CheckNQN(c.HostNQN); err != nil {
		return fmt.Errorf("%w: host NQN: %w", ErrInvalid, err)
	}
	if err := checkNodes(c.Nodes); err != nil {
		return err
	}
	if c.QueueDepth == 0 {
		c.QueueDepth = 128
	}
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{{&c.Timeout, 5 * time.Second}, {&c.KATO, 2 * time.Second}, {&c.MinPause, 100 * time.Millisecond},
		{&c.MaxPause, 2 * time.Second}, {&c.Hold, 30 * time.Second}} {
		if *d.v == 0 {
			*d.v = d.def
		}
		if *d.v < time.Millisecond {
			return fmt.Errorf("%w: a time is %s, want at least 1ms", ErrInvalid, *d.v)
		}
	}
	if c.MinPause > c.MaxPause {
		return fmt.Errorf("%w: MinPause is %s, want at most MaxPause, %s", ErrInvalid, c.MinPause, c.MaxPause)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Connected == nil {
		c.Connected = func(string) {}
	}
	if c.Disconnected == nil {
		c.Disconnected = func(string, Loss) {}
	}
	return nil
}

// checkNodes finds what is wrong with nodes.
func checkNodes(nodes []Node) error {
	names := map[string]bool{}
	for _, n := range nodes {
		if names[n.Name] || n.Name == "" {
			return fmt.Errorf("%w: name of a node is %q, want one that no other node has", ErrInvalid, n.Name)
		}
		names[n.Name] = true
		if err := nvme.CheckNQN(n.SubNQN); err != nil {
			return fmt.Errorf("%w: subsystem of node %s: %w", ErrInvalid, n.Name, err)
		}
		if n.Address == "" {
			return fmt.Errorf("%w: address of node %s is empty", ErrInvalid, n.Name)
		}
	}
	return nil
}

// SetView says which partitions there are and where. Nodes that have none are disconnected. Commands that were sent
// before go to where their partition was. Disconnected is called for nodes that the configuration does not have.
func (p *Peers) SetView(m *cluster.Map) {
	p.setting.Lock()
	defer p.setting.Unlock()
	for _, name := range p.setView(m) {
		p.cfg.Disconnected(name, Loss{})
	}
}

// setView is SetView, and returns the nodes that the configuration does not have.
func (p *Peers) setView(m *cluster.Map) (unknown []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.setViewLocked(m)
}

// setViewLocked is setView. For each node it finds the partitions, which may be none, and the ranges whose Forwards
// this node sends there: those in which it is the Predecessor. The caller holds mu.
func (p *Peers) setViewLocked(m *cluster.Map) (unknown []string) {
	p.view = m
	routes := make([]*target, len(m.Partitions))
	targets := map[*node]map[uuid.UUID]*target{}
	own := 0
	for i := range m.Partitions {
		if part := &m.Partitions[i]; !part.ID.IsZero() && m.Nodes[part.Node].Name == p.cfg.Name {
			own++
		}
	}
	for i := range m.Partitions {
		part := &m.Partitions[i]
		if part.ID.IsZero() {
			continue
		}
		name := m.Nodes[part.Node].Name
		n := p.nodes[name]
		if name == p.cfg.Name && own < 2 {
			continue // it does not talk with itself
		}
		if n == nil {
			if name == p.cfg.Name {
				continue
			}
			unknown = append(unknown, name)
			if !p.unknown[name] {
				p.unknown[name] = true
				p.cfg.Log.Warn("the view has a node that the configuration does not have", "peer", name)
			}
			continue
		}
		if targets[n] == nil {
			targets[n] = map[uuid.UUID]*target{}
		}
		routes[i] = n.target(part.ID)
		targets[n][part.ID] = routes[i]
	}
	ranges := map[*node][]uint16{}
	for r, c := range m.Chains {
		for i := 1; i < len(c) && c[i].State != view.Waiting; i++ {
			to := routes[c[i].Partition]
			if to != nil && m.Nodes[m.Partitions[c[i-1].Partition].Node].Name == p.cfg.Name {
				ranges[to.node] = append(ranges[to.node], uint16(r))
			}
		}
	}
	admitted := map[*node]cluster.Incarnation{}
	for i, process := range m.Admitted {
		if i < len(m.Nodes) && p.nodes[m.Nodes[i].Name] != nil {
			admitted[p.nodes[m.Nodes[i].Name]] = process
		}
	}
	for _, n := range p.nodes {
		n.setTargets(targets[n], ranges[n], admitted[n])
	}
	p.routes.Store(&routes)
	return unknown
}

// Redial connects at once to all nodes to which there is no connection: they may be reached again. SetView does the
// same for those of the view.
func (p *Peers) Redial() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, n := range p.nodes {
		n.redial()
	}
}

// Batch collects commands. The zero Batch is empty. One goroutine at a time uses it.
type Batch struct {
	chain turn.Chain[Command]
	// Of Send: queues to run, and Sinks to kick.
	queues []*queue
	kicks  []Sink
}

// Add adds a command.
//
// hot: 0 allocs
func (b *Batch) Add(c *Command) {
	c.link.Item = c
	b.chain.Add(&c.link)
}

// Empty reports whether there are no commands.
func (b *Batch) Empty() bool { return b.chain.Empty() }

// Send sends the commands of a batch and empties it. Commands of one opcode to one range of a partition are sent in the
// order of Send; nothing is said of others. It may call PeerDone and Kick of the commands' Sinks, and
// of others, before it returns: it must be called without a lock that these take, and not by PeerDone. After Close all
// commands are Lost.
//
// Cost: a system call for each queue, unless another goroutine is sending on it; 0 allocs.
func (p *Peers) Send(b *Batch) { // hot: 0 allocs
	routes := *p.routes.Load()
	for n := b.chain.Take(); n != nil; {
		c := n.Item
		n = n.Detach()
		c.Lost, c.Status, c.Result, c.Received = false, 0, 0, 0
		if int(c.To) >= len(routes) || routes[c.To] == nil {
			c.Lost = true
			if sink := c.Sink; sink.PeerDone(c) {
				b.kicks = append(b.kicks, sink)
			}
			continue
		}
		c.target = routes[c.To]
		if q := c.target.node.queueFor(&c.SQE); q.mail.Push(&c.link) {
			b.queues = append(b.queues, q)
		}
	}
	for i, q := range b.queues {
		b.queues[i] = nil
		q.driver.Run()
	}
	b.queues = b.queues[:0]
	for i, k := range b.kicks {
		b.kicks[i] = nil
		k.Kick()
	}
	b.kicks = b.kicks[:0]
}

// Close ends all connections and waits for the goroutines, for about as long as Connected takes. Outstanding commands
// are Lost. Idempotent.
func (p *Peers) Close() {
	p.closing.Do(func() {
		p.mu.Lock()
		p.closed = true
		p.mu.Unlock()
		p.cancel()
		p.wg.Wait()
	})
}
