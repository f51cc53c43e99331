package guest

import (
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	"jbofd/internal/kvstore/prelude"
)

func superblock() []byte {
	b := make(Superblock, SuperblockBytes)
	b.SetBlockSize(512)
	b.SetGeneration(3)
	b.SetUUID([16]byte{1, 2})
	b.SetAreaBytes(1 << 20)
	b.SetSalt(4)
	b.SetLogHead(1024)
	b.Seal()
	return b
}

func book() []byte {
	b := make(Book, BookBytes)
	b.SetHome([16]byte{7})
	b.SetGeneration(2)
	b.AddLine([16]byte{5}, 9)
	b.Seal()
	return b
}

func group() []byte {
	b := make(Group, 512)
	copy(b[GroupHeaderBytes:], "records")
	b.SetPlace(4096)
	b.SetLengthBytes(512)
	b.SetRecords(2)
	b.Seal(77)
	return b
}

func record() []byte {
	b := make(Record, RecordHeaderBytes+5)
	b.SetKind(Put)
	b.SetKey([]byte("key"))
	b.SetHome([16]byte{7})
	b.SetPlace(4128)
	b.SetAt(32)
	b.SetValueLen(5)
	copy(b.Value(), "hello")
	b.Seal(77)
	return b
}

// The structures as they are on the SSD; of the long ones the beginning.
var golden = []struct {
	name  string
	make  func() []byte
	check func([]byte) error
	dump  string
}{
	{"superblock", superblock, func(b []byte) error { return Superblock(b).Check(1 << 20) }, "" +
		"4a424f46444b5647" + "01000000" + "________" + "00100000" + // magic, version, CRC32C, length
		"00020000" + "0300000000000000" + "01020000000000000000000000000000" + // block size, generation, UUID
		"0000100000000000" + "0400000000000000" + "0004000000000000"}, // length of the area, salt, LogHead
	{"book", book, func(b []byte) error { return Book(b).Check() }, "" +
		"4a424f46444b5642" + "01000000" + "________" + "00100000" + // magic, version, CRC32C, length
		"01000000" + "0200000000000000" + "07000000000000000000000000000000" + // lines, generation, home
		"00000000000000000000000000000000" + "05000000000000000000000000000000" + "0900000000000000"}, // reserved, area, floor
	{"group", group, func(b []byte) error {
		if err := Group(b).CheckHeader(77, 512); err != nil {
			return err
		}
		return Group(b).CheckContent()
	}, "" +
		"________" + "47" + "000000" + "0010000000000000" + "00020000" + "02000000" + // CRC32C, magic, place, length, records
		"951fa54f" + "00000000" + "7265636f726473"}, // CRC32C of the records, records
	{"record", record, func(b []byte) error { return Record(b).Check(77) }, "" +
		"________" + "52" + "01" + "03" + "00" + "2010000000000000" + // CRC32C, magic, kind, length of the key, place
		"07000000000000000000000000000000" + "6b657900000000000000000000000000" + // home, key
		"05000000" + "20000000" + "68656c6c6f"}, // length of the value, place in the group, value
}

func TestGoldenFrames(t *testing.T) {
	for _, g := range golden {
		b := g.make()
		if err := g.check(b); err != nil {
			t.Errorf("%s: %v", g.name, err)
		}
		got := hex.EncodeToString(b)[:len(g.dump)]
		at := strings.Index(g.dump, "________")
		if got = got[:at] + "________" + got[at+8:]; got != g.dump {
			t.Errorf("%s\n%s, want\n%s", g.name, got, g.dump)
		}
	}
}

func TestAFlippedBitAnywhereIsAnError(t *testing.T) {
	for _, g := range golden {
		b := g.make()
		for bit := range len(b) * 8 {
			b[bit/8] ^= 1 << (bit % 8)
			if err := g.check(b); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%s: bit %d of byte %d flipped: %v, want it damaged", g.name, bit%8, bit/8, err)
			}
			b[bit/8] ^= 1 << (bit % 8)
		}
	}
}

func TestAPlaceOfAnotherLapIsAnother(t *testing.T) {
	log := NewLog(superblock())
	b := Record(record())
	place := uint64(4128)
	b.Seal(log.Seed(place))
	if err := b.Check(log.Seed(place)); err != nil {
		t.Fatal(err)
	}
	for _, other := range []uint64{place + log.LenBytes, place + 8, place + 1<<40} {
		if err := b.Check(log.Seed(other)); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "CRC32C") {
			t.Errorf("at %d: %v", other, err)
		}
	}
	if log.Offset(place) != log.Offset(place+log.LenBytes) || log.NextLap(place) != log.LenBytes || log.Rest(log.LenBytes-512) != 512 {
		t.Errorf("%+v", log)
	}
}

func TestAnotherVersionIsRefusedWithBothNamed(t *testing.T) {
	b := superblock()
	prelude.Seal(b, superMagic, 2)
	if err := Superblock(b).Check(1 << 20); !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), "has 2, this program knows 1") {
		t.Error(err)
	}
	if err := Book(make([]byte, BookBytes)).Check(); !errors.Is(err, ErrBlank) {
		t.Error(err)
	}
}

func FuzzRecord(f *testing.F) {
	f.Add(record())
	f.Fuzz(func(t *testing.T, b []byte) {
		if Record(b).Check(77) == nil {
			_, _ = Record(b).Key(), Record(b).Value()
		}
	})
}

func FuzzGroup(f *testing.F) {
	f.Add(group())
	f.Fuzz(func(_ *testing.T, b []byte) {
		if Group(b).CheckHeader(77, 512) == nil && Group(b).LengthBytes() <= len(b) {
			_ = Group(b).CheckContent()
		}
	})
}

func FuzzBook(f *testing.F) {
	f.Add(book())
	f.Fuzz(func(_ *testing.T, b []byte) {
		if Book(b).Check() == nil {
			for i := range Book(b).Lines() {
				Book(b).Line(i)
			}
		}
	})
}
