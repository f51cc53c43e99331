package bufpool

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// TestWaitersAreServedOnceNothingIsHeld, whoever waits and for however much. It does not matter that a region is closed
// for a large block, or that all accounts are empty-handed at once and ask for more than there is.
func TestWaitersAreServedOnceNothingIsHeld(t *testing.T) {
	for _, seed := range []uint64{1, 2, 3, uint64(time.Now().UnixNano())} {
		for _, total := range []int64{4 << 20, 5 << 20, 16 << 20} {
			settles(t, rand.New(rand.NewPCG(seed, uint64(total))), total)
			if t.Failed() {
				t.Fatalf("seed %d, pool of %d bytes", seed, total)
			}
		}
	}
}

func settles(t *testing.T, rng *rand.Rand, total int64) {
	p, err := New(Config{TotalBytes: total})
	if err != nil {
		t.Fatal(err)
	}
	var accounts []*Account
	for i := range 12 {
		from := ""
		if i < 8 {
			from = fmt.Sprint("source ", i%3)
		}
		accounts = append(accounts, p.AccountFrom(fmt.Sprint("account ", i), from))
	}
	var held []*Buf
	waiting := map[*Waiter]bool{}
	drop := func(i int) {
		b := held[i]
		held[i] = held[len(held)-1]
		held = held[:len(held)-1]
		p.Put(*b)
	}
	for step := range 3000 {
		switch k := rng.IntN(10); {
		case k < 5 && len(waiting) < 60:
			w := &Waiter{Size: 1 << (12 + rng.IntN(9))}
			w.Wake = func() {
				delete(waiting, w)
				held = append(held, &w.Buf)
			}
			if p.GetOrWait(accounts[rng.IntN(len(accounts))], w) {
				held = append(held, &w.Buf)
			} else {
				waiting[w] = true
			}
		case k < 6:
			for w := range waiting {
				if p.Cancel(w) {
					delete(waiting, w)
				}
				break
			}
		case len(held) > 0:
			drop(rng.IntN(len(held)))
		}
		if rng.IntN(200) == 0 {
			for len(held) > 0 {
				drop(len(held) - 1)
			}
			if len(waiting) > 0 {
				t.Errorf("step %d: %d wait although nothing is held", step, len(waiting))
				return
			}
			for _, a := range accounts { // all of them empty-handed, and all at once
				w := &Waiter{Size: 1 << 20}
				w.Wake = func() {
					delete(waiting, w)
					held = append(held, &w.Buf)
				}
				if p.GetOrWait(a, w) {
					held = append(held, &w.Buf)
				} else {
					waiting[w] = true
				}
			}
			if len(held) == 0 {
				t.Errorf("step %d: of accounts that hold nothing none gets a buffer", step)
				return
			}
		}
	}
	for len(held) > 0 {
		drop(len(held) - 1)
	}
	for _, a := range accounts {
		a.Close()
	}
	if len(waiting) > 0 {
		t.Errorf("%d wait in the end", len(waiting))
		return
	}
	p.CloseTest(t)
}
