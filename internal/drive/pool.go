package drive

import "jbofd/internal/bufpool"

// Pool is where the drive's buffers come from. Memory of this pool is registered with the drive's device, so callers
// should take the buffers of their I/Os from it.
func (d *Drive) Pool() *bufpool.Pool { return d.pool }
