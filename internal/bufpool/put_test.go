package bufpool

import "testing"

// TestPutAllIsAPutOfEach: buffers of several accounts, one beyond the bound, one that is none. A waiter gets memory.
func TestPutAllIsAPutOfEach(t *testing.T) {
	p := newPool(t, Config{TotalBytes: 8 << 20})
	defer p.CloseTest(t)
	a, b := p.Account("a"), p.Account("b")
	bufs := []Buf{{}}
	for i := range 2 * putAtOnce {
		bufs = append(bufs, mustGet(t, p, a, 1+i*100), mustGet(t, p, b, 4096))
	}
	extra, ok := p.Extra(4096)
	if !ok {
		t.Fatal("no memory beyond the bound")
	}
	bufs = append(bufs, extra)
	for {
		last, ok := p.Get(b, 1<<20)
		if !ok {
			break
		}
		bufs = append(bufs, last)
	}
	woken := 0
	w := Waiter{Size: 1 << 20, Wake: func() { woken++ }}
	if p.GetOrWait(b, &w) {
		t.Fatal("there is memory after all")
	}
	p.PutAll(bufs)
	if woken != 1 || p.Stats().InUseBytes != 1<<20 {
		t.Errorf("%d were woken, %d bytes are in use; want 1 and 1 MiB", woken, p.Stats().InUseBytes)
	}
	p.PutAll([]Buf{w.Buf})
	if n := testing.AllocsPerRun(100, func() {
		bufs[0], _ = p.Get(a, 4096)
		p.PutAll(bufs[:1])
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
