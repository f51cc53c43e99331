package member

import (
	"testing"
	"time"
)

// Now counts nanoseconds, as the clock of package time does, but for what that one is adjusted by.
func TestTheClockCountsNanoseconds(t *testing.T) {
	before, begin := time.Now(), Now()
	inside := time.Now()
	for time.Since(inside) < 5*time.Millisecond {
	}
	least := time.Since(inside)
	took := time.Duration(Now() - begin)
	most := time.Since(before)
	if took < least*99/100 || took > most*101/100 {
		t.Errorf("%v have passed, want %v to %v", took, least, most)
	}
	for range 1000 {
		if now := Now(); now < begin {
			t.Fatalf("the clock went back from %d to %d", begin, now)
		} else {
			begin = now
		}
	}
	if n := testing.AllocsPerRun(100, func() { Now() }); n != 0 {
		t.Errorf("%v allocs, want 0", n)
	}
}
