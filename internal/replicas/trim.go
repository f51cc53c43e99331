package replicas

// trimEveryNS is how often memory is given up that was not needed since the last time.
const trimEveryNS = 1e9

// spares counts requests that are free, n, and the smallest number of them since the last trim: so many were not
// needed.
type spares struct{ n, low int }

// keptSpares is how many of them are kept at least.
const keptSpares = 64

func (s *spares) take() {
	s.n = max(s.n-1, 0)
	s.low = min(s.low, s.n)
}

// unneeded returns how many are to be given up, and whether there may be more the next time.
func (s *spares) unneeded() (n int, more bool) {
	n = min(s.low, max(s.n-keptSpares, 0))
	s.n -= n
	s.low = s.n
	return n, s.n > keptSpares
}

// trim gives up memory, after a time without need for it. What follows takes it anew.
func (g *Replicas) trim() {
	switch {
	case g.trimNS == 0:
		g.trimNS = g.envNS + trimEveryNS
	case g.envNS >= g.trimNS:
		stores, moreStores := g.storeSpares.unneeded()
		for range stores {
			g.freeStore = g.freeStore.next
		}
		peers, morePeers := g.peerSpares.unneeded()
		for range peers {
			g.freePeer = g.freePeer.next
		}
		asks, moreAsks := g.askSpares.unneeded()
		for range asks {
			g.freeAsk = g.freeAsk.next
		}
		if g.trimNS = g.envNS + trimEveryNS; !g.tables.Trim() && !moreStores && !morePeers && !moreAsks {
			g.trimNS = 0 // until a turn has something to do again
			return
		}
	}
	g.driver.WakeAt(g.trimNS)
}
