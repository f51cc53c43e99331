package daemon

import (
	"fmt"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
)

// longestValue is the longest value that this node can take, and send to others.
func (c *clusterMember) longestValue() int {
	return nvmeof.MaxReplicatedValue(nvme.KVMaxMessage, uint32(c.n.cfg.Limits.MDTS))
}

// takes refuses a cluster with longer values than this node can take: there may be such ones already, which could not
// be copied here, and a write that the ChainHead has carried out would wait for this node for ever.
func (c *clusterMember) takes(longest int) error {
	if own := c.longestValue(); own < longest {
		return fmt.Errorf("limits.mdts is %s, so that this node takes values of up to %d bytes; the cluster was made "+
			"with a larger one, and has values of up to %d: use the limits.mdts of the other nodes, and restart",
			c.n.cfg.Limits.MDTS, own, longest)
	}
	return nil
}
