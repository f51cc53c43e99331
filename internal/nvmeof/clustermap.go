package nvmeof

import (
	"bytes"

	"jbofd/internal/nvme"
)

// SetClusterMap sets the map of the cluster that a subsystem belongs to: its controllers offer ExtClusterMap and have
// the log page. The map is one that passes Check; it is taken over, and gets a generation of its own if it differs from
// the one before. An empty one says that the subsystem belongs to no cluster. The subsystem need not exist yet.
func (t *Target) SetClusterMap(subNQN string, m nvme.ClusterMap) {
	old := t.maps[subNQN]
	if len(m) == 0 {
		delete(t.maps, subNQN)
		return
	}
	t.mapGeneration++
	generation := t.mapGeneration
	if old != nil {
		m.SetGeneration(old.Generation())
		if bytes.Equal(m, old) {
			return
		}
	}
	m.SetGeneration(generation)
	t.maps[subNQN] = m
}

// clusterMap is the map that hosts of the controller may read; nil if there is none.
func (c *Controller) clusterMap() nvme.ClusterMap {
	if c.Discovery {
		return nil
	}
	return c.t.maps[c.sub.NQN]
}
