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
	"jbofd/internal/partition"
	"jbofd/internal/pipeline"
	"jbofd/internal/publish"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
)

// Fault model of Node: its process dies at any instant, alone or with the power of its drives, or is stopped in order,
// and is started again. It may be frozen for a while (lab.Process.Stop). Its clock is wrong within the bounds of
// lab.Clock.

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
	publisher *publish.Publisher
	area      *partition.Area // nil without swapping, or if its drive is away
	conns     map[*conn]bool
	startedNS int64
	// payers count the I/Os of drives. caps are those of tenants that are configured. paidRead and paidWritten are the
	// bytes that hosts were charged for and that were not answered.
	payers                [drives]payers
	caps                  map[tenant.ID]pipeline.Caps
	paidRead, paidWritten int64
	// taken is memory that other users have. ending: the node ends in order, and they have given it back.
	taken  []taken
	ending bool
	// stoppedNS is when all associations were ended for a stop, 0: they were not.
	stoppedNS int64
	// flushedNS is when stop began to flush the drives, flushed says which have done so.
	flushedNS int64
	flushed   [drives]bool
}

// startNode starts the node's process on its drives.
func (l *Lab) startNode() (*Node, error) {
	n := &Node{lab: l, process: l.Sim.NewProcess(l.clock), conns: map[*conn]bool{}}
	var err error
	if n.pool, err = bufpool.New(bufpool.Config{TotalBytes: poolBytes}); err != nil {
		return nil, err
	}
	for i, disk := range l.Disks {
		if disk.Gone() {
			n.devices, n.drives = append(n.devices, nil), append(n.drives, nil)
			continue
		}
		dev := lab.NewDevice(l.Sim, fmt.Sprintf("ssd%d", i), disk)
		dev.Deliver = n.process.Deliver
		dev.AtOnceOneIn = []int{0, 2, 20}[l.rng.IntN(3)]
		depth := 1 + l.rng.IntN(12)
		policy, err := l.policy(i, depth, n.calibrate(i, dev))
		if err != nil {
			return nil, err
		}
		n.payers[i] = payers{Policy: policy, n: n, disk: i, windows: map[tenant.ID]*capWindow{}}
		d, err := drive.New(drive.Config{Device: dev, Pool: n.pool, Depth: depth, Policy: &n.payers[i],
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
		if d != nil {
			d.SetTenant(target.Background, pipeline.Settings{Weight: 1})
		}
	}
	n.publisher = publish.New(publish.Config{Service: n.service, Closed: n.storeClosed})
	if err := n.openStores(); err != nil {
		return nil, err
	}
	n.publish()
	n.startedNS = l.Sim.Now()
	l.Net.Listen(Address, n.accept)
	return n, nil
}

// task runs f soon, unless the process has died.
func (n *Node) task(f func()) { n.process.Go(f) }

// publish publishes the namespaces that are there, and the tenants.
func (n *Node) publish() {
	n.lab.restartCapWindows()
	n.caps = nil // during the change it is not known which apply
	st := nvmeof.SubsystemState{NQN: SubNQN, Serial: "lab", Model: "lab", AllowAnyHost: true}
	stores := map[*nvmeof.Namespace]*publish.Store{}
	for _, ns := range n.lab.namespaces {
		if !ns.there {
			continue
		}
		id := ns.id()
		pub := &nvmeof.Namespace{NSID: ns.nsid, SSD: ns.disk, OffsetBytes: units.DriveOffset(ns.offset),
			SizeBytes: units.Bytes(ns.bytes), BlockShift: blockShift, VolatileCache: ns.volatile, ANAGroup: 1,
			ANAState: nvme.ANAStateOptimized, UUID: id}
		if ns.kv {
			pub.CSI, pub.BlockShift = nvme.CSIKV, 0
			stores[pub] = ns.store.open
		}
		st.Namespaces = append(st.Namespaces, pub)
	}
	n.publisher.Publish(publish.Publication{
		State: nvmeof.State{Subsystems: []nvmeof.SubsystemState{st},
			Ports: []nvmeof.Port{{ID: 1, TRTYPE: nvme.TRTYPETCP, ADRFAM: nvme.ADRFAMIPv4, Address: "10.0.0.2",
				Service: "4420"}}},
		Tenants: n.lab.tenants, Stores: stores,
	})
	n.noteCaps()
}

// countSwaps adds up what the open stores have swapped, before they end.
func (n *Node) countSwaps() {
	for _, s := range n.publisher.Stores() {
		n.lab.swapped += s.Stats().Swap.Swapped
	}
}

// kill is the end of the process, and of the drives' power if power says so.
func (n *Node) kill(power bool) {
	n.countSwaps()
	n.process.Kill()
	n.lab.Net.Listen(Address, nil)
	for c := range n.conns {
		c.dead = true
	}
	for _, c := range n.connsInOrder() {
		c.end.Cut(5e6)
	}
	for _, d := range n.devices {
		if d != nil {
			d.Kill(power)
		}
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
	n.stoppedNS = n.lab.Sim.Now()
	for _, c := range n.connsInOrder() {
		c.shut("the target is shutting down")
	}
	return n.lab.Sim.Run(closeNS, func() bool { return n.lab.violation != "" || len(n.conns) == 0 })
}

// stop ends a node whose hosts are gone, and holds it to having given everything back.
func (n *Node) stop() {
	n.endSqueeze()
	n.lab.Net.Listen(Address, nil)
	if !n.lab.Sim.Run(answerNS, func() bool { return len(n.conns) == 0 }) {
		n.lab.Violation("%d connections do not end, of them %d with commands in flight", len(n.conns), n.inFlight())
		return
	}
	n.countSwaps()
	n.publisher.Publish(publish.Publication{}) // closes the stores
	if n.area != nil {
		if err := n.area.Close(areaPatience); err != nil && !n.lab.broken() && n.lab.healthy() {
			n.lab.Violation("the swap area does not close: %v", err)
		}
	}
	n.service.Close()
	n.flushedNS = n.lab.Sim.Now()
	for i, d := range n.drives {
		if d == nil {
			continue
		}
		err := publish.Flush(d)
		n.flushed[i] = err == nil
		if err != nil && !n.lab.broken() && !n.lab.Disks[i].Gone() {
			n.lab.Violation("a drive cannot be flushed: %v", err)
		}
		if err := d.Close(); err != nil {
			n.lab.Violation("a drive does not close: %v", err)
		}
	}
	n.nobodyWaits()
	l := n.lab // a calibration that a drive has kept a read of gives its buffer back with that
	l.Sim.Run(answerNS, func() bool { return n.pool.Leaks() == nil })
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
