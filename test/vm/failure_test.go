//go:build vm

package vm

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// patient are the flags of a host that reconnects every second for two minutes.
const patient = "-c 1 -l 120"

// noSIGPIPE begins a command that must outlive a broken connection: Linux 6.1's nvme-tcp sends in the context of
// whoever submits, so that a program that reads or writes a block device at the wrong moment gets a SIGPIPE and dies
// ("failed to send request -32" in the log).
const noSIGPIPE = "trap '' PIPE; "

var keepAliveExpired = regexp.MustCompile(
	`(?i)(keep.?alive|kato).*(expire|timeout|timed out)|(expire|timeout|timed out).*(keep.?alive|kato)`)

var failureScenarios = []scenario{
	{"kill -9 under load loses nothing that was acknowledged", killUnderLoad},
	{"ext4 survives kill -9 of the daemon while mounted", func(h *host) {
		d := h.daemon(oneSubsystem("file"))
		ctrl := h.connect(d.ioAddress(), nqnA, patient)
		dev := h.device(nqnA, 1)
		h.run("mkfs.ext4 -q -F %s && mount -t ext4 %s /mnt", dev, dev)
		load := h.start(3*time.Minute, noSIGPIPE+"cd /mnt && for i in $(seq 60); do head -c 200000 /dev/urandom > f$i "+
			"&& sync && sha256sum f$i >> /tmp/kill-sums || exit 1; done")
		h.must(time.Minute, "files are being written", func() error {
			if r := h.try(10*time.Second, "[ $(wc -l < /tmp/kill-sums) -ge 10 ]"); r.Code != 0 {
				return fmt.Errorf("fewer than 10 so far")
			}
			return nil
		})
		d.Kill()
		h.waitState(ctrl, "connecting", 20*time.Second)
		h.restart(d)
		h.finish(load)
		h.run("umount /mnt && e2fsck -f -n %s && mount -t ext4 %s /mnt && cd /mnt && sha256sum -c /tmp/kill-sums", dev,
			dev)
		h.run("umount /mnt")
	}},
	{"a host without traffic is thrown out when its keep alive time is over, and comes back", keepAliveExpiry},
	{"keep alive does not wait behind slow reads", func(h *host) {
		s := oneSubsystem("mem")
		s.SSDs[0].Fault = "{delay: 4s, delay_probability: 1}"
		d := h.daemon(s)
		m := h.guest.Mark()
		mark := d.LogMark()
		ctrl := h.connect(d.ioAddress(), nqnA, "-k 2")
		dev := h.device(nqnA, 1) // its partition table is read, slowly, already
		begin := time.Now()
		h.runFor(2*time.Minute, "fio --name=slow --filename=%s --direct=1 --ioengine=libaio --iodepth=32 "+
			"--rw=randread --bs=4k --size=128k", dev)
		if took := time.Since(begin); took < 4*time.Second {
			h.Errorf("reads that are delayed by 4 s took %v", took)
		}
		if l := d.LogMatches(mark, keepAliveExpired); l != "" {
			h.Errorf("the keep alive expired: %s", l)
		}
		if s := h.state(ctrl); s != "live" {
			h.Errorf("the controller is %s", s)
		}
		if strings.Contains(h.guest.ConsoleSince(m), "starting error recovery") {
			h.Error("the host lost the connection")
		}
	}},
	{"a frozen daemon costs a reconnect, not data", func(h *host) {
		h.run("echo 4 > /sys/module/nvme_core/parameters/io_timeout; echo 4 > " +
			"/sys/module/nvme_core/parameters/admin_timeout")
		defer h.try(10*time.Second, "echo 30 > /sys/module/nvme_core/parameters/io_timeout; echo 60 > "+
			"/sys/module/nvme_core/parameters/admin_timeout")
		d := h.daemon(oneSubsystem("file"))
		ctrl := h.connect(d.ioAddress(), nqnA, patient)
		dev := h.device(nqnA, 1)
		load := h.start(5*time.Minute, noSIGPIPE+"fio --aux-path=/tmp --name=load --filename=%s --direct=1 "+
			"--ioengine=libaio --iodepth=8 --rw=randwrite --bs=16k --size=8m --verify=crc32c --verify_fatal=1 "+
			"--rate_iops=60", dev)
		h.underLoad(load, dev, 50)
		if err := d.Freeze(); err != nil {
			h.Fatal(err)
		}
		h.waitState(ctrl, "connecting", 40*time.Second)
		if err := d.Thaw(); err != nil {
			h.Fatal(err)
		}
		h.waitLive(ctrl, 40*time.Second)
		h.finish(load)
	}},
	{"a failing drive is an error to the host and trouble to nobody else", func(h *host) {
		s := oneSubsystem("mem")
		s.SSDs = append(s.SSDs, SSD{Name: "ssd1", Backend: "mem", Size: "128MiB"})
		s.SSDs[0].Fault = "{write_error_probability: 1}"
		s.Subsystems = append(s.Subsystems,
			Subsystem{NQN: nqnB, Namespaces: []Namespace{{NSID: 1, SSD: "ssd1", Size: "64MiB", BlockSize: 4096}}})
		d := h.daemon(s)
		ctrl := h.connect(d.ioAddress(), nqnA, "")
		h.connect(d.ioAddress(), nqnB, "")
		bad, good := h.device(nqnA, 1), h.device(nqnB, 1)
		h.fails("(?i)Write Fault|Unrecovered|Internal Error|0x.*28", "nvme write %s -s 0 -c 0 -z 4096 -d /dev/zero",
			bad)
		h.fails("(?i)error", "dd if=/dev/zero of=%s bs=64k count=1 oflag=direct 2>&1", bad)
		h.fio(good, []fioJob{{"randrw", "4k", "1m"}})
		h.run("dd if=%s of=/dev/null bs=64k count=1 iflag=direct 2>&1", bad)
		if st := h.state(ctrl); st != "live" {
			h.Errorf("the controller is %s", st)
		}
		h.matches("nvme error-log /dev/"+ctrl+" -e 1", `error_count\s*: [1-9]`)
		h.matches("nvme smart-log /dev/"+ctrl, `media_errors\s*: [1-9]`)
		if m := h.metrics(d); m.Sum("jbof_io_errors_total") == 0 || m.Sum("jbof_ssd_errors_total", `ssd="ssd0"`) == 0 ||
			m.Sum("jbof_ssd_errors_total", `ssd="ssd1"`) != 0 {
			h.Errorf("the metrics of errors are wrong: %v, ssd0 %v, ssd1 %v", m.Sum("jbof_io_errors_total"),
				m.Sum("jbof_ssd_errors_total", `ssd="ssd0"`), m.Sum("jbof_ssd_errors_total", `ssd="ssd1"`))
		}
	}},
	{"a stopped daemon is gone within five seconds under load, and the host waits for it", stopUnderLoad},
	{"a host that loses its controller for good gets errors, and the daemon forgets it", func(h *host) {
		d := h.daemon(oneSubsystem("mem"))
		h.connect(d.ioAddress(), nqnA, "-c 1 -l 3 -k 2")
		dev := h.device(nqnA, 1)
		h.cut()
		h.must(60*time.Second, "the controller is removed", func() error {
			if found := h.find(nqnA, 1); found != "" {
				return fmt.Errorf("%s is there", found)
			}
			return nil
		})
		h.fails(".", "dd if=%s of=/dev/null bs=4k count=1 iflag=direct 2>&1", dev)
		h.must(20*time.Second, "the daemon forgets the host", func() error { return noConnections(d) })
		h.mend()
		h.connect(d.ioAddress(), nqnA, "")
		h.device(nqnA, 1)
	}},
}

func killUnderLoad(h *host) {
	h.disturbs = true
	d := h.daemon(oneSubsystem("file"))
	ctrl := h.connect(d.ioAddress(), nqnA, patient+" "+d.ioAddress().digests())
	dev, other := h.device(nqnA, 1), h.device(nqnA, 2)
	uuid := h.run("nvme ns-descs %s | grep uuid", dev)
	load := h.start(5*time.Minute, noSIGPIPE+"fio --aux-path=/tmp --name=load --filename=%s --direct=1 "+
		"--ioengine=libaio --iodepth=8 --rw=randrw --bs=8k --size=%s --verify=crc32c --verify_fatal=1 --rate_iops=%s",
		dev, h.amount("24m", "6m"), h.amount("150,150", "40,40"))
	for i := range h.rounds(3, 2) {
		// Data that was synced before the kill must be there after it.
		h.run("head -c 65536 /dev/urandom > /tmp/marker && dd if=/tmp/marker of=%s bs=64k seek=%d oflag=direct "+
			"conv=fsync 2>&1", other, i)
		h.underLoad(load, dev, 50)
		d.Kill()
		h.waitState(ctrl, "connecting", 20*time.Second)
		h.restart(d)
		h.waitLive(ctrl, 30*time.Second)
		h.run("dd if=%s of=/tmp/back bs=64k skip=%d count=1 iflag=direct 2>&1 && cmp /tmp/marker /tmp/back", other, i)
	}
	h.finish(load)
	if now := h.run("nvme ns-descs %s | grep uuid", dev); now != uuid {
		h.Errorf("the namespace was %s, is %s", uuid, now)
	}
}

func keepAliveExpiry(h *host) {
	h.disturbs = true
	d := h.daemon(oneSubsystem("mem"))
	ctrl := h.connect(d.ioAddress(), nqnA, patient+" -k 3")
	dev := h.device(nqnA, 1)
	mark := d.LogMark()
	h.cut()
	h.must(20*time.Second, "the daemon logs the expiry with the host", func() error {
		if d.LogMatches(mark, keepAliveExpired, regexp.MustCompile(regexp.QuoteMeta(HostNQN))) == "" {
			return fmt.Errorf("no such line in\n%s", tail(strings.Join(d.logSince(mark), "\n"), 20))
		}
		return nil
	})
	h.Logf("jbofd says: %s", d.LogMatches(mark, keepAliveExpired))
	if l := d.LogMatches(mark, keepAliveExpired); !regexp.MustCompile(`(?i)idle\S*=\S*\d`).MatchString(l) {
		h.Errorf("the line has no idle time: %s", l)
	}
	h.must(5*time.Second, "the daemon closes the association", func() error { return noConnections(d) })
	if n := h.metrics(d).Sum("jbof_keepalive_timeouts_total"); n != 1 {
		h.Errorf("jbof_keepalive_timeouts_total is %v", n)
	}
	h.waitState(ctrl, "connecting", 30*time.Second)
	h.mend()
	h.waitLive(ctrl, 30*time.Second)
	h.run("dd if=%s of=/dev/null bs=64k count=4 iflag=direct 2>&1", dev)
}

func stopUnderLoad(h *host) {
	h.disturbs = true
	d := h.daemon(oneSubsystem("file"))
	ctrl := h.connect(d.ioAddress(), nqnA, patient)
	dev := h.device(nqnA, 1)
	load := h.start(5*time.Minute, noSIGPIPE+"fio --aux-path=/tmp --name=load --filename=%s --direct=1 "+
		"--ioengine=libaio --iodepth=32 --rw=randwrite --bs=4k --size=%s --verify=crc32c --verify_fatal=1 "+
		"--rate_iops=400", dev, h.amount("8m", "3m"))
	h.underLoad(load, dev, 100)
	took, err := d.Stop()
	if err != nil || took > 5*time.Second {
		h.Errorf("SIGTERM: %v after %v", err, took)
	}
	h.waitState(ctrl, "connecting", 20*time.Second)
	h.restart(d)
	h.waitLive(ctrl, 30*time.Second)
	h.finish(load)
}

// underLoad waits until a load has completed the given number of further writes. If it does not, the requests that the
// kernel has in flight are logged.
func (h *host) underLoad(load *Job, dev string, writes int) {
	h.Helper()
	before := h.writes(dev)
	ok := h.eventually(30*time.Second, fmt.Sprintf("%d more writes", writes), func() error {
		n := h.writes(dev)
		if n >= before+writes {
			return nil
		}
		if !load.Running() {
			r, err := load.Wait()
			h.Fatalf("the load ended after %d of %d writes: %v\n%v", n-before, writes, err, r)
		}
		return fmt.Errorf("%d of %d", n-before, writes)
	})
	if !ok {
		h.Fatal(h.try(20*time.Second,
			`cd /sys/kernel/debug/block
			for f in nvme*/hctx*/busy nvme*/hctx*/dispatch nvme*/requeue_list; do [ -s $f ] && echo $f && cat $f; done
			for p in $(pidof fio); do for t in /proc/$p/task/*; do echo $t; cat $t/wchan $t/stack; done; done
			netstat -tn; echo w > /proc/sysrq-trigger`))
	}
}

// writes is how many writes the host has completed on a block device.
func (h *host) writes(dev string) int {
	h.Helper()
	// Linux 6.1 counts on the paths (nvme0c0n1), not on the multipath device (nvme0n1).
	paths := strings.Replace(strings.TrimPrefix(dev, "/dev/"), "n", "N", 1)
	paths = strings.Replace(strings.Replace(paths, "n", "c*n", 1), "N", "n", 1)
	out := strings.TrimSpace(h.try(10*time.Second, "awk '{n += $5} END {print n}' /sys/block/%s/stat", paths).Stdout)
	n, err := strconv.Atoi(out)
	if err != nil {
		h.Fatalf("completed writes of %s: %q", dev, out)
	}
	return n
}
