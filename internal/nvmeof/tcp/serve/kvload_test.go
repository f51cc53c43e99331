package serve_test

import (
	"fmt"
	"testing"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/target/kvtest"
	"jbofd/internal/testutil/allocs"
	"jbofd/internal/testutil/ioload"
)

// newKVLoad makes a load on a new association.
func newKVLoad(t testing.TB, r *rig, depth int) *ioload.Load {
	t.Helper()
	c, q, err := open(r.address, depth)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return ioload.New(q, depth)
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
		{"one at a time", nvme.CmdKVRetrieve, 1000, 1}, {"extended store in-capsule", nvme.CmdKVXStore, 1000, 32},
		{"extended store by R2T", nvme.CmdKVXStore, 64 << 10, 8},
		{"extended retrieve", nvme.CmdKVXRetrieve, 1000, 32}} {
		t.Run(x.name, func(t *testing.T) {
			s.Set("key", make([]byte, max(x.bytes, 1000)))
			l := newKVLoad(t, r, x.depth)
			data := make([]byte, x.bytes)
			e := kvtest.Command(x.opcode, kvNSID, "key", x.bytes)
			set := func(c *client.Command, _ int) { c.SQE, c.Data = e, data }
			allocs.None(t, func(n int) error { return l.Run(n, set) })
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
		err := l.Run(32, func(c *client.Command, i int) {
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
				r.AddKV(kvNSID, kvtest.NewStore())
			}
			l := newKVLoad(b, r, x.depth)
			data := make([]byte, 256)
			const keys = 10000
			var cmds, stores [keys]nvme.SQE
			for i := range cmds {
				cmds[i] = kvtest.Command(x.opcode, kvNSID, fmt.Sprint("key", i), len(data))
				stores[i] = kvtest.Command(nvme.CmdKVStore, kvNSID, fmt.Sprint("key", i), len(data))
			}
			if err := l.Run(keys, func(c *client.Command, i int) {
				c.SQE, c.Data = stores[i],
					data
			}); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			b.ResetTimer()
			if err := l.Run(b.N, func(c *client.Command, i int) {
				c.SQE, c.Data = cmds[i*7919%keys],
					data
			}); err != nil {
				b.Fatal(err)
			}
		})
	}
}
