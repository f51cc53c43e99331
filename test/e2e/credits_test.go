package e2e

import (
	"io"
	"net"
	"sync"
	"testing"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/testutil/loopback"
)

// twoPolicies has namespace 1 on a drive whose policy grants credits and namespace 2 on a drive whose policy grants
// none.
var twoPolicies = setup{
	ssds: "  - {name: ssd0, backend: mem, size: 128MiB, policy: gimbal}\n  - {name: ssd1, backend: mem, size: " +
		"128MiB, policy: fifo}\n",
	subsystems: `  - nqn: nqn.2026-11.example.jbofd:a
    allow_any_host: true
    namespaces:
      - {nsid: 1, ssd: ssd0, size: 64MiB, block_size: 4096}
      - {nsid: 2, ssd: ssd1, size: 64MiB, block_size: 4096}
`,
}

// tap is a relay between a host and the daemon that inspects the PDUs. It supports no digests.
type tap struct {
	t    *testing.T
	addr string
	wg   sync.WaitGroup

	mu sync.Mutex
	// units holds the sizes of the outstanding commands by queue and CID. sum is their total for namespace 1 and most
	// its maximum. credit is the largest credit that has passed. over counts how often sum exceeded credit with more
	// than one command outstanding.
	units                   map[[2]int]int
	sum, most, credit, over int
	commands                int
}

// newTap starts a relay to the daemon that ends with the test.
func newTap(t *testing.T, d *daemon) *tap {
	l := loopback.Listen(t)
	p := &tap{t: t, addr: l.Addr().String(), units: map[[2]int]int{}}
	t.Cleanup(func() {
		_ = l.Close()
		p.wg.Wait()
	})
	p.wg.Go(func() {
		for n := 0; ; n++ {
			host, err := l.Accept()
			if err != nil {
				return
			}
			target, err := net.Dial("tcp", d.addr)
			if err != nil {
				t.Error(err)
				_ = host.Close()
				return
			}
			p.wg.Go(func() { p.relay(target, host, n, p.fromHost) })
			p.wg.Go(func() { p.relay(host, target, n, p.fromTarget) })
		}
	})
	return p
}

// relay forwards PDUs until one side closes. It inspects each PDU before it forwards it.
func (t *tap) relay(to, from net.Conn, queue int, look func(queue int, b []byte)) {
	defer to.Close()
	defer from.Close()
	b := make([]byte, 2<<20)
	for {
		if _, err := io.ReadFull(from, b[:pdu.CommonLen]); err != nil {
			return
		}
		n := (*pdu.Common)(b).PLEN()
		if _, err := io.ReadFull(from, b[pdu.CommonLen:n]); err != nil {
			return
		}
		look(queue, b[:n])
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}

func (t *tap) fromHost(queue int, b []byte) {
	if (*pdu.Common)(b).Type() != pdu.TypeCapsuleCmd {
		return
	}
	e := (*pdu.CapsuleCmd)(b).SQE()
	if queue == 0 || e.Opcode() == nvme.OpFabrics || e.NSID() != 1 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	u := max((int(e.SGL().Length())+4095)/4096, 1)
	t.units[[2]int{queue, int(e.CID())}] = u
	t.sum += u
	t.commands++
	t.most = max(t.most, t.sum)
	if t.sum > t.credit && t.commands > 1 {
		t.over++
	}
}

func (t *tap) fromTarget(queue int, b []byte) {
	if (*pdu.Common)(b).Type() != pdu.TypeCapsuleResp {
		return
	}
	e := (*pdu.CapsuleResp)(b).CQE()
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := nvme.Credit(e.DW1()); c.SSD() == 0 {
		t.credit = max(t.credit, c.Units())
	}
	if u, ok := t.units[[2]int{queue, int(e.CID())}]; ok && queue > 0 {
		delete(t.units, [2]int{queue, int(e.CID())})
		t.sum -= u
		t.commands--
	}
}

// TestAHostKeepsToItsCredits: a host with 128 large I/Os never has more outstanding than the largest credit that it
// received, whereas a drive without credits receives all of them at once.
func TestAHostKeepsToItsCredits(t *testing.T) {
	d := start(t, twoPolicies)
	p := newTap(t, d)
	o := d.options(hostA, nqnA)
	o.Address, o.Credits = p.addr, client.CreditsOn
	c := d.connect(o)
	n, free := open(t, c, 1), open(t, c, 2)
	if got := n.Credit(); !got.On || got.Units == 0 || got.SSD != 0 {
		t.Fatalf("the first credit: %+v", got)
	}
	var wg sync.WaitGroup
	for i := range 128 {
		wg.Go(func() {
			buf := make([]byte, 256<<10)
			for k := range 8 {
				var err error
				if (i+k)%2 == 0 {
					_, err = n.ReadAt(ctx(t), buf, int64(i)*256<<10)
				} else {
					_, err = n.WriteAt(ctx(t), buf, int64(i)*256<<10, 0)
				}
				if err != nil {
					t.Error(err)
				}
				if _, err := free.ReadAt(ctx(t), buf[:4096], 0); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	got := n.Credit()
	t.Logf("the largest credit %d units, the most on the wire %d, overdrawn %d", p.credit, p.most, got.Overdrawn)
	// A host overdraws its credit on purpose when nothing has completed for 100 ms, as on a machine that is very busy.
	if got.Overdrawn > 0 && p.most <= p.credit+int(got.Overdrawn) {
		p.over = 0
	}
	if p.credit == 0 || p.over > 0 || p.sum != 0 {
		t.Errorf("%d times more was on the wire than the largest credit, %d units; the most was %d, at the end "+
			"it is %d", p.over, p.credit, p.most, p.sum)
	}
	if got.Waits == 0 || got.Waiting != 0 || got.Outstanding != 0 {
		t.Errorf("at the end: %+v; 128 I/Os of 64 units are more than the credit", got)
	}
	if got := free.Credit(); got.Units != 0 || got.Waits != 0 {
		t.Errorf("the drive with fifo: %+v", got)
	}
}

// TestCreditsComeBackAfterARestart of the daemon: on a new controller the feature is off until the host enables it
// again.
func TestCreditsComeBackAfterARestart(t *testing.T) {
	t.Parallel()
	d := start(t, twoPolicies)
	n := d.namespace(d.options(hostA, nqnA), 1)
	if got := n.Credit(); !got.On || got.Units == 0 {
		t.Fatalf("the first credit: %+v", got)
	}
	d.kill()
	d.launch()
	buf := make([]byte, 4096)
	if _, err := n.ReadAt(ctx(t), buf, 0); err != nil {
		t.Fatal(err)
	}
	if got := n.Credit(); !got.On || got.Units == 0 || got.Outstanding != 0 {
		t.Errorf("after a restart: %+v", got)
	}
}

// TestAStandardHostSeesNoCredits inspects the PDUs of a host that did not enable credits, on a drive whose policy
// grants them, and then of a host that did.
func TestAStandardHostSeesNoCredits(t *testing.T) {
	t.Parallel()
	d := start(t, twoPolicies)
	admin, q := d.raw(), d.raw()
	admin.initialize(false)
	l := login{host: hostA, sub: nqnA, noSQFlow: true}
	l.cntlid, l.qid = admin.admin(l), 1
	q.initialize(false)
	if c := q.connect(l); !c.Status().OK() {
		t.Fatal(c.Status())
	}
	read := func() (flags uint8, cqe *nvme.CQE) {
		t.Helper()
		q.send(q.capsule(rw(nvme.CmdRead, 7, 0, 1), nil, 4096))
		p, err := q.next()
		if err != nil || (*pdu.Common)(p).Type() != pdu.TypeC2HData {
			t.Fatalf("instead of data: %v, %v", (*pdu.Common)(p).Type(), err)
		}
		if flags = (*pdu.Common)(p).Flags(); flags&pdu.FlagSuccess == 0 {
			e := q.response()
			cqe = &e
		}
		return flags, cqe
	}
	flush := func() uint32 {
		var e nvme.SQE
		e.SetOpcode(nvme.CmdFlush)
		e.SetNSID(1)
		e.SetCID(8)
		r := q.do(e)
		return r.DW1()
	}
	if flags, e := read(); flags&pdu.FlagSuccess == 0 {
		t.Errorf("a read has a capsule: %x", e[:])
	}
	if dw1 := flush(); dw1 != 0 {
		t.Errorf("a flush has DW1 %#x", dw1)
	}
	var e nvme.SQE
	e.SetOpcode(nvme.AdminSetFeatures)
	e.Features().SetFID(nvme.FIDExtensions)
	e.Features().SetValue(nvme.ExtCredits | 1<<20)
	e.SetCID(9)
	r := admin.do(e)
	if !r.Status().OK() || r.DW0() != nvme.ExtCredits || nvme.Credit(r.DW1()).Units() == 0 {
		t.Fatalf("grant: %x", r[:])
	}
	if flags, e := read(); e == nil || nvme.Credit(e.DW1()).Units() == 0 {
		t.Errorf("a read has flags %#x and no credit", flags)
	}
	if nvme.Credit(flush()).Units() == 0 {
		t.Error("a flush has no credit")
	}
}
