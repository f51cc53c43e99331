package credit

import (
	"testing"

	"pgregory.net/rapid"
)

func TestUnitsRoundUpAndAreAtLeastOne(t *testing.T) {
	for _, x := range [][2]int{{0, 1}, {1, 1}, {512, 1}, {4096, 1}, {4097, 2}, {128 << 10, 32}, {127<<10 + 512, 32}} {
		if got := Units(x[0]); got != x[1] {
			t.Errorf("%d bytes: %d units, want %d", x[0], got, x[1])
		}
	}
}

func TestPartsNeverSumToMoreThanTheWholeUnlessEachIsOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		units, windows := rapid.IntRange(0, 1<<17).Draw(t, "units"), rapid.IntRange(0, 300).Draw(t, "windows")
		part := Part(units, windows)
		switch {
		case units == 0:
			if part != 0 {
				t.Fatalf("a part of nothing: %d", part)
			}
		case part < 1, part > 1 && part*max(windows, 1) > units, (part+1)*max(windows, 1) <= units:
			t.Fatalf("%d units for %d windows: %d each", units, windows, part)
		}
	})
}

func TestAWindowWithoutCreditLimitsNothing(t *testing.T) {
	var w Window
	for range 1000 {
		if !w.MaySend(1, 32) {
			t.Fatal("limited before there was a credit")
		}
		w.Sent(32)
	}
	w.Completed(1, 32, 0)
	if w.Credit(1) != 0 || !w.MaySend(1, 1<<20) {
		t.Error("a completion that says nothing has set a limit")
	}
	w.Completed(1, 32, 8)
	if w.Credit(1) != 8 || w.MaySend(1, 1) {
		t.Error("the first credit does not limit")
	}
}

func TestOneCommandMayAlwaysBeSent(t *testing.T) {
	var w Window
	w.Grant(0, 4)
	if !w.MaySend(0, 32) {
		t.Fatal("a command larger than the credit never goes")
	}
	w.Sent(32)
	if w.MaySend(0, 1) {
		t.Error("a second one went beside it")
	}
}

func TestCreditHalvesWhileNothingIsOutstanding(t *testing.T) {
	var w Window
	w.Grant(5, 64)
	for _, x := range []struct {
		at   int64
		want int
	}{{5 + HalfLifeNS - 1, 64}, {5 + HalfLifeNS, 32}, {5 + 2*HalfLifeNS - 1, 32}, {5 + 4*HalfLifeNS, 4},
		{5 + 100*HalfLifeNS, 1}} {
		if got := w.Credit(x.at); got != x.want {
			t.Errorf("%d ns after the grant: %d, want %d", x.at-5, got, x.want)
		}
	}
	now := int64(5 + 100*HalfLifeNS)
	w.Sent(1)
	if w.MaySend(now+10*HalfLifeNS, 1) {
		t.Error("more than the aged credit may go")
	}
	w.Completed(now+10*HalfLifeNS, 1, 64)
	if got := w.Credit(now + 10*HalfLifeNS); got != 64 {
		t.Errorf("a completion brings 64, the credit is %d", got)
	}
	w.Sent(1)
	if got := w.Credit(now + 1000*HalfLifeNS); got != 64 {
		t.Errorf("credit aged to %d although a command was outstanding", got)
	}
}

// TestAWindowAgreesWithAPlainModel sends every command that the window allows and completes commands in any order with
// any credits. The model has a list of the outstanding commands.
func TestAWindowAgreesWithAPlainModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var w Window
		var out []int
		now, credit, empty := int64(0), 0, int64(0)
		t.Repeat(map[string]func(*rapid.T){
			"time": func(t *rapid.T) { now += rapid.Int64Range(0, 5*HalfLifeNS).Draw(t, "ns") },
			"grant": func(t *rapid.T) {
				if c := rapid.IntRange(0, 100).Draw(t, "units"); c > 0 {
					credit = c
					if len(out) == 0 {
						empty = now
					}
					w.Grant(now, c)
				} else {
					w.Grant(now, 0)
				}
			},
			"send": func(t *rapid.T) {
				u := rapid.IntRange(1, 40).Draw(t, "units")
				sum := u
				for _, o := range out {
					sum += o
				}
				for ; len(out) == 0 && credit > 1 && now-empty >= HalfLifeNS; empty += HalfLifeNS {
					credit /= 2
				}
				want := len(out) == 0 || credit == 0 || sum <= credit
				if got := w.MaySend(now, u); got != want {
					t.Fatalf("may send %d beside %v with credit %d: %v", u, out, credit, got)
				}
				if want {
					w.Sent(u)
					out = append(out, u)
				}
			},
			"complete": func(t *rapid.T) {
				if len(out) == 0 {
					t.Skip("nothing outstanding")
				}
				i, c := rapid.IntRange(0, len(out)-1).Draw(t, "which"), rapid.IntRange(0, 100).Draw(t, "credit")
				w.Completed(now, out[i], c)
				out = append(out[:i], out[i+1:]...)
				if c > 0 {
					credit = c
				}
				if len(out) == 0 {
					empty = now
				}
			},
			"": func(t *rapid.T) {
				sum := 0
				for _, o := range out {
					sum += o
				}
				if commands, units := w.Outstanding(); commands != len(out) || units != sum {
					t.Fatalf("%d commands, %d units outstanding, want %v", commands, units, out)
				}
			},
		})
	})
}

func TestWindowsAllocateNothing(t *testing.T) {
	var w Window
	if n := testing.AllocsPerRun(100, func() {
		if w.MaySend(1, Units(8192)) {
			w.Sent(2)
		}
		w.Completed(2, 2, Part(100, 3))
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
