package config

import (
	"strings"
	"testing"
)

func TestWhatTheMachineLacksIsRefused(t *testing.T) {
	for _, c := range []struct {
		name, text string
		machine    Machine
		want       string // empty: valid
	}{
		{"buffers", minimal + "limits: {buffers: 64GiB}", Machine{MemoryBytes: 24 << 30},
			"limits.buffers: 64GiB is more than the memory of this machine; allowed: less than 24GiB"},
		{"a server of etcd", clusterOf(minimal, embedded), Machine{NoEtcd: "it is built without"},
			"cluster.etcd.embedded: given, but it is built without; allowed: cluster.etcd.endpoints"},
		{"no server of etcd", clusterOf(minimal, "endpoints: ['http://h:1']"), Machine{NoEtcd: "it is built without"},
			""},
		{"a drive in memory", minimal, Machine{MemoryBytes: 1 << 30},
			"ssds[0].size: 1GiB is too large for a drive in memory"},
		{"drives in memory together", `
listeners: [{address: "127.0.0.1:0"}]
ssds:
  - {name: a, backend: mem, size: 1GiB}
  - {name: f, path: data/f.img, size: 64TiB, create: true}
  - {name: b, backend: model, size: 2GiB}
`, Machine{MemoryBytes: 3 << 30}, "ssds[2].size: 2GiB is too large for a drive in memory: " +
			"limits.buffers and the drives in memory before it take 1152MiB of the 3GiB"},
		{"sizes whose sum overflows", `
listeners: [{address: "127.0.0.1:0"}]
ssds:
  - {name: a, backend: mem, size: 8388607TiB}
  - {name: b, backend: mem, size: 8388607TiB}
`, Machine{MemoryBytes: 3 << 30}, "ssds[0].size: 8388607TiB is too large"},
		{"partitions of a cluster", strings.Replace(clusterOf(minimal, embedded), "64MiB, type: kv}",
			"64MiB, type: kv, replicated: true}", 1), Machine{MemoryBytes: 1350 << 20},
			"subsystems[0].namespaces[1].replicated: true, and a partition of a cluster takes 102MiB of memory: " +
				"limits.buffers, drives in memory and partitions before it take 1254MiB of the 1350MiB that"},
		{"enough for them", strings.Replace(clusterOf(minimal, embedded), "64MiB, type: kv}",
			"64MiB, type: kv, replicated: true}", 1), Machine{MemoryBytes: 1356 << 20}, ""},
		{"odd memory", minimal + "limits: {buffers: 64GiB}", Machine{MemoryBytes: 24<<30 - 4096},
			"allowed: less than 24575MiB"},
		{"enough", minimal, Machine{MemoryBytes: 2 << 30}, ""},
		{"unknown memory", minimal + "limits: {buffers: 64GiB}", Machine{}, ""},
		{"rdma in a binary without it", strings.Replace(minimal, "{address", "{transport: rdma, address", 1),
			Machine{NoRDMA: "this jbofd is built without rdma"},
			"listeners[0].transport: rdma, but this jbofd is built without rdma; allowed: tcp"},
		{"rdma in a binary with it", strings.Replace(minimal, "{address", "{transport: rdma, address", 1), Machine{},
			""},
		{"spdk in a binary without it", spdkDrive, Machine{NoSPDK: "this jbofd is built without spdk"},
			"ssds[0].backend: spdk, but this jbofd is built without spdk; allowed: nvme, file, mem, model"},
		{"spdk in a binary with it", spdkDrive, Machine{}, ""},
	} {
		_, err := ParseFor(c.machine, "test.yaml", []byte(c.text), nil)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
}

const spdkDrive = `
listeners: [{address: "127.0.0.1:0"}]
ssds: [{name: a, backend: spdk, traddr: "0000:03:00.0"}]
`

// Where SPDK finds a controller is complete, and other backends have no such keys.
func TestTransportsOfSPDK(t *testing.T) {
	for drive, want := range map[string]string{
		"spdk, traddr: '0000:03:00.0', nsid: 2":                                             "",
		"spdk, trtype: tcp, traddr: 192.0.2.1, subnqn: nqn.2026-11.example:a":               "",
		"spdk, trtype: rdma, traddr: '2001:db8::1', trsvcid: '4421', subnqn: n, hostnqn: h": "",
		"spdk":                    "traddr: missing; trtype pcie needs it",
		"spdk, traddr: 192.0.2.1": `traddr: "192.0.2.1" is no PCI address`,
		"spdk, traddr: '0000:03:00.0', subnqn: n":                        "a controller on the PCI bus has none",
		"spdk, traddr: '0000:03:00.0', size: 1000":                       "is not a drive's size",
		"spdk, traddr: '0000:03:00.0', path: x":                          "backend spdk has none",
		"spdk, traddr: '0000:03:00.0', address: '0000:03:00.0'":          "backend spdk has none",
		"spdk, trtype: tcp, traddr: host, subnqn: n":                     `traddr: "host" is no IP address`,
		"spdk, trtype: tcp, traddr: 192.0.2.1":                           "subnqn: missing",
		"spdk, trtype: tcp, traddr: 192.0.2.1, subnqn: 'a b'":            "is no NQN",
		"spdk, trtype: tcp, traddr: 192.0.2.1, trsvcid: nvme, subnqn: n": `trsvcid: "nvme" is no port`,
		"spdk, trtype: fc":                           "trtype",
		"mem, size: 1GiB, traddr: 192.0.2.1":         "backend mem has none",
		"nvme, address: '0000:03:00.0', trtype: tcp": "backend nvme has none",
	} {
		_, err := ParseFor(Machine{}, "test.yaml",
			[]byte("listeners: [{address: '127.0.0.1:0'}]\nssds: [{name: a, backend: "+drive+"}]\n"), nil)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: got %v, want %q", drive, err, want)
		}
	}
	both := strings.Replace(spdkDrive, "03:00.0\"}", "03:00.0\"}, {name: b, backend: nvme, address: '0000:03:00.0'}", 1)
	if _, err := ParseFor(Machine{}, "test.yaml", []byte(both), nil); err == nil ||
		!strings.Contains(err.Error(), "address of a controller") {
		t.Errorf("two drives on one controller: %v", err)
	}
}
