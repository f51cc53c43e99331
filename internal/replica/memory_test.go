package replica

import (
	"math/bits"
	"math/rand/v2"
	"testing"
)

// TestBlocksDoNotOverlapAndJoinAgain: blocks of any lengths are taken and given back in any order. Each is within its
// region and apart from the others, a block is there if the region is empty, and in the end it is whole again.
func TestBlocksDoNotOverlapAndJoinAgain(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	const size = 64 << 10
	m, err := NewMemory(2, size, func(n int) ([]byte, error) { return make([]byte, n), nil })
	if err != nil {
		t.Fatal(err)
	}
	type held struct {
		b     block
		bytes []byte
		mark  byte
	}
	var all []held
	refused := 0
	for n := range 20_000 {
		if i := rng.IntN(len(all) + 1); i < len(all) && (rng.IntN(2) == 0 || n > 19_000) {
			h := all[i]
			for _, v := range h.bytes {
				if v != h.mark {
					t.Fatal("a block was overwritten")
				}
			}
			m.put(h.b)
			all[i] = all[len(all)-1]
			all = all[:len(all)-1]
			continue
		}
		length := 1 + rng.IntN(1+size>>rng.IntN(12))
		place := rng.IntN(3) // those beyond the last one share its region
		taken := m.regions[min(place, 1)].taken
		b, ok := m.take(place, length)
		if !ok {
			if refused++; taken == 0 && bits.Len(uint(length-1)) <= bits.Len(uint(size-1)) {
				t.Fatalf("no block of %d bytes in an empty region", length)
			}
			continue
		}
		if got, want := m.regions[min(place, 1)].taken-taken, (length+unitBytes-1)/unitBytes*unitBytes; got != want {
			t.Fatalf("a block of %d bytes takes %d, want %d", length, got, want)
		}
		h := held{b: b, bytes: m.bytes(b, length), mark: byte(n)}
		for i := range h.bytes {
			h.bytes[i] = h.mark
		}
		all = append(all, h)
	}
	for _, h := range all {
		m.put(h.b)
	}
	for place := range m.regions {
		b, ok := m.take(place, size)
		if !ok || m.regions[place].taken != size || m.isHalfFree(place) {
			t.Errorf("region %d is not whole again", place)
		}
		if m.put(b); m.regions[place].taken != 0 {
			t.Errorf("%d bytes of region %d are taken", m.regions[place].taken, place)
		}
	}
	if refused == 0 {
		t.Error("memory was never short")
	}
}
