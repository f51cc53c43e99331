// Package anyorder checks what clients have seen of a key by looking for an order of all operations, with porcupine. It
// takes exponential time in the worst case, and serves to check package linear and short histories.
package anyorder

import (
	"math"
	"time"

	"github.com/anishathalye/porcupine"

	"jbofd/internal/crrs/linear"
)

// register is a key: its state is a value, its operations are linear.Operations.
var register = porcupine.Model{
	Init: func() any { return uint64(0) },
	Step: func(state, input, _ any) (bool, any) {
		o := input.(linear.Operation)
		switch {
		case !o.Write:
			return o.Value == state.(uint64), state
		case o.Swap && o.Replaced != state.(uint64):
			// One that was refused is no operation, but the client may not know.
			return o.End == math.MaxInt64, state
		}
		return true, o.Value
	},
}

// Check looks for an order. known: there is one, ok, or none; else the time was over before.
func Check(ops []linear.Operation, within time.Duration) (ok, known bool) {
	read := map[uint64]bool{}
	for _, o := range ops {
		if !o.Write {
			read[o.Value] = true
		} else if o.Swap {
			read[o.Replaced] = true
		}
	}
	var all []porcupine.Operation
	for i, o := range ops {
		if o.Write && o.End == math.MaxInt64 && !read[o.Value] {
			continue // it may have happened after everything else
		}
		all = append(all, porcupine.Operation{ClientId: i, Input: o, Call: o.Begin, Return: o.End})
	}
	switch porcupine.CheckOperationsTimeout(register, all, within) {
	case porcupine.Ok:
		return true, true
	case porcupine.Illegal:
		return false, true
	}
	return false, false
}
