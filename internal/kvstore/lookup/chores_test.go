package lookup

import (
	"encoding/binary"
	"math"
	"slices"
	"testing"

	"jbofd/internal/nvme"
)

// workOf is what was done so far with the results of range ops: bytes that were cleared or summed up, and entries that
// were passed.
func workOf(m *Machine) (all [MaxRanges]int) {
	for i := range m.ops {
		if o := &m.ops[i]; o.isRange() && o.value != nil {
			ro := &m.ranges[o.ranged]
			all[o.ranged] = ro.passed * choreEntry
			switch ro.chore {
			case clearing:
				all[o.ranged] += ro.at - nvme.KVRangeHeaderBytes
			case sealing:
				all[o.ranged] += ro.sealer.At()
			}
		}
	}
	return all
}

// turns calls Continue until nothing is left to do, and returns how often and the most that one of these turns did.
func turns(t *testing.T, m *Machine) (n, most int) {
	for before := workOf(m); m.Waits(); n++ {
		if n == 10_000 {
			t.Fatal("it does not end")
		}
		m.Continue()
		now, did := workOf(m), 0
		for i := range now {
			did += max(0, now[i]-before[i])
		}
		if most, before = max(most, did), now; m.choresDone > choreBytes+choreEach {
			t.Fatalf("in turn %d, %d bytes are cleared, summed up or passed", n, m.choresDone)
		}
	}
	return n, most
}

// TestLongResultsTakeShortTurns: as many Digests of 1 MiB as there may be end at different times, and each is complete.
func TestLongResultsTakeShortTurns(t *testing.T) {
	h, m := newFailing(t)
	var results [MaxRanges][]byte
	for i := range results {
		results[i] = slices.Repeat([]byte{7}, MaxRangeBytes)
		m.Continue()
		m.Begin(&Request{Op: Digest, Range: Range{Last: math.MaxUint64}, Value: results[i]})
	}
	n, most := turns(t, m)
	if least := 2 * MaxRanges * (nvme.KVMaxSums * nvme.KVSumBytes) / 2 / choreBytes; n < least {
		t.Errorf("%d turns for %d Digests, want %d", n, MaxRanges, least)
	}
	t.Logf("%d turns, at most %d bytes", n, most)
	if !h.done || h.with != Found || m.Busy() != 0 {
		t.Fatalf("ended %v with %d, %d are in progress", h.done, h.with, m.Busy())
	}
	for i, b := range results {
		b := nvme.KVRange(b)
		if err := b.Check(); err != nil || !b.Complete() || b.Items() < nvme.KVMaxSums/2 {
			t.Fatalf("Digest %d: %v, complete %v, %d sums", i, err, b.Complete(), b.Items())
		}
		for k := range b.Items() {
			if b.Sum(k).Count() != 0 || b.Sum(k).Sum() != 0 {
				t.Fatalf("Digest %d: sum %d was not cleared", i, k)
			}
		}
	}
	m.Continue()
	m.Begin(&Request{Op: Digest, Range: Range{Last: math.MaxUint64}, Value: results[0][:4096]})
	if m.Waits() {
		t.Error("a short Digest takes more than its turn")
	}
}

// TestALongResultIsCutInShortTurns: the value of one of many entries cannot be read. Those before it are passed in
// pieces, and then the result has all of them and nothing else.
func TestALongResultIsCutInShortTurns(t *testing.T) {
	for _, c := range []struct {
		left  int // entries before the one that is lost
		why   Result
		with  Result
		items int
	}{{20_000, Corrupt, Found, 20_000}, {1, DeviceError, Found, 1}, {0, Corrupt, Corrupt, 0}} {
		h, m := newFailing(t)
		m.skips = maxSkips // so that it does not begin before it has entries
		m.Begin(&Request{Op: CopyOut, Range: Range{Last: math.MaxUint64}, Value: make([]byte, MaxRangeBytes)})
		ro := &m.ranges[m.ops[m.skipping.First].ranged]
		for i := range c.left + 100 {
			if i == c.left {
				ro.cut, ro.why = len(ro.out), c.why
			}
			e, out, ok := ro.out.Append(binary.LittleEndian.AppendUint32(nil, uint32(i)), 0, 0)
			if !ok {
				t.Fatal("there is no room")
			}
			e.SetPosition(uint64(i + 1))
			e.SetVersion(1)
			ro.out = out
		}
		b := ro.out
		n, most := turns(t, m)
		b = b[:h.bytes]
		t.Logf("%d turns, at most %d bytes", n, most)
		if least := c.left * choreEntry / choreBytes; n < least {
			t.Errorf("%d entries: %d turns, want %d", c.left, n, least)
		}
		to := b.To()
		if err := b.Check(); err != nil || h.with != c.with || b.Items() != c.items || b.Complete() ||
			b.Lost() != (c.items == 0) || to.Position != uint64(max(1, c.items)) {
			t.Errorf("%d entries: %v, result %d, %d items up to %+v, flags %d", c.left, err, h.with, b.Items(), to,
				b.Flags())
		}
	}
}
