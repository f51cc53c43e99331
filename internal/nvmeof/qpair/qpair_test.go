package qpair_test

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/qpair"
)

const hostNQN = "nqn.2014-08.org.nvmexpress:uuid:aaaaaaaa-0000-0000-0000-000000000001"

var limits = nvmeof.Limits{MDTSBytes: 64 << 10, FusedBytes: 4096}

// namespaces is a table with namespace 1, of 512-byte blocks, to which change is applied.
func namespaces(change func(*nvmeof.Namespace)) *nvmeof.NamespaceTable {
	n := &nvmeof.Namespace{NSID: 1, OffsetBytes: 1 << 20, SizeBytes: 1 << 20, BlockShift: 9, ANAGroup: 1,
		ANAState: nvme.ANAStateOptimized}
	if change != nil {
		change(n)
	}
	return nvmeof.NewNamespaceTable([]*nvmeof.Namespace{n}, hostNQN)
}

// rig is a Wire without a real transport, and a Handler that records its calls. Bit 0 of CDW13 says whether a command's
// data is in the capsule or at the host.
type rig struct {
	qpair.QPair
	closed bool
	// broken: Fetch fails.
	broken bool
	// noMemory: Buffer finds no memory.
	noMemory, paused bool

	given   []int // held by the handler
	told    []string
	sent    []nvme.CQE
	asked   []int // Fetch was called for
	buffers map[int]bool
}

func newRig(a *qpair.Attachment) *rig {
	r := &rig{buffers: map[int]bool{}}
	r.Init(limits, r, r)
	if a != nil {
		var e nvme.SQE
		e.Connect().Init()
		e.SetCDW(13, 1)
		i, o := r.Begin(&e, nvme.ConnectDataSize)
		if o != qpair.Arriving {
			panic("Connect is not taken")
		}
		r.DataReceived(i, nvme.ConnectDataSize)
		r.Arrived(i, true)
		r.Attach(*a)
		r.Respond(i, nvme.Success, 0)
		r.given, r.told, r.sent = nil, nil, nil
		clear(r.buffers)
	}
	return r
}

func queue(entries int) *qpair.Attachment {
	return &qpair.Attachment{QID: 1, Entries: entries, Table: namespaces(nil)}
}

func (r *rig) say(format string, args ...any) { r.told = append(r.told, fmt.Sprintf(format, args...)) }

func (r *rig) CheckSGL(e *nvme.SQE, _ int, toController, toHost uint32, inlineLen int) (uint32, bool, nvme.Status) {
	inline := e.CDW(13)&1 != 0 && toController > 0
	if inline && inlineLen != int(toController) {
		return 0, false, nvme.DataSGLLengthInvalid
	}
	return toController, inline, nvme.Success
}

func (r *rig) SendResponse(_ int, e nvme.CQE)       { r.sent = append(r.sent, e) }
func (r *rig) SendData(_ int, _ []byte, e nvme.CQE) { r.sent = append(r.sent, e) }

func (r *rig) Fetch(slot int) {
	r.asked = append(r.asked, slot)
	if r.broken {
		r.come(slot, false)
	}
}

// come delivers a slot's data.
func (r *rig) come(slot int, ok bool) {
	s := r.Slot(slot)
	s.Bad = !ok
	r.DataReceived(slot, len(s.Data))
	r.Done(slot)
}

func (r *rig) Closed() bool { return r.closed }

func (r *rig) Buffer(slot, n int) []byte {
	if r.noMemory {
		return nil
	}
	r.buffers[slot] = true
	return make([]byte, n)
}

func (r *rig) Execute(slot int) {
	r.say("execute %d", slot)
	r.given = append(r.given, slot)
}

func (r *rig) Admin(slot int) { r.given = append(r.given, slot) }

func (r *rig) Fetched(slot int, ok bool) {
	if r.Pair(slot) >= 0 {
		second, complete := r.PairFetched(slot)
		r.say("fetched %d ok %t, pair %d complete %t", slot, ok, second, complete)
		return
	}
	r.say("fetched %d ok %t", slot, ok)
}

func (r *rig) Unused(slot int)                { delete(r.buffers, slot) }
func (r *rig) Failed(slot int, s nvme.Status) { r.say("failed %d %#x", slot, uint16(s)) }
func (r *rig) Paired(first, second int) {
	delete(r.buffers, first)
	r.buffers[second] = true
}
func (r *rig) Paused() bool { return r.paused }

// command is an I/O command of one block.
func command(op uint8, cid uint16, fuse nvme.Fuse, inline bool) *nvme.SQE {
	var e nvme.SQE
	e.SetOpcode(op)
	e.SetCID(cid)
	e.SetNSID(1)
	e.SetNLB(1)
	e.SetFuse(fuse)
	e.SetPSDT(nvme.PSDTSGL)
	if inline {
		e.SetCDW(13, 1)
	}
	return &e
}

// take gives the machine a command, with its data if that is in the capsule.
func (r *rig) take(e *nvme.SQE) (int, qpair.Outcome) {
	n := 0
	if e.CDW(13)&1 != 0 {
		n = 512
	}
	i, o := r.Begin(e, n)
	if o == qpair.Arriving {
		r.DataReceived(i, len(r.Slot(i).Data))
		r.Arrived(i, true)
	}
	return i, o
}

func (r *rig) expect(t *testing.T, want ...string) {
	t.Helper()
	if !slices.Equal(r.told, want) {
		t.Errorf("told %q, want %q", r.told, want)
	}
	r.told = nil
}

// TestAPairIsCompletedOnceIfNoDataCanBeRequested: the failure of the first half must not complete the pair before the
// second half's data has been requested.
func TestAPairIsCompletedOnceIfNoDataCanBeRequested(t *testing.T) {
	for _, tc := range []struct {
		first, second bool // in the capsule
		want          []string
	}{
		{false, false, []string{"fetched 0 ok false, pair 1 complete false",
			"fetched 1 ok false, pair 1 complete true"}},
		{true, false, []string{"fetched 1 ok false, pair 1 complete true"}},
		{false, true, []string{"fetched 0 ok false, pair 1 complete true"}},
	} {
		r := newRig(queue(8))
		r.take(command(nvme.CmdCompare, 1, nvme.FuseFirst, tc.first))
		second, _ := r.take(command(nvme.CmdWrite, 2, nvme.FuseSecond, tc.second))
		r.told = nil
		r.broken = true
		r.FetchPair(second, make([]byte, 1024))
		r.expect(t, tc.want...)
		if r.AwaitedBytes() != 0 {
			t.Errorf("%d bytes awaited", r.AwaitedBytes())
		}
	}
}

// TestAPairsHalvesComeInEitherOrder, and the data of each is requested once.
func TestAPairsHalvesComeInEitherOrder(t *testing.T) {
	for _, order := range [][]int{{0, 1}, {1, 0}} {
		r := newRig(queue(8))
		r.take(command(nvme.CmdCompare, 1, nvme.FuseFirst, false))
		second, _ := r.take(command(nvme.CmdWrite, 2, nvme.FuseSecond, false))
		buf := make([]byte, 1024)
		r.FetchPair(second, buf)
		if !slices.Equal(r.asked, []int{0, 1}) || r.AwaitedBytes() != 1024 {
			t.Errorf("asked for %v, %d bytes awaited", r.asked, r.AwaitedBytes())
		}
		if &r.Slot(0).Data[0] != &buf[0] || &r.Slot(1).Data[0] != &buf[512] {
			t.Error("the halves are not where they belong: the Compare's data first")
		}
		var awaited []int
		r.Awaited(func(slot, got int) { awaited = append(awaited, slot) })
		if !slices.Equal(awaited, []int{0, 1}) {
			t.Errorf("slots %v are awaited", awaited)
		}
		r.told = nil
		r.come(order[0], true)
		r.come(order[1], true)
		r.expect(t, fmt.Sprintf("fetched %d ok true, pair 1 complete false", order[0]),
			fmt.Sprintf("fetched %d ok true, pair 1 complete true", order[1]))
	}
}

// TestTheNewerNamespaceTableDecides: a table that SetTable has set before Attach stays in force.
func TestTheNewerNamespaceTableDecides(t *testing.T) {
	r := newRig(nil)
	r.SetTable(nvmeof.NewNamespaceTable(nil, hostNQN))
	var e nvme.SQE
	e.Connect().Init()
	i, _ := r.Begin(&e, 0)
	r.Attach(*queue(8))
	r.Respond(i, nvme.Success, 0)
	r.sent = nil
	r.take(command(nvme.CmdRead, 1, nvme.FuseNone, false))
	if len(r.sent) != 1 || r.sent[0].Status() != nvme.InvalidNamespaceOrFormat|nvme.DNR {
		t.Errorf("answers %v: the namespaces are those of Attach", r.sent)
	}
}

// TestInCapsuleDataIsValidatedWhenItHasArrived: the command's extent may belong to another namespace by then.
func TestInCapsuleDataIsValidatedWhenItHasArrived(t *testing.T) {
	for name, tc := range map[string]struct {
		now *nvmeof.NamespaceTable
		ok  bool
	}{
		"the same":    {namespaces(nil), true},
		"grown":       {namespaces(func(n *nvmeof.Namespace) { n.SizeBytes *= 2 }), true},
		"elsewhere":   {namespaces(func(n *nvmeof.Namespace) { n.OffsetBytes = 8 << 20 }), false},
		"on an other": {namespaces(func(n *nvmeof.Namespace) { n.SSD = 1 }), false},
		"gone":        {nvmeof.NewNamespaceTable(nil, hostNQN), false},
	} {
		for _, fused := range []bool{false, true} {
			r := newRig(queue(8))
			fuse := nvme.FuseNone
			if fused {
				r.take(command(nvme.CmdCompare, 1, nvme.FuseFirst, true))
				fuse = nvme.FuseSecond
			}
			i, o := r.Begin(command(nvme.CmdWrite, 2, fuse, true), 512)
			if o != qpair.Arriving {
				t.Fatalf("outcome %d", o)
			}
			r.SetTable(tc.now)
			r.DataReceived(i, 512)
			r.Arrived(i, true)
			answers := 1
			if fused {
				answers = 2
			}
			if ok := len(r.given) > 0; ok != tc.ok || !tc.ok &&
				(len(r.sent) != answers || len(r.buffers) != 0 || r.Outstanding() != 0) {
				t.Errorf("%s, fused %t: given %v, answers %d, %d buffers out, %d outstanding", name, fused, r.given,
					len(r.sent), len(r.buffers), r.Outstanding())
			}
		}
	}
}

// TestLostTransfersReturnToTheHandler: commands whose data was requested or was arriving, and no others.
func TestLostTransfersReturnToTheHandler(t *testing.T) {
	r := newRig(queue(8))
	asked, _ := r.take(command(nvme.CmdWrite, 1, nvme.FuseNone, false))
	r.take(command(nvme.CmdWrite, 2, nvme.FuseNone, false))
	r.take(command(nvme.CmdCompare, 3, nvme.FuseFirst, true))
	arriving, _ := r.Begin(command(nvme.CmdWrite, 4, nvme.FuseSecond, true), 512)
	r.RequestData(asked, make([]byte, 512))
	for _, cid := range []uint16{1, 3, 4} {
		if _, ok := r.Find(cid); ok {
			t.Errorf("command %d is found, and is not held by the handler", cid)
		}
	}
	r.closed = true
	var back []int
	r.Fetching(func(slot int) { back = append(back, slot) })
	if !slices.Equal(back, []int{asked, arriving}) {
		t.Errorf("slots %v are back, want %d and %d", back, asked, arriving)
	}
	if i, ok := r.Find(1); !ok || i != asked {
		t.Error("the command is not held by the handler")
	}
}

// TestSlotsAreConserved compares the machine with a model that only counts: through all commands, responses, aborts and
// transfers, the number of slots, the outcomes and SQHD agree.
func TestSlotsAreConserved(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := queue(rapid.IntRange(2, 12).Draw(t, "entries"))
		a.NoSQFlow = rapid.Bool().Draw(t, "noflow")
		r := newRig(a)
		taken, outstanding := 1, 0 // Connect was received
		var zombies []int
		answered := 0
		remove := func(slot int) { r.given = slices.DeleteFunc(r.given, func(s int) bool { return s == slot }) }
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			sent := len(r.sent)
			switch rapid.IntRange(0, 7).Draw(t, "step") {
			case 0, 1, 2:
				r.paused = rapid.IntRange(0, 9).Draw(t, "paused") == 0
				r.noMemory = rapid.IntRange(0, 9).Draw(t, "no memory") == 0
				op := rapid.SampledFrom([]uint8{nvme.CmdRead, nvme.CmdWrite, nvme.CmdFlush, 0x7d}).Draw(t, "op")
				inline := op == nvme.CmdWrite && rapid.Bool().Draw(t, "inline")
				want := qpair.Taken
				full := len(zombies) > 0 && outstanding+len(zombies) == a.Entries+qpair.ExtraSlots
				switch {
				case r.paused || full:
					want = qpair.Waiting
				case outstanding >= a.Entries:
					want = qpair.TooMany
				case inline && r.noMemory:
					want = qpair.Waiting
				case inline:
					want = qpair.Arriving
				}
				if r.Full() != full {
					t.Fatalf("full %t, want %t", r.Full(), full)
				}
				_, o := r.take(command(op, uint16(taken), nvme.FuseNone, inline))
				if o != want {
					t.Fatalf("outcome %d, want %d", o, want)
				}
				if o == qpair.Taken || o == qpair.Arriving {
					taken++
					outstanding++
				}
				if op == 0x7d && o == qpair.Taken {
					outstanding--
					answered++
				}
			case 3, 4:
				if len(r.given) == 0 {
					break
				}
				slot := rapid.SampledFrom(r.given).Draw(t, "slot")
				if r.Slot(slot).Fetching() {
					break
				}
				remove(slot)
				if z := slices.Index(zombies, slot); z >= 0 {
					zombies = slices.Delete(zombies, z, z+1)
				} else {
					outstanding--
					answered++
				}
				if r.Slot(slot).Plan.ToHost > 0 {
					r.RespondData(slot, make([]byte, 512), 0)
				} else {
					r.Respond(slot, nvme.Success, 0)
				}
			case 5:
				if len(r.given) == 0 {
					break
				}
				slot := rapid.SampledFrom(r.given).Draw(t, "slot")
				if slices.Contains(zombies, slot) || r.Slot(slot).Fetching() {
					break
				}
				if found, ok := r.Find(r.Slot(slot).SQE.CID()); !ok || found != slot {
					t.Fatalf("slot %d is not found", slot)
				}
				r.Abort(slot, nvme.AbortRequested)
				zombies = append(zombies, slot)
				outstanding--
				answered++
			case 6:
				if len(r.given) == 0 {
					break
				}
				slot := rapid.SampledFrom(r.given).Draw(t, "slot")
				if !slices.Contains(zombies, slot) && r.NeedsFetch(slot) && r.Slot(slot).Data == nil {
					r.RequestData(slot, make([]byte, 512))
				}
			case 7:
				for _, slot := range r.given {
					if r.Slot(slot).Fetching() {
						r.come(slot, true)
						break
					}
				}
			}
			if n := len(r.sent); n != answered {
				t.Fatalf("%d answers, want %d", n, answered)
			}
			want := uint16(taken % a.Entries)
			if a.NoSQFlow {
				want = 0xFFFF
			}
			for _, e := range r.sent[sent:] {
				if e.SQHD() != want {
					t.Fatalf("SQHD %d, want %d", e.SQHD(), want)
				}
			}
			if r.Outstanding() != outstanding {
				t.Fatalf("%d outstanding, want %d", r.Outstanding(), outstanding)
			}
			awaited := 0
			r.Awaited(func(int, int) { awaited += 512 })
			if r.AwaitedBytes() != awaited {
				t.Fatalf("%d bytes awaited, want %d", r.AwaitedBytes(), awaited)
			}
		}
	})
}

var (
	_ qpair.Handler = (*rig)(nil)
	_ qpair.Wire    = (*rig)(nil)
)
