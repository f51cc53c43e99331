package nvmeof_test

import (
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/uuid"
)

var seed = flag.Uint64("seed", 0, "of the random tests; 0: the fixed seeds and a new one")

// seeds returns the seeds of a random test.
func seeds(t *testing.T, fixed uint64) (all []uint64) {
	t.Helper()
	if *seed != 0 {
		return []uint64{*seed}
	}
	for s := uint64(1); s <= fixed; s++ {
		all = append(all, s)
	}
	return append(all, uint64(time.Now().UnixNano()))
}

// TestNoEndIsReportedWhileCommandsAreInFlight does random things with associations of a few hosts and checks what hosts
// rely on: as long as commands from before a reset, shutdown or end are in flight, RDY is not 0, SHST does not say
// complete, and no Connect of the host succeeds. In the end everything drains, so every state has an exit.
func TestNoEndIsReportedWhileCommandsAreInFlight(t *testing.T) {
	for _, s := range seeds(t, 300) {
		m := &endModel{t: t, rng: rand.New(rand.NewPCG(s, 0)), rig: newRig(t),
			undrained: map[*nvmeof.Controller]uint64{},
			flushing:  map[*nvmeof.Controller]uint64{}, held: map[nvmeof.ConnID]endHost{}}
		m.slow = true
		for range 300 {
			m.step()
			m.check()
			if t.Failed() {
				break
			}
		}
		m.finish()
		if t.Failed() {
			t.Fatalf("-seed %d", s)
		}
	}
}

// endHost is a host that connects.
type endHost struct {
	nqn string
	id  byte
}

// endModel is a driver with slow drives, which knows what is in flight.
type endModel struct {
	*rig
	t   *testing.T
	rng *rand.Rand
	// undrained are fences whose commands are in flight, by the latest epoch; flushing the latest flushes.
	undrained, flushing map[*nvmeof.Controller]uint64
	held                map[nvmeof.ConnID]endHost
	// all are the controllers that have ever existed.
	all []*nvmeof.Controller
}

// carryOut records the machine's actions.
func (m *endModel) carryOut() {
	for _, a := range m.target.TakeActions() {
		switch a.Kind {
		case nvmeof.ActionFence:
			if a.Epoch != a.Controller.Epoch() {
				m.t.Errorf("fence below epoch %d, the controller is in %d", a.Epoch, a.Controller.Epoch())
			}
			m.undrained[a.Controller] = a.Epoch
		case nvmeof.ActionFlush:
			m.flushing[a.Controller] = a.Flush
		case nvmeof.ActionConnected:
			h, ok := m.held[a.Conn]
			if !ok {
				m.t.Errorf("an answer to connection %d, whose Connect is not held", a.Conn)
			}
			delete(m.held, a.Conn)
			m.connected(h, a.Connect)
		}
	}
}

// connected checks the outcome of an admin queue's Connect.
func (m *endModel) connected(h endHost, r *nvmeof.ConnectReply) {
	switch {
	case r.Status.OK():
		for c := range m.undrained {
			if c.HostNQN == h.nqn && c.HostID == (uuid.UUID{h.id}) && !m.alive(c) {
				m.t.Errorf("%v is let in while commands of its controller %d are in flight", h, c.ID)
			}
		}
		m.all = append(m.all, r.Controller)
	case r.Status != nvme.ConnectControllerBusy:
		m.t.Errorf("Connect: %v: %s", r.Status, r.Reason)
	}
}

func (m *endModel) alive(c *nvmeof.Controller) bool {
	return slices.Contains(m.target.Controllers(), c)
}

// any returns one of the live controllers, or nil.
func (m *endModel) any() *nvmeof.Controller {
	if live := m.target.Controllers(); len(live) > 0 {
		return live[m.rng.IntN(len(live))]
	}
	return nil
}

// pick returns a random key. It sorts by CNTLID first, so that the choice depends on the seed only.
func (m *endModel) pick(of map[*nvmeof.Controller]uint64) *nvmeof.Controller {
	var in []*nvmeof.Controller
	for _, c := range m.all {
		if _, ok := of[c]; ok {
			in = append(in, c)
		}
	}
	if len(in) == 0 {
		return nil
	}
	return in[m.rng.IntN(len(in))]
}

func (m *endModel) step() {
	defer m.carryOut()
	c := m.any()
	switch k := m.rng.IntN(12); {
	case k < 2 || c == nil:
		h := endHost{[]string{hostA, hostB}[m.rng.IntN(2)], byte(m.rng.IntN(2))}
		r := m.tryConnect(h.nqn, open, func(a *args) { a.data.SetHostID(uuid.UUID{h.id}) })
		if r.Held {
			m.held[m.last] = h
			return
		}
		m.connected(h, &r)
	case k < 5:
		r := m.tryConnect(c.HostNQN, open, func(a *args) { a.data.SetHostID(c.HostID) },
			queue(c, uint16(1+m.rng.IntN(4))))
		if _, draining := m.undrained[c]; r.Status.OK() && draining {
			m.t.Errorf("controller %d takes an I/O queue while it drains", c.ID)
		}
	case k < 8:
		cc := enable.WithEN(m.rng.IntN(3) > 0)
		if m.rng.IntN(4) == 0 {
			cc = cc.WithSHN(1 + uint8(m.rng.IntN(2)))
		}
		var e nvme.SQE
		e.Property().Init(nvme.FabricsPropertySet, nvme.PropCC)
		e.Property().SetVALUE(uint64(cc))
		m.target.Admin(m.now, nvmeof.AdminArgs{Controller: c, SQE: &e})
	case k < 9:
		if qs := c.Queues(); m.rng.IntN(3) == 0 {
			m.target.Disconnected(m.now, c, 0, qs[0])
		}
	case k < 10:
		if d := m.pick(m.undrained); d != nil {
			delete(m.undrained, d)
			m.target.Drained(m.now, d, d.Epoch())
		}
	case k < 11:
		if d := m.pick(m.flushing); d != nil {
			m.target.Flushed(d, m.flushing[d], m.rng.IntN(4) > 0)
			delete(m.flushing, d)
		}
	default:
		m.pass(m.rng.Int64N(5000) * ms)
	}
}

// pass lets time pass, and calls Expire whenever NextExpiry says so, as the target service does. At other times Expire
// must have nothing to do.
func (m *endModel) pass(ns int64) {
	end := m.now + ns
	for at, ok := m.target.NextExpiry(); ok && at <= end; at, ok = m.target.NextExpiry() {
		m.now = max(m.now, at)
		m.target.Expire(m.now, silent)
		m.carryOut()
	}
	m.now = end
	m.target.Expire(m.now, silent)
	if a := m.target.TakeActions(); len(a) > 0 {
		m.t.Errorf("Expire has something to do that NextExpiry did not tell of: %+v", a[0])
	}
}

func (m *endModel) check() {
	m.t.Helper()
	for _, c := range m.target.Controllers() {
		s := m.status(c)
		_, draining := m.undrained[c]
		if draining && !s.RDY() && !s.CFS() && s.SHST() == 0 {
			m.t.Errorf("controller %d: CSTS %#x while commands are in flight", c.ID, uint32(s))
		}
		if _, flushing := m.flushing[c]; (draining || flushing) && s.SHST() == 2 {
			m.t.Errorf("controller %d: SHST 10b with commands in flight or drives not flushed", c.ID)
		}
	}
}

// status reads CSTS without counting as activity of the host, which would hide idle limits from the test.
func (m *endModel) status(c *nvmeof.Controller) nvme.CSTS {
	var e nvme.SQE
	e.Property().Init(nvme.FabricsPropertyGet, nvme.PropCSTS)
	return nvme.CSTS(m.target.Admin(m.now, nvmeof.AdminArgs{Controller: c, SQE: &e}).Result)
}

// finish lets everything drain and fails if a state has no exit.
func (m *endModel) finish() {
	m.pass(14000 * ms)
	if len(m.held) > 0 {
		m.t.Errorf("Connects are held beyond the bound: %v", m.held)
	}
	for len(m.undrained) > 0 || len(m.flushing) > 0 {
		for c := m.pick(m.undrained); c != nil; c = m.pick(m.undrained) {
			delete(m.undrained, c)
			m.target.Drained(m.now, c, c.Epoch())
			m.carryOut()
		}
		for c := m.pick(m.flushing); c != nil; c = m.pick(m.flushing) {
			m.target.Flushed(c, m.flushing[c], true)
			delete(m.flushing, c)
			m.carryOut()
		}
	}
	for _, c := range m.target.Controllers() {
		m.slow = false
		m.setCC(c, 0)
		if s := m.status(c); s.RDY() {
			m.t.Errorf("controller %d: CSTS %#x after a reset of drained queues", c.ID, uint32(s))
		}
		m.setCC(c, enable)
		if s := m.status(c); s != nvme.CSTSRDY {
			m.t.Errorf("controller %d: CSTS %#x after an enable", c.ID, uint32(s))
		}
	}
	for _, h := range []endHost{{hostA, 0}, {hostA, 1}, {hostB, 0}, {hostB, 1}} {
		if r := m.tryConnect(h.nqn, open, func(a *args) { a.data.SetHostID(uuid.UUID{h.id}) }); !r.Status.OK() ||
			r.Held {
			m.t.Errorf("%v is not let in although nothing is in flight: %+v", h, r)
		}
	}
	m.take()
}
