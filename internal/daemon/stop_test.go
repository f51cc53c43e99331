package daemon

import (
	"context"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// TestACallerThatSaysNothingDoesNotKeepADriveFromBeingClosed: a client has opened the admin socket and sends nothing,
// or only a part of a request. The node still stops in order and in time.
func TestACallerThatSaysNothingDoesNotKeepADriveFromBeingClosed(t *testing.T) {
	for _, said := range []string{"", "GET /v1/status HTTP/1.1\r\n",
		"POST /v1/namespaces/delete HTTP/1.1\r\nHost: jbofd\r\nContent-Length: 50\r\n\r\n{"} {
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

// TestAStopWaitsForAReload: a reload through the admin socket or by SIGHUP is under way when the node is to stop. It
// may take as long as the connections may, and the node closes its drives. If it takes longer, the log says so and
// blames no drive.
func TestAStopWaitsForAReload(t *testing.T) {
	for _, by := range []string{"admin socket", "SIGHUP"} {
		for _, ends := range []bool{true, false} {
			if by == "SIGHUP" && !ends {
				continue // the stop makes no difference between the two, and this one takes long
			}
			w := newWorld(t)
			w.closeTimeout = closeTimeout
			out := &lines{}
			w.log = out
			hangup := make(chan os.Signal, 1)
			w.reload = hangup
			w.configure([]string{memSSD}, []string{"{nsid: 1, ssd: ssd0, size: 16MiB}"},
				"limits: {drain_timeout: 1500ms}")
			n := w.mustStart()
			loading, release := make(chan struct{}), make(chan struct{})
			w.onLoad = func() {
				close(loading)
				<-release
			}
			answered := make(chan struct{})
			go func() {
				defer close(answered)
				if by == "SIGHUP" {
					hangup <- syscall.SIGHUP
				} else {
					_, _ = n.admin.Reload(t.Context()) // whether it has an answer in time depends on ends
				}
			}()
			<-loading
			if ends {
				time.AfterFunc(1100*time.Millisecond, func() { close(release) })
			}
			began := time.Now()
			if err := n.stop(); err != nil {
				t.Error(err)
			}
			took := time.Since(began)
			blamed, named := out.with("a drive has not answered"), out.with("a change of the configuration has not")
			if len(blamed) > 0 || len(named) > 0 == ends || ends && len(out.with("stopped")) == 0 {
				t.Errorf("%s, ends %v, after %v: %s%s", by, ends, took, blamed, named)
			}
			if took > 10*time.Second {
				t.Errorf("%s, ends %v: stopping took %v", by, ends, took)
			}
			if !ends {
				close(release)
			}
			<-answered
		}
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
	dev := n.drives()[0].dev.(*fault.Device)
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

// TestAStopDoesNotWaitForTheStart: with a drive that does not answer, that would be for ever.
func TestAStopDoesNotWaitForTheStart(t *testing.T) {
	w, log := newWorld(t), &lines{}
	w.closeTimeout, w.log = time.Millisecond, log
	w.configure([]string{"{name: ssd0, backend: mem, size: 256MiB, fault: {delay: 500ms, delay_probability: 1}}"},
		[]string{"{nsid: 1, ssd: ssd0, size: 64MiB, type: kv}"})
	cfg, err := w.load()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		ended <- Run(ctx, Options{Config: cfg, Load: w.load, Stderr: log, CloseTimeout: w.closeTimeout})
	}()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for len(log.with("drive opened")) == 0 {
		select {
		case err := <-ended:
			t.Fatal("Run has ended: ", err)
		case <-tick.C:
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if opened := log.with("key-value store opened"); len(opened) > 0 {
		t.Errorf("the stop has waited for the drive: %q", opened)
	}
	if len(log.with("stopped before the start had ended")) != 1 {
		t.Error("the log does not say why the daemon has ended")
	}
}
