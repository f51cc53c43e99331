package cluster

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"jbofd/internal/admin"
	"jbofd/internal/buildtags"
)

var (
	seedFlag   = flag.Uint64("seed", 0, "seed of the random faults; 0: a new one")
	roundsFlag = flag.Int("rounds", 0, "rounds of random faults; 0: as many as fit into CI")
	opsFlag    = flag.Int("long", 0, "run clusters with random faults until clients have done so many operations")
)

const etcdServers = 3

// chaos is a cluster in a network of its own to which bad things happen.
type chaos struct {
	t      *testing.T
	rng    *rand.Rand
	net    *network
	all    boxes
	etcd   []*server
	copies int
	l      *load
	// faults counts what has happened, took is how long writes of all keys took to go on, of those rounds in which
	// nothing else was wrong.
	faults map[string]int
	took   map[string][]time.Duration
}

// newChaos starts a cluster of nodes, three servers of etcd, and clients, each in a network of its own.
func newChaos(t *testing.T, rng *rand.Rand, nodes, copies, clients int) *chaos {
	t.Helper()
	c := &chaos{t: t, rng: rng, copies: copies, faults: map[string]int{}, took: map[string][]time.Duration{}}
	c.net = newNetwork(t, nodes+etcdServers)
	c.etcd = newServers(c.net, nodes+1, etcdServers)
	l := layout{nodes: nodes, copies: copies, second: rng.IntN(2) == 0}
	clocks := exec.Command("unshare", "--time", "--monotonic", "1", "true").Run() == nil
	for i := range nodes {
		l.hosts, l.at = append(l.hosts, address(i+1)), append(l.at, c.net.ends[i+1])
		shift := time.Duration(0)
		if clocks {
			// Authority ends by the clock of the node that has it, and is counted from its own report. So it does not
			// matter what the clock says, but only that it does not stand still.
			shift = time.Duration(c.rng.IntN(1_000_000)) * time.Second
		}
		l.shift = append(l.shift, shift)
	}
	for _, s := range c.etcd {
		l.etcd = append(l.etcd, s.url)
	}
	c.all = startBoxes(t, l)
	t.Logf("%d nodes, two partitions each: %t; %d copies, clocks ahead by %v", nodes, l.second, copies, l.shift)
	if l.second {
		c.l = startStores(t, c.all, clients)
	} else {
		c.l = startLoad(t, c.all, clients)
	}
	c.l.allWritten()
	return c
}

// fault is something bad that begins and ends.
type fault struct {
	what string
	// busy names what no two faults may have at a time, "" nothing.
	busy  string
	begin func() (end func())
	// holds: hosts may not be able to write until it ends, by design.
	holds bool
}

// draw draws a fault.
func (c *chaos) draw() fault {
	i := c.rng.IntN(len(c.all))
	j := (i + 1 + c.rng.IntN(len(c.all)-1)) % len(c.all)
	e := c.rng.IntN(len(c.etcd))
	b, s := c.all[i], c.etcd[e]
	cuts := func(pairs ...[2]int) func() func() {
		return func() func() {
			var ends []func()
			for _, p := range pairs {
				ends = append(ends, c.net.cut(p[0], p[1]))
			}
			return func() {
				for _, f := range ends {
					f()
				}
			}
		}
	}
	var toEtcd, fromEtcd [][2]int
	for k := range c.etcd {
		toEtcd = append(toEtcd, [2]int{i + 1, len(c.all) + 1 + k})
		fromEtcd = append(fromEtcd, [2]int{len(c.all) + 1 + k, i + 1})
	}
	oneWay := c.rng.IntN(2) == 0
	way := func(both, one string, there, back [][2]int) fault {
		if oneWay {
			return fault{what: one, begin: cuts(there...)}
		}
		return fault{what: both, begin: cuts(append(there, back...)...)}
	}
	switch c.rng.IntN(12) {
	case 0, 1:
		return fault{what: "kill -9 of a node", busy: b.name, begin: func() func() {
			b.kill()
			return b.start
		}}
	case 2, 3:
		return fault{what: "SIGSTOP of a node", busy: b.name, begin: func() func() {
			b.signal(syscall.SIGSTOP)
			return func() { b.signal(syscall.SIGCONT) }
		}}
	case 4, 5:
		return way("cut between nodes", "cut from a node to another", [][2]int{{i + 1, j + 1}},
			[][2]int{{j + 1, i + 1}})
	case 6:
		return way("node cut off", "node hears, nobody hears it", [][2]int{{i + 1, everybody}},
			[][2]int{{everybody, i + 1}})
	case 7:
		return way("node cut off", "node is heard, hears nobody", [][2]int{{everybody, i + 1}},
			[][2]int{{i + 1, everybody}})
	case 8:
		if c.rng.IntN(2) == 0 {
			return way("cut between a node and etcd", "cut from a node to etcd", toEtcd, fromEtcd)
		}
		f := way("cut between hosts and a node", "cut from a node to hosts", [][2]int{{i + 1, hosts}},
			[][2]int{{hosts, i + 1}})
		f.holds = true // the node may be a ChainHead
		return f
	case 9:
		return fault{what: "cut between a node and all but hosts", begin: func() func() { return c.isolate(i) }}
	case 10:
		if leader := c.leader(); leader != nil {
			s = leader
		}
		if oneWay {
			return fault{what: "SIGSTOP of etcd's leader", busy: s.name, begin: func() func() {
				s.signal(syscall.SIGSTOP)
				return func() { s.signal(syscall.SIGCONT) }
			}}
		}
		return fault{what: "kill -9 of etcd's leader", busy: s.name, begin: func() func() {
			s.kill()
			return s.start
		}}
	default:
		return fault{what: "slow etcd", busy: "etcd", begin: func() func() {
			var ends []func()
			for _, s := range c.etcd {
				ends = append(ends, s.slow(time.Duration(1+c.rng.IntN(20))*time.Millisecond,
					time.Duration(20+c.rng.IntN(200))*time.Millisecond))
			}
			return func() {
				for _, f := range ends {
					f()
				}
			}
		}}
	}
}

// leader is the server of etcd that leads, if they say so.
func (c *chaos) leader() *server {
	for _, s := range c.etcd {
		cli, err := clientv3.New(clientv3.Config{Endpoints: []string{s.url}, Logger: zap.NewNop()})
		if err != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(c.t.Context(), time.Second)
		st, err := cli.Status(ctx, s.url)
		cancel()
		_ = cli.Close() // of a server that may be away
		if err == nil && st.Leader == st.Header.MemberId {
			return s
		}
	}
	return nil
}

// calm waits until everything is as it should be.
func (c *chaos) calm() {
	c.t.Helper()
	c.l.allWritten()
	c.all.full()
}

// alone has one fault, which lasts until writes of all keys go on in spite of it.
func (c *chaos) alone() {
	c.t.Helper()
	f := c.draw()
	for f.holds {
		f = c.draw()
	}
	c.faults[f.what]++
	end := f.begin()
	took := c.l.allWritten()
	c.t.Logf("%s: all keys are written again after %v", f.what, took.Round(time.Millisecond))
	c.took[f.what] = append(c.took[f.what], took)
	end()
	c.calm()
}

// several has some faults at a time, which may overlap.
func (c *chaos) several() {
	c.t.Helper()
	type step struct {
		at time.Duration
		do func()
	}
	var steps []step
	var busy, names []string
	for range 1 + c.rng.IntN(4) {
		f := c.draw()
		etcds := func(name string) bool { return strings.HasPrefix(name, "e") }
		if slices.ContainsFunc(busy, func(name string) bool {
			return name != "" && (name == f.busy || etcds(name) && etcds(f.busy)) // one fault of etcd at a time
		}) {
			continue
		}
		busy = append(busy, f.busy)
		at := time.Duration(c.rng.IntN(1000)) * time.Millisecond
		lasts := time.Duration(30+c.rng.IntN(600)) * time.Millisecond
		if c.rng.IntN(2) == 0 {
			lasts = time.Duration(1000+c.rng.IntN(3000)) * time.Millisecond
		}
		c.faults[f.what]++
		names = append(names, fmt.Sprintf("%s (%v to %v)", f.what, at, at+lasts))
		var end func()
		steps = append(steps, step{at, func() { end = f.begin() }}, step{at + lasts, func() { end() }})
	}
	c.t.Log(strings.Join(names, ", "))
	slices.SortStableFunc(steps, func(a, b step) int { return cmp.Compare(a.at, b.at) })
	began := time.Now()
	for _, s := range steps {
		time.Sleep(s.at - time.Since(began))
		s.do()
	}
	c.calm()
}

// drain takes a node's ranges away and gives it some again, while something else goes wrong, or not.
func (c *chaos) drain() {
	c.t.Helper()
	b := c.all[c.rng.IntN(len(c.all))]
	c.t.Logf("%s is drained, and joins", b.name)
	c.faults["drain and join"]++
	c.change(admin.ChangeCluster{Drain: b.name})
	if c.rng.IntN(2) == 0 {
		c.several()
	}
	c.all.eventually(b.name+" is drained", func() error {
		a, err := c.all[0].admin.Cluster(c.t.Context())
		for _, n := range a.Nodes {
			if err == nil && n.Name == b.name && n.Replicas+n.Filling+n.Waiting > 0 {
				err = fmt.Errorf("it has %d replicas, %d are filled", n.Replicas, n.Filling)
			}
		}
		return err
	})
	c.change(admin.ChangeCluster{Join: b.name})
	if c.rng.IntN(2) == 0 {
		c.several()
	}
	c.calm()
}

// change changes the settings by any node.
func (c *chaos) change(what admin.ChangeCluster) {
	c.t.Helper()
	c.all.eventually("a change of the settings", func() error {
		var all error
		for _, b := range c.all {
			ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
			_, err := b.admin.ChangeCluster(ctx, what)
			cancel()
			if err == nil {
				return nil
			}
			all = errors.Join(all, err)
		}
		return all
	})
}

// long reports whether this is a long run. Drives go bad in those only: that takes longest.
func (c *chaos) long() bool { return *roundsFlag > 0 || *opsFlag > 0 }

// round is some of what there is.
func (c *chaos) round() {
	c.t.Helper()
	switch what := c.rng.IntN(8); {
	case what < 2:
		c.alone()
	case what == 2 && c.copies < len(c.all):
		c.drain()
	case what == 3 && c.long():
		c.badDrive()
	case what == 4 && c.long():
		c.flip()
	default:
		c.several()
	}
}

// end checks what clients have seen, and says what has happened.
func (c *chaos) end() (ops int) {
	c.t.Helper()
	c.l.stop()
	for _, ops2 := range c.l.seen {
		ops += len(ops2)
	}
	total := 0
	for what, n := range c.faults {
		total += n
		took := c.took[what]
		slices.Sort(took)
		if len(took) > 0 {
			c.t.Logf("%s: %d; alone, writes go on after %v to %v, %d times", what, n,
				took[0].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond), len(took))
		} else {
			c.t.Logf("%s: %d", what, n)
		}
	}
	c.t.Logf("%d faults, %d operations", total, ops)
	return ops
}

// rounds is how often a test does what it does: once in CI.
func rounds() int {
	if *roundsFlag == 0 && *opsFlag > 0 {
		return 20
	}
	return max(*roundsFlag, 1)
}

// newSeed is the seed of a test.
func newSeed(t *testing.T) uint64 {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	return seed
}

// TestRandomFaults: three and five nodes, each in a network of its own, with clocks of their own, and three servers of
// etcd. Processes are killed and paused, connections cut in one direction or both, nodes are drained and join, and in
// long runs drives flip bits, fail and are slow. What clients see is linearizable, and in the end all copies are there.
func TestRandomFaults(t *testing.T) {
	t.Parallel()
	for _, nodes := range []int{3, 5} {
		if nodes > 3 && buildtags.Race {
			break // few: everything takes several times as long
		}
		t.Run(fmt.Sprint(nodes), func(t *testing.T) {
			t.Parallel()
			if !inside(t) {
				return
			}
			rng := rand.New(rand.NewPCG(newSeed(t), uint64(nodes)))
			c := newChaos(t, rng, nodes, 3-rng.IntN(2), 8)
			rounds := 2
			if buildtags.Race {
				rounds = 1
			}
			for range cmp.Or(*roundsFlag, rounds) {
				c.round()
			}
			c.end()
		})
	}
}

// TestRandomFaultsForLong is TestRandomFaults until there are -long operations.
func TestRandomFaultsForLong(t *testing.T) {
	if *opsFlag == 0 {
		t.Skip("-long is not set")
	}
	if !inside(t) {
		return
	}
	seed, ops := newSeed(t), 0
	for nth := uint64(0); ops < *opsFlag && !t.Failed(); nth++ {
		t.Run(fmt.Sprint(nth), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, nth))
			c := newChaos(t, rng, 3+2*int(nth%2), 3-rng.IntN(2), 96)
			for range cmp.Or(*roundsFlag, 20) {
				c.round()
			}
			ops += c.end()
			t.Logf("%d operations in all", ops)
		})
	}
}

// TestACutBetweenTwoNodesEndsNoWrites: two of three nodes do not reach each other, in one direction. The manager, which
// hears both, is the third one.
func TestACutBetweenTwoNodesEndsNoWrites(t *testing.T) {
	t.Parallel()
	if !inside(t) {
		return
	}
	c := newChaos(t, rand.New(rand.NewPCG(newSeed(t), 0)), 3, 3, 6)
	a, err := c.all[0].admin.Cluster(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var others []int
	for i, b := range c.all {
		if b.name != a.Manager {
			others = append(others, i+1)
		}
	}
	c.rng.Shuffle(2, func(i, k int) { others[i], others[k] = others[k], others[i] })
	mend := c.net.cut(others[0], others[1])
	t.Logf("all keys are written again after %v", c.l.allWritten().Round(time.Millisecond))
	mend()
	c.calm()
	c.end()
}
