package replica

import "fmt"

// Left says what is left of requests when nothing is under way, or nothing.
func (r *Replica) Left() string {
	busy := r.ops.N()
	taken, b := 0, r.cfg.Batches
	for i := range r.cfg.Memory.regions {
		taken += r.cfg.Memory.regions[i].taken
	}
	if busy+taken+r.later.N+r.copying.N+r.clients.N()+r.values.N()+r.asked.N() == 0 &&
		len(b.fetched.free) == len(b.fetched.all) &&
		len(b.outs.free)+len(r.sent)+len(r.filled) == len(b.outs.all) {
		return ""
	}
	return fmt.Sprintf("%d requests to the store, %d bytes of values, %d requests of clients, %d values, "+
		"%d batches fetched and %d copied out are left", busy, taken, r.clients.N(), r.values.N(),
		len(b.fetched.all)-len(b.fetched.free),
		len(b.outs.all)-len(b.outs.free))
}
