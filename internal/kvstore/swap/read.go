package swap

import (
	"bytes"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/pipeline"
)

// read answers a Get or Exist of a key that is swapped out. A Get whose Room returns nil ends with OK and only the
// length.
func (src *Source) read(oi, ei int32) {
	o, e := &src.ops[oi], &src.entries[ei]
	o.version = e.version
	switch {
	case e.indeterminate > 0:
		src.finish(oi, kvstore.DeviceError, 0)
	case e.deleted:
		src.finish(oi, kvstore.NotFound, 0)
	case o.do == kvstore.Exist || e.valueLen == 0:
		src.finish(oi, kvstore.OK, int(e.valueLen))
	default:
		if o.room != nil && len(o.value) < int(e.valueLen) {
			if o.value = o.room(int(e.valueLen)); o.value == nil {
				src.finish(oi, kvstore.OK, int(e.valueLen))
				return
			}
		}
		src.readRecord(oi, ei)
	}
}

// readRecord reads the record of an entry.
func (src *Source) readRecord(oi, ei int32) {
	o, e := &src.ops[oi], &src.entries[ei]
	o.area, o.place, o.at, o.valueLen = e.area, e.place, e.at, e.valueLen
	src.startRead(oi)
}

// smallBuf sees to it that an op has a small buffer, and reports whether there was memory for it. Without it the op
// reads into one of the big ones.
func (src *Source) smallBuf(o *op) bool {
	if o.buf == nil {
		o.buf, _ = src.cfg.Alloc(smallBytes)
	}
	return o.buf != nil
}

// startRead reads the record that an op names, or lets the op wait for a buffer.
func (src *Source) startRead(oi int32) {
	o := &src.ops[oi]
	a := &src.areas[o.area]
	block := format.LogOffset(a.BlockSize)
	start := o.place &^ (block - 1)
	end := (o.place.Add(format.SwapRecordHeaderBytes+int(o.valueLen)) + block - 1) &^ (block - 1)
	n := int(min(end.Sub(start), a.Log.Rest(start))) // a record of an old version is shorter
	buf := o.buf
	switch {
	case o.big != none:
		buf = src.big[o.big]
	case n <= smallBytes && src.smallBuf(o):
		buf = o.buf
	case len(src.bigFree) == 0:
		src.links.Push(&src.bigWait, oi)
		return
	default:
		o.big = src.bigFree[len(src.bigFree)-1]
		src.bigFree = src.bigFree[:len(src.bigFree)-1]
		buf = src.big[o.big]
	}
	o.lead = int(o.place.Sub(start))
	background := o.kind != opRead
	src.out.IOs = append(src.out.IOs, IO{
		Area: int(o.area), Op: pipeline.Read, Background: background, Tenant: o.tenant, Offset: a.Log.Offset(start),
		Buf: buf[:n], Tag: uint32(oi),
	})
}

// record returns the record that was read for an op. It is not valid if another record has taken its place since.
func (src *Source) record(o *op) (format.SwapRecord, bool) {
	buf := o.buf
	if o.big != none {
		buf = src.big[o.big]
	}
	r := format.SwapRecord(buf[o.lead:])
	ok := r.Check(src.areas[o.area].Log.Seed(o.place)) == nil && r.Place() == o.place && r.Kind() == format.SwapPut &&
		r.Source() == src.cfg.UUID &&
		bytes.Equal(r.Key(), o.key[:o.keyLen]) && r.ValueLen() == int(o.valueLen)
	return r, ok
}

// recordRead ends the read of a record.
func (src *Source) recordRead(oi int32, ok bool) {
	o := &src.ops[oi]
	r, valid := format.SwapRecord(nil), false
	st := kvstore.DeviceError
	if ok {
		r, valid = src.record(o)
		st = kvstore.Corrupt
	}
	if o.kind != opRead {
		if !valid {
			src.returnEnded(oi, st)
			return
		}
		o.value = r.Value()
		src.writeMember(oi)
		return
	}
	if valid {
		src.stats.Reads++
		copy(o.value, r.Value())
		src.finish(oi, kvstore.OK, int(o.valueLen))
		return
	}
	switch ei := src.find(o.hash, o.key[:o.keyLen]); {
	case ei == none || !src.entries[ei].durable && src.entries[ei].indeterminate == 0:
		src.passToStore(oi)
	case src.entries[ei].place != o.place || src.entries[ei].area != o.area:
		src.read(oi, ei)
	default:
		src.finish(oi, st, 0)
	}
}
