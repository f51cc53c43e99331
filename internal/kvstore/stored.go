package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
)

// An entry of a CopyIn changes nothing if its key has the same version already. But the value that is stored may have
// been damaged since, and then a copy is how it comes back. So the value is read, and if that is not possible the
// entry's own takes its place, which was written to the value log before the segment was looked at. The object stays
// the same, with its version and what is known of requests.
//
// The CopyIn pays for the read. An entry that is newer than what is there, or older, costs none.

// storedCheck is how far an entry of a CopyIn is with the value that is stored.
type storedCheck uint8

const (
	checkNone   storedCheck = iota
	checkDue                // the key has the same version: its value is to be read
	checkEnded              // it was read, or nobody waits for that any more
	checkFailed             // it could not be read
)

// noteStored notes that the value of the item at an offset, or 0, is to be read before an entry ends that was refused.
func (s *Store) noteStored(seg format.Segment, at int, o *op) {
	if o.copyIn == 0 || o.check != checkNone || o.status != Superseded || o.kind != Put || o.valueLen == 0 || at == 0 {
		return
	}
	it := seg.Item(at)
	if _, n := seg.Pieces(at); !it.Gone() && it.Version() == o.want && n == int(o.valueLen) {
		o.check, o.old = checkDue, it.ValueOffset()
	}
}

// restores reports whether an entry takes the place of the value of the same version at an offset, which could not be
// read, and which nobody has replaced since.
func (o *op) restores(it format.Item) bool {
	return o.check == checkFailed && !it.Gone() && it.Version() == o.want && it.ValueOffset() == o.old
}

// comesBack reports whether an entry is stored although its key had a newer version, or the same: the CopyIn restores
// what there is no more, and only identities are left of the key.
func (s *Store) comesBack(o *op, it format.Item) bool {
	return o.copyIn > 0 && s.copyIns[o.copyIn-1].restores && o.kind == Put && it.Gone() && !it.Tombstone() &&
		it.Version() >= o.want && (o.expires == 0 || o.expires > s.wall)
}

// awaitCheck lets an op wait for the check of what is stored. Its status is Superseded, or OK if it has added
// identities.
func (s *Store) awaitCheck(i int32) {
	s.ops[i].check = checkEnded
	s.opLinks.Push(&s.unchecked, i)
	s.progress++
}

// checkStep begins checks of stored values, as many as there is room for.
func (s *Store) checkStep() {
	for s.unchecked.N > 0 {
		i := s.unchecked.First
		o := &s.ops[i]
		ended := s.copyIns[o.copyIn-1].status != OK
		if !ended && !s.reads.MayCheck(int(o.valueLen)) {
			s.reads.AwaitCheck(int(o.valueLen))
			return
		}
		s.opLinks.Pop(&s.unchecked)
		if ended { // its outcome does not depend on this entry
			s.finish(i, o.status)
			continue
		}
		s.reads.BeginCheck(&lookup.Check{Tag: uint64(i), Tenant: o.tenant, Background: o.background,
			Key: o.key[:o.keyLen], Version: o.want, Length: int(o.valueLen)})
	}
	s.reads.AwaitCheck(0)
}

// Checked implements lookup.Host. A key that has another version by now, or does not exist, is as if the entry had come
// before that.
func (s reader) Checked(tag uint64, r lookup.Result) {
	i := int32(tag)
	if r == lookup.Found || r == lookup.NotFound {
		s.finish(i, s.ops[i].status)
		return
	}
	s.ops[i].check = checkFailed
	s.dispatch(i)
}
