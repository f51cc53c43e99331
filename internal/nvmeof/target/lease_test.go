package target

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"jbofd/internal/nvme"
)

// TestASilentHostIsFencedBeforeItsTimerRuns: the process was stopped for longer than the keep alive timeout. A
// connection or a drive that gets to the host's commands before the keep alive timer runs begins none.
func TestASilentHostIsFencedBeforeItsTimerRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		a := r.connect(hostA, nil, 0, 2000)
		io := r.connect(hostA, a, 1, 0)
		h := r.Holder(a.ctrl)
		r.timer.Close() // as if it was late
		late := func() int64 {
			<-time.After(3 * time.Second)
			return r.Clock()
		}()
		// A connection has its locks then, and the service calls those of its methods that take them only later.
		io.mu.Lock()
		if io.share.Pass().Stale() || !io.share.Pass().StaleAt(late) || io.share.Begin() {
			t.Error("a command begins 3 s after the last sign of life, with a keep alive timeout of 2 s")
		}
		h.Renew(late)
		io.mu.Unlock()
		if got := <-r.expired; !strings.HasPrefix(got, "1 idle 3s") {
			t.Error(got)
		}
		synctest.Wait()
		want(t, a, "shut: keep alive timeout")
		want(t, io, "shut: keep alive timeout")
	})
}

// TestAHostWhoseBytesHaveArrivedGoesOn after a stop of the process for longer than its keep alive timeout.
func TestAHostWhoseBytesHaveArrivedGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		a := r.connect(hostA, nil, 0, 2000)
		io := r.connect(hostA, a, 1, 0)
		r.timer.Close()
		<-time.After(2500 * time.Millisecond)
		arrived := r.Clock()
		a.arrived.Store(arrived)
		<-time.After(500 * time.Millisecond)
		if io.share.Pass().StaleAt(r.Clock()) {
			t.Fatal("the association has ended although its host has sent something half a second ago")
		}
		if io.share.Pass().StaleAt(arrived + 2e9) {
			t.Error("the lease ends before the keep alive timeout")
		}
		<-time.After(2 * time.Second)
		if !io.share.Pass().StaleAt(r.Clock()) {
			t.Error("the association outlives the keep alive timeout")
		}
	})
}

// TestALateKeepAliveIsNoSignOfLife: the admin command that a stopped process finds in its socket has come long ago.
func TestALateKeepAliveIsNoSignOfLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		a := r.connect(hostA, nil, 0, 2000)
		io := r.connect(hostA, a, 1, 0)
		a.arrived.Store(r.Clock())
		r.timer.Close()
		<-time.After(3 * time.Second)
		reply, _ := r.admin(a, 0, command(nvme.AdminKeepAlive, nil))
		if reply.Status.OK() || !io.share.Pass().Stale() {
			t.Errorf("a Keep Alive of 3 s ago: %v", reply.Status)
		}
	})
}

// TestTheLeaseFollowsTheKeepAliveTimeout: without a timeout there is no lease, and a shorter one counts at once.
func TestTheLeaseFollowsTheKeepAliveTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		a := r.connect(hostA, nil, 0, 0)
		io := r.connect(hostA, a, 1, 0)
		<-time.After(time.Hour)
		if io.share.Pass().StaleAt(r.Clock()) {
			t.Fatal("an association without keep alive timeout ends")
		}
		r.admin(a, 0, setFeature(nvme.FIDKeepAlive, 1000))
		r.timer.Close()
		<-time.After(2 * time.Second)
		if !io.share.Pass().StaleAt(r.Clock()) {
			t.Error("the lease is longer than the new keep alive timeout")
		}
	})
}

// TestHoldersEndWithTheirControllers: nothing is left over of associations, whether or not they had I/O queues.
func TestHoldersEndWithTheirControllers(t *testing.T) {
	r := newRig(t)
	a, b := r.connect(hostA, nil, 0, 2000), r.connect(hostB, nil, 0, 0)
	io := r.connect(hostA, a, 1, 0)
	for _, c := range slices.Backward([]*fakeConn{a, b, io}) {
		r.remove(c)
	}
	if n := len(r.ends.holders); n != 0 {
		t.Errorf("%d holders are left", n)
	}
}
