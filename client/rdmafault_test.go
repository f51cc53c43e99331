package client

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"jbofd/internal/nvmeof/rdma/cm"
	"jbofd/internal/nvmeof/rdma/memverbs"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// TestRDMAHostileTargets: invalid responses end the connection with an error that names the fault.
func TestRDMAHostileTargets(t *testing.T) {
	for name, v := range map[string]struct {
		respond func(capsule []byte) [][]byte
		want    string
	}{
		"short":     {func(b []byte) [][]byte { return [][]byte{b[:8]} }, "8 bytes"},
		"long":      {func(b []byte) [][]byte { return [][]byte{append(b, 0, 0)} }, "more than 16 bytes"},
		"unknown":   {func(b []byte) [][]byte { b[12] ^= 0x15; return [][]byte{b} }, "not outstanding"},
		"duplicate": {func(b []byte) [][]byte { return [][]byte{b, b} }, "CID"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newRDMAScript(t, 1<<20)
			c, q := openRDMAQPair(t, s, quick(s))
			s.mu.Lock()
			s.rdma.respond = func(c *scriptConn, b []byte) [][]byte {
				if c.qid != q.ID() {
					return [][]byte{b}
				}
				return v.respond(b)
			}
			s.mu.Unlock()
			cmd := Command{Data: make([]byte, 4096)}
			SetRW(&cmd, OpRead, 1, 0, 8)
			if _, err := q.Submit([]Command{cmd}); err != nil {
				t.Fatal(err)
			}
			var err error
			for comps := make([]Completion, 1); err == nil; {
				_, err = q.Poll(comps, -1)
			}
			if !errors.Is(err, ErrProtocol) || !errors.Is(err, ErrConnectionLost) ||
				!strings.Contains(err.Error(), v.want) {
				t.Errorf("%v, want ErrProtocol with %q", err, v.want)
			}
			// The controller's other connections continue.
			if _, err := c.NamespaceIDs(testContext(t)); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestRDMAFailuresOfEveryKindAreConnectionLosses: the controller reconnects and operations continue.
func TestRDMAFailuresOfEveryKindAreConnectionLosses(t *testing.T) {
	for name, harm := range map[string]func(*memverbs.Endpoint){
		"cut": (*memverbs.Endpoint).Cut, "fatal": (*memverbs.Endpoint).Break,
	} {
		t.Run(name, func(t *testing.T) {
			s := newRDMAScript(t, 1<<20)
			o := quick(s)
			o.KATO = 200 * time.Millisecond // the target does not see that the host's queue pair has failed
			c, n := connect(t, o)
			for range 3 {
				before := c.Losses()
				for _, e := range s.rdma.net.Endpoints() {
					if e.Local().Addr() == netip.MustParseAddr("10.0.0.2") && e.QPNum() != 0 {
						harm(e)
						break
					}
				}
				eventually(t, "the loss", func() bool { return c.Losses() > before })
				if _, err := n.WriteAt(testContext(t), make([]byte, 8192), 0, 0); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestRDMADeviceRemoved: the controller continues with another device, and registers its buffers there.
func TestRDMADeviceRemoved(t *testing.T) {
	s := newRDMAScript(t, 8<<20)
	o := quick(s)
	o.KATO = 200 * time.Millisecond // the target does not see that the host's device is gone
	c, q := openRDMAQPair(t, s, o)
	n, err := c.Namespace(testContext(t), 1)
	if err != nil {
		t.Fatal(err)
	}
	region := allocBuffer(t, c, 2<<20)
	other := allocBuffer(t, c, 1<<20)
	for i := range region {
		region[i] = 3
	}
	s.rdma.host.RemoveDevice(s.rdma.host.Devices()[0])
	if _, err := q.Poll(make([]Completion, 1), -1); !errors.Is(err, ErrConnectionLost) {
		t.Errorf("%v, want ErrConnectionLost", err)
	}
	if err := q.Close(); err != nil {
		t.Error(err)
	}
	eventually(t, "all of the old device is closed", func() bool {
		k := s.rdma.host.Counts()
		return k.Domains == 0 && k.MRs == 0 && k.QPs == 0 && k.CQs == 0
	})
	s.rdma.host.AddDevice(memverbs.DeviceConfig{Addr: netip.MustParseAddr("10.0.0.2")})
	if _, err := n.WriteAt(testContext(t), make([]byte, 512), 0, 0); err != nil {
		t.Fatal(err)
	}
	if q, err = c.OpenQPair(testContext(t)); err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	w := Command{Data: region} // only in place, because it is longer than the largest bounce buffer
	SetRW(&w, OpWrite, 1, 0, 4096)
	run(t, q, []Command{w})
	r := Command{Data: other}
	SetRW(&r, OpRead, 1, 0, 2048)
	run(t, q, []Command{r})
	if other[0] != 3 || other[len(other)-1] != 3 {
		t.Error("the data did not come back")
	}
}

// TestRDMARejectSaysWhy: the status of a refused connection is named, and nothing stays open.
func TestRDMARejectSaysWhy(t *testing.T) {
	for _, qid := range []uint16{0, 2} {
		s := newRDMAScript(t, 1<<20)
		s.rdma.reject = func(q uint16) cm.Status {
			if q == qid {
				return cm.NoResources
			}
			return 0
		}
		_, err := Connect(testContext(t), quick(s))
		var r *verbs.RejectedError
		if err == nil || !errors.As(err, &r) || !strings.Contains(err.Error(), "no resources") ||
			!strings.Contains(err.Error(), fmt.Sprintf("queue %d", qid)) {
			t.Errorf("%v, want a reject of queue %d for want of resources", err, qid)
		}
		if k := s.rdma.host.Counts(); k != (verbs.Counts{}) {
			t.Errorf("left open: %+v", k)
		}
	}
}

// TestRDMAShortResourcesAreErrors: if the device lacks a resource, Connect fails, and nothing stays open.
func TestRDMAShortResourcesAreErrors(t *testing.T) {
	for name, limit := range map[string]func(*verbs.Attr){
		"queue pairs": func(a *verbs.Attr) { a.MaxQPs = 1 },
		"depth":       func(a *verbs.Attr) { a.MaxQPWRs = 4 },
		"completions": func(a *verbs.Attr) { a.MaxCQEs = 4 },
		"regions":     func(a *verbs.Attr) { a.MaxMRs = 1 },
		"length":      func(a *verbs.Attr) { a.MaxMRBytes = 4096 },
	} {
		t.Run(name, func(t *testing.T) {
			s := newRDMAScript(t, 1<<20)
			s.rdma.host.Devices()[0].SetAttr(limit)
			_, err := Connect(testContext(t), quick(s))
			if !errors.Is(err, verbs.ErrResources) {
				t.Errorf("%v, want ErrResources", err)
			}
			if k := s.rdma.host.Counts(); k != (verbs.Counts{}) {
				t.Errorf("left open: %+v", k)
			}
		})
	}
}
