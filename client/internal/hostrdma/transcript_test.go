package hostrdma

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/wr"
)

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
			hexArg := func(key string) uint64 {
				var s string
				d.ScanArgs(t, key, &s)
				var v uint64
				if _, err := fmt.Sscanf(s, "0x%x", &v); err != nil {
					d.Fatalf(t, "%s=%s: %v", key, s, err)
				}
				return v
			}
			completed := func(cs ...wr.Completion) string {
				if err := p.q.Completed(cs); err != nil {
					return "error: " + err.Error() + "\n"
				}
				if n := p.postRecvs(); n > 0 {
					return fmt.Sprintf("ok, %d receives posted\n", n)
				}
				return "ok\n"
			}
			switch d.Cmd {
			case "new":
				o := Options{Depth: int(num("depth", 4)), InCapsuleBytes: int(num("incapsule", 0)),
					InlineBytes: int(num("inline",
						0)),
					Direct: d.HasArg("direct"), MaxBytes: int(num("max", 0))}
				p = newPeer(o, int(num("pieces", 100)))
				clear(bufs)
				return fmt.Sprintf("%d receives posted\n", len(p.recvs))
			case "submit":
				var op string
				d.ScanArgs(t, "op", &op)
				c := host.Command{Tag: num("tag", 0)}
				ops := map[string]uint8{"read": nvme.CmdRead, "write": nvme.CmdWrite, "compare": nvme.CmdCompare,
					"flush": nvme.CmdFlush, "aer": nvme.AdminAsyncEvent, "both": 0x83}
				c.SQE.SetOpcode(ops[op])
				n := int(num("len", 0))
				c.Data = make([]byte, n)
				if d.HasArg("registered") {
					c.Data = p.mem.direct[num("registered", 0):][:n]
				}
				if op == "write" || op == "compare" {
					copy(c.Data, pattern(c.Tag, n))
				}
				if d.HasArg("first") {
					c.SQE.SetFuse(nvme.FuseFirst)
				}
				if d.HasArg("second") {
					c.SQE.SetFuse(nvme.FuseSecond)
				}
				bufs[c.Tag] = c.Data
				cid, err := p.q.Submit(&c)
				if err != nil {
					return "error: " + err.Error() + "\n"
				}
				return fmt.Sprintf("cid=%#x\n", cid)
			case "post":
				var s strings.Builder
				for _, w := range p.post(int(num("n", 0))) {
					s.WriteString(p.describe(&w) + "\n")
				}
				if n := p.q.Waiting(); n > 0 {
					fmt.Fprintf(&s, "%d wait\n", n)
				}
				return s.String()
			case "sent": // the SENDs up to the next signaled one have completed
				c, ok := p.sent()
				if !ok {
					d.Fatalf(t, "nothing signaled is in flight")
				}
				c.Status = wr.Status(num("status", 0))
				return completed(c)
			case "resp":
				cid := uint16(hexArg("cid"))
				if d.HasArg("data") { // the target has written it before
					copy(p.mem.has[uint16(host.SlotOf(cid))], pattern(num("data", 0), 1<<20))
				}
				c := p.response(cid, nvme.Status(num("status", 0)), num("result", 0))
				c.Len = uint32(num("len", uint64(c.Len)))
				c.Status = wr.Status(num("wcstatus", 0))
				if d.HasArg("invalidates") {
					c.Invalidated, c.RKey = true, uint32(hexArg("invalidates"))
				}
				return completed(c)
			case "wc":
				return completed(wr.Completion{ID: hexArg("id"), Len: 16, Status: wr.Status(num("status", 0))})
			case "flush": // all in flight and posted comes back; one of the SENDs with a reason
				var cs []wr.Completion
				for _, r := range p.recvs[:2] {
					cs = append(cs, wr.Completion{ID: r.ID, Status: wr.StatusFlushed})
				}
				for i, w := range p.posted {
					c := wr.Completion{ID: w.ID, Status: wr.StatusFlushed}
					if i == 0 && d.HasArg("status") {
						c.Status = wr.Status(num("status", 0))
					}
					cs = append(cs, c)
				}
				return completed(cs...)
			case "detach":
				return fmt.Sprintf("%t\n", p.q.Detach(uint16(hexArg("cid"))))
			case "scribble": // what a caller may do to a buffer that is his again
				b := bufs[num("tag", 0)]
				for i := range b {
					b[i] = 0xEE
				}
				return ""
			case "incapsule":
				p.q.SetInCapsuleBytes(int(num("n", 0)))
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
				fmt.Fprintf(&s, "free %d of %d, %d borrowed\n", p.q.Free(), p.q.Depth(), p.mem.out)
				return s.String()
			}
			d.Fatalf(t, "unknown command %q", d.Cmd)
			return ""
		})
	})
}
