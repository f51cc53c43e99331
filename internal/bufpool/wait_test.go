package bufpool

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// checkWaiting checks that every account that waits is in its heap, that heaps are in order, that counts of whole
// blocks agree, and, if memory has just been granted, that no account waits that could be served. A Get from the
// reserve leaves pieces of a block that others may have; they get them with the next Put, which is that of this buffer
// at the latest.
func checkWaiting(t interface{ Fatalf(string, ...any) }, p *Pool, granted bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	whole := 0
	for i := range p.regions {
		whole += int(p.regions[i].count[p.orders-1])
	}
	if whole != p.whole {
		t.Fatalf("%d blocks are whole, %d are counted", whole, p.whole)
	}
	sources := map[*source]int64{}
	waiting := 0
	for _, a := range p.accounts {
		sources[a.src] += a.inUse
		if (a.first != nil) != (a.order >= 0) {
			t.Fatalf("account %s: first waiter %v, order %d", a.name, a.first, a.order)
		}
		if a.order < 0 {
			continue
		}
		waiting++
		s := a.src
		if p.orderOf(a.first.Size) != a.order || s.waiting[a.order][a.at] != a ||
			p.waiting[a.order][s.place[a.order]] != s {
			t.Fatalf("account %s is not where it says", a.name)
		}
		if granted && p.fits(a) {
			t.Fatalf("account %s waits for %d bytes that are free", a.name, a.first.Size)
		}
	}
	for s, n := range sources {
		if s.inUse != n {
			t.Fatalf("source %q holds %d, its accounts %d", s.name, s.inUse, n)
		}
	}
	for o := range p.orders {
		for i, s := range p.waiting[o] {
			if i > 0 && p.sourceRules[o].before(s, p.waiting[o][(i-1)/2]) {
				t.Fatalf("sources of order %d are not in order", o)
			}
			for k, a := range s.waiting[o] {
				waiting--
				if k > 0 && p.servedBefore(a, s.waiting[o][(k-1)/2]) {
					t.Fatalf("accounts of order %d are not in order", o)
				}
			}
		}
	}
	if waiting != 0 {
		t.Fatalf("%d accounts more wait than heaps hold", waiting)
	}
}

var seedFlag = flag.Uint64("seed", 0, "seed of random tests; 0: a new one")

// Many accounts with few sizes wait, so that heaps are deep, while accounts get and return buffers.
func TestHeapsOfAccountsThatWaitStayInOrder(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 80 {
		p := newPool(t, Config{TotalBytes: 4 << 20, RegionBytes: 1 << 20, MaxBytes: 256 << 10})
		accts := make([]*Account, 60)
		for i := range accts {
			accts[i] = p.AccountFrom(fmt.Sprint("account ", i), []string{"", "x", "y"}[i%3])
		}
		var held []Buf
		waiting := map[*Waiter]bool{}
		for range 600 {
			granted := false
			a, size := accts[rng.IntN(len(accts))], []int{4 << 10, 64 << 10, 256 << 10}[rng.IntN(3)]
			switch k := rng.IntN(20); {
			case k < 7:
				if b, ok := p.Get(a, size); ok {
					held = append(held, b)
				}
			case k < 12:
				w := &Waiter{Size: size}
				w.Wake = func() {
					held = append(held, w.Buf)
					delete(waiting, w)
				}
				if p.GetOrWait(a, w) {
					held = append(held, w.Buf)
				} else {
					waiting[w] = true
				}
			case k < 14:
				for w := range waiting {
					delete(waiting, w)
					p.Cancel(w)
					granted = true
					break
				}
			case len(held) > 0:
				i := rng.IntN(len(held))
				b := held[i]
				held[i] = held[len(held)-1]
				held = held[:len(held)-1]
				p.Put(b)
				granted = true
			}
			checkWaiting(t, p, granted)
		}
		for len(held) > 0 {
			b := held[len(held)-1]
			held = held[:len(held)-1]
			p.Put(b)
		}
		if len(waiting) > 0 {
			t.Fatalf("%d wait at an empty pool", len(waiting))
		}
		p.CloseTest(t)
	}
}

// However many accounts have filled the pool, a newcomer gets its first buffer at once, of any size.
func TestAFirstBufferIsAlwaysAvailable(t *testing.T) {
	for _, size := range []int{4 << 10, 48 << 10, 1 << 20} {
		for accounts := 1; accounts <= 200; accounts *= 3 {
			p := newPool(t, Config{TotalBytes: 32 << 20})
			var held []Buf
			for range 40 {
				for i := range accounts {
					a := p.AccountFrom(fmt.Sprint("invented ", i), "evil")
					for range 3 {
						if b, ok := p.Get(a, size); ok {
							held = append(held, b)
						}
					}
				}
			}
			for i := range 2 {
				b, ok := p.Get(p.AccountFrom(fmt.Sprint("newcomer ", i), fmt.Sprint("address ", i)), 1<<20)
				if !ok {
					t.Fatalf("%d accounts with buffers of %d bytes left no MiB to newcomer %d; %d bytes are free",
						accounts, size, i, p.Stats().TotalBytes-p.Stats().InUseBytes)
				}
				held = append(held, b)
			}
			putAll(p, held)
			p.CloseTest(t)
		}
	}
}

// Among accounts that wait for the same size, the one that holds least is served first.
func TestTheAccountThatHoldsLeastIsServedFirst(t *testing.T) {
	p := newPool(t, Config{TotalBytes: 8 << 20})
	var held, rest []Buf
	for i, name := range []string{"nothing", "little", "more", "much"} {
		for range i {
			held = append(held, mustGet(t, p, p.Account(name), 64<<10))
		}
	}
	rest = fill(p, p.Account("rest"), 1<<20)
	for i := 0; p.whole > 0; i++ {
		rest = append(rest, mustGet(t, p, p.Account(fmt.Sprint("rest ", i)), 1<<20))
	}
	held = append(held, fill(p, p.Account("pieces"), 64<<10)...)
	for i := 0; ; i++ {
		b, ok := p.Get(p.Account(fmt.Sprint("piece ", i)), 64<<10)
		if !ok {
			break
		}
		held = append(held, b)
	}
	var woken []string
	var waiters []*Waiter
	for _, name := range []string{"much", "little", "nothing", "more"} {
		waiters = append(waiters, queue(p, p.Account(name), 64<<10, &woken, name))
	}
	p.Put(rest[0])
	if got := fmt.Sprint(woken); got != "[nothing little more much]" {
		t.Errorf("served %s", got)
	}
	for _, w := range waiters {
		p.Put(w.Buf)
	}
	putAll(p, rest[1:])
	putAll(p, held)
	p.CloseTest(t)
}

// Sizes that daemons may be configured with: 16 MiB is the largest transfer.
func TestEveryMaximumTransferSizeHasAValidPool(t *testing.T) {
	for largest := 1 << 20; largest <= 16<<20; largest *= 2 {
		for _, total := range []int{4, 5, 8, 100} {
			p, err := New(Config{TotalBytes: int64(total) * int64(largest), MaxBytes: largest})
			if err != nil {
				t.Errorf("%d buffers of %d bytes: %v", total, largest, err)
				continue
			}
			b, ok := p.Get(p.Account("a"), largest)
			if !ok {
				t.Errorf("%d buffers of %d bytes: not one can be had", total, largest)
			}
			p.Put(b)
			p.CloseTest(t)
		}
	}
}

// With a thousand waiting accounts, a Put that can serve none of them does not visit each.
func BenchmarkPutWhileAccountsWait(b *testing.B) {
	for _, accounts := range []int{1, 1000} {
		b.Run(fmt.Sprint(accounts), func(b *testing.B) {
			p := newPool(b, Config{TotalBytes: 32 << 20})
			busy := p.Account("busy")
			pieces := fill(p, busy, 4096)
			for i := 0; p.whole > 0; i++ {
				mustGet(b, p, p.Account(fmt.Sprint("rest ", i)), 1<<20)
			}
			for i := range pieces { // most is free, but no MiB is whole
				if i%8 != 0 {
					p.Put(pieces[i])
				}
			}
			waiters := make([]Waiter, accounts)
			for i := range waiters {
				waiters[i].Size, waiters[i].Wake = 1<<20, func() { b.Error("served") }
				if p.GetOrWait(p.AccountFrom(fmt.Sprint("waits ", i), fmt.Sprint("address ", i)), &waiters[i]) {
					b.Fatal("there is memory")
				}
			}
			p.gatherFor = nil // else its region is closed
			b.ReportAllocs()
			for b.Loop() {
				buf, ok := p.Get(busy, 4096)
				if !ok {
					b.Fatal("no memory")
				}
				p.Put(buf)
			}
		})
	}
}
