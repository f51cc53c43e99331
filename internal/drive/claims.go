package drive

import "jbofd/internal/units"

// Claims keep IOs that change a range away from a compare-and-write of it. Each IO that changes the medium claims its
// range from the moment it could go to the device until it is over. A compare-and-write claims exclusively. A claim
// waits for all earlier claims that overlap it, if either is exclusive; so claims are served in the order in which they
// were made, and no IO waits for one that came later. Waiting for earlier ones only, they cannot deadlock.
//
// A claim is found by the regions of the drive that it touches, in a hash table. To make one and to end it costs a few
// steps and, if exclusive claims are around, a look at the claims in the same regions.
const (
	regionShift  = 19 // 512 KiB: an IO of 1 MiB touches three regions at most
	claimRegions = 3
	claimBuckets = 256
)

// claims is the table. The zero claims is empty.
type claims struct {
	buckets [claimBuckets]claimList
	// wide are claims that touch more than claimRegions regions.
	wide      claimList
	serial    uint64
	exclusive int // how many are
}

// claim is an IO's claim.
type claim struct {
	active, exclusive bool
	// waitsFor is how many earlier claims it waits for.
	waitsFor   int32
	start, end units.DriveOffset
	serial     uint64
	// nodes link it into the buckets of its regions, or the first into claims.wide.
	nodes [claimRegions]claimNode
}

// claimNode is a claim's place in a claimList.
type claimNode struct {
	prev, next *claimNode
	io         *IO
	region     int64
}

// claimList is a list of claims in the order in which they were made.
type claimList struct{ first, last *claimNode }

func (l *claimList) push(n *claimNode) {
	n.prev, n.next = l.last, nil
	if l.last == nil {
		l.first = n
	} else {
		l.last.next = n
	}
	l.last = n
}

func (l *claimList) remove(n *claimNode) {
	if n.prev == nil {
		l.first = n.next
	} else {
		n.prev.next = n.next
	}
	if n.next == nil {
		l.last = n.prev
	} else {
		n.next.prev = n.prev
	}
	n.prev, n.next = nil, nil
}

// regions returns the first and the last region that the claim touches.
func (c *claim) regions() (first, last int64) {
	return int64(c.start >> regionShift), int64((c.end - 1) >> regionShift)
}

// bucket is the list of a region.
func (t *claims) bucket(region int64) *claimList { return &t.buckets[uint64(region)%claimBuckets] }

// claim makes io's claim and reports whether the range is io's now. Otherwise the IO must wait, and goes on with
// proceed when the claims before it have ended. An empty range is not claimed.
func (d *Drive) claim(io *IO, offset units.DriveOffset, length units.Bytes, exclusive bool) bool {
	return io.claimed.active || length == 0 || d.claims.add(io, offset, length, exclusive)
}

// unclaim ends io's claim and continues the IOs that have waited for it alone.
func (d *Drive) unclaim(io *IO, now int64) {
	free := d.claims.remove(io)
	for next := free.pop(); next != nil; next = free.pop() {
		d.proceed(next, now)
	}
}

// add makes io's claim and reports whether it waits for no other.
func (t *claims) add(io *IO, offset units.DriveOffset, length units.Bytes, exclusive bool) bool {
	c := &io.claimed
	t.serial++
	c.start, c.end = offset, offset.Add(length)
	c.active, c.exclusive, c.serial, c.waitsFor = true, exclusive, t.serial, 0
	if exclusive || t.exclusive > 0 {
		c.waitsFor = t.conflicts(io, nil)
	}
	if exclusive {
		t.exclusive++
	}
	first, last := c.regions()
	if last-first >= claimRegions {
		t.wide.push(&c.nodes[0])
		return c.waitsFor == 0
	}
	for r := first; r <= last; r++ {
		n := &c.nodes[r-first]
		n.region = r
		t.bucket(r).push(n)
	}
	return c.waitsFor == 0
}

// remove ends io's claim and returns the IOs whose claims wait for no other any more.
func (t *claims) remove(io *IO) (free list) {
	c := &io.claimed
	c.active = false
	first, last := c.regions()
	if last-first >= claimRegions {
		t.wide.remove(&c.nodes[0])
	} else {
		for r := first; r <= last; r++ {
			t.bucket(r).remove(&c.nodes[r-first])
		}
	}
	if c.exclusive {
		t.exclusive--
	}
	if c.exclusive || t.exclusive > 0 {
		t.conflicts(io, &free)
	}
	return free
}

// conflicts looks at the claims that overlap io's where one of the two is exclusive. Without free it counts them. With
// free, io's claim has ended: later claims wait for one claim less, and those that wait for none any more are added to
// free.
func (t *claims) conflicts(io *IO, free *list) (n int32) {
	c := &io.claimed
	first, last := c.regions()
	n = t.conflictsIn(&t.wide, io, anyRegion, free)
	if last-first >= claimBuckets {
		for i := range t.buckets {
			n += t.conflictsIn(&t.buckets[i], io, anyRegion, free)
		}
		return n
	}
	for r := first; r <= last; r++ {
		n += t.conflictsIn(t.bucket(r), io, r, free)
	}
	return n
}

// anyRegion stands for all regions of a list.
const anyRegion = -1

// conflictsIn is conflicts for one list: of the nodes of one region, or of all. A claim that shares several regions
// with io's is looked at once, at the first region that both touch.
func (t *claims) conflictsIn(l *claimList, io *IO, region int64, free *list) (n int32) {
	c := &io.claimed
	first, _ := c.regions()
	for node := l.first; node != nil; node = node.next {
		o := &node.io.claimed
		if !c.exclusive && !o.exclusive || o.start >= c.end || c.start >= o.end {
			continue
		}
		if node != &o.nodes[0] && (region == anyRegion || node.region != first) || region != anyRegion &&
			node.region != region {
			continue
		}
		n++
		if free == nil || o.serial < c.serial {
			continue
		}
		if o.waitsFor--; o.waitsFor == 0 {
			free.push(node.io)
		}
	}
	return n
}
