package target

import (
	"testing"

	"jbofd/internal/nvme"
)

func TestWindowsDivideACredit(t *testing.T) {
	var w Windows
	want := func(units, part int) {
		t.Helper()
		c := w.Credit(3, units)
		if c.SSD() != 3 || c.Units() != part {
			t.Errorf("%d units: %d of drive %d, want %d", units, c.Units(), c.SSD(), part)
		}
	}
	want(100, 100) // the first grant is in progress
	w.Open()
	want(100, 100)
	want(1<<20, nvme.MaxCreditUnits)
	want(0, 0) // the policy gives no credit
	w.Open()
	w.Open()
	want(100, 33)
	want(2, 1) // at least 1
	w.Close()
	want(100, 50)
	if n := testing.AllocsPerRun(100, func() { w.Credit(1, 7) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
