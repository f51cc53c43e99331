package crrs

import "testing"

// TestAReplicaThatHasRevivedIsFilled whatever was under way when its store failed: the answers of the store to that
// came while it was damaged.
func TestAReplicaThatHasRevivedIsFilled(t *testing.T) {
	for _, what := range []string{"a pass", "a repair"} {
		var out Actions
		r := New(Config{Window: 8, Reads: 4, Parts: 2, Bits: 64, Leaf: 1})
		role := middle
		if what == "a pass" {
			role.Filling, role.Successor = true, NoPeer
		}
		r.SetRole(role, &out)
		r.Advance(1)
		var atStore []RangeOp
		if what == "a pass" {
			r.Receive(1, &Message{Kind: Durable, Epoch: 2, Clock: 7}, &out)
			out = Actions{}
			r.Flush(&out)
			for range 2 { // the part is copied when its digests are of another number
				asked := asks(&out)
				out = Actions{}
				kind := map[MessageKind]MessageKind{Compare: Sums, Fetch: Batch}[asked[0].Kind]
				r.Receive(1, &Message{Kind: kind, Epoch: 2, Tag: asked[0].Tag, Part: &Part{Last: true}}, &out)
				atStore = append(atStore, out.Ranges...)
				r.Flush(&out)
			}
		} else {
			r.Repair(1<<40, &out)
			r.Flush(&out)
			atStore = out.Ranges
		}
		if len(atStore) != 1 {
			t.Fatalf("%s: %+v", what, atStore)
		}
		r.fail(&out)
		r.Ranged(&atStore[0], Done, &out)
		r.SetRole(Role{Epoch: 3, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}, &out)
		r.Revive()
		role = middle
		role.Epoch, role.Since, role.Filling, role.Successor = 4, 4, true, NoPeer
		r.SetRole(role, &out)
		r.Receive(1, &Message{Kind: Durable, Epoch: 4, Clock: 9}, &out)
		out = Actions{}
		r.Flush(&out)
		if asked := asks(&out); len(asked) != 1 || asked[0].Kind != Compare {
			t.Errorf("after %s, it asks for %+v, and not for digests", what, asked)
		}
	}
}

// asks are the messages that ask for a part.
func asks(out *Actions) (found []Send) {
	for _, m := range out.Sends {
		if m.Part != nil {
			found = append(found, m)
		}
	}
	return found
}
