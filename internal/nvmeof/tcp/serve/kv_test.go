package serve_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/bufpool"
	"jbofd/internal/buildtags"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/nvmeof/fabric/kvtest"
	"jbofd/internal/nvmeof/tcp/serve"
	"jbofd/internal/partition"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd/mem"
)

// kvNSID is the namespace of keys and values beside the blocks of namespace 1.
const kvNSID = 9

// kvRig is a rig with a namespace of keys and values on a store in memory.
func kvRig(t testing.TB, change func(*serve.Config)) (*rig, *kvtest.Store) {
	t.Helper()
	r, s := newRig(t, change), kvtest.NewStore()
	r.addKV(s)
	return r, s
}

func (r *rig) addKV(s fabric.Partition) {
	r.state.Subsystems[0].Namespaces = append(r.state.Subsystems[0].Namespaces, &nvmeof.Namespace{NSID: kvNSID, CSI: nvme.CSIKV, SizeBytes: testBytes,
		OffsetBytes: testBytes, Partition: r.fabric.AddPartition(s), MaxValueBytes: kvtest.MaxValue, ANAGroup: 1, ANAState: nvme.ANAStateOptimized,
		UsedBytes: func() int64 { return 12345 }})
	r.fabric.Apply(r.state)
}

// kvHost makes a host of a controller.
func kvHost(t *testing.T, c *client.Controller) kvtest.Host {
	return func(e nvme.SQE, data []byte) (uint64, nvme.Status) {
		t.Helper()
		comp, err := c.IOPassthru(t.Context(), e, data)
		if err != nil && comp.Status.OK() {
			t.Fatal(err)
		}
		return comp.Result, comp.Status
	}
}

func TestKeysAndValuesOverTCP(t *testing.T) {
	for name, o := range map[string]client.Options{
		"standard host":             {Credits: client.CreditsOff},
		"with credits":              {Credits: client.CreditsOn},
		"with digests":              {HeaderDigest: true, DataDigest: true},
		"one R2T, one command deep": {MaxR2T: 1, QueueDepth: 1},
	} {
		t.Run(name, func(t *testing.T) {
			r, s := kvRig(t, nil)
			if o.Credits == client.CreditsOn {
				s.GiveCredit(70000)
			}
			o.Address, o.Queues = r.address, 1
			kvtest.Conformance(t, s, kvNSID, kvHost(t, connect(t, o)))
		})
	}
}

func TestBlocksBesideKeysAndValues(t *testing.T) {
	r, _ := kvRig(t, nil)
	c := connect(t, client.Options{Address: r.address})
	n := namespace(t, c, 1)
	want := bytes.Repeat([]byte{7}, blockBytes)
	if _, err := n.WriteAt(t.Context(), want, 0, 0); err != nil {
		t.Fatal(err)
	}
	host := kvHost(t, c)
	if _, st := host(kvtest.Command(nvme.CmdKVStore, kvNSID, "k", 3), []byte("abc")); !st.OK() {
		t.Fatal(st)
	}
	got := make([]byte, blockBytes)
	if _, err := n.ReadAt(t.Context(), got, 0); err != nil || !bytes.Equal(got, want) {
		t.Errorf("blocks: %v", err)
	}
	for _, op := range []uint8{nvme.CmdKVDelete, nvme.CmdKVExist} {
		if _, st := host(kvtest.Command(op, 1, "k", 0), nil); st != nvme.InvalidOpcode|nvme.DNR {
			t.Errorf("opcode %#x to blocks: %v", op, st)
		}
	}
	id := make([]byte, nvme.IdentifySize)
	var e nvme.SQE
	e.SetOpcode(nvme.AdminIdentify)
	e.SetNSID(kvNSID)
	e.Identify().SetCNS(nvme.CNSNamespaceCSI)
	e.Identify().SetCSI(nvme.CSIKV)
	if _, err := c.AdminPassthru(t.Context(), e, id); err != nil {
		t.Fatal(err)
	}
	if d := (*nvme.IdentifyNamespaceKV)(id); d.NSZE() != testBytes || d.NUSE() != 12345 {
		t.Errorf("%d of %d bytes in use", d.NUSE(), d.NSZE())
	}
}

// A buffer may be longer than any value, and than MDTS: what is moved is not.
func TestABufferMayBeLongerThanAnyValue(t *testing.T) {
	r, s := kvRig(t, nil)
	s.Set("key", []byte("value"))
	s.Set("large", bytes.Repeat([]byte{3}, kvtest.MaxValue))
	host := kvHost(t, connect(t, client.Options{Address: r.address}))
	for key, n := range map[string]int{"key": 5, "large": kvtest.MaxValue} {
		buf := make([]byte, 3*kvtest.MaxValue+1)
		result, st := host(kvtest.Command(nvme.CmdKVRetrieve, kvNSID, key, len(buf)), buf)
		v, _ := s.Value(key)
		if !st.OK() || int(result) != n || !bytes.Equal(buf[:n], v) || buf[n] != 0 {
			t.Errorf("%s: %v, DW0 %d", key, st, result)
		}
	}
	buf := make([]byte, 2*kvtest.MaxValue)
	if _, st := host(kvtest.Command(nvme.CmdKVList, kvNSID, "", len(buf)), buf); !st.OK() || nvme.KVList(buf).Len() != 2 {
		t.Errorf("list: %v, %d keys", st, nvme.KVList(buf).Len())
	}
}

// A host that wants to know is told that there was nothing to delete.
func TestDeleteOfAMissingKeyFailsForThoseWhoAskForIt(t *testing.T) {
	r, _ := kvRig(t, nil)
	a, b := connect(t, client.Options{Address: r.address}), connect(t, client.Options{Address: r.address})
	del := func(c *client.Controller) nvme.Status {
		_, st := kvHost(t, c)(kvtest.Command(nvme.CmdKVDelete, kvNSID, "missing", 0), nil)
		return st
	}
	if _, err := a.SetFeature(t.Context(), client.Feature{FID: nvme.FIDKeyValue, NSID: kvNSID}, nvme.KVErrorOnDelete); err != nil {
		t.Fatal(err)
	}
	if got := del(a); got != nvme.KeyDoesNotExist|nvme.DNR {
		t.Errorf("whoever asked: %v", got)
	}
	if got := del(b); !got.OK() {
		t.Errorf("another host: %v", got)
	}
	if _, err := a.SetFeature(t.Context(), client.Feature{FID: nvme.FIDKeyValue, NSID: kvNSID}, 0); err != nil {
		t.Fatal(err)
	}
	if got := del(a); !got.OK() {
		t.Errorf("whoever asks no more: %v", got)
	}
}

// kvLoad keeps commands outstanding: what make says, for each of the buffers.
type kvLoad struct {
	q     *client.QPair
	cmds  []client.Command
	comps []client.Completion
}

func (l *kvLoad) run(n, depth int, set func(c *client.Command, i int)) error {
	issued, done := 0, 0
	add := func(tag uint64) {
		l.cmds = append(l.cmds, client.Command{Tag: tag})
		set(&l.cmds[len(l.cmds)-1], issued)
		issued++
	}
	for tag := range min(depth, n) {
		add(uint64(tag))
	}
	for done < n {
		if len(l.cmds) > 0 {
			if _, err := l.q.Submit(l.cmds); err != nil {
				return err
			}
			l.cmds = l.cmds[:0]
		}
		k, err := l.q.Poll(l.comps, 10*time.Second)
		if err != nil || k == 0 {
			return fmt.Errorf("%d of %d are done: %w", done, n, err)
		}
		for _, c := range l.comps[:k] {
			if !c.Status.OK() {
				return fmt.Errorf("command %d: %v", c.Tag, c.Status)
			}
			done++
			if issued < n {
				add(c.Tag)
			}
		}
	}
	return nil
}

func newKVLoad(t testing.TB, r *rig, depth int) *kvLoad {
	t.Helper()
	c, q, err := open(r.address, depth)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return &kvLoad{q: q, cmds: make([]client.Command, 0, depth), comps: make([]client.Completion, depth)}
}

func TestCommandsForAPartitionAllocateNothing(t *testing.T) {
	r, s := kvRig(t, nil)
	for _, x := range []struct {
		name   string
		opcode uint8
		bytes  int
		depth  int
	}{{"store in-capsule", nvme.CmdKVStore, 1000, 32}, {"store by R2T", nvme.CmdKVStore, 64 << 10, 8}, {"retrieve", nvme.CmdKVRetrieve, 1000, 32},
		{"retrieve of a part", nvme.CmdKVRetrieve, 100, 32}, {"exist", nvme.CmdKVExist, 0, 32}, {"one at a time", nvme.CmdKVRetrieve, 1000, 1}} {
		t.Run(x.name, func(t *testing.T) {
			s.Set("key", make([]byte, max(x.bytes, 1000)))
			l := newKVLoad(t, r, x.depth)
			data := make([]byte, x.bytes)
			e := kvtest.Command(x.opcode, kvNSID, "key", x.bytes)
			set := func(c *client.Command, _ int) { c.SQE, c.Data = e, data }
			if err := l.run(2000, x.depth, set); err != nil {
				t.Fatal(err)
			}
			const n = 10000
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			if err := l.run(n, x.depth, set); err != nil {
				t.Fatal(err)
			}
			runtime.ReadMemStats(&after)
			limit := uint64(n / 100)
			if buildtags.Race { // it takes half a minute then, in which timers and the runtime allocate
				limit = n / 20
			}
			if got := after.Mallocs - before.Mallocs; got > limit {
				t.Errorf("%d allocations for %d commands, the most is %d", got, n, limit)
			}
		})
	}
}

// What comes in one batch goes to the partition in one.
func TestABatchGoesToThePartitionAtOnce(t *testing.T) {
	r, s := kvRig(t, nil)
	s.Set("key", []byte("value"))
	l := newKVLoad(t, r, 32)
	data := make([]byte, 32*8)
	for range 100 {
		err := l.run(32, 32, func(c *client.Command, i int) {
			c.SQE, c.Data = kvtest.Command(nvme.CmdKVRetrieve, kvNSID, "key", 8), data[8*i:][:8]
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if batches, requests := s.Counts(); requests != 3200 || batches > requests/4 {
		t.Errorf("%d requests came in %d batches", requests, batches)
	}
}

// Large values from many sides at once want several times the memory that there is.
func TestLargeValuesWaitForMemory(t *testing.T) {
	r, s := kvRig(t, nil)
	s.Set("large", make([]byte, kvtest.MaxValue))
	var wg sync.WaitGroup
	for w := range 3 {
		l := newKVLoad(t, r, 64)
		wg.Go(func() {
			large, small := make([]byte, kvtest.MaxValue), make([]byte, 4096)
			err := l.run(400, 64, func(c *client.Command, i int) {
				switch (i + w) % 4 {
				case 0:
					c.SQE, c.Data = kvtest.Command(nvme.CmdKVStore, kvNSID, fmt.Sprint("key", w), len(large)), large
				case 1: // in-capsule, behind those that wait
					c.SQE, c.Data = kvtest.Command(nvme.CmdKVStore, kvNSID, fmt.Sprint("small", w), len(small)), small
				case 2:
					c.SQE, c.Data = kvtest.Command(nvme.CmdKVRetrieve, kvNSID, "large", len(large)), make([]byte, len(large))
				case 3:
					c.Data = small
					client.SetRW(c, nvme.CmdRead, 1, 0, 1)
				}
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// TestRetrievesTakeMemoryForTheirValues, not for the buffers of hosts who have many, each for the longest value.
func TestRetrievesTakeMemoryForTheirValues(t *testing.T) {
	r, s := kvRig(t, nil)
	value := bytes.Repeat([]byte{7}, 100)
	s.Set("key", value)
	before := r.pool.Stats().PeakBytes
	s.Hold()
	const hosts, depth = 4, 128
	var wg sync.WaitGroup
	for range hosts {
		l, buf := newKVLoad(t, r, depth), make([]byte, kvtest.MaxValue)
		wg.Go(func() {
			err := l.run(depth, depth, func(c *client.Command, _ int) {
				c.SQE, c.Data = kvtest.Command(nvme.CmdKVRetrieve, kvNSID, "key", len(buf)), buf
			})
			if err != nil || !bytes.Equal(buf[:len(value)], value) || buf[len(value)] != 0 {
				t.Errorf("%v, or another value than is stored", err)
			}
		})
	}
	await(t, "all are with the partition", func() bool { return s.Waiting() == hosts*depth })
	s.Release()
	wg.Wait()
	const most = hosts * depth * bufpool.DefaultMinBytes
	if took := r.pool.Stats().PeakBytes - before; took > most {
		t.Errorf("%d Retrieves of a value of %d bytes had %d bytes of memory, the most is %d", hosts*depth, len(value), took, most)
	}
}

// stingy is a partition whose value grows, and which has no memory for it at first.
type stingy struct{ lengths []int }

func (s *stingy) Submit(b *partition.Batch) {
	for r := b.Take(); r != nil; {
		next := r.Next
		r.Status, r.ValueLen = kvstore.OK, s.lengths[0]
		if s.lengths = s.lengths[1:]; len(s.lengths) == 0 {
			v := r.Room(r.ValueLen)
			for i := range v {
				v[i] = byte(i)
			}
		}
		if sink := r.Sink; sink.KVDone(r) {
			sink.Kick()
		}
		r = next
	}
}

// TestAValueGrowsWhileItWaitsForMemory: it is retrieved whole, or as much as the host wants.
func TestAValueGrowsWhileItWaitsForMemory(t *testing.T) {
	for _, c := range []struct{ buffer, want int }{{20_000, 5000}, {3500, 3500}} {
		r := newRig(t, nil)
		r.addKV(&stingy{lengths: []int{100, 3000, 4000, 5000}})
		buf := make([]byte, c.buffer)
		result, st := kvHost(t, connect(t, client.Options{Address: r.address}))(kvtest.Command(nvme.CmdKVRetrieve, kvNSID, "key", len(buf)), buf)
		if !st.OK() || result != 5000 && c.buffer > 5000 {
			t.Fatalf("%v, DW0 %d", st, result)
		}
		for i, b := range buf[:c.want] {
			if b != byte(i) {
				t.Fatalf("byte %d of %d is wrong", i, c.want)
			}
		}
	}
}

// await waits for a condition that others bring about.
func await(t *testing.T, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !so(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// inUse is the memory that commands have.
func inUse(p *bufpool.Pool) int64 { return p.Stats().InUseBytes }

// The connection is lost while commands are with the partition, whose memory is not taken from it.
func TestMemoryStaysWithThePartitionWhenTheHostIsGone(t *testing.T) {
	r, s := kvRig(t, nil)
	s.Set("key", make([]byte, 64<<10))
	s.Hold()
	c, q, err := open(r.address, 32)
	if err != nil {
		t.Fatal(err)
	}
	var cmds []client.Command
	for i := range 32 {
		e := kvtest.Command([]uint8{nvme.CmdKVStore, nvme.CmdKVRetrieve}[i%2], kvNSID, "key", 64<<10)
		cmds = append(cmds, client.Command{SQE: e, Data: make([]byte, 64<<10)})
	}
	if n, err := q.Submit(cmds); n != len(cmds) {
		t.Fatalf("submitted %d: %v", n, err)
	}
	stop := make(chan struct{})
	var polling sync.WaitGroup
	polling.Go(func() { // the data of Stores is sent by whoever polls
		comps := make([]client.Completion, 32)
		for {
			select {
			case <-stop:
				return
			default:
				if _, err := q.Poll(comps, time.Millisecond); err != nil {
					return
				}
			}
		}
	})
	await(t, "all are with the partition", func() bool { return s.Waiting() == len(cmds) })
	close(stop)
	polling.Wait()
	if err := c.Close(); err != nil {
		t.Log(err)
	}
	if got := inUse(r.pool); got < 16*64<<10 { // the Stores'; Retrieves have none yet
		t.Errorf("%d bytes are in use while the partition works with %d", got, 16*64<<10)
	}
	var closed atomic.Bool
	done := make(chan struct{})
	go func() {
		r.server.Close()
		closed.Store(true)
		close(done)
	}()
	await(t, "the connections are shut", func() bool { n, _, _ := r.fabric.Counts(); return n <= 1 })
	if closed.Load() {
		t.Error("the server is closed while a partition has its memory")
	}
	s.Release()
	<-done
}

// Whoever waits for memory or for its host's data when its namespace goes does not reach the partition any more.
func TestNoCommandComesToAPartitionAfterItsNamespaceIsGone(t *testing.T) {
	r, s := kvRig(t, nil)
	s.Hold() // so that memory stays where it is
	c, q, err := open(r.address, 128)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var cmds []client.Command
	for i := range 128 {
		op := uint8(nvme.CmdKVList)
		if i > 100 {
			op = nvme.CmdKVStore
		}
		cmds = append(cmds, client.Command{SQE: kvtest.Command(op, kvNSID, "key", kvtest.MaxValue), Data: make([]byte, kvtest.MaxValue), Tag: uint64(i)})
	}
	if n, err := q.Submit(cmds); n != len(cmds) {
		t.Fatalf("submitted %d: %v", n, err)
	}
	await(t, "some wait for memory", func() bool { return r.pool.Stats().Waits > 90 })
	ns := r.state.Subsystems[0].Namespaces
	r.state.Subsystems[0].Namespaces = ns[:1]
	r.fabric.Apply(r.state)
	r.fabric.RemovePartition(ns[1].Partition)
	_, before := s.Counts()
	s.Release()
	comps := make([]client.Completion, len(cmds))
	answered, gone := 0, 0
	for done := 0; done < len(cmds); {
		n, err := q.Poll(comps, 10*time.Second)
		if err != nil || n == 0 {
			t.Fatalf("%d of %d are done: %v", done, len(cmds), err)
		}
		done += n
		for _, c := range comps[:n] {
			switch c.Status.Code() {
			case nvme.Success:
				answered++
			case nvme.InvalidNamespaceOrFormat:
				gone++
			default:
				t.Errorf("command %d: %v", c.Tag, c.Status)
			}
		}
	}
	if _, after := s.Counts(); after != before || answered != before || gone == 0 {
		t.Errorf("%d requests before, %d after; %d had an answer, %d came too late", before, after, answered, gone)
	}
}

// A command that waits for memory while its host gets another tenant is that one's: the number of the former one may
// be given to somebody else before it gets any.
func TestWhatWaitsForMemoryChangesItsTenant(t *testing.T) {
	r, s := kvRig(t, nil)
	s.Hold()
	l := newKVLoad(t, r, 64)
	var cmds []client.Command
	for i := range 64 {
		cmds = append(cmds, client.Command{SQE: kvtest.Command(nvme.CmdKVList, kvNSID, "key", kvtest.MaxValue), Data: make([]byte, kvtest.MaxValue), Tag: uint64(i)})
	}
	if n, err := l.q.Submit(cmds); n != len(cmds) {
		t.Fatalf("submitted %d: %v", n, err)
	}
	await(t, "some wait for memory", func() bool { return r.pool.Stats().Waits > 0 && s.Waiting()+int(r.pool.Stats().Waits) == len(cmds) })
	with := s.Waiting()
	var host string
	for _, c := range r.fabric.Conns() {
		host = c.Describe().HostNQN
	}
	before := r.fabric.Tenants()[0].Number
	r.fabric.SetTenants([]fabric.TenantConfig{{Name: "gold", Hosts: []string{host}, Settings: pipeline.Settings{Weight: 2}}})
	gold := r.fabric.Tenants()[0].Number
	seen := map[pipeline.Tenant]int{}
	s.Fail(func(r *partition.Request) kvstore.Status {
		seen[r.Tenant]++
		return kvstore.OK
	})
	s.Release()
	for done := 0; done < len(cmds); {
		n, err := l.q.Poll(l.comps, 10*time.Second)
		if err != nil || n == 0 {
			t.Fatalf("%d of %d are done: %v", done, len(cmds), err)
		}
		done += n
	}
	s.Fail(nil) // and seen is this goroutine's
	if seen[before] != with || seen[gold] != len(cmds)-with || before == gold {
		t.Errorf("requests by tenant: %v; %d were with the partition; the tenants are %d and %d", seen, with, before, gold)
	}
	r.fabric.SetTenants(nil)
}

// A namespace that is there before its partition fails its commands, which may be tried again.
func TestANamespaceWithoutItsPartitionIsNotReady(t *testing.T) {
	r, s := kvRig(t, nil)
	r.fabric.RemovePartition(r.state.Subsystems[0].Namespaces[1].Partition)
	host := kvHost(t, connect(t, client.Options{Address: r.address, MaxRetries: -1}))
	for op, n := range map[uint8]int{nvme.CmdKVStore: 20000, nvme.CmdKVRetrieve: 10, nvme.CmdKVExist: 0} {
		if _, st := host(kvtest.Command(op, kvNSID, "key", n), make([]byte, n)); st != nvme.NamespaceNotReady {
			t.Errorf("opcode %#x: %v", op, st)
		}
	}
	r.fabric.AddPartition(s)
	if _, st := host(kvtest.Command(nvme.CmdKVStore, kvNSID, "key", 1), []byte{1}); !st.OK() {
		t.Errorf("with the partition: %v", st)
	}
}

// Completions of all commands carry credits for those who ask for them.
func TestCompletionsOfKeysAndValuesCarryCredits(t *testing.T) {
	r, s := kvRig(t, nil)
	s.GiveCredit(321)
	for _, mode := range []client.CreditMode{client.CreditsOff, client.CreditsOn} {
		want := uint64(0)
		if mode == client.CreditsOn {
			want = uint64(nvme.MakeCredit(0, 321)) << 32
		}
		host := kvHost(t, connect(t, client.Options{Address: r.address, Credits: mode}))
		for _, x := range []struct {
			op    uint8
			bytes int
			dw0   uint64
		}{{nvme.CmdKVStore, 5, 0}, {nvme.CmdKVRetrieve, 2, 5}, {nvme.CmdKVExist, 0, 0}, {nvme.CmdKVList, 64, 0}, {nvme.CmdKVDelete, 0, 0}} {
			if got, st := host(kvtest.Command(x.op, kvNSID, "key", x.bytes), make([]byte, x.bytes)); got != want|x.dw0 || !st.OK() {
				t.Errorf("mode %d, opcode %#x: result %#x, want %#x; %v", mode, x.op, got, want|x.dw0, st)
			}
		}
	}
}

// That a key is missing is an answer; a failed device is an error that the log tells of.
func TestTheErrorLogTellsOfWhatHasGoneWrong(t *testing.T) {
	r, s := kvRig(t, nil)
	c := connect(t, client.Options{Address: r.address})
	host := kvHost(t, c)
	for range 3 {
		host(kvtest.Command(nvme.CmdKVRetrieve, kvNSID, "missing", 8), make([]byte, 8))
	}
	s.Fail(func(*partition.Request) kvstore.Status { return kvstore.Corrupt })
	host(kvtest.Command(nvme.CmdKVRetrieve, kvNSID, "corrupt", 8), make([]byte, 8))
	b := make([]byte, 2*nvme.ErrorLogEntrySize)
	if err := c.GetLogPage(t.Context(), client.LogPage{LID: nvme.LIDError}, b); err != nil {
		t.Fatal(err)
	}
	e := (*nvme.ErrorLogEntry)(b)
	if e.Status().Code() != nvme.UnrecoveredReadError || e.Opcode() != nvme.CmdKVRetrieve || e.NSID() != kvNSID || e.CSI() != uint8(nvme.CSIKV) || e.LBA() != 0 {
		t.Errorf("the newest entry: %v of opcode %#x, NSID %d, CSI %d", e.Status(), e.Opcode(), e.NSID(), e.CSI())
	}
	if e := (*nvme.ErrorLogEntry)(b[nvme.ErrorLogEntrySize:]); e.ErrorCount() != 0 {
		t.Errorf("another entry: %v", e.Status())
	}
}

// An Abort ends a command that waits for memory; one that the partition has takes its course.
func TestAbortOfACommandForAPartition(t *testing.T) {
	r, s := kvRig(t, nil)
	s.Hold()
	c, q, err := open(r.address, 64)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var cmds []client.Command
	for i := range 64 {
		cmds = append(cmds, client.Command{SQE: kvtest.Command(nvme.CmdKVList, kvNSID, "key", kvtest.MaxValue), Data: make([]byte, kvtest.MaxValue), Tag: uint64(i)})
	}
	if n, err := q.Submit(cmds); n != len(cmds) {
		t.Fatalf("submitted %d: %v", n, err)
	}
	await(t, "some wait for memory", func() bool { return r.pool.Stats().Waits > 0 && s.Waiting()+int(r.pool.Stats().Waits) == len(cmds) })
	waiting := len(cmds) - s.Waiting()
	aborted := 0
	for i := range uint16(4 * len(cmds)) { // the client's identifiers: six bits of generation, ten of slot
		cid := i%4<<10 | i/4
		var e nvme.SQE
		e.SetOpcode(nvme.AdminAbort)
		e.Abort().SetSQID(1)
		e.Abort().SetCID(cid)
		comp, err := c.AdminPassthru(t.Context(), e, nil)
		if err != nil {
			t.Fatal(err)
		}
		if comp.Result&nvme.AbortNotDone == 0 {
			aborted++
		}
	}
	if aborted != waiting {
		t.Errorf("%d aborted of %d that wait", aborted, waiting)
	}
	s.Release()
	comps := make([]client.Completion, len(cmds))
	seen := map[nvme.Status]int{}
	for done := 0; done < len(cmds); {
		n, err := q.Poll(comps, 10*time.Second)
		if err != nil || n == 0 {
			t.Fatalf("%d of %d are done: %v", done, len(cmds), err)
		}
		done += n
		for _, c := range comps[:n] {
			seen[c.Status.Code()]++
		}
	}
	if seen[nvme.AbortRequested] != waiting || seen[nvme.Success] != len(cmds)-waiting {
		t.Errorf("answers: %v, %d were waiting", seen, waiting)
	}
}

// Hosts come and go while their commands are everywhere on their way.
func TestHostsVanishAmongCommandsForAPartition(t *testing.T) {
	r, s := kvRig(t, nil)
	s.Set("key", make([]byte, kvtest.MaxValue))
	for round := range 20 {
		c, q, err := open(r.address, 64)
		if err != nil {
			t.Fatal(err)
		}
		var cmds []client.Command
		for i := range 64 {
			op, n := []uint8{nvme.CmdKVStore, nvme.CmdKVRetrieve}[i%2], []int{4096, 64 << 10, kvtest.MaxValue}[i%3]
			cmds = append(cmds, client.Command{SQE: kvtest.Command(op, kvNSID, "key", n), Data: make([]byte, n)})
		}
		if round%2 == 0 {
			s.Hold()
		}
		if _, err := q.Submit(cmds); err != nil && !errors.Is(err, client.ErrConnectionLost) {
			t.Fatal(err)
		}
		comps := make([]client.Completion, 8)
		if round%3 == 0 {
			_, _ = q.Poll(comps, time.Millisecond) // whether there is something or not
		}
		_ = c.Close()
		s.Release()
	}
}

// realKV puts a namespace of keys and values on a partition of the rig's drive.
func (r *rig) realKV(t testing.TB) {
	t.Helper()
	p, err := partition.Open(partition.Config{Owner: r.fabric.SSD(0), Background: fabric.Background, Store: kvstore.Config{PartitionBytes: testBytes, Format: true, HashSeed: 1}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // before the drive's
		r.server.Close()
		if err := p.Close(10 * time.Second); err != nil {
			t.Error(err)
		}
	})
	r.state.Subsystems[0].Namespaces = append(r.state.Subsystems[0].Namespaces[:0], &nvmeof.Namespace{NSID: kvNSID, CSI: nvme.CSIKV, SizeBytes: testBytes,
		Partition: r.fabric.AddPartition(p), MaxValueBytes: p.MaxValueBytes(), ANAGroup: 1, ANAState: nvme.ANAStateOptimized})
	r.fabric.Apply(r.state)
}

// TestKeysAndValuesOnADrive does at random what a host can do with a few keys, and compares with a map; on drives with short and with
// long blocks.
func TestKeysAndValuesOnADrive(t *testing.T) {
	for _, block := range []int{512, 4096} {
		t.Run(fmt.Sprint(block), func(t *testing.T) { keysAndValuesOnADrive(t, block) })
	}
}

func keysAndValuesOnADrive(t *testing.T, block int) {
	dev, err := mem.Open(mem.Config{Name: "m0", SizeBytes: testBytes, BlockSize: block})
	if err != nil {
		t.Fatal(err)
	}
	r := newRigOf(t, nil, dev)
	r.realKV(t)
	host := kvHost(t, connect(t, client.Options{Address: r.address}))
	rng := rand.New(rand.NewPCG(1, 2))
	model := map[string][]byte{}
	buf := make([]byte, kvtest.MaxValue)
	for step := range 1500 {
		key := fmt.Sprint("key ", rng.IntN(20))
		want, there := model[key]
		missing := nvme.Success
		if !there {
			missing = nvme.KeyDoesNotExist | nvme.DNR
		}
		switch op := rng.IntN(6); op {
		case 0, 1:
			v := buf[:[]int{0, 1, 100, 304, 1000, 5000, 100_000, kvtest.MaxValue}[rng.IntN(8)]]
			for i := range v {
				v[i] = byte(step + i)
			}
			options := uint8(rng.IntN(3)) // none, must exist, must not exist
			e := kvtest.Command(nvme.CmdKVStore, kvNSID, key, len(v))
			e.KV().SetOptions(options)
			_, st := host(e, v)
			switch {
			case options == nvme.KVStoreMustExist && !there:
				if st.Code() != nvme.KeyDoesNotExist {
					t.Fatalf("step %d: store of a missing key: %v", step, st)
				}
			case options == nvme.KVStoreMustNotExist && there:
				if st.Code() != nvme.KeyExists {
					t.Fatalf("step %d: store of a key that exists: %v", step, st)
				}
			case st.Code() == nvme.CapacityExceeded:
			case !st.OK():
				t.Fatalf("step %d: store of %d bytes: %v", step, len(v), st)
			default:
				model[key] = bytes.Clone(v)
			}
		case 2, 3:
			room := rng.IntN(2 * (len(want) + 10))
			got := make([]byte, min(room, kvtest.MaxValue))
			dw0, st := host(kvtest.Command(nvme.CmdKVRetrieve, kvNSID, key, len(got)), got)
			if n := min(len(got), len(want)); st != missing || int(dw0) != len(want) || !bytes.Equal(got[:n], want[:n]) {
				t.Fatalf("step %d: retrieve of %d bytes: %v, DW0 %d", step, len(want), st, dw0)
			}
		case 4:
			if _, st := host(kvtest.Command(nvme.CmdKVExist, kvNSID, key, 0), nil); st != missing {
				t.Fatalf("step %d: exist: %v, want %v", step, st, missing)
			}
		case 5:
			if _, st := host(kvtest.Command(nvme.CmdKVDelete, kvNSID, key, 0), nil); !st.OK() {
				t.Fatalf("step %d: delete: %v", step, st)
			}
			delete(model, key)
		}
	}
	var got []string
	for from := ""; ; {
		list := make([]byte, 64)
		if _, st := host(kvtest.Command(nvme.CmdKVList, kvNSID, from, len(list)), list); !st.OK() {
			t.Fatalf("list: %v", st)
		}
		n := len(got)
		for k := range nvme.KVList(list).All() {
			if !slices.Contains(got, string(k)) {
				got = append(got, string(k))
			}
		}
		if len(got) == n {
			break
		}
		from = got[len(got)-1]
	}
	if slices.Sort(got); !slices.Equal(got, slices.Sorted(maps.Keys(model))) {
		t.Errorf("keys %q, want %q", got, slices.Sorted(maps.Keys(model)))
	}
}

func BenchmarkKV(b *testing.B) {
	for _, x := range []struct {
		name   string
		opcode uint8
		real   bool
		depth  int
	}{{"Retrieve256", nvme.CmdKVRetrieve, false, 128}, {"Store256", nvme.CmdKVStore, false, 128}, {"Retrieve256OnADrive", nvme.CmdKVRetrieve, true, 128},
		{"Store256OnADrive", nvme.CmdKVStore, true, 128}, {"Retrieve256One", nvme.CmdKVRetrieve, false, 1}} {
		b.Run(x.name, func(b *testing.B) {
			r := newRig(b, nil)
			if x.real {
				r.realKV(b)
			} else {
				r.addKV(kvtest.NewStore())
			}
			l := newKVLoad(b, r, x.depth)
			data := make([]byte, 256)
			const keys = 10000
			var cmds, stores [keys]nvme.SQE
			for i := range cmds {
				cmds[i] = kvtest.Command(x.opcode, kvNSID, fmt.Sprint("key", i), len(data))
				stores[i] = kvtest.Command(nvme.CmdKVStore, kvNSID, fmt.Sprint("key", i), len(data))
			}
			if err := l.run(keys, x.depth, func(c *client.Command, i int) { c.SQE, c.Data = stores[i], data }); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			b.ResetTimer()
			if err := l.run(b.N, x.depth, func(c *client.Command, i int) { c.SQE, c.Data = cmds[i*7919%keys], data }); err != nil {
				b.Fatal(err)
			}
		})
	}
}
