package hosttcp

import (
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"jbofd/client/internal/host/hosttest"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// peer is a target that works on bytes: it builds the PDUs of a controller and reads those of the machine.
type peer struct {
	q   *QPair
	rx  pdu.Format // of what it sends
	tx  pdu.Format // of what the machine sends
	out []byte     // sent by the machine, not yet parsed
	// chunk is the maximum number of bytes that the machine gets at once; 0: no limit.
	chunk int
}

func (p *peer) pdu(t pdu.Type, flags uint8, header, data []byte, badHeader, badData bool) []byte {
	h := make([]byte, pdu.CommonLen, 64)
	h = append(h, header...)
	plen, pdo := len(h), 0
	digests := t != pdu.TypeICResp && t != pdu.TypeC2HTermReq
	if digests && p.rx.HeaderDigest {
		flags |= pdu.FlagHDGST
		plen += pdu.DigestLen
	}
	if len(data) > 0 {
		pdo = plen
		plen += len(data)
		if digests && p.rx.DataDigest {
			flags |= pdu.FlagDDGST
			plen += pdu.DigestLen
		}
	}
	(*pdu.Common)(h).Set(t, flags, uint8(len(h)), uint8(pdo), uint32(plen))
	if digests && p.rx.HeaderDigest {
		d := pdu.Digest(h)
		if badHeader {
			d++
		}
		h = append(h, 0, 0, 0, 0)
		pdu.PutDigest(h[len(h)-4:], d)
	}
	h = append(h, data...)
	if len(data) > 0 && digests && p.rx.DataDigest {
		d := pdu.Digest(data)
		if badData {
			d++
		}
		h = append(h, 0, 0, 0, 0)
		pdu.PutDigest(h[len(h)-4:], d)
	}
	return h
}

func (p *peer) icResp(cpda, dgst uint8, maxH2C uint32) []byte {
	var ic pdu.IC
	ic.SetPDA(cpda)
	ic.SetDGST(dgst)
	ic.SetMAXH2CDATA(maxH2C)
	return p.pdu(pdu.TypeICResp, 0, ic[pdu.CommonLen:], nil, false, false)
}

func (p *peer) resp(cid uint16, st nvme.Status, result uint64) []byte {
	var e nvme.CQE
	e.SetCID(cid)
	e.SetStatus(st)
	e.SetResult64(result)
	return p.pdu(pdu.TypeCapsuleResp, 0, e[:], nil, false, false)
}

func dataHeader(cid, ttag uint16, off, n uint32) []byte {
	var d pdu.Data
	d.SetCCCID(cid)
	d.SetTTAG(ttag)
	d.SetOffset(off)
	d.SetLength(n)
	return d[pdu.CommonLen:]
}

// feed gives bytes to the machine as a socket would.
func (p *peer) feed(b []byte) error {
	for len(b) > 0 {
		direct, rx := p.q.RecvBufs()
		k := len(b)
		if p.chunk > 0 {
			k = min(k, p.chunk)
		}
		n := copy(direct, b[:k])
		n += copy(rx, b[n:k])
		if err := p.q.Received(n); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// drain takes up to limit bytes (0: all) from the machine and describes the whole PDUs among all
// that it has taken.
func (p *peer) drain(limit int) string {
	var s strings.Builder
	for taken := 0; limit == 0 || taken < limit; {
		bufs := p.q.SendBufs()
		if len(bufs) == 0 {
			break
		}
		k := 0
		for _, b := range bufs {
			if limit > 0 && taken+k+len(b) > limit {
				b = b[:limit-taken-k]
			}
			p.out = append(p.out, b...)
			k += len(b)
		}
		p.q.Sent(k)
		taken += k
	}
	for len(p.out) >= pdu.CommonLen {
		n := int((*pdu.Common)(p.out).PLEN())
		if len(p.out) < n {
			fmt.Fprintf(&s, "(%d of %d bytes of a PDU)\n", len(p.out), n)
			break
		}
		s.WriteString(p.describe(p.out[:n]))
		p.out = p.out[n:]
	}
	return s.String()
}

func (p *peer) describe(b []byte) string {
	c := (*pdu.Common)(b)
	f := p.tx
	if c.Type() == pdu.TypeICReq || c.Type() == pdu.TypeH2CTermReq {
		f = pdu.Format{}
	}
	if err := pdu.CheckHeader(b, true, f); err != nil {
		return fmt.Sprintf("BAD PDU: %v: %x\n", err, b)
	}
	hlen := int(c.HLEN())
	if f.HeaderDigest && pdu.GetDigest(b[hlen:]) != pdu.Digest(b[:hlen]) {
		return "BAD HEADER DIGEST\n"
	}
	data := ""
	if n := pdu.DataLength(b, f); n > 0 {
		d := b[c.PDO():][:n]
		data = fmt.Sprintf(" data=%d@%d [%x...]", n, c.PDO(), d[:min(4, n)])
		if f.DataDigest && pdu.GetDigest(b[int(c.PDO())+n:]) != pdu.Digest(d) {
			data += " BAD DATA DIGEST"
		}
	}
	switch c.Type() {
	case pdu.TypeICReq:
		ic := (*pdu.IC)(b)
		return fmt.Sprintf("ICReq pfv=%d hpda=%d hdgst=%t ddgst=%t maxr2t=%d\n", ic.PFV(), ic.PDA(), ic.HeaderDigest(),
			ic.DataDigest(), ic.MAXR2T())
	case pdu.TypeCapsuleCmd:
		e := (*pdu.CapsuleCmd)(b).SQE()
		return fmt.Sprintf("CapsuleCmd opcode=%#02x cid=%#x psdt=%d sgl=%x/%x addr=%d len=%d%s\n", e.Opcode(), e.CID(),
			e.PSDT(),
			e.SGL().Type(), e.SGL().Subtype(), e.SGL().Address(), e.SGL().Length(), data)
	case pdu.TypeH2CData:
		d := (*pdu.Data)(b)
		return fmt.Sprintf("H2CData cid=%#x ttag=%#x off=%d len=%d last=%t%s\n", d.CCCID(), d.TTAG(), d.Offset(),
			d.Length(),
			c.Flags()&pdu.FlagLast != 0, data)
	case pdu.TypeH2CTermReq:
		t := (*pdu.Term)(b)
		return fmt.Sprintf("H2CTermReq fes=%q fei=%#x quotes=%d\n", t.FES(), t.FEI(), len(b)-pdu.TermLen)
	}
	return c.Type().String() + "\n"
}

// TestTranscripts plays conversations. Run with -rewrite to update them; then read the diff.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/transcripts", func(t *testing.T, path string) {
		var p *peer
		var script hosttest.Script
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			a := hosttest.Args{T: t, TestData: d}
			feed := func(b []byte) string {
				p.chunk = int(a.Num("chunk", 0))
				if err := p.feed(b); err != nil {
					return "error: " + err.Error() + "\n" + p.drain(0)
				}
				return "ok\n"
			}
			switch d.Cmd {
			case "new":
				o := Options{Depth: int(a.Num("depth", 4)), MaxR2T: int(a.Num("maxr2t", 1)),
					InCapsuleBytes: int(a.Num("incapsule", 0)),
					HeaderDigest:   d.HasArg("hdgst"), DataDigest: d.HasArg("ddgst")}
				p = &peer{q: New(o)}
				script.Reset()
				s := p.drain(0)
				if d.HasArg("connected") {
					dgst := uint8(0)
					if o.HeaderDigest {
						dgst |= 1
					}
					if o.DataDigest {
						dgst |= 2
					}
					cpda := uint8(a.Num("cpda", 0))
					if err := p.feed(p.icResp(cpda, dgst, uint32(a.Num("maxh2c", 8192)))); err != nil {
						d.Fatalf(t, "%v", err)
					}
					p.rx = pdu.Format{HeaderDigest: o.HeaderDigest, DataDigest: o.DataDigest}
					p.tx = p.rx
					p.tx.AlignBytes = (int(cpda) + 1) * 4
				}
				return s
			case "icresp":
				return feed(p.icResp(uint8(a.Num("cpda", 0)), uint8(a.Num("dgst", 0)), uint32(a.Num("maxh2c", 8192))))
			case "submit":
				return script.Submit(p.q, a, make([]byte, a.Num("len", 0)))
			case "send":
				return p.drain(int(a.Num("bytes", 0)))
			case "c2hdata":
				off, n := uint32(a.Num("off", 0)), uint32(a.Num("len", 0))
				flags := uint8(0)
				if d.HasArg("last") {
					flags |= pdu.FlagLast
				}
				if d.HasArg("success") {
					flags |= pdu.FlagSuccess
				}
				data := hosttest.Pattern(a.Num("tag", 0), int(off+n))[off:]
				return feed(p.pdu(pdu.TypeC2HData, flags,
					dataHeader(a.CID(), 0, off, uint32(a.Num("datal", uint64(n)))), data,
					d.HasArg("badheader"), d.HasArg("baddata")))
			case "resp":
				return feed(p.resp(a.CID(), nvme.Status(a.Num("status", 0)), a.Num("result", 0)))
			case "r2t":
				return feed(p.pdu(pdu.TypeR2T, 0, dataHeader(a.CID(), uint16(a.Hex("ttag")), uint32(a.Num("off", 0)),
					uint32(a.Num("len", 0))), nil, d.HasArg("badheader"), false))
			case "term":
				b := pdu.AppendTerm(nil, pdu.TypeC2HTermReq,
					&pdu.FatalError{FES: pdu.FES(a.Num("fes", 1)), FEI: uint32(a.Num("fei",
						0))}, make([]byte, a.Num("quote", 0)))
				return feed(b)
			case "bytes":
				b, err := hex.DecodeString(strings.Join(strings.Fields(d.Input), ""))
				if err != nil {
					d.Fatalf(t, "%v", err)
				}
				return feed(b)
			case "done":
				return script.Done(p.q) + "\n"
			}
			if out, ok := script.Play(p.q, a); ok {
				return out
			}
			d.Fatalf(t, "unknown command %q", d.Cmd)
			return ""
		})
	})
}
