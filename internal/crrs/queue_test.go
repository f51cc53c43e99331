package crrs

import (
	"slices"
	"testing"
)

// TestAConditionalWriteIsNotOvertaken by writes of its key that came later: those of a hot key would hold it up for
// ever.
func TestAConditionalWriteIsNotOvertaken(t *testing.T) {
	var out Actions
	r := New(Config{Window: 8, Reads: 4, Parts: 1, Bits: 64})
	r.SetRole(Role{Epoch: 2, Member: true, Since: 1, Predecessor: NoPeer, Successor: 3, ChainTail: 3, NumOthers: 1,
		Others: [MaxOthers]Peer{3}}, &out)
	r.Extend(1 << 60)
	out = Actions{}
	for tag := range uint64(6) {
		r.Write(Write{Op: Put, Key: Key{Len: 1}, Tag: tag, Conditional: tag == 2}, &out)
	}
	var stored []uint64
	seq := uint64(0)
	for range 10 {
		o := out
		out = Actions{}
		for _, s := range o.Stores {
			stored = append(stored, s.Tag)
			r.Stored(s.Slot, Done, s.Version, &out)
		}
		for _, m := range slices.Concat(o.Sends, out.Sends) {
			if m.Kind == Forward && m.Seq > seq {
				seq = m.Seq
			}
		}
		r.Receive(3, &Message{Kind: Ack, Epoch: 2, Seq: seq}, &out)
	}
	if want := []uint64{0, 1, 2, 3, 4, 5}; !slices.Equal(stored, want) {
		t.Errorf("stored in the order %v, want %v", stored, want)
	}
}

// TestARepetitionIsAnsweredWithTheVersionOfTheFirstTry, which is what a client may depend on.
func TestARepetitionIsAnsweredWithTheVersionOfTheFirstTry(t *testing.T) {
	d := newUnjudgedRig(t)
	d.out = Actions{}
	d.r.Write(Write{Op: Put, Key: Key{Len: 1}, Tag: 1, Retry: true}, &d.out)
	op := d.out.Stores[0]
	d.r.Stored(op.Slot, Repeated, 5, &d.out)
	if p := d.out.Replies; len(p) != 1 || p[0].Status != OK || p[0].Version != 5 || op.Version == 5 {
		t.Errorf("%+v", p)
	}
}
