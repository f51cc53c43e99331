package format

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"testing"

	"jbofd/internal/units"
)

// The structures as they are on the SSD, all but their zeroes at the end.
var golden = []struct {
	name  string
	make  func() []byte
	check func([]byte) error
	dump  string
}{
	{"superblock", superblock, func(b []byte) error { return Superblock(b).Check(1 << 30) }, ""},
	{"chunk header", chunkHeader, func(b []byte) error { return ChunkHeader(b).Check() }, ""},
	{"page", page, func(b []byte) error { return Page(b).Check(9, 3) }, ""},
	{"segment", segment, func(b []byte) error { return Segment(b).Check(77) }, "" +
		"________" + // CRC32C
		"73" + "0200500000" + // magic, durable: from 5 to 2 back
		"070000000000" + // version
		"2a000000" + "3d00" + "0220" + // number, length, items and an extra unit
		"0202010000000000" + "01" + // clock of 0x10202, version width 2, hash bits not known
		"01" + "000010" + "0100000000" + "0202" + "61" + // key of 1, value of 1 MiB at 8, version 0x10202
		"21" + "000000" + "0000000000" + "0302" + "80ee3668" + "62" + // key of 1, no value, version 0x203, expiry
		"03" + "ac02" + // 2 units before, in chunk 300
		"87" + "00" + "01" + // born: item 0; died: as long, in chunk 1
		"82" + "02" + "03" + // died in chunk 2, 3 units
		"92" + "808040" + "808008" + // a key less, died in chunk 2^20, 2^17 units
		"8b" + "01" + "808040" + "808008" + // a key more, born: item 1, died the same
		strings.Repeat("00", 11)},
	{"segment with a value in pieces", pieces, func(b []byte) error { return Segment(b).Check(77) }, "" +
		"________" + // CRC32C
		"73" + "0000000000" + // magic, durable: none
		"070000000000" + // version
		"2a000000" + "4800" + "0400" + // number, length, items
		"0900000000000000" + "00" + // clock, version width 0: all versions are 9
		"01" + "008000" + "0100000000" + "61" + // key of 1, the first 32 KiB of its value at 8
		"00" + "008000" + "0410000000" + // the next 32 KiB
		"00" + "010000" + "0110000000" + // the last byte
		"02" + "000000" + "0000000000" + "6262" + // key of 2, value of 0
		"01" + // there was no record before
		"a3" + "00" + "02" + "02" + "8440" + // born: item 0 and 2 more; died in chunk 2, 8196 units
		strings.Repeat("00", 17)},
	{"lossy segment with a tombstone and identities", identities, func(b []byte) error { return Segment(b).Check(77) },
		"" +
			"________" + // CRC32C
			"6c" + "0000000000" + // magic, durable: none
			"080000000000" + // version
			"2a000000" + "6d00" + "0300" + // number, length, items
			"0300000000000000" + "39" + // clock, version width 2, 7 hash bits
			"a1" + "000000" + "0100000000" + // key of 1, identities evicted, does not exist
			"0300" + "00000000" + "61" + // version 3, a tombstone for ever
			"1f" + "0100000000000000" + "0200000000000000" + "00" + "0200000000000000" + "00000000" + // client 1
			"1f" + "ff00000000000000" + "0300000000000000" + "00" + "0300000000000000" + "80ee3668" + // client 255
			"01" + // there was no record before
			strings.Repeat("00", 18)},
	{"segment of version 3", oldSegment, func(b []byte) error { return Segment(b).Check(77) }, "" +
		"________" + // CRC32C
		"53" + "0200500000" + // magic, durable: from 5 to 2 back
		"070000000000" + // version
		"2a000000" + "3500" + "0300" + // number, length, items
		"01" + "008000" + "0100000000" + "61" + // key of 1, the first 32 KiB of its value at 8
		"00" + "010000" + "0410000000" + // the last byte
		"01" + "000000" + "0000000000" + "62" + // key of 1, value of 0
		"01" + // there was no record before
		strings.Repeat("00", 10)},
	{"value", valueRecord, func(b []byte) error { return Value(b).Check(77) }, "" +
		"________" + "76" + "050000" + // CRC32C, magic, length
		"efcdab89" + // hash
		"08000000" + // version
		"68656c6c6f"},
	{"value of version 3", oldValue, func(b []byte) error { return Value(b).Check(77) }, "" +
		"________" + "56" + "050000" + // CRC32C, magic, length
		"efcdab8967452301" + // hash
		"080000000000" + "0000" + // version, reserved
		"68656c6c6f"},
}

func superblock() []byte {
	b := make(Superblock, SuperblockBytes)
	b.SetBlockSize(512)
	b.SetGeneration(3)
	b.SetUUID([16]byte{1, 2})
	b.SetPartitionBytes(1 << 30)
	b.SetHashSeed(4)
	b.SetCheckpoint(9)
	b.SetChunkBytes(2 << 20)
	b.SetPages(5)
	b.SetFullPages(3)
	b.SetLastPages(1)
	b.SetLastStream(0x1122334455667788)
	b.SetChunks([]ChunkNumber{7, 1<<24 - 1}, []ChunkNumber{0})
	b.Seal()
	return b
}

func chunkHeader() []byte {
	b := make(ChunkHeader, ChunkHeaderBytes)
	b.SetKind(Checkpoint)
	b.SetEpoch(7)
	b.SetIndex(1)
	b.SetUUID([16]byte{1, 2})
	b.SetCheckpoint(9)
	b.Seal()
	return b
}

func page() []byte {
	b := make(Page, PageBytes)
	b.SetIndex(3)
	b.SetStream(9)
	copy(b.Payload(), "payload")
	b.Seal()
	return b
}

func segment() []byte {
	b := make(Segment, 3*KeyUnit)
	b.Clear(42)
	b.SetVersion(7)
	b.SetDurable(2, 5)
	b.Recode(0x203, 0)
	b.Insert([]byte("a"))
	b.SetExpiry(b.Insert([]byte("b")), true, 1748430464)
	b.Recode(0x10202, b.WidthFor(0x10202, 0x10202))
	it := b.Item(b.First())
	it.SetVersion(0x10202)
	it.SetValueLen(MaxValue)
	it.SetValueOffset(8)
	copy(b[b.LengthBytes():], b.SetChanges(segmentChanges()))
	b.Seal(77)
	return b
}

func pieces() []byte {
	b := make(Segment, 3*KeyUnit)
	b.Clear(42)
	b.Recode(9, 0)
	b.SetVersion(7)
	at := b.Insert([]byte("a"))
	b.Insert([]byte("bb"))
	b.Extend(at, 2)
	for i, place := range []units.ExtentOffset{8, 0x8020, 0x8008} {
		it := b.NumberedItem(i)
		it.SetValueLen([]int{32 << 10, 32 << 10, 1}[i])
		it.SetValueOffset(place)
	}
	c := AppendChange(BeginChanges(nil, 0, 0), Change{Item: 0, More: 2,
		Born: 2*ValueBytes(32<<10) + ValueBytes(1), Chunk: 2, Died: 2 * ValueBytes(32<<10)})
	copy(b[b.LengthBytes():], b.SetChanges(c))
	b.Seal(77)
	return b
}

func identities() []byte {
	b := make(Segment, 4*KeyUnit)
	b.Clear(42)
	b.SetLossy(true)
	b.SetVersion(8)
	b.Recode(3, 2)
	b.SetDecidedBy(7)
	at := b.Insert([]byte("a"))
	b.Item(at).SetGone()
	b.Item(at).SetEvicted(true)
	b.SetExpiry(at, true, 0)
	b.AddIdentity(at, &Identity{Client: 1, Seq: 2, Version: 2}, 0)
	b.AddIdentity(at, &Identity{Client: 255, Seq: 3, Version: 3, KeepUntil: 1748430464}, 0)
	copy(b[b.LengthBytes():], b.SetChanges(BeginChanges(nil, 0, 0)))
	b.Seal(77)
	return b
}

// oldSegment is a segment of version 3 of the format, as its program has written it.
func oldSegment() []byte {
	b := make(Segment, 2*KeyUnit)
	b[segMagic] = 'S'
	b.SetVersion(7)
	b.SetDurable(2, 5)
	b.SetNumber(42)
	copy(b[24:], "\x01\x00\x80\x00\x01\x00\x00\x00\x00a"+"\x00\x01\x00\x00\x04\x10\x00\x00\x00"+
		"\x01\x00\x00\x00\x00\x00\x00\x00\x00b"+"\x01")
	b.SetLengthBytes(24 + 10 + 9 + 10)
	b.SetItems(3)
	b.Seal(77)
	return b
}

// segmentChanges are the changes of a record that replaces one of 64 bytes in chunk 300: a value of 1 MiB replaces one
// of the same length in chunk 1, a value of length 0 replaces one of 24 bytes in chunk 2, a key is removed and one is
// added. So many changes take one more unit.
func segmentChanges() []byte {
	c := BeginChanges(nil, 64, 300)
	c = AppendChange(c, Change{Item: 0, Born: ValueBytes(MaxValue), Chunk: 1, Died: ValueBytes(MaxValue)})
	c = AppendChange(c, Change{Item: -1, Chunk: 2, Died: 24})
	c = AppendChange(c, Change{Item: -1})
	c = AppendChange(c, Change{Item: -1, Chunk: 1 << 20, Died: 1 << 20, Keys: -1})
	return AppendChange(c, Change{Item: 1, Chunk: 1 << 20, Died: 1 << 20, Keys: 1})
}

func valueRecord() []byte {
	b := make(Value, ValueHeaderBytes+5)
	b.SetValueLen(5)
	b.SetHash(0x0123456789abcdef)
	b.SetVersion(8)
	b[valMagic] = 'v'
	copy(b.Data(), "hello")
	b.Seal(77)
	return b
}

func oldValue() []byte {
	b := make(Value, 29)
	b.SetValueLen(5)
	b[valMagic] = 'V'
	copy(b[8:], "\xef\xcd\xab\x89\x67\x45\x23\x01\x08")
	copy(b[24:], "hello")
	le.PutUint32(b, crc32.Update(77, castagnoli, b[4:]))
	return b
}

func TestGoldenFrames(t *testing.T) {
	for _, g := range golden {
		b := g.make()
		if err := g.check(b); err != nil {
			t.Errorf("%s: %v", g.name, err)
		}
		if g.dump == "" {
			continue
		}
		got := "________" + hex.EncodeToString(b)[8:]
		if got != g.dump {
			t.Errorf("%s\n%s, want\n%s", g.name, got, g.dump)
		}
	}
}

func TestChangesAreReadAsWritten(t *testing.T) {
	want := []Change{{Item: -1, Chunk: 300, Died: 64},
		{Item: 0, Born: ValueBytes(MaxValue), Chunk: 1, Died: ValueBytes(MaxValue)},
		{Item: -1, Chunk: 2, Died: 24}, {Item: -1, Chunk: 1 << 20, Died: 1 << 20, Keys: -1},
		{Item: 1, Chunk: 1 << 20, Died: 1 << 20, Keys: 1}}
	if got, known := Segment(segment()).Changes(nil); !known || !slices.Equal(got, want) {
		t.Errorf("changes are %v, %v, want %v", got, known, want)
	}
	// Without changes, or with changes that are cut off anywhere, the changes count as unknown.
	b := Segment(segment())
	said := segmentChanges()
	for n := range len(said) - 6 { // the last number may be longer
		clear(b[b.LengthBytes():])
		copy(b[b.LengthBytes():], b.SetChanges(said[:n]))
		// Zeroes that follow are the end, or numbers of a change.
		if got, known := b.Changes(nil); known != (n > 0) || len(got) > len(want) {
			t.Errorf("the first %d bytes: %v, %v", n, got, known)
		}
	}
	for n := range 300 {
		clear(b[b.LengthBytes():])
		if got := b.SetChanges(make([]byte, n)); len(got) != n && len(got) != 0 || n <= 200 && len(got) != n ||
			b.Items() != 2 || b.ExtentBytes() < b.LengthBytes()+len(got) ||
			b.ExtentBytes() > RoundUp(b.LengthBytes()+len(got), KeyUnit) {
			t.Errorf("for %d bytes of changes there is room for %d in %d", n, len(got), b.ExtentBytes())
		}
	}
	// A long segment has room for few.
	b.SetLengthBytes(MaxSegmentBytes)
	if got := b.SetChanges(make([]byte, KeyUnit)); len(got) != KeyUnit || b.ExtentBytes() != 1<<16 {
		t.Errorf("there is room for %d bytes of changes in %d", len(got), b.ExtentBytes())
	}
	if got := b.SetChanges(make([]byte, KeyUnit+1)); len(got) != 0 || b.ExtentBytes() != MaxSegmentBytes {
		t.Errorf("there is room for %d bytes of changes in %d", len(got), b.ExtentBytes())
	}
}

func TestValuesInPieces(t *testing.T) {
	content := func(b Segment) (s string) {
		for at := b.First(); at < b.LengthBytes(); {
			it := b.Item(at)
			at += it.LengthBytes()
			s += fmt.Sprintf("%s%d ", it.Key(), it.ValueLen())
		}
		if !strings.HasSuffix(s, " ") || strings.Count(s, " ") != b.Items() {
			t.Errorf("%d items: %q", b.Items(), s)
		}
		return s
	}
	// Any keys with values in any number of pieces, before and behind the one that is edited.
	for n := range 27 {
		b := make(Segment, 1024)
		b.Clear(42)
		b.Recode(1, 0)
		want := [3]string{}
		for i := range want {
			at, length := b.Insert([]byte{'a' + byte(i)}), 0
			b.Extend(at, []int{n % 3, n / 3 % 3, n / 9}[i])
			for more, next := true, at; more; {
				length++
				it := b.Item(next)
				it.SetValueLen(10*i + length)
				want[i] += fmt.Sprintf("%s%d ", it.Key(), it.ValueLen())
				next += it.LengthBytes()
				more = next < b.LengthBytes() && b.Item(next).Continues()
			}
			if got, sum := b.Pieces(at); got != length || sum != 10*i*length+length*(length+1)/2 {
				t.Fatalf("%d pieces, %d bytes, want %d", got, sum, length)
			}
		}
		if got := content(b); got != want[0]+want[1]+want[2] {
			t.Fatalf("%q, want %q", got, want)
		}
		c := slices.Clone(b)
		c.Filter(func(key []byte) bool { return key[0] != 'b' })
		if got := content(c); got != want[0]+want[2] {
			t.Errorf("without b: %q, want %q", got, want)
		}
		c = slices.Clone(b)
		c.Remove(c.Find([]byte("b")))
		if got := content(c); got != want[0]+want[2] {
			t.Errorf("b removed: %q, want %q", got, want)
		}
		c = slices.Clone(b)
		c.Truncate(c.Find([]byte("b")))
		if got := content(c); got != want[0]+"b11 "+want[2] {
			t.Errorf("b truncated: %q, want %q", got, want)
		}
		b.Seal(77)
		if err := b.Check(77); err != nil {
			t.Error(err)
		}
	}
}

func TestAFlippedBitAnywhereIsAnError(t *testing.T) {
	for _, g := range golden {
		b := g.make()
		// All bits of a page would take seconds. The test flips all bits of its beginning, and then one bit of some
		// bytes.
		for bit := 0; bit < len(b)*8; bit++ {
			if bit >= 8*1024 {
				bit += 100
				if bit >= len(b)*8 {
					break
				}
			}
			b[bit/8] ^= 1 << (bit % 8)
			if err := g.check(b); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%s: bit %d of byte %d flipped: %v, want it damaged", g.name, bit%8, bit/8, err)
			}
			b[bit/8] ^= 1 << (bit % 8)
		}
	}
}

func TestARecordIsValidInItsPlaceOnly(t *testing.T) {
	a := Seed(1, 2, 4096)
	for _, b := range []uint32{Seed(2, 2, 4096), Seed(1, 3, 4096), Seed(1, 2, 4104)} {
		v := Value(valueRecord())
		v.Seal(a)
		if err := v.Check(b); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "CRC32C") {
			t.Errorf("with another seed: %v", err)
		}
	}
}

func TestChecksNameTheField(t *testing.T) {
	for _, c := range []struct {
		name  string
		err   func() error
		want  error
		field string
	}{
		{"blank", func() error { return Superblock(make([]byte, SuperblockBytes)).Check(1 << 30) }, ErrBlank,
			"superblock"},
		{"version", func() error {
			b := superblock()
			seal(b, superMagic, Version+1)
			return Superblock(b).Check(1 << 30)
		}, ErrVersion, "has 5, this program knows 2 to 4"},
		{"length", func() error { return Superblock(superblock()).Check(1 << 31) }, ErrCorrupt,
			"partition length is 1073741824, want 2147483648"},
		{"chunk length", func() error {
			b := Superblock(superblock())
			b.SetChunkBytes(3 << 20)
			b.Seal()
			return b.Check(1 << 30)
		}, ErrCorrupt, "chunk length"},
		{"kind", func() error { b := ChunkHeader(chunkHeader()); b.SetKind(4); b.Seal(); return b.Check() }, ErrCorrupt,
			"kind"},
		{"page", func() error { return Page(page()).Check(9, 4) }, ErrCorrupt, "index is 3, want 4"},
		{"items", func() error { b := Segment(segment()); b.SetItems(3); b.Seal(77); return b.Check(77) }, ErrCorrupt,
			"number of items is 3, want 2"},
		{"items less", func() error { b := Segment(segment()); b.SetItems(1); b.Seal(77); return b.Check(77) },
			ErrCorrupt, "length is"},
		{"a piece of no value", func() error {
			b := Segment(pieces())
			b.Item(b.First()).SetValueLen(0)
			b.Seal(77)
			return b.Check(77)
		}, ErrCorrupt, "key length of item 1 is 0"},
		{"a piece of nothing", func() error {
			b := Segment(pieces())
			b.NumberedItem(2).SetValueLen(0)
			b.Seal(77)
			return b.Check(77)
		}, ErrCorrupt, "key length of item 2 is 0"},
		{"long pieces", func() error {
			b := Segment(pieces())
			b.NumberedItem(1).SetValueLen(MaxValue - 32<<10)
			b.Seal(77)
			return b.Check(77)
		}, ErrCorrupt, "value length of item 2 is 1048577"},
		{"key", func() error { b := Segment(segment()); b[SegmentHeaderBytes] = 0; b.Seal(77); return b.Check(77) },
			ErrCorrupt, "key length of item 0"},
	} {
		if err := c.err(); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.field) {
			t.Errorf("%s: %v, want %v with %q", c.name, err, c.want, c.field)
		}
	}
}

func fuzz(f *testing.F, seed []byte, check func([]byte) error, same func(a, b []byte) bool) {
	f.Add(seed)
	f.Fuzz(func(t *testing.T, b []byte) {
		if check(b) == nil && !same(b, seed) {
			// The fuzzer would have to forge a CRC32C: what it finds must at least be readable.
			t.Logf("sound: %x", b)
		}
	})
}

func FuzzSegment(f *testing.F) {
	fuzz(f, segment(), func(b []byte) error {
		err := Segment(b).Check(77)
		if err == nil {
			readSegment(b)
		}
		return err
	}, bytes.HasPrefix)
}

// FuzzSealedSegment computes a valid checksum for any input, so that the other checks of Check are tested.
func FuzzSealedSegment(f *testing.F) {
	for _, b := range [][]byte{segment(), pieces(), identities(), oldSegment()} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		b = slices.Clone(b)
		if len(b) < oldSegmentBytes || Segment(b).ExtentBytes() > len(b) ||
			Segment(b).LengthBytes() < oldSegmentBytes {
			return
		}
		Segment(b).Seal(77)
		sound := Segment(b).Check(77) == nil
		if sound {
			readSegment(b)
		}
		checkLookups(t, b, sound)
	})
}

// checkLookups looks for keys in a segment with a valid checksum. CheckFor must stay within bounds, and if the segment
// is sound find what Find finds.
func checkLookups(t *testing.T, b Segment, sound bool) {
	keys := [][]byte{[]byte("no such key"), []byte("0")}
	for n := 1; n <= MaxKey && n <= len(b); n += 5 {
		keys = append(keys, b[len(b)-n:], b[(len(b)-n)/2:][:n])
	}
	for at := b.First(); sound && at < b.LengthBytes(); {
		if it := b.Item(at); it.HasKey() {
			keys = append(keys, it.Key())
		}
		at += b.Item(at).LengthBytes()
	}
	for _, key := range keys {
		at, err := b.CheckFor(77, key)
		if want := 0; sound {
			for off := b.First(); off < b.LengthBytes() && want == 0; off += b.Item(off).LengthBytes() {
				if bytes.Equal(b.Item(off).Key(), key) {
					want = off
				}
			}
			if at != want || err != nil || b.Find(key) != want {
				t.Fatalf("key %q: %d, %v; Find %d, want %d", key, at, err, b.Find(key), want)
			}
		}
		if at != 0 && !bytes.Equal(b.Item(at).Key(), key) {
			t.Fatalf("key %q: the item at %d is another one", key, at)
		}
	}
}

// readSegment reads everything in a segment that has passed its check.
func readSegment(b Segment) {
	at := b.First()
	for i := range b.Items() {
		it := b.Item(at)
		_, _, _, _ = it.Key(), it.ValueOffset(), it.Version(), it.Expiry()
		if it.HasKey() {
			_ = b.Identities(at)
		}
		if n, length := b.Pieces(at); n < 1 || length > MaxValue {
			panic("a value that is too long")
		}
		_ = b.NumberedItem(i)
		at += it.LengthBytes()
	}
	_, _ = b.Durable()
	_, _ = b.Changes(nil)
}

func FuzzValue(f *testing.F) {
	fuzz(f, valueRecord(), func(b []byte) error {
		err := Value(b).Check(77)
		if err == nil {
			_ = Value(b).Data()
		}
		return err
	}, bytes.HasPrefix)
}

func FuzzSuperblock(f *testing.F) {
	fuzz(f, superblock(), func(b []byte) error { return Superblock(b).Check(1 << 30) }, bytes.Equal)
}

func FuzzChunkHeader(f *testing.F) {
	fuzz(f, chunkHeader(), func(b []byte) error { return ChunkHeader(b).Check() }, bytes.Equal)
}

func FuzzPage(f *testing.F) {
	fuzz(f, page(), func(b []byte) error { return Page(b).Check(9, 3) }, bytes.Equal)
}
