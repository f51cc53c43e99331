package ssd

import "iter"

// Extent is a part of a device, in bytes.
type Extent struct{ Start, End int64 }

// Mapper is a Device that knows which parts of it were ever written. Reads of the others ask nothing of a drive: whoever
// measures one keeps away from them.
type Mapper interface {
	// NextData returns the first extent from offset on that holds data. It is empty if there is none.
	NextData(offset int64) Extent
}

// Data goes through the extents of a device that hold data, in order. Of a device that does not know that is all of it.
func Data(d Device) iter.Seq[Extent] {
	m, ok := d.(Mapper)
	size := d.Info().SizeBytes
	return func(yield func(Extent) bool) {
		if !ok {
			yield(Extent{0, size})
			return
		}
		for e := m.NextData(0); e.Start < e.End && yield(e); e = m.NextData(e.End) {
		}
	}
}
