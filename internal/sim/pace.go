package sim

import (
	"math"

	"jbofd/internal/ssd/model/flash"
)

// Pace is the speed of a drive from a time on. Drives slow down when they are hot, and stand still when they collect
// garbage in bursts or when the host of a virtual disk does.
type Pace struct {
	FromNS int64
	// Slower is by which factor the drive is slower than at the start; 0: it stands still. The last Pace of a scenario
	// must not be 0.
	Slower float64
}

// stalls returns the pace of a drive that stands still for forNS each everyNS, until the given time.
func stalls(everyNS, forNS, untilNS int64) (p []Pace) {
	for at := everyNS; at < untilNS; at += everyNS {
		p = append(p, Pace{at, 0}, Pace{at + forNS, 1})
	}
	return p
}

// paced is a drive whose time passes at varying speed.
type paced struct {
	Drive
	pace []Pace
	// inside holds the drive's time at the beginning of each Pace.
	inside []int64
	// submitNS is the time of submission by tag.
	submitNS []int64
}

// newPaced returns the drive itself if its speed does not vary.
func newPaced(d Drive, pace []Pace) Drive {
	if len(pace) == 0 {
		return d
	}
	p := &paced{Drive: d, pace: append([]Pace{{0, 1}}, pace...), inside: make([]int64, len(pace)+1)}
	for i := 1; i < len(p.pace); i++ {
		p.inside[i] = p.within(i-1, p.pace[i].FromNS)
	}
	return p
}

// within returns the drive's time at a time during the i-th Pace.
func (p *paced) within(i int, now int64) int64 {
	if p.pace[i].Slower == 0 {
		return p.inside[i]
	}
	return p.inside[i] + int64(float64(now-p.pace[i].FromNS)/p.pace[i].Slower)
}

// in returns the drive's time.
func (p *paced) in(now int64) int64 {
	i := len(p.pace) - 1
	for p.pace[i].FromNS > now {
		i--
	}
	return p.within(i, now)
}

// out returns the first time at which the drive's time is at.
func (p *paced) out(at int64) int64 {
	i := len(p.pace) - 1
	for i > 0 && p.inside[i] >= at {
		i--
	}
	t := p.pace[i].FromNS + int64(math.Ceil(float64(at-p.inside[i])*p.pace[i].Slower))
	for p.in(t) < at { // rounding
		t++
	}
	return t
}

func (p *paced) Submit(now int64, r flash.Request) {
	for uint64(len(p.submitNS)) <= r.Tag {
		p.submitNS = append(p.submitNS, 0)
	}
	p.submitNS[r.Tag] = now
	p.Drive.Submit(p.in(now), r)
}

func (p *paced) NextEvent() (int64, bool) {
	at, ok := p.Drive.NextEvent()
	if !ok {
		return at, false
	}
	return p.out(at), true
}

func (p *paced) Advance(now int64, dst []flash.Completion) []flash.Completion {
	n := len(dst)
	dst = p.Drive.Advance(p.in(now), dst)
	for i := range dst[n:] {
		c := &dst[n+i]
		c.AtNS, c.LatencyNS = now, now-p.submitNS[c.Tag]
	}
	return dst
}
