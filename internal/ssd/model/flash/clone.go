package flash

import "slices"

// Clone returns a copy of the drive with all its commands in flight. Cloning a preconditioned drive is much faster than
// preconditioning another one.
func (d *Drive) Clone() *Drive {
	c := *d
	c.chanNS, c.dies = slices.Clone(d.chanNS), slices.Clone(d.dies)
	c.reqs, c.parts, c.due.s = slices.Clone(d.reqs), slices.Clone(d.parts), slices.Clone(d.due.s)
	c.slots, c.durable.waits = slices.Clone(d.slots), slices.Clone(d.durable.waits)
	if d.ftl != nil {
		f := *d.ftl
		f.l2p, f.p2l = slices.Clone(f.l2p), slices.Clone(f.p2l)
		f.valid, f.state, f.next, f.dieOf = slices.Clone(f.valid), slices.Clone(f.state), slices.Clone(f.next),
			slices.Clone(f.dieOf)
		f.dies = slices.Clone(f.dies)
		c.ftl = &f
	}
	return &c
}
