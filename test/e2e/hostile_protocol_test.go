package e2e

import (
	"bytes"
	"strings"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// reasons are the metric's words for fatal error statuses.
var reasons = map[pdu.FES]string{
	pdu.InvalidHeaderField: "header_field", pdu.SequenceError: "sequence", pdu.HeaderDigestError: "header_digest",
	pdu.DataTransferOutOfRange: "data_out_of_range", pdu.R2TLimitExceeded: "transfer_limit",
	pdu.UnsupportedParameter: "unsupported_parameter",
}

// TestAProtocolViolationIsAnsweredByTheRightTermReq: fatal error status and offset as the
// specification names them, then the connection is closed, counted and logged.
//
// Source: NVMe/TCP Transport 1.0, sections 3.5 and 3.6.2.
func TestAProtocolViolationIsAnsweredByTheRightTermReq(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.log = "level: info, peer_lines_per_sec: 10000"
	d := start(t, s)
	const digestFEI = 0xffffffff // whatever digest was sent
	patch := func(p []byte, at int, v ...byte) []byte {
		p = bytes.Clone(p)
		copy(p[at:], v)
		return p
	}
	var none pdu.Format
	keepAlive := func() (e nvme.SQE) { e.SetOpcode(nvme.AdminKeepAlive); return e }()
	small := make([]byte, 512)
	for _, c := range []struct {
		name string
		// ic: after ICReq and ICResp. io: on a connected I/O queue. Otherwise as the first PDU.
		ic, io, digests bool
		frame           func(h *rawHost) []byte
		fes             pdu.FES
		fei             uint32
	}{
		{name: "command before ICReq", frame: func(*rawHost) []byte {
			return connectCapsule(none,
				login{host: hostA, sub: nqnA})
		}, fes: pdu.SequenceError},
		{name: "second ICReq", ic: true, frame: func(*rawHost) []byte { return icreq()[:] }, fes: pdu.SequenceError},
		{name: "PFV", frame: func(*rawHost) []byte { return patch(icreq()[:], 8, 1) }, fes: pdu.UnsupportedParameter,
			fei: 8},
		{name: "HPDA", frame: func(*rawHost) []byte { return patch(icreq()[:], 10, 32) }, fes: pdu.InvalidHeaderField,
			fei: 10},
		{name: "HLEN of the ICReq", frame: func(*rawHost) []byte { return patch(icreq()[:], 2, 64) },
			fes: pdu.InvalidHeaderField, fei: 2},
		{name: "PLEN of the ICReq", frame: func(*rawHost) []byte { return patch(icreq()[:], 4, 0, 1) },
			fes: pdu.InvalidHeaderField, fei: 4},
		{name: "unknown type", io: true,
			frame: func(h *rawHost) []byte { return h.frame(0x0f, 0, make([]byte, 16), nil) },
			fes:   pdu.InvalidHeaderField},
		{name: "a controller's type", io: true,
			frame: func(h *rawHost) []byte { return h.frame(pdu.TypeCapsuleResp, 0, make([]byte, 16), nil) },
			fes:   pdu.InvalidHeaderField},
		{name: "HLEN", io: true, frame: func(h *rawHost) []byte { return patch(h.capsule(keepAlive, nil, 0), 2, 73) },
			fes: pdu.InvalidHeaderField, fei: 2},
		{name: "PDO", io: true, frame: func(h *rawHost) []byte {
			return patch(h.capsule(rw(nvme.CmdWrite, 9, 0, 1),
				small, 0), 3, 70)
		}, fes: pdu.InvalidHeaderField, fei: 3},
		{name: "PLEN less than the header", io: true,
			frame: func(h *rawHost) []byte { return patch(h.capsule(keepAlive, nil, 0), 4, 8) },
			fes:   pdu.InvalidHeaderField, fei: 4},
		{name: "a PDU of 4 GiB", io: true, frame: func(h *rawHost) []byte {
			return patch(h.capsule(rw(nvme.CmdWrite, 9, 0, 1), small, 0), 4, 0xff, 0xff, 0xff, 0xff)
		}, fes: pdu.InvalidHeaderField, fei: 4},
		{name: "H2CData that nobody asked for", io: true, frame: func(h *rawHost) []byte {
			return h.frame(pdu.TypeH2CData, pdu.FlagLast, h2cData(1, 77, 0, 512), small)
		}, fes: pdu.InvalidHeaderField, fei: 10},
		{name: "H2CData for another command", io: true, frame: func(h *rawHost) []byte {
			h.send(h.capsule(rw(nvme.CmdWrite, 5, 0, 32), nil, 32*512))
			return h.frame(pdu.TypeH2CData, pdu.FlagLast, h2cData(6, h.r2t(), 0, 512), small)
		}, fes: pdu.InvalidHeaderField, fei: 8},
		{name: "H2CData out of its range", io: true, frame: func(h *rawHost) []byte {
			h.send(h.capsule(rw(nvme.CmdWrite, 5, 0, 32), nil, 32*512))
			return h.frame(pdu.TypeH2CData, pdu.FlagLast, h2cData(5, h.r2t(), 32*512, 512), small)
		}, fes: pdu.DataTransferOutOfRange},
		{name: "H2CData out of order", io: true, frame: func(h *rawHost) []byte {
			h.send(h.capsule(rw(nvme.CmdWrite, 5, 0, 32), nil, 32*512))
			return h.frame(pdu.TypeH2CData, 0, h2cData(5, h.r2t(), 512, 512), small)
		}, fes: pdu.DataTransferOutOfRange},
		{name: "more H2CData than MAXH2CDATA", io: true, frame: func(h *rawHost) []byte {
			h.send(h.capsule(rw(nvme.CmdWrite, 5, 0, 32), nil, 32*512))
			n := h.maxH2C + 4
			return h.frame(pdu.TypeH2CData, pdu.FlagLast, h2cData(5, h.r2t(), 0, n), make([]byte, n))
		}, fes: pdu.R2TLimitExceeded},
		{name: "more data in the capsule than announced", io: true, frame: func(h *rawHost) []byte {
			return h.capsule(rw(nvme.CmdWrite, 5, 0, 64), make([]byte, 32<<10), 0)
		}, fes: pdu.InvalidHeaderField, fei: 4},
		{name: "header digest", ic: true, digests: true, frame: func(h *rawHost) []byte {
			p := connectCapsule(h.format, login{host: hostA, sub: nqnA})
			p[pdu.CapsuleCmdLen]++
			return p
		}, fes: pdu.HeaderDigestError, fei: digestFEI},
		{name: "no header digest though agreed on", ic: true, digests: true, frame: func(*rawHost) []byte {
			return connectCapsule(none, login{host: hostA, sub: nqnA})
		}, fes: pdu.InvalidHeaderField, fei: 1},
	} {
		t.Run(strings.ReplaceAll(c.name, " ", "-"), func(t *testing.T) {
			d := *d
			d.t = t
			before := d.metric("jbof_protocol_errors_total", "reason", reasons[c.fes])
			lines := len(d.log.find("protocol error", "fes"))
			var h *rawHost
			switch {
			case c.io:
				_, h = d.rawQueue(hostB, nqnA, 0, 32)
			default:
				h = d.raw()
				if c.ic {
					h.initialize(c.digests)
				}
			}
			h.send(c.frame(h))
			term := h.ended()
			h.close()
			switch {
			case term == nil:
				t.Fatal("closed without a TermReq")
			case term.FES() != c.fes:
				t.Errorf("FES %v, want %v", term.FES(), c.fes)
			case c.fei == digestFEI:
			case term.FEI() != c.fei:
				t.Errorf("FEI %#x, want %#x", term.FEI(), c.fei)
			}
			eventually(t, "the violation is counted and logged", func() bool {
				return d.metric("jbof_protocol_errors_total", "reason", reasons[c.fes]) == before+1 &&
					len(d.log.find("protocol error", "fes")) == lines+1
			})
		})
	}
}

// TestAHostsTermReqIsNotAnswered: it ends the connection and is counted.
func TestAHostsTermReqIsNotAnswered(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	h := d.raw()
	h.initialize(false)
	h.send(pdu.AppendTerm(nil, pdu.TypeH2CTermReq, &pdu.FatalError{FES: pdu.DataTransferOutOfRange}, nil))
	term := h.ended()
	h.close()
	if term != nil {
		t.Errorf("answered with a TermReq, %v", term.FES())
	}
	eventually(t, "it is counted", func() bool {
		return d.metric("jbof_protocol_errors_total", "reason",
			"reported_by_host") == 1
	})
}

// TestACommandBeforeTheConnectResponseEndsTheConnection: commands are allowed only after Connect has succeeded.
func TestACommandBeforeTheConnectResponseEndsTheConnection(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	h := d.raw()
	h.initialize(false)
	h.send(connectCapsule(h.format, login{host: hostA, sub: nqnA}),
		h.capsule(propertySet(nvme.PropCC, enable, 1), nil, 0))
	term := h.ended()
	h.close()
	if term == nil || term.FES() != pdu.SequenceError {
		t.Errorf("ended with %x, want a PDU sequence error", term)
	}
	d.namespace(d.options(hostA, nqnA), 1)
}

// TestCommandsBeforeConnectFail with a status, and the connection stays open.
func TestCommandsBeforeConnectFail(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	h := d.raw()
	h.initialize(false)
	if c := h.do(rw(nvme.CmdFlush, 3, 0, 1)); c.Status().Code() != nvme.CommandSequenceError || !c.Status().DNR() ||
		c.CID() != 3 {
		t.Errorf("Flush before Connect: %v for command %d", c.Status(), c.CID())
	}
	if c := h.connect(login{host: hostA, sub: nqnA, cid: 4}); !c.Status().OK() {
		t.Errorf("Connect thereafter: %v", c.Status())
	}
}
