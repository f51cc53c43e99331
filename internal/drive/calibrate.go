package drive

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/pipeline/jbof"
	"jbofd/internal/ssd"
	"jbofd/internal/turn"
)

const (
	// calibrationTime bounds a Calibrate; a common drive takes a quarter of a second.
	calibrationTime = 2 * time.Second
	// calibrationData is how many bytes must have been written to the drive, unless it is smaller. Less than that may
	// be read from a cache of the drive or of the host.
	calibrationData = 64 << 20
	// calibrationExtents bounds the search for written data.
	calibrationExtents = 4096
)

var (
	// ErrSlow: a drive did not answer enough reads within the time that calibration may take.
	ErrSlow = errors.New("the drive is too slow to be calibrated")
	// ErrBlank: too little was ever written to the drive. A drive reads blocks that were never written without its
	// medium.
	ErrBlank = errors.New("the drive holds too little data to be calibrated")
)

// Calibrate measures what reads cost on an idle device, before a Drive is made for it. Nothing is written. A device
// that completes within Submit has no queue to keep short: it is not measured, and its profile does not limit the IOs
// under way. The profile of a device with an error is zero.
//
// Errors: ErrSlow; ErrBlank; the drive's errors; bufpool has too little memory.
func Calibrate(dev ssd.Device, pool *bufpool.Pool) (jbof.Profile, error) {
	info := dev.Info()
	q, err := dev.OpenQueue(jbof.CalibrationDepth)
	if err != nil {
		return jbof.Profile{}, err
	}
	if q.Synchronous() {
		return jbof.Profile{Fixed: true, Depth: jbof.CalibrationDepth, LargeDepth: jbof.CalibrationDepth}, q.Close()
	}
	if info.SizeBytes < 2*jbof.CalibrationBytes || info.BlockSize > jbof.CalibrationUnit {
		return jbof.Profile{}, q.Close()
	}
	data := dataOf(dev)
	if data.bytes < min(calibrationData, info.SizeBytes-2*jbof.CalibrationUnit) {
		return jbof.Profile{}, errors.Join(fmt.Errorf("%w: %d bytes of it in extents of %d or more", ErrBlank,
			data.bytes, jbof.CalibrationBytes), q.Close())
	}
	var outcome struct {
		profile jbof.Profile
		err     error
	}
	done := make(chan struct{})
	turn.Real.Go(func() { // q.Close waits for a device that hangs; the caller must not
		defer close(done)
		p, err := calibrate(q, info.Name, &data, pool)
		outcome.profile, outcome.err = p, errors.Join(err, q.Close())
	})
	if !turn.Real.Wait(done, calibrationTime+time.Second) {
		return jbof.Profile{}, ErrSlow // outcome is the goroutine's still
	}
	return outcome.profile, outcome.err
}

// data is the part of a device that can be read for a calibration.
type data struct {
	// extents are of whole units, each long enough for the largest read; upTo holds the running sum of their lengths.
	extents []ssd.Extent
	upTo    []int64
	bytes   int64
}

// dataOf finds the written extents of a device.
func dataOf(dev ssd.Device) (d data) {
	const unit = jbof.CalibrationUnit
	looked := 0
	for e := range ssd.Data(dev) {
		e.Start, e.End = (e.Start+unit-1)&^(unit-1), e.End&^(unit-1)
		if e.End-e.Start >= jbof.CalibrationBytes {
			d.bytes += e.End - e.Start
			d.extents, d.upTo = append(d.extents, e), append(d.upTo, d.bytes)
		}
		if looked++; looked == calibrationExtents {
			break
		}
	}
	return d
}

// place maps a random number to an offset at which n bytes can be read.
func (d *data) place(random uint64, n int64) int64 {
	at := int64(random % uint64(d.bytes))
	i, _ := slices.BinarySearch(d.upTo, at+1)
	e := d.extents[i]
	return min((e.End-d.upTo[i]+at)&^(jbof.CalibrationUnit-1), e.End-n)
}

// calibrate measures reads at random places of data, as jbof.Calibration asks for them, until that has enough or
// calibrationTime is over. It runs on a goroutine of its own, because it waits for the device.
//
// Errors: ErrSlow; the device's; the pool has no memory.
func calibrate(q ssd.Queue, name string, data *data, pool *bufpool.Pool) (jbof.Profile, error) {
	account := pool.Account("calibration:" + name)
	defer account.Close()
	buf, ok := pool.Get(account, jbof.CalibrationBytes)
	if !ok {
		return jbof.Profile{}, fmt.Errorf("no buffer of %d bytes", jbof.CalibrationBytes)
	}
	defer pool.Put(buf) // after every read has completed, for all reads use it
	var (
		m     jbof.Calibration
		comps [64]ssd.Completion
		tag   uint64
		began = turn.Real.Now()
		err   error
		late  bool // calibrationTime is over
	)
	now := func() int64 { return turn.Real.Now() - began + 1 }
	for outstanding := 0; ; {
		for err == nil && !late {
			n, ok := m.Next(now())
			if !ok {
				break
			}
			// The places differ from start to start, because the drive may have the last ones in its cache.
			req := [1]ssd.Request{{Op: ssd.Read, Offset: data.place(rand.Uint64(), n), Len: n, Buf: buf.B[:n],
				Tag: tag}}
			tag++
			if q.Submit(req[:]) != 1 {
				err = errors.New("its queue took less than its depth")
				break
			}
			outstanding++
		}
		if outstanding == 0 && (err != nil || late || m.Done()) {
			break
		}
		k := q.Poll(comps[:], calibrationTime)
		outstanding -= k
		for i := range comps[:k] {
			if err == nil {
				err = comps[i].Err
			}
			m.Complete(now(), comps[i].LatencyNS)
		}
		late = late || now() > int64(calibrationTime)
	}
	p := m.Profile()
	switch {
	case err != nil:
		return jbof.Profile{}, err
	case late && p == jbof.Profile{}:
		return p, ErrSlow
	}
	return p, nil // of fewer rounds, if time was over
}
