package label

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"jbofd/internal/buildtags"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/ssd/ssdtest"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

var (
	seed   = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")
	update = flag.Bool("update", false, "rewrite the golden files")
)

const mib = 1 << 20

func testUUID(n byte) (u uuid.UUID) {
	for i := range u {
		u[i] = n
	}
	return u
}

func sample() *Label {
	return &Label{DriveUUID: testUUID(0xD1), Generation: 7, DeviceBytes: 64 * mib, Extents: []Extent{
		{UUID: testUUID(0xA1), StartBytes: 1 * mib, LengthBytes: 4 * mib, NSID: 1, Use: Block, BlockShift: 12,
			NQN: "nqn.2026-11.example.jbofd:blocks"},
		{UUID: testUUID(0xA2), StartBytes: 8 * mib, LengthBytes: 2 * mib, NSID: 2, Use: KV,
			NQN: "nqn.2026-11.example.jbofd:blocks"},
		{UUID: testUUID(0xA3), StartBytes: 10 * mib, LengthBytes: 1 * mib, Use: Ordering},
	}}
}

func encode(t testing.TB, l *Label) []byte {
	t.Helper()
	b := make([]byte, AreaBytes)
	if err := l.Encode(b); err != nil {
		t.Fatal(err)
	}
	return b
}

func TestDecodeReturnsWhatWasEncoded(t *testing.T) {
	l := sample()
	got, err := Decode(encode(t, l))
	if err != nil || !reflect.DeepEqual(got, l) {
		t.Fatalf("%+v %v, want %+v", got, err, l)
	}
}

// TestGoldenDump compares the format with a dump that was checked by eye against the diagram in the package comment.
func TestGoldenDump(t *testing.T) {
	b := encode(t, sample())
	var s strings.Builder
	section := func(name string, from, to int) {
		fmt.Fprintf(&s, "%s, bytes %d to %d\n", name, from, to-1)
		for at := from; at < to; at += 16 {
			if row := b[at : at+16]; !zero(row) {
				fmt.Fprintf(&s, "%6d  %s\n", at, strings.TrimSpace(hex.Dump(row)[10:]))
			}
		}
	}
	s.WriteString("# rows of zeroes are left out\n")
	section("header: magic, version, CRC32C | label length, entry length, entries | generation, drive UUID | "+
		"device length", 0, 512)
	for i := range 3 {
		section(fmt.Sprintf("entry %d: UUID | start, length | NSID, use, shift, flags, NQN length | NQN", i), 512+i*512,
			1024+i*512)
	}
	section("rest", 2048, AreaBytes)
	const path = "testdata/label.golden"
	if *update {
		if err := os.WriteFile(path, []byte(s.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if s.String() != string(want) {
		t.Errorf("the format has changed (-update if that is meant):\n%s", s.String())
	}
}

func TestDecodeNamesTheWrongField(t *testing.T) {
	fix := func(b []byte) []byte { // a CRC that matches the damage
		crc := checksum(b)
		b[offCRC], b[offCRC+1], b[offCRC+2], b[offCRC+3] = byte(crc), byte(crc>>8), byte(crc>>16), byte(crc>>24)
		return b
	}
	for _, tc := range []struct {
		name string
		at   int
		want error
		says string
	}{
		{"magic", 0, ErrCorrupt, "magic"},
		{"version", offVersion, ErrVersion, "the drive has 254, this program knows 1"},
		{"label length", offAreaBytes, ErrCorrupt, "label length"},
		{"entry length", offEntryBytes, ErrCorrupt, "entry length"},
		{"entries", offEntries + 1, ErrCorrupt, "number of entries"},
		{"reserved", offReserved0, ErrCorrupt, "reserved byte of the header"},
		{"reserved", 511, ErrCorrupt, "reserved byte of the header"},
		{"start", 512 + entStart, ErrCorrupt, "start"},
		{"length", 512 + entLength, ErrCorrupt, "length"},
		{"use", 512 + entUse, ErrCorrupt, "use"},
		{"shift", 512 + entShift, ErrCorrupt, "block size shift"},
		{"flags", 512 + entFlags, ErrCorrupt, "flags"},
		{"NQN length", 512 + entNQNLen, ErrCorrupt, "NQN is"},
		{"entry reserved", 512 + entReserved0, ErrCorrupt, "reserved byte of entry 0"},
		{"entry reserved", 512 + 511, ErrCorrupt, "reserved byte of entry 0"},
		{"rest", AreaBytes - 1, ErrCorrupt, "behind the last entry"},
	} {
		b := encode(t, sample())
		b[tc.at] ^= 0xFF
		if _, err := Decode(fix(b)); !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v, want %v saying %q", tc.name, err, tc.want, tc.says)
		}
	}
	b := encode(t, sample())
	b[700] ^= 1
	if _, err := Decode(b); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "CRC32C") {
		t.Errorf("flipped bit: %v, want the CRC named", err)
	}
	if _, err := Decode(b[:100]); !errors.Is(err, ErrCorrupt) {
		t.Errorf("short: %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(encode(f, sample())[:2048])
	f.Add(encode(f, &Label{DriveUUID: testUUID(1), Generation: 1, DeviceBytes: 4 * mib})[:600])
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, head []byte) {
		b := make([]byte, AreaBytes)
		copy(b, head)
		for _, fixed := range []bool{false, true} {
			if fixed { // past the CRC
				crc := checksum(b)
				b[offCRC], b[offCRC+1], b[offCRC+2], b[offCRC+3] = byte(crc), byte(crc>>8), byte(crc>>16), byte(crc>>24)
			}
			l, err := Decode(b)
			if err != nil {
				continue
			}
			again := make([]byte, AreaBytes)
			if err := l.Encode(again); err != nil || !bytes.Equal(b, again) {
				t.Fatalf("decoded %+v encodes otherwise: %v", l, err)
			}
		}
	})
}

func TestAllocateGrowAndFreeKeepExtentsDisjoint(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := &Label{DriveUUID: testUUID(1), Generation: 1, DeviceBytes: 40*mib + 512*rapid.Int64Range(0, 5000).Draw(t,
			"odd")}
		var next byte
		used := make(map[units.DriveOffset]uuid.UUID) // by MiB
		t.Repeat(map[string]func(*rapid.T){
			"allocate": func(t *rapid.T) {
				next++
				e := Extent{UUID: testUUID(next), LengthBytes: mib * rapid.Int64Range(1, 12).Draw(t, "MiB"), Use: Block,
					NSID: uint32(next)}
				largest := l.LargestFreeBytes()
				got, err := l.Allocate(e)
				if (err == nil) != (e.LengthBytes <= largest) {
					t.Fatalf("allocate %d with %d free in one piece: %v", e.LengthBytes, largest, err)
				}
				if err != nil {
					if !errors.Is(err, ErrNoRoom) {
						t.Fatal(err)
					}
					return
				}
				for at := got.StartBytes / mib; at < got.EndBytes()/mib; at++ {
					if o, taken := used[at]; taken {
						t.Fatalf("MiB %d belongs to %v", at, o)
					}
					used[at] = got.UUID
				}
			},
			"grow": func(t *rapid.T) {
				if len(l.Extents) == 0 {
					t.Skip()
				}
				e := rapid.SampledFrom(l.Extents).Draw(t, "extent")
				length := e.LengthBytes + mib*rapid.Int64Range(0, 5).Draw(t, "by")
				end := e.StartBytes.Add(units.Bytes(length))
				fits := int64(end) <= DataEnd(l.DeviceBytes)
				for at := e.EndBytes() / mib; at < end/mib; at++ {
					_, taken := used[at]
					fits = fits && !taken
				}
				if err := l.Grow(e.UUID, length); (err == nil) != fits {
					t.Fatalf("grow %v to %d: %v, fits %v", e.UUID, length, err, fits)
				} else if err == nil {
					for at := e.StartBytes / mib; at < end/mib; at++ {
						used[at] = e.UUID
					}
				}
			},
			"free": func(t *rapid.T) {
				if len(l.Extents) == 0 {
					t.Skip()
				}
				u := rapid.SampledFrom(l.Extents).Draw(t, "extent").UUID
				if err := l.Free(u); err != nil {
					t.Fatal(err)
				}
				for at, o := range used {
					if o == u {
						delete(used, at)
					}
				}
			},
			"": func(t *rapid.T) {
				if err := l.Validate(); err != nil {
					t.Fatal(err)
				}
				if free := l.FreeBytes(); free != DataEnd(l.DeviceBytes)-mib-int64(len(used))*mib {
					t.Fatalf("%d bytes free", free)
				}
			},
		})
	})
}

func TestRefusalsSayWhatIsPossible(t *testing.T) {
	l := sample()
	for _, tc := range []struct {
		err  error
		want error
		says string
	}{
		{l.Grow(testUUID(0xA1), 8*mib), ErrNoRoom, "from 4MiB to at most 7MiB, 8MiB wanted"},
		{l.Grow(testUUID(0xA1), 3*mib), ErrInvalid, "at least the present"},
		{l.Grow(testUUID(0xA1), 5*mib+1), ErrInvalid, "multiple of 1 MiB"},
		{l.Grow(testUUID(9), mib), ErrNotFound, ""},
		{l.Free(testUUID(9)), ErrNotFound, ""},
		{second(l.Allocate(Extent{UUID: testUUID(4), LengthBytes: 100 * mib, Use: Block})), ErrNoRoom,
			"100MiB wanted, the largest free range has 52MiB"},
		{second(l.Allocate(Extent{UUID: testUUID(0xA1), LengthBytes: mib, Use: Block})), ErrExists, "UUID"},
		{second(l.Allocate(Extent{UUID: testUUID(4), LengthBytes: mib, Use: Block, NSID: 1,
			NQN: "nqn.2026-11.example.jbofd:blocks"})), ErrExists, "NSID 1"},
		{second(l.Allocate(Extent{UUID: testUUID(4), LengthBytes: mib + 512, Use: Block})), ErrInvalid,
			"length is 1049088"},
		{second(l.Allocate(Extent{UUID: testUUID(4), LengthBytes: mib, Use: Block, NQN: strings.Repeat("n", 224)})),
			ErrInvalid, "NQN length is 224"},
		{second(l.Allocate(Extent{UUID: testUUID(4), LengthBytes: mib, Use: Block, NQN: "a\x00b"})), ErrInvalid,
			"printable"},
	} {
		if !errors.Is(tc.err, tc.want) || !strings.Contains(tc.err.Error(), tc.says) {
			t.Errorf("%v, want %v saying %q", tc.err, tc.want, tc.says)
		}
	}
	for i := range MaxExtents {
		l.DeviceBytes = 1 << 40
		u := uuid.UUID{1, byte(i), byte(i >> 8)}
		if _, err := l.Allocate(Extent{UUID: u, LengthBytes: mib, Use: Spare}); err != nil {
			if i != MaxExtents-3 || !errors.Is(err, ErrNoRoom) || !strings.Contains(err.Error(), "255 entries") {
				t.Errorf("extent %d: %v", i, err)
			}
			break
		}
	}
	encode(t, l) // the full table fits
}

func second(_ Extent, err error) error { return err }

// newMem returns a device whose Close does nothing, so that wrappers can be closed.
func newMem(t testing.TB, size int64, blockSize int) ssd.Device {
	t.Helper()
	d, err := mem.Open(mem.Config{Name: "m", SizeBytes: size, BlockSize: blockSize})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return sized{d, size}
}

// sized shows the first size bytes of a device, which is how it looked before it
// grew.
type sized struct {
	ssd.Device
	size int64
}

func (s sized) Info() ssd.Info {
	i := s.Device.Info()
	i.SizeBytes = s.size
	return i
}

func (s sized) Close() error { return nil }

func poke(t *testing.T, d ssd.Device, off int64, b []byte) {
	t.Helper()
	q, err := d.OpenQueue(1)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	start := off &^ 511
	n := (int64(len(b)) + off - start + 511) &^ 511
	block := ssdtest.Read(t, q, start, int(n))
	copy(block[off-start:], b)
	ssdtest.Write(t, q, start, block, 0)
}

func TestBlankForeignAndDamagedAreToldApart(t *testing.T) {
	size := int64(16*mib + 512)
	for _, tc := range []struct {
		name string
		off  int64
		data string
		want error
		says string
	}{
		{"blank", 0, "", ErrBlank, ""},
		{"data between the ends", 4 * mib, "hello", ErrForeign, "something at byte"},
		{"unknown", 100000, "hello", ErrForeign, "unknown kind"},
		{"unknown at the end", size - 100, "hello", ErrForeign, "unknown kind"},
		{"ext4", 0x438, "\x53\xEF", ErrForeign, "ext2/3/4"},
		{"xfs", 0, "XFSB", ErrForeign, "XFS"},
		{"gpt", 512, "EFI PART", ErrForeign, "GPT"},
		{"backup gpt", size - 512, "EFI PART", ErrForeign, "backup of a GPT"},
		{"lvm", 512, "LABELONE", ErrForeign, "LVM"},
		{"swap", 4086, "SWAPSPACE2", ErrForeign, "swap"},
		{"luks", 0, "LUKS\xBA\xBE", ErrForeign, "LUKS"},
		{"md", 4096, "\xFC\x4E\x2B\xA9", ErrForeign, "RAID"},
		{"mbr", 510, "\x55\xAA", ErrForeign, "MBR"},
		{"damaged", 0, magic, ErrCorrupt, "first copy"},
		{"damaged B", TailOffset(size), magic, ErrCorrupt, "last copy"},
	} {
		d := newMem(t, size, 512)
		if tc.data != "" {
			poke(t, d, tc.off, []byte(tc.data)[:len(tc.data)])
		}
		_, err := Open(d)
		if !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: Open says %v, want %v saying %q", tc.name, err, tc.want, tc.says)
		}
		s, err := Format(d, testUUID(1), false)
		if (err == nil) != (tc.want == ErrBlank) {
			t.Errorf("%s: Format without force: %v", tc.name, err)
		}
		if err == nil {
			s.Close()
			if _, err := Format(d, testUUID(2), false); !errors.Is(err, ErrExists) {
				t.Errorf("%s: second Format: %v, want ErrExists", tc.name, err)
			}
		}
		s, err = Format(d, testUUID(3), true)
		if err != nil {
			t.Errorf("%s: Format with force: %v", tc.name, err)
			continue
		}
		s.Close()
		if s, err = Open(d); err != nil || s.Label().DriveUUID != testUUID(3) {
			t.Errorf("%s: Open after Format: %v", tc.name, err)
		} else {
			s.Close()
		}
	}
}

func TestUnknownVersionIsRefusedEvenIfTheOtherCopyIsKnown(t *testing.T) {
	d := newMem(t, 16*mib, 512)
	s, err := Format(d, testUUID(1), false)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	b := encode(t, s.Label())
	b[offVersion] = 2
	crc := checksum(b)
	b[offCRC], b[offCRC+1], b[offCRC+2], b[offCRC+3] = byte(crc), byte(crc>>8), byte(crc>>16), byte(crc>>24)
	poke(t, d, TailOffset(16*mib), b)
	if _, err := Open(d); !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), "has 2") ||
		!strings.Contains(err.Error(), "knows 1") {
		t.Errorf("%v, want ErrVersion with both versions", err)
	}
}

func TestTwoDifferentCopiesOfOneGenerationAreRefused(t *testing.T) {
	d := newMem(t, 16*mib, 512)
	s, err := Format(d, testUUID(1), false)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	l := s.Label().Clone()
	l.DriveUUID = testUUID(2)
	poke(t, d, TailOffset(16*mib), encode(t, l))
	if _, err := Open(d); !errors.Is(err, ErrCorrupt) {
		t.Errorf("%v, want ErrCorrupt", err)
	}
}

func TestGrownDeviceIsRelabelledAndShrunkOneRefused(t *testing.T) {
	for _, grownBy := range []int64{512, 4096, 64 << 10, 8 * mib} { // also less than a label
		full := newMem(t, 16*mib+grownBy, 512)
		small := sized{full, 16 * mib}
		s, err := Format(small, testUUID(1), false)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Update(func(l *Label) error { return second(l.Allocate(sample().Extents[0])) }); err != nil {
			t.Fatal(err)
		}
		want := s.Label().Extents
		s.Close()
		for range 2 {
			s, err = Open(full)
			if err != nil {
				t.Fatalf("grown by %d: %v", grownBy, err)
			}
			if l := s.Label(); l.DeviceBytes != 16*mib+grownBy || !reflect.DeepEqual(l.Extents, want) {
				t.Errorf("grown by %d: %+v", grownBy, l)
			}
			s.Close()
		}
		if _, err := Open(small); !errors.Is(err, ErrShrunk) || !strings.Contains(err.Error(), "16777216") {
			t.Errorf("shrunk by %d: %v, want ErrShrunk with the sizes", grownBy, err)
		}
	}
}

func TestTooSmallDeviceIsRefused(t *testing.T) {
	if _, err := Format(newMem(t, mib, 512), testUUID(1), true); !errors.Is(err, ErrInvalid) {
		t.Errorf("%v, want ErrInvalid", err)
	}
}

func TestFailedWriteLeavesTheOldLabelAndASoundCopy(t *testing.T) {
	for nth := uint64(1); nth <= 2; nth++ {
		inner := newMem(t, 16*mib, 512)
		s, err := Format(inner, testUUID(1), false)
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
		f, err := fault.New(inner, fault.Config{})
		if err != nil {
			t.Fatal(err)
		}
		if s, err = Open(f); err != nil {
			t.Fatal(err)
		}
		f.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Nth: nth, Err: ssd.ErrMedia})
		add := func(n byte) error {
			return s.Update(func(l *Label) error {
				return second(l.Allocate(Extent{UUID: testUUID(n), LengthBytes: mib, Use: Block}))
			})
		}
		if err := add(5); !errors.Is(err, ssd.ErrMedia) || len(s.Label().Extents) != 0 {
			t.Fatalf("failed update: %v, %d extents", err, len(s.Label().Extents))
		}
		if s.sound[0] == s.sound[1] {
			t.Errorf("write %d failed: sound copies %v, want exactly one", nth, s.sound)
		}
		if err := add(6); err != nil {
			t.Fatal(err)
		}
		s.Close()
		f.Close()
		if s, err = Open(inner); err != nil || len(s.Label().Extents) != 1 || s.Label().Extents[0].UUID != testUUID(6) {
			t.Fatalf("after the next update: %v", err)
		}
		s.Close()
	}
}

// TestCrashAtAnyWriteLeavesTheOldOrTheNewLabel loses the power at each write of
// an update, with the device having grown or not since, then at each write of
// the Open that repairs it, and expects the old or the new table, whole.
func TestCrashAtAnyWriteLeavesTheOldOrTheNewLabel(t *testing.T) {
	const size = 4 * mib
	wrapped := func(d ssd.Device, s, nth uint64) *fault.Device {
		f, err := fault.New(d, fault.Config{Seed: s, LoseUnflushed: true})
		if err != nil {
			t.Fatal(err)
		}
		f.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Nth: nth, Crash: true})
		return f
	}
	crashes, rounds := 0, uint64(4)
	if buildtags.Race {
		rounds = 1 // one goroutine: the detector only costs time here
	}
	for round := range rounds {
		for _, bs := range []int{512, 4096} {
			for _, grownBy := range []int64{0, 4096, mib} {
				for first, again := uint64(1), true; again; first++ {
					for second_, more := uint64(1), true; more; second_++ {
						sd := *seed + round*1000 + first*10 + second_
						full := newMem(t, size+grownBy, bs)
						small := sized{full.(sized).Device, size}
						s, err := Format(small, testUUID(1), false)
						if err != nil {
							t.Fatal(err)
						}
						s.Close()

						f := wrapped(small, sd, first)
						if s, err = Open(f); err != nil {
							t.Fatal(err)
						}
						err = s.Update(func(l *Label) error {
							return second(l.Allocate(Extent{UUID: testUUID(7), LengthBytes: mib, Use: Block, NSID: 1}))
						})
						updated := err == nil
						s.Close()
						again = f.Crashed()
						f.Close()
						if again {
							crashes++
						}

						g := wrapped(full, sd+1, second_)
						if s, err = Open(g); err == nil {
							s.Close()
						} else if !g.Crashed() {
							t.Fatalf("-seed %d: crash at write %d of the update: Open: %v", *seed, first, err)
						}
						more = g.Crashed()
						g.Close()

						if s, err = Open(full); err != nil {
							t.Fatalf("-seed %d: block %d, grown by %d, crash at write %d, then at write %d of the "+
								"repair: %v", *seed, bs, grownBy, first, second_, err)
						}
						l := s.Label()
						if n := len(l.Extents); n > 1 || updated && n != 1 || l.DriveUUID != testUUID(1) ||
							l.DeviceBytes != size+grownBy {
							t.Fatalf("-seed %d: after the crashes (update done: %v): %+v", *seed, updated, l)
						}
						if s.sound != [2]bool{true, true} {
							t.Fatalf("-seed %d: not both copies are sound after Open", *seed)
						}
						s.Close()
						full.(sized).Device.Close()
					}
				}
			}
		}
	}
	if crashes == 0 {
		t.Error("nothing crashed: the test tests nothing")
	}
}
