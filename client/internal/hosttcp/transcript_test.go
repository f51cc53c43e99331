package hosttcp

import (
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"jbofd/client/internal/host"
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

// pattern returns the data of command tag.
func pattern(tag uint64, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(uint64(i)*7 + uint64(i)>>8 + tag)
	}
	return b
}

// TestTranscripts plays conversations. Run with -rewrite to update them; then read the diff.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/transcripts", func(t *testing.T, path string) {
		var p *peer
		bufs := map[uint64][]byte{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			num := func(key string, def uint64) uint64 {
				if d.HasArg(key) {
					d.ScanArgs(t, key, &def)
				}
				return def
			}
			hexArg := func(key string) uint16 {
				var s string
				d.ScanArgs(t, key, &s)
				var v uint16
				if _, err := fmt.Sscanf(s, "0x%x", &v); err != nil {
					d.Fatalf(t, "%s=%s: %v", key, s, err)
				}
				return v
			}
			feed := func(b []byte) string {
				p.chunk = int(num("chunk", 0))
				if err := p.feed(b); err != nil {
					return "error: " + err.Error() + "\n" + p.drain(0)
				}
				return "ok\n"
			}
			switch d.Cmd {
			case "new":
				o := Options{Depth: int(num("depth", 4)), MaxR2T: int(num("maxr2t", 1)),
					InCapsuleBytes: int(num("incapsule", 0)),
					HeaderDigest:   d.HasArg("hdgst"), DataDigest: d.HasArg("ddgst")}
				p = &peer{q: New(o)}
				clear(bufs)
				s := p.drain(0)
				if d.HasArg("connected") {
					dgst := uint8(0)
					if o.HeaderDigest {
						dgst |= 1
					}
					if o.DataDigest {
						dgst |= 2
					}
					cpda := uint8(num("cpda", 0))
					if err := p.feed(p.icResp(cpda, dgst, uint32(num("maxh2c", 8192)))); err != nil {
						d.Fatalf(t, "%v", err)
					}
					p.rx = pdu.Format{HeaderDigest: o.HeaderDigest, DataDigest: o.DataDigest}
					p.tx = p.rx
					p.tx.AlignBytes = (int(cpda) + 1) * 4
				}
				return s
			case "icresp":
				return feed(p.icResp(uint8(num("cpda", 0)), uint8(num("dgst", 0)), uint32(num("maxh2c", 8192))))
			case "submit":
				var op string
				d.ScanArgs(t, "op", &op)
				c := host.Command{Tag: num("tag", 0)}
				ops := map[string]uint8{"read": nvme.CmdRead, "write": nvme.CmdWrite, "flush": nvme.CmdFlush,
					"aer": nvme.AdminAsyncEvent, "both": 0x83}
				c.SQE.SetOpcode(ops[op])
				n := int(num("len", 0))
				switch op {
				case "write":
					c.Data = pattern(c.Tag, n)
				default:
					c.Data = make([]byte, n)
				}
				bufs[c.Tag] = c.Data
				cid, err := p.q.Submit(&c)
				if err != nil {
					return "error: " + err.Error() + "\n"
				}
				return fmt.Sprintf("cid=%#x\n", cid)
			case "send":
				return p.drain(int(num("bytes", 0)))
			case "c2hdata":
				off, n := uint32(num("off", 0)), uint32(num("len", 0))
				flags := uint8(0)
				if d.HasArg("last") {
					flags |= pdu.FlagLast
				}
				if d.HasArg("success") {
					flags |= pdu.FlagSuccess
				}
				data := pattern(num("tag", 0), int(off+n))[off:]
				return feed(p.pdu(pdu.TypeC2HData, flags,
					dataHeader(hexArg("cid"), 0, off, uint32(num("datal", uint64(n)))), data,
					d.HasArg("badheader"), d.HasArg("baddata")))
			case "resp":
				return feed(p.resp(hexArg("cid"), nvme.Status(num("status", 0)), num("result", 0)))
			case "r2t":
				return feed(p.pdu(pdu.TypeR2T, 0, dataHeader(hexArg("cid"), hexArg("ttag"), uint32(num("off", 0)),
					uint32(num("len", 0))), nil, d.HasArg("badheader"), false))
			case "term":
				b := pdu.AppendTerm(nil, pdu.TypeC2HTermReq,
					&pdu.FatalError{FES: pdu.FES(num("fes", 1)), FEI: uint32(num("fei",
						0))}, make([]byte, num("quote", 0)))
				return feed(b)
			case "bytes":
				b, err := hex.DecodeString(strings.Join(strings.Fields(d.Input), ""))
				if err != nil {
					d.Fatalf(t, "%v", err)
				}
				return feed(b)
			case "detach":
				return fmt.Sprintf("%t\n", p.q.Detach(hexArg("cid")))
			case "scribble": // what a caller may do to a buffer that is his again
				b := bufs[num("tag", 0)]
				for i := range b {
					b[i] = 0xEE
				}
				return ""
			case "tick":
				return fmt.Sprintf("oldest %d\n", p.q.Tick(d.HasArg("admin")))
			case "done":
				var s strings.Builder
				comps := make([]host.Completion, 8)
				for _, c := range comps[:p.q.Completions(comps)] {
					right := ""
					if c.Received > 0 {
						right = fmt.Sprintf(" data right: %t", string(bufs[c.Tag][:c.Received]) == string(pattern(c.Tag,
							int(c.Received))))
					}
					fmt.Fprintf(&s, "tag=%d %s result=%d received=%d%s\n", c.Tag, c.Status, c.Result, c.Received, right)
				}
				fmt.Fprintf(&s, "free %d of %d\n", p.q.Free(), p.q.Depth())
				return s.String()
			}
			d.Fatalf(t, "unknown command %q", d.Cmd)
			return ""
		})
	})
}
