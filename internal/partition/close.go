package partition

import (
	"fmt"
	"time"

	"jbofd/internal/ssd"
)

// CloseOptions bound how long Partition.CloseWith may take.
type CloseOptions struct {
	// Patience is how long CloseWith may take, apart from the time that it grants for each byte of the last checkpoint
	// that is written (MinCheckpointRate).
	Patience time.Duration
	// Sharing is how many stores write their last checkpoints to the drive at the same time; 0 counts as 1.
	Sharing int
	// Stop, once it is closed, ends the return of values from swap areas. Of Patience no more than checkpointTimeout is
	// left then, for the last checkpoint. A nil Stop is never closed.
	Stop <-chan struct{}
}

// Close is CloseWith with only a Patience.
//
// Errors: those of CloseWith.
func (p *Partition) Close(patience time.Duration) error {
	return p.CloseWith(CloseOptions{Patience: patience})
}

// CloseWith closes the partition. It moves values back from swap areas, stops the store with a last checkpoint, so that
// the next Open has no log to replay, and frees the memory. The submitters must have stopped. Only the first call has
// an effect; another one returns nil at once, also while the first is still closing.
//
// The time limit is o.Patience. Each byte of the last checkpoint that is written extends it by the time that the byte
// takes at MinCheckpointRate. So a long checkpoint has the time that it needs as long as it makes progress, and a drive
// that does not answer does not hold CloseWith up.
//
// If the time is over, or the drive has vanished, CloseWith gives up. Acknowledged writes are not lost: the next Open
// replays the log. The Requests that the store still has end with kvstore.DeviceError, and their outcome is
// indeterminate. Memory that a device may still use is not freed. No new I/O starts, but the I/Os that the device
// already has may still change the partition. The caller must therefore wait for them with drive.Drive.Quiesce before
// it opens the partition again or uses its extent for something else.
//
// Errors: ssd.ErrGone if the drive has vanished; an error without a sentinel if the last checkpoint was not done in
// time; ErrKeysSwapped if it was, but values are left in swap areas.
func (p *Partition) CloseWith(o CloseOptions) error {
	p.driver.Lock()
	if p.phase != serving {
		p.driver.Unlock()
		return nil
	}
	p.phase = closing
	if p.swapping != nil {
		p.swapping.source.Drain()
	} else {
		p.store.Stop()
	}
	p.turn()
	p.driver.Unlock()
	c := closer{p: p, began: p.driver.Env().Now(), sharing: int64(max(o.Sharing, 1))}
	last := min(checkpointTimeout, o.Patience/2)
	stopped := c.await(o.Patience-last, o.Stop)
	if !stopped {
		if p.swapping != nil {
			p.swapping.stopDraining()
		}
		stopped = c.await(last, nil)
	}
	p.driver.Lock()
	lost := p.lost
	p.driver.Unlock()
	switch {
	case lost:
		p.giveUp(o.Patience)
		return fmt.Errorf("the last checkpoint could not be written: %w; the next start replays the log", ssd.ErrGone)
	case !stopped:
		written, left := p.lastCheckpoint()
		p.giveUp(takeOutTimeout)
		took := time.Duration(p.driver.Env().Now() - c.began)
		return fmt.Errorf("the last checkpoint took longer than %v, with %d of %d bytes written; the next start "+
			"replays the log", took.Round(time.Millisecond), written, written+left)
	}
	p.release()
	if p.swapping != nil {
		return p.swapping.keysLeft()
	}
	return nil
}

const (
	// MinCheckpointRate is the average rate in bytes per second below which CloseWith gives a last checkpoint up. The
	// stores of a drive that are closed at the same time share it (CloseOptions.Sharing).
	MinCheckpointRate = 32 << 20
	// checkpointTimeout is how much of Patience, but never more than half, CloseWith keeps for the last checkpoint
	// while it moves values back.
	checkpointTimeout = 500 * time.Millisecond
	// takeOutTimeout is how long CloseWith waits for the I/Os of a store that it has given up. I/Os that are not at the
	// device yet end at once; waiting longer for the others would exceed the time limit.
	takeOutTimeout = 10 * time.Millisecond
	// lookEvery is the interval at which CloseWith looks at the progress of the checkpoint and at Stop.
	lookEvery = 10 * time.Millisecond
)

// closingEvery is the interval between calls of Config.Closing.
var closingEvery = 3 * time.Second

// closer waits for a store that is being closed.
type closer struct {
	p       *Partition
	began   int64
	sharing int64
	// granted is the number of bytes of the last checkpoint for which time was granted. most is the limit of granted:
	// the length of the checkpoint when it was first known.
	granted, most int64
	// told counts the calls of Config.Closing.
	told int64
}

// await waits until the store has stopped or its drive has vanished, and then returns true. It returns false if the
// time is over or stop is closed. Bytes of the last checkpoint that are written meanwhile extend the deadline (grant).
func (c *closer) await(patience time.Duration, stop <-chan struct{}) bool {
	env := c.p.driver.Env()
	for deadline := env.Now() + int64(patience); ; {
		deadline += c.grant()
		rest := time.Duration(deadline - env.Now())
		if env.Wait(c.p.stopped, max(0, min(rest, lookEvery))) {
			return true
		}
		select {
		case <-stop:
			return false
		default:
		}
		if rest <= 0 {
			return false
		}
		c.tell()
	}
}

// grant returns the time, in nanoseconds, for the bytes that were written since the last call. If a checkpoint fails
// and is written again, no more time is granted for the second attempt: most limits all that is granted.
func (c *closer) grant() int64 {
	written, left := c.p.lastCheckpoint()
	if c.most == 0 && written+left > 0 {
		c.most = written + left
	}
	n := max(0, min(written, c.most)-c.granted)
	c.granted += n
	return n * 1e9 / MinCheckpointRate * c.sharing
}

// tell calls Config.Closing with the progress of the last checkpoint, once per closingEvery.
func (c *closer) tell() {
	n := (c.p.driver.Env().Now() - c.began) / int64(closingEvery)
	if n == c.told || c.p.cfg.Closing == nil {
		return
	}
	c.told = n
	if written, left := c.p.lastCheckpoint(); written > 0 {
		c.p.cfg.Closing(written, written+left)
	}
}

// lastCheckpoint is kvstore.Store.LastCheckpoint.
func (p *Partition) lastCheckpoint() (written, left int64) {
	p.driver.Lock()
	defer p.driver.Unlock()
	return p.store.LastCheckpoint()
}

// LastCheckpointBytes is how many bytes a last checkpoint would have if the partition were closed now.
func (p *Partition) LastCheckpointBytes() int64 {
	_, left := p.lastCheckpoint()
	return left
}
