package block

import (
	"fmt"
	"testing"

	"jbofd/internal/drive"
	"jbofd/internal/fence"
	"jbofd/internal/nvme"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

func TestEveryOutcomeHasItsStatus(t *testing.T) {
	wrap := func(err error) error { return fmt.Errorf("ssd0: %w", err) }
	for _, x := range []struct {
		name string
		op   pipeline.Op
		err  error
		want nvme.Status
	}{
		{"success", pipeline.Read, nil, nvme.Success},
		{"comparison differs", pipeline.Compare, drive.ErrMismatch, nvme.CompareFailure | nvme.DNR},
		{"aborted", pipeline.Write, drive.ErrAborted, nvme.AbortRequested},
		{"a stale pass", pipeline.Write, wrap(fence.ErrStale), nvme.AbortedSQDeletion},
		{"no space", pipeline.Write, wrap(ssd.ErrNoSpace), nvme.CapacityExceeded | nvme.DNR},
		{"out of range", pipeline.Read, wrap(ssd.ErrRange), nvme.LBAOutOfRange | nvme.DNR},
		{"unsupported", pipeline.Deallocate, wrap(ssd.ErrUnsupported), nvme.InvalidOpcode | nvme.DNR},
		{"read error", pipeline.Read, wrap(ssd.ErrGone), nvme.UnrecoveredReadError | nvme.DNR},
		{"verify error", pipeline.Verify, wrap(ssd.ErrGone), nvme.UnrecoveredReadError | nvme.DNR},
		{"write error", pipeline.Write, wrap(ssd.ErrGone), nvme.WriteFault | nvme.DNR},
		{"flush error", pipeline.Flush, wrap(ssd.ErrGone), nvme.WriteFault | nvme.DNR},
	} {
		if got := status(x.op, x.err); got != x.want {
			t.Errorf("%s: %v, want %v", x.name, got, x.want)
		}
	}
}
