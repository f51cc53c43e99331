package partition

import (
	"math"

	"jbofd/internal/pipeline"
)

// averaged is how many Requests, or I/Os, the averages of a tenant look back on.
const averaged = 64

// tenant is what a partition remembers of one.
//
// A policy counts its credit in I/Os at the SSD, of the size that the tenant's have there. A host counts commands, a
// Retrieve by its buffer, however short the value. A command has one I/O at a time at the SSD: so its tenant may
// have as many commands outstanding as I/Os.
type tenant struct {
	credited bool
	// creditUnits is the policy's latest credit.
	creditUnits int
	// request and io average the units that its Requests and its I/Os count for; 0: there was none.
	request, io float64
}

// asks counts a Request.
func (t *tenant) asks(r *Request) {
	t.credited = r.Credited
	average(&t.request, float64(r.Units))
}

// moves counts an I/O.
func (t *tenant) moves(op pipeline.Op, lenBytes int64) {
	average(&t.io, float64(pipeline.IO{Op: op, LenBytes: lenBytes}.Units()))
}

func average(v *float64, sample float64) {
	if *v == 0 {
		*v = sample
	}
	*v += (sample - *v) / averaged
}

// credit is what the tenant should have outstanding at most, as its hosts count; 0: the policy does not say.
func (t *tenant) credit() int {
	if t.creditUnits == 0 || t.request == 0 || t.io == 0 {
		return t.creditUnits
	}
	return max(int(math.Round(float64(t.creditUnits)*t.request/t.io)), 1)
}
