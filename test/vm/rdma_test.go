//go:build vm

package vm

import (
	"fmt"
	"net"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Programs in the RDMA guest beside jbofd.
const (
	guestBench      = "/usr/sbin/jbofbench"
	guestVerbsTests = "/usr/sbin/verbs.test"
	guestHostile    = "/usr/sbin/rdmahost.test"
	guestE2E        = "/usr/sbin/e2e.test"
)

// TestRDMA boots one guest with soft RoCE. It runs the kernel's host against the kernel's target, to validate the
// harness and the machine; the tests of package verbs; and both the kernel's host and jbofd's own host against jbofd.
func TestRDMA(t *testing.T) {
	if err := CheckNeeds(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	files := buildCluster(t, dir)
	for _, f := range []struct {
		to, pkg string
		build   func(to, pkg string) error
	}{
		{guestJbofd, "./cmd/jbofd", buildRDMA},
		{guestBench, "./cmd/jbofbench", buildRDMA},
		{guestVerbsTests, "./internal/nvmeof/rdma/verbs", buildRDMATest},
		{guestHostile, "./test/vm/rdmahost", buildRDMATest},
		{guestE2E, "./test/e2e", buildRDMATest},
	} {
		from := filepath.Join(dir, filepath.Base(f.to))
		if err := f.build(from, f.pkg); err != nil {
			t.Fatal(err)
		}
		files = append(files, File{From: from, To: f.to})
	}
	metrics := make([]int, 2) // no scenario has more daemons at once
	for i := range metrics {
		var err error
		if metrics[i], err = freePort(); err != nil {
			t.Fatal(err)
		}
	}
	g := bootWith(t, BootRDMA, BootOptions{Files: files, Forward: metrics, MemoryMiB: 2048})
	runScenarios(t, g, place{
		site: &guestSite{g: g, transport: "rdma", metrics: metrics},
		cut:  rdmaCut, mend: rdmaMend, rdma: true,
	}, rdmaScenarios)
}

var rdmaScenarios = []scenario{
	{"the kernel's target carries data and a file system", func(h *host) {
		a := address{"rdma", TargetAddress, 4420}
		h.serveKernelTarget(a, "/dev/disk512")
		h.useKernelTarget(a)
	}},
	{"jbofd's host verifies what it wrote to the kernel's target", func(h *host) {
		h.bench(address{"rdma", TargetAddress, 4420}, kernelNQN, "4k", "64k", "1m")
		h.run("%s", `cd /sys/kernel/config/nvmet && rm ports/1/subsystems/* && rmdir ports/1`)
	}},
	{"verbs pass their tests on soft RoCE", func(h *host) {
		h.disturbs = true // they remove the device
		out := h.runFor(3*time.Minute, "cd /tmp && %s %s -test.v -test.timeout 2m 2>&1", rdmaEnvironment,
			guestVerbsTests)
		for _, m := range regexp.MustCompile(`--- SKIP: (\S+)`).FindAllStringSubmatch(out, -1) {
			if m[1] != "TestOpenSaysWhatIsMissing" { // nothing is missing here
				h.Errorf("%s was skipped", m[1])
			}
		}
	}},
	{"discovery lists listeners of both transports on both", discoveryOfBoth},
	{"the controller says what it takes over RDMA", controllerOverRDMA},
	{"fio verifies what it wrote, in and out of the capsule, up to 1 MiB", func(h *host) {
		d := h.daemon(oneSubsystem("mem"))
		h.connect(d.ioAddress(), nqnA, "-i 2")
		var jobs []fioJob
		// Data longer than in_capsule_bytes is not in the command capsule, not even its beginning.
		for _, size := range []struct{ bs, amount string }{{"512", "64k"}, {"4k", "1m"}, {"8k", "1m"}, {"12k", "1536k"},
			{"64k", "2m"}, {"128k", "4m"}, {"1m", "8m"}} {
			jobs = append(jobs, fioJob{"randrw", size.bs, size.amount})
		}
		h.fio(h.device(nqnA, 2), jobs)
		h.fio(h.device(nqnA, 1), append(jobs[1:len(jobs):len(jobs)], fioJob{"write", "4k", "512k"},
			fioJob{"write", "1m", "8m"}))
	}},
	{"read, write and poll queues of their own carry data", queuesOfTheirOwn},
	{"ext4 keeps files over unmount and fsck, and trims", func(h *host) {
		d := h.daemon(oneSubsystem("file"))
		h.connect(d.ioAddress(), nqnA, "")
		h.ext4(h.device(nqnA, 1))
	}},
	{"an RDMA and a TCP listener are two paths to one device, and one is enough", twoPaths},
	{"IPv6 carries RDMA too", func(h *host) {
		d := h.daemon(oneSubsystem("mem"))
		a := address{"rdma", TargetAddress6, d.at.io}
		h.connect(a, nqnA, "")
		h.fio(h.device(nqnA, 1), []fioJob{{"randrw", "4k", "256k"}, {"randwrite", "128k", "1m"}})
	}},
	{"a namespace of keys and values is no disk, disturbs none, and is there for nvme-cli", keysAndValues},
	{"jbofd's host verifies what it wrote to jbofd", func(h *host) {
		d := h.daemon(oneSubsystem("mem"))
		h.bench(d.ioAddress(), nqnA, "4k", "8k", "64k", "1m")
		h.run("%s discover %s", guestBench, d.ioAddress().target())
	}},
	{"jbofd's host keeps data, credits and identities over RDMA as over TCP", func(h *host) {
		// Tests of test/e2e that use no sockets of their own; digests are TCP's.
		h.runFor(4*time.Minute, "cd /tmp && %s -daemon %s -rdma %s -test.parallel 1 -test.timeout 225s -test.run "+
			"'^(%s)$/^digests=false$/^nsid=[13]$' 2>&1", guestE2E, guestJbofd, TargetAddress,
			strings.Join([]string{"TestDataIsKept", "TestCompareAndWriteLosesNoUpdate",
				"TestAHostThatLeavesItsCommandIsFree",
				"TestCreditsComeBackAfterARestart", "TestIdentityIsStableOverRestarts",
				"TestStopWaitsForOutstandingCommands"}, "|"))
	}},
	{"three nodes are a cluster over RDMA, and one is killed", clusterOverRDMA},
	{"connecting and disconnecting leaves nothing behind", connectCycles},
	{"many hosts that connect at once all get in", connectStorm},
	{"more queue pairs than there may be are refused, and trouble nobody", tooManyQueuePairs},
	{"hosts with bad private data, SGLs and keys are answered, and trouble nobody", hostileHosts},
	{"commands that meet no receive are told to try again, and none is lost", func(h *host) {
		s := oneSubsystem("mem")
		s.Limits = "{rdma_receives: 32}"
		d := h.daemon(s)
		h.connect(d.ioAddress(), nqnA, "-i 2")
		h.fio(h.device(nqnA, 1), []fioJob{{"randrw", "4k", "1m"}})
	}},
	{"kill -9 under load loses nothing that was acknowledged", killUnderLoad},
	{"a host without traffic is thrown out when its keep alive time is over, and comes back", keepAliveExpiry},
	{"a stopped daemon is gone within five seconds under load, and the host waits for it", stopUnderLoad},
	{"the daemon outlives the removal of its RDMA device under load, and serves when it is back", targetLinkRemoved},
	{"the daemon forgets a host whose RDMA device is removed under load", hostLinkRemoved},
}

// bench writes blocks of each size with jbofd's own host and reads them back.
func (h *host) bench(a address, nqn string, sizes ...string) {
	h.Helper()
	for i, bs := range sizes {
		amount, depth := "4m", 8
		if bs == "1m" {
			amount, depth = "8m", 2
		}
		h.runFor(time.Minute, "%s block -q %s --nqn %s --rw randrw --bs %s --iodepth %d --numjobs 2 --size %s "+
			"--verify crc32c --randseed %d 2>&1",
			guestBench, a.target(), nqn, bs, depth, amount, i+1)
	}
}

// target returns the address in the form that jbofbench accepts.
func (a address) target() string {
	return fmt.Sprintf("--target %s://%s", a.transport, net.JoinHostPort(a.host, strconv.Itoa(a.port)))
}

func discoveryOfBoth(h *host) {
	s := oneSubsystem("mem")
	s.Subsystems = append(s.Subsystems, Subsystem{NQN: nqnB,
		Namespaces: []Namespace{{NSID: 1, SSD: "ssd0", Size: "32MiB", BlockSize: 4096}}})
	d := h.daemon(s)
	want := map[string]bool{}
	for _, l := range []address{d.ioAddress(), d.secondAddress(), {d.at.transport, d.at.ip6, d.at.io}} {
		want[fmt.Sprintf("%s %s %d", l.transport, l.host, l.port)] = true
	}
	for _, a := range []address{d.discoveryAddress(), d.ioAddress(), d.secondAddress()} {
		log := h.discover(a, "")
		for _, nqn := range []string{nqnA, nqnB} {
			entries := log.entries(nqn)
			for _, e := range entries {
				family := "ipv4"
				if strings.Contains(e.TrAddr, ":") {
					family = "ipv6"
				}
				if !want[fmt.Sprintf("%s %s %s", e.TrType, e.TrAddr, strings.TrimSpace(e.TrSvcID))] ||
					e.AdrFam != family || e.SubType != "nvme subsystem" {
					h.Errorf("entry over %s: %+v", a.transport, e)
				}
			}
			if len(entries) != len(want) {
				h.Errorf("over %s %s is named %d times, want once for each of %v: %+v", a.transport, nqn, len(entries),
					want, log)
			}
		}
	}
	h.matches("nvme discover "+d.ioAddress().flags(), `trtype:\s+rdma`, `rdma_qptype:\s+connected`,
		`rdma_cms:\s+rdma-cm`)
	h.run("nvme connect-all %s", d.ioAddress().flags())
	h.device(nqnA, 1)
	h.device(nqnA, 2)
	h.device(nqnB, 1)
	h.matches("nvme list-subsys", nqnA, nqnB, ` rdma traddr=10\.77\.0\.1.* live`, ` rdma traddr=fd77::1.* live`)
}

func controllerOverRDMA(h *host) {
	d := h.daemon(oneSubsystem("mem"))
	m := h.guest.Mark()
	ctrl := h.connect(d.ioAddress(), nqnA, "-i 2 -W 1")
	if _, err := h.guest.WaitConsole(m, 5*time.Second, mapped(1, 2, 0)); err != nil {
		h.Error(err)
	}
	var id idCtrl
	h.runJSON(&id, "nvme id-ctrl /dev/%s -o json", ctrl)
	if id.IOCCSZ < 64/16 || id.IORCSZ != 1 || id.ICDOff != 0 || id.MaxCmd == 0 || id.MDTS != 8 {
		h.Errorf("id-ctrl: %+v", id)
	}
	if keyed := id.SGLs >> 2 & 1; id.SGLs&3 == 0 || keyed != 1 {
		h.Errorf("SGLS is %#x: supported and keyed SGLs are what RDMA needs", id.SGLs)
	}
	h.run("nvme reset /dev/%s", ctrl)
	h.waitLive(ctrl, 20*time.Second)
	h.run("dd if=/dev/urandom of=%s bs=64k count=4 oflag=direct 2>&1", h.device(nqnA, 1))
}

// connectStorm uses jbofd's host, because the kernel's host connects to one controller after the other.
func connectStorm(h *host) {
	d := h.daemon(oneSubsystem("mem"))
	const hosts, queues = 8, 4
	var script strings.Builder
	for i := range hosts {
		uuid := fmt.Sprintf("%08d-0b6e-4b1c-9d0c-0123456789ab", i)
		fmt.Fprintf(&script, "%s block -q %s --nqn %s --rw randread --bs 4k --numjobs %d --size 256k --hostnqn "+
			"nqn.2014-08.org.nvmexpress:uuid:%s --hostid %s & p%d=$!\n",
			guestBench, d.ioAddress().target(), nqnA, queues, uuid, uuid, i)
	}
	for i := range hosts {
		fmt.Fprintf(&script, "wait $p%d || exit 1\n", i)
	}
	h.runFor(2*time.Minute, "%s", script.String())
	if n := h.metrics(d).Sum("jbof_connection_established_total"); n < hosts*(queues+1) {
		h.Errorf("%v connections were made, want %d", n, hosts*(queues+1))
	}
}

func tooManyQueuePairs(h *host) {
	s := oneSubsystem("mem")
	s.Subsystems = append(s.Subsystems, Subsystem{NQN: nqnB,
		Namespaces: []Namespace{{NSID: 1, SSD: "ssd0", Size: "32MiB", BlockSize: 4096}}})
	s.Limits = "{connections: 4, connections_per_host: 4}"
	d := h.daemon(s)
	ctrl := h.connect(d.ioAddress(), nqnA, "-i 2") // 3 of 4
	dev := h.device(nqnA, 1)
	for range 2 {
		h.fails(".", "nvme connect %s -n %s -i 2", d.ioAddress().flags(), nqnB)
		h.must(20*time.Second, "the refused host's queue pairs are given back", func() error {
			if n := h.metrics(d).Sum("jbof_connections"); n != 3 {
				return fmt.Errorf("%v connections", n)
			}
			return nil
		})
	}
	if n := h.metrics(d).Sum("jbof_connect_failures_total"); n == 0 {
		h.Error("jbof_connect_failures_total is 0")
	}
	h.fio(dev, []fioJob{{"randrw", "4k", "256k"}})
	if st := h.state(ctrl); st != "live" {
		h.Errorf("the controller is %s", st)
	}
	h.disconnect(nqnA)
	h.connect(d.ioAddress(), nqnB, "-i 2")
	h.device(nqnB, 1)
}

// hostileHosts sends commands that a kernel cannot be made to send.
func hostileHosts(h *host) {
	h.hostile = true
	d := h.daemon(oneSubsystem("mem"))
	a := d.ioAddress()
	h.connect(a, nqnA, "-i 2")
	out := h.runFor(2*time.Minute, "cd /tmp && JBOFD_RDMA_TARGET=%s JBOFD_RDMA_NQN=%s %s -test.v -test.timeout "+
		"90s 2>&1", net.JoinHostPort(a.host, strconv.Itoa(a.port)), nqnA, guestHostile)
	if strings.Contains(out, "--- SKIP") {
		h.Error("a test was skipped")
	}
	h.must(20*time.Second, "the 7 bad requests and the 4 bad keys are counted", func() error {
		if n := h.metrics(d).Sum("jbof_protocol_errors_total"); n < 7+4 {
			return fmt.Errorf("%v protocol errors", n)
		}
		return nil
	})
	h.fio(h.device(nqnA, 1), []fioJob{{"randrw", "4k", "256k"}})
}

// removable is a load that runs until it is interrupted, and its device.
func (h *host) removable(d *Daemon) (ctrl, dev string, load *Job) {
	h.Helper()
	ctrl = h.connect(d.ioAddress(), nqnA, patient+" -i 2 -k 5")
	dev = h.device(nqnA, 1)
	load = h.start(5*time.Minute, "fio --aux-path=/tmp --name=load --filename=%s --direct=1 --ioengine=libaio "+
		"--iodepth=8 --rw=randwrite --bs=16k --size=8m --verify=crc32c --verify_fatal=1 --rate_iops=60", dev)
	h.underLoad(load, dev, 50)
	return ctrl, dev, load
}

// removeLink removes an RDMA device. The kernel waits until every program has released it.
func (h *host) removeLink(link string) {
	h.Helper()
	r := h.try(20*time.Second, "rdma link delete %s", link)
	if r.Code != 0 {
		h.Fatalf("the RDMA device is not let go of:\n%v", r)
	}
}

func targetLinkRemoved(h *host) {
	h.disturbs = true
	d := h.daemon(oneSubsystem("file"))
	before := h.objects()
	ctrl, _, load := h.removable(d)
	h.removeLink("rxe0")
	h.waitState(ctrl, "connecting", 20*time.Second)
	// The daemon keeps running and serves over TCP in the meantime.
	if len(h.discover(d.secondAddress(), "").entries(nqnA)) == 0 {
		h.Error("nothing is discovered over TCP while the RDMA device is gone")
	}
	h.must(10*time.Second, "the daemon has no connection", func() error { return noConnections(d) })
	h.mend()
	h.waitLive(ctrl, 60*time.Second)
	h.finish(load)
	if n := h.objects().Bound; n != before.Bound {
		h.Errorf("%d CM identifiers are bound, %d were before the device was removed", n, before.Bound)
	}
}

func hostLinkRemoved(h *host) {
	h.disturbs = true
	d := h.daemon(oneSubsystem("mem"))
	_, _, load := h.removable(d)
	h.removeLink("rxe1")
	r, err := load.Wait()
	if err != nil {
		h.Fatal(err)
	}
	if r.Code == 0 {
		h.Error("the load did not notice that its device is gone")
	}
	h.must(30*time.Second, "the daemon forgets the host", func() error { return noConnections(d) })
	h.mend()
	h.connect(d.ioAddress(), nqnA, "-i 2")
	h.fio(h.device(nqnA, 1), []fioJob{{"randrw", "4k", "256k"}})
}
