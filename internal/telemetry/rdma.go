package telemetry

// RDMAStats are figures of the RDMA transport at the moment of a scrape.
type RDMAStats struct {
	// Devices and CompletionQueues are in use.
	Devices, CompletionQueues int
	// Receives are in shared receive queues, or taken by capsules; Held are those of commands
	// that wait for memory.
	Receives, Held int
	// RegisteredBytes is the memory that devices can reach.
	RegisteredBytes int64
	// Doorbells and Crossings count how often devices were told of work, and how often C was
	// called to post or to poll.
	Doorbells, Crossings uint64
}

// SetRDMA says where the figures of the RDMA transport come from; without, it has none.
func (t *Telemetry) SetRDMA(f func() RDMAStats) {
	t.mu.Lock()
	t.rdma = f
	t.mu.Unlock()
}

var (
	rdmaDevices    = gauge("jbof_rdma_devices", "RDMA devices that have had connections.")
	rdmaCQs        = gauge("jbof_rdma_completion_queues", "Completion queues of those devices.")
	rdmaReceives   = gauge("jbof_rdma_receives", "Receives of the devices' shared receive queues, by what they are doing: posted, or held by commands that wait for memory.", "state")
	rdmaRegistered = gauge("jbof_rdma_registered_bytes", "Memory registered with RDMA devices, over all devices.")
	rdmaDoorbells  = counter("jbof_rdma_doorbells_total", "Times that a device was told of new work requests.")
	rdmaCrossings  = counter("jbof_rdma_crossings_total", "Calls into libibverbs to post or to poll, each for a batch.")
)

// rdmaMetrics are the families of this file.
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
