package swap

import (
	"bytes"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/swap/guest"
	"jbofd/internal/pipeline"
)

// read answers a Get or Exist of a key that is out.
func (h *Home) read(oi, ei int32) {
	o, e := &h.ops[oi], &h.entries[ei]
	switch {
	case e.doubts > 0:
		h.finish(oi, kvstore.DeviceError, 0)
	case e.deleted:
		h.finish(oi, kvstore.NotFound, 0)
	case o.do == kvstore.Exist || e.valueLen == 0:
		h.finish(oi, kvstore.OK, int(e.valueLen))
	default:
		if o.room != nil && len(o.value) < int(e.valueLen) {
			if o.value = o.room(int(e.valueLen)); o.value == nil {
				h.finish(oi, kvstore.OK, int(e.valueLen))
				return
			}
		}
		h.readRecord(oi, ei)
	}
}

// readRecord reads the record of an entry.
func (h *Home) readRecord(oi, ei int32) {
	o, e := &h.ops[oi], &h.entries[ei]
	o.area, o.place, o.at, o.valueLen = e.area, e.place, e.at, e.valueLen
	h.startRead(oi)
}

// startRead reads what an op says, or lets it wait for a buffer.
func (h *Home) startRead(oi int32) {
	o := &h.ops[oi]
	a := &h.areas[o.area]
	block := uint64(a.BlockSize)
	start := o.place &^ (block - 1)
	end := (o.place + guest.RecordHeaderBytes + uint64(o.valueLen) + block - 1) &^ (block - 1)
	n := int(end - start)
	buf := o.buf
	switch {
	case o.big != nobody:
		buf = h.big[o.big]
	case n <= smallBytes && buf == nil:
		o.buf = h.cfg.Alloc(smallBytes)
		buf = o.buf
	case n <= smallBytes:
	case len(h.bigFree) == 0:
		h.links.Push(&h.bigWait, oi)
		return
	default:
		o.big = h.bigFree[len(h.bigFree)-1]
		h.bigFree = h.bigFree[:len(h.bigFree)-1]
		buf = h.big[o.big]
	}
	o.lead = int(o.place - start)
	background := o.kind != opRead
	h.out.IOs = append(h.out.IOs, IO{
		Area: int(o.area), Op: pipeline.Read, Background: background, Tenant: o.tenant, Offset: a.Log.Offset(start), Buf: buf[:n], Tag: uint32(oi),
	})
}

// record returns what was read for an op if it is what its entry said then, and not what has taken its place since.
func (h *Home) record(o *op) (guest.Record, bool) {
	buf := o.buf
	if o.big != nobody {
		buf = h.big[o.big]
	}
	r := guest.Record(buf[o.lead:])
	ok := r.Check(h.areas[o.area].Log.Seed(o.place)) == nil && r.Place() == o.place && r.Kind() == guest.Put && r.Home() == h.cfg.UUID &&
		bytes.Equal(r.Key(), o.key[:o.keyLen]) && r.ValueLen() == int(o.valueLen)
	return r, ok
}

// recordRead takes a record that was read.
func (h *Home) recordRead(oi int32, ok bool) {
	o := &h.ops[oi]
	r, valid := guest.Record(nil), false
	st := kvstore.DeviceError
	if ok {
		r, valid = h.record(o)
		st = kvstore.Corrupt
	}
	if o.kind != opRead {
		if !valid {
			h.homed(oi, st)
			return
		}
		o.value = r.Value()
		h.forward(oi)
		return
	}
	if valid {
		h.stats.Reads++
		copy(o.value, r.Value())
		h.finish(oi, kvstore.OK, int(o.valueLen))
		return
	}
	switch ei := h.find(o.hash, o.key[:o.keyLen]); {
	case ei == nobody || !h.entries[ei].durable && h.entries[ei].doubts == 0:
		h.goHome(oi)
	case h.entries[ei].place != o.place || h.entries[ei].area != o.area:
		h.read(oi, ei)
	default:
		h.finish(oi, st, 0)
	}
}
