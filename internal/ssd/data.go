package ssd

import "iter"

// Extent is a part of a device, in bytes.
type Extent struct{ Start, End int64 }

// Mapper is a Device that knows which of its ranges were ever written. A drive answers reads of other ranges without
// accessing its medium, so measurements must avoid them.
type Mapper interface {
	// NextData returns the first extent from offset on that holds data. It is empty if there is none.
	NextData(offset int64) Extent
}

// Data returns the extents of a device that hold data, in order. Without Mapper that is the whole device.
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
