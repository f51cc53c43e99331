package ssdtest

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/internal/ssd"
)

// AreaConformance checks that an area of at least 4096 bytes keeps the promises of package ssd. It overwrites some of
// it.
func AreaConformance(t *testing.T, a ssd.Area) {
	i := a.Info()
	if i.Kind == "" || i.SizeBytes < 4096 || i.SizeBytes%ssd.AreaWord != 0 || i.BufferBytes < 0 {
		t.Fatalf("%+v", i)
	}
	if err := a.Healthy(); err != nil {
		t.Fatal(err)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	areaReadsBack(t, a, rand.New(rand.NewPCG(seed, 0)))
	word := make([]byte, 2*ssd.AreaWord)
	for _, tc := range []struct {
		offset int64
		n      int
	}{
		{-8, 8}, {4, 8}, {0, 4}, {i.SizeBytes, 8}, {i.SizeBytes - 8, 16}, {math.MaxInt64 - 7, 8}, {math.MinInt64, 8},
	} {
		if err := a.Write(word[:tc.n], tc.offset); !errors.Is(err, ssd.ErrRange) {
			t.Errorf("a write of %d bytes at %d: %v", tc.n, tc.offset, err)
		}
		if err := a.Read(word[:tc.n], tc.offset); !errors.Is(err, ssd.ErrRange) {
			t.Errorf("a read of %d bytes at %d: %v", tc.n, tc.offset, err)
		}
	}
	n := testing.AllocsPerRun(100, func() {
		if err := errors.Join(a.Write(word, 0), a.Flush(), a.Read(word, 8)); err != nil {
			t.Fatal(err)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations for a write, a flush and a read", n)
	}
}

// areaReadsBack plays random writes against a byte slice, at the beginning and the end of the area.
func areaReadsBack(t *testing.T, a ssd.Area, rng *rand.Rand) {
	const span = 2048
	for _, base := range []int64{0, a.Info().SizeBytes - span} {
		model, got := make([]byte, span), make([]byte, span)
		if err := a.Write(model, base); err != nil {
			t.Fatal(err)
		}
		for step := range 100 {
			n := ssd.AreaWord * rng.IntN(span/ssd.AreaWord/4)
			at := ssd.AreaWord * rng.IntN((span-n)/ssd.AreaWord+1)
			for j := range n {
				model[at+j] = byte(rng.Uint32())
			}
			if err := a.Write(model[at:at+n], base+int64(at)); err != nil {
				t.Fatal(err)
			}
			if rng.IntN(4) == 0 {
				if err := a.Flush(); err != nil {
					t.Fatal(err)
				}
			}
			if err := a.Read(got, base); err != nil || !bytes.Equal(got, model) {
				t.Fatalf("step %d: %d bytes written at %d are not read back: %v", step, n, base+int64(at), err)
			}
		}
	}
}
