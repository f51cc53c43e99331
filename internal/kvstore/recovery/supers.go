package recovery

import (
	"errors"
	"fmt"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

// The places of superblocks: the first copy, the end of the extent, and the end of the partition if that is elsewhere.
//
// At the end of the extent there is the second copy. Or, if the partition ends before, a note: a superblock that names
// another length than the extent's and serves only to find the second copy when the first is damaged. A partition ends
// before its extent while it is being resized, and after a resize that has not come to its end.
const (
	firstSuper = iota
	extentSuper
	endSuper
)

// super returns one of the superblocks, if it is sound.
//
// Errors: that of the device; those of format.Superblock.Check.
func (m *Machine) super(i int) (format.Superblock, error) {
	sb := format.Superblock(m.sbs[i])
	if m.sbErrs[i] != nil {
		return nil, m.sbErrs[i]
	}
	if err := sb.Check(sb.PartitionBytes()); err != nil {
		return nil, err
	}
	if n := sb.PartitionBytes(); n > m.cfg.PartitionBytes {
		return nil, fmt.Errorf("superblock: %w: partition length is %d, want at most %d", format.ErrCorrupt, n,
			m.cfg.PartitionBytes)
	}
	return sb, nil
}

// followEnd reads the superblock at the end of the partition, if it is not at the end of its extent, and reports
// whether there is such a one to read. The first copy says where that is; only if it is damaged, the note does.
func (m *Machine) followEnd() bool {
	if m.follows {
		return false
	}
	for i := range endSuper {
		sb, err := m.super(i)
		if err != nil {
			continue
		}
		if n := sb.PartitionBytes(); n != m.cfg.PartitionBytes && n >= 2*format.SuperblockBytes {
			m.follows = true
			m.read(endSuper, format.SuperblockOffset(2, n), m.sbs[endSuper])
		}
		return m.follows
	}
	return false
}

// chooseSuper chooses the superblock that counts: the valid one with the highest generation of those at the places that
// they name themselves.
func (m *Machine) chooseSuper() {
	var all [3]format.Superblock
	var errs [3]error
	best := none
	for i := range all {
		if i == endSuper && !m.follows {
			errs[i] = errNoOtherEnd
			break
		}
		all[i], errs[i] = m.super(i)
		if first := all[firstSuper]; i > 0 && errs[i] == nil && first != nil && first.UUID() != all[i].UUID() {
			errs[i] = fmt.Errorf("superblock: %w: UUID is %v, want %v", format.ErrCorrupt, all[i].UUID(), first.UUID())
		}
		// With a newer version in one copy and a known one in the other, a newer program was the last to write.
		if errors.Is(errs[i], format.ErrVersion) {
			m.err = errs[i]
			return
		}
		if errs[i] == nil && m.counts(i) && (best == none || all[i].Generation() > all[best].Generation()) {
			best = i
		}
	}
	if best == none {
		m.err = fmt.Errorf("first copy: %w; second copy: %w", errs[firstSuper], m.secondErr(errs))
		return
	}
	m.image.Super = m.sbs[best]
	bytes := all[best].PartitionBytes()
	other := firstSuper
	if best == firstSuper {
		if other = extentSuper; bytes != m.cfg.PartitionBytes {
			other = endSuper
		}
	}
	m.image.OneCopy = errs[other] != nil || all[other].Checkpoint() != m.image.Super.Checkpoint() ||
		all[other].Pages() != m.image.Super.Pages() || all[other].LastStream() != m.image.Super.LastStream() ||
		all[other].PartitionBytes() != bytes || !all[other].SameDrops(m.image.Super)
	if note := all[extentSuper]; bytes != m.cfg.PartitionBytes &&
		(errs[extentSuper] != nil || note.PartitionBytes() != bytes) {
		m.image.NoteAt = format.SuperblockOffset(2, m.cfg.PartitionBytes)
	}
	m.cfg.PartitionBytes = bytes
	if got := m.image.Super.BlockSize(); got < m.cfg.BlockSize {
		m.err = fmt.Errorf("made for blocks of %d bytes, the device has blocks of %d", got, m.cfg.BlockSize)
		return
	}
	m.cfg.BlockSize = m.image.Super.BlockSize()
	m.image.Pool = space.New(m.image.Super)
	mem := space.Buffers{Alloc: m.cfg.Alloc}
	if m.image.Buf = mem.Take("a chunk that is read", int(m.image.Pool.Bytes())); mem.Err != nil {
		m.err = mem.Err
		return
	}
	m.beginOpenings()
}

// errNoOtherEnd stands for the superblock at the end of a partition that ends where its extent does.
var errNoOtherEnd = errors.New("there is none")

// counts reports whether superblock i lies where a partition of its length has it. A note does not.
func (m *Machine) counts(i int) bool {
	switch n := format.Superblock(m.sbs[i]).PartitionBytes(); i {
	case firstSuper:
		return true
	case extentSuper:
		return n == m.cfg.PartitionBytes
	default:
		return format.Superblock(m.sbs[i]).Generation()&1 == 0 && n == m.endBytes()
	}
}

// endBytes is the length of the partition whose second copy was read at endSuper.
func (m *Machine) endBytes() int64 {
	if sb, err := m.super(firstSuper); err == nil {
		return sb.PartitionBytes()
	}
	return format.Superblock(m.sbs[extentSuper]).PartitionBytes()
}

// secondErr is why the second copy does not count.
func (m *Machine) secondErr(errs [3]error) error {
	switch {
	case m.follows && errs[endSuper] != nil:
		return errs[endSuper]
	case errs[extentSuper] != nil:
		return errs[extentSuper]
	}
	return fmt.Errorf("superblock: %w: it is a note of another length", format.ErrCorrupt)
}
