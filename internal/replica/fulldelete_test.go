package replica

import (
	"testing"

	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// TestADeleteOfNothingAddsNothingToAFullPartition: it would leave a tombstone at each member, and if one of them had no
// room for it, the writes behind it would wait.
func TestADeleteOfNothingAddsNothingToAFullPartition(t *testing.T) {
	for name, c := range map[string]struct {
		full   bool
		cond   kvstore.Condition
		st     kvstore.Status
		reply  Reply
		decide bool
	}{
		"room":         {false, kvstore.Always, kvstore.OK, Reply{Status: crrs.OK}, false},
		"full, no key": {true, kvstore.Always, kvstore.NotFound, Reply{Status: crrs.OK}, true},
		"full, a key":  {true, kvstore.Always, kvstore.OK, Reply{Status: crrs.OK}, true},
		"full, with a condition": {true, kvstore.IfPresent, kvstore.NotFound, Reply{Status: crrs.Refused,
			Refusal: kvstore.NotFound}, true},
	} {
		t.Run(name, func(t *testing.T) {
			role := headRole
			role.Successor, role.ChainTail = 1, 1
			r, out := alone(t, role), Actions{}
			forwards := func() (n int) {
				for i := range out.Commands {
					if out.Commands[i].SQE.Opcode() == nvme.CmdKVForward {
						n++
					}
				}
				return n
			}
			r.SetFull(c.full, false)
			r.Write(&Write{Op: kvstore.Delete, Condition: c.cond, Key: testKey("key"), Tag: 77})
			r.Turn(&out)
			if len(out.Requests) != 1 || (out.Requests[0].Condition == kvstore.IfPresent) != c.decide ||
				(forwards() > 0) == c.decide {
				t.Fatalf("%+v", out)
			}
			q := out.Requests[0]
			out = Actions{}
			r.Stored(&kvstore.Reply{Tag: q.Tag, Status: c.st, Version: q.Given})
			r.Turn(&out)
			if !c.decide {
				return
			}
			if c.st == kvstore.OK {
				if forwards() != 1 || len(out.Replies) > 0 {
					t.Errorf("a Delete that changes something: %+v", out)
				}
				return
			}
			c.reply.Tag = 77
			got := out.Replies
			if len(got) == 1 && got[0].Status == crrs.Refused {
				got[0].Version = 0
			}
			if forwards() > 0 || len(got) != 1 || got[0] != c.reply {
				t.Errorf("%+v", out)
			}
		})
	}
}
