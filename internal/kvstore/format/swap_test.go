package format

import (
	"encoding/hex"
	"errors"
	"hash/crc32"
	"strings"
	"testing"
)

func areaSuperblock() []byte {
	b := make(AreaSuperblock, SuperblockBytes)
	b.SetBlockSize(512)
	b.SetGeneration(3)
	b.SetUUID([16]byte{1, 2})
	b.SetAreaBytes(1 << 20)
	b.SetSalt(4)
	b.SetLogHead(1024)
	b.Seal()
	return b
}

func swapManifest() []byte {
	b := make(SwapManifest, SwapManifestBytes)
	b.SetSource([16]byte{7})
	b.SetGeneration(2)
	b.AddArea([16]byte{5}, 9)
	b.Seal()
	return b
}

func swapGroup() []byte {
	b := make(SwapGroup, 512)
	copy(b[SwapGroupHeaderBytes:], "records")
	b.SetPlace(4096)
	b.SetLengthBytes(512)
	b.SetRecords(2)
	b.Seal(77)
	return b
}

func swapRecord() []byte {
	b := make(SwapRecord, SwapRecordHeaderBytes+5)
	b.SetVersion(9)
	b.SetKind(SwapPut)
	b.SetKey([]byte("key"))
	b.SetSource([16]byte{7})
	b.SetPlace(4128)
	b.SetAt(32)
	b.SetValueLen(5)
	copy(b.Value(), "hello")
	b.Seal(77)
	return b
}

// oldSwapRecord is a record of version 1 of the format.
func oldSwapRecord() []byte {
	b := SwapRecord(swapRecord())
	b = append(b[:oldSwapRecordBytes], "hello"...)
	b[recMagic] = oldRecordMagic
	le.PutUint32(b, crc32.Update(77, castagnoli, b[4:]))
	return b
}

// The structures as they are on the SSD; only the beginning of the long ones.
var swapGolden = []struct {
	name  string
	make  func() []byte
	check func([]byte) error
	dump  string
}{
	{"superblock", areaSuperblock, func(b []byte) error { return AreaSuperblock(b).Check(1 << 20) }, "" +
		"4a424f46444b5647" + "02000000" + "________" + "00100000" + // magic, version, CRC32C, length
		"00020000" + "0300000000000000" + "01020000000000000000000000000000" + // block size, generation, UUID
		"0000100000000000" + "0400000000000000" + "0004000000000000"}, // length of the area, salt, LogHead
	{"manifest", swapManifest, func(b []byte) error { return SwapManifest(b).Check() }, "" +
		"4a424f46444b5642" + "01000000" + "________" + "00100000" + // magic, version, CRC32C, length
		"01000000" + "0200000000000000" + "07000000000000000000000000000000" + // areas, generation, source
		// reserved, area, floor
		"00000000000000000000000000000000" + "05000000000000000000000000000000" + "0900000000000000"},
	{"group", swapGroup, func(b []byte) error {
		if err := SwapGroup(b).CheckHeader(77, 512); err != nil {
			return err
		}
		return SwapGroup(b).CheckContent()
	}, "" +
		// CRC32C, magic, place, length, records
		"________" + "47" + "000000" + "0010000000000000" + "00020000" + "02000000" +
		"951fa54f" + "00000000" + "7265636f726473"}, // CRC32C of the records, records
	{"record", swapRecord, func(b []byte) error { return SwapRecord(b).Check(77) }, "" +
		"________" + "72" + "01" + "03" + "00" + "2010000000000000" + // CRC32C, magic, kind, length of the key, place
		"07000000000000000000000000000000" + "6b657900000000000000000000000000" + // source, key
		"05000000" + "20000000" + "0900000000000000" + // length of the value, place in the group, version
		"68656c6c6f"}, // value
	{"record of version 1", oldSwapRecord, func(b []byte) error { return SwapRecord(b).Check(77) }, "" +
		"________" + "52" + "01" + "03" + "00" + "2010000000000000" + // CRC32C, magic, kind, length of the key, place
		"07000000000000000000000000000000" + "6b657900000000000000000000000000" + // source, key
		"05000000" + "20000000" + "68656c6c6f"}, // length of the value, place in the group, value
}

func TestSwapGoldenFrames(t *testing.T) {
	for _, g := range swapGolden {
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

func TestAFlippedBitAnywhereInSwapDataIsAnError(t *testing.T) {
	for _, g := range swapGolden {
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

func TestARecordIsValidInItsLapOnly(t *testing.T) {
	log := NewSwapLog(areaSuperblock())
	b := SwapRecord(swapRecord())
	place := LogOffset(4128)
	b.Seal(log.Seed(place))
	if err := b.Check(log.Seed(place)); err != nil {
		t.Fatal(err)
	}
	for _, other := range []LogOffset{log.LapEnd(place), place + 8, place + 1<<40} {
		if err := b.Check(log.Seed(other)); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "CRC32C") {
			t.Errorf("at %d: %v", other, err)
		}
	}
	if log.Offset(place) != log.Offset(log.LapEnd(place)) || log.NextLap(place) != log.LapEnd(0) ||
		log.Rest(log.LapEnd(0)-512) != 512 {
		t.Errorf("%+v", log)
	}
}

func TestAnotherSwapVersionIsRefusedWithBothNamed(t *testing.T) {
	b := areaSuperblock()
	seal(b, areaMagic, 3)
	if err := AreaSuperblock(b).Check(1 << 20); !errors.Is(err, ErrVersion) ||
		!strings.Contains(err.Error(), "has 3, this program knows 1 to 2") {
		t.Error(err)
	}
	if err := SwapManifest(make([]byte, SwapManifestBytes)).Check(); !errors.Is(err, ErrBlank) {
		t.Error(err)
	}
}

func FuzzSwapRecord(f *testing.F) {
	f.Add(swapRecord())
	f.Add(oldSwapRecord())
	f.Fuzz(func(t *testing.T, b []byte) {
		if SwapRecord(b).Check(77) == nil {
			_, _, _ = SwapRecord(b).Key(), SwapRecord(b).Value(), SwapRecord(b).Version()
		}
	})
}

func FuzzSwapGroup(f *testing.F) {
	f.Add(swapGroup())
	f.Fuzz(func(_ *testing.T, b []byte) {
		if SwapGroup(b).CheckHeader(77, 512) == nil && SwapGroup(b).LengthBytes() <= len(b) {
			_ = SwapGroup(b).CheckContent()
		}
	})
}

func FuzzSwapManifest(f *testing.F) {
	f.Add(swapManifest())
	f.Fuzz(func(_ *testing.T, b []byte) {
		if SwapManifest(b).Check() == nil {
			for i := range SwapManifest(b).Areas() {
				SwapManifest(b).Area(i)
			}
		}
	})
}
