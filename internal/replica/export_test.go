package replica

import "fmt"

// Left says what is left of requests when nothing is under way, or nothing.
func (r *Replica) Left() string {
	busy := 0
	for i := range r.ops {
		if r.ops[i].busy {
			busy++
		}
	}
	taken := 0
	for i := range r.cfg.Memory.regions {
		taken += r.cfg.Memory.regions[i].taken
	}
	if busy+taken+r.later.N+r.copying.N == 0 && len(r.freeClients) == len(r.clients) &&
		len(r.freeValues) == len(r.values) && len(r.cfg.Batches.fetched.free) == len(r.cfg.Batches.fetched.all) &&
		len(r.cfg.Batches.outs.free)+len(r.sent)+len(r.filled) == len(r.cfg.Batches.outs.all) {
		return ""
	}
	return fmt.Sprintf("%d requests to the store, %d bytes of values, %d requests of clients, %d values, "+
		"%d batches fetched and %d copied out are left", busy, taken, len(r.clients)-len(r.freeClients),
		len(r.values)-len(r.freeValues), len(r.cfg.Batches.fetched.all)-len(r.cfg.Batches.fetched.free), len(r.cfg.Batches.outs.all)-len(r.cfg.Batches.outs.free))
}
