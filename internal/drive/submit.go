package drive

import (
	"jbofd/internal/invariants"
	"jbofd/internal/turn"
)

// Batch collects IOs for one Submit. The zero Batch is empty.
type Batch struct{ chain turn.Chain[IO] }

// Add appends io to the batch.
func (b *Batch) Add(io *IO) { b.chain.Add(&io.node) } // hot: 0 allocs

// Empty reports whether there is nothing in the batch.
func (b *Batch) Empty() bool { return b.chain.Empty() }

// Submit hands the batch over and empties it; on return the IOs may be done already. From any goroutine, but not from
// within a Sink's methods.
//
// hot: 0 allocs
func (d *Drive) Submit(b *Batch) {
	if b.chain.Empty() {
		return
	}
	for n := b.chain.Newest(); n != nil; n = n.Older() {
		n.Item.begin(d)
	}
	d.inbox.PushChain(&b.chain)
	d.driver.Run()
}

// Fetched hands admitted IOs back: the host's data is in their buffers. An IO with Err set (the data never came) is
// done without touching the device.
//
// hot: 0 allocs
func (d *Drive) Fetched(b *Batch) {
	if b.chain.Empty() {
		return
	}
	for n := b.chain.Newest(); n != nil; n = n.Older() {
		n.Item.fetched = true
	}
	d.inbox.PushChain(&b.chain)
	d.driver.Run()
}

// AbortStale takes out, as Abort does, every IO that waits and whose Pass or Extent is stale; it is Done with
// fence.ErrStale. IOs that are submitted later end so when they would be handed to the device. From any goroutine, also
// with locks held that Sinks take.
func (d *Drive) AbortStale() {
	d.wants.Or(wantStale)
	d.driver.RunLater()
}

// Abort takes io out if it waits: for the pipeline, for memory, for a range that a compare-and-write has claimed. A
// composed operation is taken out also while a device request of it is under way; it ends with that request, and no
// other follows. If Abort returns true the IO is Done with ErrAborted, soon. Otherwise it runs to completion. From any
// goroutine, also with locks held that Sinks take.
func (d *Drive) Abort(io *IO) bool {
	invariants.Check(!io.Unabortable, "drive: Abort of an IO that was submitted as unabortable")
	for {
		s := io.state.Load(io)
		if s != stateQueued && s != stateRunning {
			return false
		}
		if io.state.CompareAndSwap(io, s, stateAborted) {
			break
		}
	}
	d.stats.Aborted.Add(1)
	if d.wants.Or(wantAborted)&wantAborted == 0 { // otherwise a turn is coming that finds this IO, too
		d.driver.RunLater()
	}
	return true
}

// resubmit takes an IO back for which the pool has found a buffer.
func (d *Drive) resubmit(io *IO) {
	d.inbox.Push(&io.node)
	// The buffer may have been released in this drive's own turn, or by a connection that holds locks which a Sink
	// takes.
	d.driver.RunLater()
}
