package daemon

import (
	"testing"

	"jbofd/internal/ssd/fault"
)

// aStoreWithSwappedKeysComesBackWithItsDrive: its keys in the swap area of another drive are listed while its drive is
// away, keep the area from being freed, and are found when it is back.
func aStoreWithSwappedKeysComesBackWithItsDrive(t *testing.T, w *world, area string) {
	w.configure([]string{slowSource, noLender}, swapNamespaces, noDrain) // the area is to be freed when it is empty
	raw, n, log := w.startRaw()
	host := n.connect()
	for round := range 2 {
		raw.drives()[0].dev.(*fault.Device).Vanish()
		hostSees(t, host, 1, log)
		listed := n.areas()
		// Until then they were on their way back.
		if len(listed) != 1 || len(listed[0].Sources) != 1 || listed[0].Sources[0].Keys == 0 ||
			listed[0].Sources[0].NSID != 1 || listed[0].Sources[0].Open {
			t.Fatalf("round %d: while the drive is away: %+v", round, listed)
		}
		if _, err := n.admin.Reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := n.areas(); len(got) != 1 || got[0].UUID != area {
			t.Fatalf("the area is not there: %+v", got)
		}
		w.back("ssd0")
		hostSees(t, host, 3, log)
	}
	all(t, n.keys(), 2)
}
