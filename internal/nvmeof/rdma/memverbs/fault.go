package memverbs

import "jbofd/internal/nvmeof/rdma/verbs"

// Hold stops the data of a connection in both directions. Posted requests stay outstanding.
func (e *Endpoint) Hold() {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.held = true
}

// Release ends a Hold.
func (e *Endpoint) Release() {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.held = false
	e.net.activate(e, e.peer)
}

// HoldEvents keeps the endpoint's events from its user until ReleaseEvents, as a busy event channel does.
func (e *Endpoint) HoldEvents() {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.mute = true
}

// ReleaseEvents ends a HoldEvents.
func (e *Endpoint) ReleaseEvents() {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.mute = false
	e.net.activate(e)
}

// Passive reports that the endpoint is the end that was connected to.
func (e *Endpoint) Passive() bool { return e.passive }

// DropToRNR makes the next n messages for this endpoint fail as if it had no receive. Every attempt counts.
func (e *Endpoint) DropToRNR(n int) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.drops += n
}

// Cut breaks the connection. Both ends get Disconnected, either before or after an outstanding request fails with
// StatusRetryExceeded.
func (e *Endpoint) Cut() {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.lose()
	if e.peer != nil {
		e.peer.lose()
	}
}

// Silence breaks the connection without an event. Requests fail with StatusRetryExceeded; an end that posts no request
// does not learn of the failure.
func (e *Endpoint) Silence() {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	for _, e := range []*Endpoint{e, e.peer} {
		if e != nil {
			e.cut, e.outbox, e.parked = true, 0, false
			e.net.activate(e)
		}
	}
}

// Break makes the endpoint's queue pair fail, as a device error does. The event Fatal follows.
func (e *Endpoint) Break() {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if e.state == ready {
		e.fail()
		e.tells(verbs.Fatal)
	}
}

// lose makes one end lose the connection, where the connection manager notices the loss.
func (e *Endpoint) lose() {
	e.outbox = 0
	switch e.state {
	case idle:
		if e.passive {
			e.cut, e.left = true, true
			e.tells(verbs.Disconnected)
		}
	case connecting:
		e.ends(verbs.ErrUnreachable)
	case ready:
		e.cut, e.parked = true, false
		if e.acked < e.posted && e.net.coin() {
			e.tell = true
		} else {
			e.fail()
			e.tells(verbs.Disconnected)
		}
	case failed:
		e.cut = true
		e.tells(verbs.Disconnected)
	}
	e.net.activate(e, e.peer)
}

// removed handles the removal of the endpoint's device.
func (e *Endpoint) removed() {
	e.outbox = 0
	e.stalled = e.net.coin()
	e.ends(verbs.ErrDeviceRemoved)
	e.fail()
	e.tells(verbs.Removed)
	if p := e.peer; p != nil && !p.dev.gone {
		p.lose()
	}
}
