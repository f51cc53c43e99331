package executortest

import (
	"testing"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/units"
)

func delaySubject(t testing.TB) *Subject {
	pool, err := bufpool.New(bufpool.Config{TotalBytes: PoolBytes})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pool.CloseTest(t) })
	d := NewDelay(pool, Places*Bytes)
	ns := &nvmeof.Namespace{NSID: 1, Executor: KindDelay, SizeBytes: Places * Bytes, BlockShift: 9,
		ANAState: nvme.ANAStateOptimized}
	table := nvmeof.NewNamespaceTable([]*nvmeof.Namespace{ns}, "")
	plan := func(opcode uint8) func(c *executor.Command, place int) {
		return func(c *executor.Command, place int) {
			c.SQE.SetOpcode(opcode)
			c.SQE.SetNSID(1)
			c.SQE.SetPSDT(nvme.PSDTSGL)
			c.SQE.SetSLBA(units.LBA(place * (Bytes >> 9)))
			c.SQE.SetNLB(Bytes >> 9)
			c.SQE.SetCDW(15, uint32(place%3*100))
			if st := nvmeof.PlanIO(c.SQE, table, nvmeof.Limits{MDTSBytes: 1 << 20, FusedBytes: 1 << 20},
				c.Plan); !st.OK() {
				t.Fatal(st)
			}
			if c.Plan.Kind != KindDelay {
				t.Fatalf("kind %d", c.Plan.Kind)
			}
		}
	}
	return &Subject{Executor: d, Pool: pool, Write: plan(nvme.CmdWrite), Read: plan(nvme.CmdRead),
		Written: func(place int) bool { return d.Byte(int64(place*Bytes)) != 0 }, Shut: d.Shut, Open: d.Open,
		Started: d.Started}
}

func TestDelayConforms(t *testing.T) { Conformance(t, delaySubject) }
