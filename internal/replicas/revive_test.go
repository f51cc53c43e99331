package replicas_test

import (
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// TestADriveThatWorksAgainEndsDamage: a member whose drive has failed writes for seconds is filled again, without a
// restart.
func TestADriveThatWorksAgainEndsDamage(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(20 * time.Second)
	chain, h, key := g.chain([]byte("key")), newHost(), "key"
	h.put(key, "old")
	h.want(chain[0], nvme.Success, "")
	bad := chain[1]
	bad.dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Err: ssd.ErrMedia})
	h.put(key, "new")
	h.ask(chain[0]) // it ends with the view that goes on without that member
	g.until("the view goes on without the member", func() bool { return len(g.chain([]byte(key))) < 3 })
	if len(bad.r.Report().Failing) == 0 {
		t.Error("the manager is not told that the drive fails")
	}
	bad.dev.SetRules()
	g.full(30 * time.Second)
	g.same([]byte(key))
	if len(bad.r.Report().Failing) > 0 {
		t.Error("the manager is told that the drive fails still")
	}
}

// TestTheLastCopyWhoseDriveWorksAgainServes: the drives of all nodes fail writes for seconds. Then all ranges are
// served again without a restart, with everything that was acknowledged.
func TestTheLastCopyWhoseDriveWorksAgainServes(t *testing.T) {
	for name, nodes := range map[string]int{"one copy": 1, "two copies": 2} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, nodes, nodes)
			g.full(20 * time.Second)
			chain, h, key := g.chain([]byte("key")), newHost(), "key"
			h.put(key, "value")
			h.want(chain[0], nvme.Success, "")
			for _, n := range g.nodes {
				n.dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Err: ssd.ErrMedia})
			}
			h.put(key, "never acknowledged")
			if h.ask(chain[0]); h.Status.OK() {
				t.Fatal("a write is acknowledged that could not be stored")
			}
			g.until("the range is halted", func() bool { return len(g.chain([]byte(key))) == 0 })
			for _, n := range g.nodes {
				n.dev.SetRules()
			}
			g.full(30 * time.Second)
			chain = g.chain([]byte(key))
			g.same([]byte(key))
			h.get(key)
			h.ask(chain[0])
			if got := string(h.Value[:h.Bytes]); !h.Status.OK() || got != "value" {
				t.Errorf("%v, %q", h.Status, got)
			}
			h.put(key, "next")
			h.want(chain[0], nvme.Success, "")
		})
	}
}

// until waits until something is so.
func (g *rig) until(what string, so func() bool) {
	g.t.Helper()
	for end := time.Now().Add(20 * time.Second); !so(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			g.t.Fatalf("not within 20 s: %s", what)
		}
	}
}
