package e2e

import (
	"testing"

	"jbofd/internal/buildtags"
)

// raceEnabled: the race detector runs here and in the daemon, and all is ten times slower.
const raceEnabled = buildtags.Race

// plainOnly skips a test of one host, in which there is nothing to race with, under the race detector. The plain build
// runs it.
func plainOnly(t *testing.T) {
	t.Helper()
	if raceEnabled {
		t.Skip("the plain build runs it")
	}
}
