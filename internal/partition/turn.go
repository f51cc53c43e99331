package partition

import (
	"errors"
	"math"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/swap"
	"jbofd/internal/ssd"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
)

// machine is the Partition as its driver sees it.
type machine Partition

// Pending implements turn.Machine.
func (m *machine) Pending() bool {
	return m.inbox.Pending() || m.done.Pending() || m.aborting.Load() || m.swapper != nil && m.swapper.pending()
}

// Turn implements turn.Machine.
func (m *machine) Turn() { (*Partition)(m).turn() }

// maxTurns is how many turns a submitter takes in a row before it gets on with its own work. A turn of a store is
// short.
const maxTurns = 16

// turn does all the work that can be done. Completions come first, for they make room; then Requests begin. The I/Os of
// the store and of the Source go to the drives at the end, in one batch for each drive. Needs ownership.
func (p *Partition) turn() {
	if p.phase == gone {
		p.discardDone()
		p.aborting.Store(false)
		p.takeInbox()
		p.refuse()
		p.endResize()
		return
	}
	now := p.driver.Now()
	p.tellWall(now)
	l := p.swapping
	p.takeDone(now)
	aborted := p.aborting.Load() && p.aborting.Swap(false) // before takeInbox, which may set it again
	p.takeInbox()
	if aborted {
		p.takeAborted()
	}
	if l != nil {
		l.begin(now)
		if p.phase == closing {
			l.stop()
		}
	}
	p.startRequests(now)
	for again := true; again; again = p.startRequests(now) { // replies make room
		p.store.Turn(now, &p.acts)
		p.takeReplies()
		if l != nil {
			l.turn(now)
		}
	}
	if at := p.wakeNS(); at != 0 {
		p.driver.WakeAt(at)
	}
	if p.store.Ready() {
		if used := p.store.LiveBytes(); p.used.Load() != used { // a load costs a fraction of an atomic store
			p.used.Store(used)
			used, most := p.store.Fullness()
			p.full.Store(used > most/5*4)
			p.tooFull.Store(used > most/10*9)
		}
		p.memory.returnSegTbl(p.store.SegTblBytes())
	}
	p.submit(now)
	if l != nil {
		l.submit()
	}
	p.endResize()
	switch {
	case p.phase == opening && (p.store.Ready() || p.store.Err() != nil):
		p.phase = serving
		close(p.opened)
	case p.phase == closing && (p.store.Stopped() || p.lost):
		p.phase = gone
		close(p.stopped)
	}
}

// wallEveryNS is how often the time of day is looked up.
const wallEveryNS = 100e6

// tellWall tells the store the time of day.
func (p *Partition) tellWall(now int64) {
	if now >= p.wallDueNS {
		p.wallDueNS = now + wallEveryNS
		p.wall = uint32(p.cfg.Wall().Unix())
		p.store.SetWall(p.wall)
	}
}

// later returns the time that is so many seconds from now, as an unsigned number of 32 bits that is never 0.
func (p *Partition) later(seconds uint32) uint32 {
	return uint32(min(uint64(p.wall)+uint64(seconds), math.MaxUint32))
}

// refuse ends the Requests that wait when Close is called, and those that come later. They end with Aborted, because
// the store has begun none of them. DeviceError would make a host take the removal of its namespace for a media error.
func (p *Partition) refuse() {
	for i := range p.queues {
		w := &p.queues[i]
		for r := w.popAny(); r != nil; r = w.popAny() {
			if !r.start() {
				p.endAborted(r)
				continue
			}
			r.Status, r.ValueLen = kvstore.Aborted, 0
			p.complete(r)
		}
	}
}

// endBegun ends the Requests that the store has, which is given up. Whether a restart finds what they have written is
// not known. Their memory is not in use any more: store, Source and areas copy values, and areas forget those that they
// have not copied yet.
func (p *Partition) endBegun() {
	if p.swapper != nil {
		for _, a := range p.swapper.areas {
			a.forgetAppends(p.swapper)
		}
	}
	p.driver.Lock()
	defer p.driver.Unlock()
	for tag, r := range p.reqs {
		if r != nil {
			p.reply(&kvstore.Reply{Tag: uint64(tag), Status: kvstore.DeviceError})
		}
	}
}

// discardDone discards what comes after the end of the partition, and tells giveUp when no more will come.
func (p *Partition) discardDone() {
	for n := p.done.Take(); n != nil; n = n.Detach() {
		p.atDrive--
	}
	atDrive := p.atDrive
	if p.swapper != nil {
		p.swapper.discard()
		atDrive += p.swapper.atDrive
	}
	if p.quiet != nil && atDrive == 0 {
		close(p.quiet)
		p.quiet = nil
	}
}

// takeDone hands the device's completions to the store.
func (p *Partition) takeDone(now int64) {
	for n := p.done.Take(); n != nil; {
		d := n.Item
		n = n.Detach()
		p.atDrive--
		p.heardNS = now
		if d.Err != nil && errors.Is(d.Err, ssd.ErrGone) {
			p.lost, p.resizeLost = p.phase == closing, true
		}
		if d.CreditUnits > 0 {
			p.tenant(d.Tenant).creditUnits = d.CreditUnits
		}
		d.Buf.B = nil
		p.store.Complete(d.tag, d.Err)
	}
}

// takeInbox puts submitted Requests into the queues of their tenants.
func (p *Partition) takeInbox() {
	for n := p.inbox.Take(); n != nil; {
		r := n.Item
		n = n.Detach()
		p.tenant(r.Tenant).countRequest(r)
		p.queueOf(r).push(r)
		if r.state.Load() == requestAborted {
			p.aborting.Store(true) // the turn that Abort has asked for may be over
		}
	}
}

// tenant returns the state of a tenant.
func (p *Partition) tenant(t tenant.ID) *tenantState {
	for int(t) >= len(p.tenants) {
		p.tenants = append(p.tenants, tenantState{})
	}
	return &p.tenants[t]
}

// startRequests gives waiting Requests to the store until the store refuses one, and reports whether it took any.
func (p *Partition) startRequests(now int64) (any bool) {
	if p.phase == closing {
		p.refuse()
	}
	l := p.swapping
	if l != nil {
		any = l.feed()
	}
	if p.phase == serving {
		any = p.startAll(&p.queues[getQueue], now) || any
		any = p.startWrites(now) || any
		for i := rangeQueue; i < numQueues; i++ {
			any = p.startAll(&p.queues[i], now) || any
		}
	}
	return any
}

// startAll gives the waiting Requests of a queue to the store until the store refuses one, and reports whether it took
// any.
func (p *Partition) startAll(w *waiting, now int64) (any bool) {
	for w.n > 0 {
		taken, refused := p.startNext(w, now)
		any = any || taken
		if refused {
			break
		}
	}
	return any
}

// startWrites is startAll for the queues of Puts and of Deletes, which share the store's room for writes. The next
// Request is a Put, unless the tenant that is next among the Deletes has fewer Deletes in the store than the one that
// is next among the Puts has Puts. If the store refuses a Request, startWrites goes on with the other queue alone: the
// store may have room for a Delete, which can free space, when it has none for a Put.
func (p *Partition) startWrites(now int64) (any bool) {
	puts, deletes := &p.queues[putQueue], &p.queues[deleteQueue]
	for puts.n > 0 && deletes.n > 0 {
		next := puts
		if deletes.leastInStore() < puts.leastInStore() {
			next = deletes
		}
		taken, refused := p.startNext(next, now)
		any = any || taken
		switch {
		case refused && next == puts:
			return p.startAll(deletes, now) || any
		case refused:
			return p.startAll(puts, now) || any
		}
	}
	any = p.startAll(puts, now) || any
	return p.startAll(deletes, now) || any
}

// startNext gives the next Request of w, which must not be empty, to the store, or to the Source if that handles it.
// taken: the store or the Source has the Request now. refused: it has no room; the Request stays the first of its
// tenant in w, where Abort still finds it. If it is neither, the Request has ended with kvstore.Aborted, because Abort
// has taken it out or its Pass or Extent is stale.
func (p *Partition) startNext(w *waiting, now int64) (taken, refused bool) {
	l, r := p.swapping, w.peek()
	if !r.start() {
		p.endAborted(w.popAny())
		return false, false
	}
	if r.Pass.StaleAt(now) || r.Extent.Stale() {
		w.pop()
		w.requestDone(r)
		r.Status, r.ValueLen = kvstore.Aborted, 0
		p.complete(r)
		return false, false
	}
	if len(p.freeReq) == 0 {
		p.freeReq = append(p.freeReq, uint32(len(p.reqs)))
		p.reqs = append(p.reqs, nil)
	}
	tag := p.freeReq[len(p.freeReq)-1]
	var q kvstore.Request // filled in place: a literal would be copied, and that waits for it to be written
	q.Op, q.Condition, q.Tag, q.Tenant = r.Op, r.Condition, uint64(tag), r.Tenant
	q.Key, q.Value, q.Room = r.Key[:min(int(r.KeyLen), len(r.Key))], r.Value, r.Room
	q.Version, q.Given, q.Expires, q.Tombstone, q.ID = r.Version, r.Given, r.Expires, r.Tombstone, r.ID
	q.Background, q.Restore, q.AheadSeconds, q.Sound = r.Background, r.Restore, r.AheadSeconds, r.Sound
	if r.Op.IsRange() {
		q.Range = r.Range
	}
	if r.ExpiresIn {
		q.Expires = p.later(r.Expires)
	}
	if r.KeepSeconds > 0 {
		q.ID.KeepUntil = p.later(r.KeepSeconds)
	}
	verdict := swap.ToStore
	if l != nil {
		verdict = l.source.Submit(&q)
	}
	if verdict == swap.Full || verdict == swap.ToStore && !p.store.Submit(&q) {
		r.state.Store(requestQueued)
		return false, true
	}
	if l != nil && verdict == swap.ToStore && (r.Op == kvstore.Put || r.Op == kvstore.Delete) {
		l.source.RequestBegan(tag, q.Key)
	}
	p.freeReq = p.freeReq[:len(p.freeReq)-1]
	p.reqs[tag] = r
	p.rangeBegan(r)
	w.pop()
	return true, false
}

// takeReplies ends the Requests that the store has replied to.
func (p *Partition) takeReplies() {
	for i := range p.acts.Replies {
		a := &p.acts.Replies[i]
		switch l := p.swapping; {
		case a.Tag >= sourceTag:
			l.source.Stored(a.Tag&^sourceTag, *a)
			continue
		case l != nil:
			l.source.RequestEnded(uint32(a.Tag))
		}
		p.reply(a)
	}
	p.acts.Replies = p.acts.Replies[:0]
	if p.cfg.Damaged != nil {
		for _, d := range p.acts.Damage {
			p.cfg.Damaged(d)
		}
	}
	p.acts.Damage = p.acts.Damage[:0]
}

// reply ends the Request with the reply's tag.
func (p *Partition) reply(a *kvstore.Reply) {
	r := p.reqs[a.Tag]
	p.reqs[a.Tag] = nil
	p.freeReq = append(p.freeReq, uint32(a.Tag))
	r.Status, r.ValueLen, r.ObjectVersion, r.ObjectExpires = a.Status, a.ValueLen, a.Version, a.Expires
	p.rangeEnded(r)
	p.queueOf(r).requestDone(r)
	p.complete(r)
}

// complete ends a Request.
func (p *Partition) complete(r *Request) {
	r.CreditUnits = 0
	if r.Credited {
		r.CreditUnits = p.tenant(r.Tenant).credit()
	}
	if s := r.Sink; s.KVDone(r) {
		p.driver.Kick(s)
	}
}

// submit hands the store's I/Os to the drive.
func (p *Partition) submit(now int64) {
	for i := range p.acts.IOs {
		q := &p.acts.IOs[i]
		for int(q.Tag) >= len(p.ios) {
			d := &deviceIO{p: p, tag: uint32(len(p.ios))}
			d.node.Item, d.Unabortable = d, true
			d.Init(d, d.tag)
			p.ios = append(p.ios, d)
		}
		d := p.ios[q.Tag]
		d.Op, d.Offset, d.Len, d.Buf.B = q.Op, q.Offset.On(p.cfg.OffsetBytes), units.Bytes(len(q.Buf)), q.Buf
		d.Flags = 0
		if q.FUA {
			d.Flags = ssd.FUA
		}
		d.Tenant, d.Credited, d.Extent = q.Tenant, false, p.pass
		if q.Background {
			d.Tenant = p.cfg.Background
		} else {
			t := p.tenant(d.Tenant)
			t.countIO(d.Op, int64(d.Len))
			d.Credited = t.credited
		}
		p.batch.Add(&d.IO)
	}
	if p.atDrive == 0 {
		p.heardNS = now
	}
	p.atDrive += len(p.acts.IOs)
	p.acts.IOs = p.acts.IOs[:0]
	p.drive.Submit(&p.batch)
}

// wakeNS is when the store or the swapper wants a turn, at the latest; 0: they do not.
func (p *Partition) wakeNS() int64 {
	at := p.acts.WakeNS
	if l := p.swapping; l != nil && l.wakeNS != 0 && (at == 0 || l.wakeNS < at) {
		at = l.wakeNS
	}
	return at
}
