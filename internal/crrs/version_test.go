package crrs

import (
	"math"
	"testing"
)

// TestVersionsSufficeForAllEpochs: those of a later epoch are greater, and a store takes all of them, although the
// chain has changed as often as its epoch can tell.
func TestVersionsSufficeForAllEpochs(t *testing.T) {
	const most = 1<<62 - 1 // kvstore.MaxVersion
	var last uint64
	for _, epoch := range []uint64{1, 2, 1000, 1<<21 - 1, 1 << 21, 1<<21 + 1, 1<<22 - 1, 1 << 22, 1<<22 + 1, 1 << 30,
		math.MaxUint32 - 1, math.MaxUint32} {
		var out Actions
		r := New(Config{Window: 8, Reads: 1, Parts: 1})
		r.SetRole(Role{Epoch: epoch, Member: true, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}, &out)
		r.Extend(100)
		r.Advance(50)
		r.Write(Write{Op: Put}, &out)
		if len(out.Stores) != 1 {
			t.Fatalf("epoch %d: %+v", epoch, out)
		}
		if v := out.Stores[0].Version; v <= last+versionGap && epoch > 1 || v > most-1<<28 {
			t.Errorf("epoch %d begins with version %d, that before with %d, the greatest is %d", epoch, v, last, most)
		}
		last = out.Stores[0].Version
	}
}
