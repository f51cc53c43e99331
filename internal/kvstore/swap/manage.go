package swap

import (
	"slices"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/uuid"
)

// What operators see of areas and sources, and what they can discard.

// Name is the name of a swap area in messages.
func Name(area uuid.UUID) string {
	return "swap area " + area.String()
}

// SourceInfo describes a source to the operator of an area.
type SourceInfo struct {
	// UUID is that of the source partition.
	UUID uuid.UUID
	// Attached: the source has attached since the area was opened, and knows itself which keys it has there. Otherwise
	// Keys were found.
	Attached bool
	Keys     int
}

// Sources returns the sources that are attached or have records that may count.
func (a *Area) Sources() (all []SourceInfo) {
	for i := range a.sources {
		if st := &a.sources[i]; st.attached || st.live() {
			all = append(all, SourceInfo{UUID: st.id, Attached: st.attached, Keys: len(st.records)})
		}
	}
	return all
}

// live reports that the source has records that may count.
func (st *sourceState) live() bool { return st.last >= st.released && st.last > 0 }

// Forget discards the records of a source, which is gone for good and not open. The next opening finds those again that
// lie behind a record that counts.
func (a *Area) Forget(source uuid.UUID) {
	for i := range a.sources {
		if st := &a.sources[i]; st.id == source {
			st.released, st.records = max(st.released, a.tail), nil
			a.short = true
		}
	}
}

// Use is what a source has in an area.
type Use struct {
	Area uuid.UUID
	Keys int
	// Listed: the source's manifest may name the area, so that the source does not open without it.
	Listed bool
}

// Uses returns what the source has in each of its areas.
func (src *Source) Uses() []Use {
	all := make([]Use, len(src.areas))
	for i := range src.areas {
		a := &src.areas[i]
		all[i] = Use{Area: a.UUID, Keys: a.entries, Listed: a.mayBeListed || a.wantListed || a.entries > 0}
	}
	return all
}

// AbandonDrain ends the return of keys after Drain, for lack of time. They stay where they are, and the next start
// finds them. Requests that wait for a key to return end with DeviceError. When nothing is under way any more,
// ReturnBlocked reports it.
func (src *Source) AbandonDrain() {
	src.abandoned = true
	for i := range src.areas {
		src.failWaiters(i, kvstore.DeviceError)
	}
}

// NoRequests reports that no request of a client waits for its answer here.
func (src *Source) NoRequests() bool {
	for i := range src.ops {
		if o := &src.ops[i]; (o.kind == opRead || o.kind == opWrite || o.kind == opList) && !o.answered {
			return false
		}
	}
	return true
}

// Names reports whether the manifest names an area.
func (b *Manifest) Names(area uuid.UUID) bool {
	return slices.ContainsFunc(b.Areas, func(l ManifestEntry) bool { return l.Area == area })
}

// Drop removes an area from the manifest of a source that is not open. The source forgets the keys that it has there;
// each then has the value that it had before it was swapped out. A crash leaves the old manifest or the new one.
//
// Errors: space.ErrNoMemory; those of write. Drop may be repeated after LoadManifest.
func (b *Manifest) Drop(area uuid.UUID, write Write, alloc space.Alloc) error {
	b.Areas = slices.DeleteFunc(b.Areas, func(l ManifestEntry) bool { return l.Area == area })
	return b.write(write, alloc)
}

// Repair makes both copies of the manifest of a source that is not open the same. A Source with areas does that itself.
// After a crash one of them may be older, and would count if the other one became damaged.
//
// Errors: space.ErrNoMemory; those of write.
func (b *Manifest) Repair(write Write, alloc space.Alloc) error {
	if b.copies[0] == b.copies[1] {
		return nil
	}
	return b.write(write, alloc)
}

// write writes both copies.
func (b *Manifest) write(write Write, alloc space.Alloc) error {
	mem := space.Buffers{Alloc: alloc}
	buf := format.SwapManifest(mem.Take("a swap manifest", format.SwapManifestBytes))
	if mem.Err != nil {
		return mem.Err
	}
	buf.SetSource(b.Source)
	buf.SetGeneration(max(b.copies[0], b.copies[1]) + 1)
	for _, l := range b.Areas {
		buf.AddArea(l.Area, l.Floor)
	}
	buf.Seal()
	// The copy that counts now is written last, so that a crash leaves one of the two valid.
	first := 0
	if b.copies[1] < b.copies[0] {
		first = 1
	}
	for _, i := range []int{first, 1 - first} {
		if err := write(format.SwapManifestOffsets[i], buf); err != nil {
			return err
		}
		b.copies[i] = buf.Generation()
	}
	return nil
}
