package nvmeof_test

import (
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
)

// credits collects the credit actions for connections.
func (r *rig) credits() (told []string) {
	for _, a := range r.take() {
		if a.Kind == nvmeof.ActionCredits {
			told = append(told, fmt.Sprintf("%d %v", a.Conn, a.Credits.On))
		}
	}
	return told
}

func extension(v uint32) *nvme.SQE { return setFeature(nvme.FIDExtensions, v) }

func TestCreditsAreAnnouncedByIOControllersOnly(t *testing.T) {
	r := newRig(t)
	for _, x := range []struct {
		sub string
		ok  bool
	}{{open, true}, {nvme.DiscoveryNQN, false}} {
		c := r.connect(hostA, x.sub)
		_, data := r.must(c, identify(nvme.CNSController, 0), nil)
		version, bits, ok := (*nvme.IdentifyController)(data).Extension()
		if ok != x.ok || ok && (version != 1 || bits != nvme.ExtCredits|nvme.ExtKV) {
			t.Errorf("%s: version %d bits %#x, announced %v", x.sub, version, bits, ok)
		}
	}
}

func TestAGrantTellsEveryQueueOnceAndNamesTheLowestDrive(t *testing.T) {
	r := newRig(t)
	s := testState()
	for i, ssd := range []int{7, 3, 2} { // hostB does not see the last one
		s.Subsystems[0].Namespaces[i].SSD = ssd
	}
	r.target.Apply(s)
	c := r.connect(hostB, open)
	if c.CreditState().On {
		t.Error("credits are on before the host asked")
	}
	first := r.tryConnect(hostB, open, queue(c, 1))
	if first.Credits.On {
		t.Error("a queue of a host that did not ask has credits")
	}
	reply, _ := r.do(c, 0, extension(nvme.ExtCredits), nil)
	if !reply.Status.OK() || reply.Result != nvme.ExtCredits || !reply.Credit || reply.CreditSSD != 3 {
		t.Errorf("grant: %+v", reply)
	}
	if got := r.credits(); !slices.Equal(got, []string{fmt.Sprint(c.Admin, " true"), fmt.Sprint(r.last, " true")}) {
		t.Errorf("told %v", got)
	}
	r.do(c, 0, extension(nvme.ExtCredits|nvme.ExtKV), nil)
	if got := r.credits(); got != nil {
		t.Errorf("told again: %v", got)
	}
	if second := r.tryConnect(hostB, open, queue(c, 2)); !second.Credits.On ||
		second.Credits.Version <= first.Credits.Version {
		t.Errorf("a later queue has %+v, one before the grant had %+v", second.Credits, first.Credits)
	}
	for ssd, want := range map[uint32]bool{7: true, 3: true, 2: false, 0: false, 1<<16 | 7: true} {
		sqe := getFeature(nvme.FIDExtensions, 0)
		sqe.Features().SetValue(ssd)
		if reply, _ := r.do(c, 0, sqe, nil); reply.Credit != want || want && reply.CreditSSD != int(ssd&0xffff) {
			t.Errorf("credit of drive %d: %+v", ssd, reply)
		}
	}
	reply, _ = r.do(c, 0, extension(0), nil)
	if reply.Credit || reply.Result != 0 {
		t.Errorf("credits off: %+v", reply)
	}
	if got := r.credits(); len(got) != 3 || got[0] != fmt.Sprint(c.Admin, " false") {
		t.Errorf("told %v", got)
	}
	if reply, _ := r.do(c, 0, getFeature(nvme.FIDExtensions, 0), nil); reply.Credit {
		t.Errorf("a credit although they are off: %+v", reply)
	}
}

func TestAResetEndsCredits(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	r.must(c, extension(nvme.ExtCredits), nil)
	r.credits()
	r.setCC(c, 0)
	if got := r.credits(); !slices.Equal(got, []string{fmt.Sprint(c.Admin, " false")}) || c.CreditState().On {
		t.Errorf("after a reset: told %v, on %v", got, c.CreditState().On)
	}
	r.setCC(c, enable)
	if got, _ := r.must(c, getFeature(nvme.FIDExtensions, 0), nil); got != 0 {
		t.Errorf("granted after a reset: %#x", got)
	}
}
