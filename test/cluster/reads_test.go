package cluster

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// reader reads keys that nobody writes meanwhile, one after the other: any node that has one may answer. No read may
// fail, whatever happens to the nodes.
type reader struct {
	l       *load
	over    chan struct{}
	done    chan struct{}
	longest atomic.Int64
}

func (l *load) startReader() *reader {
	l.t.Helper()
	r := &reader{l: l, over: make(chan struct{}), done: make(chan struct{})}
	for k := range keys {
		if err := l.store.Put(l.t.Context(), cleanKey(k), encode(uint64(k))); err != nil {
			l.t.Fatalf("writing a key to be read: %v", err)
		}
	}
	go r.run()
	return r
}

func cleanKey(k int) []byte { return fmt.Appendf(nil, "clean%d", k) }

func (r *reader) run() {
	defer close(r.done)
	buf := make([]byte, maxValue)
	for k := 0; ; k = (k + 1) % keys {
		select {
		case <-r.over:
			return
		case <-time.After(2 * time.Millisecond):
		}
		begin := time.Now()
		size, err := r.l.store.Get(context.Background(), cleanKey(k), buf)
		if err != nil || r.l.decode(k, buf[:size]) != uint64(k) {
			r.l.t.Errorf("reading a key that nobody writes: %v", err)
			return
		}
		if took := int64(time.Since(begin)); took > r.longest.Load() {
			r.longest.Store(took)
		}
	}
}

// pause returns how long a read has taken at most since the last call.
func (r *reader) pause() time.Duration {
	return time.Duration(r.longest.Swap(0)).Round(100 * time.Microsecond)
}

func (r *reader) stop() {
	close(r.over)
	<-r.done
}
