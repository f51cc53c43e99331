package lookup

import "jbofd/internal/kvstore/format"

// Drops are ranges whose objects do not exist: of each range those with a version up to its clock.
type Drops []format.Drop

// Covers reports whether an object does not exist because of a Drop.
//
// hot: 0 allocs
func (d Drops) Covers(position, version uint64) bool {
	for i := range d {
		if r := &d[i]; version <= r.Clock && position >= r.First && position <= r.Last {
			return true
		}
	}
	return false
}
