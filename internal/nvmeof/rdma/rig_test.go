package rdma_test

import (
	"fmt"
	"hash/crc32"
	"strings"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/nvmeof/rdma"
	"jbofd/internal/nvmeof/rdma/wr"
	"jbofd/internal/units"
)

const hostNQN = "nqn.2014-08.org.nvmexpress:uuid:aaaaaaaa-0000-0000-0000-000000000001"

// limits are small, so that transcripts can reach them.
var limits = nvmeof.Limits{MDTSBytes: 64 << 10, FusedBytes: 4096}

// table has namespaces 1 (512 bytes) and 2 (4096), and 4 of keys and values of up to 16 KiB.
func table() *nvmeof.NamespaceTable {
	ns := func(nsid uint32, shift uint8) *nvmeof.Namespace {
		return &nvmeof.Namespace{NSID: nsid, OffsetBytes: units.DriveOffset(nsid) << 20, SizeBytes: 1 << 20,
			BlockShift: shift, ANAGroup: 1, ANAState: nvme.ANAStateOptimized}
	}
	kv := ns(4, 0)
	kv.CSI, kv.MaxValueBytes = nvme.CSIKV, 16<<10
	return nvmeof.NewNamespaceTable([]*nvmeof.Namespace{ns(1, 9), ns(2, 12), kv}, hostNQN)
}

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

// driver is a Handler and a Sink that records its calls, and the device and the host at the other end.
type driver struct {
	c   *rdma.Conn
	out rdma.Out
	log strings.Builder

	data      *arena // buffers
	responses *arena // completion queue entries
	// refuse: Buffer finds no memory. paused: Paused returns true. lost: Locate finds nothing.
	refuse, paused, lost bool
	bufs                 map[int][]byte
	// auto answers commands at once, as a target with a very fast drive does.
	auto bool
	// given are the slots that the machine has given to the driver, unless auto.
	given []int
	// held are capsules that the machine has not taken, in order.
	held [][]byte
	// posted are work requests that the device has not completed, in order.
	posted []wr.Send
}

var config = rdma.Config{Limits: limits, InCapsuleBytes: 4096, Entries: 8, QP: 0x51, Sends: 40, Reads: 4, Inline: true}

const (
	responsesAddr = 0x5000_0000
	responsesKey  = 0x5
	dataAddr      = 0xD000_0000
	dataKey       = 0xD
)

func newDriver(cfg rdma.Config) *driver {
	d := &driver{bufs: map[int][]byte{}, data: newArena(1<<20, dataAddr, dataKey)}
	d.responses = newArena(rdma.ResponseBytes(cfg.Entries), responsesAddr, responsesKey)
	cfg.Responses, cfg.Addr, cfg.LKey = d.responses.b, d.responses.addr, d.responses.lkey
	d.c = rdma.New(cfg, d, d, &d.out)
	return d
}

func (d *driver) say(format string, args ...any) { fmt.Fprintf(&d.log, format+"\n", args...) }

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
func (d *driver) Sent(number int) { d.say("sent %d", number) }

// Buffer implements qpair.Handler.
func (d *driver) Buffer(slot, n int) []byte {
	if d.refuse {
		return nil
	}
	if d.bufs[slot] != nil {
		panic(fmt.Sprintf("slot %d has a buffer already", slot))
	}
	d.bufs[slot] = d.data.take(n)
	return d.bufs[slot]
}

// Execute implements qpair.Handler.
func (d *driver) Execute(slot int) {
	s := d.c.Slot(slot)
	p := &s.Plan
	data := ""
	if b := d.bufs[slot]; b != nil && s.Inline() {
		data = " data " + sum(b)
	}
	d.say("execute slot %d cid %#x: %v offset %d len %d fetch %t%s", slot, s.SQE.CID(), p.Op, p.Offset, p.Len,
		d.c.NeedsFetch(slot), data)
	if !d.auto {
		d.given = append(d.given, slot)
		return
	}
	if d.c.NeedsFetch(slot) {
		d.fetch(slot)
		return
	}
	d.finish(slot)
}

// fetch asks for a command's data.
func (d *driver) fetch(slot int) {
	n := int(d.c.Slot(slot).Plan.ToController)
	if d.c.Pair(slot) >= 0 {
		if d.bufs[slot] == nil {
			d.bufs[slot] = d.data.take(2 * n)
		}
		d.c.FetchPair(slot, d.bufs[slot])
		return
	}
	d.bufs[slot] = d.data.take(n)
	d.c.RequestData(slot, d.bufs[slot])
}

// finish answers a command with success.
func (d *driver) finish(slot int) {
	s := d.c.Slot(slot)
	delete(d.bufs, slot)
	if n := s.Plan.ToHost; n > 0 {
		b := d.data.take(int(n))
		copy(b, pattern(int(s.SQE.CID()), int(n)))
		d.c.RespondData(slot, b, 0)
		return
	}
	if first := d.c.Pair(slot); first >= 0 {
		d.c.Respond(first, nvme.Success, 0)
	}
	d.c.Respond(slot, nvme.Success, 0)
}

// Admin implements qpair.Handler.
func (d *driver) Admin(slot int) {
	s := d.c.Slot(slot)
	data := ""
	if len(s.Data) > 0 {
		data = " data " + sum(d.bufs[slot])
	}
	d.say("admin slot %d cid %#x: opcode %#x fctype %d%s", slot, s.SQE.CID(), s.SQE.Opcode(), s.SQE.FCTYPE(), data)
	if d.auto {
		delete(d.bufs, slot)
		d.c.Respond(slot, nvme.Success, 7)
	} else {
		d.given = append(d.given, slot)
	}
}

// Fetched implements qpair.Handler.
func (d *driver) Fetched(slot int, ok bool) {
	more := ""
	exec := slot
	complete := true
	if d.c.Pair(slot) >= 0 {
		exec, complete = d.c.PairFetched(slot)
		more = fmt.Sprintf(", pair of slot %d complete %t", exec, complete)
	}
	d.say("fetched slot %d ok %t%s data %s", slot, ok, more, sum(d.bufs[exec]))
	if s := d.c.Slot(slot); s.SQE.Opcode() == nvme.OpFabrics || d.c.QID() == 0 {
		switch {
		case ok:
			d.Admin(slot)
		case d.auto:
			delete(d.bufs, slot)
			d.c.Respond(slot, nvme.TransientTransportError, 0)
		default:
			d.given = append(d.given, slot)
		}
		return
	}
	if d.auto && complete {
		d.finish(exec)
	}
}

// Unused implements qpair.Handler.
func (d *driver) Unused(slot int) {
	if d.bufs[slot] != nil {
		d.say("unused buffer of slot %d", slot)
	}
	delete(d.bufs, slot)
}

// Failed implements qpair.Handler.
func (d *driver) Failed(slot int, status nvme.Status) { d.say("failed slot %d: %v", slot, status) }

// Paired implements qpair.Handler.
func (d *driver) Paired(first, second int) {
	d.say("paired slots %d and %d", first, second)
	if !d.auto {
		d.given = append(d.given, first)
	}
	if b := d.bufs[first]; b != nil {
		d.bufs[second] = b
		delete(d.bufs, first)
	}
}

// Paused implements qpair.Handler.
func (d *driver) Paused() bool { return d.paused }

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
			copy(d.data.at(w.Addr, w.Len, w.LKey), pattern(int(w.RKey), int(w.Len)))
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
		return fmt.Sprintf("<- WRITE%s id %#x to %#x key %#x data %s", flags, w.ID, w.RemoteAddr, w.RKey, sum(b))
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

// sum returns a short checksum of bytes, for transcripts.
func sum(b []byte) string {
	return fmt.Sprintf("%d:%08x", len(b), crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

// pattern returns test data for a seed.
func pattern(seed, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8 + seed)
	}
	return b
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
	var data nvme.ConnectData
	data.SetHostNQN(hostNQN)
	data.SetSubNQN("nqn.2026-11.example.jbofd:t")
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
	auto := d.auto
	d.auto = false
	d.receive(connectRequest(0, true).capsule())
	delete(d.bufs, 0)
	d.c.Attach(a)
	d.c.Respond(0, nvme.Success, 1)
	for d.post(); d.complete(wr.StatusOK); d.post() {
	}
	d.auto = auto
	d.given = nil
	d.log.Reset()
}

// ioQueue is an attachment as an I/O queue.
func ioQueue(entries int, noFlow bool) qpair.Attachment {
	return qpair.Attachment{QID: 1, Entries: entries, NoSQFlow: noFlow, Table: table()}
}

var (
	_ qpair.Handler = (*driver)(nil)
	_ rdma.Sink     = (*driver)(nil)
)
