package nvme

import (
	"bytes"
	"cmp"
	"hash/crc32"
	"iter"
)

// KVCursor is a place in the order of a store's keys: the order of their positions, and for the same position that of
// their bytes. The position of a key is its hash with the order of the bits reversed. A cursor without a key comes
// before all keys of its position.
type KVCursor struct {
	Position uint64
	KeyLen   uint8
	Key      [MaxKVKey]byte
}

// KVCursorAt returns the cursor of a key, or with no key that of a position.
func KVCursorAt(position uint64, key []byte) KVCursor {
	c := KVCursor{Position: position, KeyLen: uint8(min(len(key), MaxKVKey))}
	copy(c.Key[:c.KeyLen], key)
	return c
}

// KVLastOf returns the cursor behind which no key of a position comes.
func KVLastOf(position uint64) KVCursor {
	c := KVCursor{Position: position, KeyLen: MaxKVKey}
	for i := range c.Key {
		c.Key[i] = 0xFF
	}
	return c
}

// Compare orders cursors.
func (c *KVCursor) Compare(o *KVCursor) int {
	if c.Position != o.Position {
		return cmp.Compare(c.Position, o.Position)
	}
	return bytes.Compare(c.Key[:min(c.KeyLen, MaxKVKey)], o.Key[:min(o.KeyLen, MaxKVKey)])
}

// KVRangeKind says what a KVRange has.
type KVRangeKind uint8

// Kinds of a KVRange.
const (
	// KVScan: a KVEntry for each key, without its value.
	KVScan KVRangeKind = 1 + iota
	// KVCopy: a KVEntry for each key, with its value and its identities.
	KVCopy
	// KVCount: a KVTotals.
	KVCount
	// KVDigest: a KVSum for each sub-range.
	KVDigest
)

// Flags of a KVRange.
const (
	// KVComplete: nothing of the range comes behind To.
	KVComplete = 1 << 0
	// KVLost: objects between From and To may be missing, because the records of some are damaged or cannot be read.
	KVLost = 1 << 1
)

// KVRange is what an operation on a range of positions returns: a part of what there is to say about the range, about
// all keys behind the cursor From up to the cursor To and including it. To is where to continue. A KVRange is complete
// in itself, so that it may be kept in a file. Further bytes may follow it.
//
//	 0 u32  CRC32C of the rest                    40 u64  To: position
//	 4 3 B  magic "KVR"                           48 16B      key
//	 7 u8   version of this encoding, 1           64 u64  First and
//	 8 u8   kind                                  72 u64  Last position of the range
//	 9 u8   flags                                 80 u32  number of entries or sub-ranges
//	10 u8   length of the key of From             84 u8   shift: sub-range i of a digest begins at First + i<<shift
//	11 u8   length of the key of To               85 3 B  reserved
//	12 u32  length of the whole in bytes          88 u32  time in unix seconds: what expires until then is left out
//	16 u64  From: position                        92 u32  origin: which namespace it is of, 0: unsaid
//	24 16B        key                             96 …    entries, totals or sums
//
// The entries are in the order of their cursors. An example: the key "ab" of version 7, position 5 and no expiry,
// whose value is "xyz".
//
//	0500000000000000 0700000000000000 00000000 030000 02 6162 78797a 000000
//	position         version          expires  length    key  value  zeroes to a multiple of 8
type KVRange []byte

// Lengths in bytes.
const (
	KVRangeHeaderBytes = 96
	KVEntryHeaderBytes = 24
	KVTotalsBytes      = 32
	KVSumBytes         = 16
	// KVMaxSums is the greatest number of sub-ranges of a digest.
	KVMaxSums = 1 << 16
	// KVMaxIdentities is how many identities a key has, at most, KVIdentityBytes the length of one.
	KVMaxIdentities        = 64
	KVIdentityBytes        = 28
	kvIdentitiesHeaderSize = 4
	// KVEntryOverhead is how much longer than its value a KVRange with one entry can be, at most.
	KVEntryOverhead = (KVRangeHeaderBytes + KVEntryHeaderBytes + kvIdentitiesHeaderSize +
		KVMaxIdentities*KVIdentityBytes + MaxKVKey + 2*7) &^ 7
)

const (
	kvRangeMagic   = "KVR"
	kvRangeVersion = 1

	krMagic   = 4
	krVersion = 7
	krKind    = 8
	krFlags   = 9
	krFromLen = 10
	krToLen   = 11
	krLength  = 12
	krFrom    = 16
	krTo      = 40
	krFirst   = 64
	krLast    = 72
	krItems   = 80
	krShift   = 84
	krTime    = 88
	krOrigin  = 92
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (b KVRange) Kind() KVRangeKind { return KVRangeKind(b[krKind]) }
func (b KVRange) Flags() uint8      { return b[krFlags] }
func (b KVRange) SetFlags(v uint8)  { b[krFlags] = v }
func (b KVRange) LenBytes() int     { return int(le.Uint32(b[krLength:])) }
func (b KVRange) First() uint64     { return le.Uint64(b[krFirst:]) }
func (b KVRange) Last() uint64      { return le.Uint64(b[krLast:]) }
func (b KVRange) Items() int        { return int(le.Uint32(b[krItems:])) }
func (b KVRange) SetItems(v int)    { le.PutUint32(b[krItems:], uint32(v)) }
func (b KVRange) Shift() uint8      { return b[krShift] }
func (b KVRange) SetShift(v uint8)  { b[krShift] = v }
func (b KVRange) Time() uint32      { return le.Uint32(b[krTime:]) }
func (b KVRange) SetTime(v uint32)  { le.PutUint32(b[krTime:], v) }

// Origin is the same in all parts of an export and different for other namespaces; 0: it is not said.
func (b KVRange) Origin() uint32     { return le.Uint32(b[krOrigin:]) }
func (b KVRange) SetOrigin(v uint32) { le.PutUint32(b[krOrigin:], v) }

func (b KVRange) From() KVCursor     { return b.cursor(krFrom, krFromLen) }
func (b KVRange) SetFrom(c KVCursor) { b.setCursor(krFrom, krFromLen, &c) }
func (b KVRange) To() KVCursor       { return b.cursor(krTo, krToLen) }
func (b KVRange) SetTo(c KVCursor)   { b.setCursor(krTo, krToLen, &c) }

// Complete reports whether nothing of the range comes behind To.
func (b KVRange) Complete() bool { return b.Flags()&KVComplete != 0 }

// Lost reports whether objects may be missing.
func (b KVRange) Lost() bool { return b.Flags()&KVLost != 0 }

func (b KVRange) cursor(at, length int) KVCursor {
	return KVCursor{Position: le.Uint64(b[at:]), KeyLen: b[length], Key: [MaxKVKey]byte(b[at+8:])}
}

func (b KVRange) setCursor(at, length int, c *KVCursor) {
	le.PutUint64(b[at:], c.Position)
	b[length] = c.KeyLen
	copy(b[at+8:at+8+MaxKVKey], c.Key[:])
}

// NewKVRange starts a KVRange in buf, which has room for the header. It may use the whole buffer.
//
// Cost: 0 allocs.
func NewKVRange(buf []byte, kind KVRangeKind, first, last uint64, from KVCursor) KVRange { // hot: 0 allocs
	clear(buf[:KVRangeHeaderBytes])
	b := KVRange(buf[:KVRangeHeaderBytes:len(buf)])
	b[krKind] = uint8(kind)
	le.PutUint64(b[krFirst:], first)
	le.PutUint64(b[krLast:], last)
	b.SetFrom(from)
	return b
}

// KVEntryBytes is the length of an entry with that number of identities. Only those of a KVCopy have values and
// identities.
func KVEntryBytes(kind KVRangeKind, keyLen, valueLen, identities int) int {
	if kind != KVCopy {
		valueLen, identities = 0, 0
	}
	return (KVEntryHeaderBytes + kvIdentitiesBytes(identities) + keyLen + valueLen + 7) &^ 7
}

// kvIdentitiesBytes is the length of n identities.
func kvIdentitiesBytes(n int) int {
	if n == 0 {
		return 0
	}
	return kvIdentitiesHeaderSize + n*KVIdentityBytes
}

// Append adds an entry, which has the key, the length of its value, and room for that number of identities, which only
// a KVCopy may have, and is zero otherwise. It returns false and leaves b unchanged if the buffer has no room for the
// entry.
//
// Cost: 0 allocs.
func (b KVRange) Append(key []byte, valueLen, identities int) (KVEntry, KVRange, bool) { // hot: 0 allocs
	at, n := len(b), KVEntryBytes(b.Kind(), len(key), valueLen, identities)
	if n > cap(b)-at {
		return nil, b, false
	}
	b = b[:at+n]
	e := KVEntry(b[at:])
	clear(e[:KVEntryHeaderBytes+kvIdentitiesBytes(identities)])
	clear(e[n-8:]) // the value, if there is one, is copied by the caller
	e[keKeyLen] = uint8(len(key))
	if identities > 0 {
		e[keKeyLen] |= keIdentities
		e[keIdentityCount] = uint8(identities)
	}
	putUint24(e[keValueLen:], uint32(valueLen))
	copy(e[e.keyAt():], key)
	b.SetItems(b.Items() + 1)
	return e, b, true
}

// Seal completes the KVRange. It must be called last.
func (b KVRange) Seal() {
	var s KVSealer
	s.Sum(b, len(b))
}

// KVSealer completes a KVRange in steps, which together are a Seal, for callers that must not be kept by the checksum
// of 1 MiB. The zero value begins.
type KVSealer struct {
	sum uint32
	at  int // the checksum is that of what comes before
}

// At is how many bytes were added.
func (s *KVSealer) At() int { return s.at }

// Sum adds the next n bytes of b to the checksum, and reports whether b is complete. Nothing of b may change between
// the first Sum and the last.
//
// Cost: 0 allocs.
func (s *KVSealer) Sum(b KVRange, n int) (done bool) { // hot: 0 allocs
	if s.at == 0 {
		copy(b[krMagic:], kvRangeMagic)
		b[krVersion] = kvRangeVersion
		le.PutUint32(b[krLength:], uint32(len(b)))
		s.at = krMagic
	}
	end := s.at + min(n, len(b)-s.at)
	s.sum = crc32.Update(s.sum, castagnoli, b[s.at:end])
	if s.at = end; end < len(b) {
		return false
	}
	le.PutUint32(b, s.sum)
	return true
}

// Entries iterates over the entries of a KVRange that has passed Check, of kind KVScan or KVCopy. They are views of b.
func (b KVRange) Entries() iter.Seq[KVEntry] {
	return func(yield func(KVEntry) bool) {
		at := KVRangeHeaderBytes
		for range b.Items() {
			e, next := b.EntryAt(at)
			if !yield(e) {
				return
			}
			at = next
		}
	}
}

// EntryAt returns the entry at an offset in b, and the offset of the next one. The first one is at KVRangeHeaderBytes.
//
// Cost: 0 allocs.
func (b KVRange) EntryAt(at int) (e KVEntry, next int) { // hot: 0 allocs
	e = KVEntry(b[at:])
	n := KVEntryBytes(b.Kind(), e.KeyLen(), e.ValueLen(), e.Identities())
	return e[:n:n], at + n
}

// Totals are those of a KVRange of kind KVCount.
func (b KVRange) Totals() KVTotals { return KVTotals(b[KVRangeHeaderBytes:][:KVTotalsBytes]) }

// Sum is the one of sub-range i of a KVRange of kind KVDigest. It has the keys from SubRange(i) on.
func (b KVRange) Sum(i int) KVSum { return KVSum(b[KVRangeHeaderBytes+i*KVSumBytes:][:KVSumBytes]) }

// SubRange returns the first and the last position of sub-range i of a digest.
func (b KVRange) SubRange(i int) (first, last uint64) {
	first = b.First() + uint64(i)<<b.Shift()
	return first, first + min(uint64(1)<<b.Shift()-1, b.Last()-first)
}

// KVSubRanges returns the number of sub-ranges of a digest of a range, at most `most` of them, and their shift. There
// may be fewer: each has the same power of two of positions, and the last one what is left.
func KVSubRanges(first, last uint64, most int) (n int, shift uint8) {
	width := last - first // one less than the number of positions
	for width>>shift >= uint64(most) {
		shift++
	}
	return int(width>>shift) + 1, shift
}

// KVEntry is a view of an entry of a KVRange: a key that exists, or a tombstone, or a key that is gone but has
// identities.
//
//	0  u64  position of the key              20 u24  length of the value
//	8  u64  version of the object            23 u5   length of the key
//	16 u32  expiry in unix seconds, 0: never    u3   flags
//	                                         24 …    identities, key, value (of a KVCopy), zeroes to a multiple of 8
//
// The flags are 0x20: the key does not exist, and the entry is there for its identities; 0x40: it has identities; 0x80:
// it is a tombstone. Identities, which only a KVCopy has, are those of the last requests that have changed the key,
// oldest first:
//
//	0  u8   number of identities, 1 to 8
//	1  u8   1: others were dropped before their time
//	2  2 B  reserved
//	4  …    identities: u64 client, u64 sequence number, u64 version that the request has given, at most that of the
//	        entry, u32 unix seconds when the identity may be dropped, 0: never
//
// An example: the key "ab" of version 7 with the identity (1, 2) of the request that has given that, which is kept
// until 99. Its value is "xyz".
//
//	0500000000000000 0700000000000000 00000000 030000 42 01 00 0000
//	position         version          expires  length    number
//	0100000000000000 0200000000000000 0700000000000000 63000000 6162 78797a 000000
//	client           sequence         version          keep     key  value  zeroes
type KVEntry []byte

// KVIdentity is the identity of a request that has changed a key: see KVEntry.
type KVIdentity struct {
	Client, Seq, Version uint64
	KeepUntil            uint32
}

const (
	keVersion  = 8
	keExpires  = 16
	keValueLen = 20
	keKeyLen   = 23

	keIdentityCount = 24
	keIdentityFlags = 25
	keIdentity      = KVEntryHeaderBytes + kvIdentitiesHeaderSize

	keGone       = 0x20
	keIdentities = 0x40
	keTombstone  = 0x80

	keEvicted = 1
)

func (e KVEntry) Position() uint64     { return le.Uint64(e) }
func (e KVEntry) SetPosition(v uint64) { le.PutUint64(e, v) }
func (e KVEntry) Version() uint64      { return le.Uint64(e[keVersion:]) }
func (e KVEntry) SetVersion(v uint64)  { le.PutUint64(e[keVersion:], v) }
func (e KVEntry) Expires() uint32      { return le.Uint32(e[keExpires:]) }
func (e KVEntry) SetExpires(v uint32)  { le.PutUint32(e[keExpires:], v) }
func (e KVEntry) ValueLen() int        { return int(uint24(e[keValueLen:])) }
func (e KVEntry) KeyLen() int          { return int(e[keKeyLen] & 0x1F) }
func (e KVEntry) Key() []byte          { return e[e.keyAt():][:e.KeyLen():e.KeyLen()] }
func (e KVEntry) Tombstone() bool      { return e[keKeyLen]&keTombstone != 0 }
func (e KVEntry) SetTombstone()        { e[keKeyLen] |= keTombstone }

// Gone reports whether the key does not exist, has no tombstone, and is there for its identities. Version is that of
// the request that has removed it.
func (e KVEntry) Gone() bool { return e[keKeyLen]&keGone != 0 }
func (e KVEntry) SetGone()   { e[keKeyLen] |= keGone }

// Exists reports whether the entry is an object.
func (e KVEntry) Exists() bool { return e[keKeyLen]&(keGone|keTombstone) == 0 }

func (e KVEntry) keyAt() int { return KVEntryHeaderBytes + kvIdentitiesBytes(e.Identities()) }

// Identities is the number of identities.
func (e KVEntry) Identities() int {
	if e[keKeyLen]&keIdentities == 0 {
		return 0
	}
	return int(e[keIdentityCount])
}

// Identity returns identity i, of those in the order of their versions.
func (e KVEntry) Identity(i int) KVIdentity {
	b := e[keIdentity+i*KVIdentityBytes:][:KVIdentityBytes]
	return KVIdentity{Client: le.Uint64(b), Seq: le.Uint64(b[8:]), Version: le.Uint64(b[16:]),
		KeepUntil: le.Uint32(b[24:])}
}

// SetIdentity sets identity i, which the entry has room for.
func (e KVEntry) SetIdentity(i int, id KVIdentity) {
	b := e[keIdentity+i*KVIdentityBytes:][:KVIdentityBytes]
	le.PutUint64(b, id.Client)
	le.PutUint64(b[8:], id.Seq)
	le.PutUint64(b[16:], id.Version)
	le.PutUint32(b[24:], id.KeepUntil)
}

// Evicted reports whether identities of the key were dropped before their time.
func (e KVEntry) Evicted() bool { return e.Identities() > 0 && e[keIdentityFlags]&keEvicted != 0 }

// SetEvicted says so of an entry that has identities.
func (e KVEntry) SetEvicted(evicted bool) {
	if e[keIdentityFlags] = 0; evicted {
		e[keIdentityFlags] = keEvicted
	}
}

func uint24(b []byte) uint32 { return uint32(le.Uint16(b)) | uint32(b[2])<<16 }
func putUint24(b []byte, v uint32) {
	le.PutUint16(b, uint16(v))
	b[2] = byte(v >> 16)
}

// Value is the value of an entry of a KVCopy.
func (e KVEntry) Value() []byte { return e[e.keyAt()+e.KeyLen():][:e.ValueLen():e.ValueLen()] }

// Cursor is the place of the entry.
func (e KVEntry) Cursor() KVCursor { return KVCursorAt(e.Position(), e.Key()) }

// KVTotals is a view of the sums of a KVCount: u64 objects, u64 tombstones, u64 bytes of the objects' keys and values,
// 8 B reserved. Those of adjoining ranges can be added.
type KVTotals []byte

func (b KVTotals) Objects() uint64    { return le.Uint64(b) }
func (b KVTotals) Tombstones() uint64 { return le.Uint64(b[8:]) }
func (b KVTotals) Bytes() uint64      { return le.Uint64(b[16:]) }

// Add counts objects, tombstones, and bytes.
func (b KVTotals) Add(objects, tombstones, n uint64) {
	le.PutUint64(b, b.Objects()+objects)
	le.PutUint64(b[8:], b.Tombstones()+tombstones)
	le.PutUint64(b[16:], b.Bytes()+n)
}

// KVSum is a view of what a digest says about a sub-range: u64 number of entries that a KVCopy has, u64 sum modulo 2^64
// of a hash of (key, version, whether it exists or is a tombstone) of each, and of a hash of (key, identity) of each
// identity. Sub-ranges of two stores with the same hash seed have the same objects and identities if their sums are the
// same, but for a chance of 2^-64. Those of parts can be added.
type KVSum []byte

func (b KVSum) Count() uint64 { return le.Uint64(b) }
func (b KVSum) Sum() uint64   { return le.Uint64(b[8:]) }

// Add counts objects whose hashes have a sum.
func (b KVSum) Add(count, sum uint64) {
	le.PutUint64(b, b.Count()+count)
	le.PutUint64(b[8:], b.Sum()+sum)
}
