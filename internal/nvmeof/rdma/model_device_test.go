package rdma_test

import (
	"bytes"
	"fmt"
	"slices"

	"pgregory.net/rapid"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/wr"
)

// request2 is a work request in flight.
type request2 struct {
	wr.Send
	cqe nvme.CQE // of an inline SEND
}

// abort aborts a command that the handler has.
func (w *world) abort(slot int) {
	s := w.c.Slot(slot)
	if w.c.Pair(slot) >= 0 || slices.Contains(w.zombies, slot) {
		return
	}
	found, ok := w.c.Find(s.SQE.CID())
	if !ok || found != slot {
		w.t.Fatalf("cid %#x is found in slot %d (%t), is in %d", s.SQE.CID(), found, ok, slot)
	}
	w.commands[s.SQE.CID()].aborted = true
	w.c.Abort(slot, nvme.AbortRequested)
	if i := slices.Index(w.toFetch, slot); i >= 0 { // the drive would no longer request it
		w.toFetch = slices.Delete(w.toFetch, i, i+1)
		w.toFinish = append(w.toFinish, slot)
	}
	w.zombies = append(w.zombies, slot)
}

// post takes the work requests of the machine.
func (w *world) post() {
	sends := w.out.Sends
	if w.closed && len(sends) > 0 {
		w.t.Fatal("work requests after the end")
	}
	for i := range sends {
		r := &request2{Send: sends[i]}
		switch r.Op {
		case wr.OpWrite:
			if r.Flags != 0 {
				w.t.Fatal("a WRITE with flags")
			}
			if i+1 == len(sends) || sends[i+1].ID != r.ID || sends[i+1].Op == wr.OpWrite || sends[i+1].Op == wr.OpRead {
				w.t.Fatal("a WRITE without its SEND right behind")
			}
		case wr.OpRead:
			if r.Flags != wr.FlagSignaled {
				w.t.Fatal("a READ's flags")
			}
		default:
			if r.Flags&^wr.FlagInline != wr.FlagSignaled || r.Flags&wr.FlagInline != 0 != w.cfg.Inline {
				w.t.Fatal("a SEND's flags")
			}
			if w.cfg.Inline {
				copy(r.cqe[:], w.responses.at(r.Addr, r.Len, r.LKey))
			}
		}
		w.queue = append(w.queue, r)
		w.inQueue = append(w.inQueue, r)
	}
	w.out.Reset()
	reads := 0
	for _, r := range w.inQueue {
		if r.Op == wr.OpRead {
			reads++
		}
	}
	if len(w.inQueue) > w.cfg.Sends || reads > w.cfg.Reads {
		w.t.Fatalf("%d work requests are posted, %d READs; there is room for %d and %d", len(w.inQueue), reads,
			w.cfg.Sends, w.cfg.Reads)
	}
}

// execute executes the next work request.
func (w *world) execute() {
	if len(w.queue) == 0 {
		return
	}
	r := w.queue[0]
	w.queue = w.queue[1:]
	switch r.Op {
	case wr.OpWrite, wr.OpRead:
		b := w.data.at(r.Addr, r.Len, r.LKey)
		cmd := w.keys[r.RKey]
		if b == nil || cmd == nil || r.RemoteAddr != cmd.address || int(r.Len) != len(cmd.mem) {
			w.t.Fatalf("%d bytes, local %t, at %#x with key %#x", r.Len, b != nil, r.RemoteAddr, r.RKey)
		}
		if r.Op == wr.OpRead {
			copy(b, cmd.mem)
		} else {
			cmd.written += copy(cmd.mem, b)
		}
	default:
		e := r.cqe
		if !w.cfg.Inline {
			copy(e[:], w.responses.at(r.Addr, r.Len, r.LKey))
		}
		w.answer(&e, r.Op == wr.OpSendInvalidate, r.RKey)
	}
	if r.Flags&wr.FlagSignaled != 0 {
		w.finished = append(w.finished, r)
	}
}

// poll passes the next completion to the machine.
func (w *world) poll(status wr.Status) {
	if len(w.finished) == 0 {
		return
	}
	r := w.finished[0]
	w.finished = w.finished[1:]
	for w.inQueue[0] != r {
		w.inQueue = w.inQueue[1:]
	}
	w.inQueue = w.inQueue[1:]
	was := w.sent
	w.c.Completed(&wr.Completion{ID: r.ID, Status: status, Op: r.Op})
	if r.Op == wr.OpRead {
		if w.sent != was {
			w.t.Fatal("a READ is taken for a response")
		}
	} else if w.sent != was+1 || w.lastSent != int(uint16(r.ID)) {
		w.t.Fatalf("Sent was called %d times for a SEND, last for %d", w.sent-was, w.lastSent)
	}
}

// send makes the capsule of a command with its data, or room for it, and sends it.
func (w *world) send(cmd *command, mem []byte, toController bool) {
	w.nextCID++
	w.nextKey++
	cmd.cid, cmd.key, cmd.address = w.nextCID, w.nextKey, 0
	cmd.old = mem
	cmd.inline = toController && len(mem) <= config.InCapsuleBytes && rapid.Bool().Draw(w.t, "in-capsule")
	if cmd.inline {
		cmd.data = mem
	} else if mem != nil {
		cmd.keyed = true
		cmd.mem = slices.Clone(mem)
		cmd.address = uint64(cmd.key) << 16
		cmd.invalidate = rapid.Bool().Draw(w.t, "invalidate")
		w.keys[cmd.key] = cmd
	}
	w.commands[cmd.cid] = cmd
	w.issued++
	w.held = append(w.held, cmd.capsule())
	w.offer()
}

// answer is a response that has reached the host.
func (w *world) answer(e *nvme.CQE, invalidates bool, key uint32) {
	t := w.t
	cmd := w.commands[e.CID()]
	if cmd == nil {
		t.Fatalf("an answer to cid %#x, which is not outstanding", e.CID())
	}
	if invalidates != (cmd.keyed && cmd.invalidate) || invalidates && key != cmd.key {
		t.Fatalf("cid %#x: invalidates %t key %#x, the host wants %t %#x", e.CID(), invalidates, key, cmd.keyed &&
			cmd.invalidate, cmd.key)
	}
	delete(w.commands, e.CID())
	delete(w.keys, cmd.key)
	w.answered++
	cmd.status, cmd.done = e.Status(), true
	if err := w.judge(cmd); err != nil {
		t.Fatalf("cid %#x opcode %#x: %v", e.CID(), cmd.op, err)
	}
	if cmd.pair == nil || cmd.pair.done {
		delete(w.busy, cmd.unit)
	}
}

// judge checks a response, and records the effect of a write.
func (w *world) judge(cmd *command) error {
	s := cmd.status
	switch {
	case cmd.aborted && s == nvme.AbortRequested:
		return nil
	case w.unsure && s == nvme.TransientTransportError:
		return nil
	case s != cmd.fails && cmd.pair == nil:
		return fmt.Errorf("%v, want %v", s, cmd.fails)
	case !s.OK() && cmd.pair == nil:
		return nil
	}
	off := cmd.unit * unitBytes
	n := int(cmd.nlb) * 512
	switch {
	case cmd.pair != nil && cmd.fuse == nvme.FuseFirst:
		same := bytes.Equal(cmd.old, w.want[off:off+n])
		if s.OK() != same && !w.unsure || !s.OK() && s != nvme.CompareFailure|nvme.DNR {
			return fmt.Errorf("%v, same data %t", s, same)
		}
	case cmd.pair != nil:
		if !cmd.pair.done || s.OK() != cmd.pair.status.OK() || !s.OK() && s != nvme.AbortedFailedFused|nvme.DNR {
			return fmt.Errorf("%v, the first %v", s, cmd.pair.status)
		}
		if s.OK() {
			copy(w.want[off:], cmd.old)
		}
	case cmd.op == nvme.CmdRead:
		if cmd.written != n || !bytes.Equal(cmd.mem, w.want[off:off+n]) {
			return fmt.Errorf("wrong data, %d of %d bytes written", cmd.written, n)
		}
	case cmd.op == nvme.CmdWrite:
		copy(w.want[off:], cmd.old)
	}
	return nil
}
