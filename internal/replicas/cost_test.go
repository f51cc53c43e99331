package replicas_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"jbofd/internal/nvme"
)

// TestAPutCostsOneForwardAndOneAcknowledgementForEachFurtherReplica: a Forward on each hop, whose completion is the
// acknowledgement. A PUT that is alone takes a Durable on each hop besides, unless the stores answer at once; of many,
// the durable mark comes with the Forward of the next (docs/decisions/0015).
func TestAPutCostsOneForwardAndOneAcknowledgementForEachFurtherReplica(t *testing.T) {
	const copies = 3
	for _, atOnce := range []bool{false, true} {
		t.Run(fmt.Sprintf("stores answer at once: %v", atOnce), func(t *testing.T) {
			countCosts(t, setup{nodes: copies, copies: copies, ranges: testRanges, atOnce: atOnce})
		})
	}
}

func countCosts(t *testing.T, s setup) {
	g, copies := s.rig(t), int64(s.copies)
	g.full(time.Minute)
	g.frozen.Store(true) // what is under way when a view changes is forwarded again
	key := func(i int) string { return fmt.Sprint("key ", i) }
	h := newHost()
	h.put(key(0), "value")
	h.want(g.chain([]byte(key(0)))[0], nvme.Success, "")
	counts := func() (n [3]int64) {
		return [3]int64{g.carried[nvme.CmdKVForward].Load(), g.completed[nvme.CmdKVForward].Load(),
			g.carried[nvme.CmdKVDurable].Load()}
	}
	// settled waits until all Forwards are answered: those of the members behind the ChainTail's answer, too.
	settled := func() [3]int64 {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			if n := counts(); n[0] == n[1] {
				return n
			}
			if time.Now().After(end) {
				t.Fatalf("Forwards and their completions: %v", counts())
			}
		}
	}
	// Commands of this rig overtake each other, unlike those of one range over a connection: what a member misses for
	// that is forwarded again, rarely.
	few := func(forwards, want int64) bool { return forwards >= want && forwards <= want+want/20 }
	before := settled()
	const puts = 200
	for i := range puts { // one after the other
		h.put(key(i), "value")
		h.want(g.chain([]byte(key(i)))[0], nvme.Success, "")
	}
	n := settled()
	if f := n[0] - before[0]; !few(f, puts*(copies-1)) || n[1]-before[1] != f {
		t.Errorf("%d PUTs one after the other: %d Forwards, %d acknowledgements", puts, f, n[1]-before[1])
	}
	most := puts * (copies - 1) * 3 / 2
	if s.atOnce {
		most = 2 * testRanges * (copies - 1)
	}
	if d := n[2] - before[2]; d > most { // some tell the clock only
		t.Errorf("%d PUTs one after the other: %d Durables, want at most %d", puts, d, most)
	}
	before = n
	var load sync.WaitGroup
	const hosts = 64
	for k := range hosts { // many at once, to one range
		load.Go(func() {
			h := newHost()
			for range puts / 10 {
				h.Status = nvme.NamespaceNotReady
				for h.Status == nvme.NamespaceNotReady { // the manager of a slow machine gives authority late
					h.put(fmt.Sprint("key ", 0), fmt.Sprint(k))
					h.ask(g.chain([]byte(key(0)))[0])
				}
				if !h.Status.OK() {
					t.Errorf("a PUT ends with %v", h.Status)
				}
			}
		})
	}
	load.Wait()
	n = settled()
	const many = hosts * puts / 10
	if f := n[0] - before[0]; !few(f, many*(copies-1)) || n[1]-before[1] != f {
		t.Errorf("%d PUTs: %d Forwards, %d acknowledgements", many, f, n[1]-before[1])
	}
	// Observe is told in the turn in which a command has ended, and the marks follow the last completion.
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		dirty := int64(0)
		for _, n := range g.nodes {
			dirty += n.r.Dirty()
		}
		f := g.observed[nvme.CmdKVForward].Load()
		if dirty == 0 && f == g.carried[nvme.CmdKVForward].Load() {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("all is committed, and %d writes are dirty; %d of %d Forwards were observed", dirty, f, n[0])
		}
	}
	if b := g.observedBytes[nvme.CmdKVForward].Load(); b < n[0]*int64(len("0")) {
		t.Errorf("%d bytes were observed of %d Forwards", b, n[0])
	}
	t.Logf("%d PUTs of %d hosts: %d Durables", many, hosts, n[2]-before[2])
	if d := n[2] - before[2]; d > many*(copies-1)/2 {
		t.Errorf("%d PUTs: %d Durables, as if each were alone", many, d)
	}
}
