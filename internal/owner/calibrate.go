package owner

import (
	"errors"
	"fmt"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/pipeline/jbof"
	"jbofd/internal/ssd"
)

// calibrationTime bounds a Calibrate; a common drive takes a fifth of a second.
const calibrationTime = 2 * time.Second

// ErrSlow: a drive did not answer enough reads within the time that calibration may take.
var ErrSlow = errors.New("the drive is too slow to be calibrated")

// Calibrate measures what reads cost an idle drive, before it has an owner. Nothing is
// written. A drive that answers within Submit has no queue to keep short: it is not
// measured, and its profile lets as much go at once as there is. The profile of a drive with an
// error is zero.
//
// Errors: ErrSlow; the drive's errors; bufpool has too little memory.
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
	type outcome struct {
		profile jbof.Profile
		err     error
	}
	done := make(chan outcome, 1)
	go func() { // Close waits for a drive that hangs; the node need not
		p, err := calibrate(q, info, pool)
		done <- outcome{p, errors.Join(err, q.Close())}
	}()
	select {
	case o := <-done:
		return o.profile, o.err
	case <-time.After(calibrationTime + time.Second):
		return jbof.Profile{}, ErrSlow
	}
}

func calibrate(q ssd.Queue, info ssd.Info, pool *bufpool.Pool) (jbof.Profile, error) {
	account := pool.Account("calibration:" + info.Name)
	defer account.Close()
	buf, ok := pool.Get(account, jbof.CalibrationBytes)
	if !ok {
		return jbof.Profile{}, fmt.Errorf("no buffer of %d bytes", jbof.CalibrationBytes)
	}
	defer pool.Put(buf) // after every read has come back: they all land in it
	var (
		m     jbof.Calibration
		comps [64]ssd.Completion
		rng   uint64 = 1
		began        = time.Now()
		err   error
	)
	now := func() int64 { return int64(time.Since(began)) + 1 }
	for outstanding := 0; ; {
		for err == nil {
			n, ok := m.Next(now())
			if !ok {
				break
			}
			rng = rng*6364136223846793005 + 1442695040888963407
			blocks := uint64(info.SizeBytes-n) / jbof.CalibrationUnit
			req := [1]ssd.Request{{Op: ssd.Read, Offset: int64((rng>>33)%blocks) * jbof.CalibrationUnit, Len: n, Buf: buf.B[:n], Tag: rng}}
			if q.Submit(req[:]) != 1 {
				err = errors.New("its queue took less than its depth")
				break
			}
			outstanding++
		}
		if outstanding == 0 && (err != nil || m.Done()) {
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
		if err == nil && time.Since(began) > calibrationTime && !m.Done() {
			err = ErrSlow
		}
	}
	if err != nil {
		return jbof.Profile{}, err
	}
	return m.Profile(), nil
}
