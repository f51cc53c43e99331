package daemon

import (
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// TestACallerThatSaysNothingDoesNotKeepADriveFromBeingClosed: a client has opened the admin socket and sends nothing,
// or only a part of a request. The node still stops in order and in time.
func TestACallerThatSaysNothingDoesNotKeepADriveFromBeingClosed(t *testing.T) {
	for _, said := range []string{"", "GET /v1/status HTTP/1.1\r\n"} {
		w := newWorld(t)
		w.closeTimeout = closeTimeout
		out := &lines{}
		w.log = out
		w.configure([]string{"{name: f0, backend: file, path: DIR/f0, create: true, size: 64MiB}"},
			[]string{"{nsid: 1, ssd: f0, size: 16MiB}"})
		n := w.mustStart()
		c, err := net.Dial("unix", w.path("admin.sock"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte(said)); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := n.stop(); err != nil {
			t.Error(err)
		}
		if got := out.with("stopped without closing"); len(got) > 0 {
			t.Errorf("with %q sent to the admin socket, after %v: %s", said, time.Since(began), got)
		}
		_ = c.Close()
	}
}

// TestAStoreThatWasGivenUpIsOutOfTheWayBeforeItsExtentIsUsedAgain: closing a store is given up because its drive delays
// a write. When its namespace is added again, that write must not fall among those of the new store.
func TestAStoreThatWasGivenUpIsOutOfTheWayBeforeItsExtentIsUsedAgain(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{"{name: ssd0, backend: mem, size: 256MiB, fault: {delay: 1us, delay_probability: 0}}"},
		[]string{"{nsid: 1, ssd: ssd0, size: 64MiB, type: kv}"})
	cfg, err := w.load()
	if err != nil {
		t.Fatal(err)
	}
	n, err := start(Options{Config: cfg, Load: w.load, Stderr: io.Discard, Version: "test", CloseTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer n.close()
	dev := n.ssds[0].dev.(*fault.Device)
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Hold: true})
	n.publisher.CloseAll(time.Millisecond)
	if err := dev.AwaitHeld(t.Context(), 1); err != nil { // of the last checkpoint
		t.Fatal(err)
	}
	dev.SetRules()
	var released atomic.Bool
	time.AfterFunc(200*time.Millisecond, func() {
		released.Store(true)
		dev.Release()
	})
	_, err = n.Reload("test", false)
	if err != nil || !released.Load() {
		t.Errorf("the namespace is back while a write of its old store is at the drive (%v)", err)
	}
}
