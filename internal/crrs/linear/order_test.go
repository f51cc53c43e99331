package linear_test

import (
	"flag"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/internal/crrs/linear"
	"jbofd/internal/testutil/anyorder"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the random histories; 0: a new one")

// history makes operations that several clients carry out at a time on a register, and then spoils some, or not.
func history(rng *rand.Rand) (ops []linear.Operation) {
	state, value, now := uint64(0), uint64(0), int64(0)
	type pending struct {
		linear.Operation
		done bool
	}
	var open []pending
	for range 6 + rng.IntN(30) {
		now++
		switch i := rng.IntN(6); {
		case i < 2 || len(open) == 0: // begins
			o := linear.Operation{Write: rng.IntN(2) == 0, Begin: now}
			if o.Write {
				value++
				o.Value, o.Swap, o.Replaced = value, rng.IntN(3) == 0, state
			}
			open = append(open, pending{Operation: o})
		case i < 4: // happens
			p := &open[rng.IntN(len(open))]
			if p.done {
				continue
			}
			switch p.done = true; {
			case !p.Write:
				p.Value = state
			case p.Swap && p.Replaced != state:
				p.Write = false // it ends as a read of what is there instead
				p.Swap, p.Replaced, p.Value = false, 0, state
			default:
				state = p.Value
			}
		default: // ends
			k := rng.IntN(len(open))
			p := open[k]
			open = append(open[:k], open[k+1:]...)
			switch p.End = now; {
			case p.Write && (!p.done || rng.IntN(4) == 0):
				p.End = math.MaxInt64 // the client does not know
			case !p.done:
				continue
			}
			ops = append(ops, p.Operation)
		}
	}
	for _, p := range open {
		if p.Write {
			p.End = math.MaxInt64
			ops = append(ops, p.Operation)
		}
	}
	for spoil := rng.IntN(2) * 6; spoil > 0 && len(ops) > 0; spoil-- {
		o := &ops[rng.IntN(len(ops))]
		switch rng.IntN(4) {
		case 0: // a read of something else
			if !o.Write && value > 0 {
				o.Value = rng.Uint64N(value + 1)
			}
		case 1:
			if o.Swap {
				o.Replaced = rng.Uint64N(value + 1)
			}
		case 2: // something else was under way at the same time, or not
			o.Begin += rng.Int64N(13) - 3
		case 3:
			if o.End != math.MaxInt64 {
				o.End += rng.Int64N(13) - 9
			}
		}
		if o.Begin >= o.End {
			o.End = o.Begin + 1
		}
	}
	// Instants are all different, as those of a clock of nanoseconds are: at equal ones it is a matter of taste what
	// comes first.
	for i := range ops {
		ops[i].Begin = ops[i].Begin<<8 + int64(2*i)
		if ops[i].End != math.MaxInt64 {
			ops[i].End = ops[i].End<<8 + int64(2*i+1)
		}
	}
	return ops
}

// TestTheCheckerAgreesWithPorcupine: the checker, which takes the time of a sort, says the same of small histories as
// one that tries all orders.
func TestTheCheckerAgreesWithPorcupine(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	count := map[bool]int{}
	for nth := range uint64(24) {
		rng := rand.New(rand.NewPCG(seed, nth))
		for range 800 {
			ops := history(rng)
			want, known := anyorder.Check(ops, time.Minute)
			if !known {
				t.Fatal("a history of some operations takes a minute")
			}
			count[want]++
			if err := linear.Check(ops); (err == nil) != want {
				t.Fatalf("%v\nlinearizable: %v, the checker says: %v; -seed %d", ops, want, err, seed)
			}
		}
	}
	if count[false] < 1000 || count[true] < 1000 {
		t.Errorf("linearizable and not: %v, too few of one kind", count)
	}
}

// TestAMillionOperationsOfAKey: the time of the checker is that of a sort.
func TestAMillionOperationsOfAKey(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	ops := make([]linear.Operation, 0, 1_000_000)
	value, at := uint64(0), int64(0)
	for len(ops) < cap(ops) {
		at += 10
		o := linear.Operation{Begin: at - rng.Int64N(100), End: at + 1 + rng.Int64N(100)}
		if o.Write = rng.IntN(2) == 0; o.Write {
			value++
			o.Swap, o.Replaced = rng.IntN(2) == 0, value-1
		}
		o.Value = value
		ops = append(ops, o)
	}
	began := time.Now()
	if err := linear.Check(ops); err != nil {
		t.Fatal(err)
	}
	t.Logf("checked in %v", time.Since(began))
	// One read, near the end, of a value that was there long before.
	i := len(ops) - 1000
	for ops[i].Write {
		i++
	}
	ops[i].Value = value / 2
	if linear.Check(ops) == nil {
		t.Error("a stale read among a million operations was not found")
	}
}
