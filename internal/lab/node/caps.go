package node

import (
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// Caps are checked twice. Hosts count what they get: reads and writes of blocks, and Retrieves. What a store does for a
// Store varies, and tenants share its writes; so drives' policies count, too, what the caps of each tenant admit,
// whoever has asked for it (see payers). What hosts have had done must have been charged to them.

// capWindow is what a host has had done at a drive in a period in which its tenant's caps did not change. Each tenant
// of the lab has one host. Commands that were sent before the period do not count: they may have paid long ago.
type capWindow struct {
	beganNS int64
	// ios counts reads and writes, the others their bytes. largest is that of one command.
	ios, readBytes, writtenBytes, largest int64
}

const (
	// capWindowNS is how long a period is at most, so that one in which the host was idle hides no later excess.
	capWindowNS = 1e9
	// capBurst is the part of a second whose tokens a tenant may have saved: 20 ms, as docs/operations.md says.
	capBurst = 0.02
	// capSkew is more than the fraction by which the node's clock is fast.
	capSkew = 0.021
)

// add counts a command that reads and writes so many bytes.
func (w *capWindow) add(read, written int64) {
	w.ios++
	w.readBytes += read
	w.writtenBytes += written
	w.largest = max(w.largest, read+written)
}

// excess returns what has exceeded the caps in the period: its name, how much of it there was, and the cap. The name is
// empty if nothing has.
func (w *capWindow) excess(nowNS int64, caps pipeline.Caps) (name string, done, limit int64) {
	seconds := float64(nowNS-w.beganNS)/1e9*(1+capSkew) + capBurst
	for _, c := range []struct {
		name      string
		cap       int64 // a second; 0: none
		done, one int64
	}{
		{"commands", caps.RWIOsPerSec, w.ios, 1},
		{"bytes", caps.RWBytesPerSec, w.readBytes + w.writtenBytes, w.largest},
		{"bytes of reads", caps.ReadBytesPerSec, w.readBytes, w.largest},
		{"bytes of writes", caps.WriteBytesPerSec, w.writtenBytes, w.largest},
	} {
		// A command may begin as soon as the cap has paid for those before it, so that the latest one has paid nothing.
		if c.cap > 0 && float64(c.done-c.one) > float64(c.cap)*seconds {
			return c.name, c.done, c.cap
		}
	}
	return "", 0, 0
}

// restartCapWindows begins new periods: caps, or the node's clock, are about to change.
func (l *Lab) restartCapWindows() {
	for _, h := range l.Hosts {
		for i := range h.capWindows {
			h.capWindows[i] = capWindow{beganNS: l.Sim.Now()}
		}
	}
	if l.Node != nil {
		for i := range l.Node.payers {
			clear(l.Node.payers[i].windows)
		}
	}
}

// caps are those of the host's tenant.
func (h *Host) caps() pipeline.Caps {
	for _, t := range h.lab.tenants {
		if t.Hosts[0] == h.nqn {
			return t.Settings.Caps
		}
	}
	return pipeline.Caps{}
}

// holdToCaps demands that a command that was sent at startNS, and has succeeded, is within the caps of the host's
// tenant, and that its data was charged to hosts. For a Retrieve the value was read from the store's drive, unless it
// was swapped.
func (h *Host) holdToCaps(sqe *nvme.SQE, o outcome, bytes int, startNS int64) {
	ns := h.lab.namespaces[sqe.NSID()-1]
	var read, written int64
	switch op := sqe.Opcode(); {
	case !ns.kv && op == nvme.CmdRead:
		read = int64(bytes)
	case !ns.kv && op == nvme.CmdWrite, ns.kv && op == nvme.CmdKVStore:
		written = int64(bytes)
	case ns.kv && op == nvme.CmdKVRetrieve:
		read = min(int64(bytes), int64(uint32(o.result)))
	default:
		return
	}
	if startNS >= h.lab.Node.startedNS { // else it is an answer of the node's last life
		h.lab.Node.use(read, written)
	}
	now, w := h.lab.Sim.Now(), &h.capWindows[ns.disk]
	if now-w.beganNS > capWindowNS {
		*w = capWindow{beganNS: now}
	}
	if startNS < w.beganNS || ns.kv && (written > 0 || h.lab.traits.swaps) {
		return
	}
	w.add(read, written)
	if name, done, limit := w.excess(now, h.caps()); name != "" {
		h.lab.Violation("%s: %d %s at drive %d within %d µs, with a cap of %d a second", h.name, done, name, ns.disk,
			(now-w.beganNS)/1000, limit)
	}
}

// payers is a drive's policy, which gets an I/O as soon as the caps of its tenant admit it. It counts them.
type payers struct {
	pipeline.Policy
	n    *Node
	disk int
	// windows are what the tenants with caps have had admitted.
	windows map[tenant.ID]*capWindow
}

// Enqueue implements pipeline.Policy.
func (p *payers) Enqueue(nowNS int64, io pipeline.IO) {
	p.Policy.Enqueue(nowNS, io)
	var read, written int64
	switch {
	case io.Op == pipeline.CompareWrite: // its read is charged, and does not wait for the cap of reads
		p.n.paidRead += io.LenBytes
		written = io.LenBytes
	case io.Op.Class() == pipeline.ReadClass:
		read = io.LenBytes
	case io.Op.Class() == pipeline.WriteClass:
		written = io.LenBytes
	}
	if io.Tenant > target.Background {
		p.n.paidRead += read
		p.n.paidWritten += written
	}
	caps, capped := p.n.caps[io.Tenant]
	if !capped {
		return
	}
	now, w := p.n.lab.Sim.Now(), p.windows[io.Tenant]
	if w == nil || now-w.beganNS > capWindowNS {
		w = &capWindow{beganNS: now}
		p.windows[io.Tenant] = w
	}
	w.add(read, written)
	if name, done, limit := w.excess(now, caps); name != "" {
		p.n.lab.Violation("drive %d: tenant %d has had %d %s admitted within %d µs, with a cap of %d a second", p.disk,
			io.Tenant, done, name, (now-w.beganNS)/1000, limit)
	}
}

// use demands that hosts have paid for data that they have read and written.
func (n *Node) use(read, written int64) {
	n.paidRead -= read
	n.paidWritten -= written
	if n.paidRead < 0 || n.paidWritten < 0 {
		n.lab.Violation("hosts have read %d bytes and written %d bytes more than they were charged for",
			max(-n.paidRead, 0), max(-n.paidWritten, 0))
	}
}

// noteCaps notes the caps of the tenants by number.
func (n *Node) noteCaps() {
	n.caps = map[tenant.ID]pipeline.Caps{}
	for _, t := range n.service.Tenants() {
		if t.Configured {
			n.caps[t.Number] = t.Settings.Caps
		}
	}
}
