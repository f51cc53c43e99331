package nvme

import (
	"bytes"
	"encoding/hex"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// kvCopy is a KVRange with an object and a tombstone.
func kvCopy() KVRange {
	b := NewKVRange(make([]byte, 256), KVCopy, 4, 0xFF, KVCursorAt(4, nil))
	e, b, _ := b.Append([]byte("ab"), 3, 0)
	e.SetPosition(5)
	e.SetVersion(7)
	copy(e.Value(), "xyz")
	e, b, _ = b.Append([]byte("c"), 0, 0)
	e.SetPosition(5)
	e.SetVersion(0x102)
	e.SetExpires(99)
	e.SetTombstone()
	b.SetTo(KVCursorAt(5, []byte("c")))
	b.SetFlags(KVLost)
	b.SetTime(50)
	b.SetOrigin(0x2A)
	b.Seal()
	return b
}

// kvIdentified is a KVRange with an object that has two identities, and a key that is there for one.
func kvIdentified() KVRange {
	b := NewKVRange(make([]byte, 256), KVCopy, 4, 0xFF, KVCursorAt(4, nil))
	e, b, _ := b.Append([]byte("ab"), 3, 2)
	e.SetPosition(5)
	e.SetVersion(7)
	e.SetIdentity(0, KVIdentity{Client: 1, Seq: 2, Version: 6, KeepUntil: 98})
	e.SetIdentity(1, KVIdentity{Client: 1, Seq: 3, Version: 7})
	e.SetEvicted(true)
	copy(e.Value(), "xyz")
	e, b, _ = b.Append([]byte("c"), 0, 1)
	e.SetPosition(5)
	e.SetVersion(0x102)
	e.SetGone()
	e.SetIdentity(0, KVIdentity{Client: 0xC1, Seq: 0x5E, Version: 0x101, KeepUntil: 99})
	b.SetTo(KVCursorAt(6, nil))
	b.Seal()
	return b
}

func TestKVRangeGolden(t *testing.T) {
	digest := NewKVRange(make([]byte, 256), KVDigest, 0, math.MaxUint64, KVCursorAt(0, nil))
	n, shift := KVSubRanges(0, math.MaxUint64, 2)
	digest.SetShift(shift)
	digest.SetItems(n)
	digest = digest[:KVRangeHeaderBytes+n*KVSumBytes]
	digest.Sum(0).Add(2, 0x10)
	digest.Sum(1).Add(1, 0xFFFFFFFFFFFFFFFF)
	digest.Sum(1).Add(1, 3)
	digest.SetTo(KVLastOf(math.MaxUint64))
	digest.SetFlags(KVComplete)
	digest.Seal()
	count := NewKVRange(make([]byte, 256), KVCount, 1, 2, KVCursorAt(1, []byte("k")))
	count = count[:KVRangeHeaderBytes+KVTotalsBytes]
	count.Totals().Add(3, 4, 5)
	count.SetItems(1)
	count.SetTo(KVCursorAt(2, nil))
	count.Seal()
	ff := strings.Repeat("ff", 8)
	for _, c := range []struct {
		name string
		b    KVRange
		want string
	}{
		{"copy", kvCopy(), "________" + "4b5652" + "01" + // CRC32C, magic, version
			"02" + "02" + "00" + "01" + "a0000000" + // kind, flags, lengths of keys, length
			"0400000000000000" + strings.Repeat("00", 16) + // From
			"0500000000000000" + "63" + strings.Repeat("00", 15) + // To
			"0400000000000000" + "ff00000000000000" + // First, Last
			"02000000" + "00" + "000000" + "32000000" + "2a000000" + // entries, shift, time, origin
			"0500000000000000" + "0700000000000000" + "00000000" + "030000" + "02" + "6162" + "78797a" + "000000" +
			"0500000000000000" + "0201000000000000" + "63000000" + "000000" + "81" + "63" + "00000000000000"},
		{"copy with identities", kvIdentified(), "________" + "4b5652" + "01" +
			"02" + "00" + "00" + "00" + "00010000" +
			"0400000000000000" + strings.Repeat("00", 16) +
			"0600000000000000" + strings.Repeat("00", 16) +
			"0400000000000000" + "ff00000000000000" +
			"02000000" + "00" + "000000" + "00000000" + "00000000" +
			"0500000000000000" + "0700000000000000" + "00000000" + "030000" + "42" +
			"02" + "01" + "0000" + // number, some were dropped
			// client, sequence, version, keep
			"0100000000000000" + "0200000000000000" + "0600000000000000" + "62000000" +
			"0100000000000000" + "0300000000000000" + "0700000000000000" + "00000000" +
			"6162" + "78797a" + "00000000000000" + // key, value
			"0500000000000000" + "0201000000000000" + "00000000" + "000000" + "61" +
			"01" + "00" + "0000" +
			"c100000000000000" + "5e00000000000000" + "0101000000000000" + "63000000" +
			"63" + "00000000000000"},
		{"digest", digest, "________" + "4b5652" + "01" + "04" + "01" + "00" + "10" + "80000000" +
			strings.Repeat("00", 24) + strings.Repeat(ff, 3) + strings.Repeat("00", 8) + ff +
			"02000000" + "3f" + "000000" + "00000000" + "00000000" +
			"0200000000000000" + "1000000000000000" + "0200000000000000" + "0200000000000000"},
		{"count", count, "________" + "4b5652" + "01" + "03" + "00" + "01" + "00" + "80000000" +
			"0100000000000000" + "6b" + strings.Repeat("00", 15) + "0200000000000000" + strings.Repeat("00", 16) +
			"0100000000000000" + "0200000000000000" + "01000000" + "00" + "000000" + "00000000" + "00000000" +
			"0300000000000000" + "0400000000000000" + "0500000000000000" + "0000000000000000"},
	} {
		if err := c.b.Check(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if got := "________" + hex.EncodeToString(c.b)[8:]; got != c.want {
			t.Errorf("%s:\n%s, want\n%s", c.name, got, c.want)
		}
	}
}

func TestKVRangeChecksEveryField(t *testing.T) {
	entry := KVRangeHeaderBytes
	second := entry + KVEntryBytes(KVCopy, 2, 3, 0)
	for _, c := range []struct {
		at    int
		value byte
		say   string
	}{
		{krMagic, 'x', "magic"}, {krVersion, 2, "version"}, {krKind, 9, "kind"}, {krKind, 3, "length"},
		{krKind, 1, "behind the value"}, {krFlags, 4, "flags"}, {krFromLen, 17, "cursor"}, {krFrom, 3, "cursor"},
		{krFrom + 9, 1, "cursor"}, {krFrom, 6, "To"}, {krTo, 3, "To"}, {krToLen, 0, "cursor"},
		{krTo + 8, 'b', "at most To"}, {krFirst, 0xF0, "cursor"}, {krLast, 3, "First"}, {krItems, 1, "fills"},
		{krItems, 3, "offset"}, {krShift, 1, "shift"}, {krShift + 1, 1, "reserved"}, {krTime - 1, 1, "reserved"},
		{entry + keKeyLen, 0, "key length"}, {entry + keKeyLen, 0x11, "key length"}, {entry + keKeyLen, 0x42, "number"},
		{entry + keKeyLen, 0x22, "tombstone"}, {second + keKeyLen, 0x21, "flags"}, {second + keKeyLen, 0xA1, "flags"},
		{entry + keKeyLen, 0x82, "tombstone"}, {entry + keVersion, 0, "version"},
		{entry + keValueLen + 2, 1, "length"}, {second - 1, 1, "behind the value"},
		{second, 4, "behind the one before"}, {second + KVEntryHeaderBytes, 'a', "behind the one before"},
	} {
		b := kvCopy()
		b[c.at] = c.value
		seal := b.LenBytes()
		if c.at != krMagic && c.at != krVersion {
			b[:seal].Seal()
		}
		err := b.Check()
		if err == nil || !strings.Contains(err.Error(), c.say) {
			t.Errorf("byte %d is %d: %v, want an error that says %q", c.at, c.value, err, c.say)
		}
	}
	first, whole := entry+keIdentityCount, len(kvIdentified())
	for _, c := range []struct {
		at    int
		value byte
		say   string
	}{
		{first, 0, "number"}, {first, 9, "number"}, {first, 3, "ascending"}, {first, 8, "number"},
		{first + 1, 2, "reserved"}, {first + 2, 1, "reserved"}, {first + 3, 1, "reserved"}, {first + 4, 0, "client"},
		{first + 20, 0, "ascending"}, {first + 20, 8, "ascending"}, {first + 48, 5, "ascending"},
		{first + 48, 8, "ascending"}, {krKind, 1, "kind"},
		{whole - KVEntryBytes(KVCopy, 1, 0, 1) + keExpires, 1, "flags"},
		{whole - KVEntryBytes(KVCopy, 1, 0, 1) + keKeyLen, 0xE1, "flags"},
	} {
		b := kvIdentified()
		b[c.at] = c.value
		b.Seal()
		if err := b.Check(); err == nil || !strings.Contains(err.Error(), c.say) {
			t.Errorf("byte %d is %d: %v, want an error that says %q", c.at, c.value, err, c.say)
		}
	}
	b := kvCopy()
	for n := range b {
		if KVRange(b[:n]).Check() == nil {
			t.Fatalf("the first %d bytes are valid", n)
		}
		c := kvCopy()
		c[n] ^= 4
		if c.Check() == nil {
			t.Fatalf("with another byte %d it is valid", n)
		}
	}
}

// TestAKVRangeIsCheckedInStepsAsAtOnce: with the same error, or none, and the same entries.
func TestAKVRangeIsCheckedInStepsAsAtOnce(t *testing.T) {
	inSteps := func(b KVRange) (entries int, err error) {
		var c KVChecker
		if err := c.Begin(b); err != nil {
			return 0, err
		}
		for done := false; !done; {
			if done, err = c.Sum(7); err != nil {
				return 0, err
			}
		}
		at := KVRangeHeaderBytes
		for ; ; entries++ {
			if c.left > 0 && c.At() != at {
				t.Fatalf("entry %d is at %d, want %d", entries, c.At(), at)
			}
			e, err := c.Next()
			if e == nil {
				return entries, err
			}
			want, next := b.EntryAt(at)
			if at = next; !bytes.Equal(e, want) {
				t.Fatalf("entry %d is %x, want %x", entries, e, want)
			}
		}
	}
	for _, good := range []KVRange{kvCopy(), kvIdentified()} {
		good = append(good, 1, 2, 3) // other bytes follow
		if n, err := inSteps(good); n != 2 || err != nil {
			t.Errorf("%d entries, %v", n, err)
		}
		for n := range good {
			for _, seal := range []bool{false, true} {
				b := slices.Clone(good)
				if b[n] ^= 4; seal && n != krLength+3 {
					b[:min(len(b), max(b.LenBytes(), KVRangeHeaderBytes))].Seal()
				}
				want := b.Check()
				if _, err := inSteps(b); (err == nil) != (want == nil) || err != nil && err.Error() != want.Error() {
					t.Errorf("with another byte %d: %v, want %v", n, err, want)
				}
			}
		}
	}
}

// TestKVRangeEntriesAscend: no key has two entries, and a digest has as many sums as it says.
func TestKVRangeEntriesAscend(t *testing.T) {
	b := NewKVRange(make([]byte, 256), KVCopy, 4, 0xFF, KVCursorAt(4, nil))
	for range 2 {
		var e KVEntry
		e, b, _ = b.Append([]byte("ab"), 0, 0)
		e.SetPosition(5)
		e.SetVersion(7)
	}
	b.SetTo(KVCursorAt(6, nil))
	b.Seal()
	if err := b.Check(); err == nil || !strings.Contains(err.Error(), "behind the one before") {
		t.Errorf("two entries of a key: %v", err)
	}
	d := NewKVRange(make([]byte, 256), KVDigest, 0, 7, KVCursor{})[:KVRangeHeaderBytes+2*KVSumBytes]
	d.SetTo(KVLastOf(7))
	for n := range 4 {
		d.SetItems(n)
		d.Seal()
		if err := d.Check(); (err == nil) != (n == 2) {
			t.Errorf("a digest of %d sums, of which 2 follow: %v", n, err)
		}
	}
}

// TestKVRangeEntriesAreZeroAtFirst, also in memory that was used before.
func TestKVRangeEntriesAreZeroAtFirst(t *testing.T) {
	buf := bytes.Repeat([]byte{0xFF}, 4096)
	b := NewKVRange(buf, KVCopy, 0, 0xFF, KVCursor{})
	e, _, _ := b.Append([]byte("abc"), 0, KVMaxIdentities)
	want := make(KVEntry, KVEntryBytes(KVCopy, 3, 0, KVMaxIdentities))
	want[keKeyLen], want[keIdentityCount] = 3|keIdentities, KVMaxIdentities
	copy(want[want.keyAt():], "abc")
	if !bytes.Equal(e, want) {
		t.Errorf("%x, want %x", []byte(e), []byte(want))
	}
}

func TestKVSubRangesDivideARange(t *testing.T) {
	for range 2000 {
		first := rand.Uint64() >> rand.IntN(64)
		last := first + min(rand.Uint64()>>rand.IntN(64), math.MaxUint64-first)
		most := 1 << rand.IntN(17)
		n, shift := KVSubRanges(first, last, most)
		if n < 1 || n > most || n <= most/2 && last-first >= uint64(most) {
			t.Fatalf("%#x to %#x: %d sub-ranges, at most %d wanted", first, last, n, most)
		}
		b := NewKVRange(make([]byte, KVRangeHeaderBytes), KVDigest, first, last, KVCursor{})
		b.SetShift(shift)
		next := first
		for i := range n {
			from, to := b.SubRange(i)
			if from != next || to < from || (to-first)>>shift != uint64(i) {
				t.Fatalf("%#x to %#x: sub-range %d is %#x to %#x, want it to begin with %#x", first, last, i, from, to,
					next)
			}
			next = to + 1
		}
		if next != last+1 {
			t.Fatalf("%#x to %#x: %d sub-ranges end before %#x", first, last, n, next)
		}
	}
}

func TestKVCursorsOrderKeys(t *testing.T) {
	last := KVLastOf(7)
	cursors := []KVCursor{KVCursorAt(6, []byte("z")), KVCursorAt(7, nil), KVCursorAt(7, []byte{0}),
		KVCursorAt(7, []byte{0, 0}), KVCursorAt(7, []byte("a")), KVCursorAt(7, []byte("a\x00")),
		KVCursorAt(7, []byte("b")), last, KVCursorAt(8, nil)}
	if !slices.IsSortedFunc(cursors, func(a, b KVCursor) int { return a.Compare(&b) }) {
		t.Error("not in order")
	}
}

// FuzzKVRange: a KVRange that passes Check can be copied entry by entry; no getter panics.
func FuzzKVRange(f *testing.F) {
	f.Add([]byte(kvCopy()), true)
	f.Add([]byte(kvIdentified()), true)
	f.Add(bytes.Repeat([]byte{0xff}, 200), true)
	f.Fuzz(func(t *testing.T, in []byte, seal bool) {
		b := KVRange(slices.Clone(in))
		if seal && len(b) >= KVRangeHeaderBytes {
			b.Seal()
		}
		if b.Check() != nil {
			return
		}
		b = b[:b.LenBytes()]
		if b.Kind() != KVScan && b.Kind() != KVCopy {
			return
		}
		out := NewKVRange(make([]byte, len(b)), b.Kind(), b.First(), b.Last(), b.From())
		out.SetTo(b.To())
		out.SetFlags(b.Flags())
		out.SetTime(b.Time())
		out.SetOrigin(b.Origin())
		for e := range b.Entries() {
			c, next, ok := out.Append(e.Key(), e.ValueLen(), e.Identities())
			if !ok {
				t.Fatal("no room")
			}
			out = next
			c.SetPosition(e.Position())
			c.SetVersion(e.Version())
			c.SetExpires(e.Expires())
			if e.Tombstone() {
				c.SetTombstone()
			}
			if e.Gone() {
				c.SetGone()
			}
			for i := range e.Identities() {
				c.SetIdentity(i, e.Identity(i))
				c.SetEvicted(e.Evicted())
			}
			if b.Kind() == KVCopy {
				copy(c.Value(), e.Value())
			}
		}
		out.Seal()
		if !bytes.Equal(out, b) {
			t.Fatalf("%x is copied as %x", b, out)
		}
	})
}
