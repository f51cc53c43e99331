package drive

import "jbofd/internal/bufpool"

// Pool is where the drive's buffers come from. Memory of the same pool is registered with the drive's device, so that
// who submits I/Os takes memory from there.
func (d *Drive) Pool() *bufpool.Pool { return d.pool }
