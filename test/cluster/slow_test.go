package cluster

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"jbofd/internal/buildtags"
)

// logged counts lines of the log of a node that have a text.
func (b *box) logged(what string) int {
	b.t.Helper()
	text, err := os.ReadFile(b.log.Name())
	if err != nil {
		b.t.Fatal(err)
	}
	return bytes.Count(text, []byte(what))
}

// says waits until a node has logged a text so many times.
func (b *box) says(what string, times int) {
	b.t.Helper()
	boxes{b}.eventually("the log of "+b.name, func() error {
		if n := b.logged(what); n != times {
			return fmt.Errorf("%d times %q, want %d", n, what, times)
		}
		return nil
	})
}

// drivesTest starts a cluster whose drives can be made silent or slow.
func drivesTest(t *testing.T, second bool) (boxes, *rand.Rand) {
	if err := (*namespace)(nil).ip("link set lo up"); err != nil {
		t.Skipf("no network for the nodes: %v", err)
	}
	all := startBoxes(t, layout{nodes: 3, copies: 3, images: true, second: second})
	return all, rand.New(rand.NewPCG(newSeed(t), 0))
}

const (
	silentLine  = "the drive of a partition completes nothing"
	answersLine = "the drive of a partition completes requests again"
)

// TestASilentDriveOfANode: the drive of a node takes requests and completes none. Writes go on without it, reads all
// the time, and when it answers it is filled.
func TestASilentDriveOfANode(t *testing.T) {
	if !inside(t) {
		return
	}
	all, rng := drivesTest(t, false)
	l := startLoad(t, all, 6)
	l.allWritten()
	r := l.startReader()
	for range few(all, 2) {
		b := all[rng.IntN(len(all))]
		silent := b.logged(silentLine)
		reads, writes := r.pause(), l.allWritten()
		b.images.silence(0)
		without := l.allWritten()
		b.says(silentLine, silent+1)
		readsWithout := r.pause()
		for range 3 {
			l.allWritten()
		}
		later, laterReads := l.allWritten(), r.pause()
		b.images.answer(0)
		begin := time.Now()
		b.says(answersLine, silent+1)
		all.full()
		filled := time.Since(begin)
		t.Logf("the drive of %s: before, all keys are written within %v, and a read takes %v at most; silent, %v "+
			"and %v; without it, %v and %v; filled %v after it answers, and then %v and %v", b.name, writes, reads,
			without, readsWithout, later, laterReads, filled.Round(time.Millisecond), l.allWritten(), r.pause())
		if without < 5*time.Second || without > 12*time.Second && !buildtags.Race {
			t.Errorf("writes go on %v after the drive is silent, want 7 to 9 s", without)
		}
		if later > 3*time.Second {
			t.Errorf("all keys are written within %v without the drive", later)
		}
	}
	r.stop()
	l.stop()
}

// TestASlowDriveOfANode: one of the two drives of a node takes longer for everything than nodes wait. No connection
// between nodes ends for that, and nothing is lost.
func TestASlowDriveOfANode(t *testing.T) {
	if !inside(t) {
		return
	}
	if buildtags.Race {
		t.Skip("TestASilentDriveOfANode has the same goroutines")
	}
	all, rng := drivesTest(t, true)
	l := startStores(t, all, 6)
	l.allWritten()
	b, drive := all[rng.IntN(len(all))], rng.IntN(2)
	lost := func() (n int) {
		for _, b := range all {
			n += b.logged("connection to a node lost")
		}
		return n
	}
	before := lost()
	b.images.slow(drive, 6*time.Second)
	time.Sleep(20 * time.Second)
	b.images.answer(drive)
	l.allWritten()
	all.full()
	if n := lost() - before; n > 0 {
		t.Errorf("%d connections between nodes were lost", n)
	}
	l.stop()
}
