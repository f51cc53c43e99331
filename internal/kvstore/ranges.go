package kvstore

import (
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/tenant"
)

// Range is a range of positions, and where to begin in it. The position of a key is its hash with the order of the bits
// reversed, so that stores with the same Config.HashSeed have the same keys at the same positions.
type Range = lookup.Range

// MaxRanges is how many requests for ranges may be in progress: Scan, CopyOut, Count and Digest together. MaxCopyIns is
// the same for CopyIn.
const (
	MaxRanges  = lookup.MaxRanges
	MaxCopyIns = 4
)

// MaxRangeBytes is how much of its memory a request for a range uses, at most, and the longest CopyIn.
const MaxRangeBytes = lookup.MaxRangeBytes

// IsRange reports whether an Op is about a range of positions.
func (o Op) IsRange() bool { return o >= Scan && o <= Certain }

// readsRange reports whether an Op returns an nvme.KVRange.
func (o Op) readsRange() bool { return o >= Scan && o <= Digest }

// submitRange takes a request for a range.
func (s *Store) submitRange(r *Request) bool {
	switch {
	case r.Op == Drop:
		return s.submitDrop(r)
	case r.Op == CopyIn:
		return s.submitCopyIn(r)
	case r.Op == Settle:
		return s.submitSettle(r)
	case r.Op == Certain:
		st := OK
		if s.failures != s.ckpt.covered {
			st = DeviceError
		}
		s.answer(r.Tag, st)
		return true
	}
	op := [...]lookup.Op{Scan: lookup.Scan, CopyOut: lookup.CopyOut, Count: lookup.Count, Digest: lookup.Digest}[r.Op]
	in := r.Range.At(s.hashSeed, r.Key)
	if !in.Valid(op, len(r.Value)) {
		s.answer(r.Tag, InvalidValue)
		return true
	}
	return s.reads.Begin(&lookup.Request{Op: op, Tag: r.Tag, Tenant: r.Tenant, Key: r.Key, Value: r.Value,
		Range: in, Background: r.Background})
}

// EndEarly makes a request for a range end as soon as it can. A Scan, CopyOut, Count or Digest ends with what it has
// found until then, and a CopyIn with Aborted, unless it is done; a Drop runs to completion.
func (s *Store) EndEarly(tag uint64) {
	s.reads.EndEarly(tag)
	for i := range s.copyIns {
		if c := &s.copyIns[i]; c.b != nil && c.tag == tag && (!c.valid || c.left > 0 || c.clearing.left > 0) {
			s.entryEnded(c, Aborted)
		}
	}
}

// payerOf is who pays for what a request does.
func payerOf(t tenant.ID, background bool) payer { return payer{tenant: t, background: background} }
