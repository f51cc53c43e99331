package drive

import (
	"sync/atomic"
	"testing"

	"jbofd/internal/bufpool"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// tap is a synchronous device that calls during within each Submit.
type tap struct {
	ssd.Device
	during func()
}

func (t *tap) OpenQueue(depth int) (ssd.Queue, error) {
	q, err := t.Device.OpenQueue(depth)
	return &tapQueue{q, t}, err
}

type tapQueue struct {
	ssd.Queue
	d *tap
}

func (q *tapQueue) Submit(reqs []ssd.Request) int {
	if q.d.during != nil {
		q.d.during()
	}
	return q.Queue.Submit(reqs)
}

// TestASubmitterReturnsWhileOthersKeepTheDriveBusy, because it has responses of its own to send.
func TestASubmitterReturnsWhileOthersKeepTheDriveBusy(t *testing.T) {
	d := &tap{}
	r := newRig(t, rigConfig{}, func(p *bufpool.Pool) (dev ssd.Device, err error) {
		d.Device, err = memory(p)
		return d, err
	})
	first, others := r.host("first"), r.host("others")
	const most = 1000
	n := uint32(0) // changed with the drive's ownership
	var free atomic.Bool
	d.during = func() { // somebody else posts before ownership ends
		if n == most || free.Load() {
			return
		}
		n++
		posted := make(chan struct{})
		go func(slot uint32) {
			defer close(posted)
			others.submit(others.io(slot, pipeline.Verify, 0, 512))
		}(n)
		<-posted
	}
	first.submit(first.io(0, pipeline.Verify, 0, 512))
	free.Store(true)
	first.finish(1)
	<-r.o.Quiesce()
	if n == most {
		t.Errorf("its submitter served %d requests of others before it could go on", n)
	}
	others.finish(int(n))
}
