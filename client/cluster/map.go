package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"sync"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/uuid"
)

// clusterMap is a map that was read. It is never changed.
type clusterMap struct {
	cluster uuid.UUID
	epoch   uint64
	seed    uint64
	shift   uint8
	chains  []chain
	nodes   map[nodeKey]bool
}

// chain is the members of a range that serve, from ChainHead to ChainTail.
type chain struct {
	epoch   uint32
	members []*member
}

// chainOf returns the chain of a position.
func (m *clusterMap) chainOf(position uint64) *chain { return &m.chains[position>>m.shift] } // hot: 0 allocs

// has reports whether a member serves the range of a position; head: whether it is the ChainHead.
func (m *clusterMap) has(position uint64, x *member) (serves, head bool) {
	for i, o := range m.chainOf(position).members {
		if o == x {
			return true, i == 0
		}
	}
	return false, false
}

// mapPart is how much of a map is read at once.
const mapPart = 128 << 10

// mapTimeout bounds the reading of a map from one node.
const mapTimeout = 3 * time.Second

// readMap reads the map that a node has, if it is newer than an epoch; otherwise it returns nil.
//
// Errors: client.ErrUnsupported if it has none; client.ErrProtocol; those of the connection.
func readMap(ctx context.Context, c *client.Controller, epoch uint64) (nvme.ClusterMap, error) {
	ctx, cancel := context.WithTimeout(ctx, mapTimeout)
	defer cancel()
	id, err := c.Identity(ctx)
	if err != nil {
		return nil, err
	}
	part := mapPart
	if id.MaxTransferBytes > 0 {
		part = min(part, id.MaxTransferBytes)
	}
	read := func(offset int, b []byte) error {
		return c.GetLogPage(ctx, client.LogPage{LID: nvme.LIDClusterMap, Offset: uint64(offset), KeepEvent: true}, b)
	}
	for {
		head := nvme.ClusterMap(make([]byte, nvme.ClusterMapHeaderBytes))
		if err := read(0, head); err != nil {
			return nil, err
		}
		if err := head.CheckHeader(); err != nil {
			return nil, fmt.Errorf("%w: %w", client.ErrProtocol, err)
		}
		if head.Epoch() <= epoch {
			return nil, nil
		}
		m := nvme.ClusterMap(make([]byte, head.LenBytes()))
		for at := 0; at < len(m); at += part {
			if err := read(at, m[at:min(at+part, len(m))]); err != nil {
				return nil, err
			}
		}
		again := nvme.ClusterMap(make([]byte, nvme.ClusterMapHeaderBytes))
		if err := read(0, again); err != nil {
			return nil, err
		}
		if again.Generation() != head.Generation() || m.CheckHeader() == nil && m.Generation() != head.Generation() {
			continue // it has changed between two parts
		}
		if err := m.Check(); err != nil {
			return nil, fmt.Errorf("%w: %w", client.ErrProtocol, err)
		}
		return m, nil
	}
}

// LedElsewhere returns of how many ranges writes go to another node than that of a partition, which is the namespace
// with that UUID of the controller's subsystem; 0: none, or it is no partition of a cluster.
//
// Errors: those of the connection; client.ErrProtocol.
func LedElsewhere(ctx context.Context, c *client.Controller, id [16]byte) (ranges int, err error) {
	m, err := readMap(ctx, c, 0)
	switch {
	case errors.Is(err, client.ErrUnsupported) || err == nil && m == nil:
		return 0, nil
	case err != nil:
		return 0, err
	}
	for i := range m.Partitions() {
		u, own := m.Partition(i)
		if u != id {
			continue
		}
		for r := range m.Ranges() {
			if m.MembersOf(r) == 0 {
				ranges++
			} else if _, head := m.Partition(int(m.Member(r, 0))); head != own {
				ranges++
			}
		}
		return ranges, nil
	}
	return 0, nil
}

// bootstrap reads the map from the addresses of the options, whichever answers first.
func (s *Store) bootstrap(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	last := s.now() + s.o.Timeout // when an attempt may begin
	type answer struct {
		m   nvme.ClusterMap
		err error
	}
	answers := make(chan answer, len(s.o.Addresses))
	var asking sync.WaitGroup
	defer asking.Wait()
	defer cancel()
	for _, address := range s.o.Addresses {
		asking.Go(func() {
			m, err := s.askSeed(ctx, address)
			for isLate(err) && ctx.Err() == nil && s.now() < last {
				m, err = s.askSeed(ctx, address)
			}
			if err != nil {
				err = fmt.Errorf("%s: %w", address, err)
			}
			answers <- answer{m, err}
		})
	}
	var errs []error
	for range s.o.Addresses {
		a := <-answers
		if a.err == nil {
			if a.err = s.adopt(a.m); a.err == nil {
				return nil
			}
		}
		errs = append(errs, a.err)
	}
	return errors.Join(errs...)
}

// isLate reports whether something has taken too long, on a busy machine perhaps.
func isLate(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, client.ErrTimeout)
}

// askSeed reads the map from an address of the options, over a connection for that.
func (s *Store) askSeed(ctx context.Context, address string) (nvme.ClusterMap, error) {
	o := s.o.connection(address)
	o.SubNQN, o.Queues, o.QPairs, o.CtrlLossTimeout = s.o.SubNQN, 1, 0, -1
	c, err := client.Connect(ctx, o)
	if err != nil {
		return nil, err
	}
	m, err := readMap(ctx, c, 0)
	return m, errors.Join(err, c.Close())
}

// adopt makes a map the current one, unless it is not newer.
//
// Errors: client.ErrProtocol if it is that of another cluster.
func (s *Store) adopt(m nvme.ClusterMap) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.current.Load()
	if old != nil && old.cluster != m.Cluster() {
		return fmt.Errorf("%w: a map of cluster %s, not %s", client.ErrProtocol, m.Cluster(), old.cluster)
	}
	if old != nil && old.epoch >= m.Epoch() || s.closed {
		return nil
	}
	next := &clusterMap{cluster: m.Cluster(), epoch: m.Epoch(), seed: m.HashSeed(),
		shift:  uint8(64 - bits.TrailingZeros(uint(m.Ranges()))),
		chains: make([]chain, m.Ranges()), nodes: map[nodeKey]bool{}}
	var nodes []*node
	for n := range m.AllNodes() {
		k := nodeKey{n.Name, n.Address, n.SubNQN}
		next.nodes[k] = true
		if s.nodes[k] == nil {
			s.nodes[k] = newNode(s, k)
		}
		nodes = append(nodes, s.nodes[k])
	}
	members := make([]*member, m.Partitions())
	all := make([]*member, 0, m.Ranges()*m.Members())
	for r := range next.chains {
		begin := len(all)
		for i := range m.MembersOf(r) {
			p := m.Member(r, i)
			if members[p] == nil {
				id, node := m.Partition(int(p))
				members[p] = nodes[node].member(id)
			}
			all = append(all, members[p])
		}
		next.chains[r] = chain{m.ChainEpoch(r), all[begin:len(all):len(all)]}
	}
	for k, n := range s.nodes {
		if !next.nodes[k] {
			delete(s.nodes, k)
			s.wg.Go(func() { _ = n.close() }) // nobody uses it any more
		}
	}
	s.current.Store(next)
	s.stats.maps.Add(1)
	s.engine.moved(next)
	return nil
}

// wantMap asks for a newer map.
func (s *Store) wantMap() {
	select {
	case s.want <- struct{}{}:
	default:
	}
}

// Pauses between two readings of the map that requests have asked for: minMapPause, doubled as long as nothing new
// comes.
const (
	minMapPause = 10 * time.Millisecond
	maxMapPause = 200 * time.Millisecond
)

// refresh reads newer maps until the Store is closed.
func (s *Store) refresh() {
	interval := time.NewTicker(s.o.MapInterval)
	defer interval.Stop()
	pause, epoch, seeds := minMapPause, s.current.Load().epoch, time.Now()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-interval.C:
		case <-s.want:
		}
		if s.askNodes() == 0 && time.Since(seeds) > time.Second {
			// None of the map is connected: it may be that all of them have other addresses now.
			_ = s.bootstrap(s.ctx) // if that fails, it is tried again
			seeds = time.Now()
		}
		if now := s.current.Load().epoch; now != epoch {
			epoch, pause = now, minMapPause
		}
		if !sleep(s.ctx, pause/2+rand.N(pause)/2) {
			return
		}
		pause = min(2*pause, maxMapPause)
		if len(s.want) == 0 {
			pause = minMapPause
		}
	}
}

// askNodes asks nodes for a newer map, each in a goroutine that does not hold up the others, and returns how many nodes
// are connected. One node may be behind, or not answer, so that several are asked.
func (s *Store) askNodes() (connected int) {
	const most = 3
	s.mu.Lock()
	var up []*node
	for _, n := range s.nodes {
		if n.connected() != nil {
			up = append(up, n)
		} else {
			n.connect()
		}
	}
	s.mu.Unlock()
	rand.Shuffle(len(up), func(i, j int) { up[i], up[j] = up[j], up[i] })
	asked := 0
	for _, n := range up {
		if asked == most {
			break
		}
		l := n.connected()
		if l == nil || n.asked.Swap(true) {
			continue
		}
		asked++
		s.wg.Go(func() {
			defer n.asked.Store(false)
			m, err := readMap(s.ctx, l.c, s.current.Load().epoch)
			if err == nil && m != nil {
				_ = s.adopt(m) // a map of another cluster counts for nothing
			}
		})
	}
	return len(up)
}

// sleep returns true after d, or false when ctx is done.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
