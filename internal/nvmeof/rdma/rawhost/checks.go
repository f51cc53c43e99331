package rawhost

import (
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/cm"
)

// Join connects h as I/O queue qid of the controller of a.
func (h *Host) Join(a Association, qid uint16) {
	h.T.Helper()
	p := Request(qid)
	if err := h.Connect(p[:], 16); err != nil {
		h.T.Fatal(err)
	}
	e := h.ConnectCommand(a, qid, Entries-1)
	if cqe := h.Do(e[:]); !cqe.Status().OK() {
		h.T.Fatal(cqe.Status())
	}
}

// CheckPrivateData checks that a target that permits at most 64 I/O queues of 129 entries rejects each malformed
// request for queue 2 with the right status. It returns the number of requests made. If exact, the fabric does not pad
// private data, so requests that are too short are checked as well.
func CheckPrivateData(dial func() *Host, exact bool) (requests int) {
	good := Request(2)
	changed := func(change func(*cm.Request)) []byte {
		p := good
		change(&p)
		return p[:]
	}
	for _, tc := range []struct {
		name    string
		private []byte
		reads   uint8
		exact   bool
		want    cm.Status
	}{
		{"none", nil, 16, true, cm.InvalidLength},
		{"short", good[:cm.RequestLen-1], 16, true, cm.InvalidLength},
		{"format", changed(func(p *cm.Request) { p.SetRECFMT(7) }), 16, false, cm.InvalidRECFMT},
		{"queue", changed(func(p *cm.Request) { p.SetQID(65) }), 16, false, cm.InvalidQID},
		{"entries", changed(func(p *cm.Request) { p.SetHSQSIZE(129) }), 16, false, cm.InvalidHSQSIZE},
		{"admin entries", changed(func(p *cm.Request) { p.SetQID(0); p.SetHSQSIZE(32) }), 16, false, cm.InvalidHSQSIZE},
		{"receives", changed(func(p *cm.Request) { p.SetHRQSIZE(0) }), 16, false, cm.InvalidHRQSIZE},
		{"no READs", good[:], 0, false, cm.InvalidIRD},
		{"controller", changed(func(p *cm.Request) { p.SetCNTLID(0xFFFF) }), 16, false, cm.InvalidCNTLID},
	} {
		if tc.exact && !exact {
			continue
		}
		h := dial()
		if got := Rejected(h.Connect(tc.private, tc.reads)); got != tc.want.String() {
			h.T.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
		requests++
	}
	return requests
}

// CheckSGLs checks that commands with invalid SGLs fail with the right statuses and that the connection survives. h
// must have joined a controller whose namespace has blocks of 4 KiB.
func (h *Host) CheckSGLs() {
	h.T.Helper()
	for _, tc := range []struct {
		name   string
		opcode uint8
		set    func(e *nvme.SQE)
		extra  int
		want   nvme.Status
	}{
		{"read, too short", nvme.CmdRead, func(e *nvme.SQE) { h.Keyed(e, nvme.SGLSubtypeAddress, 4095) }, 0,
			nvme.DataSGLLengthInvalid},
		{"read, too long", nvme.CmdRead, func(e *nvme.SQE) { h.Keyed(e, nvme.SGLSubtypeAddress, 8192) }, 0,
			nvme.DataSGLLengthInvalid},
		{"write, too short", nvme.CmdWrite, func(e *nvme.SQE) { h.Keyed(e, nvme.SGLSubtypeAddress, 512) }, 0,
			nvme.DataSGLLengthInvalid},
		{"unknown subtype", nvme.CmdRead, func(e *nvme.SQE) { h.Keyed(e, 3, 4096) }, 0, nvme.SGLTypeInvalid},
		{"TCP's type", nvme.CmdRead, func(e *nvme.SQE) {
			e.SetPSDT(nvme.PSDTSGL)
			e.SGL().SetType(nvme.SGLTypeTransportData, nvme.SGLSubtypeTransport)
			e.SGL().SetLength(4096)
		}, 0, nvme.SGLTypeInvalid},
		{"read into the capsule", nvme.CmdRead, func(e *nvme.SQE) {
			e.SetPSDT(nvme.PSDTSGL)
			e.SGL().SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
			e.SGL().SetLength(4096)
		}, 0, nvme.SGLTypeInvalid},
		{"write, capsule without its data", nvme.CmdWrite, func(e *nvme.SQE) {
			e.SetPSDT(nvme.PSDTSGL)
			e.SGL().SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
			e.SGL().SetLength(4096)
		}, 4000, nvme.DataSGLLengthInvalid},
		{"write, offset into the capsule", nvme.CmdWrite, func(e *nvme.SQE) {
			e.SetPSDT(nvme.PSDTSGL)
			e.SGL().SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
			e.SGL().SetAddress(16)
			e.SGL().SetLength(4096)
		}, 4112, nvme.SGLOffsetInvalid},
		{"PRP", nvme.CmdRead, func(e *nvme.SQE) {}, 0, nvme.InvalidField},
	} {
		e := RW(tc.opcode, 7, 1)
		tc.set(&e)
		if cqe := h.Do(append(e[:], make([]byte, tc.extra)...)); cqe.Status().Code() != tc.want || cqe.CID() != 7 {
			h.T.Errorf("%s: %v, want %v", tc.name, cqe.Status(), tc.want)
		}
	}
	e := RW(nvme.CmdRead, 8, 1)
	h.Keyed(&e, nvme.SGLSubtypeAddress, 4096)
	if cqe := h.Do(e[:]); !cqe.Status().OK() {
		h.T.Errorf("after all that, a good read: %v", cqe.Status())
	}
}

// WrongKeys are SGLs that the host's RDMA device refuses.
var WrongKeys = []struct {
	Name   string
	Opcode uint8
	Spoil  func(g *nvme.SGL)
}{
	{"read, wrong key", nvme.CmdRead, func(g *nvme.SGL) { g.SetKeyed(0, g.Address(), g.KeyedLength(), g.Key()+1) }},
	{"write, wrong key", nvme.CmdWrite, func(g *nvme.SGL) { g.SetKeyed(0, g.Address(), g.KeyedLength(), g.Key()+1) }},
	{"read, beyond the region", nvme.CmdRead,
		func(g *nvme.SGL) { g.SetKeyed(0, g.Address()+Bytes-4096, g.KeyedLength(), g.Key()) }},
	{"write, below the region", nvme.CmdWrite,
		func(g *nvme.SGL) { g.SetKeyed(0, g.Address()-4096, g.KeyedLength(), g.Key()) }},
}

// SendSpoiled sends a command of 16 KiB with identifier cid, after spoil has modified its SGL.
func (h *Host) SendSpoiled(opcode uint8, cid uint16, spoil func(g *nvme.SGL)) {
	h.T.Helper()
	e := RW(opcode, cid, 4)
	h.Keyed(&e, nvme.SGLSubtypeAddress, 4*4096)
	spoil(e.SGL())
	h.Receive(1)
	if err := h.Send(e[:]); err != nil {
		h.T.Fatal(err)
	}
}

// Fill sets n bytes of the host's data to b.
func (h *Host) Fill(b byte, n int) {
	for i := range h.mem[dataAt:][:n] {
		h.mem[dataAt+i] = b
	}
}
