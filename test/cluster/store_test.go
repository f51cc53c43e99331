package cluster

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"time"

	"jbofd/client"
	store "jbofd/client/cluster"
	"jbofd/client/kv"
	"jbofd/internal/crrs/linear"
)

// openStore opens a Store by the address of one node: it learns of the others from the map.
func (l *load) openStore() *store.Store {
	l.t.Helper()
	var s *store.Store
	l.all.eventually("the map of the cluster", func() (err error) {
		s, err = store.Open(context.Background(), store.Options{Addresses: []string{"tcp://" + l.all[0].host + ":4420"},
			SubNQN: subNQN, Hedge: 20 * time.Millisecond, Timeout: 20 * time.Second, MaxTries: 10_000,
			Connection: client.Options{HostNQN: "nqn.2026-11.example.host:store"}})
		return err
	})
	return s
}

// runStore is a client of a Store: it needs to know nothing of nodes.
func (l *load) runStore(s *store.Store) {
	rng := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	for !l.over.Load() {
		if rng.IntN(200) == 0 {
			l.list(s)
		}
		k := rng.IntN(keys)
		if l.reads(rng) {
			if err := l.readStore(s, k); err != nil && !errors.Is(err, store.ErrUnavailable) {
				l.t.Errorf("reading key %d: %v", k, err)
				return
			}
			continue
		}
		o := linear.Operation{Begin: now(), Write: true, Value: l.value.Add(1), End: math.MaxInt64}
		begin := time.Now()
		switch err := s.Put(context.Background(), key(k), encode(o.Value)); {
		case err == nil:
			o.End = now()
			l.saw(k, o, begin)
			for d := int64(time.Since(begin)); ; {
				if was := l.longest.Load(); d <= was || l.longest.CompareAndSwap(was, d) {
					break
				}
			}
		case errors.Is(err, client.ErrIndeterminate):
			l.saw(k, o, time.Time{})
		case errors.Is(err, store.ErrUnavailable): // it was never done
		default:
			l.t.Errorf("writing key %d: %v", k, err)
			return
		}
	}
}

// readStore reads a key by a Store.
func (l *load) readStore(s *store.Store, k int) error {
	o := linear.Operation{Begin: now()}
	buf := make([]byte, maxValue)
	size, err := s.Get(context.Background(), key(k), buf)
	switch {
	case err == nil:
		o.Value = l.decode(k, buf[:size])
	case !errors.Is(err, kv.ErrKeyNotFound):
		return err
	}
	o.End = now()
	l.saw(k, o, time.Time{})
	return nil
}

// list lists the keys. Those that were written before are there once, as nothing is deleted.
func (l *load) list(s *store.Store) {
	l.mu.Lock()
	before := l.written
	l.mu.Unlock()
	seen := map[string]int{}
	for k, err := range s.Keys(context.Background()) {
		var lost *kv.LostError
		switch {
		case errors.As(err, &lost), errors.Is(err, store.ErrUnavailable):
			return
		case err != nil:
			l.t.Errorf("listing: %v", err)
			return
		}
		seen[string(k)]++
	}
	for k, at := range before {
		if n := seen[string(key(k))]; n != 1 && (n > 1 || !at.IsZero()) {
			l.t.Errorf("key %d is listed %d times", k, n)
		}
	}
}

// saw notes an operation. written is when a write that was acknowledged has begun, else zero.
func (l *load) saw(k int, o linear.Operation, written time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen[k] = append(l.seen[k], o)
	switch {
	case !written.IsZero():
		l.acked++
		if written.After(l.written[k]) {
			l.written[k] = written
		}
	case o.Write:
		l.unknown++
	}
}
