package nvme

// Opcodes of replication (docs/wire-extensions.md, ExtReplication) in the Key Value command set, for the messages of
// one node of a cluster to another. Their low two bits are the data's direction, as DataDirection reads them.
const (
	CmdKVDurable = 0xA0 // no data
	CmdKVForward = 0xA1 // data: KVForwardHeader, value
	CmdKVShip    = 0xA2 // data: KVReadHeader, value
	CmdKVSync    = 0xA4 // no data
	CmdKVCompare = 0xA6 // data: KVRange of kind KVDigest
	CmdKVFetch   = 0xAA // data: KVRange of kind KVCopy
)

// KVMaxMessage is how long the data of a message is at most, whatever MDTS is: over RDMA a node copies no more.
const KVMaxMessage = 1 << 20

// KVReplication reports whether an opcode of the Key Value command set is one of replication.
func KVReplication(opcode uint8) bool {
	switch opcode {
	case CmdKVDurable, CmdKVForward, CmdKVShip, CmdKVSync, CmdKVCompare, CmdKVFetch:
		return true
	}
	return false
}

// Flags of a Forward.
const (
	// KVForwardDelete: the write is a Delete, which leaves a tombstone.
	KVForwardDelete = 1 << 0
	kvForwardFlags  = KVForwardDelete
)

// KVChainFull is the bit of DW0 and DW1 of the completion of a Forward or Durable that says that the partition of the
// receiver, or of a member behind it, is nearly full. The rest is the committed mark.
const KVChainFull = 1 << 63

// kvCompareBits is the logarithm of the number of sub-ranges of a Compare.
const kvCompareBits = 6

// KVReplicaSQE reads an SQE as a message between two replicas of a range. What is not named is reserved.
//
//	CDW2          epoch of the chain, from 1 on
//	CDW3          15:0 number of the range in the view | 23:16 flags (Forward), bits (Compare, Fetch) |
//	              31:24 high byte of the round (Compare, Fetch)
//	CDW4, CDW5    Answered of the client's write header (Forward)
//	CDW10         length of the data or of the host's buffer in bytes
//	CDW11         7:0 length of the key (Forward, Ship), of the key behind which to begin, or 0 (Fetch) |
//	              15:8 how many Forwards may be kept (Forward), low byte of the round (Compare, Fetch) |
//	              31:16 number of the sender's partition in the view
//
//	              Forward        Durable        Ship          Compare   Fetch
//	CDW12, CDW13  sequence       clock, or 0    key 0 to 7    first     first, or key 0 to 7
//	CDW14, CDW15  durable mark   durable mark   key 8 to 15             0,     or key 8 to 15
//
// A Sync has no more than epoch and range. The key of a Forward is in its header. Bits is the logarithm of the number
// of positions of a part of the range; the part begins at a multiple of that.
//
// An example: write 258 of the epoch 7 of range 4660, when the writes up to 257 are durable at the sender and before
// it: a Put of 100 bytes, whose key has 3. The receiver may keep 8 Forwards unanswered.
//
//	CDW2     CDW3     … CDW10    CDW11    CDW12, CDW13     CDW14, CDW15
//	07000000 34120000   94000000 03080000 0201000000000000 0101000000000000
type KVReplicaSQE SQE

// KVReplica reads the command as a message between replicas.
func (s *SQE) KVReplica() *KVReplicaSQE { return (*KVReplicaSQE)(s) }

// Epoch counts the changes of the chain, by the view of the sender.
func (k *KVReplicaSQE) Epoch() uint32     { return le.Uint32(k[8:]) }
func (k *KVReplicaSQE) SetEpoch(v uint32) { le.PutUint32(k[8:], v) }

// Range is the number of the range in the view.
func (k *KVReplicaSQE) Range() uint16     { return le.Uint16(k[12:]) }
func (k *KVReplicaSQE) SetRange(v uint16) { le.PutUint16(k[12:], v) }

// Answered is that of the client's write of a Forward: see KVWriteHeader. It is at most the Sequence of that.
func (k *KVReplicaSQE) Answered() uint64     { return le.Uint64(k[16:]) }
func (k *KVReplicaSQE) SetAnswered(v uint64) { le.PutUint64(k[16:], v) }

// Flags are those of a Forward.
func (k *KVReplicaSQE) Flags() uint8     { return k[14] }
func (k *KVReplicaSQE) SetFlags(v uint8) { k[14] = v }

// Bits is the binary logarithm of the number of positions of the part that a Compare or a Fetch is about.
func (k *KVReplicaSQE) Bits() uint8     { return k[14] }
func (k *KVReplicaSQE) SetBits(v uint8) { k[14] = v }

// LenBytes is the size of the data.
func (k *KVReplicaSQE) LenBytes() uint32     { return le.Uint32(k[40:]) }
func (k *KVReplicaSQE) SetLenBytes(v uint32) { le.PutUint32(k[40:], v) }

// KeyLen is the length of the key.
func (k *KVReplicaSQE) KeyLen() uint8     { return k[44] }
func (k *KVReplicaSQE) SetKeyLen(v uint8) { k[44] = v }

// Keep is how many Forwards of the range the receiver may keep unanswered until their writes are committed, this one
// included; 0: none.
func (k *KVReplicaSQE) Keep() uint8     { return k[45] }
func (k *KVReplicaSQE) SetKeep(v uint8) { k[45] = v }

// Round is that of the pass or the repair for which a Compare or a Fetch asks: the sender counts them. What was begun
// for one is of no use for another one, because the sender may have lost something meanwhile that was stored since.
func (k *KVReplicaSQE) Round() uint16     { return uint16(k[15])<<8 | uint16(k[45]) }
func (k *KVReplicaSQE) SetRound(v uint16) { k[15], k[45] = uint8(v>>8), uint8(v) }

// Sender is the number of the sender's partition in the view. A node may have several partitions in one chain, while a
// range moves from one of them to another.
func (k *KVReplicaSQE) Sender() uint16     { return le.Uint16(k[46:]) }
func (k *KVReplicaSQE) SetSender(v uint16) { le.PutUint16(k[46:], v) }

// Sequence is the place of a Forward in the order of the epoch's writes, from 1 on.
func (k *KVReplicaSQE) Sequence() uint64     { return le.Uint64(k[48:]) }
func (k *KVReplicaSQE) SetSequence(v uint64) { le.PutUint64(k[48:], v) }

// Mark is the durable mark of a Forward or a Durable: all writes up to it are durable at the sender and before it.
func (k *KVReplicaSQE) Mark() uint64     { return le.Uint64(k[56:]) }
func (k *KVReplicaSQE) SetMark(v uint64) { le.PutUint64(k[56:], v) }

// Clock is that of a Durable: all writes with a version up to it have ended. 0: the sender does not know it.
func (k *KVReplicaSQE) Clock() uint64     { return le.Uint64(k[48:]) }
func (k *KVReplicaSQE) SetClock(v uint64) { le.PutUint64(k[48:], v) }

// First is the first position of a Compare, and the one at which a Fetch without a key begins.
func (k *KVReplicaSQE) First() uint64     { return le.Uint64(k[48:]) }
func (k *KVReplicaSQE) SetFirst(v uint64) { le.PutUint64(k[48:], v) }

// Key copies the key of a Ship or a Fetch to dst and returns the used part of dst. It truncates a key longer than
// MaxKVKey.
//
// Cost: 0 allocs.
func (k *KVReplicaSQE) Key(dst *[MaxKVKey]byte) []byte { // hot: 0 allocs
	copy(dst[:], k[48:64])
	return dst[:min(k[44], MaxKVKey)]
}

// SetKey sets the key of a Ship or a Fetch and its length, at most MaxKVKey.
//
// Cost: 0 allocs.
func (k *KVReplicaSQE) SetKey(key []byte) { // hot: 0 allocs
	clear(k[48+copy(k[48:64], key) : 64])
	k[44] = uint8(len(key))
}

// SubRanges is the number of sub-ranges of a Compare's answer, and the binary logarithm of the length of each.
func (k *KVReplicaSQE) SubRanges() (n int, shift uint8) {
	b := min(k.Bits(), kvCompareBits)
	return 1 << b, k.Bits() - b
}

// Last is the last position of the part of a Compare, whose first is First.
func (k *KVReplicaSQE) Last() uint64 { return k.First() | (1<<k.Bits() - 1) }

// Valid reports whether the fields are valid and those that are reserved are 0. The length of the data is not checked,
// but for commands without data.
//
// Cost: 0 allocs.
func (k *KVReplicaSQE) Valid() bool { // hot: 0 allocs
	asks := k[0] == CmdKVCompare || k[0] == CmdKVFetch
	if k.Epoch() == 0 || k[15] != 0 && !asks || k[45] != 0 && !asks && k[0] != CmdKVForward ||
		k.Answered() != 0 && k[0] != CmdKVForward {
		return false
	}
	n, high := int(k.KeyLen()), le.Uint64(k[56:])
	switch k[0] {
	case CmdKVForward:
		return k.Flags()&^kvForwardFlags == 0 && n >= 1 && n <= MaxKVKey && k.Sequence() != 0
	case CmdKVDurable:
		return k[14] == 0 && n == 0 && k.LenBytes() == 0 && k.Clock() <= MaxKVClock
	case CmdKVSync:
		return k[14] == 0 && n == 0 && k.LenBytes() == 0 && k.First() == 0 && high == 0
	case CmdKVShip:
		return k[14] == 0 && n >= 1 && n <= MaxKVKey && zeroes(k[48+n:64])
	case CmdKVCompare:
		return k.Bits() <= 64 && n == 0 && high == 0 && k.First()&(1<<k.Bits()-1) == 0
	case CmdKVFetch:
		if n == 0 {
			return k.Bits() <= 64 && high == 0
		}
		return k.Bits() <= 64 && n <= MaxKVKey && zeroes(k[48+n:64])
	}
	return false
}

// KVForwardHeaderSize is the size of a KVForwardHeader. It is that of a KVWriteHeader, so that a ChainHead can write
// the one in the place of the other, in front of the value.
const KVForwardHeaderSize = KVWriteHeaderSize

// KVForwardHeader is the beginning of the data of a Forward: what does not change when the write is forwarded again,
// also in another epoch. The value follows. A Delete has none.
//
//	 0         8        16         24        28          32     48
//	+---------+--------+----------+---------+-----------+------+-------
//	| Version | Client | Sequence | Expires | KeepUntil | Key  | value
//	+---------+--------+----------+---------+-----------+------+-------
//
// Example: version 2^40 + 5 of the key "abc", which never expires, by write 9 of client 0x1122334455667788, which is to
// be remembered until second 1,796,000,000 since 1970:
//
//	05 00 00 00 00 01 00 00  88 77 66 55 44 33 22 11
//	09 00 00 00 00 00 00 00  00 00 00 00 00 c9 0c 6b
//	61 62 63 00 00 00 00 00  00 00 00 00 00 00 00 00
type KVForwardHeader [KVForwardHeaderSize]byte

// Version is the one that the ChainHead has given to the write.
func (h *KVForwardHeader) Version() uint64     { return le.Uint64(h[0:]) }
func (h *KVForwardHeader) SetVersion(v uint64) { le.PutUint64(h[0:], v) }

// Client and Sequence are the identity of the write; Client 0: it has none.
func (h *KVForwardHeader) Client() uint64       { return le.Uint64(h[8:]) }
func (h *KVForwardHeader) SetClient(v uint64)   { le.PutUint64(h[8:], v) }
func (h *KVForwardHeader) Sequence() uint64     { return le.Uint64(h[16:]) }
func (h *KVForwardHeader) SetSequence(v uint64) { le.PutUint64(h[16:], v) }

// Expires is when the object, or the tombstone of a Delete, ceases to exist, in seconds since 1970; 0: never.
func (h *KVForwardHeader) Expires() uint32     { return le.Uint32(h[24:]) }
func (h *KVForwardHeader) SetExpires(v uint32) { le.PutUint32(h[24:], v) }

// KeepUntil is until when the identity is kept, in seconds since 1970, so that all replicas forget it at one time; 0
// without one.
func (h *KVForwardHeader) KeepUntil() uint32     { return le.Uint32(h[28:]) }
func (h *KVForwardHeader) SetKeepUntil(v uint32) { le.PutUint32(h[28:], v) }

// Key has the bytes of the key, whose length is in the command, and zeroes.
func (h *KVForwardHeader) Key() [MaxKVKey]byte     { return [MaxKVKey]byte(h[kvfKey:]) }
func (h *KVForwardHeader) SetKey(v [MaxKVKey]byte) { copy(h[kvfKey:], v[:]) }

// Offsets of the header's fields, as the completion of a command with KVInvalidHeader names them.
const (
	kvfVersion   = 0
	kvfSequence  = 16
	kvfKeepUntil = 28
	kvfKey       = 32
)

// Fault returns the offset of the first field that is wrong in the header of a command with a key of that length; ok is
// true if none is.
//
// Cost: 0 allocs.
func (h *KVForwardHeader) Fault(keyLen uint8) (offset int, ok bool) { // hot: 0 allocs
	switch {
	case h.Version()-1 >= MaxKVVersion:
		return kvfVersion, false
	case h.Client() == 0 && h.Sequence() != 0:
		return kvfSequence, false
	case (h.Client() == 0) != (h.KeepUntil() == 0):
		return kvfKeepUntil, false
	case !zeroes(h[kvfKey+int(min(keyLen, MaxKVKey)):]):
		return kvfKey, false
	}
	return 0, true
}

// Check is Fault as an error that names the field.
func (h *KVForwardHeader) Check(keyLen uint8) error {
	const what = "KV forward header"
	at, ok := h.Fault(keyLen)
	if ok {
		return nil
	}
	switch at {
	case kvfVersion:
		return fieldError(what, "Version", h.Version(), "1 to 2^62-1")
	case kvfSequence:
		return fieldError(what, "Sequence", h.Sequence(), "0 without a Client")
	case kvfKeepUntil:
		return fieldError(what, "KeepUntil", h.KeepUntil(), "a time with a Client, 0 without one")
	}
	return fieldError(what, "Key", h.Key(), "zeroes behind the key")
}
