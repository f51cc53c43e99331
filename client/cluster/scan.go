package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"time"

	"jbofd/client"
	"jbofd/client/internal/host"
	"jbofd/client/kv"
	"jbofd/internal/nvme"
)

// Keys yields all keys, as Scan yields their objects. A key is valid until the next iteration. An error comes with a
// nil key and ends the sequence, unless it is a *kv.LostError.
func (s *Store) Keys(ctx context.Context) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		for e, err := range s.Scan(ctx, kv.All()) {
			if !yield(e.Key, err) {
				return
			}
		}
	}
}

// Scan yields the objects of a range of positions, in the order of their positions and without their values. It is not
// a snapshot: what exists all the time is yielded exactly once, whatever happens to nodes meanwhile. What is put,
// replaced or deleted meanwhile may be yielded or not, also before that has ended. To go on later, set Range.After to
// the last key.
//
// It asks one node after the other, does not wait for credits, and tombstones are not yielded. An error ends the
// sequence, unless it is a *kv.LostError: then no member of the range could say what is in a part of it, which takes
// damage at each of them.
//
// Errors: those of Store, ErrUnavailable if no member has answered for Options.Timeout.
func (s *Store) Scan(ctx context.Context, r kv.Range) iter.Seq2[kv.Entry, error] {
	return func(yield func(kv.Entry, error) bool) {
		from := nvme.KVCursorAt(r.First, r.After)
		switch n := len(r.After); {
		case n > nvme.MaxKVKey:
			yield(kv.Entry{}, fmt.Errorf("%w: Range.After has %d bytes, must have at most %d", client.ErrInvalid, n,
				nvme.MaxKVKey))
			return
		case n > 0:
			from.Position = nvme.KVPosition(s.current.Load().seed, r.After)
		}
		if from.Position > r.Last {
			yield(kv.Entry{}, fmt.Errorf("%w: a Scan from position %#x, must be at most Range.Last, which is %#x",
				client.ErrInvalid, from.Position, r.Last))
			return
		}
		sc := scan{s: s, ctx: ctx, buf: make([]byte, scanBytes), lost: make([]byte, scanBytes)}
		for {
			last := min(r.Last, s.current.Load().lastOf(from.Position))
			b, err := sc.part(from, last)
			if err != nil {
				yield(kv.Entry{}, fmt.Errorf("Scan: %w", err))
				return
			}
			for e := range b.Entries() {
				if !e.Tombstone() && !yield(entryOf(e), nil) {
					return
				}
			}
			if b.Lost() && !yield(kv.Entry{}, &kv.LostError{From: b.From().Position, To: b.To().Position}) {
				return
			}
			switch {
			case !b.Complete():
				from = b.To()
			case last == r.Last:
				return
			default:
				from = nvme.KVCursorAt(last+1, nil)
			}
		}
	}
}

// lastOf returns the last position of the range of a position.
func (m *clusterMap) lastOf(position uint64) uint64 { return position | (1<<m.shift - 1) }

func entryOf(e nvme.KVEntry) kv.Entry {
	out := kv.Entry{Key: e.Key(), Position: e.Position(), Object: kv.Object{Version: e.Version(), Size: e.ValueLen()}}
	if e.Expires() != 0 {
		out.Expires = time.Unix(int64(e.Expires()), 0)
	}
	return out
}

// scanBytes is the size of the buffer of a Scan.
const scanBytes = 64 << 10

// scan is a Scan under way.
type scan struct {
	s   *Store
	ctx context.Context
	// buf is where answers come to. lost has the answer of a member that has lost something.
	buf, lost []byte
	// latest is why the latest command has had no answer.
	latest error
}

// part asks the members of a range what there is behind a cursor, one after the other until one can say it. If none
// can, but all say that something is lost, that is the answer.
func (c *scan) part(from nvme.KVCursor, last uint64) (nvme.KVRange, error) {
	s := c.s
	for begun, pause := s.now(), minPause; ; pause = min(2*pause, maxPause) {
		switch err := c.ctx.Err(); {
		case s.ctx.Err() != nil:
			return nil, client.ErrClosed
		case err != nil:
			return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		m := s.current.Load()
		all := m.chainOf(from.Position).members
		lost, first := nvme.KVRange(nil), rand.N(len(all)+1)
		asked := 0
		for i := range all {
			x := all[(first+i)%len(all)]
			b, err := c.ask(x, from, last)
			switch {
			case err == nil && !b.Lost():
				return b, nil
			case err == nil:
				asked++
				lost = nvme.KVRange(c.lost[:copy(c.lost, b)])
				continue
			case errors.Is(err, errScan):
				return nil, err
			}
			c.latest = err
		}
		switch {
		case asked > 0 && asked == len(all):
			return lost, nil
		case len(all) == 0:
			c.latest = errNotServed
		}
		if s.now()-begun >= s.o.Timeout {
			return nil, fmt.Errorf("%w: no answer in %s; the latest: %w", ErrUnavailable, s.o.Timeout, c.latest)
		}
		s.wantMap()
		sleep(c.ctx, pause/2+rand.N(pause/2+1))
	}
}

// errScan is in errors for which there is no use in asking another member.
var errScan = errors.New("the target refuses the command")

// ask asks a member.
func (c *scan) ask(x *member, from nvme.KVCursor, last uint64) (nvme.KVRange, error) {
	l, p := x.node.connected(), x.place.Load()
	if l == nil || p == nil {
		x.node.connect()
		return nil, x.node.problem()
	}
	cmd := client.Command{Data: c.buf[:min(len(c.buf), p.space.MaxTransfer)]}
	cmd.SQE.SetOpcode(nvme.CmdKVScan)
	cmd.SQE.SetNSID(p.space.NSID)
	q := cmd.SQE.KVRange()
	q.SetLenBytes(uint32(len(cmd.Data)))
	q.SetFrom(from)
	q.SetLast(last)
	ctx, cancel := context.WithTimeout(c.ctx, max(c.s.o.ReadTimeout, c.s.o.Timeout/4))
	defer cancel()
	c.s.stats.tries.Add(1)
	comp, err := l.c.Do(ctx, "Scan", false, &cmd)
	if err == nil && !comp.Status.OK() {
		err = host.CheckStatus("Scan", comp.Status)
		switch code := comp.Status.Code(); {
		case code == nvme.KVWrongView:
			c.s.stats.wrongViews.Add(1)
		case code == nvme.InvalidNamespaceOrFormat:
			x.node.relist()
		case final(comp.Status):
			err = fmt.Errorf("%w: %w", errScan, err)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", x.node.key.name, err)
	}
	size := int(uint32(comp.Result))
	if size > len(cmd.Data) || p.space.Counted && int(comp.Received) < size {
		return nil, fmt.Errorf("node %s: %w: Scan: %d of %d bytes were received", x.node.key.name, client.ErrProtocol,
			comp.Received, size)
	}
	b := nvme.KVRange(cmd.Data[:size])
	if err := b.Check(); err != nil {
		return nil, fmt.Errorf("node %s: %w: Scan: %w", x.node.key.name, client.ErrProtocol, err)
	}
	got, to := b.From(), b.To()
	if b.Kind() != nvme.KVScan || b.Last() != last || !b.Complete() && got.Compare(&to) >= 0 ||
		!bytes.Equal(got.Key[:got.KeyLen], from.Key[:from.KeyLen]) || got.Position != from.Position {
		return nil, fmt.Errorf("node %s: %w: Scan: the answer is about another range", x.node.key.name,
			client.ErrProtocol)
	}
	return b, nil
}
