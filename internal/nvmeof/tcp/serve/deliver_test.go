package serve_test

import (
	"bytes"
	"errors"
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
)

// newRand returns what is drawn from -seed.
func newRand(t *testing.T) *rand.Rand {
	seed := flag.Lookup("seed").Value.(flag.Getter).Get().(uint64) // that of executortest
	t.Logf("-seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// TestAnswersAreDeliveredToAHostThatReadsSlowly: goroutines that bring answers send them until the socket is full, and
// others do the rest. The reads need more memory than there is, so that some go back to their executor meanwhile.
func TestAnswersAreDeliveredToAHostThatReadsSlowly(t *testing.T) {
	r, _ := delayRig(t)
	rng := newRand(t)
	c, q, err := open(r.address, 100)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	want := bytes.Repeat([]byte{7}, 1<<20)
	blocks := uint32(len(want) / blockBytes)
	writer := kvHost(t, connect(t, client.Options{Address: r.address}))
	if _, st := writer(delayCommand(nvme.CmdWrite, 0, blocks, 0), want); !st.OK() {
		t.Fatal(st)
	}
	cmds, comps := make([]client.Command, 100), make([]client.Completion, 8)
	for range 3 {
		for i := range cmds {
			cmds[i] = client.Command{SQE: delayCommand(nvme.CmdRead, 0, blocks, uint32(1+rng.IntN(2000))),
				Data: make([]byte, len(want))}
		}
		if n, err := q.Submit(cmds); n != len(cmds) {
			t.Fatalf("submitted %d: %v", n, err)
		}
		for done := 0; done < len(cmds); {
			n, err := q.Poll(comps[:1+rng.IntN(8)], testTimeout)
			if err != nil || n == 0 {
				t.Fatalf("%d of %d are done: %v", done, len(cmds), err)
			}
			done += n
			for _, comp := range comps[:n] {
				if !comp.Status.OK() {
					t.Fatal(comp.Status)
				}
			}
		}
		for i := range cmds {
			if !bytes.Equal(cmds[i].Data, want) {
				t.Fatalf("read %d has other data", i)
			}
		}
	}
}

// TestHostsVanishWhileAnswersAreDelivered: connections end while goroutines of the executor empty their outboxes and
// send. What the rig cleans up waits for the connections, and looks whether all memory is back.
func TestHostsVanishWhileAnswersAreDelivered(t *testing.T) {
	r, _ := delayRig(t)
	rng := newRand(t)
	comps := make([]client.Completion, 8)
	for range 30 {
		address, vanish := cable(t, r.address)
		c, q, err := open(address, 64)
		if err != nil {
			t.Fatal(err)
		}
		var cmds []client.Command
		for i := range 64 {
			op, n := []uint8{nvme.CmdWrite, nvme.CmdRead}[i%2], uint32(1+rng.IntN(16))
			cmds = append(cmds, client.Command{SQE: delayCommand(op, 0, n, uint32(rng.IntN(300))),
				Data: make([]byte, n*blockBytes)})
		}
		if _, err := q.Submit(cmds); err != nil && !errors.Is(err, client.ErrConnectionLost) {
			t.Fatal(err)
		}
		_, _ = q.Poll(comps, time.Duration(rng.IntN(400))*time.Microsecond) // whether there are any or not
		vanish()
		_ = c.Close()
	}
}
