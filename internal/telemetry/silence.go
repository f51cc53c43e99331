package telemetry

import (
	"fmt"
	"sort"
	"time"
)

// SilentAfter is for how long a drive must have had requests and completed none to be reported as silent. It is that
// of the replicas of a cluster, which then go on without the drive.
const SilentAfter = 7 * time.Second

// longLook is the longest time between two looks at the drives. After a longer one, as when the process was stopped,
// the time begins anew.
const longLook = 3 * time.Second

// silence is what was seen of a drive at the last look.
type silence struct {
	// done counts what it has completed or failed, since is since when it has had requests without completing one;
	// zero: it has none.
	done  int64
	since time.Time
	at    time.Time
}

// LookAtDrives looks which drives have requests and complete none. It is to be called once a second. It returns the
// drives that have become silent, for SilentAfter or longer, and those that are not any more.
func (t *Telemetry) LookAtDrives(now time.Time) (silent, answer []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, s := range t.ssds {
		if s.Stats == nil {
			continue
		}
		var st SSDStats
		s.Stats(&st)
		seen := silence{done: st.Errors, at: now}
		for _, n := range st.Completed {
			seen.done += n
		}
		last, known := t.silence[name]
		if st.InFlight > 0 {
			seen.since = now
			if known && last.done == seen.done && !last.since.IsZero() && now.Sub(last.at) <= longLook {
				seen.since = last.since
			}
		}
		t.silence[name] = seen
		switch was, is := last.lasted() >= SilentAfter, seen.lasted() >= SilentAfter; {
		case is && !was:
			silent = append(silent, name)
		case was && !is:
			answer = append(answer, name)
		}
	}
	return silent, answer
}

// lasted is for how long the drive had completed nothing at the last look.
func (s silence) lasted() time.Duration {
	if s.since.IsZero() {
		return 0
	}
	return s.at.Sub(s.since)
}

// Degraded returns what does not work while the daemon is ready all the same: drives that are silent. Others serve, and
// a silent drive may answer yet, so that nothing would be won if whoever looks at readiness took the node away.
func (t *Telemetry) Degraded() []Reason {
	all := []Reason{}
	t.mu.Lock()
	for name, s := range t.silence {
		if d := s.lasted(); d >= SilentAfter {
			all = append(all, Reason{"ssd " + name, fmt.Sprintf("it takes requests, and has completed none for %v",
				d.Round(time.Second))})
		}
	}
	t.mu.Unlock()
	sort.Slice(all, func(i, j int) bool { return all[i].Component < all[j].Component })
	return all
}
