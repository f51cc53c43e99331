package swap

import (
	"fmt"
	"slices"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/swap/guest"
)

// What operators see of areas and homes, and what they may give up.

// Name is what a swap area is called in messages.
func Name(area [16]byte) string {
	return fmt.Sprintf("swap area %x-%x-%x-%x-%x", area[:4], area[4:6], area[6:8], area[8:10], area[10:])
}

// AreaHome is a home as an area knows it.
type AreaHome struct {
	// UUID is that of the home's partition.
	UUID [16]byte
	// Attached: it has come since the area was opened, and knows itself what it has there. Otherwise Keys were found.
	Attached bool
	Keys     int
}

// Homes returns the homes with records that may count, or that are attached.
func (a *Area) Homes() (all []AreaHome) {
	for i := range a.homes {
		if h := &a.homes[i]; h.attached || h.live() {
			all = append(all, AreaHome{UUID: h.uuid, Attached: h.attached, Keys: len(h.guests)})
		}
	}
	return all
}

// live reports that there are records of the home that may count.
func (h *homeOfArea) live() bool { return h.last >= h.released && h.last > 0 }

// Forget says that a home is gone for good, with what it has here. It is not open. An opening finds again what stands
// behind something that counts.
func (a *Area) Forget(home [16]byte) {
	for i := range a.homes {
		if h := &a.homes[i]; h.uuid == home {
			h.released, h.guests = max(h.released, a.tail), nil
			a.short = true
		}
	}
}

// Use is what a home has in an area.
type Use struct {
	Area [16]byte
	Keys int
	// Listed: the home's book may name the area, so that the home does not open without it.
	Listed bool
}

// Uses returns what the home has in each of its areas.
func (h *Home) Uses() []Use {
	all := make([]Use, len(h.areas))
	for i := range h.areas {
		a := &h.areas[i]
		all[i] = Use{Area: a.UUID, Keys: a.entries, Listed: a.perhaps || a.wantListed || a.entries > 0}
	}
	return all
}

// Leave says that what is out stays there, after Drain, because there is no time: the next start finds it. Requests that wait for a
// key to come home end with DeviceError. When what is under way has ended, Stuck reports it.
func (h *Home) Leave() {
	h.leaving = true
	for i := range h.areas {
		h.giveUp(i, kvstore.DeviceError)
	}
}

// Answered reports that no request of a client waits here for its answer.
func (h *Home) Answered() bool {
	for i := range h.ops {
		if o := &h.ops[i]; (o.kind == opRead || o.kind == opWrite || o.kind == opList) && !o.told {
			return false
		}
	}
	return true
}

// Names reports whether there may be guests in that area.
func (b *Book) Names(area [16]byte) bool {
	return slices.ContainsFunc(b.Lines, func(l Line) bool { return l.Area == area })
}

// Drop writes the book of a home that is not open without an area: the home forgets what it has there, and has for
// these keys what they were before they went. A crash leaves the old book or the new one.
//
// Errors: what write says; then it may be repeated after LoadBook.
func (b *Book) Drop(area [16]byte, write Write, alloc func(n int) []byte) error {
	b.Lines = slices.DeleteFunc(b.Lines, func(l Line) bool { return l.Area == area })
	return b.write(write, alloc)
}

// Mend makes both copies of the book of a home that is not open say the same, as a Home with areas does: after a crash one of them
// may be older, and would count again if the other became damaged.
//
// Errors: what write says.
func (b *Book) Mend(write Write, alloc func(n int) []byte) error {
	if b.copies[0] == b.copies[1] {
		return nil
	}
	return b.write(write, alloc)
}

// write writes both copies.
func (b *Book) write(write Write, alloc func(n int) []byte) error {
	buf := guest.Book(alloc(guest.BookBytes))
	clear(buf)
	buf.SetHome(b.Home)
	buf.SetGeneration(max(b.copies[0], b.copies[1]) + 1)
	for _, l := range b.Lines {
		buf.AddLine(l.Area, l.Floor)
	}
	buf.Seal()
	// The copy that counts now is written last.
	first := 0
	if b.copies[1] < b.copies[0] {
		first = 1
	}
	for _, i := range []int{first, 1 - first} {
		if err := write(guest.BookOffsets[i], buf); err != nil {
			return err
		}
		b.copies[i] = buf.Generation()
	}
	return nil
}
