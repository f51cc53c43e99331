package kvstore

import (
	"jbofd/internal/invariants"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
)

type ioKind uint8

// ioRef says what an I/O under way belongs to: who is an index that depends on the kind. reads is the chunk that it
// reads, or none.
type ioRef struct {
	kind  ioKind
	who   int32
	reads format.ChunkNumber
}

// io asks for an I/O of the store's own.
func (s *Store) io(kind ioKind, who int32, op pipeline.Op, offset units.ExtentOffset, buf []byte) {
	s.ioFor(kind, who, payer{background: true}, op, offset, buf)
}

// ioFor asks for an I/O in the name of a payer.
func (s *Store) ioFor(kind ioKind, who int32, pays payer, op pipeline.Op, offset units.ExtentOffset, buf []byte) {
	var tag uint32
	if n := len(s.freeIO); n > 0 {
		tag, s.freeIO = s.freeIO[n-1], s.freeIO[:n-1]
	} else {
		tag = uint32(len(s.ios))
		s.ios = append(s.ios, ioRef{})
		if cap(s.freeIO) < cap(s.ios) {
			s.freeIO = make([]uint32, 0, cap(s.ios))
		}
	}
	s.ios[tag] = ioRef{kind: kind, who: who, reads: none}
	if op == pipeline.Read && kind != ioRecover {
		s.ios[tag].reads = s.pool.Of(offset)
	}
	switch kind {
	case ioLookup, ioSegment:
		s.stats.Reads++
	case ioGroup:
		s.stats.Writes++
	}
	s.out.IOs = append(s.out.IOs, IO{})
	io := &s.out.IOs[len(s.out.IOs)-1] // in place: see beginWrite
	io.Op, io.FUA, io.Background, io.Tenant = op, op == pipeline.Write && s.cfg.FUA, pays.background, pays.tenant
	io.Offset, io.Buf, io.Tag = offset, buf, tag
}

// moveTo appends what is in from, which is empty then. If there is nothing before it, the slices change places.
func moveTo[T any](to, from *[]T) {
	if len(*to) == 0 {
		*to, *from = *from, (*to)[:0]
		return
	}
	*to = append(*to, *from...)
	*from = (*from)[:0]
}

// payer is who pays for an I/O: a tenant, or the store's background work.
type payer struct {
	tenant     tenant.ID
	background bool
}

const (
	ioNone ioKind = iota
	ioLookup
	ioSegment
	ioGroup
	ioRestore
	ioHeader
	ioOpenings
	ioCompact
	ioEarly
	ioCheckpoint
	ioRecover
	ioNote
	ioDrop
	ioBad
)

// Complete ends an I/O.
//
// hot: 0 allocs
func (s *Store) Complete(tag uint32, err error) {
	r := s.ios[tag]
	invariants.Check(r.kind != ioNone, "kvstore: a completion of no I/O")
	s.ios[tag] = ioRef{}
	s.freeIO = append(s.freeIO, tag)
	ok := err == nil
	switch {
	case ok:
	case r.reads != none:
		s.pool.NoteUnreadable(r.reads)
	default:
		s.badWrite = true
	}
	switch r.kind {
	case ioLookup:
		s.reads.Read(r.who, ok)
	case ioSegment:
		s.segmentRead(r.who, ok)
	case ioGroup:
		s.groupWritten(r.who, ok)
	case ioRestore:
		s.restoreEnded(r.who, ok)
	case ioHeader:
		s.headerEnded(ioHeader, r.who, ok)
	case ioOpenings:
		s.listed(ok)
	case ioCompact:
		s.compact.slots[r.who].Read(ok)
	case ioEarly:
		s.earlyRead(r.who, ok)
	case ioCheckpoint:
		if s.ckpt.stage == ckptHeader {
			s.headerEnded(ioCheckpoint, r.who, ok)
		} else {
			s.checkpointWritten(ok)
		}
	case ioNote:
		s.noteWritten(ok)
	case ioRecover:
		s.recovered(r.who, err)
	case ioDrop:
		s.dropsWritten(ok)
	case ioBad:
		s.badEnded(ok)
	}
}
