package daemon

import (
	"os"
	"path/filepath"
	"testing"

	"jbofd/internal/config"
	"jbofd/internal/nvmeof"
	"jbofd/internal/replicas"
)

func TestTheMemoryOfTheMachineIsTheLeastOfItsLimits(t *testing.T) {
	for _, c := range []struct {
		name  string
		files map[string]string
		want  int64
	}{
		{"nothing can be read", nil, 0},
		{"no control group", map[string]string{"proc/meminfo": "MemFree: 5 kB\nMemTotal:       24696020 kB\n"},
			24696020 << 10},
		{"a limit of the group", map[string]string{"proc/meminfo": "MemTotal: 1048576 kB\n",
			"proc/self/cgroup": "0::/system.slice/jbofd.service\n",
			"sys/fs/cgroup/system.slice/jbofd.service/memory.max": "536870912\n"}, 512 << 20},
		{"a limit of the group above", map[string]string{"proc/meminfo": "MemTotal: 1048576 kB\n",
			"proc/self/cgroup": "3:memory:/x\n0::/system.slice/jbofd.service\n",
			"sys/fs/cgroup/system.slice/jbofd.service/memory.max": "max\n",
			"sys/fs/cgroup/system.slice/memory.max":               "4096\n"}, 4096},
	} {
		root := t.TempDir()
		for name, text := range c.files {
			path := filepath.Join(root, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := memoryBytes(root + "/"); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
	if got := Machine().MemoryBytes; got < 64<<20 {
		t.Errorf("this machine has %d bytes of memory", got)
	}
}

// TestAValidationKnowsWhatReplicasTake: as much as they take with the longest values that there may be.
func TestAValidationKnowsWhatReplicasTake(t *testing.T) {
	longest := nvmeof.MaxReplicatedValue(1<<30, 1<<30)
	if got := replicas.PartitionBytes(longest); got != int64(config.ReplicatedBytes) {
		t.Errorf("the replicas of a partition take %d, config.ReplicatedBytes is %d", got, config.ReplicatedBytes)
	}
}
