package daemon

import (
	"strings"
	"testing"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// TestTheStatusSaysWhatAReloadWaitsFor: a namespace is being deleted on a drive that takes its time. The status says
// so, and how far it is; the log says what a reload waits for that comes meanwhile.
func TestTheStatusSaysWhatAReloadWaitsFor(t *testing.T) {
	w, log := newWorld(t), &lines{}
	drives := []string{"{name: ssd0, backend: mem, size: 256MiB, fault: {delay: 1us, delay_probability: 0}}"}
	w.configure(drives, []string{"{nsid: 1, ssd: ssd0, size: 64MiB}"})
	cfg, err := w.load()
	if err != nil {
		t.Fatal(err)
	}
	n, err := start(Options{Config: cfg, Load: w.load, Stderr: log, Version: "test", CloseTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer n.close()
	uuid := n.drives()[0].label.Label().Extents[0].UUID.String()
	w.configure(drives, nil)
	if _, err := n.Reload("test", false); err != nil {
		t.Fatal(err)
	}
	running := func() *admin.RunningChange { return n.status().(admin.Status).Change }
	if c := running(); c != nil {
		t.Errorf("nothing is under way, and the status says %v", c)
	}
	dev := n.drives()[0].dev.(*fault.Device)
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.WriteZeroes}, Nth: 2, Hold: true})
	deleted, reloaded := make(chan error, 1), make(chan error, 1)
	go func() { deleted <- n.DeleteNamespace(uuid) }()
	if err := dev.AwaitHeld(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if c := running(); c == nil || c.What != "the deletion of namespace "+uuid || c.DoneBytes != 32<<20 ||
		c.TotalBytes != 64<<20 || !strings.Contains(c.String(), "32 of 64 MiB (50 %) erased") {
		t.Errorf("the status says %+v", c)
	}
	go func() {
		_, err := n.Reload("test", true)
		reloaded <- err
	}()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for len(log.with("a change waits for another one")) == 0 {
		<-tick.C
	}
	if got := log.with("a change waits for another one")[0]; !strings.Contains(got, "a dry run of a reload (test)") ||
		!strings.Contains(got, "the deletion of namespace "+uuid) {
		t.Error(got)
	}
	dev.SetRules()
	dev.Release()
	for _, c := range []chan error{deleted, reloaded} {
		if err := <-c; err != nil {
			t.Error(err)
		}
	}
	if c := running(); c != nil {
		t.Errorf("nothing is under way any more, and the status says %v", c)
	}
}
