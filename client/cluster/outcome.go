package cluster

import (
	"errors"
	"fmt"

	"jbofd/client"
	"jbofd/client/internal/host"
	"jbofd/client/kv"
	"jbofd/internal/nvme"
)

// fail returns the error of an operation that ends without an answer.
func (r *request) fail(cause error) error {
	kind := r.args.Kind
	what := ErrUnavailable
	switch {
	case r.unknown:
		what = client.ErrIndeterminate
		r.s.stats.indeterminate.Add(1)
	case errors.Is(cause, client.ErrClosed):
		return fmt.Errorf("%s: %w", kind, cause)
	default:
		r.s.stats.unavailable.Add(1)
	}
	if r.last != nil {
		return fmt.Errorf("%s: %w: %w; the latest try: %v", kind, what, cause, r.last)
	}
	return fmt.Errorf("%s: %w: %w", kind, what, cause)
}

// finish ends the operation with an error, or else with the outcome of op.
func (r *request) finish(err error) { // hot: 0 allocs
	r.phase = idle
	if r.err = err; err == nil {
		r.result()
	}
	if r.write() {
		now := r.s.now()
		if r.e.numbers.End(&r.number, !errors.Is(r.err, client.ErrIndeterminate), now, now+r.s.o.KeepFor) {
			r.e.lateEnded = true
		}
	}
	r.e.done = append(r.e.done, r)
}

// result is that of an operation that was answered.
func (r *request) result() { // hot: 0 allocs
	op, res := &r.op, &r.res
	res.Size, res.Version, res.Expires = op.Size, op.Version, op.Expires
	err := op.Err
	if st := op.Status; !st.OK() {
		if err = host.OfStatus(st); err == nil || r.wrap {
			err = host.CheckStatus(res.Kind.String(), st)
		}
		if r.wrap && st.Code() == nvme.KVVersionMismatch {
			err = &kv.VersionError{Current: op.Version, Err: err}
		}
	} else if err != nil && r.wrap {
		err = fmt.Errorf("%s: %w", res.Kind, err)
	}
	if errors.Is(err, client.ErrIndeterminate) {
		r.s.stats.indeterminate.Add(1)
	}
	r.err = err
}
