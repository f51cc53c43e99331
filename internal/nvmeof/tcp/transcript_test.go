package tcp_test

import (
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/nvmeof/qpair/qpairtest"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// TestTranscripts plays conversations between a host and the machine. Lines with <- are PDUs to the host; the others
// are calls of the driver. Run with
// -rewrite to update them; then read the diff.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/transcripts", func(t *testing.T, path string) {
		var d *driver
		datadriven.RunTest(t, path, func(t *testing.T, td *datadriven.TestData) string { return step(t, &d, td) })
	})
}

func step(t *testing.T, dp **driver, td *datadriven.TestData) string {
	d := *dp
	num := func(key string, def int) int {
		if td.HasArg(key) {
			var s string
			td.ScanArgs(t, key, &s)
			if _, err := fmt.Sscan(s, &def); err != nil {
				td.Fatalf(t, "%s=%s: %v", key, s, err)
			}
		}
		return def
	}
	word := func(key string) string {
		if !td.HasArg(key) {
			return ""
		}
		var s string
		td.ScanArgs(t, key, &s)
		return s
	}
	wrong := flaw{header: td.HasArg("badheader"), data: td.HasArg("baddata")}
	send := func(b []byte) {
		if k := num("chunk", 0); k > 0 {
			for len(b) > 0 {
				n := min(k, len(b))
				d.receive(b[:n])
				b = b[n:]
			}
			return
		}
		d.receive(b)
	}
	switch td.Cmd {
	case "new", "queue", "admin-queue":
		cfg := config
		cfg.InCapsuleBytes = num("incapsule", cfg.InCapsuleBytes)
		d = newDriver(cfg)
		*dp = d
		switch td.Cmd {
		case "queue":
			d.attach(qpairtest.IOQueue(num("entries", 8), td.HasArg("noflow")), uint8(num("hpda", 0)),
				uint8(num("dgst", 0)))
		case "admin-queue":
			d.attach(qpair.Attachment{Entries: num("entries", 8)}, uint8(num("hpda", 0)), uint8(num("dgst", 0)))
		}
	case "icreq":
		send(icReq(uint16(num("pfv", 0)), uint8(num("hpda", 0)), uint8(num("dgst", 0)), uint32(num("maxr2t", 0))))
		d.in, d.out = formats(uint8(num("hpda", 0)), uint8(num("dgst", 0)))
	case "connect":
		r := connectRequest(uint16(num("cid", 0)))
		if td.HasArg("r2t") {
			r.inline, r.data = false, nil
		}
		send(d.capsule(r, wrong))
	case "attach":
		n := d.c.Attach(qpairtest.IOQueue(num("entries", 8), td.HasArg("noflow")))
		d.Say("%d slots", n)
		delete(d.Bufs, 0)
		d.c.Respond(0, nvme.Success, 1)
	case "command": // op= cid= [nsid slba nlb fuse inline|data transfer]
		r := request{op: qpairtest.Opcodes[word("op")], cid: uint16(num("cid", 0)), nsid: uint32(num("nsid", 1)),
			slba: uint64(num("slba", 0)), nlb: uint32(num("nlb", 1)),
			fuse: nvme.Fuse(num("fuse", 0)), inline: td.HasArg("inline")}
		size := r.nlb * map[uint32]uint32{1: 512, 2: 4096}[r.nsid]
		switch word("op") {
		case "dsm":
			size = 16
		case "identify":
			size = 4096
		case "timestamp":
			size = 8
		case "flush", "zeroes", "verify", "security-send", "keepalive", "aer":
			size = 0
		}
		r.transfer = uint32(num("transfer", int(size)))
		held := 0
		if r.inline {
			held = int(r.transfer)
		}
		r.data = qpairtest.Pattern(num("seed", int(r.cid)), num("data", held))
		r.change = func(e *nvme.SQE) {
			if word("op") == "timestamp" {
				e.Features().SetFID(nvme.FIDTimestamp)
			}
			if td.HasArg("psdt") {
				e.SetPSDT(uint8(num("psdt", 1)))
			}
			if td.HasArg("sgl") {
				v := num("sgl", 0)
				e.SGL().SetType(uint8(v>>4), uint8(v&15))
			}
			e.SGL().SetAddress(uint64(num("address", 0)))
			if word("op") == "dsm" {
				e.SetCDW(10, uint32(num("ranges", 1)-1))
				e.SetCDW(11, nvme.DSMDeallocate)
			}
			if td.HasArg("disconnect") {
				e.InitDisconnect()
				e.SetCID(r.cid)
			}
		}
		send(d.capsule(r, wrong))
	case "h2cdata": // cid= ttag= off= len= [last]
		flags := uint8(0)
		if td.HasArg("last") {
			flags = pdu.FlagLast
		}
		n, off := num("len", 0), num("off", 0)
		header := dataHeader(uint16(num("cid", 0)), uint16(num("ttag", 0)), uint32(off), uint32(num("datal", n)))
		data := qpairtest.Pattern(num("seed", num("cid", 0)), off+n)[off:]
		send(encode(d.in, pdu.TypeH2CData, flags, header, data, wrong))
	case "term":
		send(pdu.AppendTerm(nil, pdu.TypeH2CTermReq,
			&pdu.FatalError{FES: pdu.FES(num("fes", 1)), FEI: uint32(num("fei", 0))}, make([]byte, num("quote", 0))))
	case "bytes":
		b, err := hex.DecodeString(strings.Join(strings.Fields(td.Input), ""))
		if err != nil {
			td.Fatalf(t, "%v", err)
		}
		send(b)
	case "header": // type= hlen= plen= [pdo flags pad]
		b := make([]byte, num("pad", int(num("hlen", 8))))
		(*pdu.Common)(b).Set(pdu.Type(num("type", 0)), uint8(num("flags", 0)), uint8(num("hlen", 8)),
			uint8(num("pdo", 0)), uint32(num("plen", 8)))
		send(b)
	case "fetch":
		d.Fetch(num("slot", 0))
	case "respond":
		if slot := num("slot", 0); word("status") == "" {
			d.Finish(slot)
		} else {
			delete(d.Bufs, slot)
			d.c.Respond(slot, qpairtest.Statuses[word("status")], uint64(num("result", 0)))
		}
	case "data":
		s := d.c.Slot(num("slot", 0))
		n := int(s.Plan.ToHost)
		if n == 0 {
			n = len(d.Bufs[num("slot", 0)])
		}
		if !d.c.RespondData(num("slot", 0), qpairtest.Pattern(int(s.SQE.CID()), n), uint64(num("result", 0))) {
			d.Say("data not sent")
		}
		delete(d.Bufs, num("slot", 0))
	case "credits":
		d.c.SetCredits(!td.HasArg("off"))
	case "abort":
		slot, ok := d.c.Find(uint16(num("cid", 0)))
		if !ok {
			d.Say("not found")
			break
		}
		d.c.Abort(slot, nvme.AbortRequested)
		d.Say("slot %d aborted", slot)
	case "lost":
		d.c.Fetching(func(slot int) { d.Say("slot %d is with the driver again", slot) })
	case "memory":
		d.Refuse = td.HasArg("none")
	case "pause":
		d.Pause = true
	case "resume":
		d.Pause = false
	case "again":
	case "namespaces": // another view: namespace 1 with blocks of 4096 bytes
		d.c.SetTable(nvmeof.NewNamespaceTable([]*nvmeof.Namespace{{NSID: 1, OffsetBytes: 8 << 20, SizeBytes: 1 << 20,
			BlockShift: 12, ANAState: nvme.ANAStateOptimized}}, qpairtest.HostNQN))
	default:
		td.Fatalf(t, "unknown command %q", td.Cmd)
	}
	if td.Cmd == "again" || td.Cmd == "memory" || td.Cmd == "resume" {
		d.receive(nil)
	}
	s := d.Log.String() + d.sent()
	d.Log.Reset()
	if d.c.Stalled() {
		s += fmt.Sprintf("stalled with %d bytes waiting\n", len(d.unused))
	} else if len(d.unused) > 0 && !d.c.Closed() {
		s += fmt.Sprintf("%d bytes wait for more\n", len(d.unused))
	}
	if !d.c.Idle() {
		s += "in the middle of a PDU\n"
	}
	if f := d.c.PeerFatal(); f != nil {
		s += "the host says: " + f.Error() + "\n"
	}
	if f := d.c.Fatal(); f != nil {
		s += f.What + "\n"
	}
	if d.c.Closed() {
		s += "closed\n"
	}
	if td.HasArg("count") {
		s += fmt.Sprintf("%d outstanding\n", d.c.Outstanding())
	}
	return s
}
