package drive

import (
	"errors"
	"sync"
	"testing"

	"jbofd/internal/bufpool"
	"jbofd/internal/pipeline/jbof"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/turn"
)

// holed is a sparse device that knows which of its ranges were written, and records what is read.
type holed struct {
	*gate
	written []ssd.Extent
	mu      sync.Mutex
	reads   []ssd.Extent
	// fails reports whether the n-th completion is an error; nil: none is.
	fails func(n int) bool
	n     int
}

func (h *holed) Poll(dst []ssd.Completion) int {
	n := h.gate.Poll(dst)
	for i := range dst[:n] {
		if h.n++; h.fails != nil && h.fails(h.n) {
			dst[i].Err = ssd.ErrMedia
		}
	}
	return n
}

func (h *holed) NextData(offset int64) ssd.Extent {
	for _, e := range h.written {
		if e.End > offset {
			return ssd.Extent{Start: max(e.Start, offset), End: e.End}
		}
	}
	return ssd.Extent{}
}

func (h *holed) OpenQueue(depth int) (ssd.Queue, error) {
	_, err := h.gate.OpenQueue(depth)
	return h, err
}

func (h *holed) Close() error { return h.gate.Close() }

func (h *holed) Submit(reqs []ssd.Request) int {
	n := h.gate.Submit(reqs)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range reqs[:n] {
		h.reads = append(h.reads, ssd.Extent{Start: r.Offset, End: r.Offset + r.Len})
	}
	return n
}

// calibrateHoled calibrates a drive of which only the given ranges were written.
func calibrateHoled(t *testing.T, sizeBytes int64, written ...ssd.Extent) (*holed, jbof.Profile, error) {
	t.Helper()
	return calibrateFailing(t, nil, sizeBytes, written...)
}

// calibrateFailing does the same with a drive of which some reads fail.
func calibrateFailing(t *testing.T, fails func(n int) bool, sizeBytes int64, written ...ssd.Extent) (*holed,
	jbof.Profile, error) {
	t.Helper()
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	g, _ := newGate(t)
	if g.Device, err = mem.Open(mem.Config{Name: "ssd0", SizeBytes: sizeBytes}); err != nil {
		t.Fatal(err)
	}
	if g.inner, err = g.Device.OpenQueue(1); err != nil {
		t.Fatal(err)
	}
	h := &holed{gate: g, written: written, fails: fails}
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		g.all(stop)
	}()
	p, err := Calibrate(turn.Real, h, pool)
	close(stop)
	<-ended
	if cerr := errors.Join(g.inner.Close(), g.Device.Close()); cerr != nil {
		t.Error(cerr)
	}
	pool.CloseTest(t)
	return h, p, err
}

// TestACalibrationReadsWhatWasWritten: reads of the holes of a sparse file do not reach the disk and would give a wrong
// result.
func TestACalibrationReadsWhatWasWritten(t *testing.T) {
	const mib = 1 << 20
	written := []ssd.Extent{{Start: 0, End: 65536}, {Start: 4*mib + 512, End: 40 * mib},
		{Start: 64 * mib, End: 100*mib + 512}, {Start: 200 * mib, End: 201 * mib}}
	h, p, err := calibrateHoled(t, 256*mib, written...)
	if err != nil || p.Depth == 0 {
		t.Fatalf("%+v, %v", p, err)
	}
	var in [4]int
	for _, r := range h.reads {
		found := false
		for i, e := range written {
			if r.Start >= e.Start && r.End <= e.End {
				in[i]++
				found = true
			}
		}
		if !found || r.Start%jbof.CalibrationUnit != 0 {
			t.Fatalf("read from %d to %d", r.Start, r.End)
		}
	}
	if in[0] > 0 || in[1] < 10*in[3] || in[2] < 10*in[3] || in[3] == 0 {
		t.Errorf("reads in the extents are %v, want none in the short one and the rest by length", in)
	}
}

// TestABlankDriveIsNotCalibrated: no read is sent to it.
func TestABlankDriveIsNotCalibrated(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		name    string
		size    int64
		written []ssd.Extent
		blank   bool
	}{
		{name: "nothing", size: 256 * mib, blank: true},
		{name: "a label", size: 256 * mib,
			written: []ssd.Extent{{Start: 0, End: mib}, {Start: 255 * mib, End: 256 * mib}}, blank: true},
		{name: "too little", size: 256 * mib, written: []ssd.Extent{{Start: 0, End: 63 * mib}}, blank: true},
		{name: "all of a small drive", size: 4 * mib, written: []ssd.Extent{{Start: 0, End: 4 * mib}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h, p, err := calibrateHoled(t, c.size, c.written...)
			switch {
			case !c.blank && (err != nil || p.Depth == 0):
				t.Errorf("%+v, %v", p, err)
			case c.blank && (!errors.Is(err, ErrBlank) || p != jbof.Profile{} || len(h.reads) > 0):
				t.Errorf("%+v, %v, %d reads; want ErrBlank and none", p, err, len(h.reads))
			}
		})
	}
}

// TestACalibrationEnduresReadErrors: a few blocks that cannot be read do not matter. A drive that fails many reads is
// not calibrated.
func TestACalibrationEnduresReadErrors(t *testing.T) {
	const size = 128 << 20
	for _, c := range []struct {
		name  string
		fails func(n int) bool
		good  bool
	}{
		{"the first", func(n int) bool { return n == 1 }, true},
		{"one in 500", func(n int) bool { return n%500 == 0 }, true},
		{"one in 20", func(n int) bool { return n%20 == 0 }, false},
		{"all", func(int) bool { return true }, false},
	} {
		_, p, err := calibrateFailing(t, c.fails, size, ssd.Extent{End: size})
		if good := err == nil && p.Depth > 0; good != c.good || !c.good && !errors.Is(err, ssd.ErrMedia) {
			t.Errorf("%s: %+v, %v", c.name, p, err)
		}
	}
}
