package partition

import (
	"testing"
	"time"

	"jbofd/internal/kvstore"
)

// looker is a host that looks at its partition whenever it is kicked.
type looker struct {
	*host
	looked int
}

func (l *looker) Kick() {
	l.p.Stats() // waits for ownership
	l.looked++
	l.host.Kick()
}

// TestSinksAreKickedWithoutOwnership: a Kick may use the partition.
func TestSinksAreKickedWithoutOwnership(t *testing.T) {
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	p := r.mustOpen(true)
	l := &looker{host: newHost(p, 1, 1, 4096)}
	l.free[0].Sink = l
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.do(kvstore.Put, 1, 100)
	}()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("a Kick that looks at its partition never ends")
	}
	r.close(p)
	if l.looked == 0 {
		t.Error("the sink was not kicked")
	}
}
