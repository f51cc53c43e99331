package fabric

import (
	"errors"

	"jbofd/internal/kvstore"
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

// KVStatus is the NVMe status of how a Request to a partition ended.
//
// Source: KV Command Set 1.0, figure 4.
func KVStatus(op kvstore.Op, s kvstore.Status) nvme.Status {
	switch s {
	case kvstore.OK:
		return nvme.Success
	case kvstore.NotFound:
		return nvme.KeyDoesNotExist | nvme.DNR
	case kvstore.Exists:
		return nvme.KeyExists | nvme.DNR
	case kvstore.CapacityExceeded:
		return nvme.CapacityExceeded | nvme.DNR
	case kvstore.InvalidKey:
		return nvme.InvalidKeySize | nvme.DNR
	case kvstore.InvalidValue:
		return nvme.InvalidValueSize | nvme.DNR
	case kvstore.Corrupt:
		return nvme.UnrecoveredReadError | nvme.DNR
	case kvstore.DeviceError:
		if op == kvstore.Put || op == kvstore.Delete {
			return nvme.WriteFault | nvme.DNR
		}
		return nvme.UnrecoveredReadError | nvme.DNR
	}
	return nvme.InternalError | nvme.DNR
}

// ErrLost is the outcome of an IO whose data the host never sent whole: the
// connection was lost or a digest was wrong.
var ErrLost = errors.New("the host's data was lost on the way")
