package node

import (
	"jbofd/internal/nvme"
	"jbofd/internal/pipeline"
)

// capWindow is what a host has had done at a drive in a period in which its tenant's caps did not change. Each tenant
// of the lab has one host. Commands that were sent before the period do not count: they may have paid long ago.
type capWindow struct {
	beganNS int64
	// ios counts reads and writes of blocks, the others their bytes. largest is that of one command.
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

// restartCapWindows begins new periods: caps, or the node's clock, are about to change.
func (l *Lab) restartCapWindows() {
	for _, h := range l.Hosts {
		h.restartCapWindows()
	}
}

func (h *Host) restartCapWindows() {
	for i := range h.capWindows {
		h.capWindows[i] = capWindow{beganNS: h.lab.Sim.Now()}
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
// tenant. It looks at reads and writes of blocks alone: what a key-value store does for a command varies.
func (h *Host) holdToCaps(sqe *nvme.SQE, bytes int, startNS int64) {
	ns := h.lab.namespaces[sqe.NSID()-1]
	if ns.kv || sqe.Opcode() != nvme.CmdRead && sqe.Opcode() != nvme.CmdWrite {
		return
	}
	now, n, w := h.lab.Sim.Now(), int64(bytes), &h.capWindows[ns.disk]
	if now-w.beganNS > capWindowNS {
		*w = capWindow{beganNS: now}
	}
	if startNS < w.beganNS {
		return
	}
	w.ios++
	if sqe.Opcode() == nvme.CmdRead {
		w.readBytes += n
	} else {
		w.writtenBytes += n
	}
	w.largest = max(w.largest, n)
	seconds := float64(now-w.beganNS)/1e9*(1+capSkew) + capBurst
	caps := h.caps()
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
			h.lab.Violation("%s: %d %s at drive %d within %d µs, with a cap of %d a second", h.name, c.done, c.name,
				ns.disk, (now-w.beganNS)/1000, c.cap)
		}
	}
}
