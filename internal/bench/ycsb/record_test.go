package ycsb

import (
	"bytes"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
)

var seed = flag.Uint64("seed", 1, "seed of the tests that draw")

func TestKeysAreDistinctAndOrderedOnlyIfAskedFor(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		seen := map[[KeyBytes]byte]bool{}
		var keys [][]byte
		for n := range uint64(100_000) {
			var k [KeyBytes]byte
			putKey(&k, n, ordered)
			if seen[k] {
				t.Fatalf("ordered %v: key %s of record %d is there already", ordered, k[:], n)
			}
			seen[k] = true
			keys = append(keys, k[:])
		}
		if got := slices.IsSortedFunc(keys, bytes.Compare); got != ordered {
			t.Errorf("ordered %v, keys are sorted: %v", ordered, got)
		}
	}
	var k [KeyBytes]byte
	if putKey(&k, 33, true); string(k[:]) != "user000000000011" {
		t.Errorf("ordered key of 33 is %s", k[:])
	}
}

// TestKeyEncodingIsStable: every later version must find the keys of a loaded data set.
func TestKeyEncodingIsStable(t *testing.T) {
	for n, want := range map[uint64]string{0: "user000000000000", 1: "user9b5oo9o0m0jt", 1 << 40: "userk8fjdreufgbk"} {
		var k [KeyBytes]byte
		if putKey(&k, n, false); string(k[:]) != want {
			t.Errorf("key of %d is %s, want %s", n, k[:], want)
		}
	}
}

func TestAnyChangeOfAValueIsFound(t *testing.T) {
	for _, n := range []int{24, 25, 31, 32, 47, 48, 49, 100, 256, 1000} {
		s := stamp{record: 7, life: 3, version: 5}
		v := make([]byte, n)
		fillValue(v, s)
		if got, err := checkValue(v, 7); err != nil || got != s {
			t.Fatalf("%d bytes: %v, %+v", n, err, got)
		}
		for bit := range 8 * n {
			v[bit/8] ^= 1 << (bit % 8)
			if _, err := checkValue(v, 7); err == nil {
				t.Fatalf("%d bytes: bit %d of byte %d can change", n, bit%8, bit/8)
			}
			v[bit/8] ^= 1 << (bit % 8)
		}
		for _, cut := range []int{0, 8, 16, 23, n - 1} {
			if _, err := checkValue(v[:cut], 7); err == nil {
				t.Errorf("%d bytes of %d pass", cut, n)
			}
		}
		if _, err := checkValue(append(slices.Clone(v), 0), 7); err == nil {
			t.Errorf("%d bytes and one more pass", n)
		}
		if _, err := checkValue(v, 8); err == nil || !strings.Contains(err.Error(), "another record") {
			t.Errorf("the value of another record: %v", err)
		}
	}
}

func TestLengthsStayInTheirBounds(t *testing.T) {
	w := Workload{Fields: 10, MinField: 3, MaxField: 30}
	least, most := 1<<20, 0
	for n := range uint64(20_000) {
		l := w.valueLen(stamp{record: n, version: 1})
		least, most = min(least, l), max(most, l)
	}
	if least < 30 || most > 300 || least > 90 || most < 240 {
		t.Errorf("lengths from %d to %d, fields are 3 to 30 bytes", least, most)
	}
}

func BenchmarkValue(b *testing.B) {
	for _, n := range []int{256, 1000, 4096} {
		v := make([]byte, n)
		b.Run(fmt.Sprintf("fill/%d", n), func(b *testing.B) {
			b.SetBytes(int64(n))
			for i := uint32(0); b.Loop(); i++ {
				fillValue(v, stamp{record: 7, version: i})
			}
		})
		b.Run(fmt.Sprintf("check/%d", n), func(b *testing.B) {
			b.SetBytes(int64(n))
			fillValue(v, stamp{record: 7, version: 1})
			for b.Loop() {
				if _, err := checkValue(v, 7); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
