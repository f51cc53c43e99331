package partition

import (
	"fmt"
	"time"

	"jbofd/internal/ssd"
)

// CloseOptions say how long Partition.CloseWith may take.
type CloseOptions struct {
	// Patience is for everything but the bytes of the last checkpoint.
	Patience time.Duration
	// Sharing is how many stores write to the drive their last checkpoints at the same time; 0: 1.
	Sharing int
	// Stop, once it is closed, leaves only checkpointTimeout of Patience; nil: it never is.
	Stop <-chan struct{}
}

// Close is CloseWith with only a Patience.
//
// Errors: those of CloseWith.
func (p *Partition) Close(patience time.Duration) error {
	return p.CloseWith(CloseOptions{Patience: patience})
}

// CloseWith moves values back from swap areas, stops the store with a last checkpoint, so that the next Open has no log
// to replay, and returns the memory. The submitters must have stopped. Idempotent.
//
// All of that may take as long as the options say, and as much longer as what was written of the last checkpoint takes
// at MinCheckpointRate. So a long checkpoint has the time that it needs, and a drive that does not answer is not waited
// for. Nothing acknowledged is lost if the time is over, or if the drive has vanished, but CloseWith then gives up: it
// ends the Requests that the store still has with kvstore.DeviceError, so that their outcome is indeterminate, and does
// not return the memory if a device may still use it. No new I/O starts, but those at the device may still change the
// partition. Before it is opened again, or its extent is used for something else, the caller must wait for them with
// drive.Drive.Quiesce.
//
// Errors: one that says that the last checkpoint was not done in time; ssd.ErrGone; ErrKeysSwapped if the checkpoint
// was done, but values are left in swap areas.
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
	// MinCheckpointRate is how many bytes a second a last checkpoint has to be written at, on average, not to be given
	// up. All stores that are closed on a drive share it.
	MinCheckpointRate = 32 << 20
	// checkpointTimeout is how much of its patience CloseWith keeps for the last checkpoint while values are moved
	// back.
	checkpointTimeout = 500 * time.Millisecond
	// takeOutTimeout is how long CloseWith waits for I/Os of a store that was given up. Those that the device does not
	// have come back at once.
	takeOutTimeout = 10 * time.Millisecond
	// lookEvery is how often CloseWith looks how far the checkpoint is and whether it is to stop.
	lookEvery = 10 * time.Millisecond
)

// closingEvery is how often Config.Closing is told.
var closingEvery = 3 * time.Second

// closer waits for a store that is being closed.
type closer struct {
	p       *Partition
	began   int64
	sharing int64
	// granted is how many bytes of the last checkpoint have bought time, most how many may.
	granted, most int64
	// told counts the calls of Config.Closing.
	told int64
}

// await waits until the store has stopped or was found lost, and reports that; false: the time is over, or stop is
// closed. Bytes of the last checkpoint that are written meanwhile extend the deadline (grant).
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

// grant returns the time for the bytes that were written since it was called last. A checkpoint that fails and is
// written again gets none for that.
func (c *closer) grant() int64 {
	written, left := c.p.lastCheckpoint()
	if c.most == 0 && written+left > 0 {
		c.most = written + left
	}
	n := max(0, min(written, c.most)-c.granted)
	c.granted += n
	return n * 1e9 / MinCheckpointRate * c.sharing
}

// tell tells Config.Closing how far the last checkpoint is, when it is time.
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
