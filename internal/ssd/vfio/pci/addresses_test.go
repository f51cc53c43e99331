package pci

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

func TestTheBARsOfAFunctionAreRead(t *testing.T) {
	b := Bus{Sys: t.TempDir()}
	dir := b.sys("devices", "0000:03:00.0")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if got, err := b.barsOf("0000:03:00.0"); len(got) > 0 || err != nil {
		t.Errorf("%v, %v without the file", got, err)
	}
	for text, want := range map[string][]addresses{
		"0x00000000febf0000 0x00000000febf3fff 0x0000000000140204\n" +
			"0x0000000000000000 0x0000000000000000 0x0000000000000000\n" +
			"0x0000000800000000 0x00000008000fffff 0x000000000014220c\n": {{0xfebf0000, 0xfebf4000},
			{0x800000000, 0x800100000}},
		"0x12 what\n": nil,
	} {
		if err := os.WriteFile(filepath.Join(dir, "resource"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := b.barsOf("0000:03:00.0"); !slices.Equal(got, want) || (err == nil) != (want != nil) {
			t.Errorf("%q: %v, %v, want %v", text, got, err, want)
		}
	}
}

// TestNoAddressIsInABAR: addresses that are assigned one after the other keep away from all ranges, and apart.
func TestNoAddressIsInABAR(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 1000 {
		var avoid []addresses
		for range rng.IntN(4) {
			from := uint64(firstAddress) + rng.Uint64N(1<<30)&^4095
			avoid = append(avoid, addresses{from, from + 4096 + rng.Uint64N(1<<26)&^4095})
		}
		next := uint64(firstAddress)
		for range 20 {
			bytes := 4096 * (1 + rng.IntN(20000))
			at := place(next, bytes, avoid)
			if at < next {
				t.Fatalf("%#x, from %#x on", at, next)
			}
			for _, a := range avoid {
				if at < a.end && at+uint64(bytes) > a.from {
					t.Fatalf("%d bytes at %#x are in %#x to %#x", bytes, at, a.from, a.end)
				}
			}
			if at != next && at%addressAlign != 0 {
				t.Fatalf("%#x is no multiple of %#x", at, addressAlign)
			}
			if at != next && !slices.ContainsFunc(avoid, func(a addresses) bool { return at-a.end < addressAlign }) {
				t.Fatalf("%#x instead of %#x, without a reason", at, next)
			}
			next = at + uint64(bytes)
		}
	}
}
