package replicas_test

import (
	"fmt"
	"testing"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// TestAConditionThatNobodyCanJudgeIsToldSoon: both members have lost what the key has. The client hears of it, many
// such writes hold up no others of the range, and their values are not written again and again.
func TestAConditionThatNobodyCanJudgeIsToldSoon(t *testing.T) {
	g := setup{nodes: 2, copies: 2, ranges: 2}.rig(t)
	g.full(20 * time.Second)
	h := newHost()
	for i := range 300 {
		key := fmt.Sprintf("a-key-%03d", i)
		h.put(key, "value of "+key)
		h.want(g.chain([]byte(key))[0], nvme.Success, "")
	}
	const key = "a-key-007"
	head := g.chain([]byte(key))[0]
	for _, n := range g.nodes {
		if n.flip([]byte(key)) == 0 {
			t.Fatal("the key is not on the drive")
		}
	}
	before := head.part.Stats().UserBytes
	const many = 100
	began := time.Now()
	answers := make(chan nvme.Status, many)
	for i := range many {
		go func() {
			h := newHost()
			h.put(key, fmt.Sprint("another value ", i))
			if h.Condition = kvstore.IfAbsent; i%2 == 0 {
				h.ID, h.KeepSeconds = kvstore.Identity{Client: 7, Seq: uint64(i), Retry: true}, 60
			}
			h.ask(head)
			answers <- h.Status.Code()
		}()
	}
	other := ""
	for i := 0; other == "" || position([]byte(other))>>63 != position([]byte(key))>>63; i++ {
		other = fmt.Sprintf("other-key-%03d", i)
	}
	for i := range 100 {
		h.put(other, fmt.Sprint(i))
		h.want(head, nvme.Success, "")
	}
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("100 writes of another key took %v", d)
	}
	for range many {
		switch st := <-answers; st {
		case nvme.UnrecoveredReadError, nvme.NamespaceNotReady, nvme.KVIndeterminate:
		default:
			t.Errorf("%v", st)
		}
	}
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("they were told after %v", d)
	}
	if n := head.part.Stats().UserBytes - before; n > 10_000 {
		t.Errorf("%d bytes of values were written", n)
	}
}

// TestALoneMemberDoesNotSayThatADriveErrorIsForGood: its host may try again, and finds the value when the drive is
// back.
func TestALoneMemberDoesNotSayThatADriveErrorIsForGood(t *testing.T) {
	g := newRig(t, 1, 1)
	g.full(20 * time.Second)
	n, h := g.nodes[0], newHost()
	h.put("key", "value")
	h.want(n, nvme.Success, "")
	n.dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Read}, Len: n.dev.Info().SizeBytes, Err: ssd.ErrMedia})
	h.get("key")
	h.want(n, nvme.UnrecoveredReadError, "")
	if h.Status.DNR() {
		t.Errorf("%v", h.Status)
	}
	n.dev.SetRules()
	h.get("key")
	h.want(n, nvme.Success, "value")
}
