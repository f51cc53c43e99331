package crrs

import (
	"fmt"
	"testing"
)

// Keys that differ in one byte, or are numbers in some form, are spread over the buckets of dirty keys: each has a few
// times its share at most. So a chain that a write walks is short.
func TestKeysAreSpreadOverBuckets(t *testing.T) {
	r := &Replica{dirty: make([]int32, 128)}
	sets := map[string]func(i int) Key{}
	for at := range 16 {
		sets[fmt.Sprintf("byte %d", at)] = func(i int) Key {
			k := Key{Len: 16}
			k.Bytes[at] = byte(i)
			return k
		}
	}
	for _, form := range []string{"%d", "%016d", "user%012d", "%x000000"} {
		sets[form] = func(i int) (k Key) {
			k.Len = uint8(copy(k.Bytes[:], fmt.Sprintf(form, i)))
			return k
		}
	}
	sets["length"] = func(i int) Key { return Key{Len: uint8(i % 17)} }
	for name, key := range sets {
		counts, seen := make([]int, len(r.dirty)), map[Key]bool{}
		for i := range 256 {
			if k := key(i); !seen[k] {
				seen[k] = true
				counts[r.bucket(k)]++
			}
		}
		for b, n := range counts {
			if share := len(seen) / len(counts); n > 5*(share+1) {
				t.Errorf("%s: bucket %d has %d of %d keys", name, b, n, len(seen))
			}
		}
	}
}
