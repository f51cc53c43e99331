package hostrdma

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"jbofd/client/internal/host"
	"jbofd/client/internal/host/hosttest"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/wr"
)

// TestTranscripts plays conversations. Run with -rewrite to update them; then read the diff.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/transcripts", func(t *testing.T, path string) {
		var p *peer
		var script hosttest.Script
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			a := hosttest.Args{T: t, TestData: d}
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
				o := Options{Depth: int(a.Num("depth", 4)), InCapsuleBytes: int(a.Num("incapsule", 0)),
					InlineBytes: int(a.Num("inline", 0)), Direct: d.HasArg("direct"), MaxBytes: int(a.Num("max", 0))}
				p = newPeer(o, int(a.Num("pieces", 100)))
				script.Reset()
				return fmt.Sprintf("%d receives posted\n", len(p.recvs))
			case "submit":
				data := make([]byte, a.Num("len", 0))
				if d.HasArg("registered") {
					data = p.mem.direct[a.Num("registered", 0):][:len(data)]
				}
				return script.Submit(p.q, a, data)
			case "post":
				var s strings.Builder
				for _, w := range p.post(int(a.Num("n", 0))) {
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
				c.Status = wr.Status(a.Num("status", 0))
				return completed(c)
			case "resp":
				cid := a.CID()
				if d.HasArg("data") { // the target has written it before
					copy(p.mem.has[uint16(host.SlotOf(cid))], hosttest.Pattern(a.Num("data", 0), 1<<20))
				}
				c := p.response(cid, nvme.Status(a.Num("status", 0)), a.Num("result", 0))
				c.Len = uint32(a.Num("len", uint64(c.Len)))
				c.Status = wr.Status(a.Num("wcstatus", 0))
				if d.HasArg("invalidates") {
					c.Invalidated, c.RKey = true, uint32(a.Hex("invalidates"))
				}
				return completed(c)
			case "wc":
				return completed(wr.Completion{ID: a.Hex("id"), Len: 16, Status: wr.Status(a.Num("status", 0))})
			case "flush": // all in flight and posted comes back; one of the SENDs with a reason
				var cs []wr.Completion
				for _, r := range p.recvs[:2] {
					cs = append(cs, wr.Completion{ID: r.ID, Status: wr.StatusFlushed})
				}
				for i, w := range p.posted {
					c := wr.Completion{ID: w.ID, Status: wr.StatusFlushed}
					if i == 0 && d.HasArg("status") {
						c.Status = wr.Status(a.Num("status", 0))
					}
					cs = append(cs, c)
				}
				return completed(cs...)
			case "incapsule":
				p.q.SetInCapsuleBytes(int(a.Num("n", 0)))
				return ""
			case "done":
				return script.Done(p.q) + fmt.Sprintf(", %d borrowed\n", p.mem.out)
			}
			if out, ok := script.Play(p.q, a); ok {
				return out
			}
			d.Fatalf(t, "unknown command %q", d.Cmd)
			return ""
		})
	})
}
