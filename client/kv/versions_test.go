package kv

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the random tests; 0: a new one")

// newRand returns a generator with the seed of -seed or a new one, which it prints.
func newRand(t *testing.T) *rand.Rand {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	return rand.New(rand.NewPCG(seed, 11))
}

// overExtended runs a test with plain keys and with long keys on a target with extended key-value.
func overExtended(t *testing.T, o Options, test func(t *testing.T, s *target, n *Namespace)) {
	for _, long := range []bool{false, true} {
		t.Run(fmt.Sprintf("long=%t", long), func(t *testing.T) {
			s := newTarget(t)
			s.with(func() { s.extended = true })
			o.LongKeys = long
			test(t, s, open(t, s, o))
		})
	}
}

func TestVersionsFollowTheirContract(t *testing.T) {
	overExtended(t, Options{}, func(t *testing.T, s *target, n *Namespace) {
		ctx, key := testContext(t), []byte("key")
		last := uint64(0)
		put := func(what string, value string, o PutOptions, want error, current uint64) {
			t.Helper()
			v, err := n.PutWith(ctx, key, []byte(value), o)
			var ve *VersionError
			switch {
			case !errors.Is(err, want) || want == nil && err != nil:
				t.Errorf("%s: %v, want %v", what, err, want)
			case errors.As(err, &ve) && ve.Current != current:
				t.Errorf("%s: the current version is %d, want %d", what, ve.Current, current)
			case err != nil:
			case v <= last:
				t.Errorf("%s: version %d after %d", what, v, last)
			default:
				last = v
				b := make([]byte, 100)
				got, err := n.GetVersion(ctx, key, b)
				if err != nil || got.Version != v || string(b[:got.Size]) != value {
					t.Errorf("%s: %+v, %q, %v, want version %d", what, got, b[:got.Size], err, v)
				}
			}
		}
		if _, err := n.GetVersion(ctx, key, nil); !errors.Is(err, ErrKeyNotFound) {
			t.Errorf("GetVersion of nothing: %v", err)
		}
		put("put of another version", "no", PutOptions{If: IfVersion, Version: 3}, ErrVersionMismatch, 0)
		put("first put", "one", PutOptions{If: IfVersion}, nil, 0)
		put("put of a key that does not exist", "no", PutOptions{If: IfVersion}, ErrVersionMismatch, last)
		put("put of the version", "two", PutOptions{If: IfVersion, Version: last}, nil, 0)
		put("put of the version before", "no", PutOptions{If: IfVersion, Version: last - 1}, ErrVersionMismatch, last)
		put("put if absent", "no", PutOptions{If: IfAbsent}, ErrKeyExists, 0)
		put("put if present", "three", PutOptions{If: IfPresent}, nil, 0)
		put("put", "four", PutOptions{}, nil, 0)
		put("put if newer, and not", "no", PutOptions{If: IfNewer, Version: last}, ErrSuperseded, last)
		put("put if newer", "five", PutOptions{If: IfNewer, Version: last + 1000}, nil, 0)
		put("no such condition", "no", PutOptions{If: 77}, client.ErrInvalid, 0)
		put("two times of expiry", "no", PutOptions{TTL: 1, Expires: time.Now()}, client.ErrInvalid, 0)
		put("a negative time", "no", PutOptions{TTL: -time.Minute}, client.ErrInvalid, 0)
		at := time.Unix(1_900_000_000, 0)
		put("put with an expiry", "six", PutOptions{Expires: at}, nil, 0)
		if o, err := n.GetVersion(ctx, key, nil); err != nil || !o.Expires.Equal(at) || o.Size != 3 {
			t.Errorf("%+v, %v", o, err)
		}
		put("put with a TTL", "seven", PutOptions{TTL: 1500 * time.Millisecond}, nil, 0)
		if o, err := n.GetVersion(ctx, key, nil); err != nil || o.Expires.Unix() != 2 { // this target has no clock
			t.Errorf("%+v, %v", o, err)
		}
		if _, err := n.DeleteWith(ctx, key, DeleteOptions{If: IfVersion, Version: last - 1}); !errors.Is(err,
			ErrVersionMismatch) {
			t.Errorf("delete of another version: %v", err)
		}
		if v, err := n.DeleteWith(ctx, key, DeleteOptions{If: IfVersion, Version: last}); err != nil || v <= last {
			t.Errorf("delete of the version: %d, %v", v, err)
		}
		if v, err := n.DeleteWith(ctx, key, DeleteOptions{Tombstone: true, TTL: time.Hour}); err != nil || v != 0 {
			t.Errorf("delete of nothing: %d, %v", v, err)
		}
		if v, err := n.PutIfVersion(ctx, key, []byte("eight"), 0); err != nil || v <= last {
			t.Errorf("put of a key that was deleted: %d, %v", v, err)
		}
	})
}

func TestVersionedValuesOfAllSizesReadBack(t *testing.T) {
	overExtended(t, Options{}, func(t *testing.T, s *target, n *Namespace) {
		ctx := testContext(t)
		longest := n.Info().MaxVersionedValue
		if long := n.hash != nil; long {
			longest -= 12 + len("key")
		}
		for _, size := range []int{0, 1, 100, 8192 - 48, 8192, 100_000, longest} {
			want := pattern(size, uint64(size))
			v, err := n.PutWith(ctx, []byte("key"), want, PutOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, room := range []int{0, size / 2, size} {
				got := make([]byte, room)
				o, err := n.GetVersion(ctx, []byte("key"), got)
				if err != nil || o.Version != v || o.Size != size || !bytes.Equal(got, want[:room]) {
					t.Errorf("%d bytes into %d: %+v, %v", size, room, o, err)
				}
			}
		}
		_, err := n.PutWith(ctx, []byte("key"), make([]byte, longest+1), PutOptions{})
		if !errors.Is(err, ErrValueTooLarge) {
			t.Errorf("%d bytes: %v", longest+1, err)
		}
		if err := n.Put(ctx, []byte("key"), make([]byte, longest+1)); err != nil { // without its identity
			t.Errorf("Put of %d bytes: %v", longest+1, err)
		}
	})
}

// TestWithoutExtendedKVOperationsNameIt: a target without the extension, or an old one, serves the others as ever.
func TestWithoutExtendedKVOperationsNameIt(t *testing.T) {
	overKeys(t, func(t *testing.T, s *target, n *Namespace) {
		ctx, key := testContext(t), []byte("key")
		if n.Info().Extended || n.Info().MaxVersionedValue != 0 {
			t.Errorf("%+v", n.Info())
		}
		_, get := n.GetVersion(ctx, key, nil)
		_, cas := n.PutIfVersion(ctx, key, nil, 0)
		_, ttl := n.PutWith(ctx, key, nil, PutOptions{TTL: time.Second})
		_, tomb := n.DeleteWith(ctx, key, DeleteOptions{Tombstone: true})
		_, update := n.Update(ctx, key, func(b []byte) ([]byte, error) { return b, nil })
		q := openQueue(t, n)
		_, queued := q.Submit([]Op{{Kind: PutIfVersion, Key: key}})
		for what, err := range map[string]error{"GetVersion": get, "PutIfVersion": cas, "Put with an expiry": ttl,
			"Delete with a tombstone": tomb, "GetVersion needs": update, "operation 0 of the batch": queued} {
			if !errors.Is(err, client.ErrUnsupported) || !strings.Contains(err.Error(), what) ||
				!strings.Contains(err.Error(), "extended key-value (wire extension bit 3)") {
				t.Errorf("%s: %v", what, err)
			}
		}
		if err := n.Put(ctx, key, []byte("value")); err != nil {
			t.Error(err)
		}
		if s.count(nvme.CmdKVStore) == 0 || s.count(nvme.CmdKVXStore)+s.count(nvme.CmdKVXRetrieve) != 0 {
			t.Error("other commands were sent")
		}
	})
	s := newTarget(t)
	s.with(func() { s.extended = true })
	c, err := client.Connect(testContext(t), client.Options{Address: s.addr(), SubNQN: "nqn.2026-11.example.jbofd:test",
		NoExtendedKV: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if n, err := Open(testContext(t), c, 2, Options{}); err != nil || n.Info().Extended {
		t.Errorf("although the host wants none: %v", err)
	}
	for _, d := range []time.Duration{-1, time.Millisecond, time.Hour} {
		if _, err := Open(testContext(t), c, 2, Options{KeepFor: d}); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("KeepFor %s: %v", d, err)
		}
	}
}

// losses makes the target lose a part of all I/O commands with their connection, before or after it carries them out.
func losses(s *target, rng *rand.Rand, oneIn int) {
	rng = rand.New(rand.NewPCG(rng.Uint64(), 1)) // the target's
	s.onIO(func(*nvme.SQE) (nvme.Status, verdict) {
		switch rng.IntN(2 * oneIn) {
		case 0:
			return 0, breakOff
		case 1:
			return 0, breakBefore
		}
		return 0, carryOut
	})
}

// randomWrite returns a random write of the key of which the object is known, and whether it will succeed.
func randomWrite(rng *rand.Rand, version uint64) (op Op, want error) {
	op.Kind = []Kind{Put, PutIfAbsent, PutIfPresent, PutIfVersion, PutIfNewer, Delete, DeleteIfVersion}[rng.IntN(7)]
	op.WantVersion = true
	switch op.Kind {
	case PutIfAbsent:
		if version != 0 {
			want = ErrKeyExists
		}
	case PutIfPresent:
		if version == 0 {
			want = ErrKeyNotFound
		}
	case PutIfVersion, DeleteIfVersion:
		if op.Version = version; op.Version == 0 && op.Kind == DeleteIfVersion || rng.IntN(4) == 0 {
			op.Version, want = version+1, ErrVersionMismatch
		}
	case PutIfNewer:
		if op.Version = version + 1 + rng.Uint64N(100); rng.IntN(4) == 0 && version != 0 {
			op.Version, want = version, ErrSuperseded
		}
	}
	return op, want
}

// TestWritesAreAppliedOnceOverLosses runs all kinds of writes while connections are lost, before and after commands are
// carried out. Every write has the result that it has without losses, and gives one version.
func TestWritesAreAppliedOnceOverLosses(t *testing.T) {
	overExtended(t, Options{}, func(t *testing.T, s *target, n *Namespace) {
		ctx, rng := testContext(t), newRand(t)
		q := openQueue(t, n)
		losses(s, rng, 8)
		const keys = 20
		versions := make([]uint64, keys)
		values := make([][]byte, keys)
		check := func(key int, op *Op, want, err error, version uint64) {
			t.Helper()
			if !errors.Is(err, want) || want == nil && err != nil {
				t.Fatalf("%s of key %d: %v, want %v", op.Kind, key, err, want)
			}
			switch {
			case errors.Is(err, ErrVersionMismatch), errors.Is(err, ErrSuperseded):
				if version != versions[key] {
					t.Fatalf("%s of key %d: version %d, want %d", op.Kind, key, version, versions[key])
				}
			case err != nil:
			case op.Kind == Delete && versions[key] == 0:
				if version != 0 {
					t.Fatalf("Delete of nothing: version %d", version)
				}
			case version <= versions[key]:
				t.Fatalf("%s of key %d: version %d after %d", op.Kind, key, version, versions[key])
			case op.Kind == Delete, op.Kind == DeleteIfVersion:
				versions[key], values[key] = 0, nil
			default:
				versions[key], values[key] = version, op.Value
			}
		}
		_, given, _ := s.identities()
		for round := range 30 {
			ops, wants := make([]Op, keys), make([]error, keys)
			for i := range ops {
				ops[i], wants[i] = randomWrite(rng, versions[i])
				ops[i].Key, ops[i].Tag = fmt.Appendf(nil, "key %d", i), uint64(i)
				ops[i].Value = pattern(rng.IntN(2000), rng.Uint64())
			}
			if round%2 == 0 {
				for tag, r := range submit(t, q, ops) {
					check(int(tag), &ops[tag], wants[tag], r.Err, r.Version)
				}
				continue
			}
			for i := range ops {
				out, err := n.run(ctx, ops[i].args())
				check(i, &ops[i], wants[i], err, out.version)
			}
		}
		s.onIO(nil)
		for i := range keys {
			b := make([]byte, 2000)
			o, err := n.GetVersion(ctx, fmt.Appendf(nil, "key %d", i), b)
			if (err == nil) != (versions[i] != 0) || err == nil && (o.Version != versions[i] ||
				!bytes.Equal(b[:o.Size], values[i])) {
				t.Errorf("key %d: %+v, %v, want version %d", i, o, err, versions[i])
			}
		}
		_, version, retries := s.identities()
		if n.c.Losses() == 0 || retries == 0 {
			t.Errorf("%d losses, %d retries of commands that were carried out: the test tests nothing", n.c.Losses(),
				retries)
		}
		t.Logf("%d losses, %d retries of commands that were carried out, %d versions", n.c.Losses(), retries,
			version-given)
	})
}

// TestCountersLoseNoIncrement: goroutines of two hosts increment counters with Update and through queues while
// connections are lost. No increment is lost, and none is counted twice.
func TestCountersLoseNoIncrement(t *testing.T) {
	overExtended(t, Options{}, func(t *testing.T, s *target, n *Namespace) {
		ctx, rng := testContext(t), newRand(t)
		other := open(t, s, Options{LongKeys: n.hash != nil})
		q := openQueue(t, n)
		losses(s, rng, 100)
		const workers, increments, counters = 6, 40, 2
		key := func(i int) []byte { return fmt.Appendf(nil, "counter %d", i%counters) }
		plusOne := func(old []byte) ([]byte, error) {
			var v uint64
			if old != nil {
				v = binary.LittleEndian.Uint64(old)
			}
			return binary.LittleEndian.AppendUint64(nil, v+1), nil
		}
		var wg sync.WaitGroup
		for w := range workers {
			n := []*Namespace{n, other}[w%2]
			wg.Go(func() {
				for i := range increments {
					if _, err := n.Update(ctx, key(i), plusOne); err != nil {
						t.Errorf("worker %d: %v", w, err)
						return
					}
				}
			})
		}
		wg.Go(func() {
			for i := range increments {
				for {
					b := make([]byte, 8)
					r := submitOne(t, q, Op{Kind: GetVersion, Key: key(i), Value: b})
					if r.Err != nil && r.Err != ErrKeyNotFound {
						t.Errorf("queue: %v", r.Err)
						return
					}
					binary.LittleEndian.PutUint64(b, binary.LittleEndian.Uint64(b)+1)
					r = submitOne(t, q, Op{Kind: PutIfVersion, Key: key(i), Value: b, Version: r.Version})
					if r.Err == nil {
						break
					}
					if r.Err != ErrVersionMismatch {
						t.Errorf("queue: %v", r.Err)
						return
					}
				}
			}
		})
		wg.Wait()
		s.onIO(nil)
		sum := uint64(0)
		for i := range counters {
			v, err := n.Value(ctx, key(i))
			if err != nil {
				t.Fatal(err)
			}
			sum += binary.LittleEndian.Uint64(v)
		}
		if want := uint64((workers + 1) * increments); sum != want {
			t.Errorf("the counters are at %d, after %d increments", sum, want)
		}
		_, _, retries := s.identities()
		t.Logf("%d and %d losses, %d retries of commands that were carried out", n.c.Losses(), other.c.Losses(),
			retries)
	})
}

// submitOne runs one operation on a queue, by any goroutine of a test.
func submitOne(t *testing.T, q *OpQueue, op Op) Result {
	if n, err := q.Submit([]Op{op}); n != 1 {
		t.Error(err)
		return Result{Err: err}
	}
	var results [1]Result
	for {
		n, err := q.Poll(results[:], 10*time.Second)
		if n == 1 {
			return results[0]
		}
		if err != nil {
			t.Error(err)
			return Result{Err: err}
		}
	}
}

// TestOnlyTheTargetMakesAWriteIndeterminate: it has dropped the identity, or the host comes too late.
func TestOnlyTheTargetMakesAWriteIndeterminate(t *testing.T) {
	for name, prepare := range map[string]func(s *target, n *Namespace){
		"dropped":  func(s *target, n *Namespace) { s.with(func() { s.forgetful = true }) },
		"too late": func(s *target, n *Namespace) { n.keepFor = 0 },
	} {
		overExtended(t, Options{}, func(t *testing.T, s *target, n *Namespace) {
			prepare(s, n)
			loseOne := func() {
				lost := false
				s.onIO(func(e *nvme.SQE) (nvme.Status, verdict) {
					if nvme.KVVersioned(e.Opcode()) && !lost {
						lost = true
						return 0, breakOff
					}
					return 0, carryOut
				})
			}
			loseOne()
			stores := s.count(nvme.CmdKVXStore)
			if err := n.Put(testContext(t), []byte("a"), nil); !errors.Is(err, client.ErrIndeterminate) {
				t.Errorf("%s: Put: %v", name, err)
			}
			q := openQueue(t, n)
			loseOne()
			r := submitOne(t, q, Op{Kind: PutIfAbsent, Key: []byte("b")})
			if !errors.Is(r.Err, client.ErrIndeterminate) {
				t.Errorf("%s: PutIfAbsent of a queue: %v", name, r.Err)
			}
			want := 4
			if n.keepFor == 0 {
				want = 2
			}
			if got := s.count(nvme.CmdKVXStore) - stores; got != want {
				t.Errorf("%s: %d Stores, want %d", name, got, want)
			}
		})
	}
}

func TestAtLeastOnceSparesPutAndDeleteTheirIdentity(t *testing.T) {
	overExtended(t, Options{AtLeastOnce: true, KeepFor: time.Second}, func(t *testing.T, s *target, n *Namespace) {
		ctx, key := testContext(t), []byte("key")
		if err := errors.Join(n.Put(ctx, key, nil), n.Delete(ctx, key)); err != nil {
			t.Fatal(err)
		}
		if s.count(nvme.CmdKVXStore)+s.count(nvme.CmdKVXDelete) != 0 {
			t.Error("an extended command was sent")
		}
		for _, put := range []func(context.Context, []byte, []byte) error{n.PutIfAbsent, n.PutIfPresent} {
			before, _, _ := s.identities()
			err := put(ctx, key, nil)
			now, _, _ := s.identities()
			s.with(func() {
				if err != nil || now != before+1 || s.keep != 61 {
					t.Errorf("%v, %d identities more, kept for %d s", err, now-before, s.keep)
				}
			})
		}
	})
}

// TestUpdateReadsLargeValuesAndReturnsTheCallersError.
func TestUpdateReadsLargeValuesAndReturnsTheCallersError(t *testing.T) {
	overExtended(t, Options{}, func(t *testing.T, s *target, n *Namespace) {
		ctx, key := testContext(t), []byte("key")
		large := pattern(3*firstGet, 5)
		for i, want := range [][]byte{nil, large} {
			v, err := n.Update(ctx, key, func(old []byte) ([]byte, error) {
				if !bytes.Equal(old, want) || (old == nil) != (i == 0) {
					t.Errorf("update %d gets %d bytes", i, len(old))
				}
				return large, nil
			})
			o, err2 := n.GetVersion(ctx, key, nil)
			if err != nil || err2 != nil || o.Version != v || o.Size != len(large) {
				t.Errorf("update %d: %v, %v, %+v", i, err, err2, o)
			}
		}
		if _, err := n.Update(ctx, key, func([]byte) ([]byte, error) { return nil, errors.ErrUnsupported }); err !=
			errors.ErrUnsupported {
			t.Error(err)
		}
	})
}

func TestExtendedCompletionsCarryCredits(t *testing.T) {
	s := newTarget(t)
	s.with(func() { s.extended, s.credit = true, nvme.MakeCredit(3, 40) })
	n := open(t, s, Options{})
	s.with(func() { s.credit = nvme.MakeCredit(3, 17) })
	v, err := n.PutWith(testContext(t), []byte("k"), make([]byte, 5000), PutOptions{})
	if c := n.Controller().Credit(2); err != nil || v != 1 || c.SSD != 3 || c.Units != 17 || c.Outstanding != 0 {
		t.Errorf("version %d, %v, %+v", v, err, c)
	}
	s.with(func() { s.credit = nvme.MakeCredit(3, 1) })
	q := openQueue(t, n)
	var ops []Op
	for i := range 100 {
		ops = append(ops, Op{Kind: Put, Key: fmt.Appendf(nil, "key %d", i), Value: make([]byte, 9000), Tag: uint64(i)})
	}
	for _, r := range submit(t, q, ops) {
		if r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	if c := n.Controller().Credit(2); c.Units != 1 || c.Outstanding != 0 || c.Waits == 0 {
		t.Errorf("%+v", c)
	}
}
