package node

import (
	"fmt"
	"slices"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/lab"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// Fault model of Node: its process dies at any instant, alone or with the power of its drives, or is stopped in order
// while hosts use it, and is started again.
// Its clock is wrong within the bounds of lab.Clock. Namespaces are removed, added and published anew while hosts use
// them.

// Names and sizes of the simulated node.
const (
	// Address is where it listens, SubNQN its subsystem.
	Address = "node:4420"
	SubNQN  = "nqn.2026-11.example.jbofd:lab"

	blockShift     = 9
	blockBytes     = 1 << blockShift
	inCapsuleBytes = 4096
	ioQueues       = 2
	ioDepth        = 15
	poolBytes      = 8 << 20
)

var limits = nvmeof.Limits{MDTSBytes: 64 << 10, FusedBytes: 16 << 10}

// Node is one life of a simulated node: everything that the daemon joins, on a Sim.
type Node struct {
	lab       *Lab
	process   *lab.Process
	pool      *bufpool.Pool
	devices   []*lab.Device
	drives    []*drive.Drive
	service   *target.Service
	admission *connection.Admission
	conns     map[*conn]bool
}

// startNode starts the node's process on its drives.
func (l *Lab) startNode() (*Node, error) {
	n := &Node{lab: l, process: l.Sim.NewProcess(l.clock), conns: map[*conn]bool{}}
	var err error
	if n.pool, err = bufpool.New(bufpool.Config{TotalBytes: poolBytes}); err != nil {
		return nil, err
	}
	for i, disk := range l.Disks {
		dev := lab.NewDevice(l.Sim, fmt.Sprintf("ssd%d", i), disk)
		dev.AtOnceOneIn = []int{0, 2, 20}[l.rng.IntN(3)]
		d, err := drive.New(drive.Config{Device: dev, Pool: n.pool, Depth: 1 + l.rng.IntN(12), Policy: l.policy(),
			Env: n.process})
		if err != nil {
			return nil, err
		}
		n.devices, n.drives = append(n.devices, dev), append(n.drives, d)
	}
	machine := nvmeof.New(nvmeof.Config{Firmware: "lab", Limits: limits, InCapsuleBytes: inCapsuleBytes, MaxEntries: 64,
		MaxIOQueues:    8,
		MaxControllers: 64, MaxHosts: 16, MaxDiscovery: 8, MaxDiscoveryPerPeer: 8, MinKATOMS: 1000,
		DiscoveryIdleMS: 120000})
	n.service = target.New(target.Config{Target: machine, SSDs: n.drives, Pool: n.pool, Env: n.process, Log: l.log,
		Events: target.Events{KeepAliveExpired: func(c *nvmeof.Controller, idle time.Duration) {
			l.Sim.Tracef("target: controller %d of %s expires after %v", c.ID, c.HostNQN, idle)
		}}})
	n.admission = connection.NewAdmission(connection.AdmissionLimits{Connections: 256, PerHost: 128, Pending: 64,
		PendingPerAddress: 64}, l.tel)
	for _, d := range n.drives {
		d.SetTenant(target.Background, pipeline.Settings{Weight: 1})
	}
	for _, ns := range l.namespaces {
		if ns.kv {
			if err := n.openStore(ns); err != nil {
				return nil, err
			}
		}
	}
	n.apply()
	l.Net.Listen(Address, n.accept)
	return n, nil
}

// task runs f soon, unless the process has died.
func (n *Node) task(f func()) { n.process.Go(f) }

// apply publishes the namespaces that are there.
func (n *Node) apply() {
	st := nvmeof.SubsystemState{NQN: SubNQN, Serial: "lab", Model: "lab", AllowAnyHost: true}
	for _, ns := range n.lab.namespaces {
		if !ns.there {
			continue
		}
		pub := &nvmeof.Namespace{NSID: ns.nsid, SSD: ns.disk, OffsetBytes: units.DriveOffset(ns.offset),
			SizeBytes: units.Bytes(ns.bytes), BlockShift: blockShift, VolatileCache: ns.volatile, ANAGroup: 1,
			ANAState: nvme.ANAStateOptimized, UUID: [16]byte{byte(ns.nsid), 1}}
		if ns.kv {
			ns.publish(pub)
		}
		st.Namespaces = append(st.Namespaces, pub)
	}
	n.service.Apply(nvmeof.State{Subsystems: []nvmeof.SubsystemState{st},
		Ports: []nvmeof.Port{{ID: 1, TRTYPE: nvme.TRTYPETCP, ADRFAM: nvme.ADRFAMIPv4, Address: "10.0.0.2",
			Service: "4420"}}})
}

// remove takes a namespace away and returns when nothing is done to its extent any more.
func (n *Node) remove(ns *namespace) {
	ns.there = false
	n.apply()
	for _, d := range n.drives {
		if !n.process.Wait(d.Quiesce(), quiesceTimeout) {
			n.lab.Violation("%s: commands of a removed namespace are in flight after %v", ns.name, quiesceTimeout)
		}
	}
	if ns.kv {
		n.closeStore(ns)
	}
	ns.gone = true
}

// quiesceTimeout is how long what was under way at a removed namespace may take.
const quiesceTimeout = 60 * time.Second

// kill is the end of the process, and of the drives' power if power says so.
func (n *Node) kill(power bool) {
	n.process.Kill()
	n.lab.Net.Listen(Address, nil)
	for c := range n.conns {
		c.dead = true
	}
	for _, c := range n.connsInOrder() {
		c.end.Cut(5e6)
	}
	for _, d := range n.devices {
		d.Kill(power)
	}
}

func (n *Node) connsInOrder() []*conn {
	all := make([]*conn, 0, len(n.conns))
	for c := range n.conns {
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b *conn) int { return int(a.ID()) - int(b.ID()) })
	return all
}

// closeNS is how long the daemon waits for drives after it has closed the connections.
const closeNS = 900e6

// drain is the first part of a stop, as the daemon does it: commands go on until none is in flight, for drainNS at
// most; then the associations end and the connections close. It reports whether the drives have answered by the time
// at which the daemon gives up.
func (n *Node) drain(drainNS int64) bool {
	n.lab.Net.Listen(Address, nil)
	n.lab.Sim.Run(drainNS, func() bool { return n.lab.violation != "" || n.inFlight() == 0 })
	n.service.Stop("the target is shutting down")
	for _, c := range n.connsInOrder() {
		c.shut("the target is shutting down")
	}
	return n.lab.Sim.Run(closeNS, func() bool { return n.lab.violation != "" || len(n.conns) == 0 })
}

// stop ends a node whose hosts are gone, and holds it to having given everything back.
func (n *Node) stop() {
	n.lab.Net.Listen(Address, nil)
	if !n.lab.Sim.Run(answerNS, func() bool { return len(n.conns) == 0 }) {
		n.lab.Violation("%d connections do not end, of them %d with commands in flight", len(n.conns), n.inFlight())
		return
	}
	for _, ns := range n.lab.namespaces {
		if ns.kv && ns.there {
			n.closeStore(ns)
		}
	}
	n.service.Close()
	for _, d := range n.drives {
		if err := d.Close(); err != nil {
			n.lab.Violation("a drive does not close: %v", err)
		}
	}
	if err := n.pool.Close(); err != nil {
		n.lab.Violation("%v", err)
	}
}

func (n *Node) inFlight() (busy int) {
	for c := range n.conns {
		if c.InFlight() > 0 {
			busy++
		}
	}
	return busy
}

// namespace is a namespace and the model of what it holds.
type namespace struct {
	name          string
	nsid          uint32
	disk          int
	offset, bytes int64
	kv            bool
	volatile      bool
	registers     []*register
	// there: it is published. gone: it was removed, and nothing may be done to its extent. goneNS is until when it was
	// not there.
	there, gone bool
	goneNS      int64
	store       store
}

var _ ssd.Device = (*lab.Device)(nil)
