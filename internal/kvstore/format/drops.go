package format

// Drop says that what a range of positions had at a time does not exist any more: the objects and tombstones whose
// version is not greater than Clock. First and Last are positions, inclusive: hashes of keys with the order of the bits
// reversed.
type Drop struct{ First, Last, Clock uint64 }

// MaxDrops is how many Drops a superblock has at most.
const MaxDrops = 64

// dropBytes is the length of a Drop in a superblock: u64 First, u64 Last, u64 Clock. The first with a Clock of 0 is
// none, nor are those behind it.
const dropBytes = (SuperblockBytes - superDrops) / MaxDrops

// Drops appends the Drops of a superblock to dst.
func (b Superblock) Drops(dst []Drop) []Drop {
	for at := superDrops; at < SuperblockBytes; at += dropBytes {
		d := Drop{First: le.Uint64(b[at:]), Last: le.Uint64(b[at+8:]), Clock: le.Uint64(b[at+16:])}
		if d.Clock == 0 {
			break
		}
		dst = append(dst, d)
	}
	return dst
}

// SetDrops sets the Drops, at most MaxDrops.
func (b Superblock) SetDrops(drops []Drop) {
	clear(b[superDrops:])
	for i, d := range drops {
		at := superDrops + i*dropBytes
		le.PutUint64(b[at:], d.First)
		le.PutUint64(b[at+8:], d.Last)
		le.PutUint64(b[at+16:], d.Clock)
	}
}

// SameDrops reports whether two superblocks have the same Drops.
func (b Superblock) SameDrops(o Superblock) bool {
	return string(b[superDrops:]) == string(o[superDrops:])
}

// checkDrops verifies the Drops.
func (b Superblock) checkDrops() error {
	const what = "superblock"
	n := 0
	for _, d := range b.Drops(nil) {
		if d.First > d.Last {
			return bad(what, "first position of a Drop", d.First, "at most the last one")
		}
		n++
	}
	if !zero(b[superDrops+n*dropBytes:]) {
		return bad(what, "a byte behind the Drops", "set", "zero")
	}
	return nil
}
