package tcp_test

import (
	"strings"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/qpair/qpairtest"
)

// TestACommandIsValidatedAgainWhenItsDataArrives: its namespace may have been removed since the capsule began, and its
// extent may belong to another one.
func TestACommandIsValidatedAgainWhenItsDataArrives(t *testing.T) {
	ns := func(change func(*nvmeof.Namespace)) []*nvmeof.Namespace {
		n := &nvmeof.Namespace{NSID: 1, OffsetBytes: 1 << 20, SizeBytes: 1 << 20, BlockShift: 9, ANAGroup: 1,
			ANAState: nvme.ANAStateOptimized}
		change(n)
		return []*nvmeof.Namespace{n}
	}
	for _, tc := range []struct {
		name    string
		now     []*nvmeof.Namespace
		refused string
	}{
		{"the same", ns(func(*nvmeof.Namespace) {}), ""},
		{"grown", ns(func(n *nvmeof.Namespace) { n.SizeBytes *= 2 }), ""},
		{"gone", nil, "sct 0x0, sc 0x0b"},
		{"elsewhere", ns(func(n *nvmeof.Namespace) { n.OffsetBytes = 8 << 20 }), "sct 0x0, sc 0x0b"},
		{"on another drive", ns(func(n *nvmeof.Namespace) { n.SSD = 1 }), "sct 0x0, sc 0x0b"},
		{"another in its place", ns(func(n *nvmeof.Namespace) { n.UUID[0] = 1 }), "sct 0x0, sc 0x0b"},
		{"smaller than the address", ns(func(n *nvmeof.Namespace) { n.SizeBytes = 512 }), "sct 0x0, sc 0x80"},
	} {
		for _, op := range []uint8{nvme.CmdWrite, nvme.CmdDSM} {
			d := newDriver(config)
			d.attach(qpairtest.IOQueue(8, false), 0, 0)
			d.Log.Reset()
			r := request{op: op, cid: 1, nsid: 1, slba: 5, nlb: 1, inline: true, transfer: 512,
				data: qpairtest.Pattern(1, 512)}
			refused := tc.refused
			if op == nvme.CmdDSM {
				r.transfer, r.data = 16, make([]byte, 16) // its addresses are data
				r.change = func(e *nvme.SQE) { e.SetCDW(10, 0); e.SetCDW(11, nvme.DSMDeallocate) }
				if tc.name == "smaller than the address" {
					refused = ""
				}
			}
			b := d.capsule(r, flaw{})
			d.receive(b[:len(b)-1])
			d.c.SetTable(nvmeof.NewNamespaceTable(tc.now, qpairtest.HostNQN))
			d.receive(b[len(b)-1:])
			sent, executed := d.sent(), strings.Contains(d.Log.String(), "execute")
			if executed != (refused == "") || !strings.Contains(sent, refused) {
				t.Errorf("%s, opcode %#x: executed %t, answer %q, want %q", tc.name, op, executed, sent, refused)
			}
			if !executed && len(d.Bufs) != 0 {
				t.Errorf("%s: its buffer is still out", tc.name)
			}
		}
	}
}

// TestAFusedPairWhoseDataArrivesLateFailsAsAWhole, as a single command does.
func TestAFusedPairWhoseDataArrivesLateFailsAsAWhole(t *testing.T) {
	d := newDriver(config)
	d.attach(qpairtest.IOQueue(8, false), 0, 0)
	d.Log.Reset()
	half := func(op uint8, cid uint16, fuse nvme.Fuse) []byte {
		return d.capsule(request{op: op, cid: cid, nsid: 1, slba: 5, nlb: 1, fuse: fuse, inline: true, transfer: 512,
			data: qpairtest.Pattern(1, 512)}, flaw{})
	}
	d.receive(half(nvme.CmdCompare, 1, nvme.FuseFirst))
	b := half(nvme.CmdWrite, 2, nvme.FuseSecond)
	d.receive(b[:len(b)-1])
	d.c.SetTable(nvmeof.NewNamespaceTable(nil, qpairtest.HostNQN))
	d.receive(b[len(b)-1:])
	if log := d.Log.String(); strings.Contains(log, "execute") {
		t.Error(log)
	}
	if sent := d.sent(); !strings.Contains(sent, "cid 0x1") || !strings.Contains(sent, "cid 0x2") ||
		strings.Contains(sent, "Success") {
		t.Error(sent)
	}
	if n := d.c.Outstanding(); n != 0 || len(d.Bufs) != 0 {
		t.Errorf("%d commands outstanding, %d buffers out", n, len(d.Bufs))
	}
}
