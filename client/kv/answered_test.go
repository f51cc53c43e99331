package kv

import (
	"testing"
	"time"
)

// TestAWriteSaysThatThoseBeforeAreAnswered, however they have ended, in the Namespace and its OpQueues.
func TestAWriteSaysThatThoseBeforeAreAnswered(t *testing.T) {
	overExtended(t, Options{}, func(t *testing.T, s *target, n *Namespace) {
		ctx, key := testContext(t), []byte("key")
		q := openQueue(t, n)
		put := func() {
			t.Helper()
			if err := n.Put(ctx, key, []byte("value")); err != nil {
				t.Fatal(err)
			}
		}
		for what, do := range map[string]func(){
			"a put":              put,
			"a refused one":      func() { _ = n.PutIfAbsent(ctx, key, nil) },
			"a delete":           func() { _ = n.Delete(ctx, key) },
			"one too large":      func() { _ = n.Put(ctx, key, make([]byte, 3<<20)) },
			"one with a bad TTL": func() { _, _ = n.PutWith(ctx, key, nil, PutOptions{TTL: -time.Second}) },
			"puts of a queue": func() {
				submit(t, q, []Op{{Kind: Put, Key: key, Tag: 1}, {Kind: PutIfAbsent, Key: key, Tag: 2},
					{Kind: Delete, Key: key, Tag: 3}})
				_, _ = q.Submit([]Op{{Kind: Put, Key: key, Value: make([]byte, 3<<20)}})
			},
		} {
			do()
			put()
			last, answered := uint64(0), uint64(0)
			s.with(func() {
				for id := range s.done {
					last = max(last, id[1])
				}
			})
			put()
			s.with(func() {
				for _, a := range s.answered {
					answered = max(answered, a)
				}
			})
			if answered <= last {
				t.Errorf("after %s: a write says that those before %d are answered; that was %d", what, answered, last)
			}
		}
	})
}
