package rdma_test

import (
	"fmt"
	"strings"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/nvmeof/qpair/qpairtest"
	"jbofd/internal/nvmeof/rdma"
	"jbofd/internal/nvmeof/rdma/wr"
	"jbofd/internal/units"
)

// arena is memory that a device can access by address. Pieces of it keep the capacity up to its end, from which their
// addresses are computed.
type arena struct {
	b    []byte
	addr uint64
	lkey uint32
	used int
	// reuse: allocation starts over when the arena is used up.
	reuse bool
}

func newArena(n int, addr uint64, lkey uint32) *arena {
	return &arena{b: make([]byte, n), addr: addr, lkey: lkey}
}

// take returns the next n bytes.
func (a *arena) take(n int) []byte {
	if a.used+n > len(a.b) {
		if !a.reuse {
			panic("the arena is too small for this test")
		}
		a.used = 0
	}
	a.used += n
	return a.b[a.used-n:][:n]
}

// locate returns the address of a piece; not ok if it is none.
func (a *arena) locate(b []byte) (addr uint64, ok bool) {
	off := cap(a.b) - cap(b)
	if len(b) == 0 || off < 0 || off+len(b) > len(a.b) || &a.b[off] != &b[0] {
		return 0, false
	}
	return a.addr + uint64(off), true
}

// at returns the memory that a work request names, or nil if that is not in the arena.
func (a *arena) at(addr uint64, n uint32, lkey uint32) []byte {
	if lkey != a.lkey || addr < a.addr || addr-a.addr > uint64(len(a.b)) || uint64(n) > uint64(len(a.b))-(addr-a.addr) {
		return nil
	}
	return a.b[addr-a.addr:][:n]
}

// driver is the Handler and a Sink that records its calls, and the device and the host at the other end.
type driver struct {
	*qpairtest.Recorder
	c   *rdma.Conn
	out rdma.Out

	data      *arena // buffers
	responses *arena // completion queue entries
	// lost: Locate finds nothing.
	lost bool
	// held are capsules that the machine has not taken, in order.
	held [][]byte
	// posted are work requests that the device has not completed, in order.
	posted []wr.Send
}

var config = rdma.Config{Limits: qpairtest.Limits, InCapsuleBytes: 4096, Entries: 8, QP: 0x51, Sends: 40, Reads: 4,
	Inline: true}

const (
	responsesAddr = 0x5000_0000
	responsesKey  = 0x5
	dataAddr      = 0xD000_0000
	dataKey       = 0xD
)

func newDriver(cfg rdma.Config) *driver {
	d := &driver{data: newArena(1<<20, dataAddr, dataKey)}
	d.Recorder = qpairtest.NewRecorder(func(n int) []byte { return d.data.take(n) })
	d.responses = newArena(rdma.ResponseBytes(cfg.Entries), responsesAddr, responsesKey)
	cfg.Responses, cfg.Addr, cfg.LKey = d.responses.b, d.responses.addr, d.responses.lkey
	d.start(cfg, d, d)
	return d
}

// start makes the machine, whose handler and sink are the driver, or one with the driver in it.
func (d *driver) start(cfg rdma.Config, h qpair.Handler, s rdma.Sink) {
	d.c = rdma.New(cfg, h, s, &d.out)
	d.Machine = d.c
}

// Locate implements rdma.Sink.
func (d *driver) Locate(b []byte) (addr uint64, lkey uint32, ok bool) {
	if d.lost {
		return 0, 0, false
	}
	addr, ok = d.data.locate(b)
	if !ok {
		panic("the machine looks for memory that it was not given")
	}
	return addr, d.data.lkey, true
}

// Sent implements rdma.Sink.
func (d *driver) Sent(number int) { d.Say("sent %d", number) }

// receive passes a capsule to the machine, or queues it behind others that the machine has not taken.
func (d *driver) receive(b []byte) {
	d.held = append(d.held, b)
	d.offer()
}

// offer passes the waiting capsules to the machine.
func (d *driver) offer() {
	for len(d.held) > 0 && d.c.Received(d.held[0]) {
		d.held = d.held[1:]
	}
}

// post passes the machine's work requests to the device.
func (d *driver) post() {
	d.posted = append(d.posted, d.out.Sends...)
	d.out.Reset()
}

// complete executes work requests up to the next signaled one. With an error it fails the next one, signaled or not.
func (d *driver) complete(status wr.Status) bool {
	for len(d.posted) > 0 {
		w := d.posted[0]
		d.posted = d.posted[1:]
		if status == wr.StatusOK && w.Op == wr.OpRead {
			// The key determines what the host has at an address.
			copy(d.data.at(w.Addr, w.Len, w.LKey), qpairtest.Pattern(int(w.RKey), int(w.Len)))
		}
		if status != wr.StatusOK || w.Flags&wr.FlagSignaled != 0 {
			d.c.Completed(&wr.Completion{ID: w.ID, Status: status, Op: w.Op})
			return true
		}
	}
	return false
}

// put describes the work requests since the last call, and posts them.
func (d *driver) put() string {
	var s strings.Builder
	for i := range d.out.Sends {
		s.WriteString(d.describe(&d.out.Sends[i]) + "\n")
	}
	d.post()
	return s.String()
}

// describe describes a work request.
func (d *driver) describe(w *wr.Send) string {
	var flags string
	for i, name := range []string{"signaled", "fence", "inline"} {
		if w.Flags>>i&1 != 0 {
			flags += " " + name
		}
	}
	if w.QP != config.QP {
		return fmt.Sprintf("BROKEN: queue pair %#x", w.QP)
	}
	switch w.Op {
	case wr.OpWrite, wr.OpRead:
		b := d.data.at(w.Addr, w.Len, w.LKey)
		if b == nil {
			return fmt.Sprintf("BROKEN: %d bytes at %#x, key %#x", w.Len, w.Addr, w.LKey)
		}
		if w.Op == wr.OpRead {
			return fmt.Sprintf("<- READ%s id %#x %d bytes from %#x key %#x", flags, w.ID, w.Len, w.RemoteAddr, w.RKey)
		}
		return fmt.Sprintf("<- WRITE%s id %#x to %#x key %#x data %s", flags, w.ID, w.RemoteAddr, w.RKey,
			qpairtest.Sum(b))
	}
	name := "SEND"
	if w.Op == wr.OpSendInvalidate {
		name = fmt.Sprintf("SEND+invalidate %#x", w.RKey)
	}
	b := d.responses.at(w.Addr, w.Len, w.LKey)
	if len(b) != nvme.CQESize {
		return fmt.Sprintf("BROKEN: a response of %d bytes at %#x, key %#x", w.Len, w.Addr, w.LKey)
	}
	e := (*nvme.CQE)(b)
	return fmt.Sprintf("<- %s%s id %#x cid %#x sqhd %d result %#x %v", name, flags, w.ID, e.CID(), e.SQHD(),
		e.Result64(), e.Status())
}

// request describes a command of the host.
type request struct {
	op     uint8
	cid    uint16
	nsid   uint32
	slba   uint64
	nlb    uint32
	fuse   nvme.Fuse
	inline bool
	// invalidate: the host wants key invalidated. Of data that is not in the capsule, address is
	// where it is and key its key.
	invalidate bool
	address    uint64
	key        uint32
	// transfer is the length in the SGL; data is the data in the capsule.
	transfer uint32
	data     []byte
	change   func(*nvme.SQE)
}

// capsule returns the capsule of the command.
func (r request) capsule() []byte {
	var e nvme.SQE
	e.SetOpcode(r.op)
	e.SetCID(r.cid)
	e.SetNSID(r.nsid)
	e.SetSLBA(units.LBA(r.slba))
	e.SetNLB(units.Blocks(max(r.nlb, 1)))
	e.SetFuse(r.fuse)
	e.SetPSDT(nvme.PSDTSGL)
	r.setSGL(&e)
	if r.change != nil {
		r.change(&e)
	}
	return append(e[:], r.data...)
}

func (r *request) setSGL(e *nvme.SQE) {
	switch {
	case r.inline:
		e.SGL().SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
		e.SGL().SetAddress(r.address)
		e.SGL().SetLength(r.transfer)
	case r.invalidate:
		e.SGL().SetKeyed(nvme.SGLSubtypeInvalidateRK, r.address, r.transfer, r.key)
	default:
		e.SGL().SetKeyed(nvme.SGLSubtypeAddress, r.address, r.transfer, r.key)
	}
}

// connectRequest is a Connect, with its data in the capsule or at the host.
func connectRequest(cid uint16, inline bool) request {
	data := qpairtest.ConnectData()
	r := request{cid: cid, inline: inline, transfer: nvme.ConnectDataSize, key: uint32(cid)}
	if inline {
		r.data = data[:]
	} else {
		r.address = 0xC000
	}
	r.change = func(e *nvme.SQE) {
		sgl := *e.SGL()
		e.Connect().Init()
		e.SetCID(cid)
		*e.SGL() = sgl
	}
	return r
}

// attach connects the queue of a new machine.
func (d *driver) attach(a qpair.Attachment) {
	auto := d.Auto
	d.Auto = false
	d.receive(connectRequest(0, true).capsule())
	delete(d.Bufs, 0)
	d.c.Attach(a)
	d.c.Respond(0, nvme.Success, 1)
	for d.post(); d.complete(wr.StatusOK); d.post() {
	}
	d.Auto = auto
	d.Given = nil
	d.Log.Reset()
}

var _ rdma.Sink = (*driver)(nil)
