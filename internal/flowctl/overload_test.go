package flowctl

import (
	"container/heap"
	"slices"
	"testing"
)

// The test in this file is a cluster of three SSDs in virtual time, of which one is slow. An SSD carries out some
// requests at once; others wait in front of it. Its credit is twice what it carries out at once.

const parallel = 8

// drive is an SSD.
type drive struct {
	ssd    *SSD
	takes  int64 // for a request
	busy   int
	queue  []*Request
	served int
}

// take begins a request, or puts it into the queue of the drive.
func (d *drive) take(r *Request, begin func(*drive, *Request)) {
	if d.busy < parallel {
		begin(d, r)
	} else {
		d.queue = append(d.queue, r)
	}
}

// end ends a request, and begins the next one.
func (d *drive) end(begin func(*drive, *Request)) {
	if d.busy--; len(d.queue) > 0 {
		r := d.queue[0]
		d.queue = d.queue[1:]
		begin(d, r)
	}
}

// event is the end of a request at a drive.
type event struct {
	at int64
	d  *drive
	r  *Request
}

type events []event

func (e events) Len() int           { return len(e) }
func (e events) Less(i, j int) bool { return e[i].at < e[j].at }
func (e events) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)        { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	old := *e
	x := old[len(old)-1]
	*e = old[:len(old)-1]
	return x
}

// overload keeps many reads under way, each of which all three drives can answer, for a time. It returns how many were
// answered, and the 99th percentile of how long they were at the targets.
func overload(t *testing.T, cfg Config, credit int) (answered int, p99 int64) {
	g := newRig(t, cfg, credit, credit, credit)
	var drives []*drive
	for i, takes := range []int64{100_000, 100_000, 800_000} {
		drives = append(drives, &drive{ssd: g.ssds[i], takes: takes})
	}
	var (
		due   events
		sent  = map[*Request]int64{}
		times []int64
	)
	begin := func(d *drive, r *Request) {
		d.busy++
		heap.Push(&due, event{g.now + d.takes, d, r})
	}
	arrive := func(rs []*Request) {
		for _, r := range rs {
			sent[r] = g.now
			drives[slices.Index(g.ssds, r.Targets[r.SentTo()])].take(r, begin)
		}
	}
	for range 300 {
		arrive(g.add(g.request(0, false, 1, 0, 1, 2)))
	}
	for g.now < 1_000_000_000 {
		e := heap.Pop(&due).(event)
		g.now = e.at
		e.d.end(begin)
		answered++
		times = append(times, g.now-sent[e.r])
		arrive(g.end(e.r, credit))
		arrive(g.add(e.r))
	}
	slices.Sort(times)
	return answered, times[len(times)*99/100]
}

// TestASlowSSDHoldsUpOnlyWhatItHas: in an overload, requests wait at the host, and go to the SSDs that have capacity.
// Without tokens they gather in front of the slow SSD until nothing is left for the others.
func TestASlowSSDHoldsUpOnlyWhatItHas(t *testing.T) {
	with, fast := overload(t, Config{}, 2*parallel)
	without, slow := overload(t, Config{NoTokens: true, Choice: InTurn}, 2*parallel)
	t.Logf("with tokens %d answers, p99 %d us; without %d, %d us", with, fast/1000, without, slow/1000)
	// Two SSDs of 80,000 a second and one of 10,000.
	if with < 165_000 || with < 4*without {
		t.Errorf("with tokens %d answers, without %d", with, without)
	}
	if fast*2 > slow {
		t.Errorf("with tokens the p99 at the targets is %d ns, without %d ns", fast, slow)
	}
}

// mixed keeps many writes to a slow and a fast SSD under way, and reads of the fast one, for a second. It returns how
// many reads were answered. With takes 0 the slow SSD never answers.
func mixed(t *testing.T, cfg Config, slowCredit int, takes int64) (reads int) {
	g := newRig(t, cfg, 2*parallel, slowCredit)
	drives := []*drive{{takes: 100_000}, {takes: takes}}
	var (
		due  events
		left = map[*Request]int{} // drives that have not carried it out
	)
	begin := func(d *drive, r *Request) {
		d.busy++
		if d.takes > 0 {
			heap.Push(&due, event{g.now + d.takes, d, r})
		}
	}
	arrive := func(rs []*Request) {
		for _, r := range rs {
			for _, s := range r.Targets[:r.N] {
				left[r]++
				drives[slices.Index(g.ssds, s)].take(r, begin)
			}
		}
	}
	for range 300 {
		arrive(g.add(g.request(0, true, 1, 1, 0)))
		arrive(g.add(g.request(0, false, 1, 0)))
	}
	for len(due) > 0 && due[0].at < 1_000_000_000 {
		e := heap.Pop(&due).(event)
		g.now = e.at
		e.d.end(begin)
		if left[e.r]--; left[e.r] > 0 {
			continue
		}
		if !e.r.Write {
			reads++
		}
		arrive(g.end(e.r, 0))
		arrive(g.add(e.r))
	}
	return reads
}

// TestReadsOfAFastSSDDoNotWaitForWritesToASlowOne: they are answered nearly as fast as the SSD can, which is 80,000 a
// second, if the slow SSD has less credit. If it has as much, or does not answer, they have what is reserved for them.
func TestReadsOfAFastSSDDoNotWaitForWritesToASlowOne(t *testing.T) {
	for _, c := range []struct {
		what   string
		credit int
		takes  int64
		least  int
	}{{"slow", parallel / 2, 800_000, 70_000}, {"slow, with much credit", 2 * parallel, 800_000, 35_000},
		{"silent", 2 * parallel, 0, 35_000}} {
		if n := mixed(t, Config{}, c.credit, c.takes); n < c.least {
			t.Errorf("%s: %d reads, want %d", c.what, n, c.least)
		} else {
			t.Logf("%s: %d reads", c.what, n)
		}
	}
}
