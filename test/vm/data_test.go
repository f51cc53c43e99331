//go:build vm

package vm

import (
	"fmt"
	"strings"
	"time"
)

const (
	nqnA = "nqn.2026-11.example.jbofd:a"
	nqnB = "nqn.2026-11.example.jbofd:b"
)

// oneSubsystem is a subsystem with a namespace of either sector size.
func oneSubsystem(backend string) Setup {
	return Setup{
		SSDs: []SSD{{Name: "ssd0", Backend: backend, Size: "256MiB"}},
		Subsystems: []Subsystem{{NQN: nqnA, Namespaces: []Namespace{
			{NSID: 1, SSD: "ssd0", Size: "64MiB", BlockSize: 4096},
			{NSID: 2, SSD: "ssd0", Size: "64MiB", BlockSize: 512},
		}}},
	}
}

var dataScenarios = []scenario{
	{"fio verifies what it wrote in every block size and mix", func(h *host) {
		d := h.daemon(oneSubsystem("mem"))
		h.connect(d.ioAddress(), nqnA, "")
		h.fioVerify(h.device(nqnA, 1), 4096)
		h.fioVerify(h.device(nqnA, 2), 512)
	}},
	{"fio verifies with header and data digests", func(h *host) {
		d := h.daemon(oneSubsystem("mem"))
		for _, flags := range []string{"-g", "-G", "-g -G"} {
			h.connect(d.ioAddress(), nqnA, flags)
			h.fio(h.device(nqnA, 2), []fioJob{{"randwrite", "512", "1m"}, {"randrw", "8k", "4m"},
				{"write", "128k", "8m"}, {"randwrite", "1m", "8m"}})
			h.disconnect(nqnA)
		}
	}},
	{"read, write and poll queues of their own carry data", queuesOfTheirOwn},
	{"a small queue depth carries many commands at once", func(h *host) {
		d := h.daemon(oneSubsystem("mem"))
		h.connect(d.ioAddress(), nqnA, "-i 1 -Q 16")
		h.fio(h.device(nqnA, 1), []fioJob{{"randrw", "4k", "4m"}, {"randwrite", "128k", "8m"}})
	}},
	{"the file backend verifies too", func(h *host) {
		d := h.daemon(oneSubsystem("file"))
		h.connect(d.ioAddress(), nqnA, "")
		h.fioVerify(h.device(nqnA, 1), 4096)
		h.fio(h.device(nqnA, 2), []fioJob{{"randwrite", "512", "512k"}, {"randrw", "1536", "2m"}})
	}},
	{"ext4 keeps files over unmount and fsck, and trims", func(h *host) {
		d := h.daemon(oneSubsystem("file"))
		h.connect(d.ioAddress(), nqnA, "")
		h.ext4(h.device(nqnA, 1))
		h.ext4(h.device(nqnA, 2))
	}},
	{"discarded and zeroed blocks read as zeroes", func(h *host) {
		for _, backend := range []string{"mem", "file"} {
			d := h.daemon(oneSubsystem(backend))
			h.connect(d.ioAddress(), nqnA, "")
			for nsid := range 2 {
				dev := h.device(nqnA, nsid+1)
				h.run("dd if=/dev/urandom of=%s bs=1M count=8 oflag=direct 2>&1", dev)
				h.run("/usr/sbin/blkdiscard -o 0 -l 2097152 %s", dev)     // the kernel sends Dataset Management
				h.run("/usr/sbin/blkdiscard -z -o 2M -l 2097152 %s", dev) // Write Zeroes
				h.run("cmp -n 4194304 %s /dev/zero", dev)
				h.run("! cmp -s -n 4194304 %s /dev/zero 4194304 0 || { echo the blocks behind are gone; exit 1; }", dev)
			}
			h.disconnect(nqnA)
		}
	}},
	{"two subsystems serve one host at once", func(h *host) {
		s := oneSubsystem("mem")
		s.Subsystems = append(s.Subsystems,
			Subsystem{NQN: nqnB, Namespaces: []Namespace{{NSID: 1, SSD: "ssd0", Size: "32MiB", BlockSize: 4096}}})
		d := h.daemon(s)
		h.connect(d.ioAddress(), nqnA, "")
		h.connect(d.ioAddress(), nqnB, "-g")
		a, b := h.device(nqnA, 1), h.device(nqnB, 1)
		if a == b {
			h.Fatalf("both are %s", a)
		}
		jobs := []*Job{h.startFio(a, []fioJob{{"randrw", "4k", "4m"}}, "a"),
			h.startFio(b, []fioJob{{"randrw", "16k", "4m"}}, "b")}
		for _, j := range jobs {
			h.finish(j)
		}
		h.disconnect(nqnA)
		h.run("dd if=%s of=/dev/null bs=64k count=16 iflag=direct 2>&1", b)
	}},
	{"two listeners are two paths to one device, and one is enough", twoPaths},
	{"sixty namespaces are sixty devices", func(h *host) {
		s := oneSubsystem("mem")
		s.Subsystems[0].Namespaces = nil
		for i := range 60 {
			s.Subsystems[0].Namespaces = append(s.Subsystems[0].Namespaces,
				Namespace{NSID: 1 + i*17, SSD: "ssd0", Size: "2MiB", BlockSize: 4096})
		}
		d := h.daemon(s)
		ctrl := h.connect(d.ioAddress(), nqnA, "")
		h.must(time.Minute, "all devices are there", func() error {
			if n := strings.TrimSpace(h.try(10*time.Second,
				"cd /sys/block; ls -d nvme*n* | grep -v c | wc -l").Stdout); n != "60" {
				return fmt.Errorf("%s devices", n)
			}
			return nil
		})
		for _, nsid := range []int{1, 1 + 59*17} {
			dev := h.find(nqnA, nsid)
			if dev == "" {
				h.Fatalf("namespace %d is no device", nsid)
			}
			h.run("dd if=/dev/urandom of=%s bs=64k count=2 oflag=direct 2>&1", dev)
		}
		h.matches("nvme list-ns /dev/"+ctrl, `0\]:0x1$`, fmt.Sprintf(`59\]:%#x$`, 1+59*17))
	}},
	{"the first and the last sector can be read and written, and none beyond", func(h *host) {
		d := h.daemon(oneSubsystem("mem"))
		h.connect(d.ioAddress(), nqnA, "")
		for nsid, sector := range map[int]int{1: 4096, 2: 512} {
			dev := h.device(nqnA, nsid)
			last := h.bytes(dev)/int64(sector) - 1
			h.run("head -c %d /dev/urandom > /tmp/sector", sector)
			for _, lba := range []int64{0, last} {
				h.run("nvme write %s -s %d -c 0 -z %d -d /tmp/sector", dev, lba, sector)
				h.run("nvme read %s -s %d -c 0 -z %d -d /tmp/back && cmp -n %d /tmp/sector /tmp/back", dev, lba, sector,
					sector)
			}
			h.fails("(?i)LBA Out of Range", "nvme read %s -s %d -c 0 -z %d", dev, last+1, sector)
			h.fails("(?i)LBA Out of Range", "nvme write %s -s %d -c 1 -z %d -d /dev/zero", dev, last, 2*sector)
		}
	}},
}

func queuesOfTheirOwn(h *host) {
	d := h.daemon(oneSubsystem("mem"))
	m := h.guest.Mark()
	ctrl := h.connect(d.ioAddress(), nqnA, "-i 4 -W 2 -P 2 -Q 32")
	if _, err := h.guest.WaitConsole(m, 5*time.Second, mapped(2, 2, 2)); err != nil {
		h.Error(err)
	}
	if q := strings.TrimSpace(h.run("cat /sys/class/nvme/%s/queue_count", ctrl)); q != "7" {
		h.Errorf("%s queues, want 7: the admin queue and 6", q)
	}
	dev := h.device(nqnA, 1)
	h.fio(dev, []fioJob{{"randrw", "4k", h.amount("4m", "512k")}, {"randrw", "64k", h.amount("8m", "2m")}})
	h.runFor(time.Minute, "fio --name=poll --filename=%s --direct=1 --ioengine=pvsync2 --hipri --rw=randread --bs=4k "+
		"--size=%s", dev, h.amount("1m", "256k"))
}

func twoPaths(h *host) {
	d := h.daemon(oneSubsystem("mem"))
	first := h.connect(d.ioAddress(), nqnA, "")
	second := h.connect(d.secondAddress(), nqnA, d.secondAddress().digests())
	dev := h.device(nqnA, 1)
	h.must(10*time.Second, "the device has two paths", func() error {
		if n := strings.TrimSpace(h.try(10*time.Second, "ls -d /sys/block/nvme*c*n1 | wc -l").Stdout); n != "2" {
			return fmt.Errorf("%s paths", n)
		}
		return nil
	})
	h.matches("nvme list-subsys "+dev, first+" "+d.ioAddress().transport+" .* live optimized",
		second+" tcp .* live optimized")
	load := h.startFio(dev, []fioJob{{"randrw", "4k", h.amount("2m", "1m")},
		{"randwrite", "64k", h.amount("8m", "2m")}}, "paths")
	h.run("nvme disconnect -d %s", first)
	h.finish(load)
	if s := h.state(second); s != "live" {
		h.Errorf("the other path is %s", s)
	}
}

// fioJob is one phase of a fio run: it writes (and reads, if mixed) amount bytes, then reads back and verifies.
type fioJob struct{ rw, bs, amount string }

// fioMatrix is every block size with every mix. The amounts are small: software emulation does some thousand I/Os a
// second.
func fioMatrix(sector int) []fioJob {
	var jobs []fioJob
	for _, size := range []struct{ bs, amount string }{
		{"512", "256k"}, {"4k", "2m"}, {"8k", "2m"}, {"12k", "3m"}, {"64k", "4m"}, {"128k", "4m"}, {"1m", "8m"},
	} {
		if size.bs == "512" && sector > 512 {
			continue
		}
		for _, rw := range []string{"write", "randwrite", "randrw"} {
			jobs = append(jobs, fioJob{rw, size.bs, size.amount})
		}
	}
	return jobs
}

// fioFile is a job file whose jobs run one after the other.
func fioFile(dev string, jobs []fioJob) string {
	var b strings.Builder
	fmt.Fprintf(&b, "[global]\nfilename=%s\ndirect=1\nioengine=libaio\niodepth=16\nthread=1\n", dev)
	fmt.Fprintf(&b, "verify=crc32c\nverify_fatal=1\ndo_verify=1\nverify_dump=1\nrandrepeat=0\nsize=32m\n")
	for i, j := range jobs {
		fmt.Fprintf(&b, "[%02d-%s-%s]\nstonewall\nrw=%s\nbs=%s\nio_size=%s\n", i, j.rw, j.bs, j.rw, j.bs, j.amount)
	}
	return b.String()
}

func (h *host) startFio(dev string, jobs []fioJob, name string) *Job {
	h.Helper()
	file := "/tmp/" + name + ".fio"
	h.put(file, fioFile(dev, jobs))
	return h.start(5*time.Minute, "fio --aux-path=/tmp %s", file)
}

// fio runs jobs one after the other on a device.
func (h *host) fio(dev string, jobs []fioJob) {
	h.Helper()
	h.finish(h.startFio(dev, jobs, "jobs"))
}

// fioVerify runs the whole matrix on a device.
func (h *host) fioVerify(dev string, sector int) {
	h.Helper()
	h.fio(dev, fioMatrix(sector))
}

// ext4 makes a file system, fills it, takes it through unmount, fsck and trim, and wipes it.
func (h *host) ext4(dev string) {
	h.Helper()
	h.runFor(time.Minute, "mkfs.ext4 -q -F -E lazy_itable_init=0,lazy_journal_init=0 %s", dev)
	h.run("mount -t ext4 -o discard %s /mnt", dev)
	h.runFor(time.Minute, "cd /mnt && mkdir d && for i in 1 2 3 4 5 6 7 8; do "+
		"head -c ${i}23457 /dev/urandom > d/$i; done && cp /usr/sbin/fio big && ln big link && sync")
	h.run("cd /mnt && find . -type f | sort | xargs sha256sum > /tmp/sums && rm d/3 d/5 && sync")
	h.runFor(time.Minute, "umount /mnt")
	h.run("e2fsck -f -n %s", dev)
	h.run("mount -t ext4 %s /mnt", dev)
	h.run(`cd /mnt && grep -v -e d/3 -e d/5 /tmp/sums | sha256sum -c`)
	if out := h.run("/usr/sbin/fstrim -v /mnt"); !strings.Contains(out, "trimmed") {
		h.Errorf("fstrim: %s", out)
	}
	h.run("echo 3 > /proc/sys/vm/drop_caches; cd /mnt && grep -v -e d/3 -e d/5 /tmp/sums | sha256sum -c")
	h.run("umount /mnt && e2fsck -f -n %s", dev)
	h.run("/usr/sbin/blkdiscard -f %s", dev)
	h.fails("(?i)bad magic|superblock", "e2fsck -f -n %s", dev)
}
