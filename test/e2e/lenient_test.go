package e2e

import (
	"testing"

	"jbofd/internal/nvme"
)

// TestAHostWithoutNQNIsServed where any host is allowed, as by SPDK's target and nvmet, under a tenant name of its own.
func TestAHostWithoutNQNIsServed(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	admin, io := d.rawQueue("", nqnA, 0, 32)
	if c := io.do(rw(nvme.CmdFlush, 1, 0, 1)); !c.Status().OK() {
		t.Error(c.Status())
	}
	if n := d.metric("jbof_io_completed_total", "tenant", "anonymous", "op", "flush"); n != 1 {
		t.Errorf("%v flushes of tenant anonymous are counted, want 1", n)
	}
	eventually(t, "one line of the log for each queue tells what was wrong",
		func() bool { return len(d.log.find("connect accepted with a fault", "HOSTNQN")) == 2 })
	io.close()
	admin.close()
}
