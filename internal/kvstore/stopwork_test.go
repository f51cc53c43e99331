package kvstore_test

import (
	"math"
	"testing"

	"jbofd/internal/kvstore"
)

// background is work that a store does while nobody asks for anything.
type background struct {
	name string
	cfg  func(*kvstore.Config)
	// before brings the partition, of 60 chunks and with data, into the state in which begin begins the work. going
	// reports whether it has not ended.
	before, begin func(m *resizer)
	going         func(m *resizer) bool
	// drops: what is in the store afterwards is not what the model has.
	drops bool
}

var backgrounds = []background{
	{name: "shrinks", begin: func(m *resizer) { m.begins(32) }, going: (*resizer).resizes},
	{name: "grows", before: func(m *resizer) { m.resize(34, 0) }, begin: func(m *resizer) { m.begins(60) },
		going: (*resizer).resizes},
	{name: "grows, but not as far as its extent", before: func(m *resizer) { m.resize(34, 0) },
		begin: func(m *resizer) { m.begins(50) }, going: (*resizer).resizes},
	{name: "grows in steps", cfg: (*kvstore.Config).GrowInSteps, before: func(m *resizer) { m.resize(34, 0) },
		begin: func(m *resizer) { m.begins(60) }, going: (*resizer).resizes},
	{name: "sweeps", begin: func(m *resizer) {
		m.s.Submit(&kvstore.Request{Op: kvstore.Drop, Tag: dropTag, Range: kvstore.Range{Last: math.MaxUint64}})
	}, going: func(m *resizer) bool { return m.s.DropsLeft() > 0 || !m.s.Idle() }, drops: true},
	{name: "repairs", begin: func(m *resizer) { m.s.Audit(true) },
		going: func(m *resizer) bool { return m.s.AuditState().Running }},
	{name: "merges", begin: func(m *resizer) {
		for i := range m.keys {
			m.push(kvstore.Delete, i, 0)
		}
	}, going: func(m *resizer) bool { return !m.s.Idle() }},
}

// begins begins a resize.
func (m *resizer) begins(chunks int64) {
	m.t.Helper()
	if err := m.begin(chunks); err != nil {
		m.t.Fatal(err)
	}
}

func (m *resizer) resizes() bool { return m.s.ResizeState().Running }

// TestAStopInTheMiddleOfWorkEndsInOrder: a store is stopped while it does something in the background, at any moment of
// that. It has its last checkpoint soon, and what a restart finds is right.
func TestAStopInTheMiddleOfWorkEndsInOrder(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(2)) {
		for _, work := range backgrounds {
			t.Run(work.name, func(t *testing.T) {
				cfg := variant(seed, 60)
				if work.cfg != nil {
					work.cfg(&cfg)
				}
				base := newResizer(t, seed, cfg, 900, 2000)
				base.random(2500, 16)
				if work.before != nil {
					work.before(base)
				}
				base.settle()
				base.stop()
				stops := 0
				for steps, more := 0, true; more; steps += every(1 + steps/6) {
					m := &resizer{model: base.again(seed + uint64(steps)), extent: base.extent}
					if err := m.open(); err != nil {
						t.Fatal(err)
					}
					work.begin(m)
					if work.drops {
						reply := m.reply
						m.reply = func(p kvstore.Reply) {
							if p.Tag != dropTag {
								reply(p)
							}
						}
					}
					for range steps {
						if more = m.step(); !more {
							break
						}
					}
					more = more && work.going(m)
					began := m.now
					m.stop()
					if took := m.now - began; took > 1e9 {
						t.Errorf("after %d steps it takes %d ms", steps, took/1e6)
					}
					stops++
					if work.drops {
						if err := m.open(); err != nil {
							t.Fatal(err)
						}
						continue
					}
					m.reopen()
				}
				if t.Logf("%d stops", stops); stops < 5 {
					t.Errorf("it was stopped %d times only", stops)
				}
			})
		}
	}
}
