package swap

import (
	"fmt"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/uuid"
)

// A source that has ended without the return of its keys may attach again while the area goes on:
//
//	Area.Search ──> Search.Read, while the area works ──> Area.Adopt ──> Area.Attach
//
// It gets what an opening of the area would find. The part of the log that is read is not overwritten meanwhile, since
// LogHead does not pass a source that has records that may count: those at or behind sourceState.released.

// Search is the search for the records of a source that has ended.
type Search struct {
	source uuid.UUID
	// area is a copy of what the search needs: the log, and the place that it has come to.
	area *Area
	// to is where the search ends, last the place of the newest record that it must find.
	to, last format.LogOffset
}

// Search begins the search for the records of a source that has attached before and has ended: it sends no Append any
// more. It returns nil as long as some of its records are not durable, or Outcomes have not been taken: call it again
// after further turns of the area.
func (a *Area) Search(source uuid.UUID) *Search {
	n := a.sourceOf(source)
	for _, o := range a.out {
		if o.Source == n {
			return nil
		}
	}
	for _, g := range []*group{&a.open, &a.flight} {
		for _, o := range g.of {
			if o.source == n {
				return nil
			}
		}
	}
	r := &Search{source: source, area: &Area{cfg: a.cfg, log: a.log, super: a.super, head: a.head}}
	if st := &a.sources[n]; st.live() {
		r.to, r.last, r.area.tail = a.durable, st.last, max(st.released, a.head)
	}
	return r
}

// Read reads the log. It uses no state of the area, so that another goroutine may call it; only the source must not use
// the area meanwhile. alloc returns memory for I/O.
//
// Errors: ErrArea, wrapping format.ErrCorrupt if the log does not have what it should, the error of read, or
// space.ErrNoMemory.
func (r *Search) Read(read Read, alloc space.Alloc) error {
	a := r.area
	mem := space.Buffers{Alloc: alloc}
	s := scan{area: a, read: read, buf: mem.Take("a part of the swap log", scanBytes)}
	if mem.Err != nil {
		return fmt.Errorf("%w: %w", ErrArea, mem.Err)
	}
	for a.tail < r.to {
		place := a.tail
		n, err := s.group(place)
		if err == nil && n == 0 && place != a.log.NextLap(place) {
			place = a.log.NextLap(place)
			n, err = s.group(place)
		}
		if err == nil && n == 0 {
			err = fmt.Errorf("%w: the swap log ends at %d, and should at %d", format.ErrCorrupt, a.tail, r.to)
		}
		if err != nil {
			return fmt.Errorf("%w: %w", ErrArea, err)
		}
		a.tail = place.Add(n)
	}
	if st := &a.sources[a.sourceOf(r.source)]; st.last != r.last {
		return fmt.Errorf("%w: %w: the last record of the source is at %d, and should be at %d", ErrArea,
			format.ErrCorrupt, st.last, r.last)
	}
	return nil
}

// Adopt lets the source attach with what was read, after Read has returned nil.
func (a *Area) Adopt(r *Search) {
	st := &a.sources[a.sourceOf(r.source)]
	st.records, st.attached = r.area.sources[r.area.sourceOf(r.source)].records, false
}
