package sim

// core is a processor core on which several clients poll in turn, as two load generators do that busy-wait on one core.
// A client that does not have the core neither sees answers nor sends anything. Hosts send in bursts then, as long as
// a turn of the operating system's scheduler.
type core struct {
	clients []int
	// at is the index of the client that has the core.
	at int
}

// newCores lets the first client of each core begin.
func (r *run) newCores() {
	for i := range r.sc.Tenants {
		n := r.sc.Tenants[i].Core
		if n == 0 {
			continue
		}
		for len(r.cores) < n {
			r.cores = append(r.cores, core{})
		}
		c := &r.cores[n-1]
		r.tenants[i].off = len(c.clients) > 0
		c.clients = append(c.clients, i)
	}
	for i := range r.cores {
		if len(r.cores[i].clients) > 1 {
			r.timers.push(timer{atNS: r.jittered(r.sc.TurnNS), what: coreTurn, tenant: i})
		}
	}
}

// turnCore gives a core to its next client.
func (r *run) turnCore(tm timer) {
	c := &r.cores[tm.tenant]
	r.tenants[c.clients[c.at]].off = true
	c.at = (c.at + 1) % len(c.clients)
	r.poll(c.clients[c.at])
	tm.atNS = r.now + max(1, r.jittered(r.sc.TurnNS))
	r.timers.push(tm)
}

// poll lets a client take the answers that have arrived, and send what it may.
func (r *run) poll(i int) {
	t := &r.tenants[i]
	t.off = false
	for t.inbox.n > 0 {
		r.receive(t.inbox.pop())
	}
	r.send(i)
}
