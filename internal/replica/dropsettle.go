package replica

import (
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// What cannot be read of a range that others have.
//
// A Drop does not get past a segment that cannot be read: it would stay on the list of the store, and keep the
// partition from being filled. But what the partition has of such a range counts for nothing. So a loss that a Scan
// finds is settled without a copy: what was lost does not exist. That goes for a range whose Drop is not over, too,
// because a segment may have been damaged behind the Scan: it is looked through for losses when the Drop takes long.

const (
	// dropLongNS is when a Drop takes long. retrySettleNS is when a loss is looked at again that could not be settled,
	// retryWideNS when one in a segment that the store has to split first, because other ranges have keys there.
	dropLongNS    = 5e9
	retrySettleNS = 10e9
	retryWideNS   = 100e6
	// mostSettled is how many losses are settled at a time.
	mostSettled = 1000
)

// settlement is how far a look is with settling a loss.
type settlement struct {
	// running: the Request is a Settle of the segment of a position. token and width are what the store has told of it,
	// token 0: nothing yet.
	running  bool
	position uint64
	token    uint64
	width    uint8
	// settled counts those of the look.
	settled int
}

// request makes the next Request.
func (l *settlement) request(q *kvstore.Request, bits uint8) {
	*q = kvstore.Request{Op: kvstore.Settle, Background: true, Version: l.token,
		Range: kvstore.Range{First: l.position, Width: l.width}}
	if l.token == 0 {
		q.Range.Width = 64 - bits
	}
}

// beginSettle has the loss settled that a Scan has found.
func (d *Drops) beginSettle(now int64, b nvme.KVRange) {
	l := &d.look.settlement
	if l.settled++; l.settled > mostSettled {
		d.later(now, retrySettleNS)
		return
	}
	l.running, l.position, l.token = true, lossOf(b), 0
}

// settleAnswered goes on behind a Settle. The Scan goes on where it was, and may find the same again.
func (d *Drops) settleAnswered(now int64, p *kvstore.Reply) {
	l := &d.look.settlement
	switch {
	case p.Status == kvstore.OK && l.token == 0 && p.Version != 0 && p.ValueLen < 64-int(d.cfg.Bits):
		d.later(now, retryWideNS)
	case p.Status == kvstore.OK && l.token == 0 && p.Version != 0:
		l.token, l.width = p.Version, uint8(p.ValueLen)
	case p.Status == kvstore.OK, p.Status == kvstore.Superseded:
		l.running = false
	default:
		d.later(now, retrySettleNS)
	}
}
