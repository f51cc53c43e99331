package space

// Epoch is the epoch of a chunk as DRAM has it: 40 bits. A chunk that is opened has the epoch of the one before and 1
// more. So many are never used up: 2^40 chunks of 2 MiB are 2 ZiB. 32 bits would be: a start of a partition of 4 TiB
// with a volatile cache skips a million epochs.
type Epoch [5]byte

// MaxEpoch is the greatest epoch.
const MaxEpoch = 1<<40 - 1

// NewEpoch returns the Epoch with that number.
func NewEpoch(n uint64) Epoch {
	return Epoch{byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24), byte(n >> 32)}
}

// N is the number of the epoch.
func (e Epoch) N() uint64 {
	return uint64(e[0]) | uint64(e[1])<<8 | uint64(e[2])<<16 | uint64(e[3])<<24 | uint64(e[4])<<32
}

// liveUnit is what the length of every record is a multiple of: format.ValueUnit, or more.
const liveUnit = 8

// Noted is what was live in a chunk, or NotCounted.
type Noted [3]byte

// NotCounted is the Noted of a chunk that was free, obsolete or part of a checkpoint.
var NotCounted = Noted{0xFF, 0xFF, 0xFF}

// noted returns the Noted of so many bytes.
func noted(bytes uint32) Noted {
	n := (bytes + liveUnit - 1) / liveUnit
	return Noted{byte(n), byte(n >> 8), byte(n >> 16)}
}

// Bytes is how many bytes were live.
func (n Noted) Bytes() uint32 { return (uint32(n[0]) | uint32(n[1])<<8 | uint32(n[2])<<16) * liveUnit }
