package format

import "testing"

// TestASegmentTakesInAnother: it has the items of both with their versions, and says what has died.
func TestASegmentTakesInAnother(t *testing.T) {
	a, b := make(Segment, 4096), make(Segment, 4096)
	a.Clear(3)
	b.Clear(11)
	a.Recode(70_000, 3)
	b.Recode(300, 2)
	for _, k := range []string{"one", "two"} {
		a.Item(a.Insert([]byte(k))).SetVersion(69_000)
		b.Item(b.Insert([]byte(k + "'"))).SetVersion(20)
	}
	at := b.Insert([]byte("value"))
	b.Extend(at, 1)
	b.Item(at).SetValueLen(100)
	b.Item(at + b.Item(at).LengthBytes()).SetValueLen(50)
	b.AddIdentity(at, &Identity{Client: 7, Seq: 8, Version: 300}, 0)
	b.Recode(70_000, 3)
	a.AppendItems(b)
	a.SetDecidedBy(3)
	if got := a.Limit(); got != 3+8 {
		t.Errorf("there were at most %d segments, want 11", got)
	}
	changes := BeginChanges(nil, 96, 5)
	changes = AppendChange(changes, Change{Item: -1, Died: 128, Chunk: 300, Merged: true})
	changes = a.SetChanges(changes)
	n := a.LengthBytes()
	clear(a[n+copy(a[n:], changes):])
	a.Seal(1)
	if err := a.Check(1); err != nil {
		t.Fatal(err)
	}
	for k, want := range map[string]uint64{"one": 69_000, "two": 69_000, "one'": 20, "two'": 20, "value": 300} {
		if at := a.Find([]byte(k)); at == 0 || a.Item(at).Version() != want {
			t.Errorf("%s is at %d, want its version to be %d", k, at, want)
		}
	}
	at = a.Find([]byte("value"))
	if pieces, length := a.Pieces(at); pieces != 2 || length != 150 || a.Identities(at) != 1 || a.Keys() != 5 {
		t.Errorf("%d keys; one has %d pieces, %d bytes and %d identities", a.Keys(), pieces, length, a.Identities(at))
	}
	got, known := a.Changes(nil)
	want := []Change{{Item: -1, Died: 96, Chunk: 5}, {Item: -1, Died: 128, Chunk: 300, Merged: true}}
	if !known || len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("changes are %+v, want %+v", got, want)
	}
}
