package serve_test

import (
	"fmt"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/target/kvtest"
	"jbofd/internal/testutil/allocs"
)

// kvLoad keeps a command outstanding for each of its buffers.
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
	}{{"store in-capsule", nvme.CmdKVStore, 1000, 32}, {"store by R2T", nvme.CmdKVStore, 64 << 10, 8},
		{"retrieve", nvme.CmdKVRetrieve, 1000, 32},
		{"retrieve of a part", nvme.CmdKVRetrieve, 100, 32}, {"exist", nvme.CmdKVExist, 0, 32},
		{"one at a time", nvme.CmdKVRetrieve, 1000, 1}} {
		t.Run(x.name, func(t *testing.T) {
			s.Set("key", make([]byte, max(x.bytes, 1000)))
			l := newKVLoad(t, r, x.depth)
			data := make([]byte, x.bytes)
			e := kvtest.Command(x.opcode, kvNSID, "key", x.bytes)
			set := func(c *client.Command, _ int) { c.SQE, c.Data = e, data }
			allocs.None(t, func(n int) error { return l.run(n, x.depth, set) })
		})
	}
}

// Commands that arrive in one batch are submitted to the partition in one batch.
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

func BenchmarkKV(b *testing.B) {
	for _, x := range []struct {
		name   string
		opcode uint8
		real   bool
		depth  int
	}{{"Retrieve256", nvme.CmdKVRetrieve, false, 128}, {"Store256", nvme.CmdKVStore, false, 128},
		{"Retrieve256OnADrive", nvme.CmdKVRetrieve, true, 128},
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
			if err := l.run(keys, x.depth, func(c *client.Command, i int) {
				c.SQE, c.Data = stores[i],
					data
			}); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			b.ResetTimer()
			if err := l.run(b.N, x.depth, func(c *client.Command, i int) {
				c.SQE, c.Data = cmds[i*7919%keys],
					data
			}); err != nil {
				b.Fatal(err)
			}
		})
	}
}
