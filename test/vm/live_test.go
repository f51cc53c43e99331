//go:build vm

package vm

import (
	"fmt"
	"strings"
	"time"
)

var liveScenarios = []scenario{
	{"a namespace appears, grows and vanishes while others work", func(h *host) {
		s := oneSubsystem("file")
		all := s.Subsystems[0].Namespaces
		s.Subsystems[0].Namespaces = all[:1:1]
		d := h.daemon(s)
		ctrl := h.connect(d.ioAddress(), nqnA, "")
		first := h.device(nqnA, 1)
		load := h.start(5*time.Minute, "fio --name=load --filename=%s --direct=1 --ioengine=libaio --iodepth=4 "+
			"--rw=randrw --bs=4k --size=32m --verify=crc32c --verify_fatal=1 --rate_iops=100 --time_based --runtime=15",
			first)

		s.Subsystems[0].Namespaces = all
		h.reload(d, s)
		dev := h.device(nqnA, 2)
		if n := h.bytes(dev); n != 64<<20 {
			h.Errorf("the new namespace has %d bytes", n)
		}
		h.run("dd if=/dev/urandom of=/tmp/blob bs=64k count=16 2>&1 && dd if=/tmp/blob of=%s bs=64k oflag=direct 2>&1",
			dev)

		grown := append([]Namespace(nil), all...)
		grown[1].Size = "96MiB"
		s.Subsystems[0].Namespaces = grown
		h.reload(d, s)
		h.must(15*time.Second, "the device grows", func() error {
			if n := h.bytes(dev); n != 96<<20 {
				return fmt.Errorf("%d bytes", n)
			}
			return nil
		})
		h.run("cmp -n 1048576 /tmp/blob %s", dev)
		h.run("dd if=/tmp/blob of=%s bs=1M seek=95 oflag=direct 2>&1", dev) // the last MiB

		s.Subsystems[0].Namespaces = all[:1:1]
		h.reload(d, s)
		h.must(15*time.Second, "the device vanishes", func() error {
			if found := h.find(nqnA, 2); found != "" {
				return fmt.Errorf("%s is there", found)
			}
			return nil
		})
		h.finish(load)
		if st := h.state(ctrl); st != "live" {
			h.Errorf("the controller is %s", st)
		}
	}},
	{"a namespace for another host stays out of sight", func(h *host) {
		s := oneSubsystem("mem")
		s.Subsystems[0].Namespaces[1].Hosts = []string{otherHostNQN}
		d := h.daemon(s)
		ctrl := h.connect(d.ioAddress(), nqnA, "")
		h.device(nqnA, 1)
		if out := h.run("nvme list-ns /dev/%s", ctrl); strings.Contains(out, "0x2") {
			h.Errorf("namespace 2 is listed: %s", out)
		}
		if out := h.run("nvme ana-log /dev/%s", ctrl); strings.Contains(out, "nsid\t:\t2") {
			h.Errorf("namespace 2 is in the ANA log: %s", out)
		}
		h.disconnect(nqnA)
		ctrl = h.connect(d.ioAddress(), nqnA, asOtherHost)
		h.matches("nvme list-ns /dev/"+ctrl, "0x1$", "0x2$")
	}},
	{"a host taken off the list is thrown out", func(h *host) {
		s := oneSubsystem("mem")
		s.Subsystems[0].Hosts = []string{HostNQN}
		d := h.daemon(s)
		h.connect(d.ioAddress(), nqnA, "-c 1 -l 2")
		h.device(nqnA, 1)
		s.Subsystems[0].Hosts = []string{otherHostNQN}
		h.reload(d, s)
		h.must(30*time.Second, "the host loses its controller", func() error {
			if n := h.try(10*time.Second, "ls -d /sys/class/nvme/nvme* 2>/dev/null | wc -l").Stdout; strings.TrimSpace(
				n) != "0" {
				return fmt.Errorf("controllers: %s", n)
			}
			return nil
		})
	}},
	{"a broken configuration changes nothing", func(h *host) {
		s := oneSubsystem("mem")
		d := h.daemon(s)
		ctrl := h.connect(d.ioAddress(), nqnA, "")
		dev := h.device(nqnA, 1)
		mark := d.LogMark()
		broken := s
		broken.Limits = "{no_such_key: 1}"
		h.reload(d, broken)
		h.must(10*time.Second, "the daemon names the wrong key", func() error {
			for _, l := range d.logSince(mark) {
				if strings.Contains(l, "no_such_key") {
					return nil
				}
			}
			return fmt.Errorf("no line with no_such_key")
		})
		h.run("dd if=/dev/urandom of=%s bs=64k count=4 oflag=direct 2>&1", dev)
		if st := h.state(ctrl); st != "live" {
			h.Errorf("the controller is %s", st)
		}
	}},
	{"connecting and disconnecting leaves nothing behind", connectCycles},
}

func connectCycles(h *host) {
	d := h.daemon(oneSubsystem("mem"))
	cycle := func() {
		h.connect(d.ioAddress(), nqnA, "-i 2 -W 2")
		h.device(nqnA, 1)
		h.disconnect(nqnA)
		h.discover(d.discoveryAddress(), "")
		h.discover(d.ioAddress(), "")
		h.must(10*time.Second, "no connection is left", func() error { return noConnections(d) })
	}
	cycle() // allocations that happen once happen now
	files, err := d.OpenFiles()
	if err != nil {
		h.Fatal(err)
	}
	if !h.metrics(d).Has("go_goroutines") {
		h.Fatal("no metric go_goroutines")
	}
	goroutines := h.metrics(d).Sum("go_goroutines")
	objects := h.objects()
	for range h.rounds(8, 4) {
		cycle()
	}
	h.eventually(10*time.Second, "goroutines and files are as many as before", func() error {
		now, err := d.OpenFiles()
		if err != nil {
			return err
		}
		// Idle connections of /metrics come and go, hence the margin; a leak would show one for each cycle.
		if g := h.metrics(d).Sum("go_goroutines"); g > goroutines+4 || now > files+4 {
			return fmt.Errorf("goroutines %v, before %v; files %d, before %d", g, goroutines, now, files)
		}
		return nil
	})
	h.eventually(10*time.Second, "RDMA objects are as many as before", func() error {
		if now := h.objects(); now != objects {
			return fmt.Errorf("%+v, before %+v", now, objects)
		}
		return nil
	})
}
