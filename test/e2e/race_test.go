package e2e

import (
	"testing"

	"jbofd/internal/buildtags"
)

// raceEnabled: the race detector runs here and in the daemon, and everything is ten times slower.
const raceEnabled = buildtags.Race

// plainOnly skips a test under the race detector, because it has one host and little concurrency. The plain build runs
// it.
func plainOnly(t *testing.T) {
	t.Helper()
	if raceEnabled {
		t.Skip("the plain build runs it")
	}
}
