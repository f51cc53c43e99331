package swap

import (
	"errors"
	"fmt"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/pipeline"
	"jbofd/internal/uuid"
)

// Manifest is the swap manifest of a partition as it was read: the swap areas that may hold the newest values of some
// of the partition's keys.
type Manifest struct {
	// Source is the UUID of the partition that has written it.
	Source uuid.UUID
	Areas  []ManifestEntry
	// copies are the generations of the two copies, 0 for an invalid one.
	copies [2]uint64
}

// ManifestEntry says that an area may hold records of the source, from the place Floor on.
type ManifestEntry struct {
	Area  uuid.UUID
	Floor format.LogOffset
}

// LoadManifest reads the manifest of a partition. A partition without one has no keys in other areas.
//
// Errors: ErrManifest, if there is something else than a manifest; space.ErrNoMemory; those of read.
func LoadManifest(read Read, alloc space.Alloc) (*Manifest, error) {
	out := &Manifest{}
	mem := space.Buffers{Alloc: alloc}
	blank := 0
	var errs []error
	var best format.SwapManifest
	for i, offset := range format.SwapManifestOffsets {
		b := format.SwapManifest(mem.Take("a swap manifest", format.SwapManifestBytes))
		if mem.Err != nil {
			return nil, mem.Err
		}
		err := read(offset, b)
		if err == nil {
			err = b.Check()
		}
		switch {
		case errors.Is(err, format.ErrBlank):
			blank++
		case err != nil:
			errs = append(errs, err)
		default:
			out.copies[i] = b.Generation()
			if best == nil || b.Generation() > best.Generation() {
				best = b
			}
		}
	}
	switch {
	case best == nil && blank == 2:
		return out, nil
	case best == nil:
		return nil, fmt.Errorf("%w: %w", ErrManifest, errors.Join(errs...))
	}
	out.Source = best.Source()
	for i := range best.Areas() {
		area, floor := best.Area(i)
		out.Areas = append(out.Areas, ManifestEntry{Area: area, Floor: floor})
	}
	return out, nil
}

// FormatManifest makes the manifest of a new partition, whatever is there.
//
// Errors: space.ErrNoMemory; those of write.
func FormatManifest(source uuid.UUID, write Write, alloc space.Alloc) error {
	mem := space.Buffers{Alloc: alloc}
	b := format.SwapManifest(mem.Take("a swap manifest", format.SwapManifestBytes))
	if mem.Err != nil {
		return mem.Err
	}
	b.SetSource(source)
	b.SetGeneration(1)
	b.Seal()
	for _, offset := range format.SwapManifestOffsets {
		if err := write(offset, b); err != nil {
			return err
		}
	}
	return nil
}

// manifestState is the manifest of a Source. A change counts only when both copies, written one after the other, are
// durable. Otherwise a copy that becomes damaged later could leave an older one behind.
type manifestState struct {
	buf format.SwapManifest
	// copies are the generations of the durable copies; 0: not known.
	copies     [2]uint64
	generation uint64
	// dirty: the manifest has to be written. writing: copy at is being written; second: it is the second of the two.
	dirty, writing, second bool
	at                     int
	// failed: the last attempt has failed, and the next one follows at retryNS.
	failed  bool
	retryNS int64
}

// attach compares the manifest with the areas.
func (src *Source) attach() error {
	manifest, c := src.cfg.Manifest, &src.cfg
	src.areas = make([]areaState, len(c.Areas))
	for i := range src.areas {
		a := &src.areas[i]
		tail := c.Areas[i].Tail
		*a = areaState{AreaRef: c.Areas[i], first: none, last: none, acked: tail, group: tail, end: tail, floor: tail}
	}
	if manifest == nil {
		manifest = &Manifest{}
	}
	src.manifest.copies = manifest.copies
	src.manifest.generation = max(manifest.copies[0], manifest.copies[1])
	src.manifest.dirty = manifest.copies[0] != manifest.copies[1] && len(src.areas) > 0
	if len(src.areas) > format.MaxSwapAreas {
		return fmt.Errorf("%w: %d swap areas, want at most %d", ErrConfig, len(src.areas), format.MaxSwapAreas)
	}
	if manifest.Source == c.UUID {
		for _, l := range manifest.Areas {
			if err := src.list(l); err != nil {
				return err
			}
		}
	}
	if len(src.areas) > 0 {
		mem := space.Buffers{Alloc: c.Alloc}
		src.manifest.buf = mem.Take("a swap manifest", format.SwapManifestBytes)
		return mem.Err
	}
	return nil
}

// list takes over an entry of the manifest.
func (src *Source) list(l ManifestEntry) error {
	for i := range src.areas {
		a := &src.areas[i]
		if a.UUID != l.Area {
			continue
		}
		if l.Floor > a.Tail {
			return fmt.Errorf("%w: the swap log of %s ends at %d, but there were records of this partition up to %d",
				ErrManifest, Name(l.Area), a.Tail, l.Floor)
		}
		a.listed, a.mayBeListed, a.wantListed, a.floor = true, true, true, l.Floor
		return nil
	}
	return Missing(l.Area)
}

// Missing returns the ErrManifest for an area that the manifest names and that is not there.
func Missing(area uuid.UUID) error {
	return fmt.Errorf("%w: %s is missing, and may have the newest values of some keys", ErrManifest, Name(area))
}

// manifestStep writes the manifest if it has to change.
func (src *Source) manifestStep() {
	b := &src.manifest
	for i := range src.areas {
		if a := &src.areas[i]; a.wantListed && a.entries == 0 && a.appends == 0 && src.load.to != i &&
			src.batch.n == 0 {
			if at := a.lastNS + src.cfg.Policy.UnlistNS; src.draining || src.now >= at {
				a.wantListed = false
				b.dirty = true
			} else {
				src.wake(at)
			}
		}
	}
	if b.writing || !b.dirty {
		return
	}
	if b.failed && src.now < b.retryNS {
		src.wake(b.retryNS)
		return
	}
	clear(b.buf)
	b.generation++
	b.buf.SetSource(src.cfg.UUID)
	b.buf.SetGeneration(b.generation)
	for i := range src.areas {
		a := &src.areas[i]
		a.writing = a.wantListed
		if !a.wantListed {
			a.listed = false
			continue
		}
		a.mayBeListed = true
		floor := a.floor
		switch {
		case !a.listed:
			floor = a.acked
			a.floor = floor
		case src.batch.n > 0 && src.batch.stage == returnManifestDue && src.batch.area == i:
			floor = src.batch.floor
			src.batch.stage = returnManifestWriting
		}
		b.buf.AddArea(a.UUID, floor)
	}
	b.buf.Seal()
	b.dirty, b.writing, b.second = false, true, false
	b.at = 0
	if b.copies[1] < b.copies[0] {
		b.at = 1
	}
	src.writeManifest()
}

// writeManifest writes one copy.
func (src *Source) writeManifest() {
	b := &src.manifest
	b.copies[b.at] = 0
	src.out.IOs = append(src.out.IOs, IO{
		Area: -1, Op: pipeline.Write, FUA: src.cfg.FUA, Background: true, Tenant: src.cfg.Background,
		Offset: format.SwapManifestOffsets[b.at], Buf: b.buf, Tag: uint32(len(src.ops)),
	})
}

// manifestWritten ends the write of a copy.
func (src *Source) manifestWritten(ok bool) {
	b := &src.manifest
	if ok {
		b.copies[b.at] = b.generation
		if !b.second {
			b.second = true
			b.at = 1 - b.at
			src.writeManifest()
			return
		}
	}
	b.writing, b.failed = false, !ok
	if !ok {
		// The outcome is indeterminate. The old floor and the new one are both true, and an area that is missing in one
		// of them counts as not listed. The copy is written again.
		b.dirty = true
		b.retryNS = src.now + retryNS
	} else {
		for i := range src.areas {
			a := &src.areas[i]
			a.listed, a.mayBeListed = a.writing, a.writing
		}
	}
	if s := &src.batch; s.n > 0 && s.stage == returnManifestWriting {
		if ok {
			src.areas[s.area].floor = s.floor
		}
		src.endBatch(ok)
	}
}
