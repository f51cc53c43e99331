//go:build invariants

package buildtags

// Invariants is whether the binary was built with -tags invariants.
const Invariants = true
