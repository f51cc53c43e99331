package kvstore

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/pipeline"
)

// TestACopyOutAdvancesThoughItsFirstObjectGoes: the first object of a CopyOut is deleted, or changes its length, while
// its value is read, and the read fails. The result has what comes behind, and does not end where it begins.
func TestACopyOutAdvancesThoughItsFirstObjectGoes(t *testing.T) {
	changes := map[string]Request{"deleted": {Op: Delete}, "longer": {Op: Put, Value: make([]byte, 3500)}}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			r := newRanged(t, 1, rangedConfigs[0])
			var keys [][]byte
			for i := range 50 {
				keys = append(keys, fmt.Append(nil, i))
				r.do(Request{Op: Put, Key: keys[i], Value: make([]byte, 3000)})
			}
			slices.SortFunc(keys, func(a, b []byte) int { return cmp.Compare(r.position(a), r.position(b)) })
			buf, from := make([]byte, 5000), r.position(keys[10])
			var held []IO
			holds, answered, got := true, false, Reply{}
			run := func() {
				for range 20 {
					r.s.Turn(r.now, &r.act)
					r.now += 1000
					for _, p := range r.act.Replies {
						if p.Tag == 77 {
							answered, got = true, p
						}
					}
					r.act.Replies = r.act.Replies[:0]
					r.act.IOs = slices.DeleteFunc(r.act.IOs, func(q IO) bool {
						value := holds && q.Op == pipeline.Read && len(q.Buf) > 2560
						if value {
							held = append(held, q)
						}
						return value
					})
					r.transfer()
				}
			}
			all := Range{First: from, From: from, Last: math.MaxUint64}
			r.s.Submit(&Request{Op: CopyOut, Tag: 77, Range: all, Value: buf})
			run()
			if len(held) == 0 {
				t.Fatal("no value is read")
			}
			change.Key = keys[10]
			r.s.Submit(&change)
			run()
			holds = false
			for _, q := range held {
				r.s.Complete(q.Tag, errors.New("cannot be read"))
			}
			run()
			if !answered || got.Status != OK {
				t.Fatalf("answered %v: %+v", answered, got)
			}
			b := nvme.KVRange(buf[:got.ValueLen])
			if f, to := b.From(), b.To(); b.Check() != nil || b.Items() == 0 || f.Compare(&to) >= 0 {
				t.Errorf("%v, %d items from %+v to %+v", b.Check(), b.Items(), f, to)
			}
		})
	}
}

// TestACopyInThatWaitsCostsNothing: one that the store has no place for is offered again in each turn, and what it has
// is not looked at.
func TestACopyInThatWaitsCostsNothing(t *testing.T) {
	r := newRanged(t, 1, rangedConfigs[0])
	out := nvme.NewKVRange(make([]byte, MaxRangeBytes), nvme.KVCopy, 0, math.MaxUint64, nvme.KVCursorAt(0, nil))
	for i := range uint64(20_000) {
		e, next, ok := out.Append(fmt.Append(nil, i), 0, 0)
		if !ok {
			t.Fatal(i)
		}
		e.SetPosition(i + 1)
		e.SetVersion(1)
		out = next
	}
	out.SetTo(nvme.KVLastOf(math.MaxUint64))
	out.Seal()
	for i := range uint64(MaxCopyIns) {
		if !r.s.Submit(&Request{Op: CopyIn, Value: slices.Clone(out), Tag: i}) {
			t.Fatal("not taken")
		}
	}
	began := time.Now()
	const n = 1000
	for i := range uint64(n) {
		if r.s.Submit(&Request{Op: CopyIn, Value: out, Version: 5 * (i & 1), Tag: 9}) {
			t.Fatal("taken")
		}
	}
	if each := time.Since(began) / n; each > 50*time.Microsecond { // some 10 ns; looking at all takes a millisecond
		t.Errorf("an attempt takes %v", each)
	}
}

// TestAnExactCopyInAtTheEndOfThePositions: its lanes do not wrap, and reach the last position.
func TestAnExactCopyInAtTheEndOfThePositions(t *testing.T) {
	for _, n := range []uint64{0, 1, 6, 7, 8, 9, 15, 39} {
		r := newRanged(t, 1, rangedConfigs[0])
		for p := range uint64(40) {
			r.do(Request{Op: Put, Key: r.keyAt(math.MaxUint64 - p), Value: []byte("old")})
		}
		first := math.MaxUint64 - n
		out := nvme.NewKVRange(make([]byte, 1000), nvme.KVCopy, first, math.MaxUint64, nvme.KVCursorAt(first, nil))
		out.SetTo(nvme.KVLastOf(math.MaxUint64))
		out.Seal()
		if p := r.do(Request{Op: CopyIn, Value: out, Version: r.s.clock}); p.Status != OK {
			t.Fatalf("%+v", p)
		}
		for p := range uint64(40) {
			if st := r.do(Request{Op: Exist, Key: r.keyAt(math.MaxUint64 - p)}).Status; (st == OK) != (p > n) {
				t.Errorf("an exact copy of nothing from 2^64-%d on: the key at 2^64-%d has status %d", n+1, p+1, st)
			}
		}
	}
}

// keyAt is a key of 16 bytes at a position: it undoes format.HashKey.
func (r *ranged) keyAt(position uint64) []byte {
	const k = uint64(0xD6E8FEB86659FD93)
	mix := func(x, k uint64) uint64 {
		x = (x ^ x>>32) * k
		x = (x ^ x>>32) * k
		return x ^ x>>32
	}
	inverse := k
	for range 6 {
		inverse *= 2 - k*inverse
	}
	unmix := func(x uint64) uint64 {
		x = (x ^ x>>32) * inverse
		x = (x ^ x>>32) * inverse
		return x ^ x>>32
	}
	key, seed := []byte("8 bytes.        "), r.s.hashSeed
	h := mix(seed^binary.LittleEndian.Uint64(key)^uint64(len(key))*0x9E3779B97F4A7C15, k)
	binary.LittleEndian.PutUint64(key[8:], unmix(bits.Reverse64(position))^seed*0xA0761D6478BD642F-h)
	if r.position(key) != position {
		r.tb.Fatalf("%x is at %#x, want %#x", key, r.position(key), position)
	}
	return key
}
