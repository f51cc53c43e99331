package serve_test

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/cm"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// rawHost is a queue pair without an NVMe host: a test says what it sends. The association that
// its queue belongs to is a client's.
type rawHost struct {
	t      *testing.T
	ep     verbs.Endpoint
	domain verbs.Domain
	cq     verbs.CQ
	qp     verbs.QP
	mr     verbs.MR
	mem    []byte
	events chan verbs.Event
	posted int
	wcs    []verbs.WC
}

// Parts of rawHost.mem.
const (
	rawData  = 0        // data, 64 KiB
	rawSend  = 64 << 10 // capsules, 16 KiB each
	rawRecv  = 256 << 10
	rawBytes = 512 << 10
	// rawEntries is the size of its queue.
	rawEntries = 8
)

// resolve begins a connection: everything but Connect.
func (r *rig) resolve(t *testing.T) *rawHost {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	ep, err := r.host.Resolve(ctx, netip.MustParseAddrPort(strings.TrimPrefix(r.address, "rdma://")))
	if err != nil {
		t.Fatal(err)
	}
	h := &rawHost{t: t, ep: ep, mem: make([]byte, rawBytes), events: make(chan verbs.Event, 16)}
	t.Cleanup(h.close)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	h.domain, err = ep.Device().OpenDomain()
	must(err)
	h.cq, err = h.domain.CreateCQ(256)
	must(err)
	h.mr, err = h.domain.Register(h.mem, verbs.LocalWrite|verbs.RemoteRead|verbs.RemoteWrite)
	must(err)
	h.qp, err = ep.CreateQP(verbs.QPConfig{Domain: h.domain, SendCQ: h.cq, RecvCQ: h.cq, Sends: 64, Recvs: 64})
	must(err)
	ep.OnEvent(func(e verbs.Event) {
		select {
		case h.events <- e:
		default:
		}
	})
	return h
}

func (h *rawHost) close() {
	_ = h.ep.Close()
	if h.cq != nil {
		_ = h.cq.Close()
	}
	if h.mr != nil {
		_ = h.mr.Close()
	}
	if h.domain != nil {
		_ = h.domain.Close()
	}
}

// request is the private data of a well-behaved host.
func request(qid uint16) (r cm.Request) {
	r.SetQID(qid)
	r.SetHRQSIZE(rawEntries)
	r.SetHSQSIZE(rawEntries - 1)
	return r
}

// connect sends the connection request.
func (h *rawHost) connect(private []byte, reads uint8) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return h.ep.Connect(ctx, verbs.Params{PrivateData: private, ResponderResources: reads, RetryCount: 7, RNRRetryCount: 7})
}

// receive posts receives for responses.
func (h *rawHost) receive(n int) {
	h.t.Helper()
	for range n {
		i := h.posted % 64
		h.posted++
		if _, err := h.qp.PostRecv([]verbs.RecvWR{{ID: uint64(1000 + i), Addr: h.mr.Addr() + rawRecv + uint64(i*64), Len: 64, LKey: h.mr.LKey()}}); err != nil {
			h.t.Fatal(err)
		}
	}
}

// send sends a capsule.
func (h *rawHost) send(capsule []byte) error {
	at := rawSend
	copy(h.mem[at:], capsule)
	_, err := h.domain.PostSend([]verbs.SendWR{{ID: 1, QP: h.qp.Handle(), Op: verbs.OpSend, Flags: verbs.FlagSignaled,
		Addr: h.mr.Addr() + uint64(at), Len: uint32(len(capsule)), LKey: h.mr.LKey()}})
	return err
}

// next returns the next completion of a receive, or one with an error.
func (h *rawHost) next() verbs.WC {
	h.t.Helper()
	for {
		for len(h.wcs) > 0 {
			w := h.wcs[0]
			h.wcs = h.wcs[1:]
			if w.Status != verbs.StatusOK || w.ID >= 1000 {
				return w
			}
		}
		var buf [16]verbs.WC
		n, err := h.cq.Poll(buf[:])
		if err != nil {
			h.t.Fatal(err)
		}
		h.wcs = append(h.wcs, buf[:n]...)
		if n > 0 {
			continue
		}
		if err := h.cq.Arm(); err != nil {
			h.t.Fatal(err)
		}
		if n, _ = h.cq.Poll(buf[:]); n > 0 {
			h.wcs = append(h.wcs, buf[:n]...)
			continue
		}
		if err := h.cq.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
			h.t.Fatal(err)
		}
		if err := h.cq.Wait(); err != nil {
			h.t.Fatal(err)
		}
	}
}

// response returns the completion queue entry of a receive's completion.
func (h *rawHost) response(w verbs.WC) (e nvme.CQE) {
	h.t.Helper()
	if w.Status != verbs.StatusOK || w.Len != nvme.CQESize {
		h.t.Fatalf("no response: %v, %d bytes", w.Status, w.Len)
	}
	copy(e[:], h.mem[rawRecv+int(w.ID-1000)*64:])
	return e
}

// do sends a capsule and returns its response.
func (h *rawHost) do(capsule []byte) nvme.CQE {
	h.t.Helper()
	h.receive(1)
	if err := h.send(capsule); err != nil {
		h.t.Fatal(err)
	}
	return h.response(h.next())
}

// keyed makes e's SGL name n bytes of the host's data.
func (h *rawHost) keyed(e *nvme.SQE, subtype uint8, n uint32) {
	e.SetPSDT(nvme.PSDTSGL)
	e.SGL().SetKeyed(subtype, h.mr.Addr()+rawData, n, h.mr.RKey())
}

// connectCommand is a Connect for I/O queue qid of c's controller; its data lies in rawData.
func (h *rawHost) connectCommand(c *client.Controller, qid, sqsize uint16) (e nvme.SQE) {
	id, err := c.Identity(context.Background())
	if err != nil {
		h.t.Fatal(err)
	}
	o := c.Options()
	d := (*nvme.ConnectData)(h.mem[rawData:])
	*d = nvme.ConnectData{}
	d.SetHostID(o.HostID)
	d.SetHostNQN(o.HostNQN)
	d.SetSubNQN(o.SubNQN)
	d.SetCNTLID(id.CNTLID)
	q := e.Connect()
	q.Init()
	q.SetQID(qid)
	q.SetSQSIZE(sqsize)
	h.keyed(&e, nvme.SGLSubtypeAddress, nvme.ConnectDataSize)
	return e
}

// ioQueue connects a raw host as I/O queue 2 of c's controller.
func (r *rig) ioQueue(t *testing.T, c *client.Controller) *rawHost {
	t.Helper()
	h := r.resolve(t)
	p := request(2)
	if err := h.connect(p[:], 16); err != nil {
		t.Fatal(err)
	}
	e := h.connectCommand(c, 2, rawEntries-1)
	if cqe := h.do(e[:]); !cqe.Status().OK() {
		t.Fatal(cqe.Status())
	}
	return h
}

// client connects a well-behaved host that leaves queue 2 to a raw one.
func (r *rig) client(t *testing.T) *client.Controller {
	o := r.options()
	o.Queues, o.QPairs, o.QueueDepth = 1, 1, 8
	return r.connect(t, o)
}

// rw is a read or write of blocks from LBA 0.
func rw(opcode uint8, cid uint16, blocks uint32) (e nvme.SQE) {
	e.SetOpcode(opcode)
	e.SetCID(cid)
	e.SetNSID(1)
	e.SetNLB(blocks)
	return e
}

// serves checks that the target serves a host.
func serves(t *testing.T, c *client.Controller) {
	t.Helper()
	ns, err := c.Namespace(t.Context(), 1)
	if err == nil {
		_, err = ns.ReadAt(t.Context(), make([]byte, 4096), 0)
	}
	if err != nil {
		t.Errorf("another host is not served any more: %v", err)
	}
}

// logged waits for a line of the log with all words and returns it.
func (r *rig) logged(t *testing.T, words ...string) string {
	t.Helper()
	timeout := time.After(20 * time.Second)
	var seen []string
	for {
		select {
		case line := <-r.log.lines:
			ok := true
			for _, w := range words {
				ok = ok && strings.Contains(line, w)
			}
			if ok {
				return line
			}
			seen = append(seen, line)
		case <-timeout:
			t.Fatalf("no line with %q in the log:\n%s", words, strings.Join(seen, "\n"))
		}
	}
}

// metric returns a counter or gauge with these labels' values.
func (r *rig) metric(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	families, err := r.tel.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			values := map[string]bool{}
			for _, l := range m.GetLabel() {
				values[l.GetValue()] = true
			}
			ok := true
			for _, l := range labels {
				ok = ok && values[l]
			}
			if ok {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}

func rejected(err error) string {
	if err == nil {
		return "accepted"
	}
	var r *verbs.RejectedError
	if !asRejected(err, &r) || len(r.PrivateData) < cm.RejectLen {
		return fmt.Sprintf("no reject: %v", err)
	}
	return (*cm.Reject)(r.PrivateData).STS().String()
}
