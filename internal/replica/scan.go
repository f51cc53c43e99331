package replica

import (
	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/tenant"
)

// Scan is a client's question which objects a part of the range has.
//
// Each replica that serves answers it from its store, which has all writes that are committed and some that are not.
// So whatever is there all the time is in the answer, and what is written meanwhile may be or not.
type Scan struct {
	// Range is within the range of the replica. With Range.FromKey it begins behind Key.
	Range kvstore.Range
	Key   crrs.Key
	// Value is memory for the answer, an nvme.KVRange. It belongs to the replica until the Reply.
	Value []byte
	// Tenant pays.
	Tenant tenant.ID
	// Tag is repeated in the Reply.
	Tag uint64
}

// Scan takes a client's Scan, which does not change before the Reply. The Reply is crrs.OK with the length of the
// answer, also if that says that something is lost.
func (r *Replica) Scan(q *Scan) {
	r.begin()
	// For crrs it is a read of no key: it is begun and answered with authority, and not in two views.
	r.port.Replica().Read(crrs.Read{Value: q.Value, Payer: uint32(q.Tenant), Tag: r.addClient(client{tag: q.Tag,
		scan: q})}, &r.acts)
}

// scan makes the request of a Scan, if that is what a Get without a key stands for.
func (r *Replica) scan(o *storeOp) {
	if o.key.Len > 0 {
		return
	}
	s := r.clients.At(int32(o.op.Tag)).scan
	o.key = s.Key
	o.req.Op, o.req.Range, o.req.Key = kvstore.Scan, s.Range, o.key.Bytes[:o.key.Len]
}

// scanned takes the store's answer to a Scan.
func (r *Replica) scanned(i int32, p *kvstore.Reply) {
	slot, st := r.ops.At(i).op.Slot, crrs.Absent
	switch p.Status {
	case kvstore.OK:
		st = crrs.Done
	case kvstore.Corrupt, kvstore.DeviceError:
		if p.ValueLen >= nvme.KVRangeHeaderBytes { // otherwise the store has failed; the next write reports that
			st = crrs.Done
			r.port.Replica().Repair(lossOf(nvme.KVRange(r.ops.At(i).op.Value[:p.ValueLen])), &r.acts)
		}
	}
	r.ops.Put(i)
	r.takeReplies(kvstore.OK, 0)
	r.port.Replica().Fetched(slot, st, 0, p.ValueLen, 0, &r.acts)
	r.takeReplies(p.Status, 0)
}
