package format

import (
	"fmt"
	"testing"
)

// BenchmarkSegment is the time that a lookup, and a Put, spend on a segment of 13 keys.
func BenchmarkSegment(b *testing.B) {
	seg := make(Segment, 16*KeyUnit)
	seg.Clear(42)
	seg.Recode(100000, 3)
	for i := range 13 {
		it := seg.Item(seg.Insert(fmt.Append(nil, "key", i*731)))
		it.SetValueLen(256)
		it.SetValueOffset(8 * 300)
	}
	seg.Seal(77)
	key := []byte("key5117")
	b.Run("CheckFor", func(b *testing.B) {
		for b.Loop() {
			if at, err := seg.CheckFor(77, key); at == 0 || err != nil {
				b.Fatal(at, err)
			}
		}
	})
	b.Run("Find", func(b *testing.B) {
		for b.Loop() {
			if seg.Find(key) == 0 {
				b.Fatal("not found")
			}
		}
	})
}
