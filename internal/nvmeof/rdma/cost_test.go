package rdma_test

import (
	"slices"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/nvmeof/qpair/qpairtest"
	"jbofd/internal/nvmeof/rdma"
	"jbofd/internal/nvmeof/rdma/wr"
)

// quiet is a Handler and a Sink that answers everything at once, including Connect, and allocates nothing.
type quiet struct {
	c    *rdma.Conn
	out  rdma.Out
	data *arena
	mem  []byte
	sent int
	lost bool
}

func newQuiet(cfg rdma.Config) *quiet {
	q := &quiet{data: newArena(64<<10, dataAddr, dataKey)}
	q.mem = q.data.take(64 << 10)
	cfg.Responses, cfg.Addr, cfg.LKey = make([]byte, rdma.ResponseBytes(cfg.Entries)), responsesAddr, responsesKey
	q.c = rdma.New(cfg, q, q, &q.out)
	q.c.Received(connectRequest(0, true).capsule())
	q.complete(q.out.Sends)
	q.out.Reset()
	return q
}

func (q *quiet) Locate(b []byte) (addr uint64, lkey uint32, ok bool) {
	addr, ok = q.data.locate(b)
	return addr, q.data.lkey, ok && !q.lost
}
func (q *quiet) Sent(int)                { q.sent++ }
func (q *quiet) Buffer(_, n int) []byte  { return q.mem[:n] }
func (q *quiet) Unused(int)              {}
func (q *quiet) Failed(int, nvme.Status) {}
func (q *quiet) Paired(int, int)         {}
func (q *quiet) Paused() bool            { return false }
func (q *quiet) Admin(slot int) {
	if !q.c.Connected() {
		q.c.Attach(qpairtest.IOQueue(config.Entries, false))
	}
	q.c.Respond(slot, nvme.Success, 0)
}

func (q *quiet) Execute(slot int) {
	s := q.c.Slot(slot)
	switch {
	case q.c.NeedsFetch(slot) && q.c.Pair(slot) >= 0:
		q.c.FetchPair(slot, q.mem)
	case q.c.NeedsFetch(slot):
		q.c.RequestData(slot, q.mem[:s.Plan.ToController])
	case s.Plan.ToHost > 0:
		q.c.RespondData(slot, q.mem[:s.Plan.ToHost], 0)
	default:
		q.Fetched(slot, true)
	}
}

func (q *quiet) Fetched(slot int, ok bool) {
	if q.c.Pair(slot) >= 0 {
		second, complete := q.c.PairFetched(slot)
		if !complete {
			return
		}
		q.c.Respond(q.c.Pair(second), nvme.Success, 0)
		slot = second
	}
	q.c.Respond(slot, nvme.Success, 0)
}

// complete reports work requests as completed to the machine.
func (q *quiet) complete(sends []wr.Send) {
	for i := range sends {
		if sends[i].Flags&wr.FlagSignaled != 0 {
			w := wr.Completion{ID: sends[i].ID, Op: sends[i].Op}
			q.c.Completed(&w)
		}
	}
}

// cost is the cost of a command: its work requests in order, and how many of them are signaled.
type cost struct {
	ops         []wr.Op
	completions int
}

// run executes a command to its end.
func (q *quiet) run(t *testing.T, r request) (c cost) {
	t.Helper()
	if !q.c.Received(r.capsule()) {
		t.Fatal("the command is not taken")
	}
	was := q.sent
	for len(q.out.Sends) > 0 {
		batch := slices.Clone(q.out.Sends)
		q.out.Reset()
		for _, w := range batch {
			c.ops = append(c.ops, w.Op)
			if w.Flags&wr.FlagSignaled != 0 {
				c.completions++
			}
		}
		q.complete(batch)
	}
	if q.sent != was+1 || q.c.Outstanding() != 0 || q.c.Unsent() != 0 {
		t.Fatalf("%d answers, %d outstanding, %d on their way", q.sent-was, q.c.Outstanding(), q.c.Unsent())
	}
	return c
}

func (c cost) is(t *testing.T, completions int, ops ...wr.Op) {
	t.Helper()
	if !slices.Equal(c.ops, ops) || c.completions != completions {
		t.Errorf("work requests %v, %d completions; want %v, %d", c.ops, c.completions, ops, completions)
	}
}

var (
	read4K   = request{op: nvme.CmdRead, cid: 1, nsid: 2, nlb: 1, transfer: 4096, key: 7, address: 0xA000}
	write4K  = request{op: nvme.CmdWrite, cid: 2, nsid: 2, nlb: 1, transfer: 4096, key: 8, address: 0xB000}
	inline4K = request{op: nvme.CmdWrite, cid: 3, nsid: 2, nlb: 1, transfer: 4096, inline: true,
		data: make([]byte, 4096)}
)

// TestA4KiBReadCostsOneWriteAndOneSend, which share a completion, with and without invalidation.
func TestA4KiBReadCostsOneWriteAndOneSend(t *testing.T) {
	q := newQuiet(config)
	q.run(t, read4K).is(t, 1, wr.OpWrite, wr.OpSend)
	r := read4K
	r.invalidate = true
	q.run(t, r).is(t, 1, wr.OpWrite, wr.OpSendInvalidate)
}

func TestA4KiBWriteInTheCapsuleCostsOneSend(t *testing.T) {
	newQuiet(config).run(t, inline4K).is(t, 1, wr.OpSend)
}

func TestA4KiBWriteFromTheHostCostsOneReadAndOneSend(t *testing.T) {
	q := newQuiet(config)
	q.run(t, write4K).is(t, 2, wr.OpRead, wr.OpSend)
	r := write4K
	r.invalidate = true
	q.run(t, r).is(t, 2, wr.OpRead, wr.OpSendInvalidate)
}

// TestAFailedCommandCostsOneSend: none of its data is transferred.
func TestAFailedCommandCostsOneSend(t *testing.T) {
	q := newQuiet(config)
	for _, r := range []request{read4K, write4K, inline4K} {
		r.slba = 1 << 20
		q.run(t, r).is(t, 1, wr.OpSend)
	}
	q.lost = true
	q.run(t, read4K).is(t, 1, wr.OpSend)
	q.run(t, write4K).is(t, 1, wr.OpSend)
}

// TestCommandsAllocateNothing checks Received, Completed, Respond, RespondData and RequestData, with what they call:
// also with a short send queue, for fused pairs and for errors.
func TestCommandsAllocateNothing(t *testing.T) {
	first := request{op: nvme.CmdCompare, cid: 4, nsid: 2, nlb: 1, transfer: 4096, key: 9, fuse: nvme.FuseFirst}
	second := first
	second.op, second.cid, second.fuse = nvme.CmdWrite, 5, nvme.FuseSecond
	wrong := read4K
	wrong.nsid = 9
	var batch [][]byte
	for _, r := range []request{read4K, write4K, inline4K, first, second, wrong} {
		batch = append(batch, r.capsule())
	}
	for _, cfg := range []struct{ sends, reads int }{{40, 4}, {3, 1}} {
		for _, lost := range []bool{false, true} {
			c := config
			c.Sends, c.Reads = cfg.sends, cfg.reads
			q := newQuiet(c)
			q.lost = lost
			posted := make([]wr.Send, 0, 64)
			run := func() {
				for _, b := range batch {
					if !q.c.Received(b) {
						t.Fatal("a command is not taken")
					}
				}
				for len(q.out.Sends) > 0 {
					posted = append(posted[:0], q.out.Sends...)
					q.out.Reset()
					q.complete(posted)
				}
				if q.c.Fatal() != nil || q.c.Outstanding() != 0 || q.c.Unsent() != 0 {
					t.Fatalf("%v, %d outstanding, %d on their way", q.c.Fatal(), q.c.Outstanding(), q.c.Unsent())
				}
			}
			run()
			run()
			if n := testing.AllocsPerRun(50, run); n != 0 {
				t.Errorf("%d places, memory lost %t: %v allocations", cfg.sends, lost, n)
			}
		}
	}
}

var (
	_ qpair.Handler = (*quiet)(nil)
	_ rdma.Sink     = (*quiet)(nil)
)
