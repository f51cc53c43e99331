package peers_test

import (
	"testing"
	"time"

	"jbofd/internal/peers"
)

// TestANodeThatOwesAnAnswerWasSilent when it ends the connection, for as long as the command has waited, or since an
// answer to another one. Nothing says that it was before; a node that owes no answer was not.
func TestANodeThatOwesAnAnswerWasSilent(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 1)
		r := w.rig(t, nil, b)
		r.see(b)
		const idle, waits = 200 * time.Millisecond, 100 * time.Millisecond
		seq := uint64(0)
		for _, c := range []struct {
			what string
			// owes: a command gets no answer. answered: one that is sent after it does.
			owes, answered bool
		}{{"the last answer is older", true, false}, {"it owes none", false, false}, {"it has answered another one",
			true, true}} {
			r.awaitConnected(t, "b")
			seq++
			r.send(r.forward(0, seq, 64))
			r.sink.await(t, 1)
			time.Sleep(idle)
			b.board.keeps(everything)
			began := time.Now()
			if c.owes {
				seq++
				r.send(r.forward(0, seq, 64))
				eventually(t, "the Forward is kept", func() bool { return b.board.keeping() == 1 })
				if c.answered {
					time.Sleep(idle)
					b.board.keeps(nil)
					began = time.Now()
					seq++
					r.send(r.forward(0, seq, 64))
					r.sink.await(t, 1)
				}
			}
			time.Sleep(waits)
			b.cut()
			l := <-r.lost
			least, most := waits, time.Since(began)
			if !c.owes {
				least, most = 0, 0
			}
			if l.Silent < least || l.Silent > most {
				t.Errorf("%s: silent for %v, want %v to %v", c.what, l.Silent, least, most)
			}
			if l.Certain != 0 {
				t.Errorf("%s: certainly out of reach for %v, though the connection was ended just now", c.what,
					l.Certain)
			}
			b.board.release()
			if c.owes {
				r.sink.await(t, 1)
			}
		}
	})
}

// TestAKeepAliveWithoutAnAnswerIsCertain: the node, or another one, ends the connection while one has no answer.
func TestAKeepAliveWithoutAnAnswerIsCertain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, false)
	b := w.box(t, "b", 1)
	const kato = 2 * time.Second
	r := w.rig(t, func(c *peers.Config) { c.KATO = kato }, b)
	r.see(b)
	r.awaitConnected(t, "b")
	b.freeze(true)
	began := time.Now()
	time.Sleep(kato * 3 / 4) // a Keep Alive is sent after a half at most
	b.cut()
	l := <-r.lost
	if most := time.Since(began); l.Certain < kato/8 || l.Certain > min(most, kato) || l.Silent < l.Certain {
		t.Errorf("silent for %v, certainly for %v, want at least %v and at most %v", l.Silent, l.Certain, kato/8, most)
	}
}
