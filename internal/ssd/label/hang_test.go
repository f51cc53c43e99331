package label

import (
	"errors"
	"testing"
	"time"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// TestADeviceThatDoesNotAnswerIsGivenUp: an update ends with an error, the label can be read meanwhile, and what the
// device does late counts for nothing that comes afterwards.
func TestADeviceThatDoesNotAnswerIsGivenUp(t *testing.T) {
	defer func(was time.Duration) { patience = was }(patience)
	for _, op := range []ssd.Op{ssd.Write, ssd.Flush} {
		inner := newMem(t, 64*mib, 512)
		dev, err := fault.New(inner, fault.Config{})
		if err != nil {
			t.Fatal(err)
		}
		s, err := Format(dev, testUUID(1), true)
		if err != nil {
			t.Fatal(err)
		}
		add := func(n byte) error {
			return s.Update(func(l *Label) error {
				_, err := l.Allocate(Extent{UUID: testUUID(n), LengthBytes: mib, NSID: uint32(n), Use: KV, NQN: "nqn"})
				return err
			})
		}
		patience = time.Hour
		dev.SetRules(fault.Rule{Ops: []ssd.Op{op}, Hold: true})
		ended := make(chan error, 1)
		go func() { ended <- add(2) }()
		if err := dev.AwaitHeld(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		if l := s.Label(); len(l.Extents) != 0 {
			t.Errorf("the label has %v before it is written", l.Extents)
		}
		dev.SetRules()
		dev.Release()
		if err := <-ended; err != nil {
			t.Errorf("it has answered in time: %v", err)
		}
		patience = 20 * time.Millisecond
		dev.SetRules(fault.Rule{Ops: []ssd.Op{op}, Hold: true})
		for range 2 { // the second one waits for the first
			if err := add(3); !errors.Is(err, ErrUnanswered) {
				t.Errorf("%v: %v", op, err)
			}
		}
		if l := s.Label(); len(l.Extents) != 1 {
			t.Errorf("the label has %v", l.Extents)
		}
		patience = time.Hour
		dev.SetRules(fault.Rule{Ops: []ssd.Op{op}, Nth: 2, Err: ssd.ErrMedia})
		dev.Release()
		if err := add(4); !errors.Is(err, ssd.ErrMedia) {
			t.Errorf("a late answer was taken for that of another request: %v", err)
		}
		if err := add(5); err != nil {
			t.Error(err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		again, err := Open(dev)
		if err != nil {
			t.Fatal(err)
		}
		if l := again.Label(); len(l.Extents) != 2 || l.Find(testUUID(2)) < 0 || l.Find(testUUID(5)) < 0 {
			t.Errorf("the label has %v", l.Extents)
		}
		if err := again.Close(); err != nil {
			t.Error(err)
		}
	}
}
