package drive

import (
	"jbofd/internal/bufpool"
	"jbofd/internal/tenant"
)

// Lanes are the scratch memory into which Compare, CompareWrite and Verify read. There are few, because each is as long
// as a large read: more would take memory from the hosts' data and add nothing to the drive's throughput.
const (
	laneCount = 4
	laneBytes = 128 << 10
)

// lanes is the set of a drive's lanes and the queue of the IOs that wait for one. A lane is held for one device
// request. IOs that wait are served tenant by tenant, one IO each, so that a tenant with many does not keep the others
// waiting; IOs that hold a claim come before all.
type lanes struct {
	bufs [laneCount]bufpool.Buf // a lane gets its memory when it is first used
	used [laneCount]bool
	// claiming are the IOs that wait for a lane and hold a claim.
	claiming list
	// byTenant are the other IOs that wait. active are the tenants that have some, in the order of their turns.
	byTenant []list
	active   []tenant.ID
}

// grow gives the first lane its memory. It reports whether the pool had any.
func (l *lanes) grow(pool *bufpool.Pool, account *bufpool.Account) (ok bool) {
	l.bufs[0], ok = pool.Get(account, laneBytes)
	return ok
}

// free gives all memory back.
func (l *lanes) free(pool *bufpool.Pool) {
	for i := range l.bufs {
		pool.Put(l.bufs[i])
		l.bufs[i] = bufpool.Buf{}
	}
}

// scratch is the memory of io's lane, or nil.
func (l *lanes) scratch(io *IO) []byte {
	if io.lane < 0 {
		return nil
	}
	return l.bufs[io.lane].B
}

// takeLane gives io a lane, unless it has one, and reports whether it has one now. If not, the caller must make it
// wait.
func (d *Drive) takeLane(io *IO) bool {
	if io.lane >= 0 {
		return true
	}
	l := &d.lanes
	for i := range l.used {
		if l.used[i] {
			continue
		}
		if l.bufs[i].IsZero() {
			b, ok := d.pool.Get(d.account, laneBytes)
			if !ok {
				return false // the lanes that have memory are in use: one of them will be returned
			}
			l.bufs[i] = b
		}
		l.used[i] = true
		io.lane = int8(i)
		return true
	}
	return false
}

// returnLane takes io's lane back and lets the next IO go on that waits for one. An IO that was aborted, or that has to
// wait for a claim, does not use the lane: then the one after it goes on.
func (d *Drive) returnLane(io *IO, now int64) {
	lane := io.lane
	d.lanes.used[lane] = false
	io.lane = -1
	for !d.lanes.used[lane] {
		next := d.lanes.pop()
		if next == nil {
			return
		}
		d.proceed(next, now)
	}
}

// push adds io to the queue.
func (l *lanes) push(io *IO) {
	if io.claimed.active {
		l.claiming.push(io)
		return
	}
	for int(io.Tenant) >= len(l.byTenant) {
		l.byTenant = append(l.byTenant, list{})
	}
	if l.byTenant[io.Tenant].n == 0 {
		l.active = append(l.active, io.Tenant)
	}
	l.byTenant[io.Tenant].push(io)
}

// pop takes the IO that is to have the next lane out of the queue; nil if none waits.
func (l *lanes) pop() *IO {
	if io := l.claiming.pop(); io != nil {
		return io
	}
	if len(l.active) == 0 {
		return nil
	}
	t := l.active[0]
	copy(l.active, l.active[1:])
	l.active = l.active[:len(l.active)-1]
	io := l.byTenant[t].pop()
	if l.byTenant[t].n > 0 {
		l.active = append(l.active, t)
	}
	return io
}

// remove takes io out of the queue, wherever it stands. io must be in the queue.
func (l *lanes) remove(io *IO) {
	if io.claimed.active {
		l.claiming.drop(io)
		return
	}
	q := &l.byTenant[io.Tenant]
	q.drop(io)
	if q.n > 0 {
		return
	}
	for i, t := range l.active {
		if t == io.Tenant {
			l.active = append(l.active[:i], l.active[i+1:]...)
			return
		}
	}
}
