package daemon

import (
	"os"
	"strconv"
	"strings"

	"jbofd/internal/cluster/etcdserver"
	"jbofd/internal/config"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/ssd/spdk"
)

// Machine returns what this machine and this binary have, for the validation of configurations.
func Machine() config.Machine { return machine("/") }

// machine is Machine with the root of the file system that /proc and /sys are read from.
func machine(root string) config.Machine {
	m := config.Machine{MemoryBytes: memoryBytes(root)}
	if !verbs.BuiltIn {
		m.NoRDMA = "this jbofd is built without rdma (make build TAGS=rdma)"
	}
	if !spdk.BuiltIn {
		m.NoSPDK = "this jbofd is built without spdk (make build TAGS=spdk)"
	}
	if !etcdserver.Built {
		m.NoEtcd = "this jbofd is built without a server of etcd, as by make build ETCD="
	}
	return m
}

// memoryBytes returns the memory that the process may use: that of the machine, or the limit of its control group if
// that is lower; 0 if neither can be read.
func memoryBytes(root string) int64 {
	read := func(path string) string {
		b, _ := os.ReadFile(root + path) // absent: no such limit
		return strings.TrimSpace(string(b))
	}
	least := int64(0)
	limit := func(n int64, err error) {
		if err == nil && n > 0 && (least == 0 || n < least) {
			least = n
		}
	}
	for line := range strings.Lines(read("proc/meminfo")) {
		if rest, ok := strings.CutPrefix(line, "MemTotal:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			limit(kib<<10, err)
		}
	}
	for line := range strings.Lines(read("proc/self/cgroup")) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok { // control groups, version 2
			// A group is bound by the limits of those that it is in.
			for path != "" {
				limit(strconv.ParseInt(read("sys/fs/cgroup"+path+"/memory.max"), 10, 64)) // "max" is no number
				path = path[:max(strings.LastIndexByte(path, '/'), 0)]
			}
		}
	}
	return least
}
