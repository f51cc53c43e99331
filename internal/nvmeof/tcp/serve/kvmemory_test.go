package serve_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/bufpool"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/nvmeof/target/kvtest"
	"jbofd/internal/partition"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
	"jbofd/internal/testutil/loopback"
)

// Large values of many hosts need several times the memory of the pool.
func TestLargeValuesWaitForMemory(t *testing.T) {
	t.Parallel()
	r, s := kvRig(t, nil)
	s.Set("large", make([]byte, kvtest.MaxValue))
	var wg sync.WaitGroup
	for w := range 3 {
		l := newKVLoad(t, r, 64)
		wg.Go(func() {
			large, small := make([]byte, kvtest.MaxValue), make([]byte, 4096)
			err := l.Run(400, func(c *client.Command, i int) {
				switch (i + w) % 4 {
				case 0:
					c.SQE, c.Data = kvtest.Command(nvme.CmdKVStore, kvNSID, fmt.Sprint("key", w), len(large)), large
				case 1: // in-capsule, behind those that wait
					c.SQE, c.Data = kvtest.Command(nvme.CmdKVStore, kvNSID, fmt.Sprint("small", w), len(small)), small
				case 2:
					c.SQE, c.Data = kvtest.Command(nvme.CmdKVRetrieve, kvNSID, "large", len(large)),
						make([]byte, len(large))
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

// TestRetrievesTakeMemoryForTheirValues, not for the host's buffers, which are long enough for the longest value.
func TestRetrievesTakeMemoryForTheirValues(t *testing.T) {
	r, s := kvRig(t, nil)
	value := bytes.Repeat([]byte{7}, 100)
	s.Set("key", value)
	before := r.Pool.Stats().PeakBytes
	s.Hold()
	const hosts, depth = 4, 128
	var wg sync.WaitGroup
	for range hosts {
		l, buf := newKVLoad(t, r, depth), make([]byte, kvtest.MaxValue)
		wg.Go(func() {
			err := l.Run(depth, func(c *client.Command, _ int) {
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
	if took := r.Pool.Stats().PeakBytes - before; took > most {
		t.Errorf("%d Retrieves of a value of %d bytes had %d bytes of memory, the most is %d", hosts*depth, len(value),
			took, most)
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

// TestAValueGrowsWhileItWaitsForMemory: the Retrieve returns the whole value, or as much as the host asks for.
func TestAValueGrowsWhileItWaitsForMemory(t *testing.T) {
	for _, c := range []struct{ buffer, want int }{{20_000, 5000}, {3500, 3500}} {
		r := newRig(t, nil)
		r.AddKV(kvNSID, &stingy{lengths: []int{100, 3000, 4000, 5000}})
		buf := make([]byte, c.buffer)
		result, st := kvHost(t, connect(t, client.Options{Address: r.address}))(kvtest.Command(nvme.CmdKVRetrieve,
			kvNSID, "key", len(buf)), buf)
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

// await waits for a condition that other goroutines bring about.
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

// The connection is lost while the partition has commands, which keep their buffers.
func TestBuffersStayWithThePartitionWhenTheHostIsGone(t *testing.T) {
	t.Parallel()
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
	polling.Go(func() { // the goroutine that polls sends the data of Stores
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
	for _, conn := range r.Service.Conns() {
		conn.Shut("cut") // without a shutdown, for which Close would wait
	}
	if err := c.Close(); err != nil {
		t.Log(err)
	}
	if got := inUse(r.Pool); got < 16*64<<10 { // buffers of Stores; Retrieves have none yet
		t.Errorf("%d bytes are in use while the partition works with %d", got, 16*64<<10)
	}
	var closed atomic.Bool
	done := make(chan struct{})
	go func() {
		r.server.Close()
		closed.Store(true)
		close(done)
	}()
	await(t, "the connections are shut", func() bool { n, _, _ := r.Service.Counts(); return n <= 1 })
	if closed.Load() {
		t.Error("the server is closed while a partition has its memory")
	}
	s.Release()
	<-done
}

// A command that waits for memory or for its host's data when its namespace is removed does not reach the partition.
func TestNoCommandReachesTheStoreOfARemovedNamespace(t *testing.T) {
	r, s := kvRig(t, nil)
	s.Hold() // so that no buffer is freed
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
		cmds = append(cmds, client.Command{SQE: kvtest.Command(op, kvNSID, "key", kvtest.MaxValue),
			Data: make([]byte, kvtest.MaxValue), Tag: uint64(i)})
	}
	if n, err := q.Submit(cmds); n != len(cmds) {
		t.Fatalf("submitted %d: %v", n, err)
	}
	await(t, "some wait for memory", func() bool { return r.Pool.Stats().Waits > 90 })
	ns := r.State.Subsystems[0].Namespaces
	r.State.Subsystems[0].Namespaces = ns[:1]
	r.Service.Apply(r.State)
	r.Service.RemovePartition(ns[1].Partition)
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

// TestAWriteThatWaitsForItsDataKeepsItsTenant: the host moves to another tenant after the target has asked for the data
// of a Store. The Store is charged to the tenant that the host belonged to when it was sent; the next one is not.
func TestAWriteThatWaitsForItsDataKeepsItsTenant(t *testing.T) {
	r, s := kvRig(t, nil)
	h := r.rawIdle(t)
	if s := h.connectAdmin(0); !s.OK() {
		t.Fatal(s)
	}
	h.setCC(rawEnable.WithCSS(nvme.CCCSSIOCS))
	q := h.queue(1)
	const size = kvtest.MaxValue
	store := func() (cid uint16) {
		cid = q.sendToFetch(kvtest.Command(nvme.CmdKVStore, kvNSID, "key", size), size)
		for len(q.r2ts) == 0 {
			if err := q.receive(); err != nil {
				t.Fatal(err)
			}
		}
		return cid
	}
	var seen []tenant.ID
	s.Fail(func(r *partition.Request) kvstore.Status {
		seen = append(seen, r.Tenant)
		return kvstore.OK
	})
	first := store()
	before := r.Service.Tenants()[0].Number
	r.Service.SetTenants([]target.TenantConfig{{Name: "gold", Hosts: []string{rawNQN},
		Settings: pipeline.Settings{Weight: 2}}})
	gold := r.Service.Tenants()[0].Number
	q.answer('a')
	if c := q.wait(first); !c.Status().OK() {
		t.Fatal(c.Status())
	}
	second := store()
	q.answer('b')
	q.wait(second)
	s.Fail(nil) // and seen is this goroutine's
	if !slices.Equal(seen, []tenant.ID{before, gold}) || before == gold {
		t.Errorf("Stores were charged to tenants %d; the tenants are %d and %d", seen, before, gold)
	}
	r.Service.SetTenants(nil)
}

// TestCommandsThatWaitForMemoryKeepTheirTenant while their host moves to another one. The former one's number is not
// used again before their connection is closed.
func TestCommandsThatWaitForMemoryKeepTheirTenant(t *testing.T) {
	r, s := kvRig(t, nil)
	s.Hold()
	l := newKVLoad(t, r, 64)
	var cmds []client.Command
	for i := range 64 {
		cmds = append(cmds, client.Command{SQE: kvtest.Command(nvme.CmdKVList, kvNSID, "key", kvtest.MaxValue),
			Data: make([]byte, kvtest.MaxValue), Tag: uint64(i)})
	}
	if n, err := l.QPair.Submit(cmds); n != len(cmds) {
		t.Fatalf("submitted %d: %v", n, err)
	}
	await(t, "some wait for memory", func() bool {
		return r.Pool.Stats().Waits > 0 &&
			s.Waiting()+int(r.Pool.Stats().Waits) == len(cmds)
	})
	var host string
	for _, c := range r.Service.Conns() {
		host = c.Describe().HostNQN
	}
	before := r.Service.Tenants()[0].Number
	r.Service.SetTenants([]target.TenantConfig{{Name: "gold", Hosts: []string{host},
		Settings: pipeline.Settings{Weight: 2}}})
	gold := r.Service.Tenants()[0].Number
	seen := map[tenant.ID]int{}
	s.Fail(func(r *partition.Request) kvstore.Status {
		seen[r.Tenant]++
		return kvstore.OK
	})
	s.Release()
	comps := make([]client.Completion, len(cmds))
	for done := 0; done < len(cmds); {
		n, err := l.QPair.Poll(comps, 10*time.Second)
		if err != nil || n == 0 {
			t.Fatalf("%d of %d are done: %v", done, len(cmds), err)
		}
		done += n
	}
	s.Fail(nil) // and seen is this goroutine's
	if seen[before] != len(cmds) || before == gold {
		t.Errorf("requests by tenant: %v; the tenants are %d and %d", seen, before, gold)
	}
	r.Service.SetTenants(nil)
}

// An Abort ends a command that waits for memory. A command that the partition has completes.
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
		cmds = append(cmds, client.Command{SQE: kvtest.Command(nvme.CmdKVList, kvNSID, "key", kvtest.MaxValue),
			Data: make([]byte, kvtest.MaxValue), Tag: uint64(i)})
	}
	if n, err := q.Submit(cmds); n != len(cmds) {
		t.Fatalf("submitted %d: %v", n, err)
	}
	await(t, "some wait for memory", func() bool {
		return r.Pool.Stats().Waits > 0 &&
			s.Waiting()+int(r.Pool.Stats().Waits) == len(cmds)
	})
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

// Hosts connect and leave while their commands are in every stage.
func TestHostsVanishAmongCommandsForAPartition(t *testing.T) {
	t.Parallel()
	r, s := kvRig(t, nil)
	s.Set("key", make([]byte, kvtest.MaxValue))
	for round := range 20 {
		address, vanish := cable(t, r.address)
		c, q, err := open(address, 64)
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
			_, _ = q.Poll(comps, time.Millisecond) // whether it exists or not
		}
		vanish() // without a shutdown, for which Close would wait
		_ = c.Close()
		s.Release()
	}
}

// cable passes connections on to a target; cut ends all of them at once.
func cable(t *testing.T, to string) (address string, cut func()) {
	l := loopback.Listen(t)
	var mu sync.Mutex
	ends := []io.Closer{l}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			host, err := l.Accept()
			if err != nil {
				return
			}
			target, err := net.Dial("tcp", to)
			if err != nil {
				host.Close()
				continue
			}
			mu.Lock()
			ends = append(ends, host, target)
			mu.Unlock()
			wg.Go(func() { _, _ = io.Copy(host, target); host.Close() })
			wg.Go(func() { _, _ = io.Copy(target, host); target.Close() })
		}
	})
	cut = func() {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range ends {
			c.Close()
		}
	}
	t.Cleanup(func() {
		cut()
		wg.Wait()
	})
	return l.Addr().String(), cut
}
