package crrs

import "testing"

// TestAuthorityIsLookedAtBehindTheFetch lets the authority of a replica end while its store fetches a value.
func TestAuthorityIsLookedAtBehindTheFetch(t *testing.T) {
	for _, c := range []struct {
		fetched int64
		want    Status
	}{{99, OK}, {100, Unavailable}} {
		var out Actions
		r := New(Config{Window: 8, Reads: 1, Parts: 1})
		r.SetRole(Role{Epoch: 1, Member: true, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}, &out)
		r.Extend(100)
		r.Advance(50)
		r.Read(Read{}, &out)
		r.Advance(c.fetched)
		r.Fetched(out.Stores[0].Slot, Done, 1, 0, 0, &out)
		if len(out.Replies) != 1 || out.Replies[0].Status != c.want {
			t.Errorf("fetched at %d: %+v, want status %d", c.fetched, out.Replies, c.want)
		}
	}
}
