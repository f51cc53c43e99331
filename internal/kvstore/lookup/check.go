package lookup

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/tenant"
)

// A check verifies that a value can be read. It is a Get that discards the value, by one of the ops that are reserved
// for the values of CopyOuts, and counts with those.

// checkValue is the kind of such an op, maxChecks how many there are at most.
const (
	checkValue = copyValue + 1
	maxChecks  = maxCopiesEach
)

// Check asks whether the value of a key can be read.
type Check struct {
	// Tag is for Host.Checked.
	Tag        uint64
	Tenant     tenant.ID
	Background bool
	Key        []byte
	// Version is that of the object, Length the length of its value. With another one the result is NotFound.
	Version uint64
	Length  int
}

// MayCheck reports whether BeginCheck may be called for a value of n bytes.
func (m *Machine) MayCheck(n int) bool {
	copies, long := m.copies, m.longCopies
	if m.checkedLast && m.parked.N > 0 { // it is the turn of the CopyOuts that wait
		copies, long = copies+1, long+1
	}
	return m.checks < maxChecks && copies < maxCopies && (n <= mediumRecord || long < maxLongCopies)
}

// BeginCheck starts a check, for which MayCheck says that there is room.
func (m *Machine) BeginCheck(c *Check) {
	i := m.links.Pop(&m.free)
	o := &m.ops[i]
	*o = op{
		kind: checkValue, tag: c.Tag, tenant: c.Tenant, background: c.Background, keyLen: uint8(len(c.Key)),
		hash: format.HashKey(m.HashSeed, c.Key), sought: c.Version, soughtLen: uint32(c.Length), buf: o.buf, big: none,
		pieces: o.pieces[:0],
	}
	copy(o.key[:], c.Key)
	m.checkedLast = true
	m.checks++
	m.copies++
	if o.soughtLen > mediumRecord {
		m.longCopies++
	}
	m.lookup(i)
}

// checked ends a check.
func (m *Machine) checked(i int32, r Result) {
	o := &m.ops[i]
	m.checks--
	m.copies--
	if o.soughtLen > mediumRecord {
		m.longCopies--
	}
	m.returnBuffer(i)
	m.links.PushFront(&m.free, i)
	m.Host.Checked(o.tag, r)
}

// AwaitCheck says that a check of a value of n bytes waits for MayCheck, or that none does if n is 0. So checks and
// CopyOuts take turns, and neither waits for as long as the others have values to read.
func (m *Machine) AwaitCheck(n int) {
	was := m.awaited
	if m.awaited = n; n == 0 && was > 0 {
		m.unpark()
	}
}
