package e2e

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
)

// TestVerifyOfATenantDelaysLocksOfAnotherLittle: a host keeps 24 Verifys of 32 MiB at the drive. Another one's
// compare-and-writes, with which a cluster file system locks, take less than ten times as long as on the idle drive.
// The emulated drive is so slow that its times dominate those of the machine.
func TestVerifyOfATenantDelaysLocksOfAnotherLittle(t *testing.T) {
	t.Parallel()
	d := start(t, setup{ssds: "  - {name: ssd0, backend: model, preset: dct983, condition: clean, size: 128MiB, " +
		"slowdown: 60, calibrate: false}\n", subsystems: openSubsystem})
	d.laneBytes = 4 * 128 << 10
	const verifies, verifyBytes, locks, block = 24, 32 << 20, 31, 512
	locker := d.namespace(d.options(hostA, nqnA), 1)
	lock := func() (median time.Duration) {
		var took []time.Duration
		for i := range int64(locks) {
			began := time.Now()
			if err := locker.CompareAndWrite(ctx(t), make([]byte, block), make([]byte, block), i<<20); err != nil {
				t.Fatal(err)
			}
			took = append(took, time.Since(began))
		}
		slices.Sort(took)
		return took[locks/2]
	}
	idle := lock()

	o := d.options(hostB, nqnA)
	o.Credits = client.CreditsOff // the Verifys are to wait at the target
	verifier := d.namespace(o, 1)
	until, cancel := context.WithCancel(t.Context())
	defer cancel()
	var all sync.WaitGroup
	var done, failed atomic.Int64
	for range verifies {
		all.Go(func() {
			for until.Err() == nil {
				if err := verifier.Verify(until, 0, verifyBytes); err == nil {
					done.Add(1)
				} else if until.Err() == nil {
					failed.Add(1)
					return
				}
			}
		})
	}
	under := func() float64 {
		f := d.scrape()
		return sum(f["jbof_scheduler_queued"], "tenant", hostB) + sum(f["jbof_scheduler_inflight"], "tenant", hostB)
	}
	eventually(t, "the Verifys are at the drive", func() bool { return under() >= verifies })
	busy := lock()
	// A Verify that is between two requests to the drive is not counted at that moment.
	if n := under(); n < verifies/2 {
		t.Errorf("%v Verifys are under way at the end, want about %d: the test tests nothing", n, verifies)
	}
	cancel()
	all.Wait()
	t.Logf("compare-and-write: %v on the idle drive, %v beside %d Verifys, of which %d have ended", idle, busy,
		verifies, done.Load())
	if busy > 10*idle {
		t.Errorf("a compare-and-write takes %v beside another tenant's Verifys, %v on the idle drive", busy, idle)
	}
	if failed.Load() > 0 {
		t.Errorf("%d Verifys have failed", failed.Load())
	}
}
