package node

import (
	"encoding/binary"
	"fmt"

	"jbofd/internal/lab"
	"jbofd/internal/nvme"
	"jbofd/internal/units"
)

// work is a process of the load: it reads, writes and aborts until the load ends.
func (h *Host) work(p *lab.Proc) {
	for !h.stop {
		a := h.a
		if a == nil || !a.ready {
			p.Wait(func(wake func()) { h.waiting = append(h.waiting, wake) })
			continue
		}
		q := a.io[h.rng.IntN(len(a.io))]
		if !q.free() {
			p.Sleep(1e6)
			continue
		}
		h.busy++
		h.commands++
		ns := h.lab.namespaces[h.rng.IntN(len(h.lab.namespaces))]
		if h.lab.traits.swaps && h.rng.IntN(2) == 0 {
			ns = h.lab.namespaces[len(h.lab.namespaces)-1] // the keys: only a drive with much to do swaps
		}
		switch {
		case h.lab.contended:
			h.contend(p, q)
		case ns.kv:
			h.key(p, q, ns)
		default:
			h.block(p, q, ns)
		}
		h.busy--
		switch h.rng.IntN(8) {
		case 0, 1:
			p.Sleep(h.rng.Int64N(300e6))
		case 2, 3, 4:
			p.Sleep(h.rng.Int64N(2e6))
		}
	}
}

// maybeAbort sends an Abort for a command that was just submitted, after a while.
func (h *Host) maybeAbort(q *hostQueue, c *command) {
	if h.rng.IntN(12) != 0 {
		return
	}
	cid := q.lastCID
	h.lab.Sim.After(h.rng.Int64N(1e6), func() {
		a := q.a
		if q.over || a.over || !a.admin.free() || q.commands[cid] != c || a.h.abortsOut >= 4 {
			return
		}
		h.aborts++
		h.abortsOut++
		var sqe nvme.SQE
		sqe.SetOpcode(nvme.AdminAbort)
		sqe.SetCDW(10, uint32(q.qid)|uint32(cid)<<16)
		a.admin.submit(sqe, nil, false, func(outcome) { h.abortsOut-- })
	})
}

// io runs one I/O command, which may be aborted.
func (h *Host) io(p *lab.Proc, q *hostQueue, sqe nvme.SQE, data []byte, toHost bool) (o outcome) {
	start := h.lab.Sim.Now()
	p.Wait(func(wake func()) {
		c := q.submit(sqe, data, toHost, func(got outcome) {
			if o = got; o.ok() {
				h.holdToCaps(&sqe, o, len(data), start)
			}
			wake()
		})
		h.maybeAbort(q, c)
	})
	o.sentNS = start
	switch {
	case o.lost:
		h.lostCommands++
	case o.status.Code() == nvme.AbortRequested:
		h.aborted++
	}
	return o
}

// ended tells the model how a write has ended, of which ok says that it has happened.
func (h *Host) ended(q *hostQueue, o outcome, r *register, w *write, durable bool) {
	now := h.lab.Sim.Now()
	switch {
	case o.lost:
		h.lost = append(h.lost, lostWrite{w: w, r: r, a: q.a, end: q.end.Peer(), atNS: now})
	case o.status.OK():
		r.acknowledge(w, now, durable)
	case o.status.Code() == nvme.AbortRequested, o.status.Code() == nvme.InvalidNamespaceOrFormat:
		r.drop(w) // these say that nothing was done
	default:
		r.fail(w, now)
	}
}

// expect judges a failure: without a reason for it, it is a violation.
func (h *Host) expect(ns *namespace, o outcome, what string, args ...any) {
	if o.lost || o.status.OK() || h.lab.mayFail(ns, o.status, o.sentNS) {
		return
	}
	h.lab.Violation("%s: %s: %v", h.name, fmt.Sprintf(what, args...), o.status)
}

// fillBlocks writes a stamp all over data.
func fillBlocks(data []byte, stamp uint64) {
	for i := 0; i < len(data); i += 8 {
		binary.LittleEndian.PutUint64(data[i:], stamp)
	}
}

// stampOf returns the stamp of a block; false: it has several.
func stampOf(block []byte) (stamp uint64, ok bool) {
	stamp = binary.LittleEndian.Uint64(block)
	for i := 8; i < len(block); i += 8 {
		if binary.LittleEndian.Uint64(block[i:]) != stamp {
			return 0, false
		}
	}
	return stamp, true
}

// contend writes the first blocks of one of the namespaces of blocks.
func (h *Host) contend(p *lab.Proc, q *hostQueue) {
	ns := h.lab.namespaces[h.rng.IntN(drives)]
	regs := ns.registers[:1+h.rng.IntN(4)]
	var sqe nvme.SQE
	sqe.SetNSID(ns.nsid)
	sqe.SetNLB(units.Blocks(len(regs)))
	sqe.SetOpcode(nvme.CmdWrite)
	h.writeStamp(p, q, sqe, ns, regs, !ns.volatile)
}

// writeStamp writes a new stamp to blocks.
func (h *Host) writeStamp(p *lab.Proc, q *hostQueue, sqe nvme.SQE, ns *namespace, regs []*register, durable bool) {
	stamp := h.lab.stamp()
	h.lab.writers[stamp] = q.a
	data := make([]byte, blockBytes*len(regs))
	fillBlocks(data, stamp)
	h.writeBlocks(p, q, sqe, ns, regs, data, stamp, durable)
}

// block does something to a few blocks.
func (h *Host) block(p *lab.Proc, q *hostQueue, ns *namespace) {
	n := 1 + h.rng.IntN(min(4, len(ns.registers)))
	if h.rng.IntN(40) == 0 {
		n = len(ns.registers) // beyond what fits a capsule
	}
	at := h.rng.IntN(len(ns.registers) - n + 1)
	regs := ns.registers[at : at+n]
	var sqe nvme.SQE
	sqe.SetNSID(ns.nsid)
	sqe.SetSLBA(units.LBA(at))
	sqe.SetNLB(units.Blocks(n))
	switch k := h.rng.IntN(20); {
	case k < 8:
		h.readBlocks(p, q, sqe, ns, regs, blockBytes*n, at)
	case k < 15:
		fua := !ns.volatile
		if h.rng.IntN(4) == 0 {
			sqe.SetCDW(12, sqe.CDW(12)|nvme.CDW12FUA)
			fua = true
		}
		sqe.SetOpcode(nvme.CmdWrite)
		h.writeStamp(p, q, sqe, ns, regs, fua)
	case k < 16:
		sqe.SetOpcode(nvme.CmdWriteZeroes)
		h.writeBlocks(p, q, sqe, ns, regs, nil, 0, !ns.volatile)
	case k < 18:
		var flush nvme.SQE
		flush.SetOpcode(nvme.CmdFlush)
		flush.SetNSID(ns.nsid)
		began := h.lab.Sim.Now()
		o := h.io(p, q, flush, nil, false)
		h.expect(ns, o, "flush of namespace %d", ns.nsid)
		if o.ok() {
			for _, r := range ns.registers {
				r.flushed(began, h.lab.Sim.Now())
			}
		}
	default:
		h.compareAndWrite(p, q, sqe, ns, at)
	}
}

func (h *Host) readBlocks(p *lab.Proc, q *hostQueue, sqe nvme.SQE, ns *namespace, regs []*register,
	length, at int) {
	sqe.SetOpcode(nvme.CmdRead)
	start := h.lab.Sim.Now()
	began := make([]*int64, len(regs))
	for i, r := range regs {
		began[i] = r.open(start)
	}
	data := make([]byte, length)
	o := h.io(p, q, sqe, data, true)
	h.expect(ns, o, "read of %d blocks at %d", len(regs), at)
	for i, r := range regs {
		r.close(began[i])
		if o.ok() {
			h.checkBlock(r, start, data[i*blockBytes:][:blockBytes])
		}
	}
}

// checkBlock holds a block that was read to the model.
func (h *Host) checkBlock(r *register, start int64, b []byte) {
	stamp, whole := stampOf(b)
	if !whole && !r.unknown(start) {
		h.lab.Violation("%s: %s holds a mixture of writes: %x", h.name, r.name, b[:64])
		return
	}
	if err := r.read(start, h.lab.Sim.Now(), func(w *write) bool { return w.stamp == stamp }); err != nil {
		h.lab.Violation("%s: a read of %s from %.3f returns %#x: %v", h.name, r.name, float64(start)/1e3, stamp, err)
	}
}

func (h *Host) writeBlocks(p *lab.Proc, q *hostQueue, sqe nvme.SQE, ns *namespace, regs []*register,
	data []byte, stamp uint64, durable bool) {
	writes := make([]*write, len(regs))
	for i, r := range regs {
		writes[i] = r.begin(stamp, 0, h.lab.Sim.Now(), h.name)
	}
	o := h.io(p, q, sqe, data, false)
	h.expect(ns, o, "write of %s to %s", regs[0].name, regs[len(regs)-1].name)
	for i, r := range regs {
		h.ended(q, o, r, writes[i], durable)
	}
}

// compareAndWrite runs a fused pair of Compare and Write of one block, with what was read there before.
func (h *Host) compareAndWrite(p *lab.Proc, q *hostQueue, sqe nvme.SQE, ns *namespace, at int) {
	r := ns.registers[at]
	sqe.SetNLB(1)
	read := sqe
	read.SetOpcode(nvme.CmdRead)
	old := make([]byte, blockBytes)
	start := h.lab.Sim.Now()
	began := r.open(start)
	o := h.io(p, q, read, old, true)
	r.close(began)
	h.expect(ns, o, "read before a compare-and-write")
	if !o.ok() || len(q.commands)+2 > q.depth || q.over {
		return
	}
	h.checkBlock(r, start, old)
	was, _ := stampOf(old)
	stamp := h.lab.stamp()
	h.lab.writers[stamp] = q.a
	data := make([]byte, blockBytes)
	fillBlocks(data, stamp)
	r = ns.registers[at] // the namespace may be another one by now
	start = h.lab.Sim.Now()
	began = r.open(start)
	defer r.close(began)
	w := r.begin(stamp, 0, start, h.name)
	var first, second outcome
	p.Wait(func(wake func()) {
		left := 2
		done := func(to *outcome) func(outcome) {
			return func(o outcome) {
				*to = o
				if left--; left == 0 {
					wake()
				}
			}
		}
		one, two := sqe, sqe
		one.SetOpcode(nvme.CmdCompare)
		one.SetFuse(nvme.FuseFirst)
		two.SetOpcode(nvme.CmdWrite)
		two.SetFuse(nvme.FuseSecond)
		q.submit(one, old, false, done(&first))
		q.submit(two, data, false, done(&second))
	})
	if first.status.Code() == nvme.CompareFailure {
		r.drop(w)
		return
	}
	second.sentNS = start
	if !second.lost && second.status.Code() != nvme.AbortedFailedFused {
		h.expect(ns, second, "compare-and-write of %s", r.name)
	}
	if second.ok() {
		if err := r.read(start, h.lab.Sim.Now(), func(o *write) bool { return o != w && o.stamp == was }); err != nil {
			h.lab.Violation("%s: a compare of %s finds %#x: %v", h.name, r.name, was, err)
		}
	}
	h.ended(q, second, r, w, !ns.volatile)
}
