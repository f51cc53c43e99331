package owner

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/pipeline/jbof"
	"jbofd/internal/ssd"
)

const (
	// calibrationTime bounds a Calibrate; a common drive takes a quarter of a second.
	calibrationTime = 2 * time.Second
	// calibrationData must be there to be read, unless the drive is smaller: less than that drives, and what is
	// below them, keep in memories of their own.
	calibrationData = 64 << 20
	// calibrationExtents bounds the search for it.
	calibrationExtents = 4096
)

var (
	// ErrSlow: a drive did not answer enough reads within the time that calibration may take.
	ErrSlow = errors.New("the drive is too slow to be calibrated")
	// ErrBlank: too little was ever written to the drive. What was not is read without asking the medium, in no time.
	ErrBlank = errors.New("the drive holds too little data to be calibrated")
)

// Calibrate measures what reads cost an idle drive, before it has an owner. Nothing is
// written. A drive that answers within Submit has no queue to keep short: it is not
// measured, and its profile lets as much go at once as there is. The profile of a drive with an
// error is zero.
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
		return jbof.Profile{}, errors.Join(fmt.Errorf("%w: %d bytes of it in extents of %d or more", ErrBlank, data.bytes, jbof.CalibrationBytes), q.Close())
	}
	type outcome struct {
		profile jbof.Profile
		err     error
	}
	done := make(chan outcome, 1)
	go func() { // Close waits for a drive that hangs; the node need not
		p, err := calibrate(q, info.Name, &data, pool)
		done <- outcome{p, errors.Join(err, q.Close())}
	}()
	select {
	case o := <-done:
		return o.profile, o.err
	case <-time.After(calibrationTime + time.Second):
		return jbof.Profile{}, ErrSlow
	}
}

// data is what can be read for a calibration.
type data struct {
	// extents of whole units, each long enough for the largest read; upTo sums their lengths.
	extents []ssd.Extent
	upTo    []int64
	bytes   int64
}

// dataOf finds out what a drive holds.
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

// place returns where to read n bytes, for a random number.
func (d *data) place(random uint64, n int64) int64 {
	at := int64(random % uint64(d.bytes))
	i, _ := slices.BinarySearch(d.upTo, at+1)
	e := d.extents[i]
	return min((e.End-d.upTo[i]+at)&^(jbof.CalibrationUnit-1), e.End-n)
}

func calibrate(q ssd.Queue, name string, data *data, pool *bufpool.Pool) (jbof.Profile, error) {
	account := pool.Account("calibration:" + name)
	defer account.Close()
	buf, ok := pool.Get(account, jbof.CalibrationBytes)
	if !ok {
		return jbof.Profile{}, fmt.Errorf("no buffer of %d bytes", jbof.CalibrationBytes)
	}
	defer pool.Put(buf) // after every read has come back: they all land in it
	var (
		m     jbof.Calibration
		comps [64]ssd.Completion
		tag   uint64
		began = time.Now()
		err   error
		late  bool // the time is over
	)
	now := func() int64 { return int64(time.Since(began)) + 1 }
	for outstanding := 0; ; {
		for err == nil && !late {
			n, ok := m.Next(now())
			if !ok {
				break
			}
			// Other places each time: what was read at the last start may be in a memory of the drive's.
			req := [1]ssd.Request{{Op: ssd.Read, Offset: data.place(rand.Uint64(), n), Len: n, Buf: buf.B[:n], Tag: tag}}
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
		late = late || time.Since(began) > calibrationTime
	}
	p := m.Profile()
	switch {
	case err != nil:
		return jbof.Profile{}, err
	case late && p == jbof.Profile{}:
		return p, ErrSlow
	}
	return p, nil // if it is late, of fewer rounds
}
