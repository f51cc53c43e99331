package ycsb

import "time"

// Interval is one stretch of a phase, of Workload.Granularity; the last one may be shorter. Operations belong to the
// interval in which they have ended.
type Interval struct {
	AtSeconds float64 `json:"atSeconds"` // when it has begun
	OpsPerSec float64 `json:"opsPerSec"`
	// MeanNS is the mean latency of those that are OK, MaxNS the longest. Failed are those that are not OK.
	MeanNS float64 `json:"meanNS"`
	MaxNS  int64   `json:"maxNS"`
	Failed uint64  `json:"failed"`
}

// stretch counts the operations of an Interval.
type stretch struct {
	ok, failed   uint64
	sumNS, maxNS int64
}

// countAt counts an operation that ended at the time now. It allocates once for many intervals.
func (t *thread) countAt(now, latencyNS int64, ok bool) { // hot: 0 allocs per operation
	each := int64(t.b.w.Granularity)
	if each == 0 {
		return
	}
	i := int(max(now-t.b.beganNS, 0) / each)
	for len(t.stretches) <= i {
		t.stretches = append(t.stretches, stretch{})
	}
	s := &t.stretches[i]
	if !ok {
		s.failed++
		return
	}
	s.ok++
	s.sumNS += latencyNS
	s.maxNS = max(s.maxNS, latencyNS)
}

// timeline adds up what the threads have counted in a phase that took so long.
func (b *Bench) timeline(elapsed time.Duration) (all []Interval) {
	var sums []stretch
	for _, t := range b.threads {
		for i, s := range t.stretches {
			if i == len(sums) {
				sums = append(sums, stretch{})
			}
			o := &sums[i]
			o.ok, o.failed, o.sumNS, o.maxNS = o.ok+s.ok, o.failed+s.failed, o.sumNS+s.sumNS, max(o.maxNS, s.maxNS)
		}
	}
	each := b.w.Granularity
	for i, s := range sums {
		at := time.Duration(i) * each
		v := Interval{AtSeconds: at.Seconds(), MaxNS: s.maxNS, Failed: s.failed,
			OpsPerSec: float64(s.ok) / max(min(each, elapsed-at), time.Nanosecond).Seconds()}
		if s.ok > 0 {
			v.MeanNS = float64(s.sumNS) / float64(s.ok)
		}
		all = append(all, v)
	}
	return all
}
