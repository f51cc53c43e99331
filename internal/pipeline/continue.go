package pipeline

// Continue completes a dispatched I/O as Complete does and enqueues the next request of the same operation under its
// tag. A tenant that is being removed stays known in between, because the operation still needs it.
//
// hot: 0 allocs
func (p *Pipeline) Continue(now int64, res Result, next IO) {
	ten := &p.tenants[next.Tenant]
	leaving := ten.leaving
	ten.leaving = false
	p.Complete(now, next.Tag, res)
	p.Enqueue(now, next)
	ten.leaving = leaving
}
