// Package allocs tests that commands allocate nothing where host and target both run in the test's process, and are
// counted both.
package allocs

import (
	"runtime"
	"testing"
	"time"

	"jbofd/internal/buildtags"
)

const (
	// warmUp is how many commands fill pools and make series and stacks grow.
	warmUp = 2000
	// counted is how many commands are counted. Under the race detector there are fewer, because they take ten times as
	// long.
	counted, countedRace = 10_000, 1000
	// perSecond is what timers, keep alive and the runtime may allocate, however many commands are run.
	perSecond = 10
)

// None fails the test if commands allocate. run carries out n commands.
//
// One allocation in 100 commands is tolerated, because the runtime itself allocates now and then. A tenth of an
// allocation per command would already be ten times as much.
func None(t *testing.T, run func(n int) error) {
	t.Helper()
	if err := run(warmUp); err != nil {
		t.Fatal(err)
	}
	n := counted
	if buildtags.Race {
		n = countedRace
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began := time.Now()
	if err := run(n); err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	runtime.ReadMemStats(&after)
	limit := uint64(n/100) + uint64(perSecond*took.Seconds())
	if got := after.Mallocs - before.Mallocs; got > limit {
		t.Errorf("%d allocations for %d commands in %v, the most is %d", got, n, took, limit)
	}
}
