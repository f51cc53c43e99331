package rdma_test

import (
	"fmt"
	"testing"

	"github.com/cockroachdb/datadriven"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/nvmeof/qpair/qpairtest"
	"jbofd/internal/nvmeof/rdma/wr"
)

var outcomes = map[string]wr.Status{"": wr.StatusOK, "flushed": wr.StatusFlushed,
	"remote-access": wr.StatusRemoteAccess, "remote-invalid": wr.StatusRemoteInvalid,
	"remote-op": wr.StatusRemoteOp, "rnr": wr.StatusRNRExceeded, "retry": wr.StatusRetryExceeded,
	"local-prot": wr.StatusLocalProt, "general": wr.StatusGeneral}

// TestTranscripts plays conversations between a host, the machine and a device. Lines with <- are work requests; the
// others are calls of the driver. Run with -rewrite to update them; then read the diff.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/transcripts", func(t *testing.T, path string) {
		var d *driver
		datadriven.RunTest(t, path, func(t *testing.T, td *datadriven.TestData) string { return step(t, &d, td) })
	})
}

// args reads the arguments of a command.
type args struct {
	t  *testing.T
	td *datadriven.TestData
}

func (a args) num(key string, def int) int {
	if a.td.HasArg(key) {
		if s := a.word(key); s != "" {
			if _, err := fmt.Sscan(s, &def); err != nil {
				a.td.Fatalf(a.t, "%s=%s: %v", key, s, err)
			}
		}
	}
	return def
}

func (a args) word(key string) (s string) {
	if a.td.HasArg(key) {
		a.td.ScanArgs(a.t, key, &s)
	}
	return s
}

// request is the command that op=, cid= and the rest describe.
func (a args) request() request {
	op := a.word("op")
	cid := a.num("cid", 0)
	r := request{op: qpairtest.Opcodes[op], cid: uint16(cid), nsid: uint32(a.num("nsid", 1)),
		slba: uint64(a.num("slba", 0)), nlb: uint32(a.num("nlb", 1)),
		fuse: nvme.Fuse(a.num("fuse", 0)), inline: a.td.HasArg("inline"), invalidate: a.td.HasArg("invalidate"),
		key: uint32(a.num("key", cid))}
	if !r.inline {
		r.address = 0xA000
	}
	r.address = uint64(a.num("address", int(r.address)))
	size := r.nlb * map[uint32]uint32{1: 512, 2: 4096}[r.nsid]
	switch op {
	case "dsm":
		size = 16 * uint32(a.num("ranges", 1))
	case "identify":
		size = nvme.IdentifySize
	case "log":
		size = 512
	case "timestamp":
		size = 8
	case "flush", "zeroes", "verify", "keepalive", "aer":
		size = 0
	}
	r.transfer = uint32(a.num("transfer", int(size)))
	held := 0
	if r.inline {
		held = int(r.transfer)
	}
	r.data = qpairtest.Pattern(cid, a.num("data", held))
	r.change = func(e *nvme.SQE) {
		switch op {
		case "timestamp":
			e.Features().SetFID(nvme.FIDTimestamp)
		case "log":
			e.SetCDW(10, 127<<16|nvme.LIDSMART)
		case "dsm":
			e.SetCDW(10, uint32(a.num("ranges", 1)-1))
			e.SetCDW(11, nvme.DSMDeallocate)
		}
		if a.td.HasArg("sgl") {
			v := a.num("sgl", 0)
			e.SGL().SetType(uint8(v>>4), uint8(v&15))
		}
		if a.td.HasArg("psdt") {
			e.SetPSDT(uint8(a.num("psdt", 1)))
		}
		if a.td.HasArg("disconnect") {
			e.InitDisconnect()
			e.SetCID(r.cid)
		}
	}
	return r
}

func step(t *testing.T, dp **driver, td *datadriven.TestData) string {
	d := *dp
	a := args{t, td}
	switch td.Cmd {
	case "new", "queue", "admin-queue": // [entries sends reads noinline noflow]
		cfg := config
		cfg.Entries, cfg.Sends, cfg.Reads = a.num("entries", cfg.Entries), a.num("sends", cfg.Sends),
			a.num("reads", cfg.Reads)
		cfg.Inline = !td.HasArg("noinline")
		d = newDriver(cfg)
		*dp = d
		switch td.Cmd {
		case "queue":
			d.attach(qpairtest.IOQueue(cfg.Entries, td.HasArg("noflow")))
		case "admin-queue":
			d.attach(qpair.Attachment{Entries: cfg.Entries})
		}
		return ""
	case "connect":
		d.receive(connectRequest(uint16(a.num("cid", 0)), td.HasArg("inline")).capsule())
	case "attach":
		n := d.c.Attach(qpairtest.IOQueue(a.num("entries", config.Entries), td.HasArg("noflow")))
		d.Say("%d slots", n)
		delete(d.Bufs, 0)
		d.c.Respond(0, nvme.Success, 1)
	case "command":
		r := a.request()
		for range a.num("times", 1) {
			d.receive(r.capsule())
			r.cid++
			if !td.HasArg("key") {
				r.key++
			}
		}
	case "bytes": // n= of them, all 0
		d.receive(make([]byte, a.num("n", 0)))
	case "fetch":
		d.Fetch(a.num("slot", 0))
	case "respond": // slot= [status result]
		slot := a.num("slot", 0)
		if td.HasArg("status") {
			delete(d.Bufs, slot)
			d.c.Respond(slot, qpairtest.Statuses[a.word("status")], uint64(a.num("result", 0)))
			break
		}
		d.Finish(slot)
	case "data": // slot= [result len]
		slot := a.num("slot", 0)
		s := d.c.Slot(slot)
		b := d.Bufs[slot] // of an admin command
		if b == nil {
			b = d.data.take(int(s.Plan.ToHost))
		}
		b = b[:a.num("len", len(b))]
		copy(b, qpairtest.Pattern(int(s.SQE.CID()), len(b)))
		delete(d.Bufs, slot)
		if !d.c.RespondData(slot, b, uint64(a.num("result", 0))) {
			d.Say("data not sent")
			break
		}
		d.Say("data lent to %d", d.c.Last())
	case "complete": // [times status]: what was posted, in order
		s, ok := outcomes[a.word("status")]
		if !ok {
			td.Fatalf(t, "no such status")
		}
		for range a.num("times", 1) {
			d.Log.WriteString(d.put())
			if !d.complete(s) {
				d.Say("nothing to complete")
			}
		}
	case "completion": // id= [status], as it comes
		d.c.Completed(&wr.Completion{ID: uint64(a.num("id", 0)), Status: outcomes[a.word("status")]})
	case "credits":
		d.c.SetCredits(!td.HasArg("off"))
	case "abort":
		slot, ok := d.c.Find(uint16(a.num("cid", 0)))
		if !ok {
			d.Say("not found")
			break
		}
		d.c.Abort(slot, nvme.AbortRequested)
		d.Say("slot %d aborted", slot)
	case "close":
		d.c.Close()
	case "lost":
		d.c.Fetching(func(slot int) { d.Say("slot %d is with the driver again", slot) })
	case "memory":
		d.Refuse = td.HasArg("none")
	case "unlocatable":
		d.lost = !td.HasArg("off")
	case "pause":
		d.Pause = true
	case "resume":
		d.Pause = false
	case "again":
	default:
		td.Fatalf(t, "unknown command %q", td.Cmd)
	}
	switch td.Cmd {
	case "again", "memory", "resume", "complete":
		d.offer()
	}
	s := d.Log.String() + d.put()
	d.Log.Reset()
	if len(d.held) > 0 {
		s += fmt.Sprintf("%d capsules wait\n", len(d.held))
	}
	if f := d.c.Fatal(); f != nil {
		s += f.Label + ": " + f.What + "\n"
	}
	if d.c.Closed() {
		s += "closed\n"
	}
	if td.HasArg("count") {
		s += fmt.Sprintf("%d outstanding, %d responses on their way, %d work requests posted, %d bytes awaited\n",
			d.c.Outstanding(), d.c.Unsent(), len(d.posted), d.c.AwaitedBytes())
	}
	return s
}
