package partition

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/invariants"
	"jbofd/internal/kvstore"
	"jbofd/internal/ssd"
)

// ErrStopped is wrapped by the error of a Resize that has been told to stop.
var ErrStopped = errors.New("the change of the size was stopped")

// ResizeOptions describe what a partition is to become.
type ResizeOptions struct {
	// PartitionBytes is the new length. ExtentBytes is how much the drive has for the partition, at least as much as it
	// has now and as it will have.
	PartitionBytes, ExtentBytes int64
	// Progress, if set, is called every few seconds while a partition shrinks: how much of what is taken away is empty.
	Progress func(done, of int64)
	// Stop, once it is closed, ends Resize within stopPatience; nil: nothing does.
	Stop <-chan struct{}
	// Patience is how long Resize waits for a drive that answers nothing; 0: resizePatience.
	Patience time.Duration
}

// SizeBytes is the length of the partition. While it is resized that may already be the new one, which is not durable
// yet, or still the old one: see HasSize.
func (p *Partition) SizeBytes() int64 {
	p.driver.Lock()
	defer p.driver.Unlock()
	return p.store.PartitionBytes()
}

// HasSize reports whether the partition has that length for good: it is durable, and no resize runs that will change
// it. For the store has a resize ended only when the superblock that is durable names the length.
func (p *Partition) HasSize(bytes int64) bool {
	p.driver.Lock()
	defer p.driver.Unlock()
	return p.store.PartitionBytes() == bytes && !p.store.ResizeState().Running
}

// CheckResize reports whether the partition can have that length, as far as is known now.
//
// Errors: kvstore.ErrResize, saying what is in the way.
func (p *Partition) CheckResize(bytes int64) error {
	p.driver.Lock()
	defer p.driver.Unlock()
	return p.checkResize(bytes)
}

func (p *Partition) checkResize(bytes int64) error {
	if p.phase != serving {
		return fmt.Errorf("%w to %d bytes: it is being closed", kvstore.ErrResize, bytes)
	}
	return p.store.CheckResize(bytes, int(segTblBytes(bytes, p.cfg.Store.KeysPerSegment)))
}

// Resize changes the length of the partition, while it serves, and returns when that is durable. A shrink takes as long
// as moving what lies behind the new end, at the weight of the background; then the end of the extent, from
// PartitionBytes on, may be taken away. If the daemon dies before, the partition opens with either length.
//
// Resize does not wait for a drive that has vanished or, for o.Patience, has answered nothing. After such an error, and
// after ErrStopped, the resize may go on, and the partition get the new length nevertheless, if the drive answers:
// HasSize says what it has.
//
// Errors: kvstore.ErrResize or no address space for the SegTbl, and the partition has its old length; ErrStopped;
// ssd.ErrGone, the drive has vanished; one without a sentinel, if it does not answer.
func (p *Partition) Resize(o ResizeOptions) error {
	p.driver.Lock()
	ended, err := p.beginResize(o)
	p.driver.Unlock()
	if err != nil {
		return err
	}
	env := p.driver.Env()
	stoppedNS, patience := int64(0), cmp.Or(o.Patience, resizePatience)
	for told := env.Now(); !env.Wait(ended, lookEvery); {
		if stoppedNS == 0 {
			select {
			case <-o.Stop:
				stoppedNS = env.Now()
				p.cancelResize()
			default:
			}
		} else if env.Now()-stoppedNS > int64(stopPatience) {
			return ErrStopped
		}
		if p.unanswered() > patience {
			p.cancelResize()
			return fmt.Errorf("the drive has answered nothing for %v; the size may change when it does",
				patience)
		}
		if o.Progress != nil && env.Now()-told >= int64(resizingEvery) {
			told = env.Now()
			if st := p.ResizeState(); st.TotalBytes > 0 {
				o.Progress(st.DoneBytes, st.TotalBytes)
			}
		}
	}
	p.driver.Lock()
	st, lost := p.store.ResizeState(), p.resizeLost
	p.driver.Unlock()
	switch {
	case st.Err != nil && stoppedNS != 0:
		return fmt.Errorf("%w: %w", ErrStopped, st.Err)
	case st.Err != nil:
		return st.Err
	case st.Running && lost:
		p.cancelResize()
		return fmt.Errorf("while it was changed: %w", ssd.ErrGone)
	case st.Running:
		return fmt.Errorf("%w to %d bytes: it was closed", kvstore.ErrResize, o.PartitionBytes)
	}
	return nil
}

const (
	// resizePatience is how long Resize waits for a drive that answers nothing. It is longer than a drive takes that
	// works, its retries included.
	resizePatience = time.Minute
	// stopPatience is how long Resize waits, once it is to stop, for a shrink that it has cancelled.
	stopPatience = 100 * time.Millisecond
)

// unanswered is how long the drive has had I/Os of the store and has ended none.
func (p *Partition) unanswered() time.Duration {
	p.driver.Lock()
	defer p.driver.Unlock()
	if p.atDrive == 0 {
		return 0
	}
	return time.Duration(p.driver.Env().Now() - p.heardNS)
}

// resizingEvery is how often ResizeOptions.Progress is told.
var resizingEvery = 3 * time.Second

// beginResize begins a resize. The channel is closed when it has ended. Needs ownership.
func (p *Partition) beginResize(o ResizeOptions) (ended <-chan struct{}, err error) {
	if err := p.checkResize(o.PartitionBytes); err != nil {
		return nil, err
	}
	if most := max(o.PartitionBytes, p.store.PartitionBytes()); o.ExtentBytes < most {
		return nil, fmt.Errorf("%w to %d bytes: the extent has %d, want at least %d", kvstore.ErrResize,
			o.PartitionBytes, o.ExtentBytes, most)
	}
	n := segTblBytes(o.PartitionBytes, p.cfg.Store.KeysPerSegment)
	table := p.memory.segTbl
	if grows := n > int64(len(table)); grows {
		if table, err = p.memory.moveSegTbl(n); err != nil {
			return nil, err
		}
	}
	err = p.store.Resize(kvstore.ResizeOptions{PartitionBytes: o.PartitionBytes, ExtentBytes: o.ExtentBytes,
		SegTbl: table[:n]})
	// The store must accept: moveSegTbl may have unmapped the memory of the table that it has.
	invariants.Check(err == nil, "partition: a resize was refused that had been checked")
	done := make(chan struct{})
	p.resized, p.resizeLost = done, false
	p.turn()
	return done, nil
}

// cancelResize ends a shrink that has not come to the end.
func (p *Partition) cancelResize() {
	p.driver.Lock()
	defer p.driver.Unlock()
	if p.phase == serving {
		p.store.CancelResize()
		p.turn()
	}
}

// ResizeState returns how far a resize is.
func (p *Partition) ResizeState() kvstore.ResizeState {
	p.driver.Lock()
	defer p.driver.Unlock()
	return p.store.ResizeState()
}

// endResize tells Resize when the store has ended a resize, or will not. Needs ownership.
func (p *Partition) endResize() {
	if p.resized != nil && (p.phase == gone || p.resizeLost || !p.store.ResizeState().Running) {
		close(p.resized)
		p.resized = nil
	}
}

// moveSegTbl reserves more address space for the SegTbl, which has its content then.
func (m *memory) moveSegTbl(n int64) ([]byte, error) {
	b, err := unix.Mremap(m.segTbl, int(n), unix.MREMAP_MAYMOVE)
	if err != nil {
		return nil, fmt.Errorf("address space of %d bytes for the SegTbl: %w", n, err)
	}
	m.segTbl = b
	return b, nil
}
