package memverbs

import "jbofd/internal/nvmeof/rdma/verbs"

// Hold keeps back the data of a connection, in both directions; what is posted stays outstanding.
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

// DropToRNR lets the next n messages for this endpoint meet no receive, each attempt counted.
func (e *Endpoint) DropToRNR(n int) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.drops += n
}

// Cut breaks the connection: both ends get Disconnected, before or after an outstanding request fails with
// StatusRetryExceeded.
func (e *Endpoint) Cut() {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.lose()
	if e.peer != nil {
		e.peer.lose()
	}
}

// Silence breaks the connection without a word: requests fail with StatusRetryExceeded, and who
// posts none learns nothing.
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

// Break lets the endpoint's queue pair fail, as by an error of the device: Fatal follows.
func (e *Endpoint) Break() {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if e.state == ready {
		e.fail()
		e.tells(verbs.Fatal)
	}
}

// lose is the loss of a connection at one end, where the connection manager notices it.
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

// removed is the loss of the endpoint's device.
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
