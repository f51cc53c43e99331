package drive

import (
	"jbofd/internal/bufpool"
	"jbofd/internal/tenant"
)

// Compare, CompareWrite and Verify read into scratch buffers. There are few, because each is as long as a large read:
// more would take memory from the hosts' data and add nothing to the drive's throughput.
const (
	scratchCount = 4
	scratchBytes = 128 << 10
)

// scratchBuffers are the scratch buffers of a drive, and the queue of the IOs that wait for one. A scratch buffer is
// held for one device request. IOs that wait are served tenant by tenant, one IO each, so that a tenant with many does
// not keep the others waiting; IOs that hold a claim come before all.
type scratchBuffers struct {
	// bufs are the buffers' memory. The first has it from the start, the others from their first use.
	bufs [scratchCount]bufpool.Buf
	used [scratchCount]bool
	// claiming are the IOs that wait and hold a claim.
	claiming list
	// byTenant are the other IOs that wait. active are the tenants that have some, in the order of their turns.
	byTenant []list
	active   []tenant.ID
}

// grow gives the first scratch buffer its memory. It reports whether the pool had any.
func (s *scratchBuffers) grow(pool *bufpool.Pool, account *bufpool.Account) (ok bool) {
	s.bufs[0], ok = pool.Get(account, scratchBytes)
	return ok
}

// free gives all memory back.
func (s *scratchBuffers) free(pool *bufpool.Pool) {
	for i := range s.bufs {
		pool.Put(s.bufs[i])
		s.bufs[i] = bufpool.Buf{}
	}
}

// of returns the memory of the scratch buffer that io holds, or nil.
func (s *scratchBuffers) of(io *IO) []byte {
	if io.scratch < 0 {
		return nil
	}
	return s.bufs[io.scratch].B
}

// takeScratch gives io a scratch buffer, unless it has one, and reports whether it has one now. If not, the caller must
// make it wait.
func (d *Drive) takeScratch(io *IO) bool {
	if io.scratch >= 0 {
		return true
	}
	s := &d.scratch
	for i := range s.used {
		if s.used[i] {
			continue
		}
		if s.bufs[i].IsZero() {
			b, ok := d.pool.Get(d.account, scratchBytes)
			if !ok {
				return false // the scratch buffers that have memory are in use: one of them will be returned
			}
			s.bufs[i] = b
		}
		s.used[i] = true
		io.scratch = int8(i)
		return true
	}
	return false
}

// returnScratch takes io's scratch buffer back and lets the next IO go on that waits for one. An IO that was aborted,
// or that has to wait for a claim, does not use the scratch buffer: then the one after it goes on.
func (d *Drive) returnScratch(io *IO, now int64) {
	i := io.scratch
	d.scratch.used[i] = false
	io.scratch = -1
	for !d.scratch.used[i] {
		next := d.scratch.pop()
		if next == nil {
			return
		}
		d.proceed(next, now)
	}
}

// push adds io to the queue.
func (s *scratchBuffers) push(io *IO) {
	if io.claimed.active {
		s.claiming.push(io)
		return
	}
	for int(io.Tenant) >= len(s.byTenant) {
		s.byTenant = append(s.byTenant, list{})
	}
	if s.byTenant[io.Tenant].n == 0 {
		s.active = append(s.active, io.Tenant)
	}
	s.byTenant[io.Tenant].push(io)
}

// pop takes the IO that is to have the next scratch buffer out of the queue; nil if none waits.
func (s *scratchBuffers) pop() *IO {
	if io := s.claiming.pop(); io != nil {
		return io
	}
	if len(s.active) == 0 {
		return nil
	}
	t := s.active[0]
	copy(s.active, s.active[1:])
	s.active = s.active[:len(s.active)-1]
	io := s.byTenant[t].pop()
	if s.byTenant[t].n > 0 {
		s.active = append(s.active, t)
	}
	return io
}

// remove takes io out of the queue, wherever it stands. io must be in the queue.
func (s *scratchBuffers) remove(io *IO) {
	if io.claimed.active {
		s.claiming.drop(io)
		return
	}
	q := &s.byTenant[io.Tenant]
	q.drop(io)
	if q.n > 0 {
		return
	}
	for i, t := range s.active {
		if t == io.Tenant {
			s.active = append(s.active[:i], s.active[i+1:]...)
			return
		}
	}
}
