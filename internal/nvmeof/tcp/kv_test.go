package tcp_test

import (
	"fmt"
	"strings"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/nvmeof/qpair/qpairtest"
)

// kvRequest is a command to the namespace of keys and values; n is the length of the value or the buffer.
func kvRequest(op uint8, cid uint16, n uint32) request {
	return request{op: op, cid: cid, nsid: 4, transfer: n, change: func(e *nvme.SQE) {
		sgl := *e.SGL()
		*e.KV() = nvme.KVSQE{}
		e.SetOpcode(op)
		e.SetCID(cid)
		e.SetNSID(4)
		e.SetPSDT(nvme.PSDTSGL)
		*e.SGL() = sgl
		e.KV().SetKey([]byte("key"))
		e.KV().SetLenBytes(n)
	}}
}

// answering is a driver that completes key-value commands with a result and some data.
type answering struct {
	*driver
	result uint64
	data   []byte
}

func (a *answering) Execute(slot int) {
	if len(a.data) > 0 {
		a.c.RespondData(slot, a.data, a.result)
	} else {
		a.c.Respond(slot, nvme.Success, a.result)
	}
}

// TestAnswersShorterThanTheHostsBuffer: DATAL is the length of the data, and the SUCCESS flag replaces a completion
// only if that has no result, which a Retrieve's always has.
//
// Source: NVMe/TCP Transport 1.0, sections 3.3.2 and 3.6.2.10.
func TestAnswersShorterThanTheHostsBuffer(t *testing.T) {
	for _, x := range []struct {
		name   string
		op     uint8
		room   uint32
		result uint64
		data   int
		noFlow bool
		want   string
	}{
		{"a value that fits", nvme.CmdKVRetrieve, 1000, 300, 300, true,
			"C2HData LAST length 300 ; CapsuleResp result 0x12c"},
		{"a value that does not", nvme.CmdKVRetrieve, 100, 300, 100, true,
			"C2HData LAST length 100 ; CapsuleResp result 0x12c"},
		{"an empty value", nvme.CmdKVRetrieve, 1000, 0, 0, true, "CapsuleResp result 0x0"},
		{"how long a value is", nvme.CmdKVRetrieve, 0, 300, 0, true, "CapsuleResp result 0x12c"},
		{"a list", nvme.CmdKVList, 1000, 0, 24, true, "C2HData LAST+SUCCESS length 24"},
		{"a list with flow control", nvme.CmdKVList, 1000, 0, 24, false,
			"C2HData LAST length 24 ; CapsuleResp result 0x0"},
		{"a list with a credit", nvme.CmdKVList, 1000, 1 << 32, 24, true,
			"C2HData LAST length 24 ; CapsuleResp result 0x100000000"},
	} {
		d := &answering{driver: &driver{}, result: x.result, data: qpairtest.Pattern(1, x.data)}
		d.start(config, d)
		d.attach(qpairtest.IOQueue(8, x.noFlow), 0, 0)
		d.receive(d.capsule(kvRequest(x.op, 5, x.room), flaw{}))
		var got []string
		for line := range strings.Lines(d.sent()) {
			words := strings.Fields(line)[1:] // without the arrow
			keep := words[:1]
			for i, w := range words {
				switch {
				case strings.HasPrefix(w, "LAST"):
					keep = append(keep, w)
				case w == "length" || w == "result":
					keep = append(keep, w, words[i+1])
				}
			}
			got = append(got, strings.Join(keep, " "))
		}
		if s := strings.Join(got, " ; "); s != x.want {
			t.Errorf("%s: %s, want %s", x.name, s, x.want)
		}
		if n := d.c.Outstanding(); n != 0 {
			t.Errorf("%s: %d commands outstanding", x.name, n)
		}
	}
}

// TestAStoreIsValidatedAgainWhenItsDataArrives, like a write of blocks.
func TestAStoreIsValidatedAgainWhenItsDataArrives(t *testing.T) {
	for _, x := range []struct {
		name    string
		change  func(n *nvmeof.Namespace)
		refused string
	}{
		{"the same", func(*nvmeof.Namespace) {}, ""},
		{"grown", func(n *nvmeof.Namespace) { n.SizeBytes *= 2 }, ""},
		{"another partition", func(n *nvmeof.Namespace) { n.Partition++ }, "sct 0x0, sc 0x0b"},
		{"another in its place", func(n *nvmeof.Namespace) { n.UUID[0]++ }, "sct 0x0, sc 0x0b"},
		{"blocks in its place", func(n *nvmeof.Namespace) { n.CSI, n.BlockShift = nvme.CSINVM, 9 }, "sct 0x0, sc 0x"},
		{"values are shorter", func(n *nvmeof.Namespace) { n.MaxValueBytes = 299 }, "sct 0x0, sc 0x85"},
	} {
		d := newDriver(config)
		d.attach(qpairtest.IOQueue(8, false), 0, 0)
		r := kvRequest(nvme.CmdKVStore, 5, 300)
		r.inline, r.data = true, qpairtest.Pattern(1, 300)
		b := d.capsule(r, flaw{})
		d.receive(b[:len(b)-1])
		now := *qpairtest.Table().Get(4)
		x.change(&now)
		d.c.SetTable(nvmeof.NewNamespaceTable([]*nvmeof.Namespace{&now}, qpairtest.HostNQN))
		d.receive(b[len(b)-1:])
		sent, executed := d.sent(), strings.Contains(d.Log.String(), "execute")
		if executed != (x.refused == "") || !strings.Contains(sent, x.refused) {
			t.Errorf("%s: executed %t, answer %q, want %q", x.name, executed, sent, x.refused)
		}
		if !executed && len(d.Bufs) != 0 {
			t.Errorf("%s: its buffer is still out", x.name)
		}
	}
}

// TestCommandsForAPartitionMayNotBeFused, neither with each other nor with block commands.
func TestCommandsForAPartitionMayNotBeFused(t *testing.T) {
	d := newDriver(config)
	d.attach(qpairtest.IOQueue(8, false), 0, 0)
	fused := func(op uint8, cid uint16, f nvme.Fuse) request {
		r := kvRequest(op, cid, 8)
		set := r.change
		r.change = func(e *nvme.SQE) { set(e); e.SetFuse(f) }
		return r
	}
	for _, r := range []request{
		fused(nvme.CmdKVStore, 1, nvme.FuseFirst), fused(nvme.CmdKVStore, 2, nvme.FuseSecond),
		fused(nvme.CmdKVStore, 3, nvme.FuseSecond),
		{op: nvme.CmdCompare, cid: 4, nsid: 1, nlb: 1, transfer: 512, fuse: nvme.FuseFirst},
		fused(nvme.CmdKVStore, 5, nvme.FuseSecond),
		{op: nvme.CmdCompare, cid: 6, nsid: 1, nlb: 1, transfer: 512, fuse: nvme.FuseFirst},
		kvRequest(nvme.CmdKVExist, 7, 0),
	} {
		d.receive(d.capsule(r, flaw{}))
	}
	sent := d.sent()
	for cid := range 7 {
		ok := strings.Contains(sent, fmt.Sprintf("cid %#x", cid+1))
		if cid+1 == 7 {
			ok = !ok && strings.Contains(d.Log.String(), "execute") // the one that is not fused
		}
		if !ok {
			t.Errorf("command %d: %s%s", cid+1, d.Log.String(), sent)
		}
	}
	if strings.Contains(sent, "Success") || d.c.Outstanding() != 1 {
		t.Errorf("%d outstanding: %s", d.c.Outstanding(), sent)
	}
}

var _ qpair.Handler = (*answering)(nil)
