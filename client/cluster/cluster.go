// Package cluster is a host for the keys and values of a cluster of jbofd nodes: it knows which node has which key, and
// hides that nodes come and go.
//
//	Open(addresses) ──> Store ──── Get, Put, PutIfVersion, Delete, ... with contexts, from any goroutine
//	                      │  └──── OpenQueue: batches of operations in, results out, for one goroutine
//	                      ├── map: which members serve each range, from ChainHead to ChainTail   (log page C1h)
//	                      └── node, one for each of the map: client.Controller, its partitions as namespaces
//
// A write goes to the ChainHead of its key's range, a read to the member that has most of its credit left. If a member
// is lost, or has another view, the Store reads the map from other nodes and goes on. Writes have identities, so that
// each is carried out once, also if its ChainHead is lost and the next one has to be asked for the outcome.
//
// The map, and what statuses mean, is in docs/wire-extensions.md.
package cluster

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/client"
	"jbofd/internal/flowctl"
)

// ErrUnavailable: the operation was not carried out, because no member of the key's range could do so in time. Errors
// of an operation whose outcome is unknown are client.ErrIndeterminate instead. ErrKeyNotFound and the other errors of
// package kv are answers.
var ErrUnavailable = errors.New("not available")

// ReadFrom says which members of a chain are asked for reads.
type ReadFrom uint8

// Values of ReadFrom.
const (
	// ReadAny asks the member with the greatest part of its credit left, or fewest operations of this Store if there
	// are no credits. If it does not answer, the others are asked.
	ReadAny ReadFrom = iota
	// ReadTail asks the ChainTail only.
	ReadTail
	// ReadInTurn asks all members in turn, whatever their credit.
	ReadInTurn
)

// Options configure a Store. The zero value of each field but Addresses and SubNQN stands for a default.
type Options struct {
	// Addresses are those of some nodes, as client.Options has them. The others are in the map.
	Addresses []string
	// SubNQN is the NQN of the cluster's subsystem.
	SubNQN string
	// Connection has the options of connections to nodes. Address and SubNQN, and MaxRetries, are the Store's. Other
	// defaults than those of client.Connect: KATO 2 s, ReconnectDelay 100 ms, ConnectTimeout 3 s, and 10 s over RDMA,
	// where a busy machine needs more for the queues of an association.
	Connection client.Options
	// ReadFrom says which members are asked for reads.
	ReadFrom ReadFrom
	// Hedge, if positive, is how long a read waits for an answer before a second member is asked as well: the first
	// answer counts.
	Hedge time.Duration
	// ReadTimeout is how long a member may take to answer a read before another one is asked instead. Default 500 ms.
	ReadTimeout time.Duration
	// Timeout bounds operations, those whose context has a deadline as well. Default 10 s.
	Timeout time.Duration
	// MaxTries bounds how often an operation is tried. Between two tries is a pause that grows up to 100 ms. Default
	// 200.
	MaxTries int
	// MapInterval is how often the map is read if nothing calls for it. Default 5 s.
	MapInterval time.Duration
	// KeepFor is for how long after its first try a write is repeated: see kv.Options. Default 2 min.
	KeepFor time.Duration
}

// Bounds of Options.KeepFor. keepMargin is how much longer than that nodes keep an identity.
const (
	minKeepFor     = time.Second
	maxKeepFor     = 59 * time.Minute
	defaultKeepFor = 2 * time.Minute
	keepMargin     = time.Minute
)

func (o Options) withDefaults() (Options, error) {
	if len(o.Addresses) == 0 {
		return o, fmt.Errorf("%w: Addresses is empty, must have the address of a node", client.ErrInvalid)
	}
	for _, f := range []struct {
		name string
		v    *time.Duration
		def  time.Duration
	}{
		{"ReadTimeout", &o.ReadTimeout, 500 * time.Millisecond}, {"Timeout", &o.Timeout, 10 * time.Second},
		{"MapInterval", &o.MapInterval, 5 * time.Second}, {"KeepFor", &o.KeepFor, defaultKeepFor},
		{"Connection.KATO", &o.Connection.KATO, 2 * time.Second},
		{"Connection.ReconnectDelay", &o.Connection.ReconnectDelay, 100 * time.Millisecond},
	} {
		if *f.v == 0 {
			*f.v = f.def
		}
		if *f.v < 0 && f.name != "Connection.KATO" {
			return o, fmt.Errorf("%w: %s is %s, must be positive", client.ErrInvalid, f.name, *f.v)
		}
	}
	if o.Connection.ConnectTimeout < 0 {
		return o, fmt.Errorf("%w: Connection.ConnectTimeout is %s, must not be negative", client.ErrInvalid,
			o.Connection.ConnectTimeout)
	}
	if o.KeepFor < minKeepFor || o.KeepFor > maxKeepFor {
		return o, fmt.Errorf("%w: KeepFor is %s, must be %s to %s", client.ErrInvalid, o.KeepFor, minKeepFor,
			maxKeepFor)
	}
	if o.MaxTries == 0 {
		o.MaxTries = 200
	}
	if o.MaxTries < 0 || o.ReadFrom > ReadInTurn {
		return o, fmt.Errorf("%w: MaxTries is %d, ReadFrom %d", client.ErrInvalid, o.MaxTries, o.ReadFrom)
	}
	// The Store decides what is repeated, and where, and what waits for credits.
	o.Connection.MaxRetries, o.Connection.ReportCredits = -1, true
	o.Connection.Queues = max(o.Connection.Queues, 1)
	return o, nil
}

// connection is how an address is connected to.
func (o *Options) connection(address string) client.Options {
	c := o.Connection
	c.Address = address
	if c.ConnectTimeout == 0 {
		c.ConnectTimeout = 3 * time.Second
		if strings.HasPrefix(address, "rdma://") || c.Transport == client.RDMA {
			c.ConnectTimeout = 10 * time.Second
		}
	}
	return c
}

// flow is how requests are scheduled.
func (o *Options) flow() (c flowctl.Config) {
	c.NoTokens = o.Connection.Credits == client.CreditsOff
	if o.ReadFrom == ReadInTurn {
		c.Choice = flowctl.InTurn
	}
	return c
}

// Store is the keys and values of a cluster: values under keys of 1 to 16 bytes. Any goroutine may call its methods.
// OpQueue is for a goroutine that keeps many operations outstanding.
//
// An operation is atomic, and durable on all members of its chain when it has returned. Operations of a key are
// linearizable.
//
// Errors of all methods: ErrUnavailable if nothing was done in time; client.ErrIndeterminate if the outcome of a write
// is unknown; those of package kv; other *client.StatusErrors; client.ErrInvalid, ErrClosed, ErrUnsupported,
// ErrProtocol. Errors that come from the end of a context are the context's besides.
type Store struct {
	// Tenant is tenant 0, of weight 1.
	Tenant
	o    Options
	base time.Time // origin of the clock
	// identity names the writes of this Store.
	identity uint64
	queues   atomic.Uint64 // counts OpQueues
	current  atomic.Pointer[clusterMap]
	stats    counters
	engine   *engine

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	// want, of capacity 1, asks for a newer map.
	want chan struct{}

	mu sync.Mutex
	// nodes are those of the map, by name and address.
	nodes  map[nodeKey]*node
	closed bool
}

// Stats counts what a Store has done.
type Stats struct {
	// Epoch is that of the map, Maps is how many there were.
	Epoch, Maps uint64
	// Tries is how many commands were sent for operations, Retries those of them that were sent after another one,
	// WrongViews those that a node has answered so. Hedged is how many reads have asked a second member.
	Tries, Retries, WrongViews, Hedged uint64
	// Unavailable and Indeterminate are how many operations have ended so.
	Unavailable, Indeterminate uint64
	// Waits is how many commands had to wait for tokens, or for a place in a queue, Waiting how many do now.
	Waits   uint64
	Waiting int
}

type counters struct {
	maps, tries, retries, wrongViews, hedged, unavailable, indeterminate atomic.Uint64
}

// Stats returns the counts since Open.
func (s *Store) Stats() Stats {
	c := &s.stats
	s.engine.mu.Lock()
	waiting, waits := s.engine.flow.Waiting()
	s.engine.mu.Unlock()
	return Stats{Waiting: waiting, Waits: waits, Epoch: s.current.Load().epoch, Maps: c.maps.Load(),
		Tries: c.tries.Load(), Retries: c.retries.Load(), WrongViews: c.wrongViews.Load(), Hedged: c.hedged.Load(),
		Unavailable: c.unavailable.Load(), Indeterminate: c.indeterminate.Load()}
}

// Open connects to a cluster: it reads the map from whichever node of Addresses answers first. An attempt that takes
// too long is repeated for Options.Timeout. Close must be called.
//
// Errors: client.ErrInvalid for bad Options; what the nodes have answered or why they could not be reached;
// client.ErrUnsupported if they have no map.
func Open(ctx context.Context, o Options) (*Store, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	s := &Store{o: o, base: time.Now(), identity: newIdentity(), want: make(chan struct{}, 1),
		nodes: map[nodeKey]*node{}}
	s.Tenant.s = s
	s.engine = newEngine(s, o.flow())
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if err := s.bootstrap(ctx); err != nil {
		s.cancel()
		return nil, fmt.Errorf("cluster %s: %w", o.SubNQN, err)
	}
	s.wg.Go(s.refresh)
	s.wg.Go(func() { s.engine.watch(s.ctx) })
	return s, nil
}

// newIdentity returns a number that no other Store has.
func newIdentity() uint64 {
	var b [8]byte
	// crypto/rand.Read never fails; it ends the program instead.
	_, _ = rand.Read(b[:])
	return max(binary.LittleEndian.Uint64(b[:]), 1) // 0 is none
}

func (s *Store) now() time.Duration { return time.Since(s.base) }

// Close ends the connections to all nodes. Operations that are under way end with client.ErrClosed. Idempotent.
func (s *Store) Close() error {
	s.cancel()
	s.mu.Lock()
	s.closed = true
	nodes := make([]*node, 0, len(s.nodes))
	for _, n := range s.nodes {
		nodes = append(nodes, n)
	}
	s.mu.Unlock()
	s.engine.closeAll()
	var ending sync.WaitGroup
	errs := make([]error, len(nodes))
	for i, n := range nodes {
		ending.Go(func() { errs[i] = n.close() })
	}
	ending.Wait()
	s.wg.Wait()
	s.engine.timer.Stop()
	return errors.Join(errs...)
}

// MaxValue is the longest value of the namespaces that are connected, 0 if none is.
func (s *Store) MaxValue() (longest int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.nodes {
		if v := n.maxValue(); v > 0 && (longest == 0 || v < longest) {
			longest = v
		}
	}
	return longest
}

// Name describes the store: its subsystem and the addresses of its nodes.
func (s *Store) Name() string {
	return fmt.Sprintf("cluster %s at %s", s.o.SubNQN, strings.Join(s.o.Addresses, ","))
}
