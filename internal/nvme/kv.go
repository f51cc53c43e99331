package nvme

import (
	"iter"

	"jbofd/internal/uuid"
)

// Key Value command set opcodes (KV Command Set 1.0, figure 6). Their low two bits are the
// data's direction, as DataDirection reads them: Store to the controller, Retrieve and List to
// the host, Delete and Exist none.
const (
	CmdKVStore    = 0x01
	CmdKVRetrieve = 0x02
	CmdKVList     = 0x06
	CmdKVDelete   = 0x10
	CmdKVExist    = 0x14
)

// MaxKVKey is the maximum length of a key in bytes. The minimum is 1.
const MaxKVKey = 16

// Store options: bits of KVSQE.Options of a Store.
const (
	KVStoreMustExist    = 1 << 0 // KeyDoesNotExist if there is no such key
	KVStoreMustNotExist = 1 << 1 // KeyExists if there is such a key
	KVStoreNoCompress   = 1 << 2 // do not compress the value
	// KVStoreOptions are all options that the specification defines.
	KVStoreOptions = KVStoreMustExist | KVStoreMustNotExist | KVStoreNoCompress
)

// KVRetrieveRaw is the bit of KVSQE.Options of a Retrieve that requests the value as it is stored, which may be
// compressed.
const KVRetrieveRaw = 1 << 0

// KVErrorOnDelete is the bit of CDW11 of the feature FIDKeyValue (EDNEK) with which Delete of a nonexistent key fails
// with KeyDoesNotExist. By default such a Delete succeeds.
const KVErrorOnDelete = 1 << 0

// KVSQE reads an SQE as a command of the Key Value command set (KV Command Set 1.0, section
// 3):
//
//	CDW2, CDW3    key, bytes 0 to 7
//	CDW10         Store: size of the value; Retrieve, List: size of the host's buffer; bytes
//	CDW11         15:8 options (Store, Retrieve) | 7:0 key length
//	CDW14, CDW15  key, bytes 8 to 15
//
// The bytes of the key are in memory order; bytes beyond its length are zero. Keys of different lengths are different,
// whatever their bytes.
//
// Retrieve transfers the beginning of the value, as much as the buffer holds, and succeeds. DW0 of its completion is
// the size of the whole value. There is no offset. Over TCP a Retrieve therefore always has a response capsule, because
// the SUCCESS flag of C2HData implies a DW0 of 0.
//
// List returns the keys from the given key on, including that key if it exists, in an order that the controller
// chooses. Without a key it starts at the first key. To continue, a host passes the last key of the previous list, and
// that key is returned again.
type KVSQE SQE

// KV reads the command as one of the Key Value command set.
func (s *SQE) KV() *KVSQE { return (*KVSQE)(s) }

// KeyLow is the key's bytes 0 to 7, KeyHigh its bytes 8 to 15.
func (k *KVSQE) KeyLow() [8]byte      { return [8]byte(k[8:]) }
func (k *KVSQE) SetKeyLow(v [8]byte)  { copy(k[8:], v[:]) }
func (k *KVSQE) KeyHigh() [8]byte     { return [8]byte(k[56:]) }
func (k *KVSQE) SetKeyHigh(v [8]byte) { copy(k[56:], v[:]) }

// LenBytes is the size of the value or of the host's buffer.
func (k *KVSQE) LenBytes() uint32     { return le.Uint32(k[40:]) }
func (k *KVSQE) SetLenBytes(v uint32) { le.PutUint32(k[40:], v) }

// KeyLen is the key's length in bytes, valid or not.
func (k *KVSQE) KeyLen() uint8     { return k[44] }
func (k *KVSQE) SetKeyLen(v uint8) { k[44] = v }

// Options holds KVStore or KVRetrieve bits.
func (k *KVSQE) Options() uint8     { return k[45] }
func (k *KVSQE) SetOptions(v uint8) { k[45] = v }

// ValidKey reports whether the length of the key is valid: 1 to MaxKVKey, or 0 for a List from the first key. If it is
// not, the status of the command is InvalidKeySize.
func (k *KVSQE) ValidKey() bool {
	return k[44] <= MaxKVKey && (k[44] > 0 || k[0] == CmdKVList)
}

// Key copies the key to dst and returns the used part of dst. It truncates a key longer than MaxKVKey.
//
// Cost: 0 allocs.
func (k *KVSQE) Key(dst *[MaxKVKey]byte) []byte { // hot: 0 allocs
	copy(dst[:8], k[8:16])
	copy(dst[8:], k[56:64])
	return dst[:min(k[44], MaxKVKey)]
}

// SetKey sets the key and its length, at most MaxKVKey.
//
// Cost: 0 allocs.
func (k *KVSQE) SetKey(key []byte) { // hot: 0 allocs
	var b [MaxKVKey]byte
	copy(b[:], key)
	copy(k[8:16], b[:8])
	copy(k[56:64], b[8:])
	k[44] = uint8(len(key))
}

// KVList is the data of a List (KV Command Set 1.0, figures 15 and 16) as written or received. Further bytes may follow
// the list.
//
//	0 .. 3   number of keys
//	4 ..     for each: u16 key length | key | 0 to 3 zeroes up to a multiple of 4
type KVList []byte

// kvListHeader is the size of the number of keys.
const kvListHeader = 4

// kvListEntry returns the size of the list entry of a key of n bytes.
func kvListEntry(n int) int { return (2 + n + 3) &^ 3 }

// MinKVList is the minimum size in bytes of a buffer that can hold a list of any one key.
const MinKVList = kvListHeader + (2+MaxKVKey+3)&^3

// NewKVList starts a list in buf, which has at least 4 bytes. The list may use the whole buffer.
//
// Cost: 0 allocs.
func NewKVList(buf []byte) KVList { // hot: 0 allocs
	clear(buf[:kvListHeader])
	return KVList(buf[:kvListHeader:len(buf)])
}

// Append adds a key of 1 to MaxKVKey bytes. It returns false and leaves the list unchanged if the buffer has no space
// for the key.
//
// Cost: 0 allocs.
func (l KVList) Append(key []byte) (KVList, bool) { // hot: 0 allocs
	at, n := len(l), kvListEntry(len(key))
	if n > cap(l)-at {
		return l, false
	}
	l = l[:at+n]
	le.PutUint16(l[at:], uint16(len(key)))
	clear(l[at+2+copy(l[at+2:], key):])
	le.PutUint32(l, le.Uint32(l)+1)
	return l, true
}

// Len returns the number of keys that the list states, or 0 if the list is too short to contain the number.
func (l KVList) Len() int {
	if len(l) < kvListHeader {
		return 0
	}
	return int(le.Uint32(l))
}

// All iterates over the keys up to the first that is incomplete or has an invalid length. The slices are views of l.
func (l KVList) All() iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		at := kvListHeader
		for range l.Len() {
			n := l.keyAt(at)
			if n == 0 || !yield(l[at+2:at+2+n:at+2+n]) {
				return
			}
			at += kvListEntry(n)
		}
	}
}

// keyAt returns the length of the key at an offset, or 0 if there is no complete and valid key. The padding after the
// last key may be missing.
func (l KVList) keyAt(at int) int {
	if at+2 > len(l) {
		return 0
	}
	n := int(le.Uint16(l[at:]))
	if n > MaxKVKey || at+2+n > len(l) {
		return 0
	}
	return n
}

// Check validates the list: it must contain as many complete keys of valid length as it states.
func (l KVList) Check() error {
	const what = "KV list"
	if len(l) < kvListHeader {
		return fieldError(what, "length", len(l), "at least 4")
	}
	at := kvListHeader
	for range l.Len() {
		if at+2 > len(l) {
			return fieldError(what, "NRK", l.Len(), "the number of keys that follow")
		}
		n := int(le.Uint16(l[at:]))
		if n == 0 || n > MaxKVKey {
			return fieldError(what, "KL", n, "1 to 16")
		}
		if at+2+n > len(l) {
			return fieldError(what, "KL", n, "within the list")
		}
		at += kvListEntry(n)
	}
	return nil
}

// IdentifyNamespaceKV is the Identify Namespace data structure of the Key Value command
// set (CNS 05h, CSI 01h; KV Command Set 1.0, section 4.1.5.1). The set's Identify Controller data structure
// (CNS 06h, CSI 01h) has no fields: it is all zero.
//
//	   0 ..   71  sizes in bytes, formats, features, ANAGRPID, NGUID, EUI64
//	  72 ..  327  16 KV formats of 16 bytes
//	3840 .. 4095  vendor specific: u16 number of the ssd in the node
type IdentifyNamespaceKV [IdentifySize]byte

// Offsets of the fields.
const (
	nkNSZE     = 0
	nkNUSE     = 16
	nkNSFEAT   = 24
	nkNKVF     = 25
	nkNMIC     = 26
	nkRESCAP   = 27
	nkFPI      = 28
	nkKVFC     = 29
	nkNOVG     = 32
	nkANAGRPID = 36
	nkNSATTR   = 43
	nkNVMSETID = 44
	nkENDGID   = 46
	nkNGUID    = 48
	nkEUI64    = 64
	nkKVF      = 72
	nkVendor   = 3840
)

// MaxKVFormats is the maximum number of KV formats.
const MaxKVFormats = 16

// NSZE is the size and NUSE what is in use, in bytes.
func (n *IdentifyNamespaceKV) NSZE() uint64     { return le.Uint64(n[nkNSZE:]) }
func (n *IdentifyNamespaceKV) SetNSZE(v uint64) { le.PutUint64(n[nkNSZE:], v) }
func (n *IdentifyNamespaceKV) NUSE() uint64     { return le.Uint64(n[nkNUSE:]) }
func (n *IdentifyNamespaceKV) SetNUSE(v uint64) { le.PutUint64(n[nkNUSE:], v) }

// NSFEAT holds namespace features: NSFEATThin and NSFEATNoReuse.
func (n *IdentifyNamespaceKV) NSFEAT() uint8     { return n[nkNSFEAT] }
func (n *IdentifyNamespaceKV) SetNSFEAT(v uint8) { n[nkNSFEAT] = v }

// NKVF is the number of KV formats, 0-based.
func (n *IdentifyNamespaceKV) NKVF() uint8       { return n[nkNKVF] }
func (n *IdentifyNamespaceKV) SetNKVF(v uint8)   { n[nkNKVF] = v }
func (n *IdentifyNamespaceKV) NMIC() uint8       { return n[nkNMIC] }
func (n *IdentifyNamespaceKV) SetNMIC(v uint8)   { n[nkNMIC] = v }
func (n *IdentifyNamespaceKV) RESCAP() uint8     { return n[nkRESCAP] }
func (n *IdentifyNamespaceKV) SetRESCAP(v uint8) { n[nkRESCAP] = v }
func (n *IdentifyNamespaceKV) FPI() uint8        { return n[nkFPI] }
func (n *IdentifyNamespaceKV) SetFPI(v uint8)    { n[nkFPI] = v }

// KVFC: bits 3:0, the index of the format in use.
func (n *IdentifyNamespaceKV) KVFC() uint8     { return n[nkKVFC] }
func (n *IdentifyNamespaceKV) SetKVFC(v uint8) { n[nkKVFC] = v }

// NOVG is the optimal granularity of values in bytes; 0 is none.
func (n *IdentifyNamespaceKV) NOVG() uint32     { return le.Uint32(n[nkNOVG:]) }
func (n *IdentifyNamespaceKV) SetNOVG(v uint32) { le.PutUint32(n[nkNOVG:], v) }

// ANAGRPID is the ANA group; 0 when there is no ANA.
func (n *IdentifyNamespaceKV) ANAGRPID() uint32     { return le.Uint32(n[nkANAGRPID:]) }
func (n *IdentifyNamespaceKV) SetANAGRPID(v uint32) { le.PutUint32(n[nkANAGRPID:], v) }

// NSATTR: bit 0, write protected.
func (n *IdentifyNamespaceKV) NSATTR() uint8        { return n[nkNSATTR] }
func (n *IdentifyNamespaceKV) SetNSATTR(v uint8)    { n[nkNSATTR] = v }
func (n *IdentifyNamespaceKV) NVMSETID() uint16     { return le.Uint16(n[nkNVMSETID:]) }
func (n *IdentifyNamespaceKV) SetNVMSETID(v uint16) { le.PutUint16(n[nkNVMSETID:], v) }
func (n *IdentifyNamespaceKV) ENDGID() uint16       { return le.Uint16(n[nkENDGID:]) }
func (n *IdentifyNamespaceKV) SetENDGID(v uint16)   { le.PutUint16(n[nkENDGID:], v) }

// NGUID and EUI64 are big endian identifiers; all zeroes: none.
func (n *IdentifyNamespaceKV) NGUID() uuid.UUID     { return uuid.UUID(n[nkNGUID : nkNGUID+16]) }
func (n *IdentifyNamespaceKV) SetNGUID(v uuid.UUID) { copy(n[nkNGUID:], v[:]) }
func (n *IdentifyNamespaceKV) EUI64() [8]byte       { return [8]byte(n[nkEUI64:]) }
func (n *IdentifyNamespaceKV) SetEUI64(v [8]byte)   { copy(n[nkEUI64:], v[:]) }

// SSD is the number of the ssd in the node, from jbofd's vendor area: valid only when the
// controller has an Extension.
func (n *IdentifyNamespaceKV) SSD() uint16     { return le.Uint16(n[nkVendor:]) }
func (n *IdentifyNamespaceKV) SetSSD(v uint16) { le.PutUint16(n[nkVendor:], v) }

// KVFormat is one KV format: what a namespace takes.
//
//	0 KVKML u16 | 2 reserved | 3 AFO: 1:0 relative performance | 4 KVVML u32 | 8 MNKS u32 | 12 reserved
type KVFormat [16]byte

// KVKML is the longest key and KVVML the longest value in bytes.
func (f *KVFormat) KVKML() uint16     { return le.Uint16(f[0:]) }
func (f *KVFormat) SetKVKML(v uint16) { le.PutUint16(f[0:], v) }
func (f *KVFormat) KVVML() uint32     { return le.Uint32(f[4:]) }
func (f *KVFormat) SetKVVML(v uint32) { le.PutUint32(f[4:], v) }

// MNKS is the largest number of keys; 0: none is named.
func (f *KVFormat) MNKS() uint32     { return le.Uint32(f[8:]) }
func (f *KVFormat) SetMNKS(v uint32) { le.PutUint32(f[8:], v) }

// AFO: bits 1:0, relative performance, 0 best.
func (f *KVFormat) AFO() uint8     { return f[3] }
func (f *KVFormat) SetAFO(v uint8) { f[3] = v }

// KVF returns KV format i, 0 to 15; the zero format when there is no such place.
func (n *IdentifyNamespaceKV) KVF(i int) (f KVFormat) {
	if i >= 0 && i < MaxKVFormats {
		copy(f[:], n[nkKVF+16*i:])
	}
	return f
}

// SetKVF sets KV format i, 0 to 15.
func (n *IdentifyNamespaceKV) SetKVF(i int, f KVFormat) { copy(n[nkKVF+16*i:], f[:]) }

// Format is the KV format in use.
func (n *IdentifyNamespaceKV) Format() KVFormat { return n.KVF(int(n.KVFC() & 0xf)) }

// Check judges what a host must rely on; the error names the field. The zeroes of an inactive
// NSID fail: ask Inactive first.
func (n *IdentifyNamespaceKV) Check() error {
	const what = "Identify Namespace (KV)"
	f := n.Format()
	switch {
	case n.NKVF() >= MaxKVFormats:
		return fieldError(what, "NKVF", n.NKVF(), "at most 15")
	case n.KVFC()&0xf > n.NKVF():
		return fieldError(what, "KVFC", n.KVFC(), "the index of one of the NKVF formats")
	case f.KVKML() == 0 || f.KVKML() > MaxKVKey:
		return fieldError(what, "KVKML", f.KVKML(), "1 to 16")
	}
	return nil
}

// Inactive reports whether the structure is the all-zero one of an inactive NSID.
func (n *IdentifyNamespaceKV) Inactive() bool {
	return n.NSZE() == 0 && *n == IdentifyNamespaceKV{}
}
