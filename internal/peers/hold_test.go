package peers_test

import (
	"testing"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/nvme"
	"jbofd/internal/peers"
)

// withoutAnAnswer has connections to b end because a command gets no answer, some times in a row.
func (r *rig) withoutAnAnswer(t *testing.T, b *box, opcode uint8, times int) {
	t.Helper()
	n := 0
	if opcode != nvme.CmdKVSync {
		n = 4096
	}
	for i := range times {
		r.awaitConnected(t, "b")
		b.board.keeps(everything)
		r.send(r.message(opcode, 0, uint64(i+1), n))
		eventually(t, "the command is kept", func() bool { return b.board.keeping() == 1 })
		r.Advance("b", 5)
		if c := r.sink.await(t, 1)[0]; !c.Lost {
			t.Fatalf("command %d: %v", c.Tag, c.Status)
		}
		<-r.lost
		b.board.release()
	}
}

// holding makes a rig that leaves nodes alone for an hour.
func (w *world) holding(t *testing.T, b *box) *rig {
	t.Helper()
	return w.rig(t, func(c *peers.Config) { c.Timeout, c.KATO, c.Hold = time.Hour, time.Hour, time.Hour }, b)
}

// TestANodeThatAnswersNoCommandsIsLeftAlone, though it can be connected to, and whatever view comes, until one admits
// another process of it.
func TestANodeThatAnswersNoCommandsIsLeftAlone(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		b := w.box(t, "b", 1)
		r := w.holding(t, b)
		see := func(process cluster.Incarnation) {
			m := mapOf(place{b.name, b.ids[0]})
			m.Admitted = []cluster.Incarnation{1, process}
			r.SetView(m)
		}
		see(2)
		r.withoutAnAnswer(t, b, nvme.CmdKVSync, 3)
		eventually(t, "the log says why", func() bool { return r.log.count("counts as out of reach") == 1 })
		see(2)
		r.Redial()
		select {
		case <-r.connected:
			t.Fatal("connected again")
		case <-time.After(300 * time.Millisecond):
		}
		see(3)
		r.withoutAnAnswer(t, b, nvme.CmdKVSync, 2)
		r.awaitConnected(t, "b") // it has begun anew
	})
}

// TestASlowDriveCutsOffNoNode: Ships and Fetches wait for the drive of one partition, and count for nothing.
func TestASlowDriveCutsOffNoNode(t *testing.T) {
	overEach(t, func(t *testing.T, w *world) {
		for _, opcode := range []uint8{nvme.CmdKVShip, nvme.CmdKVFetch} {
			b := w.box(t, "b", 1)
			r := w.holding(t, b)
			r.see(b)
			r.withoutAnAnswer(t, b, opcode, 5)
			r.awaitConnected(t, "b")
		}
	})
}
