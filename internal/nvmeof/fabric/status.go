package fabric

import (
	"errors"

	"jbofd/internal/nvme"
	"jbofd/internal/owner"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// Status is the NVMe status of an IO's outcome. What a retry may cure comes
// without DNR.
//
// Source: NVMe Base 2.0, figures 94 to 98.
func Status(op pipeline.Op, err error) nvme.Status {
	switch {
	case err == nil:
		return nvme.Success
	case errors.Is(err, owner.ErrMismatch):
		return nvme.CompareFailure | nvme.DNR
	case errors.Is(err, owner.ErrAborted):
		return nvme.AbortRequested
	case errors.Is(err, ErrLost):
		return nvme.TransientTransportError
	case errors.Is(err, ssd.ErrNoSpace):
		return nvme.CapacityExceeded | nvme.DNR
	case errors.Is(err, ssd.ErrRange):
		return nvme.LBAOutOfRange | nvme.DNR
	case errors.Is(err, ssd.ErrUnsupported):
		return nvme.InvalidOpcode | nvme.DNR
	case op == pipeline.Read || op == pipeline.Verify || op == pipeline.Compare:
		return nvme.UnrecoveredReadError | nvme.DNR
	}
	return nvme.WriteFault | nvme.DNR
}

// ErrLost is the outcome of an IO whose data the host never sent whole: the
// connection was lost or a digest was wrong.
var ErrLost = errors.New("the host's data was lost on the way")
