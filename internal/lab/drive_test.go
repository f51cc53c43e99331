package lab

import (
	"bytes"
	"errors"
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/internal/ssd"
)

var seedFlag = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

const testBlock = 512

func newTestDrive(t *testing.T, volatile bool, salt uint64) *Drive {
	t.Helper()
	return NewDrive(DriveConfig{SizeBytes: 64 * testBlock, BlockSize: testBlock, Volatile: volatile,
		Rand:   rand.New(rand.NewPCG(*seedFlag, salt)),
		Misuse: func(what string) { t.Error(what) }})
}

// do runs one request to its end.
func do(d *Drive, r ssd.Request) error {
	d.Submit(0, r)
	_, err := d.End(len(d.Flights) - 1)
	return err
}

func filled(n int, b byte) []byte { return bytes.Repeat([]byte{b}, n*testBlock) }

func write(block, n int, b byte) ssd.Request {
	return ssd.Request{Op: ssd.Write, Offset: int64(block) * testBlock, Len: int64(n) * testBlock, Buf: filled(n, b)}
}

// TestALossOfPowerKeepsAnyVersionSinceTheLastFlush: a block written since the flush may have any of its versions, in
// any combination with other blocks. Older versions do not occur, and no flushed block is lost.
func TestALossOfPowerKeepsAnyVersionSinceTheLastFlush(t *testing.T) {
	t.Logf("-seed %d", *seedFlag)
	seen := map[[2]byte]bool{}
	for salt := range uint64(400) {
		d := newTestDrive(t, true, salt)
		for _, r := range []ssd.Request{write(0, 2, 1), write(0, 2, 2), {Op: ssd.Flush}, write(0, 2, 3),
			write(0, 2, 4)} {
			if err := do(d, r); err != nil {
				t.Fatal(err)
			}
		}
		d.PowerLoss()
		got := [2]byte{d.Visible[0], d.Visible[testBlock]}
		for _, b := range got {
			if b < 2 || b > 4 {
				t.Fatalf("a block holds version %d", b)
			}
		}
		for i, b := range got {
			if !bytes.Equal(d.Visible[i*testBlock:][:testBlock], filled(1, b)) {
				t.Fatal("a block is torn within itself")
			}
		}
		seen[got] = true
	}
	if len(seen) != 9 {
		t.Errorf("%d of 9 outcomes occur: %v", len(seen), seen)
	}
}

// TestAFlushCoversOnlyWhatWasCompleteAtItsSubmission: a write that completes while the flush is in flight may be lost.
func TestAFlushCoversOnlyWhatWasCompleteAtItsSubmission(t *testing.T) {
	lost := 0
	for salt := range uint64(100) {
		d := newTestDrive(t, true, salt)
		if err := do(d, write(0, 1, 1)); err != nil {
			t.Fatal(err)
		}
		d.Submit(0, ssd.Request{Op: ssd.Flush, Tag: 1})
		if err := do(d, write(1, 1, 1)); err != nil {
			t.Fatal(err)
		}
		if r, err := d.End(0); err != nil || r.Tag != 1 {
			t.Fatal(r, err)
		}
		d.PowerLoss()
		if d.Visible[0] != 1 {
			t.Fatal("a flushed block is lost")
		}
		if d.Visible[testBlock] == 0 {
			lost++
		}
	}
	if lost == 0 || lost == 100 {
		t.Errorf("the later write is lost %d times in 100", lost)
	}
}

// TestFUAIsDurable, without a flush.
func TestFUAIsDurable(t *testing.T) {
	d := newTestDrive(t, true, 1)
	r := write(3, 2, 9)
	r.Flags = ssd.FUA
	if err := do(d, r); err != nil {
		t.Fatal(err)
	}
	d.PowerLoss()
	if !bytes.Equal(d.Visible[3*testBlock:][:2*testBlock], filled(2, 9)) {
		t.Error("lost")
	}
}

// TestKillTearsOnlyWritesInFlight. Completed writes stay visible.
func TestKillTearsOnlyWritesInFlight(t *testing.T) {
	torn := 0
	for salt := range uint64(200) {
		d := newTestDrive(t, salt%2 == 0, salt)
		if err := do(d, write(0, 4, 1)); err != nil {
			t.Fatal(err)
		}
		d.Submit(0, write(2, 4, 2))
		d.Kill()
		if !bytes.Equal(d.Visible[:2*testBlock], filled(2, 1)) {
			t.Fatal("a block that nobody wrote has changed")
		}
		done := 0
		for i := range 4 {
			if d.Visible[(2+i)*testBlock] == 2 {
				done++
			}
		}
		if done > 0 && done < 4 {
			torn++
		}
	}
	if torn == 0 {
		t.Error("no write is torn")
	}
}

func TestOutcomes(t *testing.T) {
	d := newTestDrive(t, false, 3)
	what := Good
	d.Fault = func(*ssd.Request) Outcome { return what }
	for _, c := range []struct {
		what    Outcome
		failed  bool
		changed int // blocks
	}{{FailUndone, true, 0}, {FailDone, true, 4}, {Lost, false, 0}, {Misdirected, false, 4}, {Good, false, 4}} {
		clear(d.Visible)
		what = c.what
		if err := do(d, write(10, 4, 5)); errors.Is(err, ErrInjected) != c.failed ||
			errors.Is(err, ssd.ErrMedia) != c.failed {
			t.Errorf("outcome %d: %v", c.what, err)
		}
		if n := bytes.Count(d.Visible, []byte{5}); n != c.changed*testBlock {
			t.Errorf("outcome %d: %d bytes written, want %d blocks", c.what, n, c.changed)
		}
	}
}

func TestUnreadableBlocksFailUntilTheyAreWritten(t *testing.T) {
	d := newTestDrive(t, true, 4)
	d.Unreadable(2*testBlock, testBlock)
	read := ssd.Request{Op: ssd.Read, Offset: 0, Len: 4 * testBlock, Buf: make([]byte, 4*testBlock)}
	if err := do(d, read); !errors.Is(err, ssd.ErrMedia) {
		t.Errorf("read of an unreadable block: %v", err)
	}
	if err := do(d, write(2, 1, 1)); err != nil {
		t.Error(err)
	}
	if err := do(d, read); err != nil || read.Buf[2*testBlock] != 1 {
		t.Errorf("read after the write: %v", err)
	}
	d.Flip(2*testBlock+7, 3)
	if err := do(d, read); err != nil || read.Buf[2*testBlock+7] != 1^1<<3 {
		t.Errorf("read of a flipped bit: %v, %#x", err, read.Buf[2*testBlock+7])
	}
}

func TestADriveThatVanishesFailsEverything(t *testing.T) {
	d := newTestDrive(t, true, 5)
	if err := do(d, write(0, 1, 1)); err != nil {
		t.Error(err)
	}
	d.Vanish()
	for _, r := range []ssd.Request{write(0, 1, 2), {Op: ssd.Flush},
		{Op: ssd.Read, Len: testBlock, Buf: make([]byte, testBlock)}} {
		if err := do(d, r); !errors.Is(err, ssd.ErrGone) {
			t.Errorf("%v: %v", r.Op, err)
		}
	}
	d.Return()
	if err := do(d, write(0, 1, 3)); err != nil || d.Visible[0] != 3 {
		t.Errorf("after its return: %v", err)
	}
}
