package telemetry

// RDMAStats are the statistics of the RDMA transport at the time of a scrape.
type RDMAStats struct {
	// Devices and CompletionQueues are the numbers of those in use.
	Devices, CompletionQueues int
	// Receives is the number of receives that are in shared receive queues or hold capsules. Held is the number of
	// those that hold commands waiting for memory.
	Receives, Held int
	// RegisteredBytes is the amount of memory registered with devices.
	RegisteredBytes int64
	// Doorbells counts doorbells rung. Crossings counts calls into C to post or to poll.
	Doorbells, Crossings uint64
}

// SetRDMA sets the source of the statistics of the RDMA transport. Without it none are reported.
func (t *Telemetry) SetRDMA(f func() RDMAStats) {
	t.mu.Lock()
	t.rdma = f
	t.mu.Unlock()
}

var (
	rdmaDevices  = gauge("jbof_rdma_devices", "RDMA devices that have had connections.")
	rdmaCQs      = gauge("jbof_rdma_completion_queues", "Completion queues of those devices.")
	rdmaReceives = gauge("jbof_rdma_receives", "Receives of the devices' shared receive queues by state: posted, or "+
		"held by commands that wait for a data buffer.", "state")
	rdmaRegistered = gauge("jbof_rdma_registered_bytes", "Memory registered with RDMA devices, over all devices.")
	rdmaDoorbells  = counter("jbof_rdma_doorbells_total", "Doorbells: calls that told a device of new work requests.")
	rdmaCrossings  = counter("jbof_rdma_crossings_total", "Calls into libibverbs to post or to poll, each for a batch.")
)

// rdmaMetrics returns the metric families of this file.
func rdmaMetrics() []metric {
	return []metric{rdmaDevices, rdmaCQs, rdmaReceives, rdmaRegistered, rdmaDoorbells, rdmaCrossings}
}

func collectRDMA(s RDMAStats, put func(m metric, v float64, labels ...string)) {
	put(rdmaDevices, float64(s.Devices))
	put(rdmaCQs, float64(s.CompletionQueues))
	put(rdmaReceives, float64(s.Receives-s.Held), "posted")
	put(rdmaReceives, float64(s.Held), "held")
	put(rdmaRegistered, float64(s.RegisteredBytes))
	put(rdmaDoorbells, float64(s.Doorbells))
	put(rdmaCrossings, float64(s.Crossings))
}
