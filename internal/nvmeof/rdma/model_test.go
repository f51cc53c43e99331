package rdma_test

import (
	"bytes"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/nvmeof/qpair/qpairtest"
	"jbofd/internal/nvmeof/rdma"
	"jbofd/internal/nvmeof/rdma/wr"
)

// world is a well-behaved host, a target with one drive, and the devices between them, which have delays: work requests
// are executed in order some time after they were posted, and completions come in order some time later.
type world struct {
	t   *rapid.T
	cfg rdma.Config
	c   *rdma.Conn
	out rdma.Out

	// The target.
	data      *arena
	free      [][]byte // pieces of data
	pieces    int
	responses *arena
	disk      []byte // the target's
	bufs      map[int][]byte
	toFetch   []int // with the handler, data at the host
	toFinish  []int // with the handler, complete
	fetching  []int // READs were asked for
	failed    map[int]bool
	lent      map[int][]byte // by the response's number
	zombies   []int
	held      [][]byte
	scarce    bool // no memory
	paused    bool
	lost      bool // memory cannot be located
	lazy      bool // completions are rarely polled

	// The devices.
	queue    []*request2 // not executed
	inQueue  []*request2 // whose places are taken
	finished []*request2 // executed, completion not seen
	sent     int         // Sink.Sent was called so often
	lastSent int
	closed   bool // nothing may be posted any more

	// The host.
	want     []byte // the disk as it should be
	commands map[uint16]*command
	keys     map[uint32]*command
	busy     map[int]bool // units of the disk that a command uses
	nextCID  uint16
	nextKey  uint32
	answered int
	issued   int
	unsure   bool // memory could not be located at some time
}

// command is one of the host's.
type command struct {
	request
	unit    int
	mem     []byte // the host's memory, unless the data is in the capsule
	old     []byte // what a Compare finds
	keyed   bool
	written int // bytes that came by WRITE
	fails   nvme.Status
	aborted bool
	pair    *command // of a fused one
	status  nvme.Status
	done    bool
}

const (
	unitBlocks = 16
	unitBytes  = unitBlocks * 512
	unitCount  = 12
)

func newWorld(t *rapid.T) *world {
	w := &world{t: t, bufs: map[int][]byte{}, failed: map[int]bool{}, lent: map[int][]byte{},
		commands: map[uint16]*command{},
		keys:     map[uint32]*command{}, busy: map[int]bool{}, disk: make([]byte, unitCount*unitBytes),
		want: make([]byte, unitCount*unitBytes)}
	w.cfg = config
	w.cfg.Entries = rapid.IntRange(2, 12).Draw(t, "entries")
	w.cfg.Sends = rapid.IntRange(3, 40).Draw(t, "sends")
	w.cfg.Reads = rapid.IntRange(1, 4).Draw(t, "reads")
	w.cfg.Inline = rapid.Bool().Draw(t, "inline")
	w.lazy = rapid.Bool().Draw(t, "lazy")
	w.pieces = rapid.IntRange(3, 16).Draw(t, "buffers")
	w.data = newArena(w.pieces*unitBytes, dataAddr, dataKey)
	for range w.pieces {
		w.free = append(w.free, w.data.take(unitBytes))
	}
	w.responses = newArena(rdma.ResponseBytes(w.cfg.Entries), responsesAddr, responsesKey)
	w.cfg.Responses, w.cfg.Addr, w.cfg.LKey = w.responses.b, w.responses.addr, w.responses.lkey
	w.c = rdma.New(w.cfg, w, w, &w.out)
	w.commands[0] = &command{}
	w.issued++
	if !w.c.Received(connectRequest(0, true).capsule()) {
		t.Fatal("Connect is not taken")
	}
	return w
}

// Handler and Sink.

func (w *world) Locate(b []byte) (addr uint64, lkey uint32, ok bool) {
	if w.lost {
		return 0, 0, false
	}
	addr, ok = w.data.locate(b)
	if !ok {
		w.t.Fatal("the machine looks for memory that it was not given")
	}
	return addr, w.data.lkey, true
}

func (w *world) Sent(number int) {
	w.sent++
	w.lastSent = number
	if b := w.lent[number]; b != nil {
		w.put(b)
		delete(w.lent, number)
	}
}

func (w *world) take() []byte {
	if len(w.free) == 0 {
		return nil
	}
	b := w.free[len(w.free)-1]
	w.free = w.free[:len(w.free)-1]
	return b
}

// put frees a piece and overwrites it, so that data still on its way to the host would be wrong.
func (w *world) put(b []byte) {
	if b == nil {
		return
	}
	for i := range b {
		b[i] = 0xDD
	}
	w.free = append(w.free, b)
}

func (w *world) Buffer(slot, n int) []byte {
	if !w.c.Connected() {
		w.bufs[slot] = w.take()
		return w.bufs[slot][:n]
	}
	if w.bufs[slot] != nil {
		w.t.Fatalf("slot %d has a buffer already", slot)
	}
	if w.scarce {
		return nil
	}
	b := w.take()
	if b == nil {
		return nil
	}
	w.bufs[slot] = b
	return b[:n]
}

func (w *world) Admin(slot int) {
	w.put(w.bufs[slot])
	delete(w.bufs, slot)
	w.c.Attach(qpairtest.IOQueue(w.cfg.Entries, false))
	w.c.Respond(slot, nvme.Success, 0)
}

func (w *world) Execute(slot int) {
	if w.c.Closed() {
		w.t.Fatal("a command after the end")
	}
	if w.c.NeedsFetch(slot) {
		w.toFetch = append(w.toFetch, slot)
	} else {
		w.toFinish = append(w.toFinish, slot)
	}
}

func (w *world) Fetched(slot int, ok bool) {
	complete := true
	if w.c.Pair(slot) >= 0 {
		slot, complete = w.c.PairFetched(slot)
	}
	if !ok {
		w.failed[slot] = true
	}
	if !complete {
		return
	}
	i := slices.Index(w.fetching, slot)
	if i < 0 {
		w.t.Fatalf("slot %d is fetched, and was not asked for or is for the second time", slot)
	}
	w.fetching = slices.Delete(w.fetching, i, i+1)
	w.toFinish = append(w.toFinish, slot)
}

func (w *world) Unused(slot int) {
	w.put(w.bufs[slot])
	delete(w.bufs, slot)
}

func (w *world) Failed(int, nvme.Status) {}

func (w *world) Paired(first, second int) {
	if b := w.bufs[first]; b != nil {
		w.bufs[second] = b
		delete(w.bufs, first)
	}
}

func (w *world) Paused() bool { return w.paused }

// What the target does.

// fetch asks for a command's data, if there is memory.
func (w *world) fetch(i int) {
	slot := w.toFetch[i]
	if w.bufs[slot] == nil {
		b := w.take()
		if b == nil {
			return
		}
		w.bufs[slot] = b
	}
	w.toFetch = slices.Delete(w.toFetch, i, i+1)
	w.fetching = append(w.fetching, slot)
	s, b := w.c.Slot(slot), w.bufs[slot]
	if w.c.Pair(slot) >= 0 {
		w.c.FetchPair(slot, b)
	} else {
		w.c.RequestData(slot, b[:s.Plan.ToController])
	}
}

// finish executes a command and answers it.
func (w *world) finish(i int) {
	slot := w.toFinish[i]
	s := w.c.Slot(slot)
	off := int(s.Plan.Offset - 1<<20)
	n := int(s.Plan.Len)
	if s.Plan.ToHost > 0 {
		b := w.take()
		if b == nil {
			return
		}
		w.toFinish = slices.Delete(w.toFinish, i, i+1)
		w.zombies = slices.DeleteFunc(w.zombies, func(z int) bool { return z == slot })
		copy(b, w.disk[off:off+n])
		if w.c.RespondData(slot, b[:n], 0) {
			w.lent[w.c.Last()] = b
		} else {
			w.put(b)
		}
		return
	}
	w.toFinish = slices.Delete(w.toFinish, i, i+1)
	b := w.bufs[slot]
	delete(w.bufs, slot)
	bad := w.failed[slot]
	delete(w.failed, slot)
	zombie := slices.Contains(w.zombies, slot)
	w.zombies = slices.DeleteFunc(w.zombies, func(z int) bool { return z == slot })
	first, status := w.c.Pair(slot), nvme.Success
	switch {
	case bad:
		status = nvme.TransientTransportError
	case zombie || n == 0:
	case first >= 0 && !bytes.Equal(b[:n], w.disk[off:off+n]):
		status = nvme.CompareFailure | nvme.DNR
	case first >= 0:
		copy(w.disk[off:], b[n:2*n])
	default:
		copy(w.disk[off:], b[:n])
	}
	w.put(b)
	if first >= 0 {
		w.c.Respond(first, status, 0)
		if !status.OK() {
			status = nvme.AbortedFailedFused | nvme.DNR
		}
	}
	w.c.Respond(slot, status, 0)
}

// What the devices do.

// What the host does.

// submit sends a command, or a fused pair.
func (w *world) submit() {
	t := w.t
	room := w.cfg.Entries - 1 - len(w.commands)
	unit := rapid.IntRange(0, unitCount-1).Draw(t, "unit")
	if room < 1 || w.busy[unit] {
		return
	}
	kind := rapid.SampledFrom([]string{"read", "write", "flush", "pair", "wrong"}).Draw(t, "kind")
	if kind == "pair" && room < 2 {
		return
	}
	w.busy[unit] = true
	blocks := rapid.IntRange(1, unitBlocks).Draw(t, "blocks")
	slba := uint64(unit * unitBlocks)
	n := blocks * 512
	off := unit * unitBytes
	random := func() []byte { return qpairtest.Pattern(rapid.IntRange(0, 255).Draw(t, "data"), n) }
	cmd := &command{unit: unit}
	cmd.slba, cmd.nlb, cmd.nsid, cmd.transfer = slba, uint32(blocks), 1, uint32(n)
	switch kind {
	case "read":
		cmd.op = nvme.CmdRead
		w.send(cmd, make([]byte, n), false)
	case "write":
		cmd.op = nvme.CmdWrite
		w.send(cmd, random(), true)
	case "flush":
		cmd.op, cmd.transfer = nvme.CmdFlush, 0
		w.send(cmd, nil, false)
	case "wrong":
		cmd.op, cmd.slba, cmd.fails = nvme.CmdWrite, 1<<20, nvme.LBAOutOfRange|nvme.DNR
		w.send(cmd, random(), true)
	case "pair":
		if n > int(qpairtest.Limits.FusedBytes) {
			n = 512
			cmd.nlb, cmd.transfer = 1, 512
		}
		second := &command{request: cmd.request, unit: unit, pair: cmd}
		cmd.op, cmd.fuse, cmd.pair = nvme.CmdCompare, nvme.FuseFirst, second
		second.op, second.fuse = nvme.CmdWrite, nvme.FuseSecond
		compare := slices.Clone(w.want[off : off+n])
		if rapid.IntRange(0, 3).Draw(t, "differs") == 0 {
			compare[n-1]++
		}
		w.send(cmd, compare, true)
		w.send(second, random(), true)
	}
}

// offer passes the waiting capsules to the machine.
func (w *world) offer() {
	for len(w.held) > 0 {
		b := w.held[0]
		if !w.c.Received(b) {
			return
		}
		for i := range b {
			b[i] = 0xDD // the receive is posted again
		}
		w.held = w.held[1:]
		w.post()
	}
}

// act performs one random step.
func (w *world) act() {
	t := w.t
	pick := func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "which") }
	switch rapid.IntRange(0, 20).Draw(t, "act") {
	case 0, 1, 2, 3, 4, 5:
		w.submit()
	case 6, 7, 8:
		if n := len(w.toFetch); n > 0 {
			w.fetch(pick(n))
		}
	case 9, 10, 11:
		if n := len(w.toFinish); n > 0 {
			w.finish(pick(n))
		}
	case 12, 13, 14:
		w.execute()
	case 15, 16:
		if w.lazy && rapid.IntRange(0, 19).Draw(t, "look") > 0 {
			break
		}
		w.poll(wr.StatusOK)
		w.post()
		w.offer()
	case 17:
		w.offer()
	case 18:
		w.scarce = !w.scarce
	case 19:
		w.paused = !w.paused
	case 20:
		if n := len(w.toFinish); n > 0 && rapid.Bool().Draw(t, "finishing") {
			w.abort(w.toFinish[pick(n)])
		} else if n := len(w.toFetch); n > 0 {
			w.abort(w.toFetch[pick(n)])
		}
	}
	w.post()
	if f := w.c.Fatal(); f != nil {
		t.Fatalf("the machine ends the connection: %v", f)
	}
	if w.c.Unsent() > w.issued {
		t.Fatalf("%d responses on their way, %d commands were sent", w.c.Unsent(), w.issued)
	}
}

// drain steps until everything has ended.
func (w *world) drain() {
	w.scarce, w.paused, w.lost = false, false, false
	for range 10_000 {
		if len(w.commands) == 0 && len(w.finished) == 0 && len(w.toFinish) == 0 && len(w.queue) == 0 {
			return
		}
		for i := len(w.toFinish) - 1; i >= 0; i-- {
			w.finish(i)
			w.post()
		}
		for i := len(w.toFetch) - 1; i >= 0; i-- {
			w.fetch(i)
			w.post()
		}
		w.execute()
		w.poll(wr.StatusOK)
		w.post()
		w.offer()
	}
	w.t.Fatalf("%d commands are never answered; %d to fetch, %d fetching, %d to finish, %d held, %d responses on "+
		"their way",
		len(w.commands), len(w.toFetch), len(w.fetching), len(w.toFinish), len(w.held), w.c.Unsent())
}

// TestEveryCommandIsAnsweredOnceWithTheRightData, whatever the delays, with a send queue, a READ limit and memory that
// are barely sufficient. No queue overflows.
func TestEveryCommandIsAnsweredOnceWithTheRightData(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		w.post()
		losable := rapid.Bool().Draw(t, "losable")
		for range rapid.IntRange(10, 300).Draw(t, "steps") {
			if losable && rapid.IntRange(0, 15).Draw(t, "lose") == 0 {
				w.lost = !w.lost
				w.unsure = true
			}
			w.act()
		}
		w.drain()
		if w.answered != w.issued || w.sent != w.issued {
			t.Fatalf("%d commands, %d answers, of %d the machine knows", w.issued, w.answered, w.sent)
		}
		if w.c.Unsent() != 0 || w.c.Outstanding() != 0 || w.c.AwaitedBytes() != 0 {
			t.Fatalf("%d responses on their way, %d commands outstanding, %d bytes awaited", w.c.Unsent(),
				w.c.Outstanding(), w.c.AwaitedBytes())
		}
		if len(w.free) != w.pieces {
			t.Fatalf("%d of %d buffers are back", len(w.free), w.pieces)
		}
		if !bytes.Equal(w.disk, w.want) {
			for i := range w.disk {
				if w.disk[i] != w.want[i] {
					t.Fatalf("byte %d of the disk is %#x, the host has written %#x", i, w.disk[i], w.want[i])
				}
			}
		}
	})
}

// TestALostConnectionPostsNothingMore and leaves nothing behind: every command returns to the driver or was answered,
// and responses whose completion was not seen are counted.
func TestALostConnectionPostsNothingMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		w.post()
		for range rapid.IntRange(0, 150).Draw(t, "steps") {
			w.act()
		}
		switch rapid.IntRange(0, 2).Draw(t, "how") {
		case 0:
			w.c.Close()
		case 1: // a work request fails
			for range rapid.IntRange(0, len(w.queue)).Draw(t, "executed") {
				w.execute()
			}
			for len(w.finished) > 1 {
				w.poll(wr.StatusOK)
				w.post()
			}
			w.poll(rapid.SampledFrom([]wr.Status{wr.StatusRemoteAccess, wr.StatusRNRExceeded, wr.StatusFlushed}).Draw(t,
				"status"))
			w.c.Close() // if there was none
		case 2: // the host breaks the rules
			w.held = nil
			if !w.c.Received(make([]byte, 10)) || w.c.Fatal() == nil {
				t.Fatal("a short capsule passes")
			}
		}
		w.closed = true
		w.post()
		// Posted work requests are flushed, now or later, or were completed just before.
		flush := func() {
			if len(w.finished) > 0 {
				w.poll(wr.StatusOK)
				return
			}
			if len(w.queue) > 0 {
				r := w.queue[0]
				w.queue = w.queue[1:]
				w.c.Completed(&wr.Completion{ID: r.ID, Status: wr.StatusFlushed, Op: r.Op})
			}
		}
		responses := w.c.Unsent()
		for range rapid.IntRange(0, 10).Draw(t, "flushed") {
			flush()
		}
		w.held = nil
		w.c.Received(request{op: nvme.CmdRead, cid: 9999, nsid: 1, nlb: 1, transfer: 512}.capsule())
		w.c.Fetching(func(slot int) {
			if p := w.c.Pair(slot); p >= 0 && w.c.Slot(slot).SQE.Fuse() == nvme.FuseFirst {
				slot = p
			}
			if i := slices.Index(w.fetching, slot); i >= 0 {
				w.fetching = slices.Delete(w.fetching, i, i+1)
				w.failed[slot] = true
				w.toFinish = append(w.toFinish, slot)
			}
		})
		if len(w.fetching) > 0 {
			t.Fatalf("slots %v are not back", w.fetching)
		}
		for _, slot := range w.toFetch {
			w.failed[slot] = true
		}
		w.toFinish = append(w.toFinish, w.toFetch...)
		w.toFetch = nil
		for len(w.toFinish) > 0 {
			if s := w.c.Slot(w.toFinish[0]); s.Plan.ToHost > 0 && len(w.free) == 0 {
				w.c.Respond(w.toFinish[0], nvme.TransientTransportError, 0)
				w.toFinish = w.toFinish[1:]
				continue
			}
			w.finish(0)
		}
		for len(w.finished)+len(w.queue) > 0 {
			flush()
		}
		w.post()
		if w.c.Unsent() > responses {
			t.Fatal("responses were made after the end")
		}
		if n := w.c.Outstanding(); n > 1 { // the first of a pair whose second has not come
			t.Fatalf("%d commands outstanding", n)
		}
		back := len(w.free) + len(w.lent) + len(w.bufs)
		if back != w.pieces || len(w.bufs) > 1 {
			t.Fatalf("of %d buffers %d are free, %d lent, %d with commands", w.pieces, len(w.free), len(w.lent),
				len(w.bufs))
		}
	})
}

var (
	_ qpair.Handler = (*world)(nil)
	_ rdma.Sink     = (*world)(nil)
)
