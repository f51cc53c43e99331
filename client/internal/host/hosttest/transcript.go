package hosttest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
)

// Args reads the arguments of a transcript's command.
type Args struct {
	T *testing.T
	*datadriven.TestData
}

// Num returns the decimal argument key, or def without one.
func (a Args) Num(key string, def uint64) uint64 {
	if a.HasArg(key) {
		a.ScanArgs(a.T, key, &def)
	}
	return def
}

// Hex returns the argument key, which begins with 0x.
func (a Args) Hex(key string) (v uint64) {
	var s string
	a.ScanArgs(a.T, key, &s)
	if _, err := fmt.Sscanf(s, "0x%x", &v); err != nil {
		a.Fatalf(a.T, "%s=%s: %v", key, s, err)
	}
	return v
}

// CID returns the argument cid.
func (a Args) CID() uint16 {
	v := a.Hex("cid")
	if v > 0xFFFF {
		a.Fatalf(a.T, "cid=%#x is too large", v)
	}
	return uint16(v)
}

// Queue is the part of a host's machine that a Script calls.
type Queue interface {
	Submit(c *host.Command) (cid uint16, err error)
	Completions(out []host.Completion) int
	Detach(cid uint16) bool
	Tick(admin bool) (oldest uint32)
	Free() int
	Depth() int
}

// Script plays the commands of a transcript that do not depend on the transport, and keeps the buffers.
type Script struct {
	bufs map[uint64][]byte // by tag
}

var opcodes = map[string]uint8{"read": nvme.CmdRead, "write": nvme.CmdWrite, "compare": nvme.CmdCompare,
	"flush": nvme.CmdFlush, "aer": nvme.AdminAsyncEvent, "both": 0x83}

// Reset forgets the buffers: a new queue begins.
func (s *Script) Reset() { s.bufs = map[uint64][]byte{} }

// Submit submits the command that op, tag, first and second describe, with data as its buffer. A write or compare fills
// it with the pattern of its tag.
func (s *Script) Submit(q Queue, a Args, data []byte) string {
	var op string
	a.ScanArgs(a.T, "op", &op)
	opcode, ok := opcodes[op]
	if !ok {
		a.Fatalf(a.T, "unknown op %q", op)
	}
	c := host.Command{Tag: a.Num("tag", 0), Data: data}
	c.SQE.SetOpcode(opcode)
	if op == "write" || op == "compare" {
		copy(data, Pattern(c.Tag, len(data)))
	}
	if a.HasArg("first") {
		c.SQE.SetFuse(nvme.FuseFirst)
	}
	if a.HasArg("second") {
		c.SQE.SetFuse(nvme.FuseSecond)
	}
	s.bufs[c.Tag] = data
	cid, err := q.Submit(&c)
	if err != nil {
		return "error: " + err.Error() + "\n"
	}
	return fmt.Sprintf("cid=%#x\n", cid)
}

// Play plays a command other than submit, if it does not depend on the transport.
func (s *Script) Play(q Queue, a Args) (out string, ok bool) {
	switch a.Cmd {
	case "detach":
		return fmt.Sprintf("%t\n", q.Detach(a.CID())), true
	case "scribble": // what a caller may do to a buffer that is his again
		b := s.bufs[a.Num("tag", 0)]
		for i := range b {
			b[i] = 0xEE
		}
		return "", true
	case "tick":
		return fmt.Sprintf("oldest %d\n", q.Tick(a.HasArg("admin"))), true
	}
	return "", false
}

// Done collects completions and says whether their data is that of their tags.
func (s *Script) Done(q Queue) string {
	var b strings.Builder
	comps := make([]host.Completion, 8)
	for _, c := range comps[:q.Completions(comps)] {
		right := ""
		if c.Received > 0 {
			got, want := s.bufs[c.Tag][:c.Received], Pattern(c.Tag, int(c.Received))
			right = fmt.Sprintf(" data right: %t", string(got) == string(want))
		}
		fmt.Fprintf(&b, "tag=%d %s result=%d received=%d%s\n", c.Tag, c.Status, c.Result, c.Received, right)
	}
	fmt.Fprintf(&b, "free %d of %d", q.Free(), q.Depth())
	return b.String()
}
