package cluster

import (
	"context"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"
)

// isolate cuts a node off from the other nodes and from etcd, but not from hosts, until the function that it returns is
// called.
func (c *chaos) isolate(i int) (mend func()) {
	c.t.Helper()
	var ends []func()
	for other := range c.net.ends {
		if other != hosts && other != i+1 {
			ends = append(ends, c.net.cut(i+1, other), c.net.cut(other, i+1))
		}
	}
	return func() {
		c.t.Helper()
		for _, f := range ends {
			f()
		}
	}
}

// refusesReads asks a node until it has answered many reads, none of which may have got a value.
func (c *chaos) refusesReads(i int) {
	c.t.Helper()
	r, refused := newCaller(c.l), 0
	defer r.close()
	c.all.eventually("answers of the node", func() error {
		for refused < 100 {
			switch err := r.read(refused%keys, i); {
			case err == nil:
				c.t.Fatalf("%s, which is cut off and whose place the others have taken, answers a read",
					c.all[i].name)
			case elsewhere(err):
				refused++
			default:
				return err
			}
		}
		return nil
	})
}

// TestANodeThatOnlyHostsReachServesNothingStale: the others go on without it, it does not know that, and nothing but
// the end of its authority keeps it from answering reads: of hosts whose connections have lasted, and of new ones. Then
// the same of a node that was stopped meanwhile, and finds reads in its sockets that came before it goes on.
func TestANodeThatOnlyHostsReachServesNothingStale(t *testing.T) {
	t.Parallel()
	if !inside(t) {
		return
	}
	c := newChaos(t, rand.New(rand.NewPCG(newSeed(t), 0)), 3, 3, 6)
	i := c.rng.IntN(len(c.all))
	b, r := c.all[i], newCaller(c.l)
	defer r.close()
	serves := func() {
		c.all.eventually("a read of the node", func() error { return r.read(c.rng.IntN(keys), i) })
	}
	serves()
	mend := c.isolate(i)
	t.Logf("%s is cut off from all but hosts: all keys are written again after %v", b.name,
		c.l.allWritten().Round(time.Millisecond))
	for k := range keys {
		if r.read(k, i) == nil {
			t.Errorf("%s answers a read of key %d that others have written meanwhile", b.name, k)
		}
	}
	c.refusesReads(i)
	mend()
	c.calm()
	serves()
	b.signal(syscall.SIGSTOP)
	t.Logf("%s is stopped: all keys are written again after %v", b.name, c.l.allWritten().Round(time.Millisecond))
	ns, answers := r.node(i), make(chan error, keys)
	for k := range keys {
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), wait)
			defer cancel()
			_, err := ns.Get(ctx, key(k), make([]byte, maxValue))
			answers <- err
		}()
	}
	mend = c.isolate(i)
	b.signal(syscall.SIGCONT)
	refused := 0
	for range keys {
		switch err := <-answers; {
		case err == nil:
			t.Errorf("%s, which was stopped while others took its place, answers a read", b.name)
		case elsewhere(err):
			refused++
		}
	}
	t.Logf("%d of %d reads that it found are refused", refused, keys)
	c.refusesReads(i)
	mend()
	c.calm()
	c.end()
}
