package pcie

import (
	"errors"
	"testing"

	"jbofd/internal/nvme"
)

// noRegisters takes doorbells and forgets them.
type noRegisters struct{ rung int }

func (r *noRegisters) Load32(int) uint32       { return 0 }
func (r *noRegisters) Store32(_ int, _ uint32) { r.rung++ }

func testRing(entries int) (*Ring, *noRegisters) {
	sq, cq := ringBytes(entries)
	regs := &noRegisters{}
	return newRing(1, entries, make([]byte, sq+cq), regs, 4), regs
}

// answer writes a completion where the controller would write the next one.
func (r *Ring) answer(at int, cqe nvme.CQE) {
	entry := at % len(r.places)
	phase := uint32(1)
	if at/len(r.places)%2 == 1 {
		phase = 0
	}
	cqe[14] = cqe[14]&^1 | byte(phase)
	copy(r.cq[entry*nvme.CQESize:], cqe[:])
}

// Whatever completions a controller writes, a place is free once, and what was not under way is a lie.
func FuzzCompletions(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 0, 0, 1})
	f.Add([]byte{0x80, 0, 0x81, 0x7f, 0xff, 3, 3, 3, 0, 1})
	f.Fuzz(func(t *testing.T, script []byte) {
		r, _ := testRing(8)
		busy := map[int]uint16{}
		written := 0
		for k, b := range script {
			if b&0x80 == 0 && r.Free() > 0 { // a command
				e, place := r.Next()
				if _, ok := busy[place]; ok {
					t.Fatalf("place %d is given twice", place)
				}
				busy[place] = e.CID()
				r.Submit()
			}
			var cqe nvme.CQE
			cqe.SetCID(uint16(b&0x7f) | uint16(k%3)<<7)
			if place := int(b & 7); b&8 != 0 && busy[place] != 0 { // the truth
				cqe.SetCID(busy[place])
			}
			cqe.SetSQHD(uint16(b) << 3)
			r.answer(written, cqe)
			written++
			place, got, ok, err := r.Reap()
			if !ok || got.CID() != cqe.CID() {
				t.Fatalf("a completion is not seen: %v", ok)
			}
			cid, under := busy[place]
			switch {
			case err == nil && (!under || cid != cqe.CID()):
				t.Fatalf("CID %#x is taken for place %d, which has %#x", cqe.CID(), place, cid)
			case err == nil:
				delete(busy, place)
			case !errors.Is(err, ErrInvalidResponse):
				t.Fatal(err)
			}
			r.Seen()
			if r.Free()+len(busy) != r.Places() {
				t.Fatalf("%d places are free and %d busy of %d", r.Free(), len(busy), r.Places())
			}
		}
	})
}

// A CID comes again only after many commands in its place, so that a late completion is found.
func TestCIDsChange(t *testing.T) {
	r, regs := testRing(4)
	seen := map[uint16]bool{}
	for i := range 1000 {
		e, _ := r.Next()
		if seen[e.CID()] {
			t.Fatalf("CID %#x is used again after %d commands", e.CID(), i)
		}
		seen[e.CID()] = true
		r.Submit()
		r.Submit() // there is nothing new
		var cqe nvme.CQE
		cqe.SetCID(e.CID())
		r.answer(i, cqe)
		if _, _, ok, err := r.Reap(); !ok || err != nil {
			t.Fatal(ok, err)
		}
		r.Seen()
	}
	if regs.rung != 2000 {
		t.Errorf("%d writes to doorbells for 1000 commands, want 2000", regs.rung)
	}
}
