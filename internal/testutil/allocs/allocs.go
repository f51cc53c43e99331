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
	// few and perSecond are what the runtime, timers and keep alive may allocate, however many commands are run: in
	// all, and in each second of a run.
	few, perSecond = 100, 10
)

// None fails the test if commands allocate. run carries out n commands. A tenth of an allocation per command would
// already be ten times what is tolerated, or as much under the race detector.
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
	limit := few + uint64(perSecond*took.Seconds())
	if got := after.Mallocs - before.Mallocs; got > limit {
		t.Errorf("%d allocations for %d commands in %v, the most is %d", got, n, took, limit)
	}
}
