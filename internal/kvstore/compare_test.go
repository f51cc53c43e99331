package kvstore_test

import (
	"slices"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
)

// compare reads all keys, and takes the result as their content from then on. A write that failed may still be found
// after a restart, as long as no later one has succeeded.
func (m *model) compare(restarted bool) {
	m.t.Helper()
	objects := int64(0)
	m.each(func(i int, buf []byte, p kvstore.Reply) {
		h := &m.keys[i]
		may := h.possible(m.clock, m.clock, restarted)
		at := slices.IndexFunc(may, func(e event) bool {
			return p.Status == kvstore.NotFound && e.size == absent || p.Status == kvstore.OK &&
				e.is(i, buf, p.ValueLen, p.Version)
		})
		// It is a DeviceError as long as the block of a record may be put right by a write of it that is under way.
		if at < 0 && m.mayBeDamaged(i) && (p.Status == kvstore.Corrupt || p.Status == kvstore.DeviceError) {
			m.damaged++
			// It is not known which of them it has. Exist may still tell whether there is one.
			for j := range may {
				may[j].state, may[j].start, may[j].end = done, m.clock, m.clock
			}
			h.open, h.events = nil, may
			return
		}
		if at < 0 {
			m.t.Fatalf("key %d (%x): status %d, length %d, want one of %v; all: %v", i, h.name, p.Status, p.ValueLen,
				may, h.events)
		}
		later := slices.DeleteFunc(h.possible(m.clock, m.clock, true), func(e event) bool {
			return restarted || e.state != failed
		})
		for j := range later {
			later[j].end = never
		}
		h.open = nil
		h.events = append([]event{{version: may[at].version, size: may[at].size, state: done, start: m.clock,
			end: m.clock, given: p.Version}}, later...)
		if may[at].size != absent {
			objects++
		}
	})
	for i := range m.keys {
		if h := &m.keys[i]; m.passes(i) {
			h.open, h.events = nil, []event{{size: absent, state: done, start: m.clock, end: m.clock}}
		}
	}
	m.clock++
	if m.damaged == 0 {
		m.audit(objects)
	}
}

// each gets the values of all keys, several at once, and yields the replies in any order. Of the keys that were never
// written only a few are looked at, if nothing is damaged: that none of the others exists is known from the number of
// objects, which compare then checks.
func (m *model) each(yield func(key int, buf []byte, p kvstore.Reply)) {
	m.t.Helper()
	const most = 16
	bufs := make([][]byte, most)
	var free []int
	for i := range bufs {
		bufs[i], free = m.buffer(), append(free, i)
	}
	var slot [most]int // the key
	before := m.reply
	m.reply = func(p kvstore.Reply) {
		if p.Tag < 1<<63 {
			before(p)
			return
		}
		i := int(p.Tag - 1<<63)
		free = append(free, i)
		yield(slot[i], bufs[i], p)
	}
	wait := func(done func() bool) {
		m.t.Helper()
		for n := 0; !done(); n++ {
			if !m.step() && !done() || n > 1e6 {
				m.t.Fatalf("%d Gets get no answer: %+v", most-len(free), m.s.Stats())
			}
		}
	}
	for key := range m.keys {
		if m.passes(key) {
			continue
		}
		wait(func() bool { return len(free) > 0 })
		i := free[len(free)-1]
		free, slot[i] = free[:len(free)-1], key
		q := kvstore.Request{Op: kvstore.Get, Key: m.keys[key].name, Value: bufs[i], Tag: 1<<63 + uint64(i)}
		wait(func() bool { return m.s.Submit(&q) })
	}
	wait(func() bool { return len(free) == most })
	m.reply = before
	for _, b := range bufs {
		clear(b)
	}
	m.free = append(m.free, bufs...)
}

// audit compares the counters with the content while no request is in progress: the number of objects, and the live
// bytes, which exceed those of keys and values by at most the overhead of segments.
func (m *model) audit(objects int64) {
	m.t.Helper()
	st := m.s.Stats()
	if st.Objects != objects {
		m.t.Errorf("%d objects, want %d", st.Objects, objects)
	}
	least, most := int64(0), st.Segments*(format.SegmentHeaderBytes+format.KeyUnit-1)
	for i := range m.keys {
		h := &m.keys[i]
		e := h.events[0]
		n := int64(format.ItemHeaderBytes + len(h.name))
		if e.size > 0 {
			items, bytes := m.s.Extent(int(e.size))
			n += int64((items-1)*format.ItemHeaderBytes + bytes)
			most += int64((items - 1) * format.ItemHeaderBytes)
		}
		// A key that a split has moved may be in both segments, with the items of a value that was there then.
		most += 2 * int64(format.ItemHeaderBytes+len(h.name))
		items, _ := m.s.Extent(m.longest)
		most += 2 * int64((items-1)*format.ItemHeaderBytes)
		if e.size != absent {
			least += n
			most += n
		}
	}
	if st.LiveBytes < least || st.LiveBytes > most {
		m.t.Errorf("%d bytes live, want %d to %d", st.LiveBytes, least, most)
	}
}
