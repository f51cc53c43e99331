package node

import (
	"jbofd/internal/lab"
	"jbofd/internal/pipeline"
	"jbofd/internal/pipeline/jbof"
	"jbofd/internal/pipeline/policies"
	"jbofd/internal/ssd"
)

// Fault model of a node's drives: that of lab.Drive, as far as the run's traits go.
//
//   - Requests fail, some writes take seconds, a drive is slow as a whole.
//   - A drive keeps some writes for up to 20 s, and does the others as ever.
//   - Of a rotten drive, bits flip, blocks become unreadable, and writes are lost or misdirected. Keys and values have
//     checksums, so they may be lost, but no Retrieve returns what was never stored. Blocks have none: a block that was
//     hit may hold anything until it is written again.
//   - A drive vanishes. It is back at a later start of the node, having lost its power, or it is gone for good.

// traits are what a run includes. Each fault that weakens what is checked is in some of the runs only.
type traits struct {
	// sane: drives are healthy all the time.
	sane bool
	// rotten: data are damaged. fickle: drives vanish.
	rotten, fickle bool
	// swaps: there is a swap area, and enough load that it is used.
	swaps bool
	// capped: tenants have caps.
	capped bool
	// scarce: other users take the memory of the pool.
	scarce bool
	// hangs: drives keep some writes for so long that their stores and namespaces are given up.
	hangs bool
	// calibrates: drives are calibrated when the node starts.
	calibrates bool
	// policies are those of the drives, by name.
	policies [drives]string
}

func (l *Lab) drawTraits() (t traits) {
	t.sane = l.rng.IntN(4) == 0
	t.rotten = !t.sane && l.rng.IntN(4) == 0
	t.fickle = !t.sane && l.rng.IntN(4) == 0
	t.swaps = l.rng.IntN(3) == 0
	t.capped = l.rng.IntN(4) == 0
	t.scarce = l.rng.IntN(4) == 0
	t.hangs = !t.sane && l.rng.IntN(4) == 0
	t.calibrates = l.rng.IntN(16) == 0
	names := []string{"fifo", "fifo", "fifo", "jbof", "jbof", "gimbal"}
	for i := range t.policies {
		t.policies[i] = names[l.rng.IntN(len(names))]
	}
	return t
}

// policy makes the policy of a drive.
func (l *Lab) policy(disk, depth int, calibrated jbof.Profile) (pipeline.Policy, error) {
	cfg := policies.Config{Depth: depth}
	if calibrated != (jbof.Profile{}) {
		cfg.Profile = calibrated
	} else if l.rng.IntN(2) == 0 { // what a calibration may have found; otherwise the policy assumes a typical drive
		cfg.Profile = jbof.Profile{ReadNS: 100 + l.rng.Float64()*20e3, ReadByteNS: 0.01 + l.rng.Float64()*3,
			LatencyNS: 5e3 + l.rng.Int64N(100e3), Depth: 1 + l.rng.IntN(32), LargeDepth: 1 + l.rng.IntN(8)}
	}
	return policies.New(l.traits.policies[disk], cfg)
}

// sick says that a drive is not healthy at that time.
func (l *Lab) sick(atNS int64) { l.sickNS = max(l.sickNS, atNS) }

// hang makes a drive keep some of the next writes of a range until all have been given up that wait for them.
func (l *Lab) hang(i int, offset, length int64) {
	until, left := l.Sim.Now()+int64(11e9)+l.rng.Int64N(9e9), 1+l.rng.IntN(4)
	l.Sim.Tracef("drive %d keeps %d writes from %d to %d until %.3f", i, left, offset, offset+length,
		float64(until)/1e3)
	l.Disks[i].Hold = func(r *ssd.Request) int64 {
		if left == 0 || r.Op != ssd.Write || r.Offset < offset || r.Offset >= offset+length || l.Sim.Now() >= until {
			return 0
		}
		left--
		l.sick(until)
		return until - l.Sim.Now()
	}
}

// breakDrive does something bad to a drive.
func (l *Lab) breakDrive() {
	if l.traits.sane {
		return
	}
	i := l.rng.IntN(len(l.Disks))
	d := l.Disks[i]
	if d.Gone() {
		return
	}
	l.sick(l.Sim.Now())
	kinds := 3
	if l.traits.hangs && l.rng.IntN(4) == 0 {
		l.hang(i, 0, diskBytes)
		return
	}
	if l.traits.rotten || l.traits.fickle {
		kinds = 5
	}
	switch k := l.rng.IntN(kinds); {
	case k == 0:
		p := l.rng.Float64() * 0.2
		l.faulty = true
		l.Sim.Tracef("drive %d fails %.2f of its requests", i, p)
		d.Fault = func(*ssd.Request) lab.Outcome {
			if l.rng.Float64() >= p {
				return lab.Good
			}
			l.faultyNS = l.Sim.Now()
			return lab.FailUndone + lab.Outcome(l.rng.IntN(3))
		}
	case k == 1:
		l.Sim.Tracef("drive %d delays writes", i)
		d.Hold = func(r *ssd.Request) int64 {
			if r.Op == ssd.Read || l.rng.IntN(2) == 0 {
				return 0
			}
			return l.rng.Int64N(4e9)
		}
	case k == 2:
		slow := 1e6 + l.rng.Int64N(100e6)
		l.Sim.Tracef("drive %d is slow: %d µs more", i, slow/1000)
		d.Hold = func(*ssd.Request) int64 { return slow }
	case l.traits.fickle && (!l.traits.rotten || l.rng.IntN(2) == 0):
		l.Sim.Tracef("drive %d vanishes", i)
		l.lost[i] = l.rng.IntN(4) == 0
		d.Vanish()
	default:
		l.rot(i, d)
	}
}

// rot damages data.
func (l *Lab) rot(i int, d *lab.Drive) {
	switch l.rng.IntN(3) {
	case 0:
		for range 1 + l.rng.IntN(40) {
			at := l.someByte(i)
			l.Sim.Tracef("drive %d: a bit flips at %d", i, at)
			d.Flip(at, uint(l.rng.IntN(8)))
		}
	case 1:
		at, n := l.someByte(i), 1+l.rng.Int64N(4*blockBytes)
		n = min(n, diskBytes-at)
		l.Sim.Tracef("drive %d: %d bytes at %d become unreadable", i, n, at)
		d.Unreadable(at, n)
		l.unreadable(i, at, n)
	case 2:
		p := l.rng.Float64() * 0.1
		l.Sim.Tracef("drive %d: %.2f of the writes are lost or misdirected", i, p)
		d.Fault = func(r *ssd.Request) lab.Outcome {
			if r.Op != ssd.Write || l.rng.Float64() >= p {
				return lab.Good
			}
			return lab.Lost + lab.Outcome(l.rng.IntN(2))
		}
	}
}

// someByte chooses a byte of a drive: often one that was written lately, which is more likely to be read.
func (l *Lab) someByte(disk int) int64 {
	if recent := l.recent[disk]; len(recent) > 0 && l.rng.IntN(4) > 0 {
		r := recent[l.rng.IntN(len(recent))]
		return r.offset + l.rng.Int64N(r.length)
	}
	return l.rng.Int64N(diskBytes)
}

// extent is a range of a drive.
type extent struct{ offset, length int64 }

// recentWrites is how many of a drive's latest writes are known.
const recentWrites = 32

// remember keeps the places of the latest writes.
func (l *Lab) remember(disk int, r *ssd.Request) {
	if r.Op != ssd.Write || !l.traits.rotten {
		return
	}
	if len(l.recent[disk]) < recentWrites {
		l.recent[disk] = append(l.recent[disk], extent{r.Offset, r.Len})
		return
	}
	l.recent[disk][l.rng.IntN(recentWrites)] = extent{r.Offset, r.Len}
}

// harmed tells the model of a range of a drive that holds something else than requests have left there.
func (l *Lab) harmed(disk int, offset, length int64) {
	for _, ns := range l.namespaces {
		switch {
		case ns.kv:
			ns.damaged = l.touchesStore(ns, disk, offset, length) || ns.damaged
		case ns.touches(disk, offset, length):
			for i, r := range ns.registers {
				if at := ns.offset + int64(i)*blockBytes; at < offset+length && offset < at+blockBytes {
					r.harm(l.Sim.Now())
				}
			}
		}
	}
}

// unreadable tells the model of a range of a drive that cannot be read.
func (l *Lab) unreadable(disk int, offset, length int64) {
	for _, ns := range l.namespaces {
		ns.damaged = l.touchesStore(ns, disk, offset, length) || ns.touches(disk, offset, length) || ns.damaged
	}
}

func (ns *namespace) touches(disk int, offset, length int64) bool {
	return ns.disk == disk && offset < ns.offset+ns.bytes && ns.offset < offset+length
}

// touchesStore reports whether a range has something of a store: it is in its extent or in its swap area.
func (l *Lab) touchesStore(ns *namespace, disk int, offset, length int64) bool {
	if !ns.kv {
		return false
	}
	if l.traits.swaps && disk == areaDisk && offset < areaOffset+areaBytes && areaOffset < offset+length {
		l.areaDamaged = true
		return true
	}
	return ns.touches(disk, offset, length)
}

// heal ends all faults of drives that are not for good.
func (l *Lab) heal() {
	l.Sim.Tracef("the drives are healthy")
	if l.faulty {
		l.faultyNS = l.Sim.Now()
	}
	l.faulty = false
	for _, d := range l.Disks {
		if d.Fault != nil || d.Hold != nil {
			l.sick(l.Sim.Now())
		}
		d.Fault, d.Hold = nil, nil
	}
}

// broken reports that drives fail requests, or did a little while ago.
func (l *Lab) broken() bool { return l.faulty || l.faultyNS != 0 && l.Sim.Now()-l.faultyNS < answerNS }

// anyGone reports that a drive has vanished.
func (l *Lab) anyGone() bool {
	for _, d := range l.Disks {
		if d.Gone() {
			return true
		}
	}
	return false
}

// recoveryNS is how long drives that were slow may take to come to rest.
const recoveryNS = 10e9

// healthy reports that drives have answered in time for so long that nothing is late because of them.
func (l *Lab) healthy() bool {
	for _, d := range l.Disks {
		if d.Fault != nil || d.Hold != nil || d.Gone() {
			return false
		}
	}
	return l.sickNS == 0 || l.Sim.Now()-l.sickNS > recoveryNS
}

// plugIn brings drives back that have vanished, but for those that are gone for good. The node is not running.
func (l *Lab) plugIn() {
	for i, d := range l.Disks {
		if d.Gone() && !l.lost[i] {
			l.Sim.Tracef("drive %d is back", i)
			d.Return()
			l.returnedNS = l.Sim.Now()
			l.sick(l.Sim.Now())
		}
	}
}
