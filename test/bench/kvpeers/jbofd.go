package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/kvstore"
	"jbofd/internal/partition"
	"jbofd/internal/ssd/file"
)

// jbofdStore is jbofd's store on a file: read and written with O_DIRECT where the file system allows it, so that
// it has no page cache at all. It is durable at all times.
type jbofdStore struct {
	dev  *file.Device
	part *partition.Standalone
}

// fileUnit is what the file's size is a multiple of.
const fileUnit = 16 << 20

// closeTimeout is how long the last checkpoint may take.
const closeTimeout = time.Minute

func openJBOFD(cfg *Config, _ bool) (engine, error) {
	path := filepath.Join(cfg.Dir, "partition")
	size := (int64(float64(cfg.dataBytes())/cfg.Fill)/fileUnit + 1) * fileUnit
	size = max(size, 8*fileUnit) // a small store needs room for its reserve
	sc := kvstore.Config{UUID: [16]byte{1}, HashSeed: cfg.Seed}
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		// The file is written once, as a drive's blocks are there: otherwise it is the file system's
		// allocation that is measured.
		if err := writeZeroes(path, size); err != nil {
			return nil, err
		}
		sc.Format = true
	}
	dev, err := file.Open(file.Config{Name: "kvpeers", Path: path, SizeBytes: size})
	if err != nil {
		return nil, err
	}
	part, err := partition.OpenStandalone(dev, sc)
	if err != nil {
		return nil, errors.Join(err, dev.Close())
	}
	return &jbofdStore{dev, part}, nil
}

// writeZeroes makes a file that has all of its blocks, and leaves none of it in the page cache.
func writeZeroes(path string, size int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	zeroes := make([]byte, 1<<20)
	for at := int64(0); at < size && err == nil; at += int64(len(zeroes)) {
		_, err = f.WriteAt(zeroes, at)
	}
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	}
	return errors.Join(err, f.Close())
}

func (s *jbofdStore) settled() bool { return s.part.Idle() }

func (s *jbofdStore) ready() {}

func (s *jbofdStore) close() error {
	return errors.Join(s.part.Close(closeTimeout), s.dev.Close())
}

// fill makes a Request of the operation.
func fill(r *partition.Request, o *op) {
	r.Op, r.Condition = kvstore.Get, kvstore.Always
	if o.put {
		r.Op = kvstore.Put
	}
	r.Key, r.KeyLen, r.Value = o.key, keyBytes, o.value
}

// finish hands the answer back.
func finish(r *partition.Request, o *op) {
	o.err = nil
	switch {
	case r.Status != kvstore.OK:
		o.err = fmt.Errorf("object %d: status %d", o.index, r.Status)
	case !o.put:
		o.value = o.value[:min(r.ValueLen, len(o.value))]
	}
}

// jbofdSession waits for each Request by itself.
type jbofdSession struct {
	part  *partition.Standalone
	req   partition.Request
	batch partition.Batch
	done  chan struct{}
}

func (s *jbofdStore) session() session {
	n := &jbofdSession{part: s.part, done: make(chan struct{}, 1)}
	n.req.Sink = n
	return n
}

func (s *jbofdSession) do(o *op) {
	fill(&s.req, o)
	s.batch.Add(&s.req)
	s.part.Submit(&s.batch)
	<-s.done
	finish(&s.req, o)
}

// KVDone implements partition.Sink.
func (s *jbofdSession) KVDone(*partition.Request) (kick bool) {
	s.done <- struct{}{}
	return false
}

// Kick implements partition.Sink.
func (s *jbofdSession) Kick() {}

// jbofdQueue submits in batches and is woken once for all that is done.
type jbofdQueue struct {
	part   *partition.Standalone
	reqs   []partition.Request // by slot
	ops    []*op               // by slot
	batch  partition.Batch
	kicked chan struct{}
	out    []*op

	mu   sync.Mutex
	done []*partition.Request
}

func (s *jbofdStore) queue(depth int) queue {
	q := &jbofdQueue{part: s.part, reqs: make([]partition.Request, depth), ops: make([]*op, depth),
		kicked: make(chan struct{}, 1)}
	for i := range q.reqs {
		q.reqs[i].Sink, q.reqs[i].Slot = q, uint32(i)
	}
	return q
}

func (q *jbofdQueue) submit(ops []*op) {
	for _, o := range ops {
		r := &q.reqs[o.slot]
		fill(r, o)
		q.ops[o.slot] = o
		q.batch.Add(r)
	}
	q.part.Submit(&q.batch)
}

func (q *jbofdQueue) wait() []*op {
	q.out = q.out[:0]
	for len(q.out) == 0 {
		<-q.kicked
		q.mu.Lock()
		for _, r := range q.done {
			o := q.ops[r.Slot]
			finish(r, o)
			q.out = append(q.out, o)
		}
		q.done = q.done[:0]
		q.mu.Unlock()
	}
	return q.out
}

// KVDone implements partition.Sink.
func (q *jbofdQueue) KVDone(r *partition.Request) (kick bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.done = append(q.done, r)
	return len(q.done) == 1
}

// Kick implements partition.Sink.
func (q *jbofdQueue) Kick() {
	select {
	case q.kicked <- struct{}{}:
	default:
	}
}
