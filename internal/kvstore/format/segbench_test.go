package format

import (
	"fmt"
	"testing"
)

// BenchmarkSegment is the time that a lookup, and a Put, spend on a segment of 13 keys: of 512 segments with other keys
// each time, so that the processor cannot learn where the keys are.
func BenchmarkSegment(b *testing.B) {
	const segments, items = 512, 13
	var segs [segments]Segment
	var keys [segments * items][]byte
	for i := range segs {
		seg := make(Segment, 32*KeyUnit)
		seg.Clear(42)
		seg.Recode(100000, 3)
		for k := range items {
			key := fmt.Append(nil, "key", (i*items+k)*7919%10000)
			keys[i*items+k] = key
			it := seg.Item(seg.Insert(key))
			it.SetValueLen(256)
			it.SetValueOffset(8 * 300)
		}
		seg.Seal(77)
		segs[i] = seg
	}
	for _, x := range []struct {
		name string
		find func(seg Segment, key []byte) (at int, err error)
	}{
		{"CheckFor", func(seg Segment, key []byte) (int, error) { return seg.CheckFor(77, key) }},
		{"Check", func(seg Segment, _ []byte) (int, error) { return 1, seg.Check(77) }},
		{"Find", func(seg Segment, key []byte) (int, error) { return seg.Find(key), nil }},
	} {
		b.Run(x.name, func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				n := i * 7907 % len(keys)
				if at, err := x.find(segs[n/items], keys[n]); at == 0 || err != nil {
					b.Fatal(at, err)
				}
			}
		})
	}
}
