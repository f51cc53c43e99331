package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/executor"
)

// scanPage is how many objects are in a part.
const scanPage = 3

// scan carries out a Scan. rig.mu is held.
func (n *testNode) scan(c *executor.Command) {
	g, q := n.g, c.SQE.KVRange()
	from := nvme.KVCursorAt(q.First(), nil)
	if q.KeyLen() > 0 {
		key := (*nvme.SQE)(q).KV().Key(new([nvme.MaxKVKey]byte))
		from = nvme.KVCursorAt(nvme.KVPosition(testSeed, key), key)
	}
	r := int(from.Position >> 60)
	switch {
	case r != int(q.Last()>>60):
		c.Fail(nvme.InvalidField | nvme.DNR)
		return
	case !slices.Contains(n.chains[r], n.id):
		c.Fail(nvme.KVWrongView)
		c.Result = uint64(n.epochs[r])
		return
	}
	b := nvme.NewKVRange(c.Buf.B[:c.Plan.AnswerBytes], nvme.KVScan, from.Position, q.Last(), from)
	var found []nvme.KVCursor
	for key := range g.values {
		x := nvme.KVCursorAt(nvme.KVPosition(testSeed, []byte(key)), []byte(key))
		if from.Compare(&x) < 0 && x.Position <= q.Last() {
			found = append(found, x)
		}
	}
	slices.SortFunc(found, func(a, b nvme.KVCursor) int { return a.Compare(&b) })
	to, flags := nvme.KVLastOf(q.Last()), uint8(nvme.KVComplete)
	if len(found) > scanPage {
		found, to, flags = found[:scanPage], found[scanPage-1], 0
	}
	if n.damaged {
		found, flags = nil, flags|nvme.KVLost
	}
	for _, x := range found {
		o := g.values[string(x.Key[:x.KeyLen])]
		var e nvme.KVEntry
		e, b, _ = b.Append(x.Key[:x.KeyLen], len(o.value), 0)
		e.SetPosition(x.Position)
		e.SetVersion(o.version)
	}
	b.SetTo(to)
	b.SetFlags(flags)
	b.Seal()
	c.Result, c.AnswerBytes = uint64(len(b)), len(b)
}

// damage lets a node say of each part of a range that something is lost.
func (n *testNode) damage() {
	n.g.mu.Lock()
	defer n.g.mu.Unlock()
	n.damaged = true
}

// TestAScanHasEveryObjectOnce, in the order of positions, whichever nodes answer.
func TestAScanHasEveryObjectOnce(t *testing.T) {
	g := newRig(t, 3, 2)
	s, ctx := g.open(func(o *Options) { o.Timeout = 20 * time.Second }), testContext(t)
	const objects = 200
	versions := map[string]uint64{}
	for i := range objects {
		key := fmt.Sprint("key", i)
		v, err := s.PutWith(ctx, []byte(key), make([]byte, i), kv.PutOptions{})
		if err != nil {
			t.Fatal(err)
		}
		versions[key] = v
	}
	scan := func(what string, r kv.Range, want int, half func()) (all []string, lost int) {
		t.Helper()
		last := uint64(0)
		for e, err := range s.Scan(ctx, r) {
			var l *kv.LostError
			if errors.As(err, &l) {
				lost++
				continue
			}
			if err != nil {
				t.Fatalf("%s: after %d objects: %v", what, len(all), err)
			}
			if k := string(e.Key); versions[k] != e.Version || fmt.Sprint("key", e.Size) != k || e.Position < last {
				t.Fatalf("%s: %q has version %d and %d bytes", what, k, e.Version, e.Size)
			}
			last = e.Position
			if all = append(all, string(e.Key)); len(all) == objects/2 && half != nil {
				half()
			}
		}
		if once := slices.Compact(slices.Sorted(slices.Values(all))); len(all) != want || len(once) != want {
			t.Errorf("%s: %d objects, %d of them once, want %d", what, len(all), len(once), want)
		}
		return all, lost
	}
	all, _ := scan("all", kv.All(), objects, nil)
	scan("behind a key", kv.Range{Last: 1<<64 - 1, After: []byte(all[49])}, objects-50, nil)
	last := nvme.KVPosition(testSeed, []byte(all[99]))
	scan("up to a position", kv.Range{First: 1, Last: last}, 100, nil)
	n := 0
	for key, err := range s.Keys(ctx) {
		if err != nil || string(key) != all[n] {
			t.Fatalf("%q, %v; want %q", key, err, all[n])
		}
		if n++; n == objects/4 {
			break
		}
	}
	scan("another view in the middle", kv.All(), objects, func() {
		g.change(func(_ int, c []int) []int { return append(c, 3-c[0]-c[1])[1:] })
		g.publish()
	})
	if s.Stats().WrongViews == 0 {
		t.Error("no node had another view")
	}
	scan("a node that is lost in the middle", kv.All(), objects, func() { g.nodes[0].stop() })
	g.nodes[0].restart()
	until(t, "the node is back", func() bool { return s.Put(ctx, g.keyOf(0, 0), nil) == nil })
	if err := s.Delete(ctx, g.keyOf(0, 0)); err != nil {
		t.Fatal(err)
	}
	g.nodes[1].damage()
	if _, lost := scan("a node that is damaged", kv.All(), objects, nil); lost > 0 {
		t.Errorf("%d parts are lost, others have them", lost)
	}
	for _, n := range g.nodes {
		n.damage()
	}
	if _, lost := scan("all are damaged", kv.All(), 0, nil); lost < testRanges {
		t.Errorf("%d parts are lost", lost)
	}
}

func TestAScanThatCannotGoOnSaysWhy(t *testing.T) {
	g := newRig(t, 2, 2)
	s := g.open(func(o *Options) { o.Timeout, o.ReadTimeout = 100*time.Millisecond, 20*time.Second })
	for i := range g.nodes {
		until(t, "the node is connected", func() bool { return s.Put(t.Context(), g.keyOf(i, 0), nil) == nil })
	}
	first := func(ctx context.Context, r kv.Range) error {
		for _, err := range s.Scan(ctx, r) {
			return err
		}
		return nil
	}
	for what, r := range map[string]kv.Range{"a long key": {Last: 1<<64 - 1, After: make([]byte, 17)},
		"First behind Last": {First: 2, Last: 1}} {
		if err := first(t.Context(), r); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	for what, c := range map[string]struct {
		st   nvme.Status
		want error
	}{"not ready": {nvme.NamespaceNotReady, ErrUnavailable}, "refused": {nvme.InvalidField | nvme.DNR, errScan}} {
		for _, n := range g.nodes {
			n.setScript(func(uint8) (verdict, nvme.Status) { return refuse, c.st })
		}
		var st *client.StatusError
		if err := first(ctx, kv.All()); !errors.Is(err, c.want) || c.want == errScan && !errors.As(err, &st) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, n := range g.nodes {
		n.setScript(nil)
	}
	cancel()
	if err := first(ctx, kv.All()); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that has ended: %v", err)
	}
	g.change(func(int, []int) []int { return nil })
	g.publish()
	if err := first(t.Context(), kv.All()); !errors.Is(err, ErrUnavailable) {
		t.Errorf("no members: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := first(t.Context(), kv.All()); !errors.Is(err, client.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}
