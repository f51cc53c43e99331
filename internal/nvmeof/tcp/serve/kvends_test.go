package serve_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// TestAnOldPutNeverReplacesANewerOne: the drive holds a Put's value, or the segment that commits it, while the host's
// connections are lost or its controller is reset. What the host puts when it is back stays.
func TestAnOldPutNeverReplacesANewerOne(t *testing.T) {
	ends := map[string]func(t *testing.T, r *rig, c *client.Controller){
		"cut": func(_ *testing.T, r *rig, _ *client.Controller) {
			for _, conn := range r.Service.Conns() {
				conn.Shut("cut by the test")
			}
		},
		"reset": func(t *testing.T, _ *rig, c *client.Controller) {
			if err := c.SetProperty(t.Context(), nvme.PropCC, uint64(rawEnable.WithEN(false))); err != nil {
				t.Fatal(err)
			}
		},
	}
	for name, end := range ends {
		for nth, what := range []string{"value", "segment"} {
			t.Run(fmt.Sprintf("%s/%s", name, what), func(t *testing.T) { oldPut(t, uint64(nth+1), end) })
		}
	}
}

// oldPut lets the drive hold the nth write of a Put until after the end of its association.
func oldPut(t *testing.T, nth uint64, end func(*testing.T, *rig, *client.Controller)) {
	r, dev := heldRig(t)
	r.realKV(t)
	c, err := client.Connect(t.Context(), client.Options{Address: r.address, SubNQN: testNQN, KATO: -1,
		CtrlLossTimeout: time.Minute, ReconnectDelay: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	n, err := kv.Open(t.Context(), c, kvNSID, kv.Options{})
	if err != nil {
		t.Fatal(err)
	}
	key := []byte("key")
	value := func(fill byte) []byte {
		b := make([]byte, 100_000) // too long for a group
		for i := range b {
			b[i] = fill
		}
		return b
	}
	if err := n.Put(t.Context(), key, value('b')); err != nil {
		t.Fatal(err)
	}
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Nth: nth, Hold: true})
	ctx, cancel := context.WithCancel(t.Context())
	old := make(chan error, 1)
	go func() { old <- n.Put(ctx, key, value('o')) }()
	awaitHeld(t, dev, 1)
	cancel() // else the host repeats it when it is back
	if err := <-old; !errors.Is(err, client.ErrIndeterminate) {
		t.Errorf("the old Put, given up: %v", err)
	}
	end(t, r, c)
	dev.SetRules()
	time.AfterFunc(200*time.Millisecond, dev.Release)
	began := time.Now()
	if err := n.Put(t.Context(), key, value('n')); err != nil {
		t.Fatalf("the new Put: %v", err)
	}
	if took := time.Since(began); took < 150*time.Millisecond {
		t.Errorf("the host is back after %v, while its old Put is at the drive", took)
	}
	if c.Losses() != 1 {
		t.Errorf("%d losses", c.Losses())
	}
	for i := range 20 {
		got, err := n.Value(t.Context(), key)
		if err != nil || got[0] != 'n' {
			t.Fatalf("Get %d: %d bytes, %v", i, len(got), err)
		}
		if err := n.Put(t.Context(), fmt.Appendf(nil, "k%d", i), value('x')); err != nil { // let the store work
			t.Fatal(err)
		}
	}
}
