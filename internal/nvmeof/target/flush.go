package target

import (
	"slices"

	"jbofd/internal/drive"
	"jbofd/internal/nvmeof"
	"jbofd/internal/pipeline"
)

// flusher flushes one drive for the shutdowns of controllers, one flush at a time. Shutdowns that come while one is in
// flight share the next one, for a flush serves all writes that have ended before it begins. So hosts that shut down
// and reset again and again do not pile up flushes that other hosts' shutdowns would have to wait for.
//
//	wantFlush ──> waiting ── start ──> served, a Flush at the drive ── Done, look ──> finished ──> Target.Flushed
//
// The flush is done in the node's own name, not in a tenant's: the queue of a tenant with a cap may be long, and the
// host waits for no more than the drive needs.
type flusher struct {
	f     *Service
	drive *drive.Drive
	io    drive.IO
	// waiting are served by the next flush, served by the one under way. All three are guarded by Service.mu.
	waiting, served []*flush
	underWay        bool
}

// flush is an ActionFlush that has not been answered. Guarded by Service.mu.
type flush struct {
	ctrl   *nvmeof.Controller
	number uint64
	left   int // drives that are not flushed
	failed bool
}

var _ drive.Sink = (*flusher)(nil)

func newFlushers(f *Service) []*flusher {
	all := make([]*flusher, len(f.SSDs()))
	for i, d := range f.SSDs() {
		if d != nil {
			all[i] = newFlusher(f, d)
		}
	}
	return all
}

func newFlusher(f *Service, d *drive.Drive) *flusher {
	u := &flusher{f: f, drive: d}
	u.io.Op = pipeline.Flush
	u.io.Init(u, 0)
	return u
}

// wantFlush lets the drives' next flushes serve an ActionFlush; start must follow. What waits for an earlier shutdown
// of the controller, or for a controller whose association has ended, is of no use any more. mu is held.
func (s *Service) wantFlush(a *nvmeof.Action) {
	j := &flush{ctrl: a.Controller, number: a.Flush, left: len(a.SSDs)}
	for _, n := range a.SSDs {
		u := s.ends.flushers[n]
		u.waiting = slices.DeleteFunc(u.waiting, func(w *flush) bool {
			_, alive := w.ctrl.QueueConn(0)
			return w.ctrl == j.ctrl || !alive
		})
		u.waiting = append(u.waiting, j)
	}
}

// start begins a flush if one is wanted and none is under way. Without locks, and not during a turn of the drive.
func (f *flusher) start() {
	f.f.mu.Lock()
	begin := !f.underWay && len(f.waiting) > 0
	if begin {
		f.underWay, f.served, f.waiting = true, f.waiting, nil
	}
	f.f.mu.Unlock()
	if begin {
		var b drive.Batch
		b.Add(&f.io)
		f.drive.Submit(&b)
	}
}

// finished tells the machine of the flush that is done. mu is held.
func (f *flusher) finished() {
	for _, j := range f.served {
		j.failed = j.failed || f.io.Err != nil
		if j.left--; j.left == 0 {
			f.f.target.Flushed(j.ctrl, j.number, !j.failed)
		}
	}
	f.underWay, f.served = false, nil
}

// Admitted implements drive.Sink; nothing is fetched.
func (f *flusher) Admitted(*drive.IO) bool { return false }

// Done implements drive.Sink.
func (f *flusher) Done(*drive.IO) bool {
	e := &f.f.ends
	e.mu.Lock()
	e.flushed = append(e.flushed, f)
	e.mu.Unlock()
	f.f.scheduleCheck()
	return false
}

// Kick implements drive.Sink.
func (f *flusher) Kick() {}
