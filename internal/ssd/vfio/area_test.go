package vfio_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/ssdtest"
	"jbofd/internal/ssd/vfio"
	"jbofd/internal/ssd/vfio/pcie"
	"jbofd/internal/ssd/vfio/pcietest"
)

// newPMR is persistent memory of 16 KiB.
func newPMR(confirm uint8) *pcietest.PMR {
	return &pcietest.PMR{Content: make([]byte, 16<<10), Confirm: confirm}
}

// area returns the only memory of a drive.
func (r *rig) area() ssd.Area {
	r.Helper()
	all := ssd.Areas(r.dev)
	if len(all) != 1 {
		r.Fatalf("it has %d areas, want 1", len(all))
	}
	return all[0]
}

// The memory of a controller keeps the promises of package ssd, wherever it is and whatever confirms writes.
func TestAreasConform(t *testing.T) {
	for name, cfg := range map[string]pcietest.Config{
		"read":         {PMR: newPMR(nvme.PMRWBMRead)},
		"status":       {PMR: newPMR(nvme.PMRWBMStatus)},
		"either":       {PMR: newPMR(nvme.PMRWBMRead | nvme.PMRWBMStatus)},
		"takes a time": {PMR: &pcietest.PMR{Content: make([]byte, 4096), Confirm: 1, NotReady: 20, Timeout: 4}},
		"volatile":     {CMB: &pcietest.CMB{Bytes: 16 << 10}},
		"behind":       {CMB: &pcietest.CMB{Bytes: 16 << 10, Offset: 8 << 10}},
		"old":          {CMB: &pcietest.CMB{Bytes: 4 << 10, Old: true}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, cfg, vfio.Config{})
			i := r.area().Info()
			if i.Persistent != (cfg.PMR != nil) || i.Persistent != (i.Kind == "pmr") || i.NotRestored ||
				i.BufferBytes > 0 != i.Persistent {
				t.Errorf("%+v", i)
			}
			ssdtest.AreaConformance(t, r.area())
		})
	}
	r := newRig(t, pcietest.Config{PMR: newPMR(1), CMB: &pcietest.CMB{Bytes: 4096}}, vfio.Config{})
	if all := ssd.Areas(r.dev); len(all) != 2 || !all[0].Info().Persistent || all[1].Info().Persistent {
		t.Errorf("%v, want the PMR and the CMB", all)
	}
	if all := ssd.Areas(newRig(t, pcietest.Config{}, vfio.Config{}).dev); len(all) != 0 {
		t.Errorf("a controller without memory has %v", all)
	}
}

// A power cut leaves of each word what was flushed, or what was written after that.
func TestPowerCutKeepsWhatWasFlushed(t *testing.T) {
	rng := random(t)
	lost := 0
	for _, confirm := range []uint8{nvme.PMRWBMRead, nvme.PMRWBMStatus, nvme.PMRWBMRead | nvme.PMRWBMStatus} {
		pmr := newPMR(confirm)
		words := len(pmr.Content) / 8
		safe, written := make([]uint64, words), make([]uint64, words)
		for round := range 10 {
			r := newRig(t, pcietest.Config{PMR: pmr}, vfio.Config{})
			a := r.area()
			b := make([]byte, len(pmr.Content))
			if err := a.Read(b, 0); err != nil {
				t.Fatal(err)
			}
			for w := range words {
				got := binary.LittleEndian.Uint64(b[8*w:])
				if got < safe[w] || got > written[w] {
					t.Fatalf("round %d: word %d is %d, flushed was %d, and written %d", round, w, got, safe[w],
						written[w])
				}
				if got < written[w] {
					lost++
				}
				safe[w], written[w] = got, got
			}
			for step := range 1 + rng.IntN(20) {
				for range 1 + rng.IntN(50) {
					w := rng.IntN(words)
					written[w] += uint64(step) + 1
					if err := a.Write(binary.LittleEndian.AppendUint64(nil, written[w]), 8*int64(w)); err != nil {
						t.Fatal(err)
					}
				}
				if rng.IntN(2) == 0 {
					if err := a.Flush(); err != nil {
						t.Fatal(err)
					}
					copy(safe, written)
				}
			}
			r.ctrl.CutPower(rng)
			if err := a.Flush(); !errors.Is(err, ssd.ErrGone) {
				t.Errorf("a flush without power: %v", err)
			}
			if err := r.dev.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if lost == 0 {
		t.Error("no cut has lost anything: it has shown nothing")
	}
}

// Memory that is not as it should be does not keep the drive from being used, and is not used itself.
func TestUnusableAreas(t *testing.T) {
	page := make([]byte, 4096)
	for name, tc := range map[string]struct {
		pmr  *pcietest.PMR
		cmb  *pcietest.CMB
		want error
	}{
		"PMR without a BAR":     {pmr: &pcietest.PMR{Content: page, Confirm: 1, NoBAR: true}},
		"PMR in the registers":  {pmr: &pcietest.PMR{Content: page, Confirm: 1, Registers: true}},
		"nothing confirms":      {pmr: &pcietest.PMR{Content: page}},
		"CMB beyond its BAR":    {cmb: &pcietest.CMB{Bytes: 8192, Offset: 4096, Short: 8}},
		"CMB without a BAR":     {cmb: &pcietest.CMB{Bytes: 8192, Short: 8192}},
		"CMB in the registers":  {cmb: &pcietest.CMB{Bytes: 4096, InRegisters: true}},
		"PMR that is not ready": {pmr: &pcietest.PMR{Content: page, Confirm: 2, NotReady: -1}, want: ssd.ErrMedia},
		"PMR that has failed": {pmr: &pcietest.PMR{Content: page, Confirm: 2, Health: nvme.PMRUnreliable},
			want: ssd.ErrMedia},
		"reserved health": {pmr: &pcietest.PMR{Content: page, Confirm: 2, Health: 7}, want: ssd.ErrMedia},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.want == nil {
				tc.want = pcie.ErrInvalidResponse
			}
			r := newRig(t, pcietest.Config{PMR: tc.pmr, CMB: tc.cmb}, vfio.Config{})
			ssdtest.Write(t, r.queue(1), 0, make([]byte, 4096), 0)
			a := r.area()
			b := make([]byte, 8)
			for what, err := range map[string]error{"healthy": a.Healthy(), "write": a.Write(b, 0),
				"flush": a.Flush()} {
				if !errors.Is(err, tc.want) || !errors.Is(err, ssd.ErrMedia) {
					t.Errorf("%s: %v, want %v", what, err, tc.want)
				}
			}
			if err := a.Read(b, 0); err == nil {
				t.Error("it can be read")
			}
		})
	}
}

// eventually waits until something is so.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it never is: %s", what)
		}
	}
}

// What a PMR says of itself after a loss of power, and later, is known: at a flush, or when the SMART log is read.
func TestHealthOfPersistentMemory(t *testing.T) {
	pmr := newPMR(nvme.PMRWBMStatus)
	pmr.Health = nvme.PMRRestoreError
	r := newRig(t, pcietest.Config{PMR: pmr}, vfio.Config{HealthEvery: 5 * time.Millisecond})
	a := r.area()
	if !a.Info().NotRestored || a.Healthy() != nil {
		t.Errorf("after a restore error: %+v, %v", a.Info(), a.Healthy())
	}
	want := []byte("8 bytes.")
	if err := errors.Join(a.Write(want, 8), a.Flush()); err != nil {
		t.Fatal(err)
	}
	r.ctrl.SetPMR(nvme.PMRReadOnly, 0)
	eventually(t, "read only", func() bool { return errors.Is(a.Healthy(), ssd.ErrReadOnly) })
	got := make([]byte, 8)
	if err := a.Read(got, 8); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%q, %v", got, err)
	}
	if err := a.Write(got, 0); !errors.Is(err, ssd.ErrReadOnly) {
		t.Errorf("a write: %v", err)
	}
	if !a.Info().NotRestored {
		t.Error("that it was not restored is forgotten")
	}
	r.ctrl.SetPMR(nvme.PMRNormal, 0)
	eventually(t, "healthy", func() bool { return a.Healthy() == nil })
	r.ctrl.SetPMR(nvme.PMRUnreliable, 0)
	eventually(t, "unreliable", func() bool { return errors.Is(a.Read(got, 8), ssd.ErrMedia) })
}

// A flush tells that a write has failed, or that the memory takes no more.
func TestFlushTellsOfFailedWrites(t *testing.T) {
	for _, confirm := range []uint8{nvme.PMRWBMRead, nvme.PMRWBMStatus} {
		for _, tc := range []struct {
			hsts, err uint8
			want      error
		}{{0, 9, ssd.ErrMedia}, {nvme.PMRReadOnly, 0, ssd.ErrReadOnly}, {nvme.PMRUnreliable, 0, ssd.ErrMedia}} {
			r := newRig(t, pcietest.Config{PMR: newPMR(confirm)}, vfio.Config{})
			a := r.area()
			if err := a.Write(make([]byte, 64), 0); err != nil {
				t.Fatal(err)
			}
			r.ctrl.SetPMR(tc.hsts, tc.err)
			for range 2 {
				if err := a.Flush(); !errors.Is(err, tc.want) {
					t.Errorf("a flush: %v, want %v", err, tc.want)
				}
			}
		}
	}
}

// A PMR that was not ready when the drive was opened is used once it is.
func TestAreaIsReadyLate(t *testing.T) {
	pmr := newPMR(nvme.PMRWBMRead)
	pmr.NotReady, pmr.Health = 200, nvme.PMRRestoreError // more than Open looks
	r := newRig(t, pcietest.Config{PMR: pmr}, vfio.Config{HealthEvery: time.Millisecond})
	a := r.area()
	if a.Healthy() == nil {
		t.Fatal("it is ready: the test shows nothing")
	}
	eventually(t, "ready", func() bool { return a.Healthy() == nil })
	if !a.Info().NotRestored {
		t.Error("it does not say that it was not restored")
	}
	ssdtest.AreaConformance(t, a)
}

// reset has the controller be reset, the function too if that is stuck, and waits until it works again.
func (r *rig) reset(q ssd.Queue, stuck bool) {
	r.Helper()
	n := r.ctrl.Counts().Resets
	if stuck {
		r.ctrl.Stick()
	}
	lost := true
	r.ctrl.Intercept(func(id uint16, e *nvme.SQE) pcietest.Answer {
		if id == 0 || !lost {
			return pcietest.Answer{}
		}
		lost = false
		return pcietest.Answer{Corrupt: func(c *nvme.CQE) { c.SetCID(c.CID() ^ 0x100) }}
	})
	if err := ssdtest.Do(r.T, q, ssd.Request{Op: ssd.Flush}); err != nil {
		r.Fatal(err)
	}
	r.ctrl.Intercept(nil)
	if r.ctrl.Counts().Resets == n {
		r.Fatal("the controller was not reset")
	}
}

// A reset keeps what the PMR has, also what was not flushed before, or the next flush tells. It works afterwards.
func TestPersistentMemoryAcrossResets(t *testing.T) {
	t.Parallel()
	for name, stuck := range map[string]bool{"controller": false, "function": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pmr := newPMR(nvme.PMRWBMStatus)
			pmr.NotReady, pmr.Timeout = 3, 2
			r := newRig(t, pcietest.Config{PMR: pmr}, quick)
			a, q := r.area(), r.queue(4)
			for i := range byte(2) {
				want := bytes.Repeat([]byte{i + 1}, 64)
				if err := a.Write(want, 128); err != nil {
					t.Fatal(err)
				}
				r.reset(q, stuck)
				got := make([]byte, 64)
				if err := a.Read(got, 128); err != nil || !bytes.Equal(got, want) {
					t.Fatalf("it has % x, %v", got[:8], err)
				}
				if err := a.Flush(); err != nil {
					t.Fatal(err)
				}
			}
			// Now the barrier before the reset does not work.
			if err := a.Write(make([]byte, 64), 128); err != nil {
				t.Fatal(err)
			}
			r.ctrl.SetPMR(nvme.PMRNormal, 1)
			r.reset(q, true)
			if err := a.Flush(); !errors.Is(err, ssd.ErrMedia) {
				t.Errorf("a flush after a reset that has lost something: %v", err)
			}
			if err := errors.Join(a.Flush(), a.Healthy()); err != nil {
				t.Errorf("after that: %v", err)
			}
		})
	}
}

// A reset is an error of the next flush of volatile memory, which has lost everything.
func TestVolatileMemoryAcrossResets(t *testing.T) {
	t.Parallel()
	r := newRig(t, pcietest.Config{CMB: &pcietest.CMB{Bytes: 4096}}, quick)
	a, q := r.area(), r.queue(4)
	if err := errors.Join(a.Write(make([]byte, 64), 0), a.Flush()); err != nil {
		t.Fatal(err)
	}
	r.reset(q, true)
	if err := a.Flush(); !errors.Is(err, ssd.ErrMedia) {
		t.Errorf("a flush after a reset: %v", err)
	}
	want, got := bytes.Repeat([]byte{7}, 64), make([]byte, 64)
	if err := errors.Join(a.Write(want, 0), a.Flush(), a.Read(got, 0)); err != nil || !bytes.Equal(got, want) {
		t.Errorf("after that it has % x, %v", got[:8], err)
	}
}

// The memory of a drive that is pulled while it is used is gone, and not touched any more. Nothing reads as ones.
func TestAreaOfADriveThatIsPulled(t *testing.T) {
	for name, pull := range map[string]func(r *rig){
		"vanishes": func(r *rig) { r.ctrl.Vanish() },
		"removed":  func(r *rig) { r.ctrl.Removed().Signal() },
		"closed": func(r *rig) {
			if err := r.dev.Close(); err != nil {
				r.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, pcietest.Config{PMR: newPMR(nvme.PMRWBMRead)}, quick)
			a := r.area()
			started, ended := make(chan struct{}), make(chan error)
			go func() {
				b, ones := make([]byte, 8192), bytes.Repeat([]byte{0xFF}, 8)
				for i := 0; ; i++ {
					if i == 10 {
						close(started)
					}
					if err := errors.Join(a.Write(b, 0), a.Flush()); err != nil {
						ended <- err
						return
					}
					clear(b)
					if err := a.Read(b, 0); err != nil {
						ended <- err
						return
					}
					if bytes.Contains(b, ones) {
						ended <- errors.New("what is not there reads as ones")
						return
					}
				}
			}()
			<-started
			pull(r)
			select {
			case err := <-ended:
				if !errors.Is(err, ssd.ErrGone) {
					t.Error(err)
				}
			case <-time.After(20 * time.Second):
				t.Fatal("the memory is used for ever")
			}
			eventually(t, "the drive is gone", func() bool { return errors.Is(r.dev.Healthy(), ssd.ErrGone) })
			b := make([]byte, 8)
			for what, err := range map[string]error{"healthy": a.Healthy(), "read": a.Read(b, 0),
				"write": a.Write(b, 0), "flush": a.Flush()} {
				if !errors.Is(err, ssd.ErrGone) {
					t.Errorf("%s: %v", what, err)
				}
			}
		})
	}
}

// What reads as ones is what is there, unless the drive has vanished.
func TestOnesAreNotBelieved(t *testing.T) {
	r := newRig(t, pcietest.Config{PMR: newPMR(nvme.PMRWBMRead)}, quick)
	a := r.area()
	ones, got := bytes.Repeat([]byte{0xFF}, 64), make([]byte, 64)
	if err := errors.Join(a.Write(ones, 0), a.Read(got, 0)); err != nil || !bytes.Equal(got, ones) {
		t.Errorf("% x is read, %v", got[:8], err)
	}
	r.ctrl.Vanish()
	if err := a.Read(got, 64); !errors.Is(err, ssd.ErrGone) {
		t.Errorf("a read of a drive that has vanished: %v", err)
	}
}
