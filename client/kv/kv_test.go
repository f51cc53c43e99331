package kv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"jbofd/client"
	"jbofd/internal/nvme"
)

// overKeys runs a test with plain keys and with long keys.
func overKeys(t *testing.T, test func(t *testing.T, s *target, n *Namespace)) {
	for _, long := range []bool{false, true} {
		t.Run(fmt.Sprintf("long=%t", long), func(t *testing.T) {
			s := newTarget(t)
			test(t, s, open(t, s, Options{LongKeys: long}))
		})
	}
}

func TestOperationsFollowTheirContract(t *testing.T) {
	overKeys(t, func(t *testing.T, s *target, n *Namespace) {
		ctx := testContext(t)
		key := []byte("key")
		want := func(what string, got, want error) {
			t.Helper()
			if !errors.Is(got, want) || want == nil && got != nil {
				t.Errorf("%s: %v, want %v", what, got, want)
			}
		}
		exists := func(want bool) {
			t.Helper()
			if got, err := n.Exists(ctx, key); got != want || err != nil {
				t.Errorf("Exists: %t, %v, want %t", got, err, want)
			}
		}
		value := func(want string) {
			t.Helper()
			if got, err := n.Value(ctx, key); string(got) != want || err != nil {
				t.Errorf("Value: %q, %v, want %q", got, err, want)
			}
		}
		_, err := n.Get(ctx, key, make([]byte, 10))
		want("Get of nothing", err, ErrKeyNotFound)
		_, err = n.Value(ctx, key)
		want("Value of nothing", err, ErrKeyNotFound)
		exists(false)
		want("PutIfPresent of nothing", n.PutIfPresent(ctx, key, []byte("x")), ErrKeyNotFound)
		exists(false)
		want("PutIfAbsent", n.PutIfAbsent(ctx, key, []byte("one")), nil)
		value("one")
		want("PutIfAbsent again", n.PutIfAbsent(ctx, key, []byte("two")), ErrKeyExists)
		value("one")
		want("PutIfPresent", n.PutIfPresent(ctx, key, []byte("three")), nil)
		value("three")
		want("Put", n.Put(ctx, key, []byte("four")), nil)
		value("four")
		exists(true)
		want("Delete", n.Delete(ctx, key), nil)
		exists(false)
		want("Delete again", n.Delete(ctx, key), nil)
		s.with(func() { s.errorOnDelete = true })
		want("Delete where the target objects", n.Delete(ctx, key), nil)
		want("Put", n.Put(ctx, key, nil), nil)
		value("")
		exists(true)
	})
}

func TestValuesOfAllSizesReadBack(t *testing.T) {
	overKeys(t, func(t *testing.T, s *target, n *Namespace) {
		ctx := testContext(t)
		most := 1 << 20
		key := func(size int) []byte { return fmt.Appendf(nil, "size%d", size) }
		if n.hash != nil {
			most -= 12 + len(key(most))
		}
		for _, size := range []int{0, 1, 3, 16, 304, 528, 1008, 4096, 8191, 8192, 8193, 70000, most} {
			want := pattern(size, uint64(size))
			if err := n.Put(ctx, key(size), want); err != nil {
				t.Fatalf("%d bytes: %v", size, err)
			}
			if got, err := n.Value(ctx, key(size)); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%d bytes read back as %d: %v", size, len(got), err)
			}
		}
	})
}

func TestGetOfALongerValueReturnsWhatFitsAndTheSize(t *testing.T) {
	overKeys(t, func(t *testing.T, s *target, n *Namespace) {
		ctx := testContext(t)
		want := pattern(10000, 1)
		if err := n.Put(ctx, []byte("k"), want); err != nil {
			t.Fatal(err)
		}
		for _, room := range []int{0, 1, 11, 12, 13, 4096, 9999, 10000, 10001, 2 << 20} {
			dst := bytes.Repeat([]byte{0xee}, room)
			size, err := n.Get(ctx, []byte("k"), dst)
			fits := min(room, len(want))
			if size != len(want) || err != nil || !bytes.Equal(dst[:fits], want[:fits]) {
				t.Errorf("room for %d: size %d, %v, data equal %t", room, size, err,
					bytes.Equal(dst[:fits], want[:fits]))
			}
			if room > fits && (dst[fits] != 0xee || dst[room-1] != 0xee) {
				t.Errorf("room for %d: bytes behind the value were written", room)
			}
		}
	})
}

func TestLimitsAreNamed(t *testing.T) {
	ctx := testContext(t)
	for _, c := range []struct {
		mdts     uint8
		maxValue uint32
		size     int
		say      string
	}{
		{5, 1 << 20, 128<<10 + 1, "MDTS"},
		{8, 1 << 16, 1<<16 + 1, "KVVML"},
	} {
		s := newTarget(t)
		s.with(func() { s.mdts, s.maxValue = c.mdts, c.maxValue })
		n := open(t, s, Options{})
		if got := n.Info().MaxValue; got != c.size-1 {
			t.Errorf("MaxValue = %d, want %d", got, c.size-1)
		}
		if err := n.Put(ctx, []byte("k"), make([]byte, c.size-1)); err != nil {
			t.Errorf("%d bytes: %v", c.size-1, err)
		}
		err := n.Put(ctx, []byte("k"), make([]byte, c.size))
		if !errors.Is(err, ErrValueTooLarge) || !strings.Contains(err.Error(), c.say) || !strings.Contains(err.Error(),
			fmt.Sprint(c.size-1)) {
			t.Errorf("%d bytes: %v, want ErrValueTooLarge naming %s and %d", c.size, err, c.say, c.size-1)
		}
		if n := s.count(nvme.CmdKVStore); n != 1 {
			t.Errorf("%d Stores were sent, want 1", n)
		}
	}
	s := newTarget(t)
	s.with(func() { s.mdts = 1 }) // 8 KiB: not even the key fits
	n := open(t, s, Options{LongKeys: true})
	for what, err := range map[string]error{
		"Put": n.Put(ctx, make([]byte, 9000), nil), "Delete": n.Delete(ctx, make([]byte, 9000)),
	} {
		if !errors.Is(err, ErrValueTooLarge) {
			t.Errorf("%s with a key beyond the transfer limit: %v", what, err)
		}
	}
	s.set("big", make([]byte, 10000))
	if _, err := open(t, s, Options{}).Value(ctx, []byte("big")); !errors.Is(err, ErrValueTooLarge) ||
		!strings.Contains(err.Error(), "10000") {
		t.Errorf("Value beyond the transfer limit: %v", err)
	}
	if _, err := open(t, s, Options{}).Get(ctx, []byte("big"), make([]byte, 10000)); !errors.Is(err,
		ErrValueTooLarge) ||
		!strings.Contains(err.Error(), "MDTS") {
		t.Errorf("Get beyond the transfer limit: %v", err)
	}
}

func TestKeysOfNoValidLengthAreRefused(t *testing.T) {
	s := newTarget(t)
	ctx := testContext(t)
	for _, c := range []struct {
		o    Options
		most int
	}{{Options{}, 16}, {Options{LongKeys: true}, 64 << 10}} {
		n := open(t, s, c.o)
		for _, size := range []int{0, c.most + 1} {
			if err := n.Put(ctx, make([]byte, size), nil); !errors.Is(err, client.ErrInvalid) {
				t.Errorf("%+v: key of %d bytes: %v", c.o, size, err)
			}
		}
		for _, size := range []int{1, c.most} {
			if err := n.Put(ctx, make([]byte, size), []byte("v")); err != nil {
				t.Errorf("%+v: key of %d bytes: %v", c.o, size, err)
			}
			if v, err := n.Value(ctx, make([]byte, size)); err != nil || string(v) != "v" {
				t.Errorf("%+v: key of %d bytes: %q, %v", c.o, size, v, err)
			}
		}
		if n.Info().MaxKey != c.most {
			t.Errorf("MaxKey = %d", n.Info().MaxKey)
		}
	}
}

func TestStatusesReachTheirErrors(t *testing.T) {
	s := newTarget(t)
	n := open(t, s, Options{})
	ctx := testContext(t)
	for st, want := range map[nvme.Status]error{
		nvme.CapacityExceeded | nvme.DNR: ErrCapacityExceeded, nvme.InvalidValueSize | nvme.DNR: ErrValueTooLarge,
		nvme.KeyExists | nvme.DNR: ErrKeyExists, nvme.KeyDoesNotExist | nvme.DNR: ErrKeyNotFound,
		nvme.InvalidNamespaceOrFormat | nvme.DNR: client.ErrNamespaceGone, nvme.UnrecoveredReadError | nvme.DNR: nil,
	} {
		s.onIO(func(*nvme.SQE) (nvme.Status, verdict) { return st, answer })
		err := n.Put(ctx, []byte("k"), nil)
		var se *client.StatusError
		if !errors.As(err, &se) || se.Status != st || se.Command != "Put" {
			t.Errorf("%s: %v", st, err)
		}
		for _, e := range []error{ErrCapacityExceeded, ErrValueTooLarge, ErrKeyExists, ErrKeyNotFound,
			client.ErrNamespaceGone, client.ErrUnsupported} {
			if errors.Is(err, e) != (e == want) {
				t.Errorf("%s: is %v: %t", st, e, e != want)
			}
		}
	}
}

func TestTransientStatusIsRetried(t *testing.T) {
	s := newTarget(t)
	n := open(t, s, Options{})
	tries := 0
	s.onIO(func(*nvme.SQE) (nvme.Status, verdict) {
		if tries++; tries < 3 {
			return nvme.NamespaceNotReady, answer
		}
		return 0, carryOut
	})
	if err := n.Put(testContext(t), []byte("k"), nil); err != nil || s.count(nvme.CmdKVStore) != 3 {
		t.Errorf("%d tries, %v", s.count(nvme.CmdKVStore), err)
	}
}

func TestOpenRefusesOtherNamespaces(t *testing.T) {
	s := newTarget(t)
	c := open(t, s, Options{}).c
	ctx := testContext(t)
	if _, err := Open(ctx, c, 1, Options{}); !errors.Is(err, client.ErrUnsupported) || strings.Count(err.Error(),
		"namespace 1") != 1 {
		t.Errorf("blocks: %v", err)
	}
	if _, err := c.Namespace(ctx, 2); !errors.Is(err, client.ErrUnsupported) {
		t.Errorf("key value as blocks: %v", err)
	}
	if d, err := c.Describe(ctx, 2); err != nil || d.CSI != 1 {
		t.Errorf("Describe: %+v, %v", d, err)
	}
}

func TestManyGoroutinesShareANamespace(t *testing.T) {
	overKeys(t, func(t *testing.T, s *target, n *Namespace) {
		ctx := testContext(t)
		var wg sync.WaitGroup
		for g := range 16 {
			wg.Go(func() {
				key := fmt.Appendf(nil, "goroutine %d", g)
				for i := range 30 {
					want := pattern(100*i, uint64(g*1000+i))
					if err := n.Put(ctx, key, want); err != nil {
						t.Error(err)
						return
					}
					if got, err := n.Value(ctx, key); err != nil || !bytes.Equal(got, want) {
						t.Errorf("goroutine %d: %d bytes, %v", g, len(got), err)
						return
					}
				}
			})
		}
		wg.Wait()
	})
}

func TestKeysRepeatsListUntilComplete(t *testing.T) {
	overKeys(t, func(t *testing.T, s *target, n *Namespace) {
		s.with(func() { s.maxListed = 7 })
		ctx := testContext(t)
		want := []string{}
		check := func() {
			t.Helper()
			got := []string{}
			for key, err := range n.Keys(ctx) {
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, string(key))
			}
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("%d keys, want %d:\n%q\n%q", len(got), len(want), got, want)
			}
		}
		check()
		for i := range 50 {
			key := strings.Repeat(string(rune('a'+i%26)), 1+i%16)
			if n.hash != nil && i%10 == 0 {
				key = fmt.Sprintf("%d %s", i, strings.Repeat("long", i*20)) // up to more than firstLook
			}
			if err := n.Put(ctx, []byte(key), pattern(i*50, 1)); err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(want, key) {
				want = append(want, key)
			}
			if i == 0 || i == 6 || i == 7 || i == 49 {
				check()
			}
		}
		for range n.Keys(ctx) {
			break // the loop may end early
		}
	})
}

func TestListingContinuesAfterADeletedKey(t *testing.T) {
	s := newTarget(t)
	s.with(func() { s.maxListed = 2 })
	for i := range 9 {
		s.set(fmt.Sprint("key", i), nil)
	}
	n := open(t, s, Options{})
	ctx := testContext(t)
	var got []string
	for key, err := range n.Keys(ctx) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, string(key))
		if err := n.Delete(ctx, key); err != nil {
			t.Fatal(err)
		}
	}
	if len(got) != 9 || !slices.IsSorted(got) {
		t.Errorf("%q", got)
	}
}

func TestBrokenListsAreErrors(t *testing.T) {
	s := newTarget(t)
	n := open(t, s, Options{})
	s.onIO(func(*nvme.SQE) (nvme.Status, verdict) { return nvme.Success, answer }) // without data
	for key, err := range n.Keys(testContext(t)) {
		if key != nil || !errors.Is(err, client.ErrProtocol) {
			t.Errorf("%q, %v", key, err)
		}
	}
	if _, err := n.Get(testContext(t), []byte("k"), make([]byte, 10)); err != nil {
		t.Errorf("an empty value: %v", err)
	}
}

func TestLongKeysOfOneHashCollideAndNeverMix(t *testing.T) {
	s := newTarget(t)
	n := open(t, s, Options{LongKeys: true, hash: oneHash})
	ctx := testContext(t)
	first, second, prefix := []byte("key of some length"), []byte("key with the same hash"), []byte("key")
	if err := n.Put(ctx, first, []byte("first")); err != nil {
		t.Fatal(err)
	}
	for _, other := range [][]byte{second, prefix} {
		if err := n.Put(ctx, other, []byte("second")); !errors.Is(err, ErrKeyCollision) {
			t.Errorf("Put: %v", err)
		}
		if err := n.PutIfAbsent(ctx, other, []byte("second")); !errors.Is(err, ErrKeyCollision) {
			t.Errorf("PutIfAbsent: %v", err)
		}
		if err := n.PutIfPresent(ctx, other, []byte("second")); !errors.Is(err, ErrKeyNotFound) {
			t.Errorf("PutIfPresent: %v", err)
		}
		if _, err := n.Value(ctx, other); !errors.Is(err, ErrKeyNotFound) {
			t.Errorf("Get: %v", err)
		}
		if ok, err := n.Exists(ctx, other); ok || err != nil {
			t.Errorf("Exists: %t, %v", ok, err)
		}
		if err := n.Delete(ctx, other); err != nil {
			t.Errorf("Delete: %v", err)
		}
	}
	if v, err := n.Value(ctx, first); err != nil || string(v) != "first" {
		t.Errorf("the first key: %q, %v", v, err)
	}
	if err := n.Delete(ctx, first); err != nil {
		t.Fatal(err)
	}
	if err := n.Put(ctx, second, []byte("second")); err != nil {
		t.Errorf("Put when the other is gone: %v", err)
	}
}

func TestValuesStoredWithoutLongKeysAreForeign(t *testing.T) {
	s := newTarget(t)
	ctx := testContext(t)
	n := open(t, s, Options{LongKeys: true, hash: oneHash})
	h := oneHash([]byte("x"))
	for _, v := range [][]byte{nil, []byte("short"), pattern(500, 1), []byte("JKVL\x02\x00\x00\x00\x01\x00\x00\x00x"),
		[]byte("JKVL\x01\x00\x00\x00\x00\x00\x00\x00x")} {
		s.set(string(h[:]), v)
		for what, f := range map[string]func() error{
			"Put":          func() error { return n.Put(ctx, []byte("x"), nil) },
			"PutIfAbsent":  func() error { return n.PutIfAbsent(ctx, []byte("x"), nil) },
			"PutIfPresent": func() error { return n.PutIfPresent(ctx, []byte("x"), nil) },
			"Delete":       func() error { return n.Delete(ctx, []byte("x")) },
			"Get":          func() error { _, err := n.Get(ctx, []byte("x"), make([]byte, 100)); return err },
			"Exists":       func() error { _, err := n.Exists(ctx, []byte("x")); return err },
		} {
			if err := f(); !errors.Is(err, ErrForeignValue) {
				t.Errorf("%s of %.20q: %v", what, v, err)
			}
		}
		for key, err := range n.Keys(ctx) {
			t.Errorf("Keys yields %q, %v", key, err)
		}
		if v2, err := open(t, s, Options{}).Value(ctx, h[:]); err != nil || !bytes.Equal(v2, v) {
			t.Error("the value was overwritten")
		}
	}
}

// TestLongKeysAgreeWithAMap runs random histories, collisions among them, against a map.
func TestLongKeysAgreeWithAMap(t *testing.T) {
	s := newTarget(t)
	n := open(t, s, Options{LongKeys: true})
	ctx := testContext(t)
	model := map[string]string{}
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 1500 {
		key := strings.Repeat("k", 1+rng.IntN(40))
		value := string(pattern(rng.IntN(2000), uint64(i)))
		_, there := model[key]
		var err, want error
		switch rng.IntN(6) {
		case 0:
			err = n.Put(ctx, []byte(key), []byte(value))
			model[key] = value
		case 1:
			if err = n.PutIfAbsent(ctx, []byte(key), []byte(value)); there {
				want = ErrKeyExists
			} else {
				model[key] = value
			}
		case 2:
			if err = n.PutIfPresent(ctx, []byte(key), []byte(value)); !there {
				want = ErrKeyNotFound
			} else {
				model[key] = value
			}
		case 3:
			err = n.Delete(ctx, []byte(key))
			delete(model, key)
		case 4:
			var ok bool
			if ok, err = n.Exists(ctx, []byte(key)); ok != there {
				t.Fatalf("step %d: Exists %t", i, ok)
			}
		default:
			var v []byte
			if v, err = n.Value(ctx, []byte(key)); !there {
				want = ErrKeyNotFound
			} else if string(v) != model[key] {
				t.Fatalf("step %d: other value of %q", i, key)
			}
		}
		if !errors.Is(err, want) || want == nil && err != nil {
			t.Fatalf("step %d: %v, want %v", i, err, want)
		}
	}
}

func TestPutsAndGetsSurviveALossAndConditionalPutsAreIndeterminate(t *testing.T) {
	overKeys(t, func(t *testing.T, s *target, n *Namespace) {
		ctx := testContext(t)
		lose := func(opcode uint8) {
			lost := false
			s.onIO(func(e *nvme.SQE) (nvme.Status, verdict) {
				if e.Opcode() == opcode && !lost {
					lost = true
					return 0, breakOff
				}
				return 0, carryOut
			})
		}
		key := []byte("k")
		lose(nvme.CmdKVStore)
		if err := n.Put(ctx, key, []byte("one")); err != nil {
			t.Errorf("Put: %v", err)
		}
		lose(nvme.CmdKVRetrieve)
		if v, err := n.Value(ctx, key); err != nil || string(v) != "one" {
			t.Errorf("Get: %q, %v", v, err)
		}
		lose(nvme.CmdKVDelete)
		s.with(func() { s.errorOnDelete = true })
		if err := n.Delete(ctx, key); err != nil {
			t.Errorf("Delete: %v", err)
		}
		lose(nvme.CmdKVStore)
		if err := n.PutIfAbsent(ctx, key, []byte("two")); !errors.Is(err, client.ErrConnectionLost) || !errors.Is(err,
			client.ErrIndeterminate) {
			t.Errorf("PutIfAbsent: %v", err)
		}
		if there, err := n.Exists(ctx, key); err != nil || !there {
			t.Errorf("after an indeterminate PutIfAbsent: %t, %v", there, err)
		}
		lose(nvme.CmdKVStore)
		if err := n.PutIfPresent(ctx, key, []byte("three")); !errors.Is(err, client.ErrConnectionLost) ||
			!errors.Is(err,
				client.ErrIndeterminate) {
			t.Errorf("PutIfPresent: %v", err)
		}
		if v, err := n.Value(ctx, key); err != nil || string(v) != "three" {
			t.Errorf("after an indeterminate PutIfPresent: %q, %v", v, err)
		}
		if n.c.Losses() != 5 {
			t.Errorf("%d losses", n.c.Losses())
		}
	})
}

func TestEndedContextGivesTheBufferBack(t *testing.T) {
	s := newTarget(t)
	n := open(t, s, Options{})
	arrived := make(chan struct{}, 1)
	s.onIO(func(*nvme.SQE) (nvme.Status, verdict) {
		arrived <- struct{}{}
		return 0, drop
	})
	ctx, cancel := context.WithCancel(testContext(t))
	done := make(chan error)
	go func() {
		_, err := n.Get(ctx, []byte("k"), make([]byte, 100))
		done <- err
	}()
	<-arrived
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestCreditsKnowTheNamespaceFromTheStart(t *testing.T) {
	s := newTarget(t)
	s.with(func() { s.credit = nvme.MakeCredit(3, 40) })
	n := open(t, s, Options{})
	if cr := n.Controller().Credit(2); !cr.On || cr.SSD != 3 || cr.Units != 40 || n.Info().SSD != 3 {
		t.Errorf("%+v, drive %d", cr, n.Info().SSD)
	}
	if err := n.Controller().WaitCredit(testContext(t), 2, 4096); err != nil {
		t.Error(err)
	}
	if err := n.Put(testContext(t), []byte("k"), make([]byte, 100000)); err != nil {
		t.Error(err)
	}
}
