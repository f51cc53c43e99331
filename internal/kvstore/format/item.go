package format

import "jbofd/internal/units"

// Item is a view of an item of a segment. There are three kinds. The item of a key is
//
//	0  u5   length of the key, 1 to 16          9    …    low bytes of the version, Segment.Width of them
//	   u3   flags                               9+w  u32  expiry, if flagged: unix seconds, 0: never
//	1  u24  length of the value                      …    key
//	4  u40  place of the value in units of 8 bytes,
//	        0 for a value of length 0,
//	        1 for a key that does not exist (Gone)
//
// The flags are 0x20: the item has an expiry, 0x40: the value has a record of an old version (Value), 0x80: identities
// of the key were evicted.
//
// The value of a key may be in several pieces, each with a record of its own. The item of the key has the first piece.
// Items without a key, right behind it, have the others in order (Continues): 9 bytes, without version and expiry.
//
// An item of a key that does not exist is the tombstone of a Delete if it has an expiry: when the tombstone may be
// dropped. Otherwise it stands for what a lossy segment knows, or is there for its identities.
//
// Behind the item of a key, and all pieces, are the identities of the last requests that have changed the key, oldest
// first:
//
//	0  u5   31                                  17 u8   outcome of the request
//	   u3   0                                   18 u64  version that it has given
//	1  u64  client                              26 u32  unix seconds when the item may be dropped, 0: never
//	9  u64  sequence number
//
// The key of version 500 of a clock of 0x10101, with a width of 2, has the low bytes F4 01: 0x101F4 would be more than
// the clock. (The version is 0x001F4.) A clock of 0x10200 would make it 0x101F4, so that the width has to be 3 then.
//
// The clock and the width are read from the segment, so that the view has no more than four words. The compiler keeps
// those in registers. What is longer it copies in memory for each method that it inlines: with fields for the clock and
// the width a Put over TCP took 5 % more CPU time.
type Item struct {
	seg Segment
	at  int
}

const (
	// ItemHeaderBytes is the length of an item without its key, version and expiry.
	ItemHeaderBytes = 9
	// ExpiryBytes is the length of an expiry.
	ExpiryBytes = 4
	// IdentityBytes is the length of the item of an identity.
	IdentityBytes = 30
	// MaxIdentities is how many identities a key has, at most.
	MaxIdentities = 64

	itemPlace   = 4
	itemKeyLen  = 0x1f
	identityKey = 0x1f
	flagExpires = 0x20
	flagLong    = 0x40
	flagEvicted = 0x80
)

// bytes begin with the item.
func (b Item) bytes() []byte { return b.seg[b.at:] }

// width is how many bytes the version of an item with a key has.
func (b Item) width() int { return b.seg.Width() }

func (b Item) flags() byte { return b.seg[b.at] &^ itemKeyLen }

// Continues reports whether the item has no key but a piece of the value of the key before it.
func (b Item) Continues() bool { return b.seg[b.at]&itemKeyLen == 0 }

// IsIdentity reports whether the item is an identity.
func (b Item) IsIdentity() bool { return b.seg[b.at]&itemKeyLen == identityKey }

// HasKey reports whether the item is that of a key.
func (b Item) HasKey() bool { return b.seg[b.at]&itemKeyLen-1 < identityKey-1 }

// KeyLen is the length of the key, 0 if the item has none.
func (b Item) KeyLen() int {
	if b.IsIdentity() {
		return 0
	}
	return int(b.seg[b.at] & itemKeyLen)
}

// ValueLen is the length of the value, or of the item's piece of it. It is 0 for an identity.
func (b Item) ValueLen() int {
	if b.IsIdentity() {
		return 0
	}
	return int(uint24(b.bytes()[1:]))
}

// SetValueLen sets the length of the value.
func (b Item) SetValueLen(v int) { putUint24(b.bytes()[1:], uint32(v)) }

// keyAt is the offset of the key in the item of a key.
func (b Item) keyAt() int {
	n := ItemHeaderBytes + b.width()
	if b.HasExpiry() {
		n += ExpiryBytes
	}
	return n
}

// Key is empty if the item has none.
func (b Item) Key() []byte {
	if !b.HasKey() {
		return nil
	}
	at := b.keyAt()
	return b.bytes()[at : at+b.KeyLen()]
}

// LengthBytes is the length of the item.
func (b Item) LengthBytes() int {
	return itemBytes(b.seg[b.at], b.width())
}

// ValueOffset is the offset of the value, or of the item's piece of it, in the partition. It is 0 for an identity.
func (b Item) ValueOffset() units.ExtentOffset {
	if b.IsIdentity() {
		return 0
	}
	return units.ExtentOffset(uint40(b.bytes()[itemPlace:])) * ValueUnit
}

// SetValueOffset sets the offset of a value with a record of this version of the format, or 0.
func (b Item) SetValueOffset(v units.ExtentOffset) {
	b.seg[b.at] &^= flagLong
	putUint40(b.bytes()[itemPlace:], uint64(v)/ValueUnit)
}

// RecordBytes is the length of the record of the value, or of the item's piece of it; 0 if there is none.
func (b Item) RecordBytes() int {
	switch n := b.ValueLen(); {
	case n == 0:
		return 0
	case b.seg.Old() || b.seg[b.at]&flagLong != 0:
		return RoundUp(oldValueBytes+n, ValueUnit)
	default:
		return ValueBytes(n)
	}
}

// Version is the version of the object, or of the Delete of a key that does not exist; 0 if the item has no key.
func (b Item) Version() uint64 {
	if !b.HasKey() {
		return 0
	}
	clock, width, said := b.seg.Clock(), b.width(), b.bytes()[ItemHeaderBytes:]
	unit := uint64(1) << uint(8*width) // 0 if the width is 8
	v := uint64(0)
	if len(said) >= 8 {
		v = le.Uint64(said) & (unit - 1)
	} else {
		for i := width - 1; i >= 0; i-- {
			v = v<<8 | uint64(said[i])
		}
	}
	if unit == 0 {
		return v
	}
	if v |= clock &^ (unit - 1); v > clock {
		v -= unit
	}
	return v
}

// SetVersion sets the version of the item of a key. The clock must be at least v, and less than v + 2^(8 width).
func (b Item) SetVersion(v uint64) { putVersion(b.bytes()[ItemHeaderBytes:], b.width(), v) }

// putVersion writes so many low bytes of a version.
func putVersion(b []byte, width int, v uint64) {
	for i := range width {
		b[i] = byte(v >> (8 * i))
	}
}

// HasExpiry reports whether the item has an expiry. Segment.SetExpiry adds and removes it.
func (b Item) HasExpiry() bool { return b.seg[b.at]&flagExpires != 0 && b.HasKey() }

// Expiry is when the object does not exist any more, or when the tombstone may be dropped, in unix seconds; 0: never.
func (b Item) Expiry() uint32 {
	if !b.HasExpiry() {
		return 0
	}
	return le.Uint32(b.bytes()[ItemHeaderBytes+b.width():])
}

// Expired reports whether the item has an expiry that is not later than a time in unix seconds.
func (b Item) Expired(unix uint32) bool {
	e := b.Expiry()
	return e != 0 && e <= unix
}

// Exists reports whether the item says that its key exists at a time in unix seconds.
func (b Item) Exists(unix uint32) bool { return b.HasKey() && !b.Gone() && !b.Expired(unix) }

// gonePlace is the place, in units of ValueUnit, of a key that does not exist. No value is there.
const gonePlace = 1

// Gone reports whether the item says that its key does not exist.
func (b Item) Gone() bool {
	return b.HasKey() && b.ValueLen() == 0 && uint40(b.bytes()[itemPlace:]) == gonePlace
}

// Tombstone reports whether the item is the tombstone of a Delete.
func (b Item) Tombstone() bool { return b.HasExpiry() && b.Gone() }

// SetGone makes the item say that its key does not exist.
func (b Item) SetGone() {
	b.seg[b.at] &^= flagLong
	b.SetValueLen(0)
	putUint40(b.bytes()[itemPlace:], gonePlace)
}

// Evicted reports whether identities of the key were dropped before their time.
func (b Item) Evicted() bool { return b.HasKey() && b.seg[b.at]&flagEvicted != 0 }

// SetEvicted says whether identities of the key were dropped before their time.
func (b Item) SetEvicted(evicted bool) {
	if b.seg[b.at] &^= flagEvicted; evicted {
		b.seg[b.at] |= flagEvicted
	}
}

// Identity names a request, so that a repetition of it is recognized, and says what its outcome was.
type Identity struct {
	// Client and Seq are chosen by the client: no two requests have both in common.
	Client, Seq uint64
	// Outcome is a status of the store's, Version the version that the request has given to the object.
	Outcome uint8
	Version uint64
	// KeepUntil is when the identity may be dropped, in unix seconds; 0: never.
	KeepUntil uint32
}

// Identity returns the content of an item that is an identity.
func (b Item) Identity() Identity {
	id := b.bytes()[:IdentityBytes]
	return Identity{Client: le.Uint64(id[1:]), Seq: le.Uint64(id[9:]), Outcome: id[17], Version: le.Uint64(id[18:]),
		KeepUntil: le.Uint32(id[26:])}
}

func (b Item) setIdentity(id *Identity) {
	to := b.bytes()[:IdentityBytes]
	to[0] = identityKey
	le.PutUint64(to[1:], id.Client)
	le.PutUint64(to[9:], id.Seq)
	to[17] = id.Outcome
	le.PutUint64(to[18:], id.Version)
	le.PutUint32(to[26:], id.KeepUntil)
}

// mayGo reports whether an item that is an identity may be dropped at a time in unix seconds.
func (b Item) mayGo(unix uint32) bool {
	t := le.Uint32(b.bytes()[26:])
	return t != 0 && t <= unix
}
