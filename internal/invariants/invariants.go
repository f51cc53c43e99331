// Package invariants stops the program when an internal invariant is broken. Device and network errors are results of
// requests and are not checked here.
package invariants

import "jbofd/internal/buildtags"

// Enabled is true in test builds (-tags invariants) and under the race detector: guard checks with it that are too
// expensive for production, such as walking a table or filling released memory.
const Enabled = buildtags.Invariants || buildtags.Race

// Check panics with msg unless cond holds. It is always on; msg must be a
// constant, so that a passing check costs a compare and a branch.
func Check(cond bool, msg string) {
	if !cond {
		panic("invariant broken: " + msg)
	}
}
