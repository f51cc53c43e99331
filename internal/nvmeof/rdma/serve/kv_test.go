package serve_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/target/kvtest"
	"jbofd/internal/testutil/allocs"
	"jbofd/internal/testutil/ioload"
)

// kvNSID is the namespace of keys and values beside the blocks of namespace 1.
const kvNSID = 9

// kvRig is a rig with a namespace of keys and values on a store in memory.
func kvRig(t testing.TB, change func(*setup)) (*rig, *kvtest.Store) {
	t.Helper()
	r, s := newRig(t, change), kvtest.NewStore()
	r.AddKV(kvNSID, s)
	return r, s
}

func TestKeysAndValuesOverRDMA(t *testing.T) {
	for _, mode := range []client.CreditMode{client.CreditsOff, client.CreditsOn} {
		r, s := kvRig(t, nil)
		if mode == client.CreditsOn {
			s.GiveCredit(70000)
		}
		o := r.options()
		o.QPairs, o.Credits = 1, mode
		q, bufs := openLoaded(t, r.connect(t, o), kvtest.MaxValue, 1)
		comps := make([]client.Completion, 1)
		kvtest.Conformance(t, s, kvNSID, func(e nvme.SQE, data []byte) (uint64, nvme.Status) {
			b := bufs[0][:copy(bufs[0], data)]
			if n, err := q.Submit([]client.Command{{SQE: e, Data: b}}); n != 1 {
				t.Fatal(err)
			}
			if n, err := q.Poll(comps, 20*time.Second); n != 1 {
				t.Fatal(err)
			}
			copy(data, b)
			return comps[0].Result, comps[0].Status
		})
	}
}

func TestCommandsForAPartitionAllocateNothing(t *testing.T) {
	r, s := kvRig(t, nil)
	for _, x := range []struct {
		name   string
		opcode uint8
		bytes  int
		depth  int
	}{{"store in-capsule", nvme.CmdKVStore, 1000, 32}, {"store by RDMA READ", nvme.CmdKVStore, 64 << 10, 8},
		{"retrieve", nvme.CmdKVRetrieve, 1000, 32},
		{"retrieve of a part", nvme.CmdKVRetrieve, 100, 32}, {"exist", nvme.CmdKVExist, 0, 32},
		{"extended store", nvme.CmdKVXStore, 1000, 32}, {"extended store by RDMA READ", nvme.CmdKVXStore, 64 << 10, 8},
		{"extended retrieve", nvme.CmdKVXRetrieve, 1000, 32}} {
		t.Run(x.name, func(t *testing.T) {
			s.Set("key", make([]byte, max(x.bytes, 1000)))
			o := r.options()
			o.QPairs, o.QueueDepth = 1, x.depth
			q, bufs := openLoaded(t, r.connect(t, o), x.bytes, x.depth)
			l := ioload.New(q, x.depth)
			e := kvtest.Command(x.opcode, kvNSID, "key", x.bytes)
			set := func(c *client.Command, _ int) { c.SQE, c.Data = e, bufs[c.Tag] }
			allocs.None(t, func(n int) error { return l.Run(n, set) })
		})
	}
}

// The credit of a command whose result has 64 bits is in SQID.
func TestWideCompletionsOverRDMACarryCredits(t *testing.T) {
	r, s := kvRig(t, nil)
	s.GiveCredit(321)
	o := r.options()
	o.QPairs, o.Credits = 1, client.CreditsOn
	q, bufs := openLoaded(t, r.connect(t, o), 100, 1)
	for i, op := range []uint8{nvme.CmdKVXStore, nvme.CmdKVXDelete} {
		n := nvme.KVWriteHeaderSize
		clear(bufs[0])
		cmds := []client.Command{{SQE: kvtest.Command(op, kvNSID, "key", n), Data: bufs[0][:n]}}
		if _, err := q.Submit(cmds); err != nil {
			t.Fatal(err)
		}
		var comps [1]client.Completion
		if k, err := q.Poll(comps[:], 20*time.Second); k != 1 {
			t.Fatal(err)
		}
		if c := comps[0]; !c.Status.OK() || c.Result != uint64(i+1) || c.SQID != 321 {
			t.Errorf("opcode %#x: %v, version %d, SQID %d", op, c.Status, c.Result, c.SQID)
		}
	}
}

// Large values of many hosts need several times the memory of the pool.
func TestLargeValuesWaitForMemory(t *testing.T) {
	t.Parallel()
	r, s := kvRig(t, func(u *setup) { u.buffers = 16 << 20 })
	s.Set("large", make([]byte, kvtest.MaxValue))
	var wg sync.WaitGroup
	for w := range 3 {
		o := r.options()
		o.QPairs, o.QueueDepth = 1, 16
		q, bufs := openLoaded(t, r.connect(t, o), kvtest.MaxValue, 16)
		wg.Go(func() {
			err := ioload.New(q, 16).Run(200, func(c *client.Command, i int) {
				b := bufs[c.Tag]
				switch (i + w) % 4 {
				case 0:
					c.SQE, c.Data = kvtest.Command(nvme.CmdKVStore, kvNSID, fmt.Sprint("key", w), len(b)), b
				case 1: // in-capsule, behind those that wait
					c.SQE, c.Data = kvtest.Command(nvme.CmdKVStore, kvNSID, fmt.Sprint("small", w), 4096), b[:4096]
				case 2:
					c.SQE, c.Data = kvtest.Command(nvme.CmdKVRetrieve, kvNSID, "large", len(b)), b
				case 3:
					c.Data = b[:blockBytes]
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

// The connection is lost while the partition has commands, which keep their buffers, and while others wait for memory.
func TestBuffersStayWithThePartitionWhenTheHostIsGone(t *testing.T) {
	t.Parallel()
	for name, bytes := range map[string]int{"all with the partition": 64 << 10,
		"some wait for memory": kvtest.MaxValue} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, s := kvRig(t, func(u *setup) { u.buffers = 16 << 20 })
			s.Set("key", make([]byte, 64<<10))
			s.Hold()
			o := r.options()
			o.QPairs, o.QueueDepth, o.CtrlLossTimeout = 1, 32, -1
			c := r.connect(t, o)
			q, bufs := openLoaded(t, c, bytes, 32)
			var cmds []client.Command
			for i := range 32 {
				cmds = append(cmds,
					client.Command{SQE: kvtest.Command([]uint8{nvme.CmdKVStore, nvme.CmdKVList}[i%2], kvNSID, "key",
						bytes), Data: bufs[i]})
			}
			if n, err := q.Submit(cmds); n != len(cmds) {
				t.Fatalf("submitted %d: %v", n, err)
			}
			with := 0
			eventually(t, "all are with the partition or wait", func() bool {
				with = s.Waiting()
				return with+int(r.Pool.Stats().Waits) == len(cmds) // none of those that wait gets any
			})
			if err := c.Close(); err != nil {
				t.Log(err)
			}
			var closed atomic.Bool
			done := make(chan struct{})
			go func() {
				r.server.Close()
				closed.Store(true)
				close(done)
			}()
			eventually(t, "others are closed", func() bool { n, _, _ := r.Service.Counts(); return n <= 1 })
			if got := r.Pool.Stats().InUseBytes; closed.Load() || got < int64(with*bytes) {
				t.Errorf("closed %t, %d bytes are in use while the partition works with %d", closed.Load(), got,
					with*bytes)
			}
			s.Release()
			<-done
			if _, n := s.Counts(); n != with {
				t.Errorf("%d requests have come after the connection was lost", n-with)
			}
		})
	}
}

// A wrong memory key ends only its connection, whether the target reads or writes.
func TestWrongKeyOfAValueEndsItsConnectionOnly(t *testing.T) {
	for _, op := range []uint8{nvme.CmdKVStore, nvme.CmdKVRetrieve, nvme.CmdKVList} {
		r, s := kvRig(t, nil)
		s.Set("key", make([]byte, 16384))
		c := r.client(t)
		h := r.ioQueue(t, c)
		e := kvtest.Command(op, kvNSID, "key", 16384)
		h.Keyed(&e, nvme.SGLSubtypeAddress, 16384)
		g := e.SGL()
		g.SetKeyed(nvme.SGLSubtypeAddress, g.Address(), 16384, g.Key()^0x5555)
		h.Receive(1)
		if err := h.Send(e[:]); err != nil {
			t.Fatal(err)
		}
		r.logged(t, "protocol error", "memory key, address or length is wrong")
		serves(t, c)
	}
}

// Memory keys are invalidated on request, however much was written.
func TestPartialAnswersInvalidateKeysWhenAsked(t *testing.T) {
	r, s := kvRig(t, nil)
	s.Set("short", []byte("abc"))
	s.Set("empty", nil)
	s.Set("long", make([]byte, 20000))
	h := r.ioQueue(t, r.client(t))
	for _, x := range []struct {
		key  string
		dw0  uint32
		want nvme.Status
	}{{"short", 3, nvme.Success}, {"empty", 0, nvme.Success}, {"long", 20000, nvme.Success},
		{"missing", 0, nvme.KeyDoesNotExist | nvme.DNR}} {
		mr, err := h.Domain.Register(make([]byte, 16384), verbs.LocalWrite|verbs.RemoteRead|verbs.RemoteWrite)
		if err != nil {
			t.Fatal(err)
		}
		e := kvtest.Command(nvme.CmdKVRetrieve, kvNSID, x.key, 16384)
		e.SetPSDT(nvme.PSDTSGL)
		e.SGL().SetKeyed(nvme.SGLSubtypeInvalidateRK, mr.Addr(), 16384, mr.RKey())
		h.Receive(1)
		if err := h.Send(e[:]); err != nil {
			t.Fatal(err)
		}
		w := h.Next()
		cqe := h.Response(w)
		if cqe.Status() != x.want || uint32(cqe.Result64()) != x.dw0 || !w.Invalidated || w.RKey != mr.RKey() {
			t.Errorf("%s: %v, DW0 %d, invalidated %t", x.key, cqe.Status(), uint32(cqe.Result64()), w.Invalidated)
		}
		if err := mr.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
