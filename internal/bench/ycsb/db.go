package ycsb

import (
	"context"
	"time"
)

// DB is a store that is loaded and measured.
type DB interface {
	// Name describes the store in the report.
	Name() string
	// MaxValueBytes is the longest value that the store takes.
	MaxValueBytes() int
	// OpenQueue opens a queue for one thread.
	OpenQueue(ctx context.Context, depth int) (Queue, error)
	// Buffer returns memory for values, registered with the transport if that helps, and a function that gives it back.
	Buffer(size int) (b []byte, free func() error, err error)
	Close() error
}

// Op is one operation to submit.
type Op struct {
	// Put stores Value; otherwise the value of Key is read into it, as much as fits.
	Put   bool
	Key   *[KeyBytes]byte
	Value []byte
	// Tag is below the queue's depth and comes back in Done.
	Tag uint32
}

// Result is the outcome of an operation.
type Result uint8

// Results.
const (
	// OK: done.
	OK Result = iota
	// NotFound: the key does not exist.
	NotFound
	// Refused: a Put has changed nothing and never will, for want of space for example.
	Refused
	// Failed: a Put may have been done or not.
	Failed
)

// String names the result as YCSB does.
func (r Result) String() string {
	return [...]string{"OK", "NOT_FOUND", "SERVICE_UNAVAILABLE", "ERROR"}[r]
}

// Done is a finished Op.
type Done struct {
	Tag    uint32
	Result Result
	// ValueLen is the length of the whole value that was read, which may be more than Op.Value holds.
	ValueLen int
	// Err describes why Result is Refused or Failed.
	Err error
}

// Queue is one thread's path to the store. One goroutine calls Submit and Poll.
type Queue interface {
	// Submit takes operations in order and returns how many. Key and Value of those belong to the queue
	// until Poll has returned them.
	//
	// Errors: the queue has failed, and what is outstanding may have been done or not.
	Submit(ops []Op) (int, error)
	// Poll returns finished operations: with wait 0 it only looks, with wait > 0 it waits up to that
	// long for the first, with wait < 0 until there is one.
	//
	// Errors: as Submit.
	Poll(dst []Done, wait time.Duration) (int, error)
	// Interrupt makes a blocked Poll return; from any goroutine. The queue is of no use afterwards.
	Interrupt()
	Close() error
}

// Counting is a DB that counts what it does.
type Counting interface {
	// Counters returns them, always in the same order.
	Counters() []Counter
}

// Counter is one of the counters of a DB.
type Counter struct {
	Name  string
	Value int64
	// State: the value describes the present state, and not how much has happened.
	State bool
}
