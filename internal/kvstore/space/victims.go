package space

import "jbofd/internal/kvstore/format"

// minGainPart: emptying a chunk must win at least this part of it. Less is lost again to padding when its records are
// moved.
const minGainPart = 40

// maxCompared bounds how many chunks Choose compares. Among so many there is always one that is nearly as good as the
// best.
const maxCompared = 8192

// Weights are what it costs to move a live byte of a log, in any unit, and the number of bytes of records that fill a
// chunk. That is less than the chunk's size, because groups end with padding.
type Weights struct{ Key, Value, Fill int64 }

// Kinds are the logs whose chunks may be chosen. MostLive bounds how much is live in a chunk of values, if it is not 0.
type Kinds struct {
	Keys, Values bool
	MostLive     int64
}

// Choose makes the sealed chunk that is best to empty a victim and returns it, or -1 if there is nothing to win. In the
// key log, the best one costs least for each byte won. Among chunks of values age counts, too: see rank. The one that
// costs less for each byte won of these two is chosen. It goes on where the last call stopped. If all chunks were
// compared in vain and nothing was gained since, it compares none.
func (p *Pool) Choose(w Weights, of Kinds) format.ChunkNumber {
	f := p.search(of)
	if f.compared >= len(p.Chunks) {
		return none
	}
	key, value := format.ChunkNumber(none), format.ChunkNumber(none)
	leastKey, leastValue := 0.0, 0.0
	sealed, soon := 0, 0
	i := p.look
	compare := min(maxCompared, len(p.Chunks))
	for range compare {
		if i++; i >= len(p.Chunks) {
			i = 0
		}
		c := &p.Chunks[i]
		won := w.Fill - int64(c.Live)
		if c.State != Sealed || c.Pins > 0 || won < p.Bytes()/minGainPart || i >= int(p.limit) {
			continue
		}
		if c.Kind == format.KeyLog {
			if each := float64(c.Live) / float64(won); of.Keys && (key == none || each < leastKey) {
				key, leastKey = format.ChunkNumber(i), each
			}
			continue
		}
		rank := p.rank(c, won)
		if sealed++; rank <= p.soon {
			soon++
		}
		if of.Values && (of.MostLive == 0 || int64(c.Live) <= of.MostLive) && (value == none || rank < leastValue) {
			value, leastValue = format.ChunkNumber(i), rank
		}
	}
	p.look = i
	p.adjustSoon(sealed, soon)
	best := key
	if value != none {
		live := float64(p.Chunks[value].Live)
		if key == none || float64(w.Value)*live/(float64(w.Fill)-live) < float64(w.Key)*leastKey {
			best = value
		}
	}
	if f.compared, f.look = f.compared+compare, i; best != none {
		f.compared = 0
		p.Chunks[best].State = Victim
	}
	return best
}

// rank orders chunks of values by when they should be emptied. The first is the one with the least live bytes for each
// byte won, divided by the square root of its age. What is left in an old chunk has lived long and will live on, so
// that waiting wins little there. A young one may soon have much less to move. With uniform overwrites age makes no
// difference, because the oldest chunks have the least live bytes. The square is computed, which orders as well.
func (p *Pool) rank(c *Chunk, won int64) float64 {
	each := float64(c.Live) / float64(won)
	return each * each / float64(1+p.LastEpoch-c.Epoch.N())
}

// soonPart is which part of the chunks of values counts as emptied soon.
const soonPart = 25

// adjustSoon brings the rank up to which chunks are emptied soon nearer to that of soonPart of them. Among so many
// sealed chunks were so many of at most that rank.
func (p *Pool) adjustSoon(sealed, soon int) {
	switch want := sealed / soonPart; {
	case soon < want:
		p.soon = max(p.soon, 1e-12) * 1.05
	case soon > want:
		p.soon /= 1.05
	}
}

// Soon reports whether chunk i, which fill bytes of records fill, is one of values that is likely to be emptied soon.
func (p *Pool) Soon(fill int64, i format.ChunkNumber) bool {
	c := &p.Chunks[i]
	won := fill - int64(c.Live)
	return c.State == Sealed && c.Kind == format.ValueLog && c.Pins == 0 && won >= p.Bytes()/minGainPart &&
		p.rank(c, won) <= p.soon
}

// search returns how far the search for a victim of these kinds is that has found nothing so far.
func (p *Pool) search(of Kinds) *search {
	i := 0
	if of.Keys {
		i++
	}
	if of.Values {
		i += 2
	}
	f := &p.fruitless[i]
	// Other searches may have gone on in between. It does not matter if this one has seen everything.
	if f.gains != p.gains || f.most != of.MostLive || f.look != p.look && f.compared < len(p.Chunks) {
		*f = search{gains: p.gains, most: of.MostLive}
	}
	return f
}

// ChooseThis makes a chunk a victim, if it is sealed and not pinned.
func (p *Pool) ChooseThis(i format.ChunkNumber) bool {
	c := &p.Chunks[i]
	if c.State != Sealed || c.Pins > 0 || i >= p.limit {
		return false
	}
	c.State = Victim
	return true
}
