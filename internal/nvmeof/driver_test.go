package nvmeof_test

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/uuid"
)

// TestNoConnectionOfADriverOutlivesItsEnd simulates a driver whose connections carry commands, are lost at different
// times, and may be visibly lost before the machine is told. It checks what TestNoEndIsReportedWhileCommandsAreInFlight
// checks, and besides: no Connect of a host succeeds while a queue that was lost earlier has commands in flight; a
// Connect is held no longer than the quiesce time, and NextExpiry reports that time; in the end no budget is in use and
// no Connect is held.
func TestNoConnectionOfADriverOutlivesItsEnd(t *testing.T) {
	for _, s := range seeds(t, 300) {
		d := newDriver(t, s)
		for range 400 {
			d.step()
			d.settle()
			if t.Failed() {
				break
			}
		}
		if !t.Failed() {
			d.finish()
		}
		if t.Failed() {
			t.Fatalf("-seed %d", s)
		}
	}
}

// driverLimit is the limit of controllers of the driver's target.
const driverLimit = 12

// driver is a driver of the machine.
type driver struct {
	t      *testing.T
	rng    *rand.Rand
	target *nvmeof.Target
	now    int64
	last   nvmeof.ConnID
	conns  map[nvmeof.ConnID]*driverConn
	// fences are those that have not drained, by the latest epoch; flushes are those that have not completed.
	fences, flushes map[*nvmeof.Controller]uint64
}

// driverConn is a connection of a driver.
type driverConn struct {
	id   nvmeof.ConnID
	host endHost
	sub  string
	ctrl *nvmeof.Controller // nil before Connect has succeeded
	qid  uint16
	// epoch is the controller's epoch in which the queue was connected. busy: commands are in flight.
	epoch uint64
	busy  bool
	// lost: the host has closed it. shut: the target closes it. leaving: Disconnect waits for what is in flight.
	lost, shut, leaving bool
	// lostBefore is the first connection that was made after the loss.
	lostBefore nvmeof.ConnID
	// heldNS is when its Connect began to be held, for one or several reasons; 0: it is not held.
	heldNS int64
}

func newDriver(t *testing.T, seed uint64) *driver {
	r := newRig(t, func(c *nvmeof.Config) { c.MaxControllers = driverLimit })
	return &driver{t: t, rng: rand.New(rand.NewPCG(seed, 1)), target: r.target, now: 1,
		conns:  map[nvmeof.ConnID]*driverConn{},
		fences: map[*nvmeof.Controller]uint64{}, flushes: map[*nvmeof.Controller]uint64{}}
}

// some returns one of the connections that satisfy ok, or nil. The choice depends on the seed only.
func (d *driver) some(ok func(*driverConn) bool) *driverConn {
	var in []*driverConn
	for _, id := range slices.Sorted(maps.Keys(d.conns)) {
		if c := d.conns[id]; ok(c) {
			in = append(in, c)
		}
	}
	if len(in) == 0 {
		return nil
	}
	return in[d.rng.IntN(len(in))]
}

func (d *driver) step() {
	admin := func(c *driverConn) bool { return c.ctrl != nil && c.qid == 0 && !c.lost && !c.shut }
	io := func(c *driverConn) bool { return c.ctrl != nil && c.qid != 0 && !c.lost && !c.shut && !c.leaving }
	switch k := d.rng.IntN(20); {
	case k < 4:
		h := endHost{[]string{hostA, hostB}[d.rng.IntN(2)], byte(d.rng.IntN(2))}
		sub := open
		if d.rng.IntN(4) == 0 {
			sub = shut
		}
		d.connect(&driverConn{host: h, sub: sub}, nil)
	case k < 7:
		if a := d.some(admin); a != nil {
			d.connect(&driverConn{host: a.host, sub: a.sub, qid: uint16(1 + d.rng.IntN(4))}, a.ctrl)
		}
	case k < 10:
		if c := d.some(io); c != nil && c.epoch == c.ctrl.Epoch() {
			c.busy = true
		}
	case k < 12:
		if c := d.some(func(c *driverConn) bool { return c.busy }); c != nil {
			c.busy = false
		}
	case k < 14:
		if c := d.some(func(c *driverConn) bool { return !c.lost && !c.shut }); c != nil {
			c.lost, c.lostBefore = true, d.last+1
		}
	case k < 15:
		if c := d.some(io); c != nil {
			c.leaving = true
		}
	case k < 17:
		if a := d.some(admin); a != nil {
			cc := enable.WithEN(d.rng.IntN(3) > 0)
			if d.rng.IntN(4) == 0 {
				cc = cc.WithSHN(1 + uint8(d.rng.IntN(2)))
			}
			d.admin(a, cc)
		}
	case k < 18:
		d.apply()
	default:
		d.pass(d.rng.Int64N(3000) * ms)
	}
	d.reap(d.rng.IntN(3) == 0)
}

func (d *driver) admin(a *driverConn, cc nvme.CC) {
	var e nvme.SQE
	e.Property().Init(nvme.FabricsPropertySet, nvme.PropCC)
	e.Property().SetVALUE(uint64(cc))
	d.target.Admin(d.now, nvmeof.AdminArgs{Controller: a.ctrl, SQE: &e, Lost: d.lost})
}

// apply lets another host into the closed subsystem, or none, or removes it.
func (d *driver) apply() {
	s := testState()
	switch d.rng.IntN(4) {
	case 0:
		s.Subsystems = s.Subsystems[:1]
	case 1:
		s.Subsystems[1].Hosts = []string{hostB}
	case 2:
		s.Subsystems[0].Namespaces = s.Subsystems[0].Namespaces[:1]
	}
	d.target.Apply(s)
}

// connect sends the Connect of c, an I/O queue of ctrl unless that is nil.
func (d *driver) connect(c *driverConn, ctrl *nvmeof.Controller) {
	d.last++
	c.id = d.last
	d.conns[c.id] = c
	var e nvme.SQE
	var data nvme.ConnectData
	e.Connect().Init()
	e.Connect().SetSQSIZE(31)
	e.Connect().SetQID(c.qid)
	e.Connect().SetKATO(uint32(d.rng.IntN(2)) * 60_000)
	data.SetHostNQN(c.host.nqn)
	data.SetSubNQN(c.sub)
	data.SetHostID(uuid.UUID{c.host.id})
	data.SetCNTLID(nvme.CNTLIDDynamic)
	if ctrl != nil {
		data.SetCNTLID(ctrl.ID)
	}
	r := d.target.Connect(d.now, nvmeof.ConnectArgs{Conn: c.id, Port: ioPort, Peer: netip.Addr{}, SQE: &e, Data: &data,
		Lost: d.lost})
	d.connected(c, &r)
}

// lost is what a driver can see of a connection before it tells the machine.
func (d *driver) lost(id nvmeof.ConnID) bool {
	c := d.conns[id]
	return c != nil && (c.lost || c.shut)
}

func (d *driver) connected(c *driverConn, r *nvmeof.ConnectReply) {
	switch {
	case r.Held:
		c.heldNS = d.now
		return
	case !r.Status.OK():
		c.lost, c.heldNS = true, 0 // the host gives up
		return
	}
	c.ctrl, c.epoch = r.Controller, r.Controller.Epoch()
	if c.qid == 0 {
		for _, o := range d.conns {
			if !o.busy || o.host != c.host || o.sub != c.sub {
				continue
			}
			if _, alive := o.ctrl.QueueConn(0); !alive || o.lost && o.lostBefore <= c.id {
				d.t.Errorf("%v is let in by connection %d while commands of connection %d, queue %d of controller %d, "+
					"are in flight: %+v", c.host, c.id, o.id, o.qid, o.ctrl.ID, *o)
			}
		}
	}
	c.heldNS = 0
}

// reap reports to the machine connections that have ended and have nothing in flight: all of them, or a random part.
func (d *driver) reap(all bool) {
	for _, id := range slices.Sorted(maps.Keys(d.conns)) {
		c := d.conns[id]
		switch {
		case c.busy || !all && d.rng.IntN(3) > 0:
		case c.lost || c.shut:
			delete(d.conns, id)
			if c.ctrl == nil {
				d.target.CancelConnect(id)
			} else {
				d.target.Disconnected(d.now, c.ctrl, c.qid, id)
			}
		case c.leaving:
			c.lost = true
			d.target.Disconnected(d.now, c.ctrl, c.qid, id)
		}
		d.carryOut()
	}
}

func (d *driver) carryOut() {
	for actions := d.target.TakeActions(); len(actions) > 0; actions = d.target.TakeActions() {
		for _, a := range actions {
			c := d.conns[a.Conn]
			switch a.Kind {
			case nvmeof.ActionFence:
				d.fences[a.Controller] = a.Epoch
			case nvmeof.ActionFlush:
				d.flushes[a.Controller] = a.Flush
			case nvmeof.ActionClose:
				if c != nil {
					c.shut = true
				}
			case nvmeof.ActionConnected:
				if c == nil || c.heldNS == 0 {
					d.t.Errorf("an answer to connection %d, whose Connect is not held", a.Conn)
					continue
				}
				d.connected(c, a.Connect)
			}
		}
		for c, epoch := range d.fences {
			if !d.inFlight(c, epoch) {
				delete(d.fences, c)
				d.target.Drained(d.now, c, epoch)
			}
		}
	}
	for c, epoch := range d.fences {
		if !d.inFlight(c, epoch) {
			delete(d.fences, c)
			d.target.Drained(d.now, c, epoch)
			d.carryOut()
			return
		}
	}
}

func (d *driver) inFlight(c *nvmeof.Controller, before uint64) bool {
	for _, o := range d.conns {
		if o.ctrl == c && o.busy && o.epoch < before {
			return true
		}
	}
	return false
}

// settle does what is due by now.
func (d *driver) settle() {
	d.carryOut()
	for c, n := range d.flushes {
		if d.rng.IntN(3) == 0 {
			delete(d.flushes, c)
			d.target.Flushed(c, n, d.rng.IntN(4) > 0)
		}
	}
	d.pass(0)
	for _, c := range d.conns {
		if c.heldNS != 0 && d.now-c.heldNS > 2*6000*ms {
			d.t.Errorf("the Connect of connection %d is held for %d ms", c.id, (d.now-c.heldNS)/ms)
		}
	}
}

// pass lets time pass, and calls Expire whenever NextExpiry says so, as the target service does. At other times Expire
// must have nothing to do.
func (d *driver) pass(ns int64) {
	end := d.now + ns
	for at, ok := d.target.NextExpiry(); ok && at <= end; at, ok = d.target.NextExpiry() {
		d.now = max(d.now, at)
		d.target.Expire(d.now, func(*nvmeof.Controller) int64 { return 0 })
		d.carryOut()
	}
	d.now = end
	d.target.Expire(d.now, func(*nvmeof.Controller) int64 { return 0 })
	if a := d.target.TakeActions(); len(a) > 0 {
		d.t.Errorf("Expire has something to do that NextExpiry did not tell of: %+v", a[0])
	}
}

// finish lets all commands end and all hosts disconnect.
func (d *driver) finish() {
	for _, c := range d.conns {
		c.busy = false
	}
	d.carryOut()
	d.reap(true)
	for _, c := range d.conns {
		if c.heldNS != 0 {
			d.t.Errorf("the Connect of connection %d is held although nothing is in flight", c.id)
		}
		c.lost = true
	}
	for len(d.conns) > 0 {
		d.reap(true)
		d.settle()
	}
	if n := len(d.target.Controllers()); n != 0 {
		d.t.Errorf("%d controllers are left", n)
	}
	for i := range driverLimit + 1 {
		c := &driverConn{host: endHost{hostA, byte(i)}, sub: open}
		d.connect(c, nil)
		if got, want := c.ctrl != nil, i < driverLimit; got != want {
			d.t.Errorf("controller %d of %d: let in is %v", i+1, driverLimit, got)
		}
	}
}
