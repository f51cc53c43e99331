package replicas_test

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/crrs/linear"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/replicas"
)

var operations = flag.Int64("operations", 10_000, "how many operations the crowd carries out")

// crowd is clients of a rig that want many operations.
type crowd struct {
	g *rig
	// wanted is how many operations are still to be begun.
	wanted, values atomic.Int64
	load           sync.WaitGroup
	mu             sync.Mutex
	seen           [crowdKeys][]linear.Operation
}

const crowdKeys = 64

// client carries out operations, most of them reads, until there are enough.
func (c *crowd) client(id int) {
	h := newHost()
	rng := rand.New(rand.NewPCG(rand.Uint64(), uint64(id)))
	var seen [crowdKeys][]linear.Operation
	var names [crowdKeys]string
	for k := range names {
		names[k] = fmt.Sprint("key", k)
	}
	buf, seq := make([]byte, 64), uint64(0)
	for c.wanted.Add(-1) >= 0 {
		k := rng.IntN(crowdKeys)
		o := linear.Operation{Begin: clock(), End: math.MaxInt64}
		if rng.IntN(16) > 0 {
			if !c.read(h, rng, names[k], buf, &o) {
				continue
			}
		} else {
			seq++
			o.Write, o.Value = true, uint64(c.values.Add(1))
			c.write(h, names[k], kvstore.Identity{Client: uint64(id + 1), Seq: seq}, &o)
		}
		seen[k] = append(seen[k], o)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := range seen {
		c.seen[k] = append(c.seen[k], seen[k]...)
	}
}

// read asks any member, and returns false if that does not serve.
func (c *crowd) read(h *host, rng *rand.Rand, key string, buf []byte, o *linear.Operation) bool {
	chain := c.g.chain([]byte(key))
	if len(chain) == 0 {
		time.Sleep(time.Millisecond)
		return false
	}
	h.Request = replicas.Request{Kind: replicas.Read, Key: crrsKey(key), Value: buf}
	h.ask(chain[rng.IntN(len(chain))])
	switch h.Status.Code() {
	case nvme.Success:
		o.Value = binary.LittleEndian.Uint64(buf)
	case nvme.KeyDoesNotExist:
	default:
		time.Sleep(time.Millisecond)
		return false
	}
	o.End = clock()
	return true
}

// write tries until the write is acknowledged, or for some seconds.
func (c *crowd) write(h *host, key string, id kvstore.Identity, o *linear.Operation) {
	h.Request = replicas.Request{Key: crrsKey(key), Op: kvstore.Put, KeepSeconds: 600, ID: id,
		Value: binary.LittleEndian.AppendUint64(nil, o.Value)}
	for range 2000 {
		if chain := c.g.chain([]byte(key)); len(chain) > 0 && chain[0].alive.Load() {
			if h.ask(chain[0]); h.Status.OK() {
				o.End = clock()
				return
			}
			h.ID.Retry = h.ID.Retry || h.Status.Code() == nvme.CommandInterrupted
		}
		time.Sleep(time.Millisecond)
	}
}

// TestACrowdSeesAnOrder: many clients of real stores, while nodes are lost and do not reach each other.
func TestACrowdSeesAnOrder(t *testing.T) {
	c := &crowd{g: newRig(t, 4, 3)}
	g, wanted := c.g, *operations
	g.full(20 * time.Second)
	c.wanted.Store(wanted)
	for i := range 16 {
		c.load.Go(func() { c.client(i) })
	}
	faults := 0
	for ; c.wanted.Load() > 0; faults++ {
		i := rand.IntN(len(g.nodes))
		j := (i + 1 + rand.IntN(len(g.nodes)-1)) % len(g.nodes)
		if rand.IntN(2) == 0 {
			g.nodes[i].setAlive(false)
			time.Sleep(100 * time.Millisecond)
			g.nodes[i].setAlive(true)
			for k := range g.nodes {
				g.nodes[k].r.NodeReachable(fmt.Sprint("n", i))
				g.nodes[i].r.NodeReachable(fmt.Sprint("n", k))
			}
		} else {
			g.setCut(&[2]int{i, j})
			time.Sleep(2 * testPatience)
			g.setCut(nil)
		}
		g.full(20 * time.Second)
	}
	done, acked := c.check()
	t.Logf("%d operations, %d writes acknowledged, %d faults", done, acked, faults)
	if int64(done) < wanted*9/10 || acked < done/40 {
		t.Error("too few operations")
	}
}

// check waits for the clients, and tests that there is an order and that all members have the same.
func (c *crowd) check() (done, acked int) {
	c.load.Wait()
	for k := range c.seen {
		done += len(c.seen[k])
		for _, o := range c.seen[k] {
			if o.Write && o.End != math.MaxInt64 {
				acked++
			}
		}
		if err := linear.Check(c.seen[k]); err != nil {
			c.g.t.Errorf("key %d: %v", k, err)
		}
		c.g.same(fmt.Appendf(nil, "key%d", k))
	}
	return done, acked
}
