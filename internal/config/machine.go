package config

// Machine says what the machine and the binary have, as far as a configuration can ask for more. The zero value
// refuses nothing.
type Machine struct {
	// MemoryBytes is the memory that the process may use; 0: unknown.
	MemoryBytes int64
	// NoRDMA says why there can be no listener with transport rdma; empty: there can.
	NoRDMA string
	// NoSPDK says why there can be no drive with backend spdk; empty: there can.
	NoSPDK string
	// NoEtcd says why the daemon cannot run a server of etcd; empty: it can.
	NoEtcd string
}

// modelMapShare is the part of an emulated drive's size that the map of its flash takes besides the data: 0.2 %.
const modelMapShare = 500

// ReplicatedBytes is what a partition of a cluster takes besides limits.buffers: values of writes under way, and
// batches.
const ReplicatedBytes Bytes = 102 << 20

// machine checks what the machine or the binary cannot do.
func (v *validator) machine(m Machine) {
	if m.NoRDMA != "" {
		for i, l := range v.c.Listeners {
			if p := join(index("listeners", i), "transport"); l.Transport == "rdma" && v.ok(index("listeners", i)) &&
				v.ok(p) {
				v.complain(p, "rdma, but %s; allowed: tcp", m.NoRDMA)
			}
		}
	}
	for i, s := range v.c.SSDs {
		p := join(index("ssds", i), "backend")
		if m.NoSPDK != "" && s.Backend == "spdk" && v.ok(index("ssds", i)) && v.ok(p) {
			v.complain(p, "spdk, but %s; allowed: nvme, file, mem, model", m.NoSPDK)
		}
	}
	const embedded = "cluster.etcd.embedded"
	if c := v.c.Cluster; m.NoEtcd != "" && c != nil && c.Etcd.Embedded != nil && v.ok(embedded) {
		v.complain(embedded, "given, but %s; allowed: cluster.etcd.endpoints", m.NoEtcd)
	}
	if m.MemoryBytes <= 0 {
		return
	}
	have := Bytes(m.MemoryBytes)
	if have >= 1<<30 {
		have &^= 1<<20 - 1 // who reads it wants no number of KiB with eight digits
	}
	sum := v.c.Limits.Buffers
	if !v.ok("limits.buffers") {
		sum = 0
	}
	if sum > have {
		v.complain("limits.buffers", "%s is more than the memory of this machine; allowed: less than %s", sum, have)
		return
	}
	for i, s := range v.c.SSDs {
		p := join(index("ssds", i), "size")
		inMemory := s.Backend == "mem" || s.Backend == "model"
		if !inMemory || !v.ok(index("ssds", i)) || !v.ok(p) || !v.ok(join(index("ssds", i), "backend")) {
			continue
		}
		need := s.Size
		if s.Backend == "model" {
			need += s.Size / modelMapShare
		}
		if need > have-sum { // neither side overflows
			v.complain(p, "%s is too large for a drive in memory: limits.buffers and the drives in memory before it "+
				"take %s "+
				"of the %s that this machine has; allowed: less than %s", s.Size, sum, have, have-sum)
			return
		}
		sum += need
	}
	for i, s := range v.c.Subsystems {
		for k, ns := range s.Namespaces {
			p := join(index(join(index("subsystems", i), "namespaces"), k), "replicated")
			switch {
			case !ns.Replicated || !v.ok(p):
			case ReplicatedBytes > have-sum:
				v.complain(p, "true, and a partition of a cluster takes %s of memory: limits.buffers, drives in "+
					"memory and partitions before it take %s of the %s that this machine has", ReplicatedBytes, sum,
					have)
				return
			default:
				sum += ReplicatedBytes
			}
		}
	}
}
