//go:build vm

package vm

import (
	"fmt"
	"strings"
	"time"
)

// kvCommand is the beginning of an nvme io-passthru command for the generic device of a key-value namespace, with a key
// of four bytes.
func kvCommand(dev string, opcode, key, n int) string {
	return fmt.Sprintf("nvme io-passthru %s -o %#x --namespace-id=5 --cdw2=%#x --cdw10=%d --cdw11=4", dev, opcode, key,
		n)
}

var kvScenarios = []scenario{
	{"a namespace of keys and values is no disk, disturbs none, and is there for nvme-cli", keysAndValues},
}

// keysAndValues uses a key-value namespace beside two block namespaces. Linux makes a generic device for it and no
// disk.
func keysAndValues(h *host) {
	s := oneSubsystem("mem")
	s.Subsystems[0].Namespaces = append(s.Subsystems[0].Namespaces, Namespace{NSID: 5, SSD: "ssd0", Size: "96MiB"})
	d := h.daemon(s)
	ctrl := h.connect(d.ioAddress(), nqnA, "")
	for nsid := range 2 {
		h.run("dd if=/dev/urandom of=%s bs=64k count=16 oflag=direct 2>&1", h.device(nqnA, nsid+1))
	}
	if dev := h.find(nqnA, 5); dev != "" {
		h.Errorf("the namespace of keys and values is the disk %s", dev)
	}
	h.matches("nvme list-ns /dev/"+ctrl, `0\]:0x1$`, `1\]:0x2$`, `2\]:0x5$`)
	h.matches("nvme ns-descs /dev/"+ctrl+" -n 5", `csi\s*:\s*(0x)?1$`)
	h.fails("(?i)Invalid I/O Command Set|0x12c|0x412c", "nvme id-ns /dev/%s -n 5", ctrl)

	var dev string
	h.must(15*time.Second, "it is a generic device", func() error {
		dev = strings.TrimSpace(h.try(10*time.Second, `cd /sys/block; for n in nvme*; do
			case $n in nvme*c*n*) continue;; esac
			if [ "$(cat $n/nsid 2>/dev/null)" = 5 ]; then echo /dev/ng${n#nvme}; fi
		done`).Stdout)
		if r := h.try(10*time.Second, "test -c %s", dev); dev == "" || r.Code != 0 {
			return fmt.Errorf("%q is none", dev)
		}
		return nil
	})
	h.run("head -c 5000 /dev/urandom > /tmp/value; head -c 100000 /dev/urandom > /tmp/large")
	store := func(key, n int, file string) { h.run("%s -l %d -w -i %s", kvCommand(dev, 0x01, key, n), n, file) }
	store(0x31, 5000, "/tmp/value")   // in the capsule
	store(0x32, 100000, "/tmp/large") // by R2T
	// The result is the length of the value, also if it does not fit the buffer. Less data than the buffer's length may
	// come.
	retrieve := func(key, room, size, have int, file string) {
		h.Helper()
		r := h.try(30*time.Second, "%s -l %d -r -b > /tmp/back", kvCommand(dev, 0x02, key, room), room)
		if r.Code != 0 || !strings.Contains(r.Stderr, fmt.Sprintf("result: %#08x", size)) {
			h.Errorf("retrieve of %d bytes into %d: %v", size, room, r)
		}
		h.run("cmp -n %d %s /tmp/back", have, file)
	}
	retrieve(0x31, 5000, 5000, 5000, "/tmp/value")
	retrieve(0x31, 8192, 5000, 5000, "/tmp/value")
	retrieve(0x31, 512, 5000, 512, "/tmp/value")
	retrieve(0x32, 262144, 100000, 100000, "/tmp/large")
	retrieve(0x32, 4096, 100000, 4096, "/tmp/large")
	h.run("%s", kvCommand(dev, 0x14, 0x31, 0))
	h.fails("(?i)0x4087|Key does not exist", "%s", kvCommand(dev, 0x14, 0x33, 0))
	h.fails("(?i)0x4086|Key Size", "nvme io-passthru %s -o 0x14 --namespace-id=5 --cdw11=17", dev)
	h.matches("nvme io-passthru "+dev+" -o 6 --namespace-id=5 --cdw10=4096 -l 4096 -r -b | od -An -tu4 -N4", `^\s*2$`)
	h.run("%s", kvCommand(dev, 0x10, 0x31, 0))
	h.fails("(?i)0x4087|Key does not exist", "%s -l 512 -r", kvCommand(dev, 0x02, 0x31, 512))
	if s := h.state(ctrl); s != "live" {
		h.Errorf("the controller is %s", s)
	}
	h.run("nvme reset /dev/%s", ctrl)
	h.waitLive(ctrl, 10*time.Second)
	retrieve(0x32, 262144, 100000, 100000, "/tmp/large")
}
