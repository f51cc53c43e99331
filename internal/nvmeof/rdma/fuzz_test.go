package rdma_test

import (
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/qpair/qpairtest"
	"jbofd/internal/nvmeof/rdma/wr"
)

// Instructions of FuzzConn's programs.
const (
	doCapsule    = iota // length (2 bytes), the capsule
	doComplete          // the next posted work request completes
	doFail              // status (1 byte): the next one fails
	doCompletion        // kind (1), generation (2), index (2), status (1): a completion of anything
	doAnswer            // which (1): the driver answers a command that it has
	doError             // which (1): with an error
	doFetch             // which (1): the driver requests the command's data
	doAbort             // which (1)
	doMemory            // memory is short, and no longer
	doLocate            // memory cannot be located, and can again
	doPause             // no commands are wanted, and are again
	doTable             // the namespaces change
	doClose
	instructions
)

// program has the remaining instructions of FuzzConn.
type program []byte

func (p *program) byte() (b byte) {
	if len(*p) > 0 {
		b = (*p)[0]
		*p = (*p)[1:]
	}
	return b
}

func (p *program) uint16() uint16 { return uint16(p.byte()) | uint16(p.byte())<<8 }

// capsule appends an instruction.
func (p *program) capsule(b []byte) {
	*p = binary.LittleEndian.AppendUint16(append(*p, doCapsule), uint16(len(b)))
	*p = append(*p, b...)
}

func (p *program) bytes(n int) []byte {
	n = min(n, len(*p))
	b := slices.Clone((*p)[:n])
	*p = (*p)[n:]
	return b
}

// fuzzed is a driver that executes a program.
type fuzzed struct {
	*driver
	forged  bool
	aborted []int // slots, answered by Abort
}

// pick chooses a command that the driver has; of a pair, the one that represents both.
func (f *fuzzed) pick(which byte) (slot int, ok bool) {
	if len(f.Given) == 0 {
		return 0, false
	}
	slot = f.Given[int(which)%len(f.Given)]
	p := f.c.Pair(slot)
	if p >= 0 && f.c.Slot(slot).SQE.Fuse() == nvme.FuseFirst {
		slot, p = p, slot
	}
	if f.c.Slot(slot).Fetching() || p >= 0 && f.c.Slot(p).Fetching() {
		return 0, false
	}
	return slot, true
}

// gone removes a command that the driver has answered.
func (f *fuzzed) gone(slot int) {
	is := func(s int) bool { return s == slot }
	f.Given, f.aborted = slices.DeleteFunc(f.Given, is), slices.DeleteFunc(f.aborted, is)
	delete(f.Bufs, slot)
}

func (f *fuzzed) answer(slot int, status nvme.Status) {
	s := f.c.Slot(slot)
	first := f.c.Pair(slot)
	switch {
	case !f.c.Connected() && status.OK():
		f.gone(slot)
		f.c.Attach(qpairtest.IOQueue(6, false))
		f.c.Respond(slot, nvme.Success, 1)
		return
	case status.OK() && first < 0 && s.Data == nil && f.Bufs[slot] != nil: // admin data to the host
		b := f.Bufs[slot]
		f.gone(slot)
		f.c.RespondData(slot, b, 3)
		return
	// less than there is room for
	case status.OK() && first < 0 && s.Plan.Kind == nvmeof.KindKV && s.Plan.AnswerBytes > 1:
		f.gone(slot)
		f.c.RespondData(slot, f.data.take(int(s.Plan.AnswerBytes/2)), 3)
		return
	case status.OK() && first < 0 && s.Plan.ToHost > 0 && s.Plan.Kind != nvmeof.KindKV:
		f.gone(slot)
		f.c.RespondData(slot, f.data.take(int(s.Plan.ToHost)), 3)
		return
	case first >= 0:
		f.gone(first)
		f.c.Respond(first, status, 0)
	}
	f.gone(slot)
	f.c.Respond(slot, status, 0)
}

// do executes one instruction.
func (f *fuzzed) do(p *program) {
	switch p.byte() % instructions {
	case doCapsule:
		if n := int(p.uint16()); len(f.held) < 8 {
			f.receive(p.bytes(n))
		}
	case doComplete:
		f.complete(wr.StatusOK)
		f.offer()
	case doFail:
		f.complete(wr.Status(p.byte()%21 + 1))
	case doCompletion:
		f.forged = true
		id := uint64(p.byte())<<32 | uint64(p.uint16())<<16 | uint64(p.uint16())
		f.c.Completed(&wr.Completion{ID: id, Status: wr.Status(p.byte() % 22)})
	case doAnswer:
		if slot, ok := f.pick(p.byte()); ok {
			f.answer(slot, nvme.Success)
		}
	case doError:
		if slot, ok := f.pick(p.byte()); ok {
			f.answer(slot, nvme.InternalError)
		}
	case doFetch:
		// The data of a command is requested once, when it has no buffer.
		if slot, ok := f.pick(p.byte()); ok && !slices.Contains(f.aborted, slot) && f.c.Connected() && f.c.QID() != 0 &&
			f.c.NeedsFetch(slot) && f.c.Slot(slot).Data == nil {
			if pair := f.c.Pair(slot); pair < 0 || f.c.Slot(pair).Data == nil || f.c.Slot(pair).Inline() {
				f.Fetch(slot)
			}
		}
	case doAbort:
		if slot, ok := f.pick(p.byte()); ok && f.c.Pair(slot) < 0 {
			if found, ok := f.c.Find(f.c.Slot(slot).SQE.CID()); ok && found == slot {
				f.c.Abort(slot, nvme.AbortRequested)
				f.aborted = append(f.aborted, slot)
			}
		}
	case doMemory:
		f.Refuse = !f.Refuse
		f.offer()
	case doLocate:
		f.lost = !f.lost
	case doPause:
		f.Pause = !f.Pause
		f.offer()
	case doTable:
		f.c.SetTable(nvmeof.NewNamespaceTable([]*nvmeof.Namespace{{NSID: 1, OffsetBytes: 8 << 20, SizeBytes: 1 << 20,
			BlockShift: 12, ANAState: nvme.ANAStateOptimized}}, qpairtest.HostNQN))
	case doClose:
		f.c.Close()
	}
}

// FuzzConn executes a program that acts as the host, the device and the driver: it sends arbitrary capsules and real
// and forged completions, and answers commands in any order. The bits of flags: 0 the admin queue, 1 not connected yet,
// 2 no flow control, 3 three places in the send queue, 4 one READ at a time, 5 an entry is not taken inside its work
// request.
func FuzzConn(f *testing.F) {
	capsule := func(rs ...request) (p program) {
		for _, r := range rs {
			p.capsule(r.capsule())
		}
		return p
	}
	write := request{op: nvme.CmdWrite, cid: 1, nsid: 1, nlb: 1, inline: true, transfer: 512,
		data: qpairtest.Pattern(1, 512)}
	keyed := request{op: nvme.CmdWrite, cid: 2, nsid: 1, nlb: 1, transfer: 512, key: 2, address: 0xA000}
	read := request{op: nvme.CmdRead, cid: 3, nsid: 2, nlb: 1, transfer: 4096, key: 3, address: 0xB000,
		invalidate: true}
	first := request{op: nvme.CmdCompare, cid: 4, nsid: 1, nlb: 1, transfer: 512, key: 4, fuse: nvme.FuseFirst}
	second := request{op: nvme.CmdWrite, cid: 5, nsid: 1, nlb: 1, inline: true, transfer: 512,
		data: qpairtest.Pattern(5, 512), fuse: nvme.FuseSecond}
	keyedSecond := first
	keyedSecond.op, keyedSecond.cid, keyedSecond.fuse = nvme.CmdWrite, 6, nvme.FuseSecond
	dsm := request{op: nvme.CmdDSM, cid: 7, nsid: 1, inline: true, transfer: 16, data: make([]byte, 16)}
	store, keyedStore, retrieve := kvRequest(nvme.CmdKVStore, 10, 300), kvRequest(nvme.CmdKVStore, 11, 5000),
		kvRequest(nvme.CmdKVRetrieve, 12, 1000)
	store.inline, store.data = true, qpairtest.Pattern(7, 300)
	keyedStore.key, retrieve.key, retrieve.invalidate = 11, 12, true
	identify := request{op: nvme.AdminIdentify, cid: 8, transfer: 4096, key: 8}
	timestamp := request{op: nvme.AdminSetFeatures, cid: 9, transfer: 8, key: 9,
		change: func(e *nvme.SQE) { e.Features().SetFID(nvme.FIDTimestamp) }}
	f.Add(uint8(0), []byte(append(capsule(write, read, dsm), doAnswer, 0, doAnswer, 0, doComplete, doAnswer, 0,
		doComplete, doComplete)))
	f.Add(uint8(0), []byte(append(capsule(keyed, read), doFetch, 0, doComplete, doAnswer, 0, doAnswer, 0, doFail, 9,
		doComplete)))
	f.Add(uint8(0), []byte(append(capsule(store, retrieve, keyedStore), doAnswer, 0, doAnswer, 0, doFetch, 0,
		doComplete, doComplete, doComplete, doAnswer, 0)))
	f.Add(uint8(24), []byte(append(capsule(keyed, keyed, read, read), doFetch, 0, doFetch, 1, doAnswer, 3, doAnswer, 2,
		doComplete, doComplete, doAnswer, 0)))
	f.Add(uint8(16), []byte(append(capsule(first, keyedSecond, first, second), doLocate, doFetch, 0, doAnswer, 0,
		doFetch, 0, doLocate, doComplete, doAnswer, 0)))
	f.Add(uint8(8), []byte(append(capsule(first, keyedSecond), doFetch, 0, doComplete, doClose, doComplete, doAnswer,
		0)))
	f.Add(uint8(0), []byte(append(capsule(read, read), doAbort, 0, doAnswer, 1, doAnswer, 0, doComplete, doComplete)))
	f.Add(uint8(0), []byte(append(capsule(keyed), doFetch, 0, doCompletion, 2, 1, 0, 0, 0, 0, doCompletion, 1, 1, 0, 0,
		0, 5, doComplete)))
	f.Add(uint8(1), []byte(append(capsule(identify, timestamp), doAnswer, 0, doComplete, doComplete, doAnswer, 0,
		doComplete)))
	f.Add(uint8(2), []byte(append(append(capsule(connectRequest(0, false)), doComplete, doAnswer, 0),
		capsule(read, write)...)))
	f.Add(uint8(2), []byte(append(append(capsule(read, connectRequest(0, true)), doAnswer, 0),
		capsule(connectRequest(3, true), read)...)))
	f.Add(uint8(0), []byte(append(append(append([]byte{doMemory}, capsule(write, first, second)...), doMemory, doTable),
		capsule(second, read, first)...)))
	f.Fuzz(func(t *testing.T, flags uint8, p []byte) { play(t, flags, p) })
}

// play runs a program; see FuzzConn.
func play(t interface {
	Fatal(...any)
	Fatalf(string, ...any)
}, flags uint8, p program) {
	cfg := config
	cfg.Entries = 6
	if flags&8 != 0 {
		cfg.Sends = 3
	}
	if flags&16 != 0 {
		cfg.Reads = 1
	}
	cfg.Inline = flags&32 == 0
	d := &fuzzed{driver: newDriver(cfg)}
	d.data = newArena(128<<10, dataAddr, dataKey)
	d.data.reuse = true
	queue := qpairtest.IOQueue(6, flags&4 != 0)
	if flags&1 != 0 {
		queue.QID, queue.Table = 0, nil
	}
	if flags&2 == 0 {
		d.attach(queue)
	}
	for len(p) > 0 {
		was := d.c.Closed()
		d.do(&p)
		if was && len(d.out.Sends) > 0 {
			t.Fatal("work requests after the end")
		}
		if s := d.put(); strings.Contains(s, "BROKEN") {
			t.Fatal(s)
		}
		reads := 0
		for i := range d.posted {
			if d.posted[i].Op == wr.OpRead {
				reads++
			}
		}
		if !d.forged && (len(d.posted) > cfg.Sends || reads > cfg.Reads) {
			t.Fatalf("%d work requests are posted, %d READs; there is room for %d and %d", len(d.posted), reads,
				cfg.Sends, cfg.Reads)
		}
		if n := d.c.Outstanding(); n < 0 || n > cfg.Entries {
			t.Fatalf("%d commands outstanding", n)
		}
		if d.c.Fatal() != nil && !d.c.Closed() {
			t.Fatal("a reason without being closed")
		}
		d.Log.Reset()
	}
	// Every slot is conserved: when all that the driver has and all that waits for data is
	// answered, at most the first of a fused pair is left.
	closed := d.c.Closed()
	for !closed && d.complete(wr.StatusOK) {
		d.post()
	}
	d.c.Fetching(func(slot int) {
		for _, i := range []int{slot, d.c.Pair(slot)} {
			if i >= 0 && !slices.Contains(d.Given, i) {
				d.Given = append(d.Given, i)
			}
		}
	})
	for len(d.Given) > 0 {
		slot, ok := d.pick(0)
		if !ok {
			t.Fatalf("slot %d is with the machine still", d.Given[0])
		}
		d.answer(slot, nvme.TransientTransportError)
	}
	for d.post(); !closed && d.complete(wr.StatusOK); d.post() {
	}
	if n := d.c.Outstanding(); n > 1 {
		t.Fatalf("%d commands outstanding after all were answered", n)
	}
	if n := d.c.Unsent(); n != 0 && !closed && !d.forged {
		t.Fatalf("%d responses never reach the host", n)
	}
}

// TestAHostileHostBreaksNothing: nearly valid commands, in any number and order, with a driver and a device that also
// act in any order.
func TestAHostileHostBreaksNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var p program
		rare := rapid.IntRange(0, 60)
		forged := rapid.Bool().Draw(t, "forged")
		idle := rapid.IntRange(0, 3).Draw(t, "idle") == 0 // the device does nothing
		for range rapid.IntRange(1, 300).Draw(t, "instructions") {
			switch i := rapid.IntRange(0, 24).Draw(t, "instruction"); i {
			case doAnswer, doError, doFetch, doAbort, doMemory, doLocate, doPause:
				p = append(p, byte(i), rapid.Byte().Draw(t, "which"))
			case doCompletion:
				if forged {
					p = append(p, doCompletion, byte(rapid.IntRange(1, 2).Draw(t, "kind")),
						byte(rapid.IntRange(0, 3).Draw(t, "generation")), 0,
						byte(rapid.IntRange(0, 30).Draw(t, "index")), 0,
						byte(rapid.SampledFrom([]int{0, 0, 0, 0, 5, 10}).Draw(t, "status")))
				}
			case doFail, doClose, doTable:
				if rare.Draw(t, "rare") == 0 {
					p = append(p, byte(i), rapid.Byte().Draw(t, "status"))
				}
			case doComplete, 13, 14, 15:
				if !idle {
					p = append(p, doComplete)
				}
			case 16, 17:
				p = append(p, doAnswer, rapid.Byte().Draw(t, "which"))
			case 18, 19:
				p = append(p, doFetch, rapid.Byte().Draw(t, "which"))
			default:
				p.capsule(hostile(t))
			}
		}
		play(t, rapid.Byte().Draw(t, "flags"), p)
	})
}

// hostile returns the capsule of a command that a malicious host could send.
func hostile(t *rapid.T) []byte {
	rare := rapid.IntRange(0, 40)
	if rare.Draw(t, "connect") == 1 {
		return connectRequest(uint16(rapid.IntRange(0, 3).Draw(t, "cid")), rapid.Bool().Draw(t, "inline")).capsule()
	}
	if rapid.IntRange(0, 3).Draw(t, "keys and values") == 0 {
		return hostileKV(t)
	}
	r := request{cid: uint16(rapid.IntRange(0, 3).Draw(t, "cid")), nsid: rapid.Uint32Range(1, 3).Draw(t, "nsid"),
		slba: rapid.Uint64Range(0, 2).Draw(t, "slba"),
		nlb:  rapid.Uint32Range(1, 2).Draw(t, "nlb"), inline: rapid.Bool().Draw(t, "inline"),
		invalidate: rapid.Bool().Draw(t, "invalidate"),
		key:        rapid.Uint32Range(0, 3).Draw(t, "key"),
		fuse:       nvme.Fuse(rapid.SampledFrom([]int{0, 0, 1, 1, 1, 2, 2, 2, 3}).Draw(t, "fuse")),
		op: rapid.SampledFrom([]uint8{nvme.CmdRead, nvme.CmdWrite, nvme.CmdCompare, nvme.CmdFlush, nvme.CmdDSM,
			nvme.AdminIdentify, nvme.AdminSetFeatures, 0x7e}).Draw(t, "op")}
	if r.fuse == nvme.FuseFirst && rare.Draw(t, "other first") != 1 {
		r.op = nvme.CmdCompare
	}
	if r.fuse == nvme.FuseSecond && rare.Draw(t, "other second") != 1 {
		r.op = nvme.CmdWrite
	}
	r.transfer = r.nlb << 9
	switch {
	case r.op == nvme.CmdDSM:
		r.transfer = rapid.SampledFrom([]uint32{0, 16, 32, 4096, 8192}).Draw(t, "transfer")
	case r.op == nvme.AdminIdentify || r.nsid == 2:
		r.transfer = r.nlb << 12
	}
	if rare.Draw(t, "wrong length") == 1 {
		r.transfer += 3
	}
	if r.inline && r.transfer <= uint32(config.InCapsuleBytes) {
		r.data = qpairtest.Pattern(int(r.cid), int(r.transfer))
	}
	b := r.capsule()
	if rare.Draw(t, "cut") == 1 {
		b = b[:rapid.IntRange(0, len(b)).Draw(t, "bytes")]
	}
	return b
}

// kvRequest is a command to the namespace of keys and values; n is the length of the value or the buffer.
func kvRequest(op uint8, cid uint16, n uint32) request {
	return request{op: op, cid: cid, nsid: 4, transfer: n, change: func(e *nvme.SQE) {
		sgl, fuse := *e.SGL(), e.Fuse()
		*e.KV() = nvme.KVSQE{}
		e.SetOpcode(op)
		e.SetCID(cid)
		e.SetNSID(4)
		e.SetFuse(fuse)
		e.SetPSDT(nvme.PSDTSGL)
		*e.SGL() = sgl
		e.KV().SetKey([]byte("key"))
		e.KV().SetLenBytes(n)
	}}
}

// hostileKV is hostile for a key-value command.
func hostileKV(t *rapid.T) []byte {
	op := rapid.SampledFrom([]uint8{nvme.CmdKVStore, nvme.CmdKVStore, nvme.CmdKVRetrieve, nvme.CmdKVList,
		nvme.CmdKVDelete, nvme.CmdKVExist}).Draw(t, "op")
	n := rapid.SampledFrom([]uint32{0, 1, 4, 100, 512, 4096, 16 << 10, 16<<10 + 1, 1<<24 - 1}).Draw(t, "length")
	r := kvRequest(op, uint16(rapid.IntRange(0, 3).Draw(t, "cid")), n)
	rare := rapid.IntRange(0, 30)
	r.inline, r.invalidate = op == nvme.CmdKVStore && rapid.Bool().Draw(t, "inline"), rapid.Bool().Draw(t, "invalidate")
	if rare.Draw(t, "fused") == 1 {
		r.fuse = nvme.Fuse(rapid.IntRange(1, 3).Draw(t, "fuse"))
	}
	if rare.Draw(t, "wrong length") == 1 {
		r.transfer += 3
	}
	if r.inline && r.transfer <= uint32(config.InCapsuleBytes) {
		r.data = qpairtest.Pattern(int(r.cid), int(r.transfer))
	}
	set := r.change
	r.change = func(e *nvme.SQE) {
		set(e)
		if rare.Draw(t, "wrong key") == 1 {
			e.KV().SetKeyLen(rapid.Byte().Draw(t, "key length"))
		}
		if rare.Draw(t, "wrong options") == 1 {
			e.KV().SetOptions(rapid.Byte().Draw(t, "options"))
		}
	}
	return r.capsule()
}
