package vfio_test

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/ssdtest"
	"jbofd/internal/ssd/vfio"
	"jbofd/internal/ssd/vfio/pcietest"
)

// eventually waits until something is so.
func (r *rig) eventually(what string, is func() bool) {
	r.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			r.Fatalf("not so: %s; %+v; healthy: %v", what, r.ctrl.Reports(), r.dev.Healthy())
		}
	}
}

// works reads and writes.
func (r *rig) works(q ssd.Queue) {
	r.Helper()
	ssdtest.Write(r.T, q, 4096, make([]byte, 8192), 0)
	ssdtest.Read(r.T, q, 4096, 8192)
}

func smartOf(kelvin uint16, spare uint8) (l nvme.SMARTLog) {
	l.SetTemperature(kelvin)
	l.SetAvailableSpare(spare)
	l.SetMediaErrors(nvme.U128(uint64(kelvin)))
	return l
}

// The SMART log is read when the drive is opened, and every so often, also while nothing is under way.
func TestHealthIsReadEverySoOften(t *testing.T) {
	r := newRig(t, pcietest.Config{}, vfio.Config{HealthEvery: 5 * time.Millisecond})
	h, ok := r.dev.Health()
	if !ok || h.WarningKelvin != 350 || h.CriticalKelvin != 360 || h.At.IsZero() {
		t.Fatalf("after it was opened: %+v, %v", h, ok)
	}
	for i := range uint16(5) {
		want := smartOf(300+i, uint8(i))
		r.ctrl.SetSMART(want)
		r.eventually("the log is the controller's", func() bool {
			h, ok := r.dev.Health()
			return ok && h.SMART == want
		})
	}
	r.ctrl.Vanish()
	r.eventually("a drive that is gone has no health", func() bool { _, ok := r.dev.Health(); return !ok })
}

// reports are the events that a drive has reported.
type reports struct {
	mu    sync.Mutex
	kinds []ssd.HealthEvent
	whats []string
}

func (e *reports) add(kind ssd.HealthEvent, what string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.kinds, e.whats = append(e.kinds, kind), append(e.whats, what)
}

func (e *reports) has(kind ssd.HealthEvent, what string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	i := slices.Index(e.whats, what)
	return i >= 0 && e.kinds[i] == kind
}

// Events are answered, by reading the log page that explains them, and as many are asked for as the controller takes.
func TestEventsAreAnsweredAndAskedForAgain(t *testing.T) {
	for _, aerl := range []uint8{0, 3, 255} {
		var heard reports
		r := newRig(t, pcietest.Config{AERL: aerl}, vfio.Config{Event: heard.add})
		q := r.queue(2)
		const wanted = 0x1f | nvme.AECNamespace | nvme.AECFirmware
		listening := min(int(aerl)+1, 8)
		for round := 1; round <= 3; round++ {
			want := smartOf(uint16(300+round), 1)
			r.ctrl.SetSMART(want)
			r.ctrl.Tell(nvme.AERReliability, nvme.AERTransientError, nvme.AERNamespaceChanged,
				nvme.MakeAER(nvme.AERTypeVendor, 0x33, 0xC1))
			r.eventually("all events are reported", func() bool { return r.ctrl.Reports().Waiting == 0 })
			r.eventually("log pages are read", func() bool {
				got := r.ctrl.Reports().Logs
				return got[nvme.LIDSMART] >= round+1 && got[nvme.LIDError] == round && got[nvme.LIDChangedNS] == round
			})
			r.eventually("events are asked for", func() bool {
				got := r.ctrl.Reports()
				return got.Requests == listening && got.Wanted == wanted
			})
			h, ok := r.dev.Health()
			if !ok || h.SMART != want {
				t.Errorf("the log is not that after the event: %+v, %v", h, ok)
			}
			got := [ssd.HealthEvents]uint64{uint64(round), uint64(round), uint64(round), 1}
			if h.Events[:3][0] != got[0] || h.Events[1] != got[1] || h.Events[2] != got[2] || h.Events[3] == 0 {
				t.Errorf("events are %v, want %v", h.Events, got)
			}
			r.works(q)
		}
		for what, kind := range map[string]ssd.HealthEvent{"reliability is degraded": ssd.EventSMART,
			"transient internal error": ssd.EventError, "a namespace has changed": ssd.EventNotice,
			"event of type 0x7, information 0x33": ssd.EventOther} {
			if !heard.has(kind, what) {
				t.Errorf("%v %q was not told", kind, what)
			}
		}
		if n := r.ctrl.Counts().Resets; n != 0 {
			t.Errorf("%d resets", n)
		}
	}
}

// An event that is reported with the interrupt of another command's completion does not wait for the next interrupt.
func TestAnEventWithTheInterruptOfACommand(t *testing.T) {
	const every = 4 * time.Second
	r := newRig(t, pcietest.Config{}, vfio.Config{HealthEvery: every})
	var told, heard atomic.Int64
	begin := time.Now()
	r.ctrl.Intercept(func(id uint16, e *nvme.SQE) (a pcietest.Answer) {
		switch {
		case id != 0 || e.Opcode() != nvme.AdminGetLogPage:
		case e.GetLog().LID() == nvme.LIDError:
			heard.CompareAndSwap(0, int64(time.Since(begin)))
		case told.CompareAndSwap(0, int64(time.Since(begin))):
			a.Tell = []nvme.AER{nvme.AERTransientError}
		}
		return a
	})
	r.eventually("the event is heard", func() bool { return heard.Load() != 0 })
	if took := time.Duration(heard.Load() - told.Load()); took > every-time.Second {
		t.Errorf("it is heard after %v", took)
	}
	r.ctrl.Intercept(nil)
}

// Events are asked for again after a reset.
func TestEventsAfterAReset(t *testing.T) {
	r := newRig(t, pcietest.Config{AERL: 1}, quick)
	q := r.queue(1)
	r.dropOnce()
	r.works(q)
	r.eventually("the controller was reset", func() bool { return r.ctrl.Counts().Resets > 0 })
	r.eventually("events are asked for", func() bool { return r.ctrl.Reports().Requests == 2 })
	if h, _ := r.dev.Health(); h.Events[ssd.EventTimeout] != 1 || h.Events[ssd.EventReset] != 1 {
		t.Errorf("events are %v, want 1 timeout and 1 reset", h.Events)
	}
	want := smartOf(333, 3)
	r.ctrl.SetSMART(want)
	r.ctrl.Tell(nvme.AERTemperature)
	r.eventually("the log is the controller's", func() bool { h, _ := r.dev.Health(); return h.SMART == want })
}

// dropOnce has the controller not answer the next I/O command.
func (r *rig) dropOnce() {
	dropped := false
	r.ctrl.Intercept(func(id uint16, _ *nvme.SQE) pcietest.Answer {
		drop := id != 0 && !dropped
		dropped = dropped || drop
		return pcietest.Answer{Drop: drop}
	})
}

// A controller that reports without end costs no more than so much, and does not keep the drive from working.
func TestAControllerThatReportsWithoutEnd(t *testing.T) {
	r := newRig(t, pcietest.Config{AERL: 3, Unmasked: true}, vfio.Config{})
	q := r.queue(2)
	begin := time.Now()
	r.ctrl.Tell(slices.Repeat([]nvme.AER{nvme.AERPersistentError}, 10000)...)
	r.eventually("some are answered", func() bool { return r.ctrl.Reports().Logs[nvme.LIDError] > 8 })
	r.works(q)
	n, rounds := r.ctrl.Reports().Logs[nvme.LIDError], int(time.Since(begin)/(100*time.Millisecond))+2
	if n > 4*rounds {
		t.Errorf("%d events were answered in %v", n, time.Since(begin))
	}
}

// A controller that takes fewer event requests than it says is not asked again and again.
func TestEventRequestsThatAreRefused(t *testing.T) {
	r := newRig(t, pcietest.Config{AERL: 1, Identify: func(c *nvme.IdentifyController, _ *nvme.IdentifyNamespace) {
		c.SetAERL(6)
	}}, vfio.Config{HealthEvery: time.Millisecond})
	r.eventually("the keeper has gone on", func() bool { return r.ctrl.Reports().Logs[nvme.LIDSMART] > 50 })
	if got := r.ctrl.Reports(); got.Asked != 7 || got.Requests != 2 {
		t.Errorf("%+v, want 7 event requests, of which it has taken 2", got)
	}
}

// A command that is late because firmware is being activated is not aborted.
func TestFirmwareActivation(t *testing.T) {
	r := newRig(t, pcietest.Config{AERL: 3}, quick)
	q := r.queue(1)
	var aborts, held atomic.Int64
	r.ctrl.Pause(true)
	r.ctrl.Tell(nvme.AERFirmwareActivation)
	r.eventually("it is reported", func() bool { h, _ := r.dev.Health(); return h.Events[ssd.EventNotice] == 1 })
	r.ctrl.Intercept(func(id uint16, e *nvme.SQE) (a pcietest.Answer) {
		if id == 0 && e.Opcode() == nvme.AdminAbort {
			aborts.Add(1)
		}
		a.Drop = id != 0 && held.Add(1) == 1
		return a
	})
	q.Submit([]ssd.Request{{Op: ssd.Flush}})
	var done [1]ssd.Completion
	if n := ssd.Await(q, done[:], 5*quick.Timeout); n != 0 || aborts.Load() != 0 || r.ctrl.Counts().Resets != 0 {
		t.Errorf("meanwhile: %d completions, %d aborts, %d resets", n, aborts.Load(), r.ctrl.Counts().Resets)
	}
	if n := r.ctrl.Reports().Logs[nvme.LIDFirmwareSlot]; n != 0 {
		t.Errorf("the log page was read %d times before the end", n)
	}
	r.ctrl.Pause(false)
	if n := ssd.Await(q, done[:], 20*time.Second); n != 1 || done[0].Err != nil || aborts.Load() == 0 {
		t.Errorf("afterwards: %d completions, %v, %d aborts", n, done[0].Err, aborts.Load())
	}
	if n := r.ctrl.Reports().Logs[nvme.LIDFirmwareSlot]; n != 1 {
		t.Errorf("the log page was read %d times", n)
	}
	r.ctrl.Intercept(nil)
}

// TestNothingIsSentWhileFirmwareIsActivated: the controller reports that it activates firmware, and other events with
// it. It processes no command until that has ended, so none may be sent that would time out. Then they are answered.
func TestNothingIsSentWhileFirmwareIsActivated(t *testing.T) {
	for _, events := range [][]nvme.AER{{nvme.AERFirmwareActivation, nvme.AERTemperature},
		{nvme.AERTransientError, nvme.AERTemperature, nvme.AERFirmwareActivation}} {
		cfg := quick
		cfg.AdminTimeout, cfg.HealthEvery = cfg.Timeout, 5*time.Millisecond
		r := newRig(t, pcietest.Config{AERL: 3}, cfg)
		q := r.queue(1)
		r.eventually("events are asked for", func() bool { return r.ctrl.Reports().Requests == 4 })
		var admin atomic.Int64
		told := false
		r.ctrl.Pause(true)
		r.ctrl.Intercept(func(id uint16, e *nvme.SQE) (a pcietest.Answer) {
			switch {
			case id != 0 || e.Opcode() == nvme.AdminAsyncEvent:
			case !told && e.Opcode() == nvme.AdminGetLogPage:
				told, a.Tell = true, events
			case told:
				admin.Add(1)
				a.Drop = true
			}
			return a
		})
		r.eventually("it is reported", func() bool { h, _ := r.dev.Health(); return h.Events[ssd.EventNotice] == 1 })
		var done [1]ssd.Completion
		ssd.Await(q, done[:], 5*cfg.Timeout)
		if n, resets := admin.Load(), r.ctrl.Counts().Resets; n != 0 || resets != 0 {
			t.Errorf("while firmware is activated: %d admin commands, %d resets", n, resets)
		}
		r.ctrl.Intercept(nil)
		r.ctrl.Pause(false)
		r.eventually("all events are answered", func() bool {
			h, _ := r.dev.Health()
			log := r.ctrl.Reports().Logs
			return h.Events[ssd.EventSMART] == 1 && int(h.Events[ssd.EventError]) == len(events)-2 &&
				log[nvme.LIDFirmwareSlot] == 1 && log[nvme.LIDError] == len(events)-2
		})
		r.works(q)
	}
}

// A namespace that is no longer what was opened is given up; another change of it does not matter.
func TestANamespaceThatChanges(t *testing.T) {
	var blocks atomic.Int64
	r := newRig(t, pcietest.Config{Identify: func(_ *nvme.IdentifyController, n *nvme.IdentifyNamespace) {
		if blocks.Load() != 0 {
			n.SetNSZE(2048)
			n.SetNCAP(2048)
			n.SetNUSE(2048)
		}
	}}, vfio.Config{})
	q := r.queue(1)
	r.ctrl.Tell(nvme.AERNamespaceChanged)
	r.eventually("it is looked at", func() bool { return r.ctrl.Reports().Logs[nvme.LIDChangedNS] == 1 })
	r.works(q)
	blocks.Store(2048)
	r.ctrl.Tell(nvme.AERNamespaceChanged)
	r.eventually("it is given up", func() bool { return r.dev.Healthy() != nil })
	if err := r.dev.Healthy(); !errors.Is(err, ssd.ErrGone) || !strings.Contains(err.Error(), "of 1048576 in 512") {
		t.Error(err)
	}
}

// A drive that refuses to tell its health, or does not answer, has none, and works.
func TestADriveWithoutHealth(t *testing.T) {
	cfg := quick
	cfg.HealthEvery = 5 * time.Millisecond
	cfg.AdminTimeout = 50 * time.Millisecond
	r := newRig(t, pcietest.Config{}, cfg)
	q := r.queue(1)
	unknown := func() bool { _, ok := r.dev.Health(); return !ok }
	on := func(a pcietest.Answer, seen *atomic.Int64) {
		r.ctrl.Intercept(func(id uint16, e *nvme.SQE) pcietest.Answer {
			if id == 0 && e.Opcode() == nvme.AdminGetLogPage {
				seen.Add(1)
				return a
			}
			return pcietest.Answer{}
		})
	}
	var refused, dropped atomic.Int64
	on(pcietest.Answer{Status: nvme.InvalidLogPage | nvme.DNR}, &refused)
	r.eventually("it has no health", unknown)
	r.eventually("it is asked again", func() bool { return refused.Load() > 5 })
	r.works(q)
	r.ctrl.Intercept(nil)
	r.eventually("it has health again", func() bool { return !unknown() })
	if n := r.ctrl.Counts().Resets; n != 0 {
		t.Errorf("%d resets", n)
	}
	on(pcietest.Answer{Drop: true}, &dropped)
	r.eventually("it is reset three times", func() bool { return r.ctrl.Counts().Resets >= 3 })
	r.eventually("it has no health", unknown)
	r.ctrl.Tell(nvme.AERReliability)
	var done [1]ssd.Completion
	if n := ssd.Await(q, done[:], 50*cfg.HealthEvery); n != 0 || dropped.Load() != 3 {
		t.Errorf("the log was asked for %d times, want 3", dropped.Load())
	}
	r.works(q)
	r.ctrl.Intercept(nil)
}

// TestADriveOpensThatDoesNotAnswerForItsHealth: while it is open such a drive is reset three times, is not asked any
// more, and works. It works, too, if it is opened then: it is reset once, and not asked again.
func TestADriveOpensThatDoesNotAnswerForItsHealth(t *testing.T) {
	ctrl, err := pcietest.New(pcietest.Config{SizeBytes: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int64
	ctrl.Intercept(func(id uint16, e *nvme.SQE) (a pcietest.Answer) {
		if id == 0 && e.Opcode() == nvme.AdminGetLogPage {
			asked.Add(1)
			a.Drop = true
		}
		return a
	})
	cfg := quick
	cfg.HealthEvery = 5 * time.Millisecond
	dev, err := vfio.Open(cfg, ctrl)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{T: t, ctrl: ctrl, dev: dev}
	q := r.queue(1)
	var done [1]ssd.Completion
	if n := ssd.Await(q, done[:], 20*cfg.HealthEvery); n != 0 || asked.Load() != 1 || ctrl.Counts().Resets != 1 {
		t.Errorf("the log was asked for %d times, with %d resets; want 1 and 1", asked.Load(), ctrl.Counts().Resets)
	}
	if h, ok := dev.Health(); ok {
		t.Errorf("it has health: %+v", h)
	}
	r.works(q)
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}

// An activation of firmware ends with a reset, and so does what waits for its end.
func TestAResetEndsAnActivation(t *testing.T) {
	r := newRig(t, pcietest.Config{AERL: 3}, quick)
	q := r.queue(1)
	asks := func() bool { return r.ctrl.Reports().Requests == 4 }
	r.eventually("events are asked for", asks)
	r.ctrl.Pause(true)
	r.ctrl.Tell(nvme.AERFirmwareActivation, nvme.AERTransientError)
	r.eventually("it is reported", func() bool { h, _ := r.dev.Health(); return h.Events[ssd.EventNotice] == 1 })
	r.ctrl.Store32(nvme.PropCSTS, uint32(nvme.CSTSPP)|1<<1) // CSTS.CFS
	r.eventually("it is reset", func() bool { return r.ctrl.Counts().Resets == 1 })
	r.eventually("events are asked for again", asks)
	r.works(q)
	if log := r.ctrl.Reports().Logs; log[nvme.LIDFirmwareSlot] != 0 || log[nvme.LIDError] != 0 {
		t.Errorf("after the reset log pages are read for events before it: %v", log)
	}
}

// A drive that answers for its health now and then is asked for as long as it is open.
func TestADriveThatAnswersNowAndThen(t *testing.T) {
	cfg := quick
	cfg.HealthEvery, cfg.AdminTimeout = 5*time.Millisecond, 50*time.Millisecond
	r := newRig(t, pcietest.Config{}, cfg)
	var asked atomic.Int64
	r.ctrl.Intercept(func(id uint16, e *nvme.SQE) (a pcietest.Answer) {
		a.Drop = id == 0 && e.Opcode() == nvme.AdminGetLogPage && asked.Add(1)%3 != 0
		return a
	})
	r.eventually("it is asked again", func() bool { return asked.Load() >= 10 })
	r.ctrl.Intercept(nil)
}
