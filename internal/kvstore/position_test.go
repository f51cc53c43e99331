package kvstore

import (
	"math/bits"
	"math/rand/v2"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
)

// TestHostsComputeThePositionsOfStores: a host finds the range of a key as nvme.KVPosition says.
func TestHostsComputeThePositionsOfStores(t *testing.T) {
	for range 1000 {
		seed, key := rand.Uint64(), make([]byte, 1+rand.IntN(format.MaxKey))
		for i := range key {
			key[i] = byte(rand.Uint32())
		}
		if got, want := nvme.KVPosition(seed, key), bits.Reverse64(format.HashKey(seed, key)); got != want {
			t.Fatalf("seed %#x, key % x: a host says %#x, the store %#x", seed, key, got, want)
		}
	}
}
