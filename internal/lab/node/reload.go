package node

import (
	"errors"
	"fmt"

	"jbofd/internal/nvmeof/target"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// Fault model of reloads: none of their own. A reload comes at any time, also when a drive is slow or away. It removes
// a namespace, adds one, or changes the tenants and their caps. A namespace that was removed comes back with its data,
// or it is deleted and comes back as a new one.

// namespace is a namespace and the model of what it holds.
type namespace struct {
	name          string
	nsid          uint32
	disk          int
	offset, bytes int64
	kv            bool
	volatile      bool
	registers     []*register
	// there: it is published, if its drive and its store are there. erased: it was deleted, and nothing may be done to
	// its extent. goneNS is until when it was not there.
	there, erased bool
	goneNS        int64
	// damaged: parts of it cannot be read. A store of which something was damaged may fail any request, or not open.
	damaged bool
	store   store
}

// id is that of the namespace as it is now: a deleted one does not come back.
func (ns *namespace) id() uuid.UUID {
	return uuid.UUID{byte(ns.nsid), 7, byte(ns.store.lives), byte(ns.store.lives >> 8)}
}

// renew makes the namespace a new one, which holds nothing.
func (ns *namespace) renew() {
	was := ns.registers // commands under way have them
	ns.registers = nil
	for _, r := range was {
		ns.registers = append(ns.registers, r.renew())
	}
	ns.damaged = false
	ns.store = store{lives: ns.store.lives + 1}
}

// drawTenants draws the tenants of a configuration.
func (l *Lab) drawTenants() {
	l.tenants = nil
	if !l.traits.capped {
		return
	}
	for i, h := range l.Hosts {
		if l.rng.IntN(3) == 0 {
			continue // a tenant of its own
		}
		c := target.TenantConfig{Name: fmt.Sprintf("tenant%d", l.rng.IntN(2)+2*i), Hosts: []string{h.nqn},
			Settings: pipeline.Settings{Weight: 1 + l.rng.IntN(4)}}
		limit := func(least int64) int64 {
			if l.rng.IntN(2) == 0 {
				return 0
			}
			return least << l.rng.IntN(10)
		}
		c.Settings.Caps = pipeline.Caps{RWIOsPerSec: limit(50), RWBytesPerSec: limit(256 << 10),
			ReadBytesPerSec: limit(256 << 10), WriteBytesPerSec: limit(256 << 10)}
		l.tenants = append(l.tenants, c)
	}
}

// removeNamespace removes a namespace and brings it, or a new one, back.
func (l *Lab) removeNamespace() {
	ns := l.namespaces[l.rng.IntN(len(l.namespaces))]
	if !ns.there || l.Disks[ns.disk].Gone() {
		return
	}
	if ns.kv && l.traits.hangs && l.rng.IntN(2) == 0 {
		l.hang(ns.disk, ns.offset, ns.bytes)
		l.advance(l.rng.Int64N(300e6))
	}
	l.Sim.Tracef("%s is removed", ns.name)
	ns.there = false
	l.Node.publish()
	ns.store.open = nil
	if l.rng.IntN(2) == 0 {
		l.deleteNamespace(ns)
	}
	l.advance(l.rng.Int64N(300e6))
	if l.rng.IntN(2) == 0 {
		l.heal()
	}
	if ns.erased {
		l.holdsNothing(ns)
		ns.erased = false
		ns.renew()
		ns.damaged = ns.kv && l.areaDamaged
	}
	if ns.kv {
		if err := l.Node.openStore(ns); err != nil {
			if !l.mayStayClosed(ns, err) {
				l.Violation("%s does not open: %v", ns.name, err)
			}
			l.Sim.Tracef("%s does not open: %v", ns.name, err)
			return
		}
	}
	ns.there, ns.goneNS = true, l.Sim.Now()
	l.Sim.Tracef("%s is back", ns.name)
	l.Node.publish()
}

// deleteNamespace does what the operator asks for who deletes a namespace that was removed. The operator gives up when
// commands are in flight for too long, and tries again when the drive has failed: some of the data may be gone.
func (l *Lab) deleteNamespace(ns *namespace) {
	for {
		healthy := l.healthy()
		err := l.Node.publisher.Erase(l.Node.drives[ns.disk], units.DriveOffset(ns.offset),
			units.Bytes(ns.bytes), nil, nil)
		l.Sim.Tracef("%s is erased: %v", ns.name, err)
		if err == nil {
			break
		}
		if errors.Is(err, target.ErrInFlight) && !healthy {
			return
		}
		if !l.broken() || !l.advance(1e9) {
			l.Violation("%s cannot be erased: %v", ns.name, err)
			return
		}
		l.heal()
	}
	ns.erased = true
	for _, f := range l.Disks[ns.disk].Flights {
		l.notRemoved(ns.disk, &f.Request)
	}
	if l.Node.area != nil && ns.kv {
		l.Node.area.Forget(ns.id())
	}
}

// holdsNothing demands that an erased extent is zeroes.
func (l *Lab) holdsNothing(ns *namespace) {
	if l.traits.rotten {
		return // a misdirected write may have hit it
	}
	for i, b := range l.Disks[ns.disk].Visible[ns.offset:][:ns.bytes] {
		if b != 0 {
			l.Violation("%s was erased and holds %#x at %d", ns.name, b, i)
			return
		}
	}
}

// restart stops the node in order, under load, and starts it again. What was acknowledged is not lost, not even if the
// drives lose their power meanwhile, unless the node's process has ended before the drives were flushed.
func (l *Lab) restart(power bool) {
	l.stops++
	l.stopNS = l.Sim.Now()
	l.Sim.Tracef("the node stops, power loss %v", power)
	if !l.traits.sane && l.rng.IntN(2) == 0 { // so that much is under way when the associations end
		slow := int64(100e6) + l.rng.Int64N(2e9)
		l.sick(l.Sim.Now())
		for _, d := range l.Disks {
			d.Hold = func(*ssd.Request) int64 { return l.rng.Int64N(slow) }
		}
		l.contended = true
		l.advance(l.rng.Int64N(500e6))
	}
	if n := l.Node; !n.drain(l.rng.Int64N(1 + l.rng.Int64N(6e9))) {
		l.cut++
		l.Sim.Tracef("the node's process ends although a drive has not answered")
	} else if l.violation == "" {
		n.stop()
		for _, ns := range l.namespaces {
			for _, r := range ns.registers {
				if n.flushed[ns.disk] {
					r.flushed(n.flushedNS, l.Sim.Now())
				}
			}
		}
	}
	l.contended = false
	if l.violation == "" {
		l.startAgain(power)
	}
}

// stopping reports that a refusal may be due to a stop of the node.
func (l *Lab) stopping() bool { return l.stopNS != 0 && l.Sim.Now()-l.stopNS < answerNS }

// crash ends the node's process and starts it again.
func (l *Lab) crash(power bool) {
	l.crashes++
	l.Sim.Tracef("the node crashes, power loss %v", power)
	l.startAgain(power)
}

func (l *Lab) startAgain(power bool) {
	l.Node.kill(power)
	for _, ns := range l.namespaces {
		for _, r := range ns.registers {
			l.choices++
			r.crash(l.Sim.Now(), (power || l.Disks[ns.disk].Gone()) && !ns.kv, l.choices)
		}
		ns.store.open = nil
	}
	l.advance(l.rng.Int64N(100e6))
	l.heal()
	l.plugIn()
	l.drawTenants()
	var err error
	if l.Node, err = l.startNode(); err != nil {
		l.Violation("the node does not start again: %v", err)
	}
}
