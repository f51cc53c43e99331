package cluster

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"jbofd/internal/buildtags"
	"jbofd/internal/testutil/images"
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

// makeImages gives the drives of a node to a file system in user space, as block devices in front of it if block is set
// and there are any.
func (b *box) makeImages(block bool) {
	b.images = images.New(b.t, b.dir, 256<<20, "ssd0.img", "ssd1.img")
	for i := range b.paths {
		b.paths[i] = b.images.Path(i)
		if !block {
			continue
		}
		dev, err := b.images.Block(i)
		if err != nil {
			b.t.Logf("the drives of %s are files: %v", b.name, err)
			return
		}
		b.paths[i] = dev
	}
}

// drivesTest starts a cluster whose drives can be made silent or slow, or fail. With a second drive in each node,
// others take the place of one that fails for 3 s.
func drivesTest(t *testing.T, second bool) (boxes, *rand.Rand) {
	if err := (*namespace)(nil).ip("link set lo up"); err != nil {
		t.Skipf("no network for the nodes: %v", err)
	}
	l := layout{nodes: 3, copies: 3, images: true, block: 1, second: second}
	if second {
		l.away = 3 * time.Second
	}
	all := startBoxes(t, l)
	for _, b := range all {
		t.Logf("%s: %s, io_uring is used for %d drives", b.name, b.paths[0], b.logged("engine=io_uring"))
	}
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
	for _, b := range few(boxes{all[0], all[1+rng.IntN(2)]}, 2) {
		silent := b.logged(silentLine)
		reads, writes := r.pause(), l.allWritten()
		b.images.Silence(0)
		without := l.allWritten()
		b.says(silentLine, silent+1)
		readsWithout := r.pause()
		for range 3 {
			l.allWritten()
		}
		later, laterReads := l.allWritten(), r.pause()
		b.images.Answer(0)
		begin := time.Now()
		b.says(answersLine, silent+1)
		all.full()
		filled := time.Since(begin)
		t.Logf("the drive %s of %s: before, all keys are written within %v, and a read takes %v at most; silent, %v "+
			"and %v; without it, %v and %v; filled %v after it answers, and then %v and %v", b.paths[0], b.name, writes,
			reads, without, readsWithout, later, laterReads, filled.Round(time.Millisecond), l.allWritten(), r.pause())
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
	b.images.Slow(drive, 6*time.Second)
	time.Sleep(20 * time.Second)
	b.images.Answer(drive)
	l.allWritten()
	all.full()
	if n := lost() - before; n > 0 {
		t.Errorf("%d connections between nodes were lost", n)
	}
	failsForLong(all, rng, l)
	l.stop()
}

// failsForLong: a drive of a node fails all requests. Its ranges get all their copies elsewhere, among others on the
// other drive of the node, which is up all the time; and they come back when the drive has worked for a while.
func failsForLong(all boxes, rng *rand.Rand, l *load) {
	t := all[0].t
	b, drive := all[rng.IntN(len(all))], rng.IntN(2)
	id := all.partitionsOf(b)[drive]
	begin := time.Now()
	b.images.Fail(drive)
	all.eventually("others have the ranges of a drive that fails", func() error {
		if n := all.replicasOf(id); n > 0 {
			return fmt.Errorf("it has %d replicas", n)
		}
		return all.missing()
	})
	without := time.Since(begin)
	l.allWritten()
	b.images.Answer(drive)
	begin = time.Now()
	all.eventually("the drive has its share of the ranges again", func() error {
		if n := all.replicasOf(id); n == 0 {
			return fmt.Errorf("it has %d replicas", n)
		}
		return all.missing()
	})
	t.Logf("a drive of %s fails: others have its ranges after %v, and it has its share again %v after it works", b.name,
		without.Round(time.Millisecond), time.Since(begin).Round(time.Millisecond))
	l.allWritten()
}

// partitionsOf returns the partitions of a node, in the order of its drives.
func (all boxes) partitionsOf(b *box) (ids []string) {
	b.t.Helper()
	all.eventually("the partitions of "+b.name, func() error {
		l, err := b.admin.Subsystems(b.t.Context())
		if err != nil {
			return err
		}
		ids = nil
		for _, s := range l.Items {
			for _, ns := range s.Namespaces {
				ids = append(ids, ns.UUID)
			}
		}
		return nil
	})
	return ids
}

// replicasOf counts the members of chains that a partition is, in whatever state.
func (all boxes) replicasOf(id string) (n int) {
	a, err := all[0].admin.Cluster(all[0].t.Context())
	if err != nil {
		all[0].t.Fatal(err)
	}
	for _, p := range a.Partitions {
		if p.UUID == id {
			n += p.Replicas + p.Filling + p.Waiting
		}
	}
	return n
}
