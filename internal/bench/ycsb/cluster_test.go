package ycsb

import (
	"context"
	"fmt"
	"testing"

	"jbofd/client"
	"jbofd/client/cluster"
	"jbofd/client/kv"
)

// TestWhatWasNotDoneIsToldFromWhatMayHaveBeen: a Put that was refused leaves the version of its record as it was.
func TestWhatWasNotDoneIsToldFromWhatMayHaveBeen(t *testing.T) {
	for _, c := range []struct {
		err  error
		want Result
	}{
		{nil, OK},
		{kv.ErrKeyNotFound, NotFound},
		{kv.ErrCapacityExceeded, Refused},
		{kv.ErrValueTooLarge, Refused},
		{fmt.Errorf("Put: %w: %w", cluster.ErrUnavailable, context.DeadlineExceeded), Refused},
		{fmt.Errorf("Put: %w: %w", client.ErrIndeterminate, context.DeadlineExceeded), Failed},
		{client.ErrConnectionLost, Failed},
	} {
		d := doneOf(&kv.Result{Tag: 3, Size: 5, Err: c.err})
		if d.Result != c.want || d.Tag != 3 || d.ValueLen != 5 || d.Err != c.err {
			t.Errorf("%v: %+v, want %s", c.err, d, c.want)
		}
	}
}
