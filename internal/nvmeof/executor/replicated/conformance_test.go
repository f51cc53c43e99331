package replicated_test

import (
	"encoding/binary"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/drive"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/nvmeof/executor/executortest"
	"jbofd/internal/nvmeof/executor/replicated"
	"jbofd/internal/partition"
	"jbofd/internal/peers"
	"jbofd/internal/replicas"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/turn"
	"jbofd/internal/uuid"
)

// nobody is the only node of a cluster: it has nobody to send commands to.
type nobody struct{ t testing.TB }

func (n nobody) Send(*peers.Batch) { n.t.Error("a command to another node") }

// asker sends Exist requests to a partition.
type asker struct {
	partition.Request
	done chan struct{}
}

func (a *asker) KVDone(*partition.Request) bool {
	a.done <- struct{}{}
	return false
}

func (a *asker) Kick() {}

const seed = 77

// alone is a view in which the partition has all ranges, alone.
func alone(id uuid.UUID) *cluster.Map {
	v := &view.View{Cluster: uuid.UUID{9}, Epoch: 2, Replicas: 1, HashSeed: seed, Nodes: []view.Node{{Name: "n0"}},
		Partitions: []view.Partition{{ID: id, Weight: 1}}}
	for range view.MinRanges {
		v.Chains = append(v.Chains, view.Chain{{State: view.Serving, Since: 2}})
		v.ChainEpochs = append(v.ChainEpochs, 1)
	}
	return &cluster.Map{View: v}
}

// newSubject is an executor with one partition, on a drive whose device is controlled by a gate.
func newSubject(t testing.TB) (*executortest.Subject, *nvmeof.Namespace) {
	pool, err := bufpool.New(bufpool.Config{TotalBytes: executortest.PoolBytes})
	if err != nil {
		t.Fatal(err)
	}
	const size = 256 << 20
	dev, err := mem.Open(mem.Config{Name: "m0", SizeBytes: size})
	if err != nil {
		t.Fatal(err)
	}
	gate := executortest.NewGate(dev)
	d, err := drive.New(drive.Config{Device: gate, Pool: pool})
	if err != nil {
		t.Fatal(err)
	}
	p, err := partition.Open(partition.Config{Drive: d, Background: 9,
		Store: kvstore.Config{PartitionBytes: size, Format: true, HashSeed: seed}})
	if err != nil {
		t.Fatal(err)
	}
	id := uuid.UUID{1}
	now := func() int64 { return turn.Real.Now() }
	r, err := replicas.New(replicas.Config{Store: p, ID: id, Peers: nobody{t},
		Authority: func() int64 { return 1 << 62 },
		HostNQN:   func(node string) string { return node }, Clock: now, Changed: func() {}, Pool: pool,
		Env: turn.Real})
	if err != nil {
		t.Fatal(err)
	}
	m := alone(id)
	r.SetState(m, m)
	e := replicated.New(turn.Real, pool)
	ns := &nvmeof.Namespace{NSID: 1, CSI: nvme.CSIKV, SizeBytes: size, Partition: 3, UUID: id, MaxValueBytes: 1 << 20,
		ANAState: nvme.ANAStateOptimized, Executor: nvmeof.KindReplica}
	e.Set(id, r)
	t.Cleanup(func() {
		e.Set(id, nil)
		if err := r.Close(30 * time.Second); err != nil {
			t.Error(err)
		}
		if err := p.Close(30 * time.Second); err != nil {
			t.Error(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if err := gate.Close(); err != nil {
			t.Error(err)
		}
		pool.CloseTest(t)
	})
	table := nvmeof.NewNamespaceTable([]*nvmeof.Namespace{ns}, "")
	plan := func(opcode uint8) func(c *executor.Command, place int) {
		return func(c *executor.Command, place int) {
			c.SQE.SetOpcode(opcode)
			c.SQE.SetNSID(1)
			c.SQE.SetPSDT(nvme.PSDTSGL)
			var key [4]byte
			binary.BigEndian.PutUint32(key[:], uint32(place))
			c.SQE.KV().SetKey(key[:])
			c.SQE.KV().SetLenBytes(executortest.Bytes)
			if st := nvmeof.PlanIO(c.SQE, table, nvmeof.Limits{MDTSBytes: 1 << 20, FusedBytes: 1 << 20},
				c.Plan); !st.OK() {
				t.Fatal(st)
			}
		}
	}
	written := func(place int) bool {
		a := &asker{done: make(chan struct{}, 1)}
		a.Op, a.Tenant, a.Sink = kvstore.Exist, 1, a
		a.KeyLen = 4
		binary.BigEndian.PutUint32(a.Key[:], uint32(place))
		var b partition.Batch
		b.Add(&a.Request)
		p.Submit(&b)
		<-a.done
		return a.Status == kvstore.OK
	}
	return &executortest.Subject{Executor: e, Pool: pool, Write: plan(nvme.CmdKVStore),
		Read: plan(nvme.CmdKVRetrieve), Written: written, Shut: gate.Shut, Open: gate.Open, Started: gate.Held,
		Starts: true}, ns
}

func subject(t testing.TB) *executortest.Subject {
	s, _ := newSubject(t)
	return s
}

func TestConformance(t *testing.T) { executortest.Conformance(t, subject) }

func TestCommandsAllocateNothing(t *testing.T) { executortest.AllocatesNothing(t, subject(t)) }
