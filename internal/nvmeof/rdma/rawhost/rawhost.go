// Package rawhost is an RDMA queue pair for tests that act as an NVMe host. A test decides what the queue pair sends,
// valid or not. The association to which the queue belongs is created by another host.
package rawhost

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/cm"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/units"
)

// Host is one connection. It fails its test on unexpected errors.
type Host struct {
	T testing.TB
	// Domain is the host's protection domain. MR is the registration of the host's memory.
	Domain verbs.Domain
	MR     verbs.MR

	ep     verbs.Endpoint
	cq     verbs.CQ
	qp     verbs.QP
	mem    []byte
	posted int
	sent   uint64
	wcs    []verbs.WC
}

// Sizes of the queue and of the host's memory, and offsets of its parts. The data area has 64 KiB; a capsule has at
// most 16 KiB.
const (
	Entries = 8
	Bytes   = 512 << 10

	dataAt = 0
	sendAt = 64 << 10
	recvAt = 256 << 10
	recvs  = 64
	// recvID is the first work request ID of receives. Sends have lower ones.
	recvID = 1000
	// eventTimeout is the time limit of a wait. It is long because tests with real RDMA drivers run in an emulated
	// machine.
	eventTimeout = 20 * time.Second
)

// Association identifies the association to which a raw host's queue belongs.
type Association struct {
	HostNQN, SubNQN string
	HostID          [16]byte
	CNTLID          uint16
}

// New creates a queue pair on the route to the target and stops before Connect. The host is closed at the end of the
// test.
func New(t testing.TB, p verbs.Provider, target netip.AddrPort) *Host {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), eventTimeout)
	defer cancel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ep, err := p.Resolve(ctx, target)
	must(err)
	h := &Host{T: t, ep: ep}
	t.Cleanup(h.Close)
	h.mem, err = unix.Mmap(-1, 0, Bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	must(err)
	h.Domain, err = ep.Device().OpenDomain()
	must(err)
	h.cq, err = h.Domain.CreateCQ(4 * recvs)
	must(err)
	h.MR, err = h.Domain.Register(h.mem, verbs.LocalWrite|verbs.RemoteRead|verbs.RemoteWrite)
	must(err)
	h.qp, err = ep.CreateQP(verbs.QPConfig{Domain: h.Domain, SendCQ: h.cq, RecvCQ: h.cq, Sends: recvs, Recvs: recvs})
	must(err)
	ep.OnEvent(func(verbs.Event) {})
	return h
}

// Close ends the connection. Idempotent.
func (h *Host) Close() {
	_ = h.ep.Close() // the test may have left the connection in any state
	if h.cq != nil {
		_ = h.cq.Close()
	}
	if h.MR != nil {
		_ = h.MR.Close()
	}
	if h.Domain != nil {
		_ = h.Domain.Close()
	}
	if h.mem != nil {
		_ = unix.Munmap(h.mem)
	}
	h.cq, h.MR, h.Domain, h.mem = nil, nil, nil, nil
}

// Request returns the private data of a well-behaved host.
func Request(qid uint16) (r cm.Request) {
	r.SetQID(qid)
	r.SetHRQSIZE(Entries)
	r.SetHSQSIZE(Entries - 1)
	return r
}

// Connect sends the connection request.
func (h *Host) Connect(private []byte, reads uint8) error {
	ctx, cancel := context.WithTimeout(context.Background(), eventTimeout)
	defer cancel()
	return h.ep.Connect(ctx, verbs.Params{PrivateData: private, ResponderResources: reads, RetryCount: 7,
		RNRRetryCount: 7})
}

// Receive posts receives for responses.
func (h *Host) Receive(n int) {
	h.T.Helper()
	for range n {
		i := h.posted % recvs
		h.posted++
		if _, err := h.qp.PostRecv([]verbs.RecvWR{{ID: uint64(recvID + i), Addr: h.MR.Addr() + recvAt + uint64(i*64),
			Len: 64, LKey: h.MR.LKey()}}); err != nil {
			h.T.Fatal(err)
		}
	}
}

// Send sends a capsule.
func (h *Host) Send(capsule []byte) error {
	at := sendAt
	// an unchanged capsule is not copied again: an earlier send may still be reading it
	if !bytes.Equal(h.mem[at:at+len(capsule)], capsule) {
		copy(h.mem[at:], capsule)
	}
	h.sent++
	_, err := h.Domain.PostSend([]verbs.SendWR{{ID: h.sent % recvID, QP: h.qp.Handle(), Op: verbs.OpSend,
		Flags: verbs.FlagSignaled, Addr: h.MR.Addr() + uint64(at), Len: uint32(len(capsule)), LKey: h.MR.LKey()}})
	return err
}

// Deliver sends a capsule and waits until the target's device has taken it. It reports false if the connection has
// ended. Completions of anything else are dropped.
func (h *Host) Deliver(capsule []byte) bool {
	h.T.Helper()
	if h.Send(capsule) != nil {
		return false
	}
	for {
		if w := h.completion(); w.Status != verbs.StatusOK || w.ID == h.sent%recvID {
			return w.Status == verbs.StatusOK
		}
	}
}

// Next returns the next completion of a receive, or the next failed completion.
func (h *Host) Next() verbs.WC {
	h.T.Helper()
	for {
		if w := h.completion(); w.Status != verbs.StatusOK || w.ID >= recvID {
			return w
		}
	}
}

// completion returns the next completion.
func (h *Host) completion() verbs.WC {
	h.T.Helper()
	for {
		if len(h.wcs) > 0 {
			w := h.wcs[0]
			h.wcs = h.wcs[1:]
			return w
		}
		var buf [16]verbs.WC
		n, err := h.cq.Poll(buf[:])
		if err != nil {
			h.T.Fatal(err)
		}
		h.wcs = append(h.wcs, buf[:n]...)
		if n > 0 {
			continue
		}
		if err := h.cq.Arm(); err != nil {
			h.T.Fatal(err)
		}
		if n, _ = h.cq.Poll(buf[:]); n > 0 {
			h.wcs = append(h.wcs, buf[:n]...)
			continue
		}
		if err := h.cq.SetDeadline(time.Now().Add(eventTimeout)); err != nil {
			h.T.Fatal(err)
		}
		if err := h.cq.Wait(); err != nil {
			h.T.Fatal(err)
		}
	}
}

// Response returns the completion queue entry in the data of a receive's completion.
func (h *Host) Response(w verbs.WC) (e nvme.CQE) {
	h.T.Helper()
	if w.Status != verbs.StatusOK || w.Len != nvme.CQESize {
		h.T.Fatalf("no response: %v, %d bytes", w.Status, w.Len)
	}
	copy(e[:], h.mem[recvAt+int(w.ID-recvID)*64:])
	return e
}

// Do sends a capsule and returns its response.
func (h *Host) Do(capsule []byte) nvme.CQE {
	h.T.Helper()
	h.Receive(1)
	if err := h.Send(capsule); err != nil {
		h.T.Fatal(err)
	}
	return h.Response(h.Next())
}

// Keyed makes the SGL of e describe n bytes of the host's data.
func (h *Host) Keyed(e *nvme.SQE, subtype uint8, n uint32) {
	e.SetPSDT(nvme.PSDTSGL)
	e.SGL().SetKeyed(subtype, h.MR.Addr()+dataAt, n, h.MR.RKey())
}

// ConnectCommand returns a Connect for I/O queue qid of the controller of a. Its data is in the host's memory.
func (h *Host) ConnectCommand(a Association, qid, sqsize uint16) (e nvme.SQE) {
	d := (*nvme.ConnectData)(h.mem[dataAt:])
	*d = nvme.ConnectData{}
	d.SetHostID(a.HostID)
	d.SetHostNQN(a.HostNQN)
	d.SetSubNQN(a.SubNQN)
	d.SetCNTLID(a.CNTLID)
	q := e.Connect()
	q.Init()
	q.SetQID(qid)
	q.SetSQSIZE(sqsize)
	h.Keyed(&e, nvme.SGLSubtypeAddress, nvme.ConnectDataSize)
	return e
}

// RW returns a read or write of blocks, starting at LBA 0 of namespace 1.
func RW(opcode uint8, cid uint16, blocks uint32) (e nvme.SQE) {
	e.SetOpcode(opcode)
	e.SetCID(cid)
	e.SetNSID(1)
	e.SetNLB(units.Blocks(blocks))
	return e
}

// Rejected returns the name of the status of a reject, or describes the error that came instead.
func Rejected(err error) string {
	if err == nil {
		return "accepted"
	}
	var r *verbs.RejectedError
	if !errors.As(err, &r) || len(r.PrivateData) < cm.RejectLen {
		return fmt.Sprintf("no reject: %v", err)
	}
	return (*cm.Reject)(r.PrivateData).STS().String()
}
