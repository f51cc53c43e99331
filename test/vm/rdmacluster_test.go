//go:build vm

package vm

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Programs of a cluster in the RDMA guest beside jbofd and jbofbench. The server of etcd is in a jbofd without cgo,
// which other tests have built already.
const (
	guestCtl  = "/usr/sbin/jbofctl"
	guestEtcd = "/usr/sbin/jbofd-etcd"
)

const (
	clusterNQN     = "nqn.2026-11.example.jbofd:cluster"
	clusterNodes   = 3
	clusterRecords = 100
)

// clusterAddress is the address of a node, the first one 1, on the RDMA device. Like the device's own address it is
// reached from the other end of the cable, also by the other nodes.
func clusterAddress(node int) string { return fmt.Sprintf("10.77.0.%d", 10+node) }

// clusterNode is a jbofd that is a member of a cluster over RDMA. Its membership, which is TCP, is at the other end of
// the cable: all nodes connect from there, and are known by the addresses that they come from.
type clusterNode struct {
	Daemon
	name string
}

func (n *clusterNode) configuration(members string) string {
	i := strings.TrimPrefix(n.name, "n")
	return fmt.Sprintf(`node: {name: n%[1]s, data_dir: %[2]s}
log: {level: debug}
metrics: {address: "127.0.0.%[1]s:9420"}
admin: {socket: %[2]s/admin.sock}
listeners: [{transport: rdma, address: "%[3]s:4420"}]
discovery: {address: "127.0.0.%[1]s:8009"}
ssds: [{name: ssd0, backend: mem, size: 128MiB}]
subsystems:
  - {nqn: %[4]s, allow_any_host: true, namespaces: [{nsid: 1, ssd: ssd0, size: 96MiB, type: kv, replicated: true}]}
cluster:
  name: vm
  subsystem: %[4]s
  lease: 5s
  etcd: {endpoints: ["http://127.0.0.1:2379"]}
  nodes:
%[5]s`, i, n.dir, n.at.ip, clusterNQN, members)
}

// start starts the process.
func (n *clusterNode) start(h *host) {
	h.Helper()
	p, err := n.site.start(n.dir, n.configFile(), n.logLine)
	if err != nil {
		h.Fatal(err)
	}
	n.proc, n.killed = p, false
}

// ctl runs jbofctl at the node until it succeeds.
func (n *clusterNode) ctl(h *host, args string) {
	h.Helper()
	h.must(20*time.Second, "jbofctl "+args, func() error {
		if r := h.try(20*time.Second, "%s --socket %s/admin.sock cluster %s", guestCtl, n.dir, args); r.Code != 0 {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
}

// full waits until all copies are there.
func (n *clusterNode) full(h *host) {
	h.Helper()
	h.must(40*time.Second, "all copies are there", func() error {
		r := h.try(10*time.Second, "%s --socket %s/admin.sock cluster status", guestCtl, n.dir)
		if r.Code != 0 || !strings.Contains(r.Stdout, " 16: 16 full,") || strings.Contains(r.Stdout, "problem ") {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
}

// ready is what a server of etcd says.
var ready = regexp.MustCompile(`^ready$`)

// startCluster starts a server of etcd and the nodes, and makes the cluster. All ends with the scenario.
func startCluster(h *host) (nodes []*clusterNode) {
	h.Helper()
	site := h.where.site.(*guestSite)
	members := ""
	for i := 1; i <= clusterNodes; i++ {
		a := clusterAddress(i)
		h.run(`set -e
ip=/usr/sbin/ip
$ip addr add %[1]s/24 dev tgt0 noprefixroute
$ip rule add pref 20 to %[1]s lookup 101
$ip route add %[1]s dev hst0 src %[2]s table 101`, a, PeerAddress)
		h.Cleanup(func() {
			h.guest.Do(10*time.Second, fmt.Sprintf("ip=/usr/sbin/ip; $ip rule del to %[1]s; $ip addr del %[1]s/24 dev "+
				"tgt0; $ip route del %[1]s table 101", a))
		})
		n := &clusterNode{name: fmt.Sprint("n", i)}
		n.site, n.dir = site, fmt.Sprintf("%s/%s", guestData, n.name)
		n.at = endpoints{transport: "rdma", ip: a, io: 4420}
		members += fmt.Sprintf("    - {name: %s, address: \"%s:%d\", target: \"rdma://%s:4420\"}\n", n.name,
			PeerAddress, 4430+i, a)
		nodes = append(nodes, n)
	}
	dir := guestData + "/etcd"
	h.run("mkdir -p %s", dir)
	etcd := &Daemon{}
	job, err := h.guest.Stream(time.Hour, fmt.Sprintf("exec %s etcd --cluster vm --name one --member "+
		"one=http://127.0.0.1:2380 --dir %s/data --client-url http://127.0.0.1:2379", guestEtcd, dir), etcd.logLine)
	if err != nil {
		h.Fatal(err)
	}
	h.Cleanup(func() {
		job.Kill()
		job.Wait() // it was killed
		h.guest.Do(30*time.Second, "rm -rf "+guestData+"/etcd "+guestData+"/n?")
		if h.Failed() {
			for _, n := range nodes {
				h.Logf("the log of %s:\n%s", n.name, tail(n.Log(), 100))
			}
			h.Logf("the log of etcd:\n%s", tail(etcd.Log(), 20))
		}
	})
	for _, n := range nodes {
		h.Cleanup(func() {
			if n.Running() {
				n.Kill()
			}
		})
		h.run("mkdir -p %s", n.dir)
		h.put(n.configFile(), n.configuration(members))
	}
	h.must(30*time.Second, "etcd serves", func() error {
		if etcd.LogMatches(0, ready) == "" {
			return fmt.Errorf("%s", etcd.Log())
		}
		return nil
	})
	for _, n := range nodes {
		n.start(h)
	}
	nodes[0].ctl(h, "init --replicas 3 --ranges 16")
	nodes[0].full(h)
	return nodes
}

// clusterBench is a phase of jbofbench, over RDMA. The nodes but the first one are known from its map.
func clusterBench(phase, args string) string {
	return fmt.Sprintf("%s kv %s -p recordcount=%d -p fieldcount=1 -p fieldlength=200 -p readproportion=0.95 -p "+
		"updateproportion=0.05 -p requestdistribution=zipfian --cluster rdma://%s:4420 --nqn %s --depth 4 "+
		"--op_timeout 30s --state /tmp/cluster.state -s %s 2>&1", guestBench, phase, clusterRecords,
		clusterAddress(1), clusterNQN, args)
}

// clusterOverRDMA is three nodes with three copies of each key. They talk to each other over RDMA, and so does their
// host. One is killed under load: what was under way is repeated, and nothing fails or is lost.
func clusterOverRDMA(h *host) {
	begin := time.Now()
	step := func(what string) { h.Logf("%v: %s", time.Since(begin).Round(time.Millisecond), what) }
	h.Cleanup(func() { h.guest.Do(10*time.Second, "rm -f /tmp/cluster.state") })
	nodes := startCluster(h)
	step("all copies are there")
	for _, n := range nodes {
		for _, other := range nodes {
			if n == other {
				continue
			}
			connected := regexp.MustCompile(`msg=connected .*transport=rdma .*:node:vm:` + other.name + ` `)
			h.must(20*time.Second, other.name+" has connected to "+n.name+" over RDMA", func() error {
				if n.LogMatches(0, connected) == "" { // a new cluster has nothing to copy, and is full before that
					return errors.New("it is not in its log")
				}
				return nil
			})
		}
		if l := n.LogMatches(0, regexp.MustCompile(`msg=connected .*transport=tcp`)); l != "" {
			h.Errorf("%s was connected to over TCP: %s", n.name, l)
		}
	}
	out := h.runFor(time.Minute, "%s", clusterBench("load", ""))
	if want := fmt.Sprintf("[INSERT], Return=OK, %d\n", clusterRecords); !strings.Contains(out, want) {
		h.Errorf("no %q in\n%s", want, out)
	}
	step("records are loaded")

	victim := nodes[1]
	going, lines := make(chan struct{}, 1), &Daemon{}
	job, err := h.guest.Stream(time.Minute, clusterBench("run", "-p maxexecutiontime=8 -p operationcount=1000000"),
		func(l string) {
			lines.logLine(l)
			if strings.Contains(l, " operations; ") {
				select {
				case going <- struct{}{}:
				default:
				}
			}
		})
	if err != nil {
		h.Fatal(err)
	}
	select {
	case <-going:
		victim.Kill()
	case <-time.After(30 * time.Second):
		h.Error("the run does not get on")
	}
	r, err := job.Wait()
	if err != nil {
		h.Fatal(err)
	}
	if r.Code != 0 {
		h.Errorf("the run ends with %v:\n%s", r, lines.Log())
	}
	count := func(what string) int {
		m := regexp.MustCompile(`(?m)^\[` + what + `, (\d+)$`).FindStringSubmatch(lines.Log())
		if m == nil {
			return 0
		}
		n, _ := strconv.Atoi(m[1]) // digits
		return n
	}
	reads, updates, retries := count(`READ\], Return=OK`), count(`UPDATE\], Return=OK`), count(`STORE\], Retries`)
	step(fmt.Sprintf("%s was killed during %d reads and %d updates, of which %d were repeated", victim.name, reads,
		updates, retries))
	if reads < 100 || updates == 0 || retries == 0 || reads != count(`READ\], Operations`) ||
		updates != count(`UPDATE\], Operations`) {
		h.Errorf("the run:\n%s", lines.Log())
	}
	victim.start(h)
	victim.full(h)
	step("all copies are there again")
	out = h.runFor(time.Minute, "%s", clusterBench("verify", ""))
	if want := fmt.Sprintf("[VERIFY], Return=OK, %d\n", clusterRecords); !strings.Contains(out, want) {
		h.Errorf("no %q in\n%s", want, out)
	}
	step("all that was acknowledged is there")
	for _, n := range nodes {
		if err := n.proc.signal(syscall.SIGTERM); err != nil {
			h.Error(err)
		}
	}
	for _, n := range nodes {
		select {
		case <-n.proc.ended():
			if err := n.proc.outcome(); err != nil {
				h.Errorf("%s ended with %v", n.name, err)
			}
		case <-time.After(15 * time.Second):
			h.Errorf("%s does not end", n.name)
		}
	}
	step("all have stopped")
}

// buildCluster builds the programs that a cluster needs beside jbofd and jbofbench, and returns what to put into the
// guest.
func buildCluster(t *testing.T, dir string) []File {
	t.Helper()
	ctl, etcd := dir+"/jbofctl", dir+"/jbofd-etcd"
	if err := goBuild(ctl, "./cmd/jbofctl"); err != nil {
		t.Fatal(err)
	}
	if err := goBuild(etcd, "./cmd/jbofd", "-tags", "etcd", "-ldflags", "-s -w"); err != nil {
		t.Fatal(err)
	}
	return []File{{From: ctl, To: guestCtl}, {From: etcd, To: guestEtcd}}
}
