package replica

import (
	"encoding/binary"

	"jbofd/internal/kvstore"
)

// A replica that is damaged revives when its store works again: see damage.go of package crrs. When the view does not
// have it as a member any more, it has the store do a write of its own, a Delete of a key that nobody has, and asks
// whether the outcome of all that has failed is known.

// revival is how far that has come.
type revival struct {
	// sinceNS is when the replica became damaged last. setbacks counts how often it has soon after the time before:
	// what the store cannot do may be something else than the write that is tried.
	sinceNS  int64
	setbacks uint8
	// dueNS is when the next request may be made. written: the store has done the write, at writtenNS.
	dueNS, writtenNS int64
	written          bool
	// keys is the number of the next key that is tried.
	keys uint32
}

const (
	// reviveNS is the time from the damage to the first trial write, and between those that fail. It doubles with each
	// setback, mostSetbacks times. A damage counts as a setback if the previous one was at most setbackNS ago.
	reviveNS     = 1e9
	mostSetbacks = 6
	setbackNS    = 600e9
	// certainNS is how long the store may take until all outcomes are known, before another write is tried.
	certainNS = 10e9
)

// becameDamaged begins with a damage.
func (r *Replica) becameDamaged() {
	v := &r.revival
	switch again := v.sinceNS != 0 && r.now-v.sinceNS < setbackNS; {
	case !again:
		v.setbacks = 0
	case v.setbacks < mostSetbacks:
		v.setbacks++
	}
	r.damaged = true
	v.sinceNS, v.dueNS, v.written = r.now, r.now+v.pauseNS(), false
}

func (v *revival) pauseNS() int64 { return reviveNS << v.setbacks }

// mayRevive reports whether a damaged replica may make a request for that, now or at revival.dueNS.
func (r *Replica) mayRevive() bool {
	return r.damaged && r.ops.N() == 0 && r.port.Replica().MayRevive()
}

// continueRevival makes the next request for that, if it is due.
func (r *Replica) continueRevival(out *Actions) {
	v := &r.revival
	if !r.mayRevive() || r.now < v.dueNS {
		return
	}
	n := r.ops.Take()
	o := r.ops.At(n)
	o.revives = true
	o.req = kvstore.Request{Op: kvstore.Certain, Tag: uint64(n), Background: true}
	if !v.written {
		o.key.Len = uint8(copy(o.key.Bytes[:], "\x00jbofd wakes"))
		for found := false; !found; v.keys++ {
			binary.LittleEndian.PutUint32(o.key.Bytes[12:], v.keys)
			o.key.Len = 16
			found = r.position(o.key.Bytes[:])>>(r.cfg.Bits-1)>>1 == r.cfg.First>>(r.cfg.Bits-1)>>1
		}
		// The tombstone has expired already, so that it is never seen, nor has an effect. If a client does use such a
		// key, its object is kept, because no version of an object is lower.
		o.req.Op, o.req.Key = kvstore.Delete, o.key.Bytes[:]
		o.req.Given, o.req.Tombstone, o.req.Expires = 1, true, 1
	}
	out.Requests = append(out.Requests, o.req)
}

// revives takes the store's answer to such a request.
func (r *Replica) revives(i int32, p *kvstore.Reply) {
	v := &r.revival
	op := r.ops.At(i).req.Op
	r.ops.Put(i)
	switch {
	case p.Status == kvstore.NoMemory:
		v.dueNS = r.now + retryNS
	case op == kvstore.Delete && p.Status == kvstore.OK, op == kvstore.Delete && p.Status == kvstore.CapacityExceeded:
		// Without room there is nothing to be written: whatever needs it waits.
		v.written, v.writtenNS, v.dueNS = true, r.now, r.now
	case op == kvstore.Delete:
		v.dueNS = r.now + v.pauseNS()
	case p.Status != kvstore.OK:
		v.dueNS, v.written = r.now+retryFullNS, r.now-v.writtenNS < certainNS
	case !r.port.Replica().MayRevive(): // a view has made it a member meanwhile: it tries again when it is none
		v.written = false
	default:
		r.port.Replica().Revive()
		r.damaged = false
	}
}
