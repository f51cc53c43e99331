package bufpool

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"jbofd/internal/invariants"
)

func newPool(t testing.TB, cfg Config) *Pool {
	t.Helper()
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func mustGet(t testing.TB, p *Pool, a *Account, size int) Buf {
	t.Helper()
	b, ok := p.Get(a, size)
	if !ok {
		t.Fatalf("Get(%s, %d) refused: %+v", a.Name(), size, p.Stats())
	}
	return b
}

func TestConfigOutOfBoundsIsRefusedByName(t *testing.T) {
	for _, cfg := range []Config{
		{},
		{TotalBytes: 1 << 20},
		{TotalBytes: 64 << 20, MinBytes: 1000},
		{TotalBytes: 64 << 20, MinBytes: 512},
		{TotalBytes: 64 << 20, MaxBytes: 3 << 20},
		{TotalBytes: 64 << 20, RegionBytes: 1<<20 + 4096},
		{TotalBytes: 8 << 20, RegionBytes: 16 << 20},
	} {
		if _, err := New(cfg); !errors.Is(err, ErrConfig) {
			t.Errorf("New(%+v) = %v, want ErrConfig", cfg, err)
		}
	}
}

func TestBuffersAreAlignedSizedAndWritable(t *testing.T) {
	p := newPool(t, Config{TotalBytes: 64 << 20})
	defer p.CloseTest(t)
	a := p.Account("a")
	for _, tc := range []struct{ size, block int }{
		{1, 4096}, {4096, 4096}, {4097, 8192}, {65536, 65536}, {65537, 131072}, {1 << 20, 1 << 20},
	} {
		b := mustGet(t, p, a, tc.size)
		if len(b.B) != tc.size || cap(b.B) != tc.block {
			t.Errorf("Get(%d): len %d cap %d, want cap %d", tc.size, len(b.B), cap(b.B), tc.block)
		}
		if addrOf(b.B)%4096 != 0 {
			t.Errorf("Get(%d): not page-aligned", tc.size)
		}
		b.B[0], b.B[tc.size-1] = 1, 2
		i, base, ok := p.RegionOf(b.B)
		if !ok || len(base) != DefaultRegionBytes {
			t.Errorf("RegionOf: %v, %d bytes", ok, len(base))
		}
		if got, ok := p.Region(i); !ok || addrOf(got) != addrOf(base) {
			t.Errorf("Region(%d) is not RegionOf's", i)
		}
		if off := OffsetIn(base, b.B); base[off] != b.B[0] {
			t.Errorf("OffsetIn = %d, wrong byte", off)
		}
		p.Put(b)
	}
	if _, _, ok := p.RegionOf(make([]byte, 4096)); ok {
		t.Error("RegionOf claims heap memory")
	}
	if _, _, ok := p.RegionOf(nil); ok {
		t.Error("RegionOf claims nil")
	}
}

func TestRegionsAreTakenOnlyAsNeededSmallLowLargeHigh(t *testing.T) {
	p := newPool(t, Config{TotalBytes: 64 << 20})
	defer p.CloseTest(t)
	a := p.Account("a")
	if s := p.Stats(); s.TakenBytes != 0 {
		t.Fatalf("%d bytes taken before the first Get", s.TakenBytes)
	}
	small, large := mustGet(t, p, a, 4096), mustGet(t, p, a, 1<<20)
	if i, _, _ := p.RegionOf(small.B); i != 0 {
		t.Errorf("small buffer in region %d, want 0", i)
	}
	if i, _, _ := p.RegionOf(large.B); i != int(p.Config().TotalBytes)/p.Config().RegionBytes-1 {
		t.Errorf("large buffer in region %d, want the last", i)
	}
	if s := p.Stats(); s.TakenBytes != 2*DefaultRegionBytes {
		t.Errorf("%d bytes taken, want two regions", s.TakenBytes)
	}
	p.Put(small)
	p.Put(large)
}

func TestDoublePutPanics(t *testing.T) {
	p := newPool(t, Config{TotalBytes: 8 << 20})
	a := p.Account("a")
	b := mustGet(t, p, a, 4096)
	p.Put(b)
	c := mustGet(t, p, a, 4096) // the same memory again: the old Buf is still stale
	defer func() {
		if recover() == nil {
			t.Error("second Put of one buffer did not panic")
		}
		p.Put(c)
		p.CloseTest(t)
	}()
	p.Put(b)
}

func TestReleasedMemoryIsPoisonedInTestBuilds(t *testing.T) {
	if !invariants.Enabled {
		t.Skip("needs -tags invariants or -race")
	}
	p := newPool(t, Config{TotalBytes: 8 << 20})
	defer p.CloseTest(t)
	b := mustGet(t, p, p.Account("a"), 4096)
	clear(b.B)
	p.Put(b)
	for i, v := range b.B {
		if v != poisonByte {
			t.Fatalf("byte %d is %#x after Put", i, v)
		}
	}
}

// fill takes buffers until the pool refuses one.
func fill(p *Pool, a *Account, size int) (held []Buf) {
	for {
		b, ok := p.Get(a, size)
		if !ok {
			return held
		}
		held = append(held, b)
	}
}

func putAll(p *Pool, bufs []Buf) {
	for _, b := range bufs {
		p.Put(b)
	}
}

func TestGreedyAccountsLeaveAFairShareToANewcomer(t *testing.T) {
	const total = 32 << 20
	p := newPool(t, Config{TotalBytes: total})
	defer p.CloseTest(t)
	var held []Buf
	for n := 1; n <= 3; n++ {
		a := p.Account(string(rune('a' + n)))
		held = append(held, fill(p, a, 64<<10)...)
		// The newcomer gets half of what was free. The rest is never below the share that each of the greedy accounts
		// would get if all had come at once.
		free := total - p.Stats().InUseBytes
		if want := int64(total) >> n; free != want {
			t.Errorf("%d greedy accounts: %d bytes free, want %d", n, free, want)
		}
	}
	putAll(p, held)

	// N greedy accounts in lockstep hold 1/(N+1) each and leave as much free.
	const n = 3
	accts := [n]*Account{p.Account("x"), p.Account("y"), p.Account("z")}
	held = held[:0]
	for progress := true; progress; {
		progress = false
		for _, a := range accts {
			if b, ok := p.Get(a, 64<<10); ok {
				held = append(held, b)
				progress = true
			}
		}
	}
	if free := total - p.Stats().InUseBytes; free < total/(n+1) {
		t.Errorf("%d greedy accounts leave %d bytes, want %d", n, free, total/(n+1))
	}
	putAll(p, held)
}

// queue is a test's waiter with a name.
func queue(p *Pool, a *Account, size int, woken *[]string, name string) *Waiter {
	w := &Waiter{Size: size}
	w.Wake = func() { *woken = append(*woken, name) }
	if p.GetOrWait(a, w) {
		panic("test expects " + name + " to wait")
	}
	return w
}

func TestWaitersAreServedFIFOPerAccountAndInTurnsOverAccounts(t *testing.T) {
	p := newPool(t, Config{TotalBytes: 4 << 20})
	a, b, c := p.Account("a"), p.Account("b"), p.Account("c")
	var held []Buf
	held = append(held, mustGet(t, p, a, 1<<20), mustGet(t, p, a, 1<<20))
	heldB := mustGet(t, p, b, 1<<20)
	heldC := mustGet(t, p, c, 1<<20) // first buffer of an account: always entitled
	var woken []string
	ws := []*Waiter{
		queue(p, a, 1<<20, &woken, "a1"),
		queue(p, a, 1<<20, &woken, "a2"),
		queue(p, b, 4096, &woken, "b1"),
		queue(p, b, 4096, &woken, "b2"),
	}
	if _, ok := p.Get(b, 4096); ok {
		t.Error("Get overtook its own account's waiters")
	}
	p.Put(heldB) // b: entitled to its first again, in 4 KiB pieces
	if len(woken) != 2 || woken[0] != "b1" || woken[1] != "b2" {
		t.Fatalf("woken %v, want b1 b2", woken)
	}
	p.Put(heldC)
	p.Put(ws[2].Buf)
	p.Put(ws[3].Buf)
	putAll(p, held)
	if len(woken) != 4 || woken[2] != "a1" || woken[3] != "a2" {
		t.Fatalf("woken %v, want then a1 a2", woken)
	}
	p.Put(ws[0].Buf)
	p.Put(ws[1].Buf)
	p.CloseTest(t)
}

func TestCancelRemovesAWaiterOrReportsTheHandover(t *testing.T) {
	p := newPool(t, Config{TotalBytes: 4 << 20})
	a := p.Account("a")
	h1, h2 := mustGet(t, p, a, 1<<20), mustGet(t, p, a, 1<<20)
	var woken []string
	w1 := queue(p, a, 1<<20, &woken, "w1")
	w2 := queue(p, a, 1<<20, &woken, "w2")
	w3 := queue(p, a, 1<<20, &woken, "w3")
	if !p.Cancel(w1) || !p.Cancel(w3) {
		t.Fatal("Cancel of a waiting waiter")
	}
	p.Put(h1)
	if len(woken) != 1 || woken[0] != "w2" {
		t.Fatalf("woken %v, want w2", woken)
	}
	if p.Cancel(w2) {
		t.Fatal("Cancel of a served waiter claims to have removed it")
	}
	p.Put(w2.Buf)
	p.Put(h2)
	p.CloseTest(t)
}

func TestCancelOfALargeWaiterServesTheOnesItHeldBack(t *testing.T) {
	p := newPool(t, Config{TotalBytes: 4 << 20, RegionBytes: 4 << 20})
	a, b := p.Account("a"), p.Account("b")
	small := fill(p, a, 64<<10)                               // blocks 0 and 1
	small = append(small, fill(p, p.Account("c"), 64<<10)...) // block 2
	small = append(small, fill(p, p.Account("d"), 64<<10)...) // half of block 3
	var woken []string
	large := queue(p, b, 1<<20, &woken, "large")             // entitled if the 1 MiB were whole
	w := queue(p, p.Account("e"), 4096, &woken, "held back") // though 512 KiB are free
	if !p.Cancel(large) {
		t.Fatal("Cancel")
	}
	if len(woken) != 1 || woken[0] != "held back" {
		t.Fatalf("woken %v", woken)
	}
	p.Put(w.Buf)
	putAll(p, small)
	p.CloseTest(t)
}

// TestLargeWaiterIsNotStarvedBySmallTraffic keeps every block fragmented by small
// buffers that are replaced one by one, and expects the waiter to be served
// before everything was replaced many times over.
func TestLargeWaiterIsNotStarvedBySmallTraffic(t *testing.T) {
	p := newPool(t, Config{TotalBytes: 16 << 20, RegionBytes: 4 << 20})
	small, large := p.Account("small"), p.Account("large")
	held := fill(p, small, 4096) // half of the pool
	// Keep every 16th buffer only: half of all 1 MiB blocks are in pieces. Then fill
	// the other half with 32 KiB pieces of more accounts.
	var others []Buf
	for i := range 6 {
		others = append(others, fill(p, p.Account(string(rune('A'+i))), 32<<10)...)
	}
	for i := 0; p.whole > 0; i++ { // the reserve
		others = append(others, mustGet(t, p, p.Account(fmt.Sprint("newcomer ", i)), 1<<20))
	}
	served := false
	w := &Waiter{Size: 1 << 20, Wake: func() { served = true }}
	if p.GetOrWait(large, w) {
		t.Fatal("test expects no whole block")
	}
	next := 0
	for n := 0; !served; n++ {
		if n > 4*len(held) {
			t.Fatalf("not served after %d replacements", n)
		}
		p.Put(held[next])
		if served {
			held[next] = Buf{}
			break
		}
		b, ok := p.Get(small, 4096)
		if !ok {
			b = Buf{}
		}
		held[next] = b
		next = (next + 1) % len(held)
	}
	p.Put(w.Buf)
	putAll(p, held)
	putAll(p, others)
	p.CloseTest(t)
}

// TestPoolAgreesWithAModel runs random gets, waits, cancels and puts and checks after each that buffers are disjoint,
// sums agree, and no account waits that is entitled to a whole free block.
func TestPoolAgreesWithAModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, err := New(Config{TotalBytes: 2 << 20, RegionBytes: 512 << 10, MaxBytes: 256 << 10})
		if err != nil {
			t.Fatal(err)
		}
		accts := []*Account{p.Account("a"), p.Account("b"), p.AccountFrom("c", "src"), p.AccountFrom("d", "src"),
			p.AccountFrom("e", "src")}
		var held []Buf
		var waiting []*Waiter
		add := func(b Buf) {
			for _, h := range held {
				lo, hi := addrOf(b.B), addrOf(b.B)+uintptr(cap(b.B))
				if l := addrOf(h.B); lo < l+uintptr(cap(h.B)) && l < hi {
					t.Fatalf("buffers overlap")
				}
			}
			held = append(held, b)
		}
		size := rapid.IntRange(1, 256<<10)
		t.Repeat(map[string]func(*rapid.T){
			"get": func(t *rapid.T) {
				if b, ok := p.Get(rapid.SampledFrom(accts).Draw(t, "acct"), size.Draw(t, "size")); ok {
					add(b)
				}
			},
			"wait": func(t *rapid.T) {
				w := &Waiter{Size: size.Draw(t, "size")}
				w.Wake = func() {
					add(w.Buf)
					for i := range waiting {
						if waiting[i] == w {
							waiting = append(waiting[:i], waiting[i+1:]...)
							return
						}
					}
					t.Fatalf("a waiter woken that does not wait")
				}
				if p.GetOrWait(rapid.SampledFrom(accts).Draw(t, "acct"), w) {
					add(w.Buf)
				} else {
					waiting = append(waiting, w)
				}
			},
			"cancel": func(t *rapid.T) {
				if len(waiting) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(waiting)-1).Draw(t, "i")
				w := waiting[i]
				waiting = append(waiting[:i], waiting[i+1:]...)
				if !p.Cancel(w) {
					t.Fatalf("Cancel of a waiting waiter failed")
				}
			},
			"put": func(t *rapid.T) {
				if len(held) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(held)-1).Draw(t, "i")
				b := held[i]
				held = append(held[:i], held[i+1:]...)
				p.Put(b)
			},
			"": func(t *rapid.T) {
				var inUse int64
				for _, b := range held {
					inUse += int64(cap(b.B))
				}
				s := p.Stats()
				var free int64
				for i := range p.regions {
					free += p.regions[i].freeBytes
				}
				if s.InUseBytes != inUse || s.InUseBytes+free != s.TotalBytes {
					t.Fatalf("in use %d, model %d, free %d of %d", s.InUseBytes, inUse, free, s.TotalBytes)
				}
				checkWaiting(t, p, false)
				if len(held) == 0 && len(waiting) != 0 {
					t.Fatalf("%d wait at an empty pool", len(waiting))
				}
			},
		})
		for len(held) > 0 {
			b := held[len(held)-1]
			held = held[:len(held)-1]
			p.Put(b)
		}
		if len(waiting) != 0 {
			t.Fatalf("%d waiters never served", len(waiting))
		}
		for i := range p.regions {
			if int(p.regions[i].count[p.orders-1]) != p.cfg.RegionBytes/p.cfg.MaxBytes {
				t.Fatalf("region %d did not merge back to whole blocks", i)
			}
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestConcurrentGreedWaitsAndEndsWithoutLeaks(t *testing.T) {
	p := newPool(t, Config{TotalBytes: 8 << 20})
	defer p.CloseTest(t)
	var wg sync.WaitGroup
	for g := range 4 {
		a := p.Account(string(rune('a' + g)))
		wg.Go(func() {
			ready := make(chan struct{}, 1)
			w := &Waiter{Wake: func() { ready <- struct{}{} }}
			for i := range 300 {
				w.Size = 1 + (i*7919)%(1<<20)
				if !p.GetOrWait(a, w) {
					<-ready
				}
				w.Buf.B[0] = byte(g)
				p.Put(w.Buf)
			}
		})
	}
	wg.Wait()
}

func TestAccountsVanishWhenClosedAndEmpty(t *testing.T) {
	p := newPool(t, Config{TotalBytes: 8 << 20})
	defer p.CloseTest(t)
	a, again := p.Account("a"), p.Account("a")
	if a != again {
		t.Fatal("two accounts of one name")
	}
	b := mustGet(t, p, a, 4096)
	a.Close()
	again.Close()
	if n := len(p.AppendAccounts(nil)); n != 1 {
		t.Fatalf("%d accounts while a buffer is out, want 1", n)
	}
	if p.Close() == nil {
		t.Fatal("Close unmapped memory in use")
	}
	p.Put(b)
	if n := len(p.AppendAccounts(nil)); n != 0 {
		t.Fatalf("%d accounts left, want 0", n)
	}
}

func TestGetPutAndWaitAllocateNothing(t *testing.T) {
	p := newPool(t, Config{TotalBytes: 8 << 20})
	defer p.CloseTest(t)
	a, b := p.Account("a"), p.Account("b")
	n := testing.AllocsPerRun(100, func() {
		x, _ := p.Get(a, 4096)
		y, _ := p.Get(b, 128<<10)
		p.RegionOf(x.B)
		p.Put(x)
		p.Put(y)
	})
	if n != 0 {
		t.Errorf("%v allocs per Get/Put, want 0", n)
	}
}

func BenchmarkGetPut4K(b *testing.B) {
	p := newPool(b, Config{TotalBytes: 256 << 20})
	a := p.Account("a")
	b.ReportAllocs()
	for b.Loop() {
		x, _ := p.Get(a, 4096)
		p.Put(x)
	}
}

func BenchmarkGetPut128KWith1000Out(b *testing.B) {
	p := newPool(b, Config{TotalBytes: 1 << 30})
	a := p.Account("a")
	for range 1000 {
		p.Get(a, 128<<10)
	}
	b.ReportAllocs()
	for b.Loop() {
		x, _ := p.Get(a, 128<<10)
		p.Put(x)
	}
}

func TestExtraBuffersAreOutsideOfBoundAndShares(t *testing.T) {
	p, err := New(Config{TotalBytes: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer p.CloseTest(t)
	a := p.Account("a")
	defer a.Close()
	whole := make([]Buf, 0, 4)
	for b, ok := p.Get(a, 1<<20); ok; b, ok = p.Get(a, 1<<20) {
		whole = append(whole, b)
	}
	used := p.Stats().InUseBytes
	b, ok := p.Extra(5000)
	if !ok || len(b.B) != 5000 || cap(b.B) != 8192 || !b.IsExtra() || b.IsZero() || addrOf(b.B)%4096 != 0 {
		t.Fatalf("%t: %d bytes of %d at %#x, extra %t", ok, len(b.B), cap(b.B), addrOf(b.B), b.IsExtra())
	}
	if _, _, ok := p.RegionOf(b.B); ok {
		t.Error("it lies in a region that devices register")
	}
	if got := p.Stats().InUseBytes; got != used {
		t.Errorf("%d bytes in use, %d before", got, used)
	}
	if p.Leaks() == nil || p.Close() == nil {
		t.Error("nobody misses it")
	}
	p.Put(b)
	for _, b := range whole {
		if b.IsExtra() {
			t.Error("one from within the bound says that it is extra")
		}
		p.Put(b)
	}
}

// TestCancelIsFastAmongManyWaiters: a host can have very many waiting commands.
func TestCancelIsFastAmongManyWaiters(t *testing.T) {
	const n = 200_000
	p := newPool(t, Config{TotalBytes: 4 << 20})
	defer p.CloseTest(t)
	a := p.Account("a")
	defer a.Close()
	var held []Buf
	for b, ok := p.Get(a, 1<<20); ok; b, ok = p.Get(a, 1<<20) {
		held = append(held, b)
	}
	waiters := make([]Waiter, n)
	for i := range waiters {
		waiters[i].Size = 1 << 20
		waiters[i].Wake = func() { t.Error("woken although everybody cancelled") }
		if p.GetOrWait(a, &waiters[i]) {
			t.Fatal("there was one more")
		}
	}
	for i := range n { // from the middle, outwards: a search from either end takes minutes
		k := n/2 + i/2
		if i%2 == 1 {
			k = n/2 - 1 - i/2
		}
		if !p.Cancel(&waiters[k]) {
			t.Fatalf("waiter %d was not there", k)
		}
	}
	for _, b := range held {
		p.Put(b)
	}
}
