package nvme

import "testing"

// The atomic writes of a namespace: its own values before the controller's, whole divisors of its boundaries, and one
// block if they are shifted.
func TestAtomicWrites(t *testing.T) {
	for _, tc := range []struct {
		a    AtomicWrites
		want int
	}{
		{AtomicWrites{Controller: 1}, 1},
		{AtomicWrites{Controller: 8}, 8},
		{AtomicWrites{Controller: 7}, 4},
		{AtomicWrites{Controller: 8, NAWUPF: 15, NABSPF: 1, NABO: 1}, 8},
		{AtomicWrites{Controller: 8, Own: true}, 8},
		{AtomicWrites{Controller: 8, Own: true, NAWUPF: 15}, 16},
		{AtomicWrites{Controller: 8, Own: true, NAWUPF: 15, NABSPF: 7}, 8},
		{AtomicWrites{Controller: 8, Own: true, NAWUPF: 15, NABSPF: 23}, 8},
		{AtomicWrites{Controller: 8, Own: true, NAWUPF: 3, NABSPF: 7}, 4},
		{AtomicWrites{Controller: 8, Own: true, NAWUPF: 15, NABO: 1}, 1},
		{AtomicWrites{Controller: 1 << 16, Own: true, NAWUPF: 0xffff, NABSPF: 0xffff}, 1 << 16},
	} {
		if got := tc.a.Blocks(); got != tc.want {
			t.Errorf("%+v: %d, want %d", tc.a, got, tc.want)
		}
		var n IdentifyNamespace
		if tc.a.Own {
			n.SetNSFEAT(NSFEATAtomics)
		}
		le.PutUint16(n[nsNAWUPF:], tc.a.NAWUPF)
		le.PutUint16(n[nsNABSPF:], tc.a.NABSPF)
		le.PutUint16(n[nsNABO:], tc.a.NABO)
		if got := n.AtomicWrites(tc.a.Controller); got != tc.a {
			t.Errorf("%+v, want %+v", got, tc.a)
		}
	}
}
