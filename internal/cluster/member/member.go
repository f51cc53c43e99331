// Package member runs the membership of a node: it drives internal/cluster's machine with a clock, a client of etcd and
// the connections to the other nodes, and tells the rest of the node what it may serve.
//
//	etcd.Client ── responses, changes ──┐                  ┌──> State, Authority: read by any goroutine
//	link.Link ──── messages ────────────┼──> one goroutine ┼──> requests, watches ──> etcd.Client
//	SetReport ──── what the node has ───┤    cluster.Node  ├──> messages ───────────> link.Link
//	timer ──────────────────────────────┘                  └──> the newest epoch ───> state directory
//
// The data path reads two atomic values and waits for nothing here.
package member

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/etcd"
	"jbofd/internal/cluster/link"
	"jbofd/internal/cluster/view"
)

// Config describes a Member.
type Config struct {
	// Node describes the node. Its Address is the one in Link.Nodes; Incarnation and Seen come from Dir.
	Node cluster.Config
	// Dir is the state directory, which no two nodes share. It is made.
	Dir string
	// Etcd says where etcd is. Its Timeout is 0 for twice the lease, but two seconds or more.
	Etcd etcd.Config
	// Link has the nodes of the cluster. Its Cluster, Name, Timeout and Receive are set here.
	Link link.Config
	// Changed is told of each new State, and each extension of the authority, before other nodes hear of it: what the
	// node does not serve any more must be stopped when it returns. Nil: nothing. Called by the Member's goroutine.
	Changed func(s *State)
	Log     *slog.Logger
}

// State is what a node may serve, if it has authority, and why not. It is never changed.
type State struct {
	// Newest is the newest view that the node has seen, Active the one that it acts on; nil: none.
	Newest, Active *cluster.Map
	// Manager is the name of the manager, empty if none is known, and ManagerAddress its address. Manages: it is this
	// node.
	Manager, ManagerAddress string
	Manages                 bool
	// Settings are the newest that the node has read, nil: none.
	Settings *cluster.Settings
	// Problem is that of cluster.Node.
	Problem error
}

// Serves is cluster.Node's.
func (s *State) Serves(p view.PartitionID, r int) bool {
	return cluster.Serves(s.Active, s.Newest, p, r)
}

// Member is the membership of this process.
type Member struct {
	cfg   Config
	dir   *stateDir
	etcd  *etcd.Client
	link  *link.Link
	state atomic.Pointer[State]
	// until is the authority, 0 after Close.
	until atomic.Int64
	ready atomic.Bool
	// connected is what SetConnected has said last; linked has a value if it is new.
	connected atomic.Uint64
	linked    chan struct{}
	// sign is cluster.Node's LastSign.
	sign atomic.Int64

	calls    chan func(now int64, out *cluster.Actions)
	messages chan *cluster.Message
	// mu guards report, what SetReport has brought last; reported has a value if it is new.
	mu       sync.Mutex
	report   cluster.Holdings
	reported chan struct{}

	closing chan struct{}
	close   sync.Once
	done    sync.WaitGroup
	// ended is closed when the goroutine has ended.
	ended chan struct{}
	// epoch is the newest epoch, which is to be saved; grown has a value if it has grown.
	epoch atomic.Uint64
	grown chan struct{}

	// What follows is the goroutine's.
	node  *cluster.Node
	timer *time.Timer
}

// maxMessages is how many messages wait for the goroutine before their connections do.
const maxMessages = 256

// Start begins the membership. It waits for the state directory only.
//
// Errors: ErrInUse; a configuration that cannot be, an address that is taken, a state that cannot be read or written.
func Start(cfg Config) (*Member, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	lease := time.Duration(cfg.Node.LeaseNS)
	if lease == 0 {
		lease = cluster.DefaultLease
	}
	if cfg.Etcd.Timeout == 0 {
		cfg.Etcd.Timeout = max(2*lease, 2*time.Second)
	}
	if cfg.Etcd.Log == nil {
		cfg.Etcd.Log = cfg.Log
	}
	m := &Member{calls: make(chan func(int64, *cluster.Actions)), messages: make(chan *cluster.Message, maxMessages),
		reported: make(chan struct{}, 1), linked: make(chan struct{}, 1),
		closing: make(chan struct{}), ended: make(chan struct{}),
		grown: make(chan struct{}, 1)}
	if err := m.start(cfg, lease); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

func (m *Member) start(cfg Config, lease time.Duration) (err error) {
	if m.dir, err = openState(cfg.Dir); err != nil {
		return err
	}
	cfg.Node.Incarnation, cfg.Node.Seen = m.dir.incarnation(), m.dir.seen
	cfg.Node.Address = cfg.Link.Nodes[cfg.Node.Name]
	if m.etcd, err = etcd.New(cfg.Etcd); err != nil {
		return err
	}
	m.cfg, m.node = cfg, cluster.New(cfg.Node)
	m.state.Store(&State{Problem: m.node.Problem()})
	m.epoch.Store(uint64(m.dir.seen))
	cfg.Link.Cluster, cfg.Link.Name, cfg.Link.Timeout = cfg.Etcd.Cluster, cfg.Node.Name, lease
	if cfg.Link.Log == nil {
		cfg.Link.Log = cfg.Log
	}
	cfg.Link.Receive = func(msg *cluster.Message) {
		select {
		case m.messages <- msg:
		case <-m.closing:
		}
	}
	if m.link, err = link.Start(cfg.Link); err != nil {
		return err
	}
	m.timer = time.NewTimer(0)
	m.done.Add(2)
	go m.run()
	go m.save()
	return nil
}

// SetNodes changes the other nodes that may take part, with their addresses: see link.Link.SetNodes.
func (m *Member) SetNodes(nodes map[string]string) error { return m.link.SetNodes(nodes) }

// CheckNodes returns the error that SetNodes would return.
func (m *Member) CheckNodes(nodes map[string]string) error { return m.link.CheckNodes(nodes) }

// Refusals is link.Link's.
func (m *Member) Refusals() map[string]string { return m.link.Refusals() }

// Close ends the membership: the authority first, then the goroutine, the connections, and the lock of the state
// directory. Idempotent.
func (m *Member) Close() {
	m.close.Do(func() {
		close(m.closing)
		m.done.Wait()
		if m.link != nil {
			m.link.Close()
		}
		if m.etcd != nil {
			m.etcd.Close()
		}
		if m.dir != nil {
			m.dir.close()
		}
	})
}

// State is the present state.
func (m *Member) State() *State { return m.state.Load() }

// Authority is until when the node may serve what State().Serves allows, by Now. Look at it after a value was fetched
// and before it is sent.
func (m *Member) Authority() int64 { return m.until.Load() }

// LastSign is when etcd has told last that there is a manager, by Now; 0: never.
func (m *Member) LastSign() int64 { return m.sign.Load() }

// EtcdFailing returns why etcd has not answered the last request, and since when it has answered none; nil: it has.
func (m *Member) EtcdFailing() (since time.Time, err error) { return m.etcd.Failing() }

// Incarnation is that of this process.
func (m *Member) Incarnation() cluster.Incarnation { return m.cfg.Node.Incarnation }

// SetReport is cluster.Node's. It does not wait.
func (m *Member) SetReport(has cluster.Holdings) {
	m.mu.Lock()
	m.report = has
	m.mu.Unlock()
	signal(m.reported)
}

// SetConnected is cluster.Node's. It does not wait.
func (m *Member) SetConnected(epoch view.Epoch) {
	if m.connected.Swap(uint64(epoch)) != uint64(epoch) {
		signal(m.linked)
	}
}

// Ready is cluster.Node's.
func (m *Member) Ready() bool { return m.ready.Load() }

// signal gives a channel a value unless it has one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// call has the goroutine make a call of the machine.
func (m *Member) call(f func(now int64, out *cluster.Actions)) {
	select {
	case m.calls <- f:
	case <-m.closing:
	}
}

// run is the goroutine.
func (m *Member) run() {
	defer m.done.Done()
	defer close(m.ended)
	defer m.until.Store(0)
	defer m.timer.Stop()
	for {
		call := m.node.Wake
		select {
		case <-m.closing:
			return
		case <-m.timer.C:
		case call = <-m.calls:
		case msg := <-m.messages:
			call = func(now int64, out *cluster.Actions) { m.node.Receive(now, msg, out) }
		case <-m.linked:
			call = func(now int64, out *cluster.Actions) {
				m.node.SetConnected(now, view.Epoch(m.connected.Load()), out)
			}
		case <-m.reported:
			m.mu.Lock()
			r := m.report
			m.mu.Unlock()
			call = func(now int64, out *cluster.Actions) { m.node.SetReport(now, r, out) }
		}
		var out cluster.Actions
		call(Now(), &out)
		m.carryOut(&out)
	}
}

func (m *Member) carryOut(out *cluster.Actions) {
	m.publish(out)
	if out.Watch != nil {
		m.etcd.Watch(*out.Watch, func(id uint64, events []cluster.KeyValue, ended bool) {
			m.call(func(now int64, out *cluster.Actions) { m.node.Watched(now, id, events, ended, out) })
		})
	}
	for i := range out.Requests {
		m.etcd.Do(&out.Requests[i], func(r *cluster.Response) {
			m.call(func(now int64, out *cluster.Actions) { m.node.Answered(now, r, out) })
		})
	}
	for i := range out.Sends {
		m.link.Send(out.Sends[i].To, &out.Sends[i].Message)
	}
	m.timer.Reset(time.Duration(max(out.WakeNS-Now(), 0)))
}

// publish makes the machine's state what others see.
func (m *Member) publish(out *cluster.Actions) {
	last := m.state.Load()
	s := &State{Newest: m.node.Newest(), Active: m.node.Active(), Manager: m.node.Manager().Name,
		ManagerAddress: m.node.Manager().Address, Manages: m.node.Manages(),
		Settings: m.node.Settings(), Problem: m.node.Problem()}
	if s.Newest != last.Newest || s.Active != last.Active || s.Manager != last.Manager ||
		s.ManagerAddress != last.ManagerAddress || s.Manages != last.Manages ||
		s.Settings != last.Settings || out.Problem {
		m.state.Store(s)
	} else {
		s = last
	}
	m.until.Store(m.node.Authority())
	m.ready.Store(m.node.Ready())
	m.sign.Store(m.node.LastSign())
	if s.Newest != nil && uint64(s.Newest.Epoch) > m.epoch.Load() {
		m.epoch.Store(uint64(s.Newest.Epoch))
		signal(m.grown)
	}
	if out.Changed && m.cfg.Changed != nil {
		m.cfg.Changed(s)
	}
	switch {
	case out.Problem && s.Problem != nil:
		m.cfg.Log.Warn("the membership has a problem", "cluster", m.cfg.Etcd.Cluster, "error", s.Problem)
	case out.Problem:
		m.cfg.Log.Info("the membership has no problem any more", "cluster", m.cfg.Etcd.Cluster)
	}
	if s.Manages != last.Manages {
		m.cfg.Log.Info("the manager of the cluster has changed", "this_node", s.Manages)
	}
}

// save writes the newest epoch to the state directory. If the process is killed before the write, the next process
// knows an older epoch than this one has seen, and may not notice that etcd was set back to just before that.
func (m *Member) save() {
	defer m.done.Done()
	for closing := false; !closing; {
		select {
		case <-m.grown:
		case <-m.ended: // the last epoch is known
			closing = true
		}
		if seen := view.Epoch(m.epoch.Load()); seen > m.dir.seen {
			if err := m.dir.setSeen(seen); err != nil {
				m.cfg.Log.Error("the newest epoch cannot be saved", "error", err)
			}
		}
	}
}
