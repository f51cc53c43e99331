package e2e

import "jbofd/internal/buildtags"

// raceEnabled: the race detector runs here and in the daemon, and all is ten times slower.
const raceEnabled = buildtags.Race
