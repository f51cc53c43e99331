package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/nvme"
	"jbofd/internal/testutil/loopback"
)

// proxy forwards connections to a daemon, and cuts them. Its methods may be called from any goroutine.
type proxy struct {
	addr string
	to   string
	ln   net.Listener
	wg   sync.WaitGroup

	mu    sync.Mutex
	conns []net.Conn
}

// newProxy runs a proxy to an address until the test ends.
func newProxy(t *testing.T, to string) *proxy {
	p := &proxy{to: to, ln: loopback.Listen(t)}
	p.addr = p.ln.Addr().String()
	p.wg.Go(func() {
		for {
			c, err := p.ln.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.forward(c) })
		}
	})
	t.Cleanup(func() {
		p.ln.Close()
		p.cut(1)
		p.wg.Wait()
	})
	return p
}

func (p *proxy) forward(c net.Conn) {
	defer c.Close()
	d, err := net.Dial("tcp", p.to)
	if err != nil {
		return
	}
	defer d.Close()
	p.mu.Lock()
	p.conns = append(p.conns, c, d)
	p.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(d, c) // it ends with the connection
		d.Close()
	}()
	_, _ = io.Copy(c, d)
	c.Close()
	<-done
}

// cut closes one connection in n, at both ends.
func (p *proxy) cut(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	kept := p.conns[:0]
	for i := 0; i < len(p.conns); i += 2 {
		if rand.IntN(n) == 0 {
			p.conns[i].Close()
			p.conns[i+1].Close()
		} else {
			kept = append(kept, p.conns[i], p.conns[i+1])
		}
	}
	p.conns = kept
}

// versionedHost is a host that counts and stores under keys that it shares with others.
type versionedHost struct {
	t   *testing.T
	n   *kv.Namespace
	own int // its place in the counters
	// counted is how often it has incremented each counter; unsure counts writes with client.ErrIndeterminate.
	counted [counters]uint64
	unsure  int
}

const (
	counters       = 3
	versionedHosts = 6
	registers      = 2
)

func counterKey(i int) []byte  { return fmt.Appendf(nil, "counter %d", i) }
func registerKey(i int) []byte { return fmt.Appendf(nil, "register %d", i) }

// increment increments the host's place in a counter, by compare-and-swap.
func (h *versionedHost) increment(i int) error {
	want := h.counted[i] + 1
	_, err := h.n.Update(ctx(h.t), counterKey(i), func(old []byte) ([]byte, error) {
		b := make([]byte, 8*versionedHosts)
		copy(b, old)
		own := b[8*h.own:]
		switch have := binary.LittleEndian.Uint64(own); {
		case have == want && h.unsure > 0:
			return nil, errCounted // the write before was carried out, although nobody could say so
		case have != want-1:
			return nil, fmt.Errorf("counter %d: the host's place is at %d, it has counted to %d", i, have, want-1)
		}
		binary.LittleEndian.PutUint64(own, want)
		return b, nil
	})
	switch {
	case isDropped(err):
		h.unsure++
		return h.increment(i)
	case err != nil && !errors.Is(err, errCounted):
		return err
	}
	h.counted[i] = want
	return nil
}

var errCounted = errors.New("counted")

// isDropped reports whether the target has dropped the identity of a write that was lost, because others have written
// the key too often since. There is no other reason for an indeterminate write.
func isDropped(err error) bool {
	var st *client.StatusError
	return errors.As(err, &st) && st.Status.Code() == nvme.KVIndeterminate
}

// history is what is known of the registers: the version of each value, and the greatest version of a register that a
// write has returned.
type history struct {
	mu       sync.Mutex
	versions map[uint64]uint64 // by stamp
	acked    [registers]uint64
	stamp    atomic.Uint64
}

// see records that a stamp has a version.
func (h *history) see(stamp, version uint64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if v, ok := h.versions[stamp]; ok && v != version {
		return fmt.Errorf("value %d has versions %d and %d: it was stored twice", stamp, v, version)
	}
	h.versions[stamp] = version
	return nil
}

func (h *history) ack(i int, version uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.acked[i] = max(h.acked[i], version)
}

func (h *history) floor(i int) uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.acked[i]
}

// use stores or reads a register.
func (h *versionedHost) use(hist *history, rng *rand.Rand) error {
	i := rng.IntN(registers)
	floor := hist.floor(i)
	if rng.IntN(2) == 0 {
		stamp := hist.stamp.Add(1)
		b := make([]byte, 8+rng.IntN(3000))
		binary.LittleEndian.PutUint64(b, stamp)
		v, err := h.n.PutWith(ctx(h.t), registerKey(i), b, kv.PutOptions{})
		if isDropped(err) {
			h.unsure++
			return nil
		}
		if err != nil {
			return err
		}
		if v <= floor {
			return fmt.Errorf("register %d: a put returns version %d, after one with %d had returned", i, v, floor)
		}
		hist.ack(i, v)
		return hist.see(stamp, v)
	}
	b := make([]byte, 8)
	o, err := h.n.GetVersion(ctx(h.t), registerKey(i), b)
	if errors.Is(err, kv.ErrKeyNotFound) && floor == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	if o.Version < floor {
		return fmt.Errorf("register %d: version %d is read, after %d was stored", i, o.Version, floor)
	}
	return hist.see(binary.LittleEndian.Uint64(b), o.Version)
}

// leastIncrements is how many increments of the counters a test needs to say anything.
const leastIncrements = 50

// TestCountersLoseNoIncrementOverKills: hosts increment counters by compare-and-swap and store and read registers,
// while connections are cut, controllers are reset and the daemon is killed. No increment is lost and none is counted
// twice; every value has one version, and no read goes back behind a version that was returned.
func TestCountersLoseNoIncrementOverKills(t *testing.T) {
	t.Parallel()
	d := start(t, kvSetup(fileSSD))
	rng := random(t)
	p := newProxy(t, d.addr)
	hist := &history{versions: map[uint64]uint64{}}
	var hosts []*versionedHost
	for i := range versionedHosts {
		o := d.options(fmt.Sprintf("%s%d", hostA, i), nqnA)
		o.Address = p.addr
		h := &versionedHost{t: t, n: openKV(t, d.connect(o), 2), own: i}
		if !h.n.Info().Extended {
			t.Fatal("the target does not grant extended key-value")
		}
		hosts = append(hosts, h)
	}
	var stop atomic.Bool
	var counted atomic.Int64
	var wg sync.WaitGroup
	for _, h := range hosts {
		rng := rand.New(rand.NewPCG(rng.Uint64(), 1))
		wg.Go(func() {
			for !stop.Load() {
				err := h.use(hist, rng)
				if err == nil {
					err = h.increment(rng.IntN(counters))
				}
				if err != nil {
					t.Errorf("host %d: %v", h.own, err)
					return
				}
				counted.Add(1)
			}
		})
	}
	kills, cuts, resets := 0, 0, 0
	// A busy machine takes longer for as much.
	for began := time.Now(); time.Since(began) < 4*time.Second ||
		counted.Load() < 2*leastIncrements && time.Since(began) < time.Minute; {
		time.Sleep(time.Duration(20+rng.IntN(150)) * time.Millisecond)
		switch n := rng.IntN(10); {
		case n == 0:
			d.kill()
			d.launch()
			kills++
		case n < 3:
			// The host does not know that it has reset its controller. An error says that it was not connected.
			_ = hosts[rng.IntN(len(hosts))].n.Controller().SetProperty(ctx(t), nvme.PropCC, 0)
			resets++
		default:
			p.cut(1 + rng.IntN(6))
			cuts++
		}
	}
	stop.Store(true)
	wg.Wait()
	sum, unsure, losses := uint64(0), 0, uint64(0)
	for i := range counters {
		b := make([]byte, 8*versionedHosts)
		if _, err := hosts[0].n.Get(ctx(t), counterKey(i), b); err != nil && !errors.Is(err, kv.ErrKeyNotFound) {
			t.Fatal(err)
		}
		for _, h := range hosts {
			have := binary.LittleEndian.Uint64(b[8*h.own:])
			if sum += have; have != h.counted[i] {
				t.Errorf("counter %d: host %d has counted to %d, and finds %d", i, h.own, h.counted[i], have)
			}
		}
	}
	for _, h := range hosts {
		unsure += h.unsure
		losses += h.n.Controller().Losses()
	}
	t.Logf("%d increments and %d values over %d kills, %d cuts and %d resets; %d associations were lost, %d writes "+
		"were indeterminate", sum, hist.stamp.Load(), kills, cuts, resets, losses, unsure)
	if losses == 0 || sum < leastIncrements {
		t.Error("too few to say anything")
	}
}
