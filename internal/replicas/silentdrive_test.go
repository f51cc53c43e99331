package replicas_test

import (
	"fmt"
	"testing"
	"time"

	"jbofd/internal/cluster/view"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// testSilence is Config.SilentAfter of rigs whose drives fall silent.
const testSilence = 500 * time.Millisecond

// silence lets the drives of nodes take requests of some kinds, all if there are none, and complete none.
func silence(nodes []*node, ops ...ssd.Op) {
	for _, n := range nodes {
		n.dev.SetRules(fault.Rule{Ops: ops, Hold: true})
	}
}

func endSilence(nodes []*node) {
	for _, n := range nodes {
		n.dev.SetRules()
		n.dev.Release()
	}
}

// TestASilentDriveHoldsUpNothing: the drive of one member takes requests and completes none, as one that hangs. Its
// node is up and reports. Writes go on without it, and when the drive answers it is filled.
func TestASilentDriveHoldsUpNothing(t *testing.T) {
	for name, ops := range map[string][]ssd.Op{"nothing": nil, "writes": {ssd.Write},
		"flushes": {ssd.Write, ssd.Flush}} {
		for place := range 3 {
			t.Run(fmt.Sprintf("%s at %d", name, place), func(t *testing.T) {
				g := setup{nodes: 3, copies: 3, ranges: testRanges, silentAfter: testSilence}.rig(t)
				g.full(20 * time.Second)
				l := &ledger{g: g, have: map[string]string{}}
				l.write()
				bad := g.chain([]byte("key0"))[place : place+1]
				defer endSilence(bad)
				silence(bad, ops...)
				for range 3 {
					l.write() // putSoon waits for each for 20 s
				}
				if !bad[0].r.Silent() || len(bad[0].r.Report().Failing) == 0 {
					t.Error("nobody is told that the drive is silent")
				}
				for i := range 24 {
					for _, n := range g.chain(fmt.Appendf(nil, "key%d", i)) {
						if n == bad[0] {
							t.Errorf("the node with the silent drive serves key %d", i)
						}
					}
				}
				endSilence(bad)
				l.settled()
				if bad[0].r.Silent() || len(bad[0].r.Report().Failing) > 0 {
					t.Error("the drive answers, and is called silent")
				}
			})
		}
	}
}

// TestASilentDriveThatReadsNothing: reads go on at the others, and the member with the silent drive refuses those that
// come later, so that a client asks another one.
func TestASilentDriveThatReadsNothing(t *testing.T) {
	g := setup{nodes: 3, copies: 3, ranges: testRanges, silentAfter: testSilence}.rig(t)
	g.full(20 * time.Second)
	h := newHost()
	g.putSoon("key", "value", 1)
	bad := g.chain([]byte("key"))[1:2]
	defer endSilence(bad)
	silence(bad, ssd.Read)
	stuck := newHost()
	stuck.get("key")
	go stuck.ask(bad[0])
	for end := time.Now().Add(20 * time.Second); len(g.chain([]byte("key"))) == 3; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the member serves for ever")
		}
	}
	h.get("key")
	if h.ask(bad[0]); h.Status.OK() {
		t.Errorf("the member that has left answers %q", h.Value[:h.Bytes])
	}
	endSilence(bad)
	g.full(20 * time.Second)
	g.same([]byte("key"))
}

// becomesSilent has the drive of a node take a write and complete none, and waits until the node has found that out.
// The host's write waits, and ended is closed when it has ended.
func (g *rig) becomesSilent(n *node, key string) (h *host, ended chan struct{}) {
	g.t.Helper()
	silence([]*node{n}, ssd.Write, ssd.Flush)
	h, ended = newHost(), make(chan struct{})
	h.put(key, "later")
	h.KeepSeconds, h.ID = 600, kvstore.Identity{Client: 9, Seq: 1}
	head := g.chain([]byte(key))[0]
	go func() {
		h.ask(head)
		close(ended)
	}()
	for end := time.Now().Add(20 * time.Second); !n.r.Silent(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			g.t.Fatal("the drive is never called silent")
		}
	}
	n.r.Late() // the turn that has found it is over
	return h, ended
}

// reports counts what a node reports of its ranges.
func (n *node) reports() map[view.Local]int {
	count := map[view.Local]int{}
	for _, r := range n.r.Report().Ranges {
		count[r.Report.Local]++
	}
	return count
}

// TestASilentDriveGivesUpAtOnce: no view has to come first. The node reports at once that it has given up what others
// serve, and answers no read any more, although the drive reads.
func TestASilentDriveGivesUpAtOnce(t *testing.T) {
	g := setup{nodes: 3, copies: 3, ranges: testRanges, silentAfter: testSilence}.rig(t)
	g.full(20 * time.Second)
	g.putSoon("key", "value", 1)
	g.frozen.Store(true)
	bad := g.chain([]byte("key"))[1]
	defer endSilence([]*node{bad})
	g.becomesSilent(bad, "key")
	if r := bad.reports(); r[view.Incomplete] != testRanges {
		t.Errorf("it reports %v of %d ranges, want incomplete", r, testRanges)
	}
	h := newHost()
	for key := range 2 * testRanges {
		h.get(fmt.Sprint("key", key))
		h.want(bad, nvme.NamespaceNotReady, "")
	}
	endSilence([]*node{bad})
	g.frozen.Store(false)
	g.full(20 * time.Second)
}

// TestASilentDriveOfTheOnlyNodeIsKept: it reports what it has, and answers reads.
func TestASilentDriveOfTheOnlyNodeIsKept(t *testing.T) {
	g := setup{nodes: 1, copies: 1, ranges: testRanges, silentAfter: testSilence}.rig(t)
	g.full(20 * time.Second)
	g.putSoon("key", "value", 1)
	only := g.nodes[:1]
	defer endSilence(only)
	write, ended := g.becomesSilent(only[0], "other")
	h := newHost()
	for range 20 {
		if r := only[0].reports(); r[view.Complete] != testRanges {
			t.Fatalf("it reports %v of %d ranges, want complete", r, testRanges)
		}
		h.get("key")
		h.want(only[0], nvme.Success, "value")
		time.Sleep(time.Millisecond) // views of the manager
	}
	endSilence(only)
	if <-ended; !write.Status.OK() {
		t.Errorf("the write that has waited ends with %v", write.Status)
	}
}

// TestTheLastOneWithASilentDriveStays: all drives are silent at once. No range is lost for that, and when they answer,
// whatever was acknowledged is there.
func TestTheLastOneWithASilentDriveStays(t *testing.T) {
	g := setup{nodes: 3, copies: 2, ranges: testRanges, silentAfter: testSilence}.rig(t)
	g.full(20 * time.Second)
	l := &ledger{g: g, have: map[string]string{}}
	l.write()
	defer endSilence(g.nodes)
	silence(g.nodes)
	key := "key0"
	h := newHost()
	h.put(key, "later")
	h.KeepSeconds, h.ID = 600, kvstore.Identity{Client: 9, Seq: 1}
	go h.ask(g.chain([]byte(key))[0])
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		g.mu.Lock()
		c := g.view.Chains[g.view.RangeOf(position([]byte(key)))]
		g.mu.Unlock()
		if len(c) == 2 && c[0].State == view.Serving && c[1].State == view.Waiting {
			break // the other one would be filled if its drive was not silent
		}
		if time.Now().After(end) {
			t.Fatalf("the chain is %v", c)
		}
	}
	endSilence(g.nodes)
	l.settled()
}

// TestASlowDriveStays: a drive that completes something is not silent.
func TestASlowDriveStays(t *testing.T) {
	g := setup{nodes: 3, copies: 3, ranges: testRanges, silentAfter: testSilence}.rig(t)
	g.full(20 * time.Second)
	slow := g.chain([]byte("key"))[1]
	slow.dev.SetRules(fault.Rule{Delay: testSilence / 5})
	for seq := range uint64(10) {
		g.putSoon("key", fmt.Sprint("value", seq), seq+1)
	}
	if slow.dev.SetRules(); slow.r.Silent() || len(g.chain([]byte("key"))) != 3 {
		t.Errorf("a slow drive is called silent: %t; it serves with %d", slow.r.Silent(), len(g.chain([]byte("key"))))
	}
	g.same([]byte("key"))
}
