//go:build race

package buildtags

// Race is whether the binary was built with -race.
const Race = true
