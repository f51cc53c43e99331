package target

import (
	"testing"
	"testing/synctest"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
)

func setCC(cc nvme.CC) *nvme.SQE {
	var sqe nvme.SQE
	sqe.Property().Init(nvme.FabricsPropertySet, nvme.PropCC)
	sqe.Property().SetVALUE(uint64(cc))
	return &sqe
}

const enabled = nvme.CC(1 | 6<<16 | 4<<20)

// TestKeepAliveRunsAfterAReset: a controller that was reset has two minutes. Once it is enabled, its keep alive timeout
// counts again.
func TestKeepAliveRunsAfterAReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		a := r.connect(hostA, nil, 0, 5000)
		r.connect(hostA, a, 1, 0)
		r.admin(a, 0, setCC(0))
		<-time.After(time.Second)
		r.admin(a, 0, setCC(enabled))
		r.connect(hostA, a, 1, 0)
		start := time.Now()
		<-r.expired
		if d := time.Since(start); d > 5200*time.Millisecond {
			t.Errorf("a silent host's association ends after %v, its keep alive timeout is 5 s", d)
		}
	})
}

// TestTheBoundOfAnEndRunsAfterAnOverdueReset: an association ends whose reset has exceeded its bound. The end has a
// bound of its own, whether or not the host connects again.
func TestTheBoundOfAnEndRunsAfterAnOverdueReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		overdue := make(chan string, 4)
		r.cfg.Events.Overdue = func(_ *nvmeof.Controller, what string, _ int) { overdue <- what }
		a := r.connect(hostA, nil, 0, 0)
		io := r.connect(hostA, a, 1, 0)
		io.share.Begin()
		r.admin(a, 0, setCC(0))
		<-overdue
		start := time.Now()
		r.remove(a)
		what := <-overdue
		if d := time.Since(start); d > r.Quiesce()+10*time.Millisecond {
			t.Errorf("%q after %v, the bound is %v", what, d, r.Quiesce())
		}
		io.share.End()
		r.remove(io)
	})
}
