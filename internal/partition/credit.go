package partition

import (
	"math"

	"jbofd/internal/pipeline"
)

// averageOver is how many Requests, or I/Os, the averages of a tenant cover.
const averageOver = 64

// tenantState is what a partition knows of a tenant, to translate its credit.
//
// A policy counts credit in units of the tenant's I/Os at the drive. A host counts units of commands: a Retrieve by the
// length of its buffer, however short the value is. A command has one I/O at a time at the drive, so a tenant may have
// as many commands outstanding as I/Os.
type tenantState struct {
	credited bool
	// creditUnits is the policy's latest credit.
	creditUnits int
	// request and io are the average units of its Requests and of its I/Os; 0: there was none.
	request, io float64
}

// countRequest counts a Request.
func (t *tenantState) countRequest(r *Request) {
	t.credited = r.Credited
	average(&t.request, float64(r.Units))
}

// countIO counts an I/O.
func (t *tenantState) countIO(op pipeline.Op, lenBytes int64) {
	average(&t.io, float64(pipeline.IO{Op: op, LenBytes: lenBytes}.Units()))
}

func average(v *float64, sample float64) {
	if *v == 0 {
		*v = sample
	}
	*v += (sample - *v) / averageOver
}

// credit is how much the tenant should have outstanding at most, in the units of its hosts; 0: the policy does not say.
func (t *tenantState) credit() int {
	if t.creditUnits == 0 || t.request == 0 || t.io == 0 {
		return t.creditUnits
	}
	return max(int(math.Round(float64(t.creditUnits)*t.request/t.io)), 1)
}
