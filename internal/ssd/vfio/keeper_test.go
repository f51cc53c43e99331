package vfio

import (
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/ssdtest"
	"jbofd/internal/ssd/vfio/pcietest"
)

// The keeper sleeps when nothing is under way, and looks again after the next command.
func TestTheKeeperOfAnIdleDriveLooksAgain(t *testing.T) {
	c, err := pcietest.New(pcietest.Config{SizeBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	d, err := Open(Config{Name: "test", Timeout: 40 * time.Millisecond, AbortTimeout: 20 * time.Millisecond}, c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}()
	q, err := d.OpenQueue(1)
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); !d.idle.Load(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the keeper does not sleep")
		}
	}
	dropped := false
	c.Intercept(func(id uint16, _ *nvme.SQE) pcietest.Answer {
		drop := id != 0 && !dropped
		dropped = dropped || drop
		return pcietest.Answer{Drop: drop}
	})
	if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Flush}); err != nil || !dropped {
		t.Errorf("%v; dropped: %v", err, dropped)
	}
	c.Intercept(nil)
}
