package serve_test

import (
	"bytes"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/serve"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/units"
)

// half returns one half of a fused pair on one block.
func half(fuse nvme.Fuse, lba units.LBA) (e nvme.SQE) {
	e.SetOpcode(nvme.CmdWrite)
	if fuse == nvme.FuseFirst {
		e.SetOpcode(nvme.CmdCompare)
	}
	e.SetFuse(fuse)
	e.SetNSID(1)
	e.SetSLBA(lba)
	e.SetNLB(1)
	return e
}

// sendHalf sends a half, with its data in the capsule or to be requested. The Compare is with zeroes.
func (q *rawQueue) sendHalf(fuse nvme.Fuse, lba units.LBA, fill byte, inCapsule bool) (cid uint16) {
	q.t.Helper()
	if !inCapsule {
		return q.sendToFetch(half(fuse, lba), blockBytes)
	}
	return q.send(half(fuse, lba), bytes.Repeat([]byte{fill}, blockBytes))
}

func (q *rawQueue) status(cid uint16) nvme.Status {
	e := q.answers[cid]
	return e.Status()
}

// TestHalvesOfAPairMayUseDifferentTransfers: in-capsule or by R2T, each of them.
func TestHalvesOfAPairMayUseDifferentTransfers(t *testing.T) {
	r := newRig(t, nil)
	q := r.raw(t).queue(1)
	for i, way := range [][2]bool{{true, true}, {true, false}, {false, true}, {false, false}} {
		lba, fill := units.LBA(i), byte(i+1)
		first := q.sendHalf(nvme.FuseFirst, lba, 0, way[0])
		second := q.sendHalf(nvme.FuseSecond, lba, fill, way[1])
		for !q.answered(first) || !q.answered(second) {
			if err := q.receive(); err != nil {
				t.Fatal(err)
			}
			for len(q.r2ts) > 0 {
				data := fill
				if q.r2ts[0].CCCID() == first {
					data = 0
				}
				q.answer(data)
			}
		}
		if a, b := q.status(first), q.status(second); !a.OK() || !b.OK() {
			t.Errorf("in-capsule %v: %v, %v", way, a, b)
		}
	}
	if got := r.blocks(t, 4); !bytes.Equal(got, []byte{1, 2, 3, 4}) {
		t.Errorf("blocks: %v", got)
	}
}

// TestAPairThatStallsIsCutOff, whichever part of it is missing, because it holds memory.
func TestAPairThatStallsIsCutOff(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		send func(q *rawQueue)
	}{
		{"the second does not come", func(q *rawQueue) { q.sendHalf(nvme.FuseFirst, 0, 0, true) }},
		{"the data of the second does not come", func(q *rawQueue) {
			q.sendHalf(nvme.FuseFirst, 0, 0, true)
			q.sendHalf(nvme.FuseSecond, 0, 1, false)
		}},
		{"the data of the first does not come", func(q *rawQueue) {
			q.sendHalf(nvme.FuseFirst, 0, 0, false)
			q.sendHalf(nvme.FuseSecond, 0, 1, true)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, func(c *serve.Config) { c.StallTimeout = 100 * time.Millisecond })
			before := inUse(r.Pool)
			q := r.raw(t).queue(1)
			c.send(q)
			q.ended()
			await(t, "its memory is free", func() bool { return inUse(r.Pool) <= before })
		})
	}
}

// TestAMixedPairNeverStopsAConnection: all memory that the host may have is held by writes whose data comes behind the
// pair. So the half in the capsule has a buffer beyond the bound, and a capsule behind the pair needs one, too. Every
// command is answered; the host may have to repeat the pair.
func TestAMixedPairNeverStopsAConnection(t *testing.T) {
	t.Parallel()
	for _, firstInCapsule := range []bool{true, false} {
		r := newRig(t, nil) // with a short StallTimeout a slow host would be cut off
		q := r.raw(t).queue(1)
		const large, count = 1 << 20, 40
		var write nvme.SQE
		write.SetOpcode(nvme.CmdWrite)
		write.SetNSID(1)
		write.SetSLBA(1024)
		write.SetNLB(large / blockBytes)
		cids := map[uint16]bool{}
		for range count {
			cids[q.sendToFetch(write, large)] = true
		}
		await(t, "the host has all memory that it may have", func() bool { return r.Pool.Stats().Waits > 0 })
		first := q.sendHalf(nvme.FuseFirst, 0, 0, firstInCapsule)
		second := q.sendHalf(nvme.FuseSecond, 0, 1, !firstInCapsule)
		small := q.writeBlock(1, 7)
		for _, cid := range []uint16{first, second, small} {
			cids[cid] = true
		}
		for len(cids) > 0 {
			if err := q.receive(); err != nil {
				t.Fatalf("first in-capsule %v: with %d commands to be answered: %v", firstInCapsule, len(cids), err)
			}
			for len(q.r2ts) > 0 {
				fill := byte(1)
				if q.r2ts[0].CCCID() == first {
					fill = 0
				}
				q.answer(fill)
			}
			for cid := range q.answers {
				delete(cids, cid)
			}
		}
		a, b := q.status(first), q.status(second)
		if done := a.OK() && b.OK(); !done && (a != nvme.CommandInterrupted || b != nvme.CommandInterrupted) {
			t.Errorf("first in-capsule %v: the pair ended with %v and %v", firstInCapsule, a, b)
		}
		if s := q.status(small); !s.OK() {
			t.Errorf("first in-capsule %v: the write behind the pair: %v", firstInCapsule, s)
		}
	}
}

// TestAPairWithADamagedHalfChangesNothing, whichever half, and in whichever order they come.
func TestAPairWithADamagedHalfChangesNothing(t *testing.T) {
	r := newRig(t, nil)
	h := r.rawIdle(t)
	h.digest = true
	if s := h.connectAdmin(0); !s.OK() {
		t.Fatal(s)
	}
	h.setCC(rawEnable)
	q := h.queue(1)
	for damaged := range 2 {
		first := q.sendHalf(nvme.FuseFirst, 0, 0, false)
		second := q.sendHalf(nvme.FuseSecond, 0, 9, false)
		for len(q.r2ts) < 2 {
			if err := q.receive(); err != nil {
				t.Fatal(err)
			}
		}
		for i := range uint32(2) {
			fill := byte(9)
			if q.r2ts[0].CCCID() == first {
				fill = 0
			}
			wrong := uint32(0)
			if int(i) == damaged {
				wrong = 1
			}
			q.answerWith(fill, wrong)
		}
		q.wait(first)
		q.wait(second)
		if a, b := q.status(first), q.status(second); a != nvme.TransientTransportError ||
			b.Code() != nvme.AbortedFailedFused {
			t.Errorf("with damage in half %d: %v, %v", damaged, a, b)
		}
	}
	if got := r.blocks(t, 1); got[0] != 0 {
		t.Errorf("the block is %d", got[0])
	}
}

// TestAnAbortRemovesAPair: the pair waits for an earlier write of its block. Whichever of its commands the Abort names
// and however their data was transferred, both are answered and nothing is written.
func TestAnAbortRemovesAPair(t *testing.T) {
	r, dev := heldRig(t, fault.Rule{Ops: []ssd.Op{ssd.Write}, Offset: 0, Len: blockBytes, Hold: true})
	h := r.raw(t)
	q := h.queue(1)
	before := q.writeBlock(0, 'w')
	awaitHeld(t, dev, 1)
	for _, c := range []struct{ byFirst, firstIn, secondIn bool }{
		{true, true, true}, {false, true, true}, {true, false, false}, {false, false, false}, {true, false, true},
		{true, true, false},
	} {
		first, second := q.sendHalf(nvme.FuseFirst, 0, 'w', c.firstIn), q.sendHalf(nvme.FuseSecond, 0, 'p', c.secondIn)
		for _, in := range []bool{c.firstIn, c.secondIn} {
			for !in && len(q.r2ts) == 0 {
				if err := q.receive(); err != nil {
					t.Fatal(err)
				}
			}
			if !in {
				q.answer('w')
			}
		}
		if e := q.wait(q.writeBlock(1, 0)); !e.Status().OK() { // the drive has the pair by now
			t.Fatal(e.Status())
		}
		var e nvme.SQE
		e.SetOpcode(nvme.AdminAbort)
		e.Abort().SetSQID(1)
		e.Abort().SetCID(second)
		if c.byFirst {
			e.Abort().SetCID(first)
		}
		if got := h.admin.do(e); !got.Status().OK() || got.Result64() != 0 {
			t.Fatalf("%+v: Abort: %v, result %d", c, got.Status(), got.Result64())
		}
		a, b := q.wait(first), q.wait(second)
		if a.Status() != nvme.AbortRequested || b.Status() != nvme.AbortRequested {
			t.Errorf("%+v: %v, %v", c, a.Status(), b.Status())
		}
	}
	dev.SetRules()
	dev.Release()
	if e := q.wait(before); !e.Status().OK() {
		t.Errorf("the write before: %v", e.Status())
	}
	if got := r.blocks(t, 1); got[0] != 'w' {
		t.Errorf("block 0 is %q", got)
	}
}
