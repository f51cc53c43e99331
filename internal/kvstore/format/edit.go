package format

import (
	"bytes"

	"jbofd/internal/units"
)

// Find returns the offset in b of the item of a key, or 0 if the segment does not contain the key. b must be a
// valid segment: one that has passed Check, or that was made by the methods below.
//
// hot: 0 allocs
func (b Segment) Find(key []byte) int {
	at, _ := b.FindNumber(key)
	return at
}

// FindNumber is Find, and returns the number of the item, too.
//
// hot: 0 allocs
func (b Segment) FindNumber(key []byte) (at, number int) {
	if len(key) == 0 {
		return 0, -1
	}
	width, want := b.Width(), tailOf(key)
	off := b.First()
	b = b[:b.LengthBytes()]
	first, n, alike := byte(0), ItemHeaderBytes, false
	for off < len(b) {
		// Most items are as long as the one before: the processor goes on with that and does not wait for b[off].
		if b[off] != first {
			first = b[off]
			n = itemBytes(first, width)
			alike = int(first&itemKeyLen) == len(key)
		}
		next := off + n
		if alike && want.endsAt(b, next) && want.headIs(b, next, key) {
			return off, number
		}
		off = next
		number++
	}
	return 0, -1
}

// keyTail has the last bytes of a key that items are compared with, up to 8. The key of an item is at its end, and the
// last bytes of keys that are alike often differ: they are compared first, at once.
type keyTail struct {
	tail  uint64
	shift uint8
}

func tailOf(key []byte) keyTail {
	n := len(key)
	switch {
	case n >= 8:
		return keyTail{tail: le.Uint64(key[n-8:])}
	case n >= 4:
		return keyTail{tail: uint64(le.Uint32(key[n-4:]))<<(8*(n-4)) | uint64(le.Uint32(key)), shift: uint8(64 - 8*n)}
	}
	t := keyTail{shift: uint8(64 - 8*n)}
	for i := range key {
		t.tail |= uint64(key[i]) << (8 * i)
	}
	return t
}

// endsAt reports whether the last 8 bytes of the key, or all of it, lie before an offset of a segment.
func (k keyTail) endsAt(b []byte, end int) bool { return le.Uint64(b[end-8:])>>(k.shift&63) == k.tail }

// headIs reports whether the key lies before an offset of a segment where its tail ends.
func (k keyTail) headIs(b []byte, end int, key []byte) bool {
	return len(key) <= 8 || bytes.Equal(b[end-len(key):end-8], key[:len(key)-8])
}

// itemBytes is the length of an item with that first byte in a segment of a version width. The key is at its end.
func itemBytes(first byte, width int) int {
	n := itemLengths[first]
	return int(n.fixed) + width&int(n.versioned)
}

// itemLengths has the length of an item without its version, and whether it has one (then all bits are set), by its
// first byte. So walks over items do not branch.
var itemLengths = func() (lengths [256]struct{ fixed, versioned uint8 }) {
	for first := range lengths {
		switch n := first & itemKeyLen; n {
		case 0:
			lengths[first].fixed = ItemHeaderBytes
		case identityKey:
			lengths[first].fixed = IdentityBytes
		default:
			lengths[first].fixed = uint8(ItemHeaderBytes + n + first&flagExpires/flagExpires*ExpiryBytes)
			lengths[first].versioned = 0xff
		}
	}
	return lengths
}()

// FindValue returns the offset in b of the item whose value, or piece of one, begins at byte valueOffset of the
// partition, or 0 if no item refers to that: it is obsolete then. b must be valid as for Find.
//
// hot: 0 allocs
func (b Segment) FindValue(valueOffset units.ExtentOffset) int {
	at, _ := b.valueItem(valueOffset)
	return at
}

// NumberOf returns the number of the item that FindValue finds, or -1.
//
// hot: 0 allocs
func (b Segment) NumberOf(valueOffset units.ExtentOffset) int {
	_, number := b.valueItem(valueOffset)
	return number
}

func (b Segment) valueItem(valueOffset units.ExtentOffset) (at, number int) {
	place, end, width := uint64(valueOffset)/ValueUnit, b.LengthBytes(), b.Width()
	for off := b.First(); off < end; off += itemBytes(b[off], width) {
		if uint40(b[off+itemPlace:]) == place && b[off]&itemKeyLen != identityKey {
			return off, number
		}
		number++
	}
	return 0, -1
}

// KeyOf returns the offset in b of the item of the key that the item at offset at belongs to.
func (b Segment) KeyOf(at int) (key int) {
	for off := b.First(); off <= at; {
		it := b.Item(off)
		if it.HasKey() {
			key = off
		}
		off += it.LengthBytes()
	}
	return key
}

// Keys is the number of items with a key.
func (b Segment) Keys() (n int) {
	it, end := b.Item(b.First()), b.LengthBytes()
	for off := b.First(); off < end; off += it.LengthBytes() {
		if it.at = off; it.HasKey() {
			n++
		}
	}
	return n
}

// WidthFor is the version width that the segment needs with that clock, its present items, and one with that version.
//
// hot: 0 allocs
func (b Segment) WidthFor(clock, version uint64) int {
	oldest, it, end := version, b.Item(b.First()), b.LengthBytes()
	for off := b.First(); off < end; off += it.LengthBytes() {
		if it.at = off; it.HasKey() {
			oldest = min(oldest, it.Version())
		}
	}
	return versionWidth(clock, oldest)
}

// versionWidth is the version width of a segment with that clock whose lowest version is oldest.
func versionWidth(clock, oldest uint64) int {
	switch span := clock - oldest; {
	case span == 0:
		return 0
	case span < 1<<16:
		return 2
	default:
		n := 3
		for n < 8 && span>>(8*n) > 0 {
			n++
		}
		return n
	}
}

// Clear makes b an empty segment with the given number, and complete.
func (b Segment) Clear(number uint32) {
	clear(b[:SegmentHeaderBytes])
	b.SetLossy(false)
	b.SetNumber(number)
	b.SetLengthBytes(SegmentHeaderBytes)
}

// Upgrade makes a segment of an old version one of the present version. The view must have room for UpgradeBytes more.
func (b Segment) Upgrade() {
	if !b.Old() {
		return
	}
	lossy, n := b.Lossy(), b.LengthBytes()
	copy(b[SegmentHeaderBytes:], b[oldSegmentBytes:n])
	b.SetLossy(lossy)
	b.SetLengthBytes(n + UpgradeBytes)
	b.SetItems(b.Items())
	le.PutUint64(b[segClock:], 1)
	b[segWidth] = 0
	for off := b.First(); off < b.LengthBytes(); {
		it := b.Item(off)
		if it.ValueLen() > 0 {
			b[off] |= flagLong
		}
		off += it.LengthBytes()
	}
}

// CopyItems makes the items, the clock and the completeness of b, which was cleared, those of another segment, which
// must not be an old one. The view must have room for them.
func (b Segment) CopyItems(from Segment) {
	copy(b[segClock:from.LengthBytes()], from[segClock:])
	b.SetLossy(from.Lossy())
	b.SetLengthBytes(from.LengthBytes())
	b.SetItems(from.Items())
}

// AppendItems adds the items of another segment, which has the same clock and version width, and none of the keys. The
// view must have room for them, and the segment must not become longer than MaxSegmentBytes.
func (b Segment) AppendItems(from Segment) {
	n := b.LengthBytes()
	n += copy(b[n:], from[from.First():from.LengthBytes()])
	b.SetLengthBytes(n)
	b.SetItems(b.Items() + from.Items())
}

// Recode sets the clock and the version width, which must be enough for all items. The view must have room for what the
// items become longer.
//
// hot: 0 allocs
func (b Segment) Recode(clock uint64, width int) {
	was, to := b.Width(), b.First()
	if was != width {
		more := b.Keys() * (width - was)
		it, from, end := b.Item(to), to, b.LengthBytes()
		if more > 0 {
			// What is read stays behind what is written.
			from += more
			copy(b[from:], b[to:end])
			end += more
		}
		for from < end {
			it.at = from
			n := it.LengthBytes()
			if !it.HasKey() {
				copy(b[to:], b[from:from+n])
				to, from = to+n, from+n
				continue
			}
			v := it.Version()
			copy(b[to:to+ItemHeaderBytes], b[from:])
			rest := copy(b[to+ItemHeaderBytes+width:], b[from+ItemHeaderBytes+was:from+n])
			putVersion(b[to+ItemHeaderBytes:], width, v)
			to, from = to+ItemHeaderBytes+width+rest, from+n
		}
		b.SetLengthBytes(to)
		b.setWidth(width)
	}
	le.PutUint64(b[segClock:], clock)
}

// Vacant reports whether the segment says only that it has no keys. Such a segment needs no record.
func (b Segment) Vacant() bool { return b.Items() == 0 && !b.Lossy() }

// Complete makes a lossy segment complete: keys without an item do not exist.
func (b Segment) Complete() {
	b.SetLossy(false)
	for off := b.First(); off < b.LengthBytes(); {
		if !b.Settle(off) {
			off += b.Item(off).LengthBytes()
		}
	}
}

// Settle removes the item of a key at offset at if nothing needs it, and reports whether it did: the key does not
// exist, has no tombstone and no identities, and the segment is complete.
//
// hot: 0 allocs
func (b Segment) Settle(at int) bool {
	it := b.Item(at)
	gone := it.Gone() && !it.HasExpiry() && !b.Lossy() && b.Identities(at) == 0
	if gone {
		b.Remove(at)
	}
	return gone
}

// Insert appends an item for a key, with the version of the clock, and returns its offset. The view must have room for
// it, and the segment must not become longer than there may be.
//
// hot: 0 allocs
func (b Segment) Insert(key []byte) int {
	at, w := b.LengthBytes(), b.Width()
	clear(b[at : at+ItemHeaderBytes+w])
	b[at] = byte(len(key))
	copy(b[at+ItemHeaderBytes+w:], key)
	b.SetLengthBytes(at + ItemHeaderBytes + w + len(key))
	b.SetItems(b.Items() + 1)
	b.Item(at).SetVersion(b.Clock())
	return at
}

// Pieces returns the number of pieces of the value of a key, whose item is at offset at, and its length. An identity
// has one piece of length 0.
//
// hot: 0 allocs
func (b Segment) Pieces(at int) (n, valueLen int) {
	first, end := b[at], b.LengthBytes()
	if n = 1; first&itemKeyLen != identityKey {
		valueLen = int(uint24(b[at+1:]))
	}
	for off := at + itemBytes(first, b.Width()); off < end && b[off]&itemKeyLen == 0; off += ItemHeaderBytes {
		valueLen += int(uint24(b[off+1:]))
		n++
	}
	return n, valueLen
}

// Extend inserts n items without a key behind the item at offset at. The view must have room for them, and the segment
// must not become longer than MaxSegmentBytes.
//
// hot: 0 allocs
func (b Segment) Extend(at, n int) {
	b.open(at+b.Item(at).LengthBytes(), n*ItemHeaderBytes)
	b.SetItems(b.Items() + n)
}

// open makes room for n bytes, zeroes, at an offset.
func (b Segment) open(at, n int) {
	copy(b[at+n:], b[at:b.LengthBytes()])
	clear(b[at : at+n])
	b.SetLengthBytes(b.LengthBytes() + n)
}

// cut removes n bytes at an offset.
func (b Segment) cut(at, n int) {
	copy(b[at:], b[at+n:b.LengthBytes()])
	b.SetLengthBytes(b.LengthBytes() - n)
}

// Truncate removes all pieces but the first of the value of a key, whose item is at offset at.
//
// hot: 0 allocs
func (b Segment) Truncate(at int) {
	n, _ := b.Pieces(at)
	b.cut(at+b.Item(at).LengthBytes(), (n-1)*ItemHeaderBytes)
	b.SetItems(b.Items() - (n - 1))
}

// Remove removes the item of a key at offset at, which Find has returned, with all pieces of its value and all
// identities.
//
// hot: 0 allocs
func (b Segment) Remove(at int) {
	b.Truncate(at)
	n, identities := b.Item(at).LengthBytes(), b.Identities(at)
	b.cut(at, n+identities*IdentityBytes)
	b.SetItems(b.Items() - 1 - identities)
}

// SetExpiry gives the item of a key at offset at an expiry, or takes it away. With one that it had not before the
// segment becomes longer by ExpiryBytes, for which the view must have room.
//
// hot: 0 allocs
func (b Segment) SetExpiry(at int, has bool, unix uint32) {
	it, field := b.Item(at), at+ItemHeaderBytes+b.Width()
	switch had := it.HasExpiry(); {
	case had && !has:
		b.cut(field, ExpiryBytes)
		b[at] &^= flagExpires
	case has && !had:
		b.open(field, ExpiryBytes)
		b[at] |= flagExpires
	}
	if has {
		le.PutUint32(b[field:], unix)
	}
}

// identitiesAt is the offset of the first identity of the key whose item is at offset at, if it has one.
func (b Segment) identitiesAt(at int) int {
	n, _ := b.Pieces(at)
	return at + b.Item(at).LengthBytes() + (n-1)*ItemHeaderBytes
}

// Identities is the number of identities of the key whose item is at offset at.
//
// hot: 0 allocs
func (b Segment) Identities(at int) (n int) {
	for off := b.identitiesAt(at); off < b.LengthBytes() && b.Item(off).IsIdentity(); off += IdentityBytes {
		n++
	}
	return n
}

// FindIdentity returns an identity of the key whose item is at offset at.
//
// hot: 0 allocs
func (b Segment) FindIdentity(at int, client, seq uint64) (id Identity, ok bool) {
	for off := b.identitiesAt(at); off < b.LengthBytes() && b.Item(off).IsIdentity(); off += IdentityBytes {
		if id = b.Item(off).Identity(); id.Client == client && id.Seq == seq {
			return id, true
		}
	}
	return Identity{}, false
}

// AddIdentity adds an identity to the key whose item is at offset at. The view must have room for IdentityBytes. If
// the key has MaxIdentities, the oldest one is evicted, and the next one is kept for as long as that should have been:
// until the end of that one it is known that some were evicted.
//
// Before that, the identities of id.Client with a lower Seq than answered are removed, because nobody will ask for
// them. The oldest one stays if others were evicted: its time would go to the next one with every write, and never end.
//
// hot: 0 allocs
func (b Segment) AddIdentity(at int, id *Identity, answered uint64) {
	first, n := b.identitiesAt(at), b.Identities(at)
	if answered > 0 {
		n -= b.dropAnswered(at, first, id.Client, answered)
	}
	if n == MaxIdentities {
		until := b.Item(first).Identity().KeepUntil
		b.cut(first, IdentityBytes)
		b.SetItems(b.Items() - 1)
		n--
		next := b.Item(first).Identity()
		if until == 0 || next.KeepUntil != 0 && next.KeepUntil < until {
			next.KeepUntil = until
			b.Item(first).setIdentity(&next)
		}
		b.Item(at).SetEvicted(true)
	}
	off := first + n*IdentityBytes
	b.open(off, IdentityBytes)
	b.SetItems(b.Items() + 1)
	b.Item(off).setIdentity(id)
}

// Answered is the number of identities that AddIdentity would remove from the key whose item is at offset at.
//
// hot: 0 allocs
func (b Segment) Answered(at int, client, answered uint64) (n int) {
	if answered == 0 {
		return 0
	}
	off := b.answerable(at, b.identitiesAt(at))
	for ; off < b.LengthBytes() && b.Item(off).IsIdentity(); off += IdentityBytes {
		if id := b.Item(off).Identity(); id.answeredBefore(client, answered) {
			n++
		}
	}
	return n
}

// answerable is the offset of the first identity of a key that may be removed because it was answered.
func (b Segment) answerable(at, first int) int {
	if b.Evicted(at, 0) {
		return first + IdentityBytes
	}
	return first
}

// dropAnswered removes the identities of a client with a lower Seq than answered from a key, and returns how many.
func (b Segment) dropAnswered(at, first int, client, answered uint64) (n int) {
	for off := b.answerable(at, first); off < b.LengthBytes() && b.Item(off).IsIdentity(); {
		if id := b.Item(off).Identity(); !id.answeredBefore(client, answered) {
			off += IdentityBytes
			continue
		}
		b.cut(off, IdentityBytes)
		b.SetItems(b.Items() - 1)
		n++
	}
	return n
}

// Evicted reports whether identities of the key whose item is at offset at were dropped before their time, and that has
// not come at a time in unix seconds.
//
// hot: 0 allocs
func (b Segment) Evicted(at int, unix uint32) bool {
	if !b.Item(at).Evicted() {
		return false
	}
	oldest := b.identitiesAt(at)
	return oldest < b.LengthBytes() && b.Item(oldest).IsIdentity() && !b.Item(oldest).mayGo(unix)
}

// MayDrop reports whether something in the segment may be dropped at a time in unix seconds, or settled: what has
// expired, identities, or the item of a key that does not exist.
//
// hot: 0 allocs
func (b Segment) MayDrop(unix uint32) bool {
	it, end := b.Item(b.First()), b.LengthBytes()
	for off := b.First(); off < end; off += it.LengthBytes() {
		switch it.at = off; {
		case it.IsIdentity():
			if it.mayGo(unix) {
				return true
			}
		case it.HasExpiry():
			if it.Expired(unix) {
				return true
			}
		case it.Gone():
			return true
		}
	}
	return false
}

// DropIdentities removes those identities of the key whose item is at offset at that may be dropped at a time in unix
// seconds, and reports whether there were any.
//
// hot: 0 allocs
func (b Segment) DropIdentities(at int, unix uint32) (dropped bool) {
	if b.Item(at).Evicted() && !b.Evicted(at, unix) {
		b.Item(at).SetEvicted(false)
	}
	for off := b.identitiesAt(at); off < b.LengthBytes() && b.Item(off).IsIdentity(); {
		if !b.Item(off).mayGo(unix) {
			off += IdentityBytes
			continue
		}
		b.cut(off, IdentityBytes)
		b.SetItems(b.Items() - 1)
		dropped = true
	}
	return dropped
}

// Filter removes the keys for which keep returns false.
//
// hot: 0 allocs
func (b Segment) Filter(keep func(key []byte) bool) {
	out, items, kept := b.First(), 0, false
	for off := out; off < b.LengthBytes(); {
		it := b.Item(off)
		n := it.LengthBytes()
		if it.HasKey() {
			kept = keep(it.Key())
		}
		if kept {
			if out != off {
				copy(b[out:], b[off:off+n])
			}
			out += n
			items++
		}
		off += n
	}
	b.SetLengthBytes(out)
	b.SetItems(items)
}

// FirstExpiry is the first time, in unix seconds, at which an object or a tombstone of the segment may be dropped; 0:
// never.
//
// hot: 0 allocs
func (b Segment) FirstExpiry() (first uint32) {
	for off := b.First(); off < b.LengthBytes(); {
		it := b.Item(off)
		if e := it.Expiry(); !it.IsIdentity() && e != 0 && (first == 0 || e < first) {
			first = e
		}
		off += it.LengthBytes()
	}
	return first
}
