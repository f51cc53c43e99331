package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/drive"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/partition"
	"jbofd/internal/peers"
	"jbofd/internal/pipeline"
	"jbofd/internal/pipeline/jbof"
	"jbofd/internal/replicas"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// node is a box with one SSD and one partition: everything behind the transports that the daemon has.
type node struct {
	run   *run
	id    int
	dev   *device
	drive *drive.Drive
	part  *partition.Partition
	reps  *replicas.Replicas
	pool  *bufpool.Pool
	up    bool
	// deliveries are free to be used again.
	deliveries []*delivery
}

const (
	// labelBytes are in front of the partition.
	labelBytes = 1 << 20
	hashSeed   = 0x5eed_0f_a11
	poolBytes  = 192 << 20
	// background pays for compaction and passes, nodes for what they ask each other, hosts for the rest.
	background tenant.ID = 9
	hosts      tenant.ID = 3
	nodes      tenant.ID = 100
	// backgroundWeight, fillShare and restoreShare are the defaults of the daemon: background_weight of a drive,
	// fill_share and restore_share of the cluster.
	backgroundWeight = 4
	fillShare        = 25
	restoreShare     = 100
)

func hostNQN(name string) string { return "nqn.2026-11.example.jbofd:node:sim:" + name }

func nodeName(id int) string { return fmt.Sprint("n", id) }

func (r *run) newNode(id int) (*node, error) {
	n := &node{run: r, id: id}
	var err error
	if n.pool, err = bufpool.New(bufpool.Config{TotalBytes: poolBytes}); err != nil {
		return nil, err
	}
	size := r.lab.sizeBytes
	n.dev = newDevice(r.sim, fmt.Sprint("ssd", id), r.lab.drive.Clone(), size)
	cfg := drive.Config{Device: n.dev, Pool: n.pool, Env: r.sim}
	if !r.sc.FIFO {
		cfg.Policy = jbof.New(jbof.Config{Profile: r.lab.profile})
	}
	if n.drive, err = drive.New(cfg); err != nil {
		return nil, err
	}
	n.drive.SetTenant(background, pipeline.Settings{Weight: backgroundWeight})
	id16 := uuid.UUID{2, byte(id)}
	if n.part, err = partition.Open(partition.Config{Drive: n.drive, OffsetBytes: units.DriveOffset(labelBytes),
		Background: background, Store: kvstore.Config{PartitionBytes: size - labelBytes, Format: true,
			HashSeed: hashSeed, UUID: id16}}); err != nil {
		return nil, err
	}
	n.reps, err = replicas.New(replicas.Config{Store: n.part, ID: id16, Peers: n, HostNQN: hostNQN,
		Authority: func() int64 { return r.sim.Now() + int64(time.Second) }, Clock: r.sim.Now, Full: n.part.NearlyFull,
		FillShare: fillShare, RestoreShare: restoreShare, Changed: func() {},
		LockKeys: r.sc.Locked, Pool: n.pool, Env: r.sim})
	return n, err
}

// close ends the node.
func (n *node) close() error {
	if err := n.reps.Close(time.Minute); err != nil {
		return err
	}
	if err := n.part.Close(time.Minute); err != nil {
		return err
	}
	return n.drive.Close()
}

// begin takes a request of a host or another node.
func (n *node) begin(q *replicas.Request) {
	var b replicas.Batch
	b.Add(q)
	n.reps.Submit(&b)
}

// delivery is a command of a node on its way to another one, and back.
type delivery struct {
	replicas.Request
	from *node
	c    *peers.Command
	sqe  nvme.SQE
	data []byte
	// at is the node that has it. number orders those under way. orphan: that node has died.
	at     *node
	number int
	orphan bool
}

// Send implements replicas.Sender.
func (n *node) Send(b *peers.Batch) {
	for c := b.Take(); c != nil; {
		next := c.Next // c is another one's when it is done
		n.carry(c)
		c = next
	}
}

func (n *node) carry(c *peers.Command) {
	r := n.run
	var d *delivery
	if last := len(n.deliveries) - 1; last >= 0 {
		d, n.deliveries = n.deliveries[last], n.deliveries[:last]
	} else {
		d = &delivery{from: n}
	}
	if cap(d.data) < len(c.Data) {
		d.data = make([]byte, len(c.Data))
	}
	d.c, d.sqe, d.data = c, c.SQE, d.data[:len(c.Data)]
	if c.SQE.Opcode() == nvme.CmdKVForward {
		copy(d.data, c.Data)
		r.forwards++
	}
	d.Kind, d.SQE, d.Host, d.Sink, d.Value = replicas.Node, &d.sqe, hostNQN(nodeName(n.id)), d, d.data
	d.Tenant = nodes + tenant.ID(n.id)
	to := r.nodes[c.To]
	r.travel(func() {
		if !n.up || !to.up {
			c.Lost = true
			d.back()
			return
		}
		d.at, d.number = to, r.made
		r.made++
		r.carried[d] = true
		to.begin(&d.Request)
	})
}

// inOrder returns those of a set that are chosen, in the order of their numbers.
func inOrder[T comparable](all map[T]bool, choose func(x T) (number int, chosen bool)) (some []T) {
	for x := range all {
		if _, ok := choose(x); ok {
			some = append(some, x)
		}
	}
	slices.SortFunc(some, func(a, b T) int {
		x, _ := choose(a)
		y, _ := choose(b)
		return cmp.Compare(x, y)
	})
	return some
}

// loseCommands ends the commands that a node had which has died.
func (r *run) loseCommands(n *node) {
	for _, d := range inOrder(r.carried, func(d *delivery) (int, bool) { return d.number, d.at == n }) {
		d.orphan = true
		delete(r.carried, d)
		d.c.Lost = true
		if d.c.Sink.PeerDone(d.c) {
			d.c.Sink.Kick()
		}
	}
}

func (d *delivery) back() {
	c := d.c
	d.from.deliveries = append(d.from.deliveries, d)
	if c.Sink.PeerDone(c) {
		c.Sink.Kick()
	}
}

// ReplicaDone implements replicas.Sink.
func (d *delivery) ReplicaDone(q *replicas.Request) bool {
	if d.orphan {
		return false
	}
	delete(d.from.run.carried, d)
	d.from.run.travel(func() {
		d.c.Lost, d.c.Status, d.c.Result = false, q.Status, q.Result
		switch d.sqe.Opcode() {
		case nvme.CmdKVFetch:
			d.from.run.filledBytes += int64(q.Bytes)
			fallthrough
		case nvme.CmdKVShip, nvme.CmdKVCompare:
			d.c.Received = copy(d.c.Data, d.data[:min(q.Bytes, len(d.data))])
		}
		if d.sqe.Opcode() == nvme.CmdKVShip {
			d.c.Result = uint64(q.ValueLen)
			d.from.run.shipped++
		}
		d.back()
	})
	return false
}

// Kick implements replicas.Sink.
func (d *delivery) Kick() {}

// Alive, Range, Usable and Failing implement view.Reports.
func (r *run) Alive(id uint16) bool { return r.nodes[id].up }

// Range implements view.Reports.
func (r *run) Range(p view.PartitionID, number int) view.Report {
	if rep, ok := r.reports[p][number]; ok {
		return rep
	}
	return view.Report{Local: view.Silent}
}

// Usable implements view.Reports.
func (r *run) Usable(view.PartitionID) bool { return true }

// Failing implements view.Reports.
func (r *run) Failing(view.PartitionID) bool { return false }

// manage computes the next view as the manager of a cluster does, tells the nodes, and reports whether it differs.
func (r *run) manage() (changed bool) {
	for p, n := range r.nodes {
		r.reports[p] = map[int]view.Report{}
		for _, rep := range n.reps.Report().Ranges {
			r.reports[p][rep.Range] = rep.Report
		}
	}
	if r.view, changed = r.view.Next(r); !changed {
		return false
	}
	m := &cluster.Map{View: r.view}
	for _, n := range r.nodes {
		if n.up {
			n.reps.SetState(m, m)
		}
	}
	return true
}

// full reports whether all ranges have all replicas.
func (r *run) full() bool {
	for _, c := range r.view.Chains {
		serving := 0
		for _, e := range c {
			if e.State == view.Serving {
				serving++
			}
		}
		if serving < r.view.Replicas || len(c) != serving {
			return false
		}
	}
	return true
}
