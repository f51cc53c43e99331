package recovery

import (
	"errors"
	"slices"

	"jbofd/internal/kvstore/format"
)

// beginOpenings reads the blocks that list the chunks which were opened since the checkpoint, or the headers of all
// chunks if there are no such lists.
func (m *Machine) beginOpenings() {
	m.image.NextOpenings = 1
	if m.image.Super.Openings() == 0 {
		m.beginHeaders()
		return
	}
	m.stage = readOpenings
	n := int64(m.cfg.BlockSize)
	_, blocks := format.OpeningsOffset(0, m.cfg.BlockSize)
	m.badOpenings = make([]bool, blocks)
	for i := range blocks {
		at, _ := format.OpeningsOffset(uint64(i), m.cfg.BlockSize)
		m.read(int32(i), at, m.image.Buf[int64(i)*n:][:n])
	}
}

// openingsRead takes the lists. If one of them may be missing, the headers of all chunks are read.
func (m *Machine) openingsRead() {
	blocks, id := len(m.badOpenings), m.image.Super.UUID()
	block := func(i int) format.Openings { return m.image.Buf[i*m.cfg.BlockSize:][:m.cfg.BlockSize] }
	sequence := func(i int) uint64 { // 0: there is none
		switch b := block(i); {
		case m.badOpenings[i]:
		case b.Check() == nil && b.UUID() == id:
			return b.Sequence()
		}
		return 0
	}
	for i := range blocks {
		m.image.NextOpenings = max(m.image.NextOpenings, sequence(i)+1)
	}
	m.listed = true
	for next := m.image.Super.Openings(); ; next++ {
		i := int(next % uint64(blocks))
		b, got := block(i), sequence(i)
		switch {
		case got == next && !b.Any():
			for j := range b.Len() {
				if c := b.Chunk(j); int(c) < len(m.image.Pool.Chunks) && c >= 0 {
					m.toRead = append(m.toRead, c)
				}
			}
			continue
		case got > 0 && got < m.image.Super.Openings():
		case got == 0 && !m.badOpenings[i] && errors.Is(b.Check(), format.ErrBlank):
		default:
			// This block might have been written, and those behind it.
			m.listed = false
			m.image.NextOpenings += uint64(blocks)
		}
		break
	}
	slices.Sort(m.toRead)
	m.toRead = slices.Compact(m.toRead)
	m.beginHeaders()
}

// readAllHeaders begins again, with the headers of all chunks, because the checkpoint does not say what they are.
func (m *Machine) readAllHeaders() {
	m.listed, m.lost, m.image.Checkpoint, m.searched = false, nil, nil, false
	m.image.LostHeaders = 0
	m.beginHeaders()
}
