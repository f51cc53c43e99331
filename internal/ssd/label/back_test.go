package label

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// TestAnUpdateThatFailedIsTakenBack: an update has failed, and the device has carried it out nevertheless, or does
// late. Users go on with the label as it was. So a restart must find that, once the device has answered: by a next
// update, by Close, or because the Store sees to it.
func TestAnUpdateThatFailedIsTakenBack(t *testing.T) {
	defer func(was time.Duration) { patience = was }(patience)
	for _, rule := range []fault.Rule{
		{Ops: []ssd.Op{ssd.Flush}, Nth: 1, Hold: true}, {Ops: []ssd.Op{ssd.Flush}, Nth: 2, Hold: true},
		{Ops: []ssd.Op{ssd.Write}, Nth: 1, Hold: true}, {Ops: []ssd.Op{ssd.Write}, Nth: 2, Hold: true},
		{Ops: []ssd.Op{ssd.Flush}, Nth: 1, Err: ssd.ErrMedia}, {Ops: []ssd.Op{ssd.Write}, Nth: 2, Err: ssd.ErrMedia},
	} {
		for _, by := range []string{"update", "close", "itself"} {
			t.Run(fmt.Sprintf("%v %d %v %s", rule.Ops, rule.Nth, rule.Hold, by), func(t *testing.T) {
				takenBack(t, rule, by)
			})
		}
	}
}

func takenBack(t *testing.T, rule fault.Rule, by string) {
	patience = time.Minute
	dev, err := fault.New(newMem(t, 64*mib, 512), fault.Config{})
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
	if err := add(2); err != nil {
		t.Fatal(err)
	}
	s.retryEvery = time.Hour
	if by == "itself" {
		s.retryEvery = time.Millisecond
	}
	want := ssd.ErrMedia
	if rule.Hold {
		patience, want = 20*time.Millisecond, ErrUnanswered
	}
	dev.SetRules(rule)
	generation := s.Label().Generation
	if err := s.Update(func(l *Label) error { return l.Free(testUUID(2)) }); !errors.Is(err, want) {
		t.Fatal(err)
	}
	s.mu.Lock()
	patience = time.Minute
	s.mu.Unlock()
	dev.SetRules()
	dev.Release()
	if l := s.Label(); l.Find(testUUID(2)) < 0 {
		t.Fatal("the label in use has it no more")
	}
	if s.Label().Generation == generation {
		t.Error("the generation of what was refused is given to other content") // a crash leaves two labels with it
	}
	switch by {
	case "update":
		if err := add(3); err != nil {
			t.Error(err)
		}
	case "close":
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	case "itself":
		for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			s.mu.Lock()
			behind := s.behind
			s.mu.Unlock()
			if !behind {
				break
			}
			if time.Now().After(end) {
				t.Fatal("the Store does not see to it")
			}
		}
	}
	again, err := Open(dev) // as after a crash, unless by is "close"
	if err != nil {
		t.Fatal(err)
	}
	if l := again.Label(); l.Find(testUUID(2)) < 0 || len(again.Repaired()) > 0 ||
		(l.Find(testUUID(3)) >= 0) != (by == "update") {
		t.Errorf("the next opening finds %+v, copies repaired: %v", l, again.Repaired())
	}
	if err := errors.Join(again.Close(), s.Close()); err != nil {
		t.Error(err)
	}
}

// TestALabelOfADriveThatIsGoneIsNotWrittenAgain: another Store may have the drive when it is back.
func TestALabelOfADriveThatIsGoneIsNotWrittenAgain(t *testing.T) {
	dev, err := fault.New(newMem(t, 64*mib, 512), fault.Config{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := Format(dev, testUUID(1), true)
	if err != nil {
		t.Fatal(err)
	}
	dev.Vanish()
	if err := s.Update(func(*Label) error { return nil }); !errors.Is(err, ssd.ErrGone) {
		t.Fatal(err)
	}
	s.mu.Lock()
	tag := s.tag
	s.mu.Unlock()
	if wait := s.takeBack(); wait != 0 {
		t.Errorf("another attempt after %v", wait)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if s.tag != tag {
		t.Errorf("%d requests after the loss", s.tag-tag)
	}
}
