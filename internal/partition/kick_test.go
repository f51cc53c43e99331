package partition

import (
	"testing"
	"time"

	"jbofd/internal/kvstore"
)

// turnObserver is a sink that uses its partition whenever it is kicked.
type turnObserver struct {
	*host
	observed int
}

func (o *turnObserver) Kick() {
	o.p.Stats() // waits for ownership
	o.observed++
	o.host.Kick()
}

// TestSinksAreKickedAfterOwnershipEnds: a Kick may use the partition.
func TestSinksAreKickedAfterOwnershipEnds(t *testing.T) {
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	p := r.mustOpen(true)
	l := &turnObserver{host: newHost(p, 1, 1, 4096)}
	l.free[0].Sink = l
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.do(kvstore.Put, 1, 100)
	}()
	select {
	case <-done:
	case <-time.After(testTimeout):
		t.Fatal("a Kick that looks at its partition never ends")
	}
	r.close(p)
	if l.observed == 0 {
		t.Error("the sink was not kicked")
	}
}
