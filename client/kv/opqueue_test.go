package kv

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// drain polls until nothing is outstanding.
func drain(t testing.TB, q *OpQueue) map[uint64]Result {
	t.Helper()
	out := map[uint64]Result{}
	var results [32]Result
	for q.Outstanding() > 0 {
		n, err := q.Poll(results[:], 10*time.Second)
		if err != nil || n == 0 {
			t.Fatalf("Poll: %d, %v, %d outstanding", n, err, q.Outstanding())
		}
		for _, r := range results[:n] {
			if _, twice := out[r.Tag]; twice {
				t.Fatalf("operation %d has two results", r.Tag)
			}
			out[r.Tag] = r
		}
	}
	return out
}

// submit submits all ops, polling where the queue is full, and returns all results.
func submit(t testing.TB, q *OpQueue, ops []Op) map[uint64]Result {
	t.Helper()
	all := map[uint64]Result{}
	for len(ops) > 0 {
		n, err := q.Submit(ops)
		if err != nil {
			t.Fatal(err)
		}
		ops = ops[n:]
		for tag, r := range drain(t, q) {
			all[tag] = r
		}
	}
	return all
}

func TestQueueRunsEachKindOfOperation(t *testing.T) {
	overKeys(t, func(t *testing.T, s *target, n *Namespace) {
		q := openQueue(t, n)
		const keys = 300 // more than the queue takes at once
		key := func(i int) []byte { return fmt.Appendf(nil, "key %d", i) }
		batch := func(kind Kind, value func(i int) []byte) map[uint64]Result {
			var ops []Op
			for i := range keys {
				op := Op{Kind: kind, Key: key(i), Tag: uint64(i)}
				if value != nil {
					op.Value = value(i)
				}
				ops = append(ops, op)
			}
			out := submit(t, q, ops)
			if len(out) != keys {
				t.Fatalf("%s: %d results of %d", kind, len(out), keys)
			}
			for i, r := range out {
				if r.Kind != kind {
					t.Fatalf("operation %d is a %s, not a %s", i, r.Kind, kind)
				}
			}
			return out
		}
		all := func(out map[uint64]Result, want error) {
			t.Helper()
			for i, r := range out {
				if r.Err != want { // bare
					t.Fatalf("%s of key %d: %v, want %v", r.Kind, i, r.Err, want)
				}
			}
		}
		first := func(i int) []byte { return pattern(i*37, uint64(i)) }
		second := func(i int) []byte { return pattern(i*11, uint64(i+1000)) }
		get := func(value func(i int) []byte) {
			t.Helper()
			bufs := make([][]byte, keys)
			for i := range bufs {
				bufs[i] = make([]byte, 2000)
			}
			out := batch(Get, func(i int) []byte { return bufs[i] })
			all(out, nil)
			for i, r := range out {
				want := value(int(i))
				if r.Size != len(want) || !bytes.Equal(bufs[i][:min(len(want), 2000)], want[:min(len(want), 2000)]) {
					t.Fatalf("key %d: other value, size %d, want %d", i, r.Size, len(want))
				}
			}
		}
		all(batch(Exists, nil), ErrKeyNotFound)
		all(batch(Get, nil), ErrKeyNotFound)
		all(batch(PutIfPresent, first), ErrKeyNotFound)
		all(batch(PutIfAbsent, first), nil)
		get(first)
		all(batch(PutIfAbsent, second), ErrKeyExists)
		get(first)
		all(batch(PutIfPresent, second), nil)
		get(second)
		all(batch(Put, first), nil)
		get(first)
		all(batch(Exists, nil), nil)
		all(batch(Delete, nil), nil)
		all(batch(Delete, nil), nil)
		all(batch(Exists, nil), ErrKeyNotFound)
		all(batch(Put, second), nil)
		get(second)
	})
}

func TestSubmitStopsAtTheFirstInvalidOperation(t *testing.T) {
	s := newTarget(t)
	q := openQueue(t, open(t, s, Options{}))
	n, err := q.Submit([]Op{{Kind: Put, Key: []byte("a"), Tag: 1}, {Kind: Put, Key: nil},
		{Kind: Put, Key: []byte("b")}})
	if n != 1 || !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), "operation 1") {
		t.Errorf("%d, %v", n, err)
	}
	n, err = q.Submit([]Op{{Kind: Put, Key: []byte("a"), Value: make([]byte, 1<<20+1)}})
	if n != 0 || !errors.Is(err, ErrValueTooLarge) {
		t.Errorf("%d, %v", n, err)
	}
	if out := drain(t, q); len(out) != 1 || out[1].Err != nil || q.Free() != q.Depth() {
		t.Errorf("%v", out)
	}
	s.with(func() { s.room = 1 })
	out := submit(t, q, []Op{{Kind: Put, Key: []byte("b")}})
	if out[0].Err != ErrCapacityExceeded {
		t.Errorf("%v", out[0].Err)
	}
	s.onIO(func(*nvme.SQE) (nvme.Status, verdict) { return nvme.InternalError, answer })
	var se *client.StatusError
	if out := submit(t, q, []Op{{Kind: Get, Key: []byte("a")}}); !errors.As(out[0].Err, &se) ||
		se.Status != nvme.InternalError || se.Command != "Get" {
		t.Errorf("%v", out[0].Err)
	}
}

func TestQueueDistinguishesCollisions(t *testing.T) {
	s := newTarget(t)
	q := openQueue(t, open(t, s, Options{LongKeys: true, hash: oneHash}))
	submit(t, q, []Op{{Kind: Put, Key: []byte("a key"), Value: []byte("1")}})
	out := submit(t, q, []Op{
		{Kind: Put, Key: []byte("another key"), Tag: 0}, {Kind: Get, Key: []byte("another key"), Tag: 1},
		{Kind: Exists, Key: []byte("a key"), Tag: 2}, {Kind: Delete, Key: []byte("another key"), Tag: 3},
	})
	for tag, want := range []error{ErrKeyCollision, ErrKeyNotFound, nil, nil} {
		if !errors.Is(out[uint64(tag)].Err, want) {
			t.Errorf("operation %d: %v, want %v", tag, out[uint64(tag)].Err, want)
		}
	}
	if out := submit(t, q, []Op{{Kind: Exists, Key: []byte("a key")}}); out[0].Err != nil {
		t.Error("the key was deleted in place of another")
	}
}

// TestQueueSurvivesALossInTheMiddleOfABatch loses the connection after every 97 commands: no operation is lost, none
// has two results, and every value is there. A PutIfPresent that was in flight is reported as indeterminate, and the
// key has its old or its new value.
func TestQueueSurvivesALossInTheMiddleOfABatch(t *testing.T) {
	overKeys(t, func(t *testing.T, s *target, n *Namespace) {
		q := openQueue(t, n)
		count := 0
		s.onIO(func(*nvme.SQE) (nvme.Status, verdict) {
			if count++; count%97 == 50 {
				return 0, breakOff
			}
			return 0, carryOut
		})
		model := map[string][]byte{}
		rng := rand.New(rand.NewPCG(3, 4))
		for range 10 {
			var ops []Op
			before := maps.Clone(model)
			for i := range 100 { // each key once, because operations that are outstanding together have no order
				op := Op{Kind: Put, Key: fmt.Appendf(nil, "key %d", i), Value: pattern(rng.IntN(3000), rng.Uint64()),
					Tag: uint64(i)}
				switch rng.IntN(4) {
				case 0:
					op.Kind = Delete
					delete(model, string(op.Key))
				case 1:
					op.Kind = PutIfPresent
					if model[string(op.Key)] != nil {
						model[string(op.Key)] = op.Value
					}
				default:
					model[string(op.Key)] = op.Value
				}
				ops = append(ops, op)
			}
			for tag, r := range submit(t, q, ops) {
				if r.Kind == PutIfPresent && errors.Is(r.Err, client.ErrIndeterminate) {
					key, got := string(ops[tag].Key), make([]byte, 3000)
					r := submit(t, q, []Op{{Kind: Get, Key: ops[tag].Key, Value: got}})[0]
					if got = got[:r.Size]; r.Err == nil && bytes.Equal(got, before[key]) {
						model[key] = before[key]
					} else if (r.Err == nil) != (model[key] != nil) || !bytes.Equal(got, model[key]) {
						t.Fatalf("%s after an indeterminate PutIfPresent: %d bytes, %v", key, r.Size, r.Err)
					}
					continue
				}
				if r.Err != nil && (r.Kind != PutIfPresent || r.Err != ErrKeyNotFound ||
					model[string(ops[tag].Key)] != nil) {
					t.Fatalf("%s of %s: %v", r.Kind, ops[tag].Key, r.Err)
				}
			}
		}
		for i := range 100 {
			key := fmt.Appendf(nil, "key %d", i)
			want, there := model[string(key)]
			got := make([]byte, 3000)
			r := submit(t, q, []Op{{Kind: Get, Key: key, Value: got}})[0]
			if there != (r.Err == nil) || there && !bytes.Equal(got[:r.Size], want) {
				t.Errorf("%s: %v, there %t", key, r.Err, there)
			}
		}
	})
}

// TestQueueReportsConditionalPutsAsIndeterminate: a conditional put whose answer was lost is sent once, whether or not
// it took effect.
func TestQueueReportsConditionalPutsAsIndeterminate(t *testing.T) {
	for _, kind := range []Kind{PutIfAbsent, PutIfPresent} {
		s := newTarget(t)
		q := openQueue(t, open(t, s, Options{}))
		if kind == PutIfPresent {
			s.set("a", []byte("old"))
		}
		lost := false
		s.onIO(func(*nvme.SQE) (nvme.Status, verdict) {
			if !lost {
				lost = true
				return 0, breakOff
			}
			return 0, carryOut
		})
		out := submit(t, q, []Op{{Kind: kind, Key: []byte("a"), Value: []byte("new"), Tag: 0},
			{Kind: Put, Key: []byte("b"),
				Tag: 1}})
		if !errors.Is(out[0].Err, client.ErrConnectionLost) || !errors.Is(out[0].Err, client.ErrIndeterminate) ||
			out[1].Err != nil {
			t.Errorf("%s: %v, %v", kind, out[0].Err, out[1].Err)
		}
		got := make([]byte, 3)
		if out := submit(t, q, []Op{{Kind: Get, Key: []byte("a"), Value: got}}); out[0].Err != nil ||
			string(got) != "new" {
			t.Errorf("%s: %q, %v after the loss", kind, got, out[0].Err)
		}
		if n := s.count(nvme.CmdKVStore); n > 3 { // this one, and the Put once or twice
			t.Errorf("%s: %d Stores", kind, n)
		}
	}
}

func TestQueueRetriesATransientStatus(t *testing.T) {
	s := newTarget(t)
	q := openQueue(t, open(t, s, Options{}))
	var key [nvme.MaxKVKey]byte
	tries := map[string]int{}
	s.onIO(func(e *nvme.SQE) (nvme.Status, verdict) {
		k := string(e.KV().Key(&key))
		if tries[k]++; k == "never" || k == "once" && tries[k] == 1 {
			return nvme.NamespaceNotReady, answer
		}
		return 0, carryOut
	})
	out := submit(t, q, []Op{
		{Kind: Put, Key: []byte("once"), Tag: 0}, {Kind: Put, Key: []byte("well"), Tag: 1},
		{Kind: PutIfAbsent, Key: []byte("never"), Tag: 2}, {Kind: Get, Key: []byte("never"), Tag: 3},
	})
	var se *client.StatusError
	if out[0].Err != nil || out[1].Err != nil || !errors.As(out[2].Err, &se) || !errors.As(out[3].Err, &se) ||
		se.Status != nvme.NamespaceNotReady {
		t.Errorf("%v", out)
	}
	// The PutIfAbsent was sent once, the Get six times.
	if n := s.count(nvme.CmdKVRetrieve); n != 1+q.retries || s.count(nvme.CmdKVStore) != 4 {
		t.Errorf("%d Retrieves, %d Stores", n, s.count(nvme.CmdKVStore))
	}
}

func TestQueueEndsWithTheController(t *testing.T) {
	s := newTarget(t)
	n := open(t, s, Options{})
	q := openQueue(t, n)
	arrived := make(chan struct{}, 1)
	s.onIO(func(*nvme.SQE) (nvme.Status, verdict) {
		arrived <- struct{}{}
		return 0, drop
	})
	if _, err := q.Submit([]Op{{Kind: Put, Key: []byte("a")}}); err != nil {
		t.Fatal(err)
	}
	<-arrived
	go n.Controller().Close()
	var results [1]Result
	if k, err := q.Poll(results[:], -1); k != 0 || !errors.Is(err, client.ErrClosed) {
		t.Errorf("Poll: %d, %v", k, err)
	}
	if _, err := q.Submit(nil); !errors.Is(err, client.ErrClosed) {
		t.Errorf("Submit: %v", err)
	}
}

func TestQueueEndsWhenTheControllerGivesUp(t *testing.T) {
	s := newTarget(t)
	c, err := client.Connect(testContext(t), client.Options{Address: s.addr(), SubNQN: "nqn.2026-11.example.jbofd:test",
		Queues: 1, QPairs: 1, CtrlLossTimeout: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	n, err := Open(testContext(t), c, 2, Options{})
	if err != nil {
		t.Fatal(err)
	}
	q := openQueue(t, n)
	s.stop()
	s.onIO(func(*nvme.SQE) (nvme.Status, verdict) { return 0, breakOff })
	if _, err := q.Submit([]Op{{Kind: Put, Key: []byte("a")}}); err != nil {
		t.Fatal(err)
	}
	s.cut()
	var results [1]Result
	if k, err := q.Poll(results[:], -1); k != 0 || !errors.Is(err, client.ErrConnectionLost) {
		t.Errorf("Poll: %d, %v", k, err)
	}
}

func TestInterruptWakesPoll(t *testing.T) {
	for _, reconnecting := range []bool{false, true} {
		s := newTarget(t)
		q := openQueue(t, open(t, s, Options{}))
		if reconnecting {
			s.stop()
			s.cut()
			var results [1]Result
			for q.qp != nil {
				if _, err := q.Poll(results[:], time.Millisecond); err != nil {
					t.Fatal(err)
				}
			}
			if n, err := q.Submit([]Op{{Kind: Put, Key: []byte("a")}}); n != 1 || err != nil {
				t.Fatalf("Submit while reconnecting: %d, %v", n, err)
			}
			if n, err := q.Poll(results[:], 0); n != 0 || err != nil {
				t.Fatalf("Poll while reconnecting: %d, %v", n, err)
			}
		}
		go q.Interrupt()
		var results [1]Result
		if n, err := q.Poll(results[:], -1); n != 0 || !errors.Is(err, client.ErrClosed) {
			t.Errorf("reconnecting %t: %d, %v", reconnecting, n, err)
		}
		if err := q.Close(); err != nil {
			t.Error(err)
		}
		if err := q.Close(); err != nil {
			t.Error("Close twice:", err)
		}
	}
}

func TestPollWaitsForTheGivenTime(t *testing.T) {
	s := newTarget(t)
	q := openQueue(t, open(t, s, Options{}))
	var results [1]Result
	if n, err := q.Poll(results[:], 0); n != 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	start := time.Now()
	if n, err := q.Poll(results[:], 20*time.Millisecond); n != 0 || err != nil ||
		time.Since(start) < 20*time.Millisecond {
		t.Errorf("%d, %v after %s", n, err, time.Since(start))
	}
}

func TestQueueKeepsWithinCredits(t *testing.T) {
	s := newTarget(t)
	s.with(func() { s.credit = nvme.MakeCredit(0, 4) })
	q := openQueue(t, open(t, s, Options{}))
	var ops []Op
	for i := range 100 {
		ops = append(ops, Op{Kind: Put, Key: fmt.Append(nil, i), Value: make([]byte, 5000), Tag: uint64(i)})
	}
	for tag, r := range submit(t, q, ops) {
		if r.Err != nil {
			t.Errorf("operation %d: %v", tag, r.Err)
		}
	}
}

// answerQuietly is a target that answers each Store with success and each Retrieve with the last value stored, from
// preallocated memory: after the handshake it allocates nothing.
func answerQuietly(c net.Conn, value []byte) error {
	in, out := make([]byte, 1<<20), make([]byte, 0, 1<<20)
	r, w := 0, 0
	for {
		for w-r >= 8 && w-r >= int((*pdu.Common)(in[r:]).PLEN()) {
			b := in[r:]
			n := int((*pdu.Common)(b).PLEN())
			e := (*pdu.CapsuleCmd)(b).SQE()
			var dw0 uint32
			if extended := e.Opcode() == nvme.CmdKVXRetrieve; extended || e.Opcode() == nvme.CmdKVRetrieve {
				dw0 = uint32(len(value))
				at, head := len(out), 0
				if extended {
					head = nvme.KVReadHeaderSize
				}
				// Under the race detector a make of this size would allocate.
				var zeroes [24 + nvme.KVReadHeaderSize]byte
				out = append(out, zeroes[:24+head]...)
				d := (*pdu.Data)(out[at:])
				d.Common().Set(pdu.TypeC2HData, pdu.FlagLast, 24, 24, uint32(24+head+len(value)))
				d.SetCCCID(e.CID())
				d.SetLength(uint32(head + len(value)))
				if extended {
					(*nvme.KVReadHeader)(out[at+24:]).SetVersion(4711)
				}
				out = append(out, value...)
			}
			at := len(out)
			out = append(out, make([]byte, 24)...)
			(*pdu.Common)(out[at:]).Set(pdu.TypeCapsuleResp, 0, 24, 0, 24)
			q := (*nvme.CQE)(out[at+8:])
			q.SetCID(e.CID())
			q.SetDW0(dw0)
			r += n
		}
		if len(out) > 0 {
			if _, err := c.Write(out); err != nil {
				return err
			}
			out = out[:0]
		}
		w = copy(in, in[r:w])
		r = 0
		k, err := c.Read(in[w:])
		if err != nil {
			return err
		}
		w += k
	}
}

// quietQueue is a queue whose connection, once it is set up, is served by answerQuietly.
func quietQueue(t testing.TB, o Options, value []byte, extended bool) *OpQueue {
	s := newTarget(t)
	s.with(func() { s.quiet, s.extended = value, extended })
	return openQueue(t, open(t, s, o))
}

func TestQueueDoesNotAllocate(t *testing.T) {
	for i := range 4 {
		long, extended := i%2 != 0, i/2 != 0
		key := []byte("user6284781860667377211")
		o := Options{LongKeys: long}
		value := pattern(256, 1)
		stored := value
		if long {
			stored = append(append([]byte("JKVL\x01\x00\x00\x00\x17\x00\x00\x00"), key...), value...)
		} else {
			key = key[:16]
		}
		q := quietQueue(t, o, stored, extended)
		const depth = 64
		ops, bufs, results := make([]Op, depth), make([][]byte, depth), make([]Result, depth)
		for i := range ops {
			bufs[i] = make([]byte, 256)
			kind := Get
			switch {
			case i%4 == 0:
				kind = Put
			case i%4 == 1 && extended:
				kind = GetVersion
			case i%4 == 2 && extended:
				kind = []Kind{PutIfVersion, DeleteIfVersion}[i/4%2]
			}
			ops[i] = Op{Kind: kind, Key: key, Value: bufs[i], Tag: uint64(i), Version: uint64(i % 4)}
		}
		round := func() {
			if n, err := q.Submit(ops); n != depth || err != nil {
				t.Fatalf("%d, %v", n, err)
			}
			for done := 0; done < depth; {
				n, err := q.Poll(results, -1)
				if err != nil {
					t.Fatal(err)
				}
				for _, r := range results[:n] {
					if r.Err != nil || (r.Kind == Get || r.Kind == GetVersion) && r.Size != 256 ||
						r.Kind == GetVersion && r.Version != 4711 {
						t.Fatalf("%+v", r)
					}
				}
				done += n
			}
		}
		round()
		if n := testing.AllocsPerRun(50, round); n > 0 {
			t.Errorf("long keys %t, extended %t: %v allocs for %d operations", long, extended, n, depth)
		}
		if !bytes.Equal(bufs[1], value) {
			t.Errorf("long keys %t: another value came", long)
		}
	}
}

func BenchmarkQueue256B(b *testing.B) {
	for _, long := range []bool{false, true} {
		for _, depth := range []int{1, 32, 128} {
			b.Run(fmt.Sprintf("long=%t/QD%d", long, depth), func(b *testing.B) {
				key := []byte("user62847818606673")[:16]
				stored := pattern(256, 1)
				if long {
					stored = append(append([]byte("JKVL\x01\x00\x00\x00\x10\x00\x00\x00"), key...), stored...)
				}
				q := quietQueue(b, Options{LongKeys: long}, stored, false)
				ops, results := make([]Op, depth), make([]Result, depth)
				for i := range ops {
					ops[i] = Op{Kind: Get, Key: key, Value: make([]byte, 256), Tag: uint64(i)}
				}
				bufs := make([][]byte, depth)
				for i := range bufs {
					bufs[i] = ops[i].Value
				}
				b.ReportAllocs()
				b.ResetTimer()
				sent, err := q.Submit(ops[:min(depth, b.N)])
				for done := 0; done < b.N && err == nil; {
					var n, k int
					n, err = q.Poll(results, -1)
					done += n
					for _, r := range results[:n] {
						if sent+k < b.N {
							ops[k] = Op{Kind: Get, Key: key, Value: bufs[r.Tag], Tag: r.Tag}
							k++
						}
					}
					if k > 0 && err == nil {
						_, err = q.Submit(ops[:k])
						sent += k
					}
				}
				if err != nil && !errors.Is(err, io.EOF) {
					b.Fatal(err)
				}
			})
		}
	}
}
