package units_test

import (
	"math"
	"testing"

	"jbofd/internal/units"
)

func TestAConversionToBytesNeverOverflows(t *testing.T) {
	for _, shift := range []uint8{0, 9, 12, 31, 62, 63, 64, 255} {
		var last uint64 // the last block whose first byte has an offset below 2^63
		if shift < 64 {
			last = uint64(math.MaxInt64) >> shift
		}
		for _, n := range []uint64{0, 1, 2, last - 1, last, last + 1, 1 << 54, 1 << 55, 1<<63 - 1, 1 << 63, 1<<64 - 1} {
			want := n <= last
			o, ok := units.LBA(n).Offset(shift)
			if ok != want || ok && (uint64(o)>>shift != n || o < 0) {
				t.Errorf("LBA %#x of blocks of 1<<%d bytes: offset %#x, %v, want %v", n, shift, int64(o), ok, want)
			}
			b, ok := units.Blocks(n).Bytes(shift)
			if ok != want || ok && (uint64(b)>>shift != n || b < 0) {
				t.Errorf("%#x blocks of 1<<%d bytes: %#x bytes, %v, want %v", n, shift, int64(b), ok, want)
			}
		}
	}
}

func TestBlocksAreContainedOnlyWithinTheSize(t *testing.T) {
	const top = math.MaxUint64
	for _, c := range []struct {
		size  units.Blocks
		start units.LBA
		count units.Blocks
		want  bool
	}{
		{100, 0, 100, true}, {100, 99, 1, true}, {100, 0, 101, false}, {100, 99, 2, false}, {100, 100, 0, false},
		{100, 100, 1, false}, {0, 0, 0, false}, {0, 0, 1, false},
		// Sums that overflow.
		{100, 1, top, false}, {100, top, 1, false}, {100, top, 2, false}, {100, top - 1, 102, false},
		{top, top - 1, 1, true}, {top, top - 1, 2, false}, {top, 1, top, false}, {top, 0, top, true},
	} {
		if got := c.size.Contains(c.start, c.count); got != c.want {
			t.Errorf("%d blocks contain %d from %d on: %v, want %v", c.size, c.count, c.start, got, c.want)
		}
	}
}

func TestConversionsFollowTheExample(t *testing.T) {
	// A namespace of 1 GiB with blocks of 4 KiB at 3 GiB of its drive.
	const shift, start, size = 12, units.DriveOffset(3 << 30), units.Bytes(1 << 30)
	if n := size.Blocks(shift); n != 1<<18 {
		t.Errorf("it has %d blocks", n)
	}
	o, _ := units.LBA(5).Offset(shift)
	if o != 20480 || o.On(start) != 3<<30+20480 || o.LBA(shift) != 5 || o.Add(4095).LBA(shift) != 5 ||
		o.Add(4096).LBA(shift) != 6 {
		t.Errorf("block 5 begins at %d, on the drive at %d", o, o.On(start))
	}
	if o.Add(512).Sub(o) != 512 || start.Add(512).Sub(start) != 512 || start.Sub(start.Add(512)) != -512 {
		t.Error("Sub does not undo Add")
	}
}

func TestConversionsAllocateNothing(t *testing.T) {
	if n := testing.AllocsPerRun(100, func() {
		o, ok1 := units.LBA(5).Offset(9)
		n, ok2 := units.Blocks(5).Bytes(9)
		if !ok1 || !ok2 || !units.Blocks(100).Contains(5, 5) || o.On(1<<30).Add(n) != 1<<30+5120 {
			t.Error("wrong")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
