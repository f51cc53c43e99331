package qpairtest

import (
	"fmt"
	"strings"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/qpair"
)

// Machine is the part of a transport's state machine that a Recorder calls.
type Machine interface {
	Slot(slot int) *qpair.Slot
	QID() uint16
	NeedsFetch(slot int) bool
	RequestData(slot int, buf []byte)
	Pair(slot int) int
	FetchPair(second int, buf []byte)
	PairFetched(slot int) (second int, complete bool)
	Respond(slot int, status nvme.Status, result uint64)
	RespondData(slot int, data []byte, result uint64) bool
}

// Recorder is a qpair.Handler that records its calls. It answers commands when the test says so, or at once.
type Recorder struct {
	// Machine is the machine that calls the Recorder.
	Machine Machine
	// Alloc returns memory for n bytes of data that the transport can reach.
	Alloc func(n int) []byte
	// Log has a line for each call since the test has reset it.
	Log strings.Builder
	// Refuse: Buffer finds no memory. Pause: Paused returns true.
	Refuse, Pause bool
	// Bufs are the buffers of slots that are in use.
	Bufs map[int][]byte
	// Auto answers commands at once, as a target with a very fast drive does.
	Auto bool
	// Given are the slots that the machine has given to the handler, unless Auto.
	Given []int
}

var _ qpair.Handler = (*Recorder)(nil)

// NewRecorder returns a Recorder whose Machine is still to be set.
func NewRecorder(alloc func(n int) []byte) *Recorder {
	return &Recorder{Alloc: alloc, Bufs: map[int][]byte{}}
}

// Say adds a line to the log.
func (r *Recorder) Say(format string, args ...any) { fmt.Fprintf(&r.Log, format+"\n", args...) }

// Buffer implements qpair.Handler.
func (r *Recorder) Buffer(slot, n int) []byte {
	if r.Refuse {
		return nil
	}
	if r.Bufs[slot] != nil {
		panic(fmt.Sprintf("slot %d has a buffer already", slot))
	}
	r.Bufs[slot] = r.Alloc(n)
	return r.Bufs[slot]
}

// Execute implements qpair.Handler.
func (r *Recorder) Execute(slot int) {
	s := r.Machine.Slot(slot)
	p := &s.Plan
	data := ""
	if b := r.Bufs[slot]; b != nil && s.Inline() {
		data = " data " + Sum(b)
	}
	fetch := r.Machine.NeedsFetch(slot)
	r.Say("execute slot %d cid %#x: %v offset %d len %d fetch %t%s", slot, s.SQE.CID(), p.Op, p.Offset, p.Len, fetch,
		data)
	switch {
	case !r.Auto:
		r.Given = append(r.Given, slot)
	case fetch:
		r.Fetch(slot)
	default:
		r.Finish(slot)
	}
}

// Fetch asks for a command's data.
func (r *Recorder) Fetch(slot int) {
	n := int(r.Machine.Slot(slot).Plan.ToController)
	if r.Machine.Pair(slot) >= 0 {
		if r.Bufs[slot] == nil {
			r.Bufs[slot] = r.Alloc(2 * n)
		}
		r.Machine.FetchPair(slot, r.Bufs[slot])
		return
	}
	r.Bufs[slot] = r.Alloc(n)
	r.Machine.RequestData(slot, r.Bufs[slot])
}

// Finish answers a command with success, and with data if it wants any. The answer of a command for keys and values
// fills half of the host's buffer.
func (r *Recorder) Finish(slot int) {
	s := r.Machine.Slot(slot)
	delete(r.Bufs, slot)
	n, result := int(s.Plan.ToHost), uint64(0)
	if p := s.Plan; p.Kind == nvmeof.KindKV {
		if n = 0; p.AnswerBytes > 1 {
			n, result = int(p.AnswerBytes/2), uint64(p.AnswerBytes)
		}
	}
	if n > 0 {
		data := r.Alloc(n)
		copy(data, Pattern(int(s.SQE.CID()), n))
		r.Machine.RespondData(slot, data, result)
		return
	}
	if first := r.Machine.Pair(slot); first >= 0 {
		r.Machine.Respond(first, nvme.Success, 0)
	}
	r.Machine.Respond(slot, nvme.Success, 0)
}

// Admin implements qpair.Handler.
func (r *Recorder) Admin(slot int) {
	s := r.Machine.Slot(slot)
	data := ""
	if len(s.Data) > 0 {
		data = " data " + Sum(r.Bufs[slot])
	}
	r.Say("admin slot %d cid %#x: opcode %#x fctype %d%s", slot, s.SQE.CID(), s.SQE.Opcode(), s.SQE.FCTYPE(), data)
	if r.Auto {
		delete(r.Bufs, slot)
		r.Machine.Respond(slot, nvme.Success, 7)
	} else {
		r.Given = append(r.Given, slot)
	}
}

// Fetched implements qpair.Handler.
func (r *Recorder) Fetched(slot int, ok bool) {
	more := ""
	exec := slot
	complete := true
	if r.Machine.Pair(slot) >= 0 {
		exec, complete = r.Machine.PairFetched(slot)
		more = fmt.Sprintf(", pair of slot %d complete %t", exec, complete)
	}
	r.Say("fetched slot %d ok %t%s data %s", slot, ok, more, Sum(r.Bufs[exec]))
	if s := r.Machine.Slot(slot); s.SQE.Opcode() == nvme.OpFabrics || r.Machine.QID() == 0 {
		switch {
		case ok:
			r.Admin(slot)
		case r.Auto:
			delete(r.Bufs, slot)
			r.Machine.Respond(slot, nvme.TransientTransportError, 0)
		default:
			r.Given = append(r.Given, slot)
		}
		return
	}
	if r.Auto && complete {
		r.Finish(exec)
	}
}

// Unused implements qpair.Handler.
func (r *Recorder) Unused(slot int) {
	if r.Bufs[slot] != nil {
		r.Say("unused buffer of slot %d", slot)
	}
	delete(r.Bufs, slot)
}

// Failed implements qpair.Handler.
func (r *Recorder) Failed(slot int, status nvme.Status) { r.Say("failed slot %d: %v", slot, status) }

// Paired implements qpair.Handler.
func (r *Recorder) Paired(first, second int) {
	r.Say("paired slots %d and %d", first, second)
	if !r.Auto {
		r.Given = append(r.Given, first)
	}
	if b := r.Bufs[first]; b != nil {
		r.Bufs[second] = b
		delete(r.Bufs, first)
	}
}

// Paused implements qpair.Handler.
func (r *Recorder) Paused() bool { return r.Pause }
