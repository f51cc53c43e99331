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
	} {
		_, err := ParseFor(c.machine, "test.yaml", []byte(c.text), nil)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
}
