package flowctl

import (
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of random tests")

// rig is a Machine with SSDs that have a link each.
type rig struct {
	*Machine
	t    testing.TB
	ssds []*SSD
	now  int64
}

// newRig makes a rig of SSDs with these credits.
func newRig(t testing.TB, cfg Config, credits ...int) *rig {
	r := &rig{Machine: New(cfg), t: t, now: 1}
	for _, c := range credits {
		s := r.NewSSD(r.NewLink(1 << 20))
		r.Grant(r.now, s, c)
		r.ssds = append(r.ssds, s)
	}
	return r
}

// request makes a request to SSDs, by number.
func (g *rig) request(tenant Tenant, write bool, units int, ssds ...int) *Request {
	r := &Request{Tenant: tenant, Write: write, Units: units, N: len(ssds)}
	for i, s := range ssds {
		r.Targets[i] = g.ssds[s]
	}
	return r
}

// add adds requests, and returns those that are to be sent.
func (g *rig) add(rs ...*Request) []*Request {
	for _, r := range rs {
		g.Add(g.now, r)
	}
	return g.next()
}

func (g *rig) next() (sent []*Request) {
	for r := g.Next(g.now); r != nil; r = g.Next(g.now) {
		sent = append(sent, r)
	}
	return sent
}

func (g *rig) end(r *Request, credit int) []*Request {
	g.Ended(g.now, r, credit)
	return g.next()
}

// endAll ends the requests that were sent, and all that are sent then, and wants to have seen so many.
func (g *rig) endAll(sent []*Request, want int) {
	g.t.Helper()
	for i := 0; i < len(sent); i++ {
		sent = append(sent, g.end(sent[i], 0)...)
	}
	if len(sent) != want {
		g.t.Errorf("%d requests were sent in the end, want %d", len(sent), want)
	}
}

func (g *rig) want(what string, sent []*Request, want ...*Request) {
	g.t.Helper()
	if len(sent) != len(want) {
		g.t.Fatalf("%s: %d requests are sent, want %d", what, len(sent), len(want))
	}
	for i := range want {
		if sent[i] != want[i] {
			g.t.Fatalf("%s: request %d is another one", what, i)
		}
	}
}

// TestARequestIsSentIfItFitsTheTokensOrNothingIsOutstanding: lines 5 to 13 of Algorithm 1.
func TestARequestIsSentIfItFitsTheTokensOrNothingIsOutstanding(t *testing.T) {
	g := newRig(t, Config{}, 4)
	a, b, c := g.request(0, false, 9, 0), g.request(0, false, 3, 0), g.request(0, false, 1, 0)
	g.want("nothing is outstanding", g.add(a), a)
	g.want("more than the credit is outstanding", g.add(b, c))
	if now, ever := g.Waiting(); now != 2 || ever != 2 {
		t.Errorf("%d wait, %d have", now, ever)
	}
	if r, u := g.ssds[0].Outstanding(); r != 1 || u != 9 {
		t.Errorf("%d requests of %d units are outstanding", r, u)
	}
	g.want("both fit", g.end(a, 4), b, c)
	d := g.request(0, false, 1, 0)
	g.want("all tokens are taken", g.add(d))
	g.want("a greater credit has come", g.end(c, 5), d)
	e, f := g.request(0, false, 2, 0), g.request(0, false, 1, 0)
	g.want("nobody overtakes", g.add(e, f))
	g.want("the first one that waits does not fit a smaller credit", g.end(b, 2))
	g.want("nothing is outstanding", g.end(d, 0), e)
	g.want("the rest", g.end(e, 0), f)
}

// TestWithoutACreditNothingWaits, and with NoTokens.
func TestWithoutACreditNothingWaits(t *testing.T) {
	for _, cfg := range []Config{{}, {NoTokens: true}} {
		g := newRig(t, cfg, 0)
		if cfg.NoTokens {
			g.Grant(g.now, g.ssds[0], 1)
		}
		for range 100 {
			r := g.request(0, false, 8, 0)
			g.want("a read", g.add(r), r)
		}
	}
}

// TestReadsKeepAllSSDsBusyInProportionToTheirCredit, also while there is more than enough of it: the SSD with the
// greatest credit does not get everything.
func TestReadsKeepAllSSDsBusyInProportionToTheirCredit(t *testing.T) {
	g := newRig(t, Config{}, 1000, 500, 250)
	count := make([]int, 3)
	for range 70 {
		r := g.request(0, false, 1, 0, 1, 2)
		g.want("a read", g.add(r), r)
		count[r.SentTo()]++
	}
	for i, want := range []int{40, 20, 10} {
		if count[i] < want-2 || count[i] > want+2 {
			t.Errorf("the SSDs have got %v", count)
		}
	}
}

func TestAReadGoesWhereTheGreatestPartOfTheCreditIsLeft(t *testing.T) {
	g := newRig(t, Config{}, 4, 8, 6)
	count := make([]int, 3)
	for range 18 {
		r := g.request(0, false, 1, 0, 1, 2)
		g.want("a read", g.add(r), r)
		count[r.SentTo()]++
	}
	if count[0] != 4 || count[1] != 8 || count[2] != 6 {
		t.Errorf("the SSDs have got %v", count)
	}
	r := g.request(0, false, 1, 0, 1, 2)
	g.want("all are full", g.add(r))
	one := g.request(0, false, 1, 1)
	g.want("all are full", g.add(one))
	g.Grant(g.now, g.ssds[2], 7)
	g.want("one has room", g.next(), r)
	if r.SentTo() != 2 {
		t.Errorf("it has gone to SSD %d", r.SentTo())
	}
	// It does not wait at the others any more.
	g.Grant(g.now, g.ssds[1], 9)
	g.want("another has room", g.next(), one)
}

func TestWithoutTokensReadsTakeTurns(t *testing.T) {
	g := newRig(t, Config{NoTokens: true, Choice: InTurn}, 100, 1, 1)
	count := make([]int, 3)
	for range 30 {
		r := g.request(0, false, 1, 0, 1, 2)
		g.want("a read", g.add(r), r)
		count[r.SentTo()]++
	}
	if count[0] != 10 || count[1] != 10 || count[2] != 10 {
		t.Errorf("the SSDs have got %v", count)
	}
}

// TestAWriteTakesTheTokensOfAllReplicas, and waits for the one that has none.
func TestAWriteTakesTheTokensOfAllReplicas(t *testing.T) {
	g := newRig(t, Config{}, 10, 10, 2)
	busy := g.request(0, false, 2, 2)
	g.want("a read", g.add(busy), busy)
	w := g.request(0, true, 1, 1, 2, 0)
	g.want("the last SSD is full", g.add(w))
	for i, want := range []int{1, 1, 2} {
		if _, units := g.ssds[i].Outstanding(); units != want {
			t.Errorf("%d units of SSD %d are taken, want %d", units, i, want)
		}
	}
	g.want("it has room", g.end(busy, 0), w)
	if w.SentTo() != 0 || w.Targets[w.SentTo()] != g.ssds[1] {
		t.Error("it has not gone to the ChainHead")
	}
	// The credit is that of the SSD of the ChainHead.
	g.want("the end", g.end(w, 3))
	for i, want := range []int{10, 3, 2} {
		if units, _ := g.ssds[i].Tokens(g.now); units != want {
			t.Errorf("SSD %d has %d tokens, want %d", i, units, want)
		}
	}
	twice := g.request(0, true, 2, 2, 2)
	g.want("an SSD has two replicas", g.add(twice), twice)
	g.want("the end", g.end(twice, 0))
	if n, units := g.ssds[2].Outstanding(); n != 0 || units != 0 {
		t.Errorf("%d requests of %d units are left", n, units)
	}
}

// TestReadsDoNotStarveAWrite although they take each token as soon as it is there.
func TestReadsDoNotStarveAWrite(t *testing.T) {
	g := newRig(t, Config{}, 1, 1, 1)
	var out []*Request
	for range 30 {
		out = append(out, g.add(g.request(0, false, 1, 0, 1, 2))...)
	}
	w := g.request(0, true, 1, 2, 1, 0)
	out = append(out, g.add(w)...)
	for round := 0; ; round++ {
		if round > 100 {
			t.Fatal("the write still waits")
		}
		r := out[0]
		if r == w {
			return
		}
		// For each read that ends there is another one.
		out = append(out[1:], g.end(r, 0)...)
		out = append(out, g.add(g.request(0, false, 1, 0, 1, 2))...)
	}
}

// TestATenantThatFloodsDoesNotStarveAnother: what is served is divided by weight, at an SSD and at a link.
func TestATenantThatFloodsDoesNotStarveAnother(t *testing.T) {
	for _, link := range []bool{false, true} {
		g := newRig(t, Config{}, 8)
		if link {
			g = newRig(t, Config{}, 0)
			g.SetDepth(g.ssds[0].to, 8)
		}
		heavy := g.AddTenant(3)
		var out []*Request
		for range 2000 {
			out = append(out, g.add(g.request(0, false, 1, 0))...)
		}
		// A single request of another tenant comes soon, whatever waits.
		one := g.request(heavy, false, 1, 0)
		g.want("it waits, too", g.add(one))
		served := 0
		for i := 0; out[i] != one; i++ {
			out = append(out, g.end(out[i], 0)...)
			served++
		}
		if served > 2*quantum+8 {
			t.Errorf("link %t: %d requests of the other tenant were served before", link, served)
		}
		// Both have enough to do: the shares are those of the weights.
		for range 2000 {
			g.add(g.request(heavy, false, 1, 0))
		}
		shares := [2]int{}
		for i := served + 1; len(out)-i > 0 && shares[0]+shares[1] < 1600; i++ {
			for _, r := range g.end(out[i], 0) {
				shares[r.Tenant]++
				out = append(out, r)
			}
		}
		if shares[0] < 380 || shares[0] > 420 {
			t.Errorf("link %t: the shares are %v, want 1:3", link, shares)
		}
	}
}

// TestALargeRequestIsPaidFor: shares are in units, not in requests.
func TestALargeRequestIsPaidFor(t *testing.T) {
	g := newRig(t, Config{}, 64)
	other := g.AddTenant(1)
	var out []*Request
	for range 500 {
		out = append(out, g.add(g.request(0, false, 32, 0), g.request(other, false, 1, 0))...)
		out = append(out, g.add(g.request(other, false, 1, 0))...)
	}
	units := [2]int{}
	for i := 0; units[1] < 600; i++ {
		for _, r := range g.end(out[i], 0) {
			units[r.Tenant] += r.Units
			out = append(out, r)
		}
	}
	if units[0] < 400 || units[0] > 800 {
		t.Errorf("the shares are %v units, want 1:1", units)
	}
}

// TestRequestsEndWhateverHappens: random requests, ends, credits and removals. Nothing is beyond a credit but a request
// that is alone; something is outstanding as long as something waits; in the end nothing is held.
func TestRequestsEndWhateverHappens(t *testing.T) {
	t.Logf("-seed %d", *seed)
	for round := range 60 {
		rng := rand.New(rand.NewPCG(*seed, uint64(round)))
		g := newRig(t, Config{}, make([]int, 2+rng.IntN(5))...)
		credits := make([]int, len(g.ssds))
		for i := range g.ssds {
			credits[i] = 1 + rng.IntN(6)
			g.Grant(g.now, g.ssds[i], credits[i])
			g.SetDepth(g.ssds[i].to, 1+rng.IntN(4))
		}
		for range 3 {
			g.AddTenant(1 + rng.IntN(3))
		}
		out, waiting := map[*Request]bool{}, map[*Request]bool{}
		note := func(sent []*Request) {
			for _, r := range sent {
				if !waiting[r] {
					t.Fatal("a request is sent that was not added")
				}
				delete(waiting, r)
				out[r] = true
			}
		}
		anyOf := func(m map[*Request]bool) *Request { // the order of a map is random, and need not be repeated
			for r := range m {
				return r
			}
			return nil
		}
		for step := range 3000 {
			g.now += int64(rng.IntN(1000))
			switch k := rng.IntN(10); {
			case k < 4 && step < 2500:
				var ssds []int
				for _, s := range rng.Perm(len(g.ssds))[:1+rng.IntN(len(g.ssds))] {
					ssds = append(ssds, s)
				}
				r := g.request(Tenant(rng.IntN(4)), rng.IntN(2) == 0, 1+rng.IntN(4), ssds...)
				waiting[r] = true
				note(g.add(r))
			case k == 4 && len(waiting) > 0:
				r := anyOf(waiting)
				delete(waiting, r)
				g.Remove(g.now, r)
				note(g.next())
			case k == 5:
				i := rng.IntN(len(g.ssds))
				credits[i] = max(credits[i], 1+rng.IntN(6)) // one that shrinks leaves more outstanding for a while
				g.Grant(g.now, g.ssds[i], credits[i])
				note(g.next())
			case len(out) > 0:
				r := anyOf(out)
				delete(out, r)
				note(g.end(r, 0))
			}
			if len(waiting) > 0 && len(out) == 0 {
				t.Fatalf("round %d: %d requests wait and nothing is outstanding", round, len(waiting))
			}
			for i, s := range g.ssds {
				writes, reads, n, unsent := held(s, out, waiting)
				_, units := s.Outstanding()
				if got, want := [3]int{units, s.reads, s.unsent}, [3]int{writes + reads, reads, unsent}; got != want {
					t.Fatalf("round %d: SSD %d has %v units in all, of reads, of unsent writes; want %v", round, i, got,
						want)
				}
				// Reads may have a part that writes have taken.
				reserved := n <= 1 || reads <= credits[i]/readPart
				if writes > credits[i] || writes+reads > credits[i] && !reserved {
					if !alone(s, out, waiting, credits[i]) {
						t.Fatalf("round %d: %d units of SSD %d are taken, %d by %d reads; the credit is %d", round,
							writes+reads, i, reads, n, credits[i])
					}
				}
				if s.to.used > s.to.depth {
					t.Fatalf("round %d: %d commands at a link of depth %d", round, s.to.used, s.to.depth)
				}
			}
			if now, _ := g.Waiting(); now != len(waiting) {
				t.Fatalf("round %d: %d requests wait, want %d", round, now, len(waiting))
			}
		}
		for len(out) > 0 {
			r := anyOf(out)
			delete(out, r)
			note(g.end(r, 0))
		}
		if len(waiting) > 0 {
			t.Fatalf("round %d: %d requests are left", round, len(waiting))
		}
		for i, s := range g.ssds {
			if n, units := s.Outstanding(); n+units+s.to.used+s.unsent != 0 || !s.empty() || !s.admission.empty() {
				t.Fatalf("round %d: %d requests of %d units are left at SSD %d, %d at its link", round, n, units, i,
					s.to.used)
			}
		}
	}
}

// held returns the units of an SSD that writes and reads hold, how many reads that are, and those of writes that are
// admitted and not sent.
func held(s *SSD, all ...map[*Request]bool) (writes, reads, nReads, unsent int) {
	for _, m := range all {
		for r := range m {
			switch {
			case !r.holds(s):
			case r.Write:
				writes += r.Units
			default:
				reads += r.Units
				nReads++
			}
			if r.admitted && slices.Contains(r.Targets[:r.N], s) {
				unsent += r.Units
			}
		}
	}
	return writes, reads, nReads, unsent
}

// alone reports whether an SSD has a request that is larger than its credit, which was let through because nothing was
// outstanding.
func alone(s *SSD, out, waiting map[*Request]bool, credit int) bool {
	for _, m := range []map[*Request]bool{out, waiting} {
		for r := range m {
			if r.Units > credit && r.holds(s) {
				return true
			}
		}
	}
	return false
}

// TestWritesThatWaitForASlowSSDLeaveTheOthersToOthers: most writes of the chain hold nothing of its fast SSD while they
// wait, so that reads, and writes to other chains, find room there.
func TestWritesThatWaitForASlowSSDLeaveTheOthersToOthers(t *testing.T) {
	g := newRig(t, Config{}, 64, 2, 64)
	other := g.AddTenant(1)
	var sent []*Request
	for range 100 {
		sent = append(sent, g.add(g.request(0, true, 1, 1, 0))...)
	}
	if len(sent) != 2 {
		t.Fatalf("%d writes are sent, the slow SSD has a credit of 2", len(sent))
	}
	if _, units := g.ssds[0].Outstanding(); units > 4 {
		t.Errorf("they hold %d units of the fast SSD", units)
	}
	for _, tenant := range []Tenant{0, other} {
		for _, write := range []bool{false, true} {
			r := g.request(tenant, write, 1, 0)
			g.want("to the fast SSD", g.add(r), r)
		}
		r := g.request(tenant, true, 1, 2, 0)
		g.want("to both fast SSDs", g.add(r), r)
	}
	// The other writes go on as the slow SSD does.
	g.endAll(sent, 100)
}

// TestWritesTakeHalfOfACreditAtMostBeforeTheyAreSent, also if it is a place in a queue that they wait for.
func TestWritesTakeHalfOfACreditAtMostBeforeTheyAreSent(t *testing.T) {
	g := newRig(t, Config{}, 16, 16, 16)
	g.SetDepth(g.ssds[0].to, 1)
	var sent []*Request
	for range 40 {
		sent = append(sent, g.add(g.request(0, true, 1, 0, 1, 2))...)
	}
	for i, s := range g.ssds {
		if _, units := s.Outstanding(); units != 9 {
			t.Errorf("the writes hold %d units of SSD %d, want 1 that is sent and 8 that are not", units, i)
		}
	}
	g.endAll(sent, 40)
}

// TestReadsGoOnWhileTheWritesOfAChainDoNot: an SSD is silent, and writes that were sent have all tokens of the others
// in its chain. Reads of all tenants go on with a quarter of them, and writes do when the others end.
func TestReadsGoOnWhileTheWritesOfAChainDoNot(t *testing.T) {
	g := newRig(t, Config{}, 8, 8)
	other := g.AddTenant(1)
	var writes []*Request
	for range 20 {
		writes = append(writes, g.add(g.request(0, true, 1, 1, 0))...)
	}
	if len(writes) != 8 {
		t.Fatalf("%d writes are sent", len(writes))
	}
	waits := g.request(other, true, 1, 0)
	g.want("no tokens are left", g.add(waits))
	var reads []*Request
	for range 30 {
		reads = append(reads, g.add(g.request(0, false, 1, 0), g.request(other, false, 1, 0))...)
	}
	if len(reads) != 2 {
		t.Errorf("%d reads are sent, want a quarter of 8", len(reads))
	}
	of := [2]int{}
	for i := 0; i < len(reads) && i < 40; i++ {
		of[reads[i].Tenant]++
		next := g.end(reads[i], 0)
		if len(next) != 1 {
			t.Fatalf("%d requests are sent when a read has ended", len(next))
		}
		reads = append(reads, next...)
	}
	if of[0] < 15 || of[1] < 15 {
		t.Errorf("%v reads of the tenants", of)
	}
	all := append(writes, reads[40:]...)
	for i := 0; i < len(all); i++ { // the chain has another member in place of the silent one
		all = append(all, g.end(all[i], 0)...)
	}
	if i := slices.Index(all, waits); i < 0 || i > 40 || len(all) != 20+1+60-40 {
		t.Errorf("%d requests were sent, the write as number %d", len(all), i)
	}
}

// TestAReadThatWaitsForALinkSaysSo.
func TestAReadThatWaitsForALinkSaysSo(t *testing.T) {
	g := newRig(t, Config{}, 4)
	g.SetDepth(g.ssds[0].to, 1)
	first, second := g.request(0, false, 1, 0), g.request(0, false, 1, 0)
	g.want("a place is free", g.add(first, second), first)
	third := g.request(0, false, 9, 0)
	g.want("neither tokens nor a place", g.add(third))
	if first.AtLink() || !second.AtLink() || third.AtLink() {
		t.Errorf("at the link: %t, %t, %t", first.AtLink(), second.AtLink(), third.AtLink())
	}
	g.want("the next one", g.end(first, 0), second)
	if second.AtLink() {
		t.Error("it was sent")
	}
}

func TestRequestsAllocateNothing(t *testing.T) {
	g := newRig(t, Config{}, 2, 2, 2)
	other := g.AddTenant(2)
	var rs []*Request
	for i := range 32 {
		rs = append(rs, g.request([]Tenant{0, other}[i%2], i%3 == 0, 1, 0, 1, 2))
	}
	sent := make([]*Request, 0, len(rs))
	round := func() {
		for _, r := range rs {
			g.Add(g.now, r)
		}
		sent = sent[:0]
		for i := 0; i < len(rs); i++ {
			for r := g.Next(g.now); r != nil; r = g.Next(g.now) {
				sent = append(sent, r)
			}
			g.Ended(g.now, sent[i], 2)
		}
	}
	round()
	if n := testing.AllocsPerRun(100, round); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
