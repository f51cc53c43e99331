package node

import (
	"time"

	"jbofd/internal/drive"
	"jbofd/internal/lab"
	"jbofd/internal/pipeline/jbof"
	"jbofd/internal/ssd"
)

// Fault model of calibrations: reads take up to 60 ms each. Unless the drives are to be sane, some fail, the drive
// vanishes, or it keeps reads for so long that the calibration is given up.

// calibrateNS is how long a calibration may take by any clock of a node.
const calibrateNS = 3.1e9

// calibrate measures a drive in some of the runs, as the daemon does when it starts. The zero Profile means that the
// drive was not measured, or could not be.
func (n *Node) calibrate(disk int, dev *lab.Device) jbof.Profile {
	l, d := n.lab, n.lab.Disks[disk]
	if !l.traits.calibrates || disk != 0 {
		return jbof.Profile{}
	}
	rng := l.Sim.Rand("calibration")
	least := 4e6 + rng.Int64N(16e6)
	var failing, hanging float64
	vanishAt := int64(never)
	if !l.traits.sane {
		least += rng.Int64N(40e6)
		switch k := rng.IntN(4); {
		case k == 0:
			failing = 0.01
		case k == 1:
			hanging = 0.001
		case k == 2 && l.traits.fickle:
			vanishAt = l.Sim.Now() + rng.Int64N(2e9)
		}
	}
	d.Hold = func(*ssd.Request) int64 {
		switch {
		case l.Sim.Now() > vanishAt:
			l.sick(l.Sim.Now())
			l.Sim.Go(d.Vanish)
			vanishAt = never
		case rng.Float64() < hanging:
			return 5e9 + rng.Int64N(10e9)
		}
		return least + rng.Int64N(least)
	}
	d.Fault = func(*ssd.Request) lab.Outcome {
		if rng.Float64() < failing {
			return lab.FailUndone
		}
		return lab.Good
	}
	began := l.Sim.Now()
	l.calibrating = disk + 1
	p, err := drive.Calibrate(n.process, dev, n.pool)
	l.calibrating = 0
	d.Hold, d.Fault = nil, nil
	took := time.Duration(l.Sim.Now() - began)
	l.Sim.Tracef("drive %d is calibrated within %v: %+v, %v", disk, took, p, err)
	switch {
	case took > calibrateNS:
		l.Violation("the calibration of drive %d takes %v", disk, took)
	case err != nil && l.traits.sane:
		l.Violation("drive %d cannot be calibrated: %v", disk, err)
	case err == nil && (p.Depth < 1 || float64(p.LatencyNS) < 0.97*float64(least)): // by the clock of the node
		l.Violation("drive %d, of which each read takes %d ns or more, is calibrated: %+v", disk, least, p)
	}
	return p
}
