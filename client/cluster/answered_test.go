package cluster

import (
	"testing"

	"jbofd/client/kv"
)

// TestAWriteSaysThatThoseBeforeAreAnswered, however they have ended, in the Store and its OpQueues.
func TestAWriteSaysThatThoseBeforeAreAnswered(t *testing.T) {
	g := newRig(t, 3, 3)
	s, ctx, key := g.open(), t.Context(), []byte("key")
	q := openQueue(t, s, 4)
	put := func() {
		t.Helper()
		if err := s.Put(ctx, key, []byte("value")); err != nil {
			t.Fatal(err)
		}
	}
	for what, do := range map[string]func(){
		"a put":         put,
		"a refused one": func() { _ = s.PutIfAbsent(ctx, key, nil) },
		"a delete":      func() { _ = s.Delete(ctx, key) },
		"one too large": func() { _ = s.Put(ctx, key, make([]byte, 3<<20)) },
		"a put of a queue": func() {
			if n, err := q.Submit([]kv.Op{{Kind: kv.Put, Key: key}}); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			if n, err := q.Poll(make([]kv.Result, 4), -1); n != 1 || err != nil {
				t.Fatal(n, err)
			}
		},
	} {
		do()
		put()
		last, answered := uint64(0), uint64(0)
		g.mu.Lock()
		for id := range g.done {
			last = max(last, id[1])
		}
		g.mu.Unlock()
		put()
		g.mu.Lock()
		for _, a := range g.answered {
			answered = max(answered, a)
		}
		g.mu.Unlock()
		if answered <= last {
			t.Errorf("after %s: a write says that those before %d are answered; that was %d", what, answered, last)
		}
	}
}
