package nvme

import (
	"fmt"
	"hash/crc32"
)

// Check validates a KVRange, which may be followed by other bytes. After it all views of it are within bounds.
//
// Cost: 0 allocs (if nothing is wrong).
func (b KVRange) Check() error {
	var c KVChecker
	if err := c.Begin(b); err != nil {
		return err
	}
	if _, err := c.Sum(len(b)); err != nil {
		return err
	}
	for {
		if e, err := c.Next(); e == nil {
			return err
		}
	}
}

// KVChecker validates a KVRange in steps, which together are a Check. It is for callers that must not be kept by
// thousands of entries at once. Begin comes first, then Sum until it is done, then Next until there is no entry.
type KVChecker struct {
	b KVRange
	// sum is the CRC32C of the bytes up to at. After Sum, at is the offset of the next entry, left how many there are.
	sum        uint32
	at, left   int
	before, to KVCursor
}

// Begin begins with a KVRange, which may be followed by other bytes. It must not change before the last step.
func (c *KVChecker) Begin(b KVRange) error {
	const what = "KV range"
	switch {
	case len(b) < KVRangeHeaderBytes:
		return fieldError(what, "length", len(b), "at least 96")
	case string(b[krMagic:krVersion]) != kvRangeMagic:
		return fieldError(what, "magic", b[krMagic:krVersion], "\"KVR\"")
	case b[krVersion] != kvRangeVersion:
		return fieldError(what, "version", b[krVersion], "1")
	case b.LenBytes() < KVRangeHeaderBytes || b.LenBytes() > len(b):
		return fieldError(what, "length", b.LenBytes(), "96 to the number of bytes there are")
	}
	*c = KVChecker{b: b[:b.LenBytes()], at: krMagic}
	return nil
}

// Sum adds n more bytes to the checksum. When it is done, the checksum and the header are right, and so is the rest
// unless that are entries.
//
// Cost: 0 allocs (if nothing is wrong).
func (c *KVChecker) Sum(n int) (done bool, err error) { // hot: 0 allocs
	end := c.at + min(n, len(c.b)-c.at)
	c.sum = crc32.Update(c.sum, castagnoli, c.b[c.at:end])
	if c.at = end; end < len(c.b) {
		return false, nil
	}
	if got := le.Uint32(c.b); got != c.sum {
		return false, fieldError("KV range", "CRC32C", got, fmt.Sprint(c.sum))
	}
	if err := c.b.checkHeader(); err != nil {
		return false, err
	}
	c.at, c.before, c.to = KVRangeHeaderBytes, c.b.From(), c.b.To()
	if c.b.Kind() == KVScan || c.b.Kind() == KVCopy {
		c.left = c.b.Items()
	} else {
		c.at = len(c.b)
	}
	return true, nil
}

// checkHeader validates the header, and what follows it unless that are entries.
func (b KVRange) checkHeader() error {
	const what = "KV range"
	from, to := b.From(), b.To()
	switch {
	case b.First() > b.Last():
		return fieldError(what, "First", b.First(), "at most Last")
	case b.Flags()&^(KVComplete|KVLost) != 0:
		return fieldError(what, "flags", b.Flags(), "0 to 3")
	case !from.valid() || !to.valid():
		return fieldError(what, "key of a cursor", "invalid", "at most 16 bytes, and zeroes")
	case from.Position < b.First() || to.Position > b.Last():
		return fieldError(what, "cursor", "outside", "within the range")
	case from.Compare(&to) > 0:
		return fieldError(what, "To", to.Position, "at least From")
	case b[krShift] > 64 || b[krShift] != 0 && b.Kind() != KVDigest:
		return fieldError(what, "shift", b[krShift], "0 to 64 of a digest")
	case !zeroes(b[krShift+1 : krTime]):
		return fieldError(what, "a reserved byte", "set", "zero")
	}
	body := len(b) - KVRangeHeaderBytes
	switch b.Kind() {
	case KVScan, KVCopy:
		return nil
	case KVCount:
		if body != KVTotalsBytes || b.Items() != 1 {
			return fieldError(what, "length", len(b), "128, with 1 item")
		}
		return nil
	case KVDigest:
		if n := b.Items(); n < 1 || n > KVMaxSums || body != n*KVSumBytes {
			return fieldError(what, "number of sub-ranges", n, "1 to 65536, as many as follow")
		}
		return nil
	}
	return fieldError(what, "kind", b.Kind(), "1 to 4")
}

// At is the offset of the entry that Next returns.
func (c *KVChecker) At() int { return c.at }

// Next validates the next entry and returns it, or nil if there is none, or if the error says what is wrong.
//
// Cost: 0 allocs (if nothing is wrong).
func (c *KVChecker) Next() (KVEntry, error) { // hot: 0 allocs
	const what = "KV range entry"
	b, at := c.b, c.at
	if c.left == 0 {
		switch {
		case at != len(b):
			return nil, fieldError(what, "number of entries", b.Items(), "that which fills the length")
		case c.before.Compare(&c.to) > 0:
			return nil, fieldError(what, "cursor", c.before.Position, "at most To")
		}
		return nil, nil
	}
	if at+KVEntryHeaderBytes > len(b) {
		return nil, fieldError(what, "offset", at, "within the range")
	}
	e := KVEntry(b[at:])
	if e[keKeyLen]&keIdentities != 0 {
		if err := e.checkIdentities(b.Kind()); err != nil {
			return nil, err
		}
	}
	n := KVEntryBytes(b.Kind(), e.KeyLen(), e.ValueLen(), e.Identities())
	switch {
	case e.KeyLen() < 1 || e.KeyLen() > MaxKVKey:
		return nil, fieldError(what, "key length", e[keKeyLen], "1 to 16")
	case n > len(b)-at:
		return nil, fieldError(what, "length", n, "within the range")
	case !e.Exists() && e.ValueLen() > 0:
		return nil, fieldError(what, "length of the value of a tombstone", e.ValueLen(), "0")
	case e.Gone() && (e.Tombstone() || e.Identities() == 0 || e.Expires() != 0):
		return nil, fieldError(what, "flags", e[keKeyLen], "without a tombstone and expiry, with identities")
	case e.Version() == 0:
		return nil, fieldError(what, "version", 0, "at least 1")
	}
	end := e.keyAt() + e.KeyLen()
	if b.Kind() == KVCopy {
		end += e.ValueLen()
	}
	if !zeroes(e[end:n]) {
		return nil, fieldError(what, "a byte behind the value", "set", "zero")
	}
	cursor := e.Cursor()
	if cursor.Compare(&c.before) <= 0 {
		return nil, fieldError(what, "cursor", cursor.Position, "behind the one before")
	}
	c.before, c.at, c.left = cursor, at+n, c.left-1
	return e[:n:n], nil
}

// valid reports whether the key of a cursor is valid and the bytes behind it are zero.
func (c *KVCursor) valid() bool { return c.KeyLen <= MaxKVKey && zeroes(c.Key[c.KeyLen:]) }

func zeroes(b []byte) bool {
	for _, v := range b {
		if v != 0 {
			return false
		}
	}
	return true
}

// checkIdentities validates the identities of an entry that is to have some. The entry may be longer than the view.
func (e KVEntry) checkIdentities(kind KVRangeKind) error {
	const what = "identities of a KV range entry"
	switch {
	case kind != KVCopy:
		return fieldError(what, "kind", kind, "2")
	case len(e) < keIdentity || e.Identities() < 1 || e.Identities() > KVMaxIdentities || len(e) < e.keyAt():
		return fieldError(what, "number", len(e), "1 to 64, within the range")
	case e[keIdentityFlags]&^keEvicted != 0 || !zeroes(e[keIdentityFlags+1:keIdentity]):
		return fieldError(what, "a reserved byte", "set", "zero")
	}
	before := uint64(1)
	for i := range e.Identities() {
		id := e.Identity(i)
		if id.Client == 0 {
			return fieldError(what, "client", 0, "at least 1")
		}
		if id.Version < before || id.Version > e.Version() {
			return fieldError(what, "version", id.Version, "ascending, from 1 to that of the entry")
		}
		before = id.Version
	}
	return nil
}
