package drive

import "jbofd/internal/bufpool"

// Pool is where the drive's buffers come from. Memory of the same pool is registered with the drive's device, so that
// who submits I/Os takes memory from there.
func (o *Drive) Pool() *bufpool.Pool { return o.pool }
