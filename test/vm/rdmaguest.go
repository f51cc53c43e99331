package vm

import (
	"encoding/json"
	"fmt"
	"time"
)

// The two ends of the virtual cable in an RDMA guest, that of the target and that of the host, each with its own soft
// RoCE device. Both are in one kernel, but their traffic crosses the cable.
//
//	┌ guest ─────────────────────────────────────────────────────────────┐
//	│ nvme-rdma, jbofbench ── rxe1 ── hst0 ═══════ tgt0 ── rxe0 ── jbofd │
//	│                               10.77.0.2    10.77.0.1               │
//	└────────────────────────────────────────────────────────────────────┘
const (
	TargetAddress  = "10.77.0.1"
	TargetAddress6 = "fd77::1"
	PeerAddress    = "10.77.0.2"
	PeerAddress6   = "fd77::2"
)

// rdmaLinks creates the RDMA devices that do not exist yet.
const rdmaLinks = `rdma link show rxe0/1 >/dev/null 2>&1 || rdma link add rxe0 type rxe netdev tgt0
rdma link show rxe1/1 >/dev/null 2>&1 || rdma link add rxe1 type rxe netdev hst0
`

// rdmaNetwork connects the cable. By default the kernel would route packets to an address of its own over lo. So the
// table of local addresses is used only for packets that come in over the cable, and packets to one end leave by the
// interface of the other. RDMA's connection manager looks up routes the same way.
//
// No packet may overtake another or get lost: soft RoCE of Linux 6.1 repeats not only the sends but also the
// registrations of memory before them, which then fail ("rxe_reg_fast_mr: mr->lkey = … not free"), and the connection
// hangs. A virtual cable delivers on the processor that sends, and a queue pair's work moves between processors; hence
// one processor receives everything, from a long queue.
const rdmaNetwork = `set -e
ip=/usr/sbin/ip
echo 100000 > /proc/sys/net/core/netdev_max_backlog
$ip link add tgt0 type veth peer name hst0
for i in tgt0 hst0; do
	echo 0 > /proc/sys/net/ipv4/conf/$i/rp_filter
	echo 1 > /proc/sys/net/ipv4/conf/$i/accept_local
	echo 1 > /sys/class/net/$i/queues/rx-0/rps_cpus
	$ip link set $i mtu 4500 # more than 4096, the largest MTU of RDMA, with its headers
	$ip link set $i up
done
$ip addr add 10.77.0.1/24 dev tgt0
$ip addr add 10.77.0.2/24 dev hst0 noprefixroute
$ip addr add fd77::1/64 dev tgt0 nodad
$ip addr add fd77::2/64 dev hst0 nodad noprefixroute
for f in -4 -6; do
	$ip $f rule add pref 10 iif tgt0 lookup local
	$ip $f rule add pref 11 iif hst0 lookup local
	$ip $f rule add pref 100 lookup local
	$ip $f rule del pref 0
done
$ip rule add pref 20 to 10.77.0.1 lookup 101
$ip rule add pref 21 to 10.77.0.2 lookup 102
$ip route add 10.77.0.1 dev hst0 src 10.77.0.2 table 101
$ip route add 10.77.0.2 dev tgt0 src 10.77.0.1 table 102
$ip -6 rule add pref 20 to fd77::1 lookup 101
$ip -6 rule add pref 21 to fd77::2 lookup 102
$ip -6 route add fd77::1 dev hst0 src fd77::2 table 101
$ip -6 route add fd77::2 dev tgt0 src fd77::1 table 102
` + rdmaLinks

// rdmaDisks makes two memory disks for the kernel's target, of either sector size, and one with a file system for the
// daemons' files.
const rdmaDisks = `set -e
disk() {
	mkdir /sys/kernel/config/nullb/$1
	cd /sys/kernel/config/nullb/$1
	echo $2 > size; echo $3 > blocksize; echo 1 > memory_backed; echo 1 > discard; echo 1 > power
}
disk disk512 64 512
disk disk4k 64 4096
disk files 768 512
mkfs.ext4 -q -F -O ^has_journal /dev/files
mkdir -p ` + guestData + `
mount -t ext4 /dev/files ` + guestData

// The cable is cut by giving each end a wrong hardware address of the other: packets can still be sent, and the
// receiver drops them. Taking an interface down instead makes soft RoCE of Linux 6.1 report failed sends to the
// connection manager, which then hangs for ever ("cm_destroy_id_wait_timeout").
const (
	rdmaCut = `for i in tgt0 hst0; do for a in 10.77.0.1 10.77.0.2 fd77::1 fd77::2; do
	/usr/sbin/ip neigh replace $a lladdr 02:00:00:00:00:99 dev $i nud permanent
done; done`
	rdmaMend = `for i in tgt0 hst0; do /usr/sbin/ip neigh flush nud permanent dev $i 2>/dev/null; done
` + rdmaLinks
)

// rdmaEnvironment names the devices for a test of package verbs.
const rdmaEnvironment = "JBOFD_RDMA_ADDR=" + TargetAddress + " JBOFD_RDMA_ADDR6=" + TargetAddress6 +
	" JBOFD_RDMA_PEER=" + PeerAddress + " JBOFD_RDMA_PEER6=" + PeerAddress6 + " JBOFD_RDMA_LINK='rxe0 tgt0' "

// BootRDMA boots a guest with soft RoCE, its cable and its disks. Modules and Files of the options are added to what
// that needs.
func BootRDMA(o BootOptions) (*Guest, error) {
	o.Modules = append(append(append([]string(nil), hostModules...), rdmaModules...), o.Modules...)
	for _, pattern := range []string{rxeProvider, rxeDriver} {
		f, err := findFile(pattern)
		if err != nil {
			return nil, err
		}
		o.Files = append(o.Files, File{From: f, To: f})
	}
	// Host and target are in one kernel: over TCP one receives the very pages that the other has sent. Some of them are
	// in blocks of pages that are not compound, which hardened usercopy mistakes for an overrun.
	o.CommandLine += " hardened_usercopy=off"
	g, err := Boot(o)
	if err != nil {
		return nil, err
	}
	// An I/O without an answer times out after 10 s instead of 30 s.
	for _, script := range []string{rdmaNetwork, rdmaDisks, "echo 10 > /sys/module/nvme_core/parameters/io_timeout"} {
		if err := g.succeed(time.Minute, script); err != nil {
			g.Close()
			return nil, fmt.Errorf("boot: %w\n%s", err, g.Console())
		}
	}
	return g, nil
}

// buildRDMA builds a program of this module with RDMA support.
func buildRDMA(to, pkg string) error {
	return goCommand([]string{"CGO_ENABLED=1"}, "build", "-tags", "rdma invariants", "-o", to, pkg)
}

// buildRDMATest builds the tests of a package with RDMA support.
func buildRDMATest(to, pkg string) error {
	return goCommand([]string{"CGO_ENABLED=1"}, "test", "-c", "-tags", "rdma invariants", "-o", to, pkg)
}

// rdmaObjects counts the objects on the guest's RDMA devices, without those of the kernel itself.
type rdmaObjects struct {
	// Connections counts CM identifiers that have a peer. Bound counts those that listen or that are bound only to
	// learn of the removal of their device.
	Connections, Bound int
	QPs, CQs, MRs, PDs int
	SRQs               int
}

// rdmaResource is a part of what rdma -j resource show prints.
type rdmaResource struct {
	Comm  string
	State string
}

// rdmaObjects counts the objects.
func (g *Guest) rdmaObjects() (rdmaObjects, error) {
	var n rdmaObjects
	for _, kind := range []struct {
		name  string
		count *int
	}{{"qp", &n.QPs}, {"cm_id", &n.Connections}, {"cq", &n.CQs}, {"mr", &n.MRs}, {"pd", &n.PDs}, {"srq", &n.SRQs}} {
		r, err := g.Do(10*time.Second, "rdma -j resource show "+kind.name)
		if err != nil {
			return n, err
		}
		if r.Code != 0 {
			return n, fmt.Errorf("%v", r)
		}
		var found []rdmaResource
		if r.Stdout != "" { // as it is when there is none
			if err := json.Unmarshal([]byte(r.Stdout), &found); err != nil {
				return n, fmt.Errorf("%v: %w", r, err)
			}
		}
		for _, o := range found {
			switch {
			case kernelOwner[o.Comm]:
			case o.State == "LISTEN" || o.State == "ADDR_BOUND":
				n.Bound++
			default:
				*kind.count++
			}
		}
	}
	return n, nil
}

// kernelOwner matches the parts of the kernel that have objects even without a connection: the management queue pair of
// each port and, after its first use, a pool of completion queues for each device.
var kernelOwner = map[string]bool{"ib_core": true}
