package pipeline

import (
	"math"
)

// The token buckets of a tenant.
const (
	iosBucket = iota
	bytesBucket
	readBucket
	writeBucket
	buckets
)

// Caps are the limits of a tenant at an SSD; 0 means no limit.
type Caps struct {
	// RWIOsPerSec limits I/Os of all classes.
	RWIOsPerSec int64
	// RWBytesPerSec, ReadBytesPerSec and WriteBytesPerSec limit transfers. An I/O of any size is admitted as soon as
	// the bucket has no debt from earlier I/Os.
	RWBytesPerSec, ReadBytesPerSec, WriteBytesPerSec int64
}

// releasePeriodNS is the granularity of the times at which held I/Os are admitted. I/Os of a high cap, and of several
// tenants, are then admitted together, which saves most of the cost of a wake-up for each. The rate does not suffer:
// tokens accumulate meanwhile.
const releasePeriodNS = 200_000

// ioTokens is the cost of an I/O in the bucket of I/Os. It is above 1 so that the bucket can hold a fraction of an I/O.
const ioTokens = 1000

// burstsPerSec bounds the burst of a capped tenant after it was idle: its buckets hold 1/burstsPerSec of a second's
// tokens. That is enough that a late timer loses no tokens, and little enough that a cap holds within a few percent
// over any second.
const burstsPerSec = 50

// transferBucket maps a class that transfers data to the bucket of its direction.
var transferBucket = [Classes]int{ReadClass: readBucket, WriteClass: writeBucket}

// ready reports whether the caps admit an I/O of class c.
func (t *tenantState) ready(now int64, c Class) bool {
	return t.caps[iosBucket].Ready(now) &&
		(c == OtherClass || t.caps[bytesBucket].Ready(now) && t.caps[transferBucket[c]].Ready(now))
}

// readyAt returns when the caps admit an I/O of class c.
func (t *tenantState) readyAt(now int64, c Class) int64 {
	at := t.caps[iosBucket].NextToken(now)
	if c != OtherClass {
		at = max(at, t.caps[bytesBucket].NextToken(now), t.caps[transferBucket[c]].NextToken(now))
	}
	return at
}

// charge takes the tokens of an I/O.
func (t *tenantState) charge(io IO) {
	t.caps[iosBucket].Take(ioTokens)
	if c := io.Op.Class(); c != OtherClass {
		t.caps[bytesBucket].Take(io.LenBytes)
		t.caps[transferBucket[c]].Take(io.LenBytes)
	}
	if io.Op == CompareWrite { // the write was charged above; this is the read
		t.caps[bytesBucket].Take(io.LenBytes)
		t.caps[readBucket].Take(io.LenBytes)
	}
}

// hold queues an I/O until its tenant's caps admit it.
func (p *Pipeline) hold(now int64, ten *tenantState, r *request) {
	class := r.io.Op.Class()
	r.state, r.next, r.prev = held, noTag, ten.last[class]
	ten.last[class] = r.io.Tag
	p.held++
	if ten.held++; ten.held == 1 {
		ten.place = len(p.capped)
		p.capped = append(p.capped, r.io.Tenant)
	}
	if r.prev != noTag {
		p.ios[r.prev].next = r.io.Tag
		return
	}
	ten.first[class] = r.io.Tag
	p.fixHeap(now, ten)
}

// unlinkHeld removes an I/O from its queue of held I/Os. The caller must call place for the tenant.
func (p *Pipeline) unlinkHeld(ten *tenantState, r *request) {
	class := r.io.Op.Class()
	if r.prev == noTag {
		ten.first[class] = r.next
	} else {
		p.ios[r.prev].next = r.next
	}
	if r.next == noTag {
		ten.last[class] = r.prev
	} else {
		p.ios[r.next].prev = r.prev
	}
	ten.held--
	p.held--
}

// readyNS returns when the caps admit the first held I/O of any class, rounded up to a multiple of releaseNS.
func (p *Pipeline) readyNS(now int64, ten *tenantState) int64 {
	at := int64(math.MaxInt64)
	for c, tag := range ten.first {
		if tag != noTag {
			at = min(at, ten.readyAt(now, Class(c)))
		}
	}
	if rest := at % p.releaseNS; rest > 0 && at < math.MaxInt64-p.releaseNS {
		at += p.releaseNS - rest
	}
	return at
}

// oldest returns the oldest held I/O that the caps admit now, or nil.
func (p *Pipeline) oldest(now int64, ten *tenantState) (first *request) {
	for c, tag := range ten.first {
		if tag == noTag {
			continue
		}
		if r := &p.ios[tag]; (first == nil || r.serial < first.serial) && ten.ready(now, Class(c)) {
			first = r
		}
	}
	return first
}

// fixHeap restores the order of the heap after the tenant's caps or its first held I/O have changed. It removes a
// tenant without held I/Os.
func (p *Pipeline) fixHeap(now int64, ten *tenantState) {
	i := ten.place
	if ten.held == 0 {
		last := len(p.capped) - 1
		p.swap(i, last)
		p.capped = p.capped[:last]
		if i == last {
			return
		}
	} else {
		ten.readyNS = p.readyNS(now, ten)
	}
	for i > 0 && p.before(i, (i-1)/2) {
		p.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		child := 2*i + 1
		if child+1 < len(p.capped) && p.before(child+1, child) {
			child++
		}
		if child >= len(p.capped) || !p.before(child, i) {
			return
		}
		p.swap(i, child)
		i = child
	}
}

func (p *Pipeline) before(i, j int) bool {
	return p.tenants[p.capped[i]].readyNS < p.tenants[p.capped[j]].readyNS
}

func (p *Pipeline) swap(i, j int) {
	p.capped[i], p.capped[j] = p.capped[j], p.capped[i]
	p.tenants[p.capped[i]].place, p.tenants[p.capped[j]].place = i, j
}

// release admits the held I/Os that the caps allow by now.
func (p *Pipeline) release(now int64) {
	for len(p.capped) > 0 {
		ten := &p.tenants[p.capped[0]]
		if ten.readyNS > now {
			return
		}
		for r := p.oldest(now, ten); r != nil; r = p.oldest(now, ten) {
			p.unlinkHeld(ten, r)
			p.admit(now, ten, r)
		}
		p.fixHeap(now, ten)
	}
}
