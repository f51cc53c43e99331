package ycsb

import (
	"context"
	"errors"
	"sync"
	"time"
)

// mapDB is a store in a map. Its queues execute operations in Poll, so that operations of several threads overlap.
type mapDB struct {
	mu     sync.Mutex
	values map[[KeyBytes]byte][]byte // guarded by mu
	// spoil, if set, may change the result of an operation. A Put that it fails has no effect.
	spoil func(o *Op, d *Done)
	// hold, if set, delays results while it returns true.
	hold func() bool
}

func newMapDB() *mapDB { return &mapDB{values: map[[KeyBytes]byte][]byte{}} }

func (db *mapDB) Name() string       { return "map" }
func (db *mapDB) MaxValueBytes() int { return MaxValueBytes }
func (db *mapDB) Close() error       { return nil }
func (db *mapDB) Buffer(size int) ([]byte, func() error, error) {
	return make([]byte, size), func() error { return nil }, nil
}
func (db *mapDB) OpenQueue(_ context.Context, depth int) (Queue, error) {
	return &mapQueue{db: db, ops: make([]Op, 0, depth), wake: make(chan struct{})}, nil
}

type mapQueue struct {
	db   *mapDB
	ops  []Op
	wake chan struct{}
}

var errInterruptedQueue = errors.New("interrupted")

func (q *mapQueue) Submit(ops []Op) (int, error) {
	q.ops = append(q.ops, ops...)
	return len(ops), nil
}

func (q *mapQueue) Poll(dst []Done, wait time.Duration) (int, error) {
	for q.db.hold != nil && q.db.hold() {
		if wait == 0 {
			return 0, nil
		}
		select {
		case <-q.wake:
			return 0, errInterruptedQueue
		case <-time.After(100 * time.Microsecond):
		}
	}
	n := min(len(dst), len(q.ops))
	for i := range n {
		o := &q.ops[i]
		d := &dst[i]
		*d = Done{Tag: o.Tag}
		if o.Put && q.db.spoil != nil {
			q.db.spoil(o, d)
		}
		if d.Result == OK {
			q.db.do(o, d)
		}
		if !o.Put && q.db.spoil != nil {
			q.db.spoil(o, d)
		}
	}
	q.ops = q.ops[:copy(q.ops, q.ops[n:])]
	return n, nil
}

func (db *mapDB) do(o *Op, d *Done) {
	db.mu.Lock()
	defer db.mu.Unlock()
	v, ok := db.values[*o.Key]
	switch {
	case o.Put && len(v) == len(o.Value):
		copy(v, o.Value)
	case o.Put:
		db.values[*o.Key] = append([]byte(nil), o.Value...)
	case !ok:
		d.Result = NotFound
	default:
		copy(o.Value, v)
		d.ValueLen = len(v)
	}
}

func (q *mapQueue) Interrupt()   { close(q.wake) }
func (q *mapQueue) Close() error { return nil }
