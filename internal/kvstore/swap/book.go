package swap

import (
	"errors"
	"fmt"

	"jbofd/internal/kvstore/swap/guest"
	"jbofd/internal/pipeline"
)

// Book is what a home's book says at the start.
type Book struct {
	// Home is the UUID of the partition that has written it.
	Home  [16]byte
	Lines []Line
	// copies are the generations of the copies, 0 for one that is not valid.
	copies [2]uint64
}

// Line says that there may be guests in an area, from floor on.
type Line struct {
	Area  [16]byte
	Floor uint64
}

// LoadBook reads the book of a partition. A partition that has none has guests nowhere.
//
// Errors: ErrBook, if there is something else than a book; what read says.
func LoadBook(read Read, alloc func(n int) []byte) (*Book, error) {
	out := &Book{}
	blank := 0
	var errs []error
	var best guest.Book
	for i, offset := range guest.BookOffsets {
		b := guest.Book(alloc(guest.BookBytes))
		err := read(offset, b)
		if err == nil {
			err = b.Check()
		}
		switch {
		case errors.Is(err, guest.ErrBlank):
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
		return nil, fmt.Errorf("%w: %w", ErrBook, errors.Join(errs...))
	}
	out.Home = best.Home()
	for i := range best.Lines() {
		area, floor := best.Line(i)
		out.Lines = append(out.Lines, Line{Area: area, Floor: floor})
	}
	return out, nil
}

// FormatBook makes the book of a new partition, whatever is there.
//
// Errors: what write says.
func FormatBook(home [16]byte, write Write, alloc func(n int) []byte) error {
	b := guest.Book(alloc(guest.BookBytes))
	clear(b)
	b.SetHome(home)
	b.SetGeneration(1)
	b.Seal()
	for _, offset := range guest.BookOffsets {
		if err := write(offset, b); err != nil {
			return err
		}
	}
	return nil
}

// bookState is the book at work. Both copies are written, one after the other, before what it says counts:
// so that one that becomes damaged later does not leave an older one behind.
type bookState struct {
	buf guest.Book
	// copies are the generations of the copies that are durable, 0: not known.
	copies     [2]uint64
	generation uint64
	// dirty: it is to be written. writing: it is, the copy at, second is the last of the two.
	dirty, writing, second bool
	at                     int
	// failed: the last attempt has; not again before retryNS.
	failed  bool
	retryNS int64
}

// attach brings the book and the areas together.
func (h *Home) attach() error {
	book, c := h.cfg.Book, &h.cfg
	h.areas = make([]areaOfHome, len(c.Areas))
	for i := range h.areas {
		a := &h.areas[i]
		tail := c.Areas[i].Tail
		*a = areaOfHome{HomeArea: c.Areas[i], first: nobody, last: nobody, acked: tail, group: tail, end: tail, floor: tail}
	}
	if book == nil {
		book = &Book{}
	}
	h.book.copies = book.copies
	h.book.generation = max(book.copies[0], book.copies[1])
	h.book.dirty = book.copies[0] != book.copies[1] && len(h.areas) > 0
	if len(h.areas) > guest.MaxAreas {
		return fmt.Errorf("%w: %d swap areas, want at most %d", ErrConfig, len(h.areas), guest.MaxAreas)
	}
	if book.Home == c.UUID {
		for _, l := range book.Lines {
			if err := h.list(l); err != nil {
				return err
			}
		}
	}
	if len(h.areas) > 0 {
		h.book.buf = c.Alloc(guest.BookBytes)
	}
	return nil
}

// list takes in a line of the book.
func (h *Home) list(l Line) error {
	for i := range h.areas {
		a := &h.areas[i]
		if a.UUID != l.Area {
			continue
		}
		if l.Floor > a.Tail {
			return fmt.Errorf("%w: the guest log of %s ends at %d, but there were records of this partition up to %d", ErrBook, Name(l.Area), a.Tail, l.Floor)
		}
		a.listed, a.perhaps, a.wantListed, a.floor = true, true, true, l.Floor
		return nil
	}
	return Missing(l.Area)
}

// Missing is ErrBook for an area that is in the book and not there.
func Missing(area [16]byte) error {
	return fmt.Errorf("%w: %s is not there, and may have the newest values of some keys", ErrBook, Name(area))
}

// bookStep writes the book if it is to say something else.
func (h *Home) bookStep() {
	b := &h.book
	for i := range h.areas {
		if a := &h.areas[i]; a.wantListed && a.entries == 0 && a.appends == 0 && h.load.to != i && h.sweep.n == 0 {
			if at := a.lastNS + h.cfg.Policy.UnlistNS; h.draining || h.now >= at {
				a.wantListed = false
				b.dirty = true
			} else {
				h.wake(at)
			}
		}
	}
	if b.writing || !b.dirty {
		return
	}
	if b.failed && h.now < b.retryNS {
		h.wake(b.retryNS)
		return
	}
	clear(b.buf)
	b.generation++
	b.buf.SetHome(h.cfg.UUID)
	b.buf.SetGeneration(b.generation)
	for i := range h.areas {
		a := &h.areas[i]
		a.writing = a.wantListed
		if !a.wantListed {
			a.listed = false
			continue
		}
		a.perhaps = true
		floor := a.floor
		switch {
		case !a.listed:
			floor = a.acked
			a.floor = floor
		case h.sweep.n > 0 && h.sweep.stage == sweepWants && h.sweep.area == i:
			floor = h.sweep.floor
			h.sweep.stage = sweepBook
		}
		b.buf.AddLine(a.UUID, floor)
	}
	b.buf.Seal()
	b.dirty, b.writing, b.second = false, true, false
	b.at = 0
	if b.copies[1] < b.copies[0] {
		b.at = 1
	}
	h.writeBook()
}

// writeBook writes one copy.
func (h *Home) writeBook() {
	b := &h.book
	b.copies[b.at] = 0
	h.out.IOs = append(h.out.IOs, IO{
		Area: -1, Op: pipeline.Write, FUA: h.cfg.FUA, Background: true, Tenant: h.cfg.Background, Offset: guest.BookOffsets[b.at], Buf: b.buf, Tag: uint32(len(h.ops)),
	})
}

// bookWritten ends the write of a copy.
func (h *Home) bookWritten(ok bool) {
	b := &h.book
	if ok {
		b.copies[b.at] = b.generation
		if !b.second {
			b.second = true
			b.at = 1 - b.at
			h.writeBook()
			return
		}
	}
	b.writing, b.failed = false, !ok
	if !ok {
		// What it says may be durable or not: the old and the new floor are both true, and an area that one of them does not
		// have counts as not listed. It is written again.
		b.dirty = true
		b.retryNS = h.now + retryNS
	} else {
		for i := range h.areas {
			a := &h.areas[i]
			a.listed, a.perhaps = a.writing, a.writing
		}
	}
	if s := &h.sweep; s.n > 0 && s.stage == sweepBook {
		if ok {
			h.areas[s.area].floor = s.floor
		}
		h.conclude(ok)
	}
}
