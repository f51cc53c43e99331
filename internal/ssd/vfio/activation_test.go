package vfio_test

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/vfio"
	"jbofd/internal/ssd/vfio/pcietest"
)

// paused returns a rig whose controller activates firmware, which its driver has heard, with a queue.
func paused(t *testing.T, c pcietest.Config, v vfio.Config) (*rig, ssd.Queue) {
	c.AERL = 3
	r := newRig(t, c, v)
	q := r.queue(1)
	r.eventually("events are asked for", func() bool { return r.ctrl.Reports().Requests == 4 })
	r.ctrl.Activate(true)
	r.ctrl.Tell(nvme.AERFirmwareActivation)
	r.eventually("it is reported", func() bool { h, _ := r.dev.Health(); return h.Events[ssd.EventNotice] == 1 })
	return r, q
}

// ends waits until a channel is closed.
func (r *rig) ends(what string, c <-chan struct{}) {
	r.Helper()
	select {
	case <-c:
	case <-time.After(20 * time.Second):
		r.Fatalf("%s does not end", what)
	}
}

// untouched checks that for some time no admin command is sent, and that the controller is not reset.
func (r *rig) untouched(d time.Duration, during <-chan struct{}) {
	r.Helper()
	select {
	case <-during:
		r.Error("it has not waited for the end of the activation")
	case <-time.After(d):
	}
	if n, resets := r.ctrl.Reports().Unfetched, r.ctrl.Counts().Resets; n != 0 || resets != 0 {
		r.Errorf("while firmware is activated: %d admin commands, %d resets", n, resets)
	}
}

// TestQueuesWaitForTheEndOfAnActivation: the controller would not answer the commands that create and delete queues, or
// its shutdown. OpenQueue and Close wait, and the controller is not reset.
func TestQueuesWaitForTheEndOfAnActivation(t *testing.T) {
	cfg := quick
	cfg.AdminTimeout = cfg.Timeout
	for name, call := range map[string]func(*rig, ssd.Queue) error{
		"OpenQueue":             func(r *rig, _ ssd.Queue) error { _, err := r.dev.OpenQueue(1); return err },
		"Close of the queue":    func(_ *rig, q ssd.Queue) error { return q.Close() },
		"Close of the device":   func(r *rig, _ ssd.Queue) error { return r.dev.Close() },
		"Close without a queue": nil,
	} {
		t.Run(name, func(t *testing.T) {
			r, q := paused(t, pcietest.Config{}, cfg)
			if call == nil {
				r.ctrl.Activate(false)
				if err := q.Close(); err != nil {
					t.Fatal(err)
				}
				r.ctrl.Activate(true)
				r.ctrl.Tell(nvme.AERFirmwareActivation)
				r.eventually("it is reported", func() bool {
					h, _ := r.dev.Health()
					return h.Events[ssd.EventNotice] == 2
				})
				call = func(r *rig, _ ssd.Queue) error { return r.dev.Close() }
			}
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				if err := call(r, q); err != nil {
					t.Error(err)
				}
			}()
			r.untouched(5*cfg.AdminTimeout, ended)
			r.ctrl.Activate(false)
			r.ends(name, ended)
			if n := r.ctrl.Counts().Resets; name != "Close of the device" && name != "Close without a queue" && n != 0 {
				t.Errorf("%d resets", n)
			}
		})
	}
}

// TestAnActivationIsHeardBeforeAQueueIsOpened: the report has arrived when a queue is to be opened, and the keeper has
// not seen it yet.
func TestAnActivationIsHeardBeforeAQueueIsOpened(t *testing.T) {
	cfg := quick
	cfg.AdminTimeout = cfg.Timeout
	for range 5 {
		r := newRig(t, pcietest.Config{}, cfg)
		r.eventually("events are asked for", func() bool { return r.ctrl.Reports().Requests == 1 })
		r.ctrl.Activate(true)
		r.ctrl.Tell(nvme.AERFirmwareActivation)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if _, err := r.dev.OpenQueue(1); err != nil {
				t.Error(err)
			}
		}()
		r.untouched(3*cfg.AdminTimeout, ended)
		r.ctrl.Activate(false)
		r.ends("OpenQueue", ended)
	}
}

// TestAnAdminCommandDuringAnActivation: firmware is activated while an admin command is under way. The command is given
// more time, and the controller is not reset.
func TestAnAdminCommandDuringAnActivation(t *testing.T) {
	cfg := quick
	cfg.AdminTimeout, cfg.HealthEvery = cfg.Timeout, 5*time.Millisecond
	r := newRig(t, pcietest.Config{AERL: 3}, cfg)
	q := r.queue(1)
	r.eventually("events are asked for", func() bool { return r.ctrl.Reports().Requests == 4 })
	r.ctrl.Activate(true)
	r.eventually("the log is asked for", func() bool { return r.ctrl.Reports().Unfetched == 1 })
	r.ctrl.Tell(nvme.AERFirmwareActivation)
	var done [1]ssd.Completion
	ssd.Await(q, done[:], 5*cfg.AdminTimeout)
	if n, resets := r.ctrl.Reports().Unfetched, r.ctrl.Counts().Resets; n != 1 || resets != 0 {
		t.Errorf("while firmware is activated: %d admin commands, %d resets", n, resets)
	}
	r.ctrl.Activate(false)
	r.eventually("the event is answered", func() bool { return r.ctrl.Reports().Logs[nvme.LIDFirmwareSlot] == 1 })
	r.works(q)
	if n := r.ctrl.Counts().Resets; n != 0 {
		t.Errorf("%d resets", n)
	}
}

// TestAnActivationWithoutEnd: a controller that does not say how long it takes to activate firmware (MTFA is 0) has a
// while for it. If it has not ended then, the controller is reset, whether or not an admin command was under way.
func TestAnActivationWithoutEnd(t *testing.T) {
	cfg := quick
	cfg.AdminTimeout, cfg.HealthEvery, cfg.Activation = cfg.Timeout, time.Hour, 500*time.Millisecond
	silent := pcietest.Config{AERL: 3, Identify: func(c *nvme.IdentifyController, _ *nvme.IdentifyNamespace) {
		c.SetMTFA(0)
	}}
	for _, underway := range []bool{false, true} {
		if underway {
			cfg.HealthEvery = 5 * time.Millisecond
		}
		r := newRig(t, silent, cfg)
		q := r.queue(1)
		r.eventually("events are asked for", func() bool { return r.ctrl.Reports().Requests == 4 })
		begin := time.Now()
		r.ctrl.Activate(true)
		if underway {
			r.eventually("the log is asked for", func() bool { return r.ctrl.Reports().Unfetched == 1 })
		}
		r.ctrl.Tell(nvme.AERFirmwareActivation)
		r.works(q)
		if took := time.Since(begin); took < cfg.Activation || r.ctrl.Counts().Resets != 1 {
			t.Errorf("it works after %v and %d resets; want %v or more, and 1", took, r.ctrl.Counts().Resets,
				cfg.Activation)
		}
	}
}

// TestAnEventWhoseLogPageIsNotAnswered: a drive reports an error again and again, and does not answer the command that
// reads the log page of it. It is reset for that a few times, as for its SMART log, and works.
func TestAnEventWhoseLogPageIsNotAnswered(t *testing.T) {
	for _, event := range []nvme.AER{nvme.AERTransientError, nvme.AERFirmwareActivation} {
		cfg := quick
		cfg.AdminTimeout, cfg.HealthEvery = cfg.Timeout, time.Hour
		r := newRig(t, pcietest.Config{AERL: 3}, cfg)
		q := r.queue(1)
		var asked atomic.Int64
		r.ctrl.Intercept(func(id uint16, e *nvme.SQE) (a pcietest.Answer) {
			a.Drop = id == 0 && e.Opcode() == nvme.AdminGetLogPage
			if a.Drop {
				asked.Add(1)
			}
			return a
		})
		for k := range 8 {
			r.eventually("events are asked for", func() bool { return r.ctrl.Reports().Requests > 0 })
			r.ctrl.Tell(event)
			r.eventually("it is reported", func() bool { return r.ctrl.Reports().Waiting == 0 })
			if k < 3 {
				r.eventually("the controller is reset", func() bool { return r.ctrl.Counts().Resets == k+1 })
			}
			r.works(q)
			if k >= 3 {
				break // an event of the same page is not reported again
			}
		}
		var done [1]ssd.Completion
		ssd.Await(q, done[:], 5*cfg.AdminTimeout)
		if n, resets := asked.Load(), r.ctrl.Counts().Resets; n != 3 || resets != 3 {
			t.Errorf("%v: the log page was asked for %d times, with %d resets; want 3 and 3", event, n, resets)
		}
		r.works(q)
		if err := r.dev.Healthy(); err != nil {
			t.Error(err)
		}
		r.ctrl.Intercept(nil)
	}
}

// TestManyEventsDoNotKeepCommandsFromTheirTimeout: a drive reports as many events at once as it may, and each takes
// long. A command that is not answered meanwhile is aborted after two of them at most.
func TestManyEventsDoNotKeepCommandsFromTheirTimeout(t *testing.T) {
	var mu sync.Mutex
	var happened []ssd.HealthEvent
	var q ssd.Queue
	cfg := quick
	cfg.HealthEvery = time.Hour
	cfg.Event = func(kind ssd.HealthEvent, _ string) {
		mu.Lock()
		defer mu.Unlock()
		if happened = append(happened, kind); kind == ssd.EventOther {
			if len(happened) == 1 {
				q.Submit([]ssd.Request{{Op: ssd.Flush}})
			}
			time.Sleep(2 * cfg.Timeout) // as if the log page took so long
		}
	}
	r := newRig(t, pcietest.Config{AERL: 7, Unmasked: true}, cfg)
	q = r.queue(1)
	r.eventually("events are asked for", func() bool { return r.ctrl.Reports().Requests == 8 })
	r.dropOnce()
	r.ctrl.Tell(slices.Repeat([]nvme.AER{nvme.MakeAER(nvme.AERTypeVendor, 0x33, 0xC1)}, 8)...)
	var done [1]ssd.Completion
	if n := ssd.Await(q, done[:], 20*time.Second); n != 1 || done[0].Err != nil {
		t.Errorf("%d completions, %v", n, done[0].Err)
	}
	mu.Lock()
	defer mu.Unlock()
	if i := slices.Index(happened, ssd.EventTimeout); i < 0 || i > 3 {
		t.Errorf("the command is aborted after %d events: %v", i, happened)
	}
}
