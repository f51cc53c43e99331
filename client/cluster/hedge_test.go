package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"jbofd/internal/nvme"
)

// TestATimerThatIsLateAsksNobodyAgain: a hedge's timer may have fired at the end of one read and run in the next one.
// That has a second member already, whose answer would be taken for the one of another read if there was a third.
func TestATimerThatIsLateAsksNobodyAgain(t *testing.T) {
	g := newRig(t, 2, 2)
	s, ctx := g.open(func(o *Options) { o.Hedge = time.Millisecond; o.ReadTimeout = 20 * time.Second }), testContext(t)
	if err := s.Put(ctx, []byte("k"), []byte("value")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 10)
	until(t, "connections to both", func() bool {
		_, err := s.Get(ctx, []byte("k"), buf)
		return err == nil && g.nodes[0].count(nvme.CmdKVRetrieve) > 0 && g.nodes[1].count(nvme.CmdKVRetrieve) > 0
	})
	for _, n := range g.nodes {
		n.setScript(func(uint8) (verdict, nvme.Status) { return hold, 0 })
	}
	read := make(chan error, 1)
	go func() {
		n, err := s.Get(ctx, []byte("k"), buf)
		if err == nil && string(buf[:n]) != "value" {
			err = fmt.Errorf("%q", buf[:n])
		}
		read <- err
	}()
	e := s.engine
	until(t, "both are asked", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		for _, r := range e.all {
			if r.phase == sent && r.open == 2 {
				return true
			}
		}
		return false
	})
	hedged := s.Stats().Hedged
	e.mu.Lock()
	at := s.now()
	for _, r := range e.all {
		e.hedges = append(e.hedges, hedgeTime{r, r.use - 1, r.tries, at}, hedgeTime{r, r.use, r.tries - 1, at})
		r.askSecond(at)
	}
	e.hedge(at)
	e.leave()
	if now := s.Stats().Hedged; now != hedged {
		t.Errorf("a read has asked %d members more", now-hedged)
	}
	for _, n := range g.nodes {
		n.release(nvme.AbortedSQDeletion)
	}
	if err := <-read; err != nil {
		t.Error(err)
	}
}

// TestHedgedReadsAreOfTheirKeys: reads of different keys follow each other while about half of them ask two members.
func TestHedgedReadsAreOfTheirKeys(t *testing.T) {
	g := newRig(t, 3, 3)
	s, ctx := g.open(func(o *Options) { o.Hedge = 100 * time.Microsecond }), testContext(t)
	key := func(k int) []byte { return fmt.Append(nil, "key", k) }
	for k := range 16 {
		if err := s.Put(ctx, key(k), fmt.Append(nil, "value of ", k)); err != nil {
			t.Fatal(err)
		}
	}
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			buf := make([]byte, 100)
			for k := range 1500 {
				k = (k + 2*i) % 16
				n, err := s.Get(context.Background(), key(k), buf)
				if errors.Is(err, ErrUnavailable) {
					continue
				}
				if want := fmt.Sprint("value of ", k); err != nil || string(buf[:n]) != want {
					t.Errorf("%q, %v; want %q", buf[:n], err, want)
					return
				}
			}
		})
	}
	all.Wait()
	if st := s.Stats(); st.Hedged < 100 {
		t.Errorf("only %d reads were hedged", st.Hedged)
	}
}
