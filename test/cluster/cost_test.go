package cluster

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/nvme"
)

// BenchmarkPut measures the processor time of a Put at each daemon: at the ChainHead, and at those behind it. In turn,
// some Puts go to the first of three nodes that have three copies of each key (head), and some to a node of a cluster
// with one copy of each (local): what disturbs the one disturbs the other.
//
//	go test -run '^$' -bench Put -benchtime 200000x ./test/cluster
func BenchmarkPut(b *testing.B) {
	local := startBoxes(b, layout{nodes: 1, copies: 1, ranges: costRanges, memory: true})
	chain := startBoxes(b, layout{nodes: 3, copies: 3, ranges: costRanges, memory: true})
	one, three := newOneHost(b, local[0]), newOneHost(b, chain[0])
	for i := range chain[1:] { // the nodes that have joined first are most often a ChainHead
		if h := newOneHost(b, chain[1+i]); len(h.keys) > len(three.keys) {
			three = h
			chain[0], chain[1+i] = chain[1+i], chain[0]
		}
	}
	n := min(len(one.keys), len(three.keys))
	one.keys, three.keys = one.keys[:n], three.keys[:n]
	for _, bytes := range []int{256, 1024} {
		for _, depth := range []int{1, 32, costDepth} {
			b.Run(fmt.Sprintf("bytes=%d/depth=%d", bytes, depth), func(b *testing.B) {
				value := make([]byte, bytes)
				var alone, head, others []float64 // ns of a slice
				for range max(b.N/slice, 1) {
					alone = append(alone, local[0].during(func() { one.put(slice, depth, value) }))
					var second, third float64
					head = append(head, chain[0].during(func() {
						second = chain[1].during(func() {
							third = chain[2].during(func() { three.put(slice, depth, value) })
						})
					}))
					others = append(others, second+third)
				}
				b.ReportMetric(0, "ns/op") // of the client, and of both clusters
				b.ReportMetric(median(alone)/slice, "local-cpu-ns/put")
				b.ReportMetric(median(head)/slice, "head-cpu-ns/put")
				b.ReportMetric(median(others)/slice, "others-cpu-ns/put")
				b.ReportMetric(median(head)/median(alone), "head/local")
			})
		}
	}
}

// BenchmarkGet measures the processor time of a Get, at all nodes and at the one with most of it, when Gets are spread
// over one, two or three nodes that have all keys. How much three nodes with processors of their own can read is given
// by the busiest one.
func BenchmarkGet(b *testing.B) {
	chain := startBoxes(b, layout{nodes: 3, copies: 3, ranges: costRanges, memory: true})
	var hosts []*oneHost
	for _, n := range chain {
		hosts = append(hosts, newOneHost(b, n))
	}
	value := make([]byte, 1024)
	var all [][]byte
	for _, h := range hosts { // each writes those keys whose ChainHead it has
		if len(h.keys) > 0 {
			h.put(len(h.keys), costDepth, value)
		}
		all = append(all, h.keys...)
	}
	for _, h := range hosts {
		h.keys, h.next = all, 0
	}
	for asked := 1; asked <= len(chain); asked++ {
		b.Run(fmt.Sprintf("nodes=%d", asked), func(b *testing.B) {
			cpu := make([][]float64, len(chain)) // ns of a slice
			for range max(b.N/slice, 1) {
				var before [3]time.Duration
				for i, n := range chain {
					before[i] = n.cpu()
				}
				var reading sync.WaitGroup
				var errs [3]error
				for i, h := range hosts[:asked] {
					reading.Go(func() { errs[i] = h.get(slice/asked, costDepth) })
				}
				reading.Wait()
				if err := errors.Join(errs[:]...); err != nil {
					b.Fatal(err)
				}
				for i, n := range chain {
					cpu[i] = append(cpu[i], float64((n.cpu() - before[i]).Nanoseconds()))
				}
			}
			total, most := 0.0, 0.0
			for i := range cpu {
				m := median(cpu[i]) / float64(slice/asked*asked)
				total, most = total+m, max(most, m)
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(total, "all-cpu-ns/get")
			b.ReportMetric(most, "busiest-cpu-ns/get")
		})
	}
}

const (
	// costRanges is how many ranges the clusters have: those of the demonstration.
	costRanges = 64
	// costKeys is how many keys a oneHost looks at to find those that its node serves.
	costKeys = 30_000
	// costDepth is how many operations it may have outstanding, slice how many it does until it is another's turn.
	costDepth = 128
	slice     = 2000
)

// median is what is reported of many slices, because other processes disturb some of them.
func median(of []float64) float64 {
	slices.Sort(of)
	return of[len(of)/2]
}

// during returns how many nanoseconds of processor time a daemon takes while f runs.
func (b *box) during(f func()) float64 {
	before := b.cpu()
	f()
	return float64((b.cpu() - before).Nanoseconds())
}

func (b *box) cpu() time.Duration {
	b.t.Helper()
	var ts unix.Timespec
	// The clock of another process: clock_getcpuclockid(3).
	if err := unix.ClockGettime(int32(^b.cmd.Process.Pid<<3|2), &ts); err != nil {
		b.t.Fatal(os.NewSyscallError("clock_gettime", err))
	}
	return time.Duration(ts.Nano())
}

// oneHost is a client of one node, with a queue of its own.
type oneHost struct {
	t     testing.TB
	qp    *client.QPair
	keys  [][]byte // those that the node is the ChainHead of
	next  int
	cmds  []client.Command
	comps []client.Completion
	// bufs are for values that are read, which nobody looks at.
	bufs [][]byte
	// ended is told of each operation, by the number of its key; nil: all must succeed.
	ended func(key int, st nvme.Status)
}

// newOneHost connects to a node, and finds out which keys it takes writes of.
func newOneHost(b *testing.B, at *box) *oneHost {
	b.Helper()
	c, err := client.Connect(b.Context(), client.Options{Address: "tcp://" + at.host + ":4420", SubNQN: subNQN,
		HostNQN: "nqn.2026-11.example.host:cost", Credits: client.CreditsOff, QPairs: 2, QueueDepth: costDepth,
		CtrlLossTimeout: -1})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Close() })
	qp, err := c.OpenQPair(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = qp.Close() })
	k := &oneHost{t: b, qp: qp, cmds: make([]client.Command, costDepth), comps: make([]client.Completion, costDepth)}
	for i := range costKeys {
		k.keys = append(k.keys, fmt.Appendf(nil, "%016d", i))
	}
	for range 4 * costDepth {
		k.bufs = append(k.bufs, make([]byte, 4096))
	}
	var served [][]byte
	k.ended = func(i int, st nvme.Status) {
		switch {
		case st.OK():
			served = append(served, k.keys[i])
		case st.Code() != nvme.KVWrongView:
			b.Fatalf("a Put ends with %v", st)
		}
	}
	k.put(len(k.keys), 32, []byte("first"))
	k.keys, k.next, k.ended = served, 0, nil
	return k
}

// put puts n values, and expects that all are taken.
func (k *oneHost) put(n, depth int, value []byte) {
	k.t.Helper()
	if err := k.run(n, depth, func(c *client.Command, key []byte) {
		kv.SetStore(c, partition, key, value, 0)
	}); err != nil {
		k.t.Fatal(err)
	}
}

// get gets n values.
//
// Errors: not all are there.
func (k *oneHost) get(n, depth int) error {
	return k.run(n, depth, func(c *client.Command, key []byte) {
		kv.SetRetrieve(c, partition, key, k.bufs[k.next%len(k.bufs)])
	})
}

// run does n operations on the keys in turn.
//
// Errors: one has failed.
func (k *oneHost) run(n, depth int, set func(c *client.Command, key []byte)) error {
	for sent, ended := 0, 0; ended < n; {
		batch := k.cmds[:0]
		for sent < n && sent-ended < depth {
			batch = append(batch, client.Command{Tag: uint64(k.next)})
			set(&batch[len(batch)-1], k.keys[k.next])
			k.next = (k.next + 1) % len(k.keys)
			sent++
		}
		if len(batch) > 0 {
			if took, err := k.qp.Submit(batch); err != nil || took < len(batch) {
				return fmt.Errorf("%d commands are taken of %d: %w", took, len(batch), err)
			}
		}
		m, err := k.qp.Poll(k.comps, time.Minute)
		if err != nil || m == 0 {
			return fmt.Errorf("%d answers within a minute: %w", m, err)
		}
		for _, c := range k.comps[:m] {
			if k.ended != nil {
				k.ended(int(c.Tag), c.Status)
			} else if !c.Status.OK() {
				return fmt.Errorf("an operation ends with %v", c.Status)
			}
		}
		ended += m
	}
	return nil
}
