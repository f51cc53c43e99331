package crrs

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/nvme"
)

// lossyFill fills a member from a copier whose store has lost some parts of the range, from first to last. Both are
// Ports, whose commands take no time.
type lossyFill struct {
	t              *testing.T
	ports          [2]*Port
	stores         [2]*rangeStore
	outs           [2]Actions
	traffic        [2]Traffic
	data           map[uint64]*Part // of responses
	losses         [][2]uint64
	now            int64
	asked, refused int
}

func newLossyFill(t *testing.T, copier, filling *rangeStore, parts int) *lossyFill {
	d := &lossyFill{t: t, stores: [2]*rangeStore{copier, filling}, now: 1}
	for i := range d.ports {
		d.ports[i] = NewPort(PortConfig{Keep: 1, Requests: 16, Served: 8,
			Config: Config{Window: 8, Reads: 1, Version: 1 << 20, Bits: 64, Parts: parts, Leaf: 1}})
		d.ports[i].r.Advance(d.now)
	}
	d.ports[0].SetRole(Role{Epoch: 1, Member: true, Predecessor: NoPeer, Successor: 1, ChainTail: NoPeer}, &d.outs[0],
		&d.traffic[0])
	d.ports[1].SetRole(Role{Epoch: 1, Member: true, Filling: true, Since: 1, Successor: NoPeer, ChainTail: NoPeer,
		NumOthers: 1}, &d.outs[1], &d.traffic[1])
	return d
}

// do carries out an operation of the copier's store, which returns what comes before a loss first.
func (d *lossyFill) do(op *RangeOp) StoreStatus {
	first, last := max(op.First, op.From.Position), op.First+1<<op.Bits-1
	for _, l := range d.losses {
		if l[1] < first || l[0] > last {
			continue
		}
		if op.Kind == Digest {
			return StoreUnreadable
		}
		if l[0] <= first {
			op.Lost, op.LostAt = true, min(l[1], last)
			return StoreUnreadable
		}
		if first < l[0] {
			before := *op
			d.stores[0].do(&before)
			if before.Last || before.To.Position >= l[0] {
				// As many objects as there are before the loss, up to it.
				n := 0
				for _, at := range d.stores[0].within(&op.Part)[:len(before.Data)/objectBytes] {
					if at < l[0] {
						n++
					}
				}
				op.Data, op.To = before.Data[:n*objectBytes], Cursor{Position: l[0]}
				return Done
			}
			*op = before
			return Done
		}
	}
	d.stores[0].do(op)
	return Done
}

// run takes turns until nothing is left to do at this time.
func (d *lossyFill) run() {
	for again := true; again; {
		again = false
		for i, p := range d.ports {
			p.r.Advance(d.now)
			p.Flush(&d.outs[i], &d.traffic[i])
			out, tr := d.outs[i], d.traffic[i]
			d.outs[i], d.traffic[i] = Actions{}, Traffic{}
			for _, op := range out.Ranges {
				again = true
				st := Done
				switch {
				case op.Kind == Settle:
				case i == 0:
					st = d.do(&op)
				default:
					d.stores[1].do(&op)
				}
				p.Ranged(&op, st, &d.outs[i], &d.traffic[i])
			}
			for _, a := range tr.Responses {
				again = true
				if !a.Status.OK() {
					d.refused++
				}
				d.ports[1-i].Completed(uint32(a.Handle), &Outcome{Status: a.Status, Result: a.Result, Part: a.Part,
					Value: a.Data}, &d.outs[1-i], &d.traffic[1-i])
			}
			for _, c := range tr.Commands {
				again = true
				if op := c.SQE.Opcode(); op == nvme.CmdKVCompare || op == nvme.CmdKVFetch {
					d.asked++
				}
				c.SQE.KVReplica().SetLenBytes(1 << 20)
				d.ports[c.To].Receive(Peer(i), &Incoming{Handle: uint64(c.Tag), SQE: &c.SQE}, &d.outs[c.To],
					&d.traffic[c.To])
			}
		}
	}
}

// TestWhatACopierHasNotLostIsCopied: the member that is filled gets all but what is lost, at once. It asks for that
// again, seldom, and is complete when it has got it.
func TestWhatACopierHasNotLostIsCopied(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for run := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, run))
		source, had := map[uint64]uint64{}, map[uint64]uint64{}
		for range rng.IntN(2000) {
			at := rng.Uint64()
			if source[at] = 5; rng.IntN(2) == 0 {
				had[at] = 1 + rng.Uint64N(9)
			}
		}
		copier, filling := newRangeStore(maps.Clone(source)), newRangeStore(had)
		d := newLossyFill(t, copier, filling, 1+rng.IntN(3))
		for range 1 + rng.IntN(4) {
			width := 1 + rng.IntN(15)
			first := rng.Uint64() >> (64 - width) << (64 - width)
			d.losses = append(d.losses, [2]uint64{first, first + 1<<(64-width) - 1})
		}
		slices.SortFunc(d.losses, func(a, b [2]uint64) int {
			if a[0] < b[0] {
				return -1
			}
			return 1
		})
		lost := func(at uint64) bool {
			return slices.ContainsFunc(d.losses, func(l [2]uint64) bool { return at >= l[0] && at <= l[1] })
		}
		d.run()
		r := d.ports[1].r
		for _, at := range copier.positions {
			if !lost(at) && filling.version[at] != 5 {
				t.Fatalf("run %d: %x is not copied, which is not lost: %d", run, at, filling.version[at])
			}
		}
		for _, at := range filling.positions {
			if !lost(at) && source[at] == 0 {
				t.Fatalf("run %d: %x is left", run, at)
			}
		}
		if r.Complete() {
			t.Fatalf("run %d: it is complete without what is lost", run)
		}
		asked := d.asked
		const seconds = 600
		for range seconds {
			due := r.DueNS()
			if due == 0 {
				t.Fatalf("run %d: it asks never again", run)
			}
			if d.now += 1e9; due <= d.now {
				d.run()
			}
		}
		if n, most := d.asked-asked, 20*(len(r.pass.open)+1); n > most || n < len(r.pass.open) {
			t.Fatalf("run %d: what is lost is asked for %d times in %d s, want at most %d", run, n, seconds, most)
		}
		d.losses = nil
		for i := 0; i < 100 && !r.Complete(); i++ {
			d.now += 1e9
			d.run()
		}
		if !r.Complete() || !slices.Equal(copier.positions, filling.positions) {
			t.Fatalf("run %d: complete %v, %d objects, want %d", run, r.Complete(), len(filling.positions),
				len(copier.positions))
		}
		for at, v := range source {
			if filling.version[at] != v {
				t.Fatalf("run %d: version %d at %x, want %d", run, filling.version[at], at, v)
			}
		}
	}
}
