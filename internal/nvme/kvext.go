package nvme

// Opcodes of extended key-value (docs/wire-extensions.md, ExtKV) in the Key Value command set. Their low two bits are
// the data's direction, as DataDirection reads them.
const (
	CmdKVXStore    = 0x81 // data: KVWriteHeader, value
	CmdKVXRetrieve = 0x82 // data: KVReadHeader, value
	CmdKVXDelete   = 0x85 // data: KVWriteHeader
)

// Seconds for which a write header may ask the target to keep the identity of a command.
const (
	MinKVKeep = 1
	MaxKVKeep = 3600
)

// MaxKVVersion is the greatest version that a command may give to an object, but for a Copy In. MaxKVClock is the
// greatest version that there is.
const (
	MaxKVVersion = 1<<62 - 1
	MaxKVClock   = 1<<63 - 1
)

// KVCondition restricts an extended Store or Delete.
type KVCondition uint8

// Conditions.
const (
	// KVAlways is no condition. A Delete of a key that does not exist succeeds.
	KVAlways KVCondition = iota
	// KVIfAbsent: the key must not exist; else KeyExists. Store only.
	KVIfAbsent
	// KVIfPresent: the key must exist; else KeyDoesNotExist. Store only.
	KVIfPresent
	// KVIfVersion: the key must have the header's version; else KVVersionMismatch.
	KVIfVersion
	// KVIfNewer: the key gets the header's version, which must be greater than the one that it has, or had when it was
	// deleted with a tombstone; else KVSuperseded.
	KVIfNewer
	kvConditions
)

// Flags of KVWriteHeader.
const (
	// KVTombstone: the Delete leaves a tombstone until the time Expires.
	KVTombstone = 1 << 0
	// KVRetry: a command with this identity may have been carried out before.
	KVRetry = 1 << 1
	// KVRelative: Expires is in seconds from when the target carries out the command, not in seconds since 1970.
	KVRelative = 1 << 2
	kvFlags    = KVTombstone | KVRetry | KVRelative
)

// KVWriteHeaderSize is the size of a KVWriteHeader, KVReadHeaderSize that of a KVReadHeader.
const (
	KVWriteHeaderSize = 48
	KVReadHeaderSize  = 16
)

// KVWriteHeader is the beginning of the data of an extended Store, and all the data of an extended Delete.
//
//	 0        8        16         24        28     32          33      34         40         48
//	+--------+--------+----------+---------+------+-----------+-------+----------+----------+-------
//	| Version| Client | Sequence | Expires | Keep | Condition | Flags | reserved | Answered | value
//	+--------+--------+----------+---------+------+-----------+-------+----------+----------+-------
//
// Example: a Store if the key has version 4711, to expire in an hour, as write 5 of client 0x1122334455667788, to be
// remembered for two minutes, when its writes of the key before write 4 have been answered:
//
//	67 12 00 00 00 00 00 00  88 77 66 55 44 33 22 11
//	05 00 00 00 00 00 00 00  10 0e 00 00 78 00 00 00
//	03 04 00 00 00 00 00 00  04 00 00 00 00 00 00 00
type KVWriteHeader [KVWriteHeaderSize]byte

// Version is the version that KVIfVersion expects and that KVIfNewer stores; 0 with the other conditions.
func (h *KVWriteHeader) Version() uint64     { return le.Uint64(h[0:]) }
func (h *KVWriteHeader) SetVersion(v uint64) { le.PutUint64(h[0:], v) }

// Client and Sequence are the identity of the command; Client 0: it has none.
func (h *KVWriteHeader) Client() uint64       { return le.Uint64(h[8:]) }
func (h *KVWriteHeader) SetClient(v uint64)   { le.PutUint64(h[8:], v) }
func (h *KVWriteHeader) Sequence() uint64     { return le.Uint64(h[16:]) }
func (h *KVWriteHeader) SetSequence(v uint64) { le.PutUint64(h[16:], v) }

// Expires is when the object, or the tombstone of a Delete, ceases to exist, in seconds; 0: never. See KVRelative.
func (h *KVWriteHeader) Expires() uint32     { return le.Uint32(h[24:]) }
func (h *KVWriteHeader) SetExpires(v uint32) { le.PutUint32(h[24:], v) }

// Keep is for how many seconds the target keeps the identity, MinKVKeep to MaxKVKeep; 0 without one.
func (h *KVWriteHeader) Keep() uint32     { return le.Uint32(h[28:]) }
func (h *KVWriteHeader) SetKeep(v uint32) { le.PutUint32(h[28:], v) }

// Condition restricts the command.
func (h *KVWriteHeader) Condition() KVCondition     { return KVCondition(h[32]) }
func (h *KVWriteHeader) SetCondition(v KVCondition) { h[32] = uint8(v) }

// Flags holds KVTombstone, KVRetry and KVRelative.
func (h *KVWriteHeader) Flags() uint8     { return h[33] }
func (h *KVWriteHeader) SetFlags(v uint8) { h[33] = v }

// Answered says that no retry of a write of this Client to this key comes any more whose Sequence is smaller; 0:
// nothing is said.
func (h *KVWriteHeader) Answered() uint64     { return le.Uint64(h[40:]) }
func (h *KVWriteHeader) SetAnswered(v uint64) { le.PutUint64(h[40:], v) }

// Offsets of the header's fields, as the completion of a command with KVInvalidHeader names them.
const (
	kvhVersion   = 0
	kvhSequence  = 16
	kvhExpires   = 24
	kvhKeep      = 28
	kvhCondition = 32
	kvhFlags     = 33
	kvhReserved  = 34
	kvhAnswered  = 40
)

// Fault returns the offset of the first field that is wrong in the header of a command; ok is true if none is.
//
// Cost: 0 allocs.
func (h *KVWriteHeader) Fault(opcode uint8) (offset int, ok bool) { // hot: 0 allocs
	c := h.Condition()
	store := opcode == CmdKVXStore
	switch {
	case c >= kvConditions || !store && (c == KVIfAbsent || c == KVIfPresent):
		return kvhCondition, false
	case h.Flags()&^kvFlags != 0 || h.Flags()&KVTombstone != 0 && store || h.Flags()&KVRetry != 0 && h.Client() == 0 ||
		h.Flags()&KVRelative != 0 && h.Expires() == 0:
		return kvhFlags, false
	case c != KVIfVersion && c != KVIfNewer && h.Version() != 0 || c == KVIfNewer && h.Version()-1 >= MaxKVVersion:
		return kvhVersion, false
	case h.Client() == 0 && h.Sequence() != 0:
		return kvhSequence, false
	case !store && h.Expires() != 0 && h.Flags()&KVTombstone == 0:
		return kvhExpires, false
	case h.Client() == 0 && h.Keep() != 0 || h.Client() != 0 && (h.Keep() < MinKVKeep || h.Keep() > MaxKVKeep):
		return kvhKeep, false
	case h.Answered() > h.Sequence():
		return kvhAnswered, false
	}
	for i := kvhReserved; i < kvhAnswered; i++ {
		if h[i] != 0 {
			return i, false
		}
	}
	return 0, true
}

// Check is Fault as an error that names the field.
func (h *KVWriteHeader) Check(opcode uint8) error {
	const what = "KV write header"
	at, ok := h.Fault(opcode)
	if ok {
		return nil
	}
	switch at {
	case kvhCondition:
		return fieldError(what, "Condition", h.Condition(), "one of those of the command")
	case kvhFlags:
		return fieldError(what, "Flags", h.Flags(), "flags that belong to the command and to its other fields")
	case kvhVersion:
		return fieldError(what, "Version", h.Version(), "1 to 2^62-1 with KVIfNewer, 0 unless the condition needs one")
	case kvhSequence:
		return fieldError(what, "Sequence", h.Sequence(), "0 without a Client")
	case kvhExpires:
		return fieldError(what, "Expires", h.Expires(), "0 for a Delete without a tombstone")
	case kvhKeep:
		return fieldError(what, "Keep", h.Keep(), "1 to 3600 with a Client, 0 without one")
	case kvhAnswered:
		return fieldError(what, "Answered", h.Answered(), "at most the Sequence")
	}
	return fieldError(what, "reserved byte", h[at], "0")
}

// KVReadHeader is the beginning of the data of an extended Retrieve; the value follows, as much of it as the host's
// buffer holds.
//
//	 0         8         12         16
//	+---------+---------+----------+-------
//	| Version | Expires | reserved | value
//	+---------+---------+----------+-------
//
// Example: version 4712, which never expires:
//
//	68 12 00 00 00 00 00 00  00 00 00 00 00 00 00 00
type KVReadHeader [KVReadHeaderSize]byte

// Version is the object's version.
func (h *KVReadHeader) Version() uint64     { return le.Uint64(h[0:]) }
func (h *KVReadHeader) SetVersion(v uint64) { le.PutUint64(h[0:], v) }

// Expires is when the object ceases to exist, in seconds since 1970; 0: never.
func (h *KVReadHeader) Expires() uint32     { return le.Uint32(h[8:]) }
func (h *KVReadHeader) SetExpires(v uint32) { le.PutUint32(h[8:], v) }

// Check validates that the reserved bytes are zero.
func (h *KVReadHeader) Check() error {
	if v := le.Uint32(h[12:]); v != 0 {
		return fieldError("KV read header", "reserved bytes", v, "0")
	}
	return nil
}

// KVExtended reports whether an opcode of the Key Value command set is one of extended key-value.
func KVExtended(opcode uint8) bool {
	switch opcode {
	case CmdKVXStore, CmdKVXRetrieve, CmdKVXDelete:
		return true
	}
	return KVRangeCommand(opcode)
}

// KVVersioned reports whether the completion of a command has the form of an extended Store's: DW0 and DW1 are one
// number, and the units of the credit are in the place of SQID.
func KVVersioned(opcode uint8) bool {
	switch opcode {
	case CmdKVXStore, CmdKVXDelete, CmdKVDrop, CmdKVForward, CmdKVDurable:
		return true
	}
	return false
}
