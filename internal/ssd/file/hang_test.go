package file

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"jbofd/internal/ssd"
	"jbofd/internal/testutil/images"
	"jbofd/internal/uring"
)

// TestADriveThatHangsHoldsUpNobody: whoever submits to a drive that completes nothing gets on at once, and another
// drive, whose requests come from the same thread, completes all of its own. The thread counts: the kernel has threads
// for what waits in io_uring, and few of them for each thread that submits.
func TestADriveThatHangsHoldsUpNobody(t *testing.T) {
	for _, kind := range []string{"file", "block device"} {
		t.Run(kind, func(t *testing.T) {
			forEachEngine(t, func(t *testing.T, engine string) { testHang(t, kind == "block device", engine) })
		})
	}
}

func testHang(t *testing.T, block bool, engine string) {
	const depth, patience = 600, 20 * time.Second
	images.Private(t)
	m := images.New(t, t.TempDir(), 8<<20, "hangs")
	cfg := Config{Path: m.Path(0), Engine: engine}
	if block {
		var err error
		if cfg.Path, err = m.Block(0); err != nil {
			t.Skip(err)
		}
	}
	hangs, works := open(t, cfg), open(t, Config{Engine: engine})
	t.Cleanup(func() { m.Answer(0) }) // otherwise the drive cannot be closed
	if want := engine == EngineURing && block; hangs.uring != want {
		t.Fatalf("io_uring is used: %v, want %v", hangs.uring, want)
	}
	a, b := openQueue(t, hangs, depth), openQueue(t, works, 8)
	buf, free, err := scratch(4096)
	if err != nil {
		t.Fatal(err)
	}
	m.Silence(0)
	submitted := make(chan int)
	go func() {
		runtime.LockOSThread() // and the lock is left again: the kernel cancels what a thread that ends has submitted
		defer runtime.UnlockOSThread()
		defer close(submitted)
		if engine == EngineURing {
			// As a thread has that has opened a drive: it keeps the number of kernel threads of its first ring.
			r, err := uring.New(1)
			if err == nil {
				err = r.Close()
			}
			if err != nil {
				t.Error(err)
			}
		}
		var done [8]ssd.Completion
		for n := range depth / 4 {
			batch := [4]ssd.Request{{Op: ssd.Read, Len: 4096, Buf: buf}, {Op: ssd.Write, Len: 4096, Buf: buf},
				{Op: ssd.Write, Flags: ssd.FUA, Len: 4096, Buf: buf}, {Op: ssd.Flush}}
			for i := range batch {
				batch[i].Tag, batch[i].Offset = uint64(4*n+i), int64(4*n+i)*4096
			}
			if a.Submit(batch[:]) != len(batch) || b.Submit(batch[:]) != len(batch) {
				return
			}
			for left := len(batch); left > 0; {
				got := ssd.Await(b, done[:], patience)
				for _, c := range done[:got] {
					if c.Err != nil {
						t.Error(c.Err)
					}
				}
				if left -= got; got == 0 {
					return
				}
			}
			submitted <- len(batch)
		}
	}()
	all := 0
	for {
		select {
		case n := <-submitted:
			if all += n; n > 0 {
				continue
			}
		case <-time.After(2 * patience):
			t.Error("the thread that submits hangs")
		}
		break
	}
	if all < depth {
		t.Errorf("with %d requests in the drive that hangs the other one completes nothing", all)
	}
	m.Answer(0)
	done := make([]ssd.Completion, depth)
	for all > 0 {
		n := ssd.Await(a, done, patience)
		for _, c := range done[:n] {
			if c.Err != nil {
				t.Errorf("request %d: %v", c.Tag, c.Err)
			}
		}
		if all -= n; n == 0 {
			t.Fatalf("%d requests do not complete when the drive answers", all)
		}
	}
	if err := free(); err != nil {
		t.Error(err)
	}
}

// TestNobodyWaitsForQuestionsAboutAFileThatHangs: where a file has data, its file system may take for ever to say.
// Until then the drive tells its health, and queues are opened and closed.
func TestNobodyWaitsForQuestionsAboutAFileThatHangs(t *testing.T) {
	images.Private(t)
	dir := t.TempDir()
	m := images.New(t, dir, 8<<20, "hangs")
	d := open(t, Config{Path: m.Path(0)})
	t.Cleanup(func() { m.Answer(0) })
	behind, err := os.OpenFile(filepath.Join(dir, "hangs"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := behind.Write(make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	if err := behind.Close(); err != nil {
		t.Fatal(err)
	}
	m.Silence(0)
	extent := make(chan ssd.Extent, 1)
	go func() { extent <- d.NextData(0) }()
	m.AwaitKept(0, 1)
	others := make(chan error, 1)
	go func() {
		q, err := d.OpenQueue(4)
		if err == nil {
			err = q.Close()
		}
		others <- errors.Join(err, d.Healthy())
	}()
	select {
	case err := <-others:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("health and queues wait for where the data is")
	}
	select {
	case e := <-extent:
		t.Errorf("a file system that hangs has answered: %v", e)
	default:
	}
	closed := make(chan error, 1)
	go func() { closed <- d.Close() }()
	for !d.gone.Load() { // the queues are closed, but the file is in use
		runtime.Gosched()
	}
	m.Answer(0)
	if e, want := <-extent, (ssd.Extent{Start: 0, End: 4096}); e != want {
		t.Errorf("the first data are at %v, want %v", e, want)
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
}
