package crrs

import (
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/internal/invariants"
	"jbofd/internal/testutil/anyorder"
)

// TestPorcupineFindsAnOrder: what clients have seen in some histories has an order, as a checker finds that tries all.
func TestPorcupineFindsAnOrder(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	checked, ops, gaveUp := 0, 0, 0
	for nth := uint64(0); nth < 24 && *runsFlag >= 24; nth++ {
		s := run(t, seed, nth, mixed, sound)
		for k := range s.ops {
			ok, known := anyorder.Check(s.ops[k], 5*time.Second)
			switch {
			case !known:
				gaveUp++
			case !ok:
				t.Errorf("key %d has no order; repeat with -seed %d -nth %d", k, seed, nth)
			default:
				checked++
				ops += len(s.ops[k])
			}
		}
	}
	t.Logf("%d keys with %d operations were checked, %d would have taken too long", checked, ops, gaveUp)
	if checked < gaveUp {
		t.Error("too few were checked")
	}
}

// TestAMillionOperationsAreLinearizable: of many clients, which read most of the time, under the same faults. The long
// histories of keys are beyond what looks for an order could check.
func TestAMillionOperationsAreLinearizable(t *testing.T) {
	seed, ops, fills, wanted := *seedFlag, 0, 0, 1_000_000
	if seed == 0 {
		seed = rand.Uint64()
	}
	if !invariants.Enabled {
		wanted = 100_000 // make invariants runs all of them
	}
	t.Logf("-seed %d", seed)
	nth := uint64(1 << 32)
	for ; ops < wanted; nth++ {
		s := run(t, seed, nth, crowd, sound)
		fills += s.fills
		for k := range s.ops {
			ops += len(s.ops[k])
		}
	}
	t.Logf("%d operations in %d histories, %d members were filled", ops, nth-1<<32, fills)
}
