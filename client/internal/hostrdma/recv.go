package hostrdma

import (
	"errors"
	"fmt"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/wr"
)

// ErrFlushed: work requests were flushed, because the connection has ended.
var ErrFlushed = errors.New("the connection has ended (work requests were flushed)")

// Completed processes completions of work requests of this queue. An error is final and the same as Err: the driver
// must close the connection. Outstanding commands do not complete any more; finished ones can still be collected.
//
// Cost: 0 allocs.
func (q *QPair) Completed(cs []wr.Completion) error { // hot: 0 allocs
	for i := range cs {
		if q.err != nil {
			q.replaceFlushed(cs[i:])
			break
		}
		var err error
		if c := &cs[i]; c.ID&recvBit != 0 {
			err = q.response(c)
		} else {
			err = q.sendCompleted(c)
		}
		if err != nil {
			q.err = err
		}
	}
	return q.err
}

// replaceFlushed replaces ErrFlushed by the failure that has caused the flush: the request that has failed is not
// always the first one to complete.
func (q *QPair) replaceFlushed(cs []wr.Completion) {
	if !errors.Is(q.err, ErrFlushed) {
		return
	}
	for i := range cs {
		if c := &cs[i]; c.Status != wr.StatusOK && c.Status != wr.StatusFlushed {
			q.err = failure(c)
			return
		}
	}
}

// failure returns the error of a work request that has failed.
func failure(c *wr.Completion) error {
	switch recv := c.ID&recvBit != 0; {
	case c.Status == wr.StatusFlushed:
		return ErrFlushed
	case recv && c.Status == wr.StatusLocalLength:
		return fmt.Errorf("%w: response capsule of more than %d bytes", host.ErrProtocol, responseLen)
	case recv:
		return fmt.Errorf("receive of a response: %s (vendor error %#x)", c.Status, c.VendorErr)
	}
	return fmt.Errorf("SEND of a command: %s (vendor error %#x)", c.Status, c.VendorErr)
}

// sendCompleted processes the completion of a SEND: the device no longer reads its capsule, nor those posted before it.
func (q *QPair) sendCompleted(c *wr.Completion) error {
	if c.Status != wr.StatusOK {
		return failure(c)
	}
	// A completion of a SEND that is not in flight completes none.
	n := 0
	for n < q.inFlight.n {
		i := q.inFlight.peek(n)
		if n++; uint64(host.CID(i, q.slots[i].gen)) == c.ID {
			for range n {
				i := q.inFlight.pop()
				if q.slots[i].sent = true; q.slots[i].answered {
					q.done.push(i)
				}
			}
			return nil
		}
	}
	return fmt.Errorf("the device reports a SEND that was not posted: work request %#x", c.ID)
}

// response checks and processes a response.
func (q *QPair) response(c *wr.Completion) error {
	if c.Status != wr.StatusOK {
		return failure(c)
	}
	k := uint16(c.ID)
	if int(k) >= len(q.recvPosted) || !q.recvPosted[k] || c.ID != recvBit|uint64(q.recvGens[k])<<16|uint64(k) {
		return fmt.Errorf("the device reports a receive that was not posted: work request %#x", c.ID)
	}
	q.recvPosted[k] = false
	if c.Len != responseLen {
		return fmt.Errorf("%w: response capsule of %d bytes, must be %d", host.ErrProtocol, c.Len, responseLen)
	}
	if c.Invalidated {
		return fmt.Errorf("%w: the response invalidates key %#x, which no command has asked for", host.ErrProtocol,
			c.RKey)
	}
	// The checks work on a copy, in case the memory is written to meanwhile.
	e := nvme.CQE(q.responses[int(k)*responseStride:][:responseLen])
	q.addRecv(k)
	cid := e.CID()
	i := uint16(host.SlotOf(cid))
	if int(i) >= len(q.slots) || !q.slots[i].busy || !q.slots[i].posted || q.slots[i].gen != host.GenerationOf(cid) {
		return fmt.Errorf("%w: response for CID %#x, which is not outstanding", host.ErrProtocol, cid)
	}
	s := &q.slots[i]
	if s.answered {
		return fmt.Errorf("%w: second response for CID %#x", host.ErrProtocol, cid)
	}
	s.answered, s.status, s.result, s.sqid = true, e.Status(), e.Result64(), e.SQID()
	if s.toHost && s.borrowed && !s.orphan && s.status.OK() {
		copy(q.bufs[i], q.borrowed[i][:s.length])
	}
	q.returnBuffer(i)
	if s.sent {
		q.done.push(i)
	}
	return nil
}
