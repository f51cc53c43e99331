package memverbs

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"slices"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// state is the state of a connection and of its queue pair.
type state uint8

const (
	// idle: not connected. Receives may be posted already.
	idle state = iota
	// connecting: the request was sent and not answered.
	connecting
	// ready: this side may send; the peer may not be ready yet.
	ready
	// failed: the queue pair is in the error state. Its outstanding requests are flushed.
	failed
	closed
)

// message is a set of messages of the connection manager, one bit for each.
type message uint8

// Messages in the order in which one side sends them.
const (
	request message = 1 << iota
	accept
	readyToUse
	reject
	bye
)

// Endpoint implements verbs.Endpoint and holds the queue pair. The network's mu guards all fields.
type Endpoint struct {
	net *Network
	dev *Device

	local, remote netip.AddrPort
	state         state
	// peer is the other end; nil until the request has reached it.
	peer *Endpoint
	// passive: the endpoint is an incoming request. answered: the user called Accept or Reject. counted:
	// Provider.Counts includes the endpoint.
	passive, answered, counted bool
	// begun: the request was sent. result is the reason why it failed.
	begun  bool
	result error
	// drained is closed by fail.
	drained chan struct{}
	// left: the peer closed its end before the request was answered.
	left               bool
	params, peerParams verbs.Params
	rejectData         []byte

	// outbox holds the messages that were sent and have not arrived.
	outbox message
	// events and told are bit sets indexed by verbs.Event: events not yet reported, and events that were or will be
	// reported.
	events, told uint8
	onEvent      func(verbs.Event)
	calling      bool

	// place is the index in Network.active, or -1. delay is the number of turns that the endpoint skips.
	place, delay int

	// held: no data moves. mute: no event is reported. cut: nothing reaches the peer. tell: a failure of the queue pair
	// is reported as lost connection. stalled: nothing is flushed. drops is the number of messages that will still be
	// treated as if there was no receive.
	held, mute, cut, tell, stalled bool
	drops                          int

	queuePair
	stats Stats
}

var (
	_ verbs.Endpoint = (*Endpoint)(nil)

	errNoQP = errors.New("memverbs: the endpoint has no queue pair")
	errUsed = errors.New("memverbs: the endpoint has been used")
)

func newEndpoint(d *Device, local, remote netip.AddrPort) *Endpoint {
	e := &Endpoint{net: d.provider.net, dev: d, local: local, remote: remote, place: -1, counted: true,
		drained: make(chan struct{})}
	e.net.endpoints = append(e.net.endpoints, e)
	return e
}

// Device implements verbs.Endpoint.
func (e *Endpoint) Device() verbs.Device { return e.dev }

// Local implements verbs.Endpoint.
func (e *Endpoint) Local() netip.AddrPort { return e.local }

// Remote implements verbs.Endpoint.
func (e *Endpoint) Remote() netip.AddrPort { return e.remote }

// Peer implements verbs.Endpoint.
func (e *Endpoint) Peer() verbs.Params {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	return e.peerParams
}

// OnEvent implements verbs.Endpoint.
func (e *Endpoint) OnEvent(f func(verbs.Event)) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.onEvent = f
	e.net.activate(e)
}

// tells queues an event for the user, each kind once.
func (e *Endpoint) tells(v verbs.Event) {
	if bit := uint8(1) << v; e.told&bit == 0 {
		e.told |= bit
		e.events |= bit
		e.net.activate(e)
	}
}

// callUser reports the first queued event. It releases the lock during the call.
func (e *Endpoint) callUser() {
	v := verbs.Event(bits.TrailingZeros8(e.events))
	e.events &^= 1 << v
	e.calling = true
	func() {
		f := e.onEvent
		e.net.mu.Unlock()
		defer e.net.mu.Lock()
		f(v)
	}()
	e.calling = false
	e.net.changed.Broadcast()
}

// say sends a message of the connection manager.
func (e *Endpoint) say(m message) {
	if !e.dev.gone && !e.cut {
		e.outbox |= m
		e.net.activate(e)
	}
}

// pad extends private data with zeroes to the length of its field on the wire.
func (n *Network) pad(data []byte, length int) []byte {
	if n.cfg.ExactPrivateData {
		return slices.Clone(data)
	}
	return append(make([]byte, 0, length), append(slices.Clone(data), make([]byte, length-len(data))...)...)
}

// check validates parameters against the limits of the device and of the wire format.
func (e *Endpoint) check(p verbs.Params, most int) error {
	a := &e.dev.attr
	switch {
	case e.dev.gone:
		return verbs.ErrDeviceRemoved
	case !e.hasQP:
		return errNoQP
	case len(p.PrivateData) > most:
		return fmt.Errorf("memverbs: %d bytes of private data, at most %d are possible", len(p.PrivateData), most)
	case p.ResponderResources > a.MaxResponderResources:
		return limit("responder resources", int(p.ResponderResources), int(a.MaxResponderResources))
	case p.InitiatorDepth > a.MaxInitiatorDepth:
		return limit("RDMA READs", int(p.InitiatorDepth), int(a.MaxInitiatorDepth))
	case p.RetryCount > 7 || p.RNRRetryCount > 7:
		return fmt.Errorf("memverbs: RetryCount %d, RNRRetryCount %d: at most 7 are possible", p.RetryCount,
			p.RNRRetryCount)
	}
	return nil
}

// Begin sends the connection request and does not wait for the answer; a later Connect waits for it. Tests use it to
// run both ends in one goroutine.
func (e *Endpoint) Begin(p verbs.Params) error {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	return e.begin(p)
}

func (e *Endpoint) begin(p verbs.Params) error {
	if e.passive || e.begun || e.state != idle {
		return errUsed
	}
	if err := e.check(p, verbs.MaxRequestData); err != nil {
		return err
	}
	p.PrivateData = slices.Clone(p.PrivateData)
	e.params, e.begun, e.state = p, true, connecting
	e.say(request)
	return nil
}

// Connect implements verbs.Endpoint. After Begin it only waits for the answer.
func (e *Endpoint) Connect(ctx context.Context, p verbs.Params) error {
	n := e.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if !e.begun {
		if err := e.begin(p); err != nil {
			return err
		}
	}
	defer context.AfterFunc(ctx, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.changed.Broadcast()
	})()
	if !n.await(&n.changed, func() bool { return e.state != connecting || ctx.Err() != nil }) {
		return ErrQuiet
	}
	if e.state == connecting {
		e.abandon()
		e.result = ctx.Err()
	}
	if e.result == nil && e.state == closed {
		return net.ErrClosed
	}
	return e.result
}

// abandon gives up a connection that the peer has not accepted.
func (e *Endpoint) abandon() {
	e.state = idle
	if e.outbox&request != 0 {
		e.outbox &^= request
		return
	}
	e.say(bye)
}

// ends records the reason why a connection request failed.
func (e *Endpoint) ends(err error) {
	if e.state == connecting {
		e.state, e.result = idle, err
		e.net.changed.Broadcast()
	}
}

// Accept implements verbs.Endpoint.
func (e *Endpoint) Accept(p verbs.Params) error {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if !e.passive || e.answered || e.state == closed {
		return errUsed
	}
	if err := e.check(p, verbs.MaxAcceptData); err != nil {
		return err
	}
	p.PrivateData = slices.Clone(p.PrivateData)
	e.params, e.answered, e.state, e.depth = p, true, ready, p.InitiatorDepth
	if e.left {
		e.fail()
		return nil
	}
	e.say(accept)
	return nil
}

// Reject implements verbs.Endpoint.
func (e *Endpoint) Reject(private []byte) error {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if !e.passive || e.answered || e.state == closed {
		return errUsed
	}
	if len(private) > verbs.MaxRejectData {
		return fmt.Errorf("memverbs: %d bytes of private data, at most %d are possible", len(private),
			verbs.MaxRejectData)
	}
	e.answered, e.rejectData = true, slices.Clone(private)
	e.say(reject)
	return nil
}

// Drained implements verbs.Endpoint.
func (e *Endpoint) Drained() <-chan struct{} { return e.drained }

// Disconnect implements verbs.Endpoint. This end may get an event Disconnected as well.
func (e *Endpoint) Disconnect() error {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.disconnect()
	return nil
}

func (e *Endpoint) disconnect() {
	switch {
	case e.state == connecting:
		e.abandon()
		e.net.changed.Broadcast()
	case e.state == ready, e.state == failed && e.told&(1<<verbs.Disconnected) == 0:
		e.say(bye)
		e.fail()
	}
}

// Close implements verbs.Endpoint. It waits until a running call of OnEvent's function has returned.
func (e *Endpoint) Close() error {
	n := e.net
	n.mu.Lock()
	defer n.mu.Unlock()
	e.close()
	for n.cfg.Live && e.calling {
		n.changed.Wait()
	}
	return nil
}

func (e *Endpoint) close() {
	if e.state == closed {
		return
	}
	if e.passive && !e.answered {
		e.say(reject)
	} else {
		e.disconnect()
	}
	if e.hasQP {
		e.destroyQP()
	}
	e.state, e.events = closed, 0
	e.net.endpoints = slices.DeleteFunc(e.net.endpoints, func(o *Endpoint) bool { return o == e })
	if e.counted {
		e.dev.provider.counts.Endpoints--
	}
	e.net.activate(e, e.peer)
}

// arrive delivers the first message of the outbox to the other end.
func (e *Endpoint) arrive() {
	m := e.outbox & -e.outbox
	e.outbox &^= m
	p := e.peer
	switch m {
	case request:
		e.arriveRequest()
	case accept:
		if p.state == connecting {
			p.state, p.peerParams = ready, e.params
			p.peerParams.PrivateData = e.net.pad(e.params.PrivateData, verbs.MaxAcceptData)
			p.depth = min(p.params.InitiatorDepth, e.params.ResponderResources)
			p.say(readyToUse)
			e.net.activate(e, p)
			e.net.changed.Broadcast()
		}
	case readyToUse:
		if p.state == ready {
			p.tells(verbs.Established)
		}
	case reject:
		p.ends(&verbs.RejectedError{Reason: consumerDefined, PrivateData: e.net.pad(e.rejectData, verbs.MaxRejectData)})
	case bye:
		if p == nil || p.state == closed {
			return
		}
		p.left = true
		p.tells(verbs.Disconnected)
		if p.state == ready {
			p.fail()
		}
		if e.state != closed && e.net.coin() {
			e.tells(verbs.Disconnected)
		}
	}
}

// consumerDefined is the reject reason that the connection manager reports if the target itself rejects.
const consumerDefined = 28

func (e *Endpoint) arriveRequest() {
	var l *listener
	if d := e.net.deviceAt(e.remote.Addr()); d != nil {
		l = d.provider.listenerFor(d, e.remote.Port())
	}
	switch {
	case l == nil:
		e.ends(fmt.Errorf("connect to %v: nobody listens: %w", e.remote, verbs.ErrUnreachable))
	case len(l.queue) >= l.backlog:
		e.ends(&verbs.RejectedError{Reason: consumerDefined, PrivateData: e.net.pad(nil, verbs.MaxRejectData)})
	default:
		d := e.net.deviceAt(e.remote.Addr())
		p := newEndpoint(d, e.remote, e.local)
		p.passive, p.counted = true, false
		p.peer, e.peer = e, p
		p.peerParams = e.params
		p.peerParams.PrivateData = e.net.pad(e.params.PrivateData, verbs.MaxRequestData)
		l.queue = append(l.queue, p)
		e.net.changed.Broadcast()
	}
}
