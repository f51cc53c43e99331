package bufpool

import (
	"errors"
	"strings"
	"testing"
)

func newArenaPool(t *testing.T, arenaBytes int64) *Pool {
	t.Helper()
	p, err := New(Config{TotalBytes: 8 << 20, ArenaBytes: arenaBytes})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func mustAlloc(t *testing.T, a *Arena, n int) []byte {
	t.Helper()
	b, err := a.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	if len(b) != n || addrOf(b)%arenaPage != 0 {
		t.Fatalf("%d bytes at %#x, want %d at a page", len(b), addrOf(b), n)
	}
	return b
}

// TestDevicesFindTheRegionsOfArenas behind those of the data buffers: a buffer is within a region or begins one.
func TestDevicesFindTheRegionsOfArenas(t *testing.T) {
	p := newArenaPool(t, 16*ArenaRegionBytes)
	data, _ := p.Get(p.Account("tenant"), 4096)
	a := p.Arena("store")
	if got, want := p.Regions(), 1+16; got != want {
		t.Fatalf("%d regions, want %d", got, want)
	}
	if _, ok := p.Region(1); ok {
		t.Error("a region of an arena is there before any memory was taken")
	}
	seen := map[int]bool{}
	for _, n := range []int{4096, 100, ArenaRegionBytes - 4096, ArenaRegionBytes, 3*ArenaRegionBytes + 1, 4096} {
		b := mustAlloc(t, a, n)
		piece := b[:min(n, ArenaRegionBytes)]
		i, base, ok := p.RegionOf(piece)
		if !ok || i < 1 || i >= p.Regions() || len(base) != ArenaRegionBytes ||
			OffsetIn(base, b)+len(piece) > ArenaRegionBytes {
			t.Errorf("%d bytes: region %d, %d bytes, %v", n, i, len(base), ok)
		}
		if again, ok := p.Region(i); !ok || addrOf(again) != addrOf(base) {
			t.Errorf("region %d is not the one of its buffer", i)
		}
		seen[i] = true
	}
	if i, _, ok := p.RegionOf(data.B); !ok || i != 0 || len(seen) < 3 {
		t.Errorf("data buffers are in region %d, %v; arenas in %v", i, ok, seen)
	}
	if _, _, ok := p.RegionOf(make([]byte, 100)); ok {
		t.Error("memory of the heap is in a region")
	}
	p.Put(data)
	a.Free()
	p.CloseTest(t)
}

// TestAnArenaWithoutMemorySaysWhoLacksHowMuch and remains usable. Memory that it has returned goes to another arena,
// zeroed.
func TestAnArenaWithoutMemorySaysWhoLacksHowMuch(t *testing.T) {
	p := newArenaPool(t, 4*ArenaRegionBytes)
	a, b := p.Arena("store a"), p.Arena("store b")
	first := mustAlloc(t, a, 3*ArenaRegionBytes)
	for i := range first {
		first[i] = 1
	}
	small := mustAlloc(t, b, 4096)
	_, err := b.Alloc(2 * ArenaRegionBytes)
	if !errors.Is(err, ErrNoMemory) || !strings.Contains(err.Error(), "524288 bytes for store b") ||
		!strings.Contains(err.Error(), "address space") {
		t.Errorf("error %v", err)
	}
	small[0] = 1
	mustAlloc(t, b, ArenaRegionBytes-4096) // the rest of its region
	a.Free()
	for _, v := range mustAlloc(t, b, 3*ArenaRegionBytes) {
		if v != 0 {
			t.Fatal("memory of another arena is not zero")
		}
	}
	b.Free()
	b.Free()
	p.CloseTest(t)
}

// TestArenasAreAccountedFor by name, in the sum, and as leaks until they are freed or abandoned.
func TestArenasAreAccountedFor(t *testing.T) {
	p := newArenaPool(t, 8*ArenaRegionBytes)
	a, b := p.Arena("store a"), p.Arena("store b")
	mustAlloc(t, a, 1)
	mustAlloc(t, b, ArenaRegionBytes+1)
	if a.Bytes() != ArenaRegionBytes || b.Bytes() != 2*ArenaRegionBytes {
		t.Errorf("%d and %d bytes", a.Bytes(), b.Bytes())
	}
	if s := p.Stats(); s.ArenaBytes != 3*ArenaRegionBytes || s.TakenBytes != 3*ArenaRegionBytes || s.InUseBytes != 0 {
		t.Errorf("%+v", s)
	}
	got := map[string]int64{}
	for _, s := range p.AppendAccounts(nil) {
		got[s.Name] = s.InUseBytes
	}
	if len(got) != 2 || got["store a"] != ArenaRegionBytes || got["store b"] != 2*ArenaRegionBytes {
		t.Errorf("accounts %v", got)
	}
	if err := p.Close(); err == nil || !strings.Contains(err.Error(), `"store a"`) {
		t.Errorf("closed with an arena in use: %v", err)
	}
	a.Free()
	b.Abandon()
	if s := p.Stats(); s.ArenaBytes != 2*ArenaRegionBytes {
		t.Errorf("%d bytes after one is freed and one abandoned", s.ArenaBytes)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}
