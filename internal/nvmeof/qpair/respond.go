package qpair

import (
	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
)

// cqe makes the completion of slot s.
func (q *QPair) cqe(s *Slot, status nvme.Status, result uint64) (e nvme.CQE) {
	e.SetResult64(result)
	if !q.noSQFlow {
		e.SetSQHD(q.sqhd)
	} else {
		e.SetSQHD(0xFFFF)
	}
	e.SetSQID(s.sqid)
	e.SetCID(s.SQE.CID())
	e.SetStatus(status)
	return e
}

// SetSQID sets the field SQID of the completion of slot's command. It is 0 otherwise.
//
// hot: 0 allocs
func (q *QPair) SetSQID(slot int, v uint16) { q.slots[slot].sqid = v }

// Respond ends slot's command without data. result goes into DW0 and DW1.
//
// hot: 0 allocs
func (q *QPair) Respond(slot int, status nvme.Status, result uint64) {
	s := &q.slots[slot]
	if s.state == slotZombie {
		q.release(slot)
		return
	}
	invariants.Check(s.state != slotFree, "qpair: response to a free slot")
	if !q.wire.Closed() {
		q.wire.SendResponse(slot, q.cqe(s, status, result))
	}
	q.release(slot)
}

// RespondData ends slot's command with success and data to the host, which must
// not change until it has been sent. It reports whether the transport has the data; if not (the
// command was aborted, the connection is closed), the caller has it back.
//
// hot: 0 allocs
func (q *QPair) RespondData(slot int, data []byte, result uint64) bool {
	s := &q.slots[slot]
	if s.state == slotZombie || q.wire.Closed() {
		q.release(slot)
		return false
	}
	invariants.Check(s.state == slotExecuting, "qpair: data for a slot that does not execute")
	q.wire.SendData(slot, data, q.cqe(s, nvme.Success, result))
	q.release(slot)
	return true
}

// refuse answers a command that does not get as far as the handler.
func (q *QPair) refuse(slot int, status nvme.Status) {
	q.h.Failed(slot, status)
	q.Respond(slot, status, 0)
}

// NoteFailed tells the handler that slot's command has failed, although the host cannot be told: the
// connection is lost with it.
func (q *QPair) NoteFailed(slot int, status nvme.Status) { q.h.Failed(slot, status) }

// Abort responds to slot's command as aborted while the handler still has it; its
// own Respond, when it comes, only frees the slot. Of a fused pair that executes, both are to be aborted.
func (q *QPair) Abort(slot int, status nvme.Status) {
	s := &q.slots[slot]
	invariants.Check(q.withHandler(s), "qpair: abort of a slot that does not execute")
	if !q.wire.Closed() {
		q.wire.SendResponse(slot, q.cqe(s, status, 0))
	}
	s.state = slotZombie
	q.zombies++
}

// withHandler reports whether the command is with the handler: for itself, or as the first of a fused pair.
func (q *QPair) withHandler(s *Slot) bool {
	return s.state == slotExecuting || s.state == slotFused && s.pair >= 0 && q.slots[s.pair].state == slotExecuting
}

// Find returns the slot of the outstanding command with this identifier, if it
// is with the handler.
func (q *QPair) Find(cid uint16) (slot int, ok bool) {
	for i := range q.slots {
		if s := &q.slots[i]; q.withHandler(s) && s.SQE.CID() == cid {
			return i, true
		}
	}
	return 0, false
}

// Awaited calls f for every slot that holds memory and waits for the host, with the bytes of its data that have come:
// slots whose data was asked for and has not arrived whole, and the first of a fused pair, with its data, while the
// second has not come.
func (q *QPair) Awaited(f func(slot, got int)) {
	for i := range q.slots {
		if s := &q.slots[i]; s.state == slotFetching || i == q.fused && s.state == slotFused && s.inline {
			f(i, s.Got)
		}
	}
}

// Fetching ends the wait of every slot whose data is awaited, and calls f for it: the connection is lost, and Fetched
// will not be called. The slot is the handler's again.
func (q *QPair) Fetching(f func(slot int)) {
	for i := range q.slots {
		if s := &q.slots[i]; s.state == slotFetching || s.state == slotArriving {
			s.state = slotExecuting
			f(i)
		}
	}
}

func (q *QPair) release(slot int) {
	s := &q.slots[slot]
	if s.state == slotZombie {
		q.zombies--
	}
	s.state, s.pair, s.sqid, s.Data = slotFree, -1, 0, nil
	q.free = append(q.free, uint16(slot))
}
