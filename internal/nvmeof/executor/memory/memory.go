// Package memory is how an executor's command waits for its buffer, and how it is taken out while it does.
package memory

import (
	"sync/atomic"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/turn"
)

// Wait is the wait of one command for memory. It is part of what the executor has of the command's slot.
type Wait struct {
	env    turn.Env
	pool   *bufpool.Pool
	c      *executor.Command
	waiter bufpool.Waiter
	// stop: Stop could not take the command out; it begins no further step.
	stop atomic.Bool
}

// Init prepares the Wait of a command.
func (w *Wait) Init(env turn.Env, pool *bufpool.Pool, c *executor.Command) {
	w.env, w.pool, w.c = env, pool, c
	w.waiter.Wake = w.granted
}

// Begin forgets a Stop of the slot's command before.
//
// hot: 0 allocs
func (w *Wait) Begin() {
	if w.stop.Load() { // a load costs a fraction of an atomic store
		w.stop.Store(false)
	}
}

// Size is how many bytes were asked for last.
func (w *Wait) Size() int { return w.waiter.Size }

// Get takes n bytes for the command from the pool, as its Buf. It reports false if the command waits for them; then it
// belongs to the pool's waiter, and Port.NeedData follows when there are some. A command that is stopped meanwhile does
// not wait, and stopped is true.
//
// hot: 0 allocs
func (w *Wait) Get(n int) (ok, stopped bool) {
	w.waiter.Size = n
	if w.pool.GetOrWait(w.c.Account, &w.waiter) {
		w.take()
		return true, false
	}
	// Stop sets stop and then looks for a waiter; this has queued the waiter and then looks at stop. One of them finds
	// the other, and Cancel succeeds for one of them only.
	return false, w.stop.Load() && w.pool.Cancel(&w.waiter)
}

// Stop takes the command out if it waits for memory: then it ends with Abort Requested. The caller holds locks that
// Port.Kick takes.
func (w *Wait) Stop() (taken bool) {
	w.stop.Store(true) // before Cancel: see Get
	if !w.pool.Cancel(&w.waiter) {
		return false
	}
	w.c.Fail(nvme.AbortRequested)
	if w.c.Port.Done(w.c) {
		w.env.Go(w.c.Port.Kick)
	}
	return true
}

func (w *Wait) take() { w.c.Buf, w.waiter.Buf = w.waiter.Buf, bufpool.Buf{} }

// granted is called by the pool when the memory is there that the command has waited for.
func (w *Wait) granted() {
	w.take()
	if p := w.c.Port; p.NeedData(w.c) {
		// The goroutine that has released the memory may hold locks that Kick takes. Buffers are short, so one
		// goroutine more does not matter.
		w.env.Go(p.Kick)
	}
}
