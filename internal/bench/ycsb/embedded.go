package ycsb

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"jbofd/internal/bench"
	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/kvstore"
	"jbofd/internal/partition"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/file"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/tenant"
	"jbofd/internal/uuid"
)

// Embedded is a store in this process on a device of its own: what the daemon does, without the network.
type Embedded struct {
	name  string
	dev   ssd.Device
	pool  *bufpool.Pool
	drive *drive.Drive
	part  *partition.Partition
	// opening is what it took to open the store: microseconds, reads of the device and their bytes.
	opening [3]int64
}

// EmbeddedConfig says where the store is.
type EmbeddedConfig struct {
	// Path is a regular file or a block device, or mem:SIZE. The store fills it.
	Path string
	// SizeBytes makes a regular file of that size if there is none.
	SizeBytes int64
	// Format makes a new store, whatever is there. mem:SIZE always gets a new one.
	Format bool
	// Engine is io_uring, threads, or empty for the best there is; for files.
	Engine string
	// BlockSize is that of mem:SIZE; 0: 4096.
	BlockSize int
	// KeysPerSegment, Requests, GroupBytes and GroupDelayNS are kvstore.Config's.
	KeysPerSegment, Requests, GroupBytes int
	GroupDelayNS                         int64
	// Volatile: acknowledged writes may be lost with the power.
	Volatile bool
}

// The pipeline's tenants: who loads, and the store itself.
const (
	foreground tenant.ID = iota
	background
)

// embeddedPoolBytes bounds the data buffers. The store's own buffers are an arena beside them.
const embeddedPoolBytes = 16 << 20

// closeTimeout is how long the last checkpoint may take.
const closeTimeout = time.Minute

// OpenEmbedded opens the device and the store on it.
//
// Errors: ErrConfig; those of the device; kvstore.ErrPartition if there is no valid store; kvstore.ErrNoMemory.
func OpenEmbedded(c EmbeddedConfig) (*Embedded, error) {
	d := &Embedded{name: "embedded " + c.Path}
	if err := d.open(c); err != nil {
		return nil, errors.Join(fmt.Errorf("--embedded %s: %w", c.Path, err), d.Close())
	}
	return d, nil
}

func (e *Embedded) open(c EmbeddedConfig) (err error) {
	if e.pool, err = bufpool.New(bufpool.Config{TotalBytes: embeddedPoolBytes}); err != nil {
		return err
	}
	if s, ok := strings.CutPrefix(c.Path, "mem:"); ok {
		n, perr := bench.ParseSize(s)
		if perr != nil {
			return fmt.Errorf("%w: %w", ErrConfig, perr)
		}
		if c.BlockSize == 0 {
			c.BlockSize = 4096
		}
		c.Format = true
		var dev *mem.Device
		if dev, err = mem.Open(mem.Config{Name: "embedded", SizeBytes: n, BlockSize: c.BlockSize}); err == nil {
			e.dev = dev
		}
	} else {
		if _, serr := os.Stat(c.Path); errors.Is(serr, os.ErrNotExist) {
			if c.SizeBytes == 0 {
				return fmt.Errorf("%w (--size makes a file)", serr)
			}
			c.Format = true
			defer func() {
				if err != nil { // or the next attempt would find a file without a store
					err = errors.Join(err, ignoreNotExist(os.Remove(c.Path)))
				}
			}()
		}
		var dev *file.Device
		if dev, err = file.Open(file.Config{Name: "embedded", Path: c.Path, Create: c.SizeBytes > 0,
			SizeBytes: c.SizeBytes, Engine: c.Engine, Pool: e.pool}); err == nil {
			e.dev = dev
		}
	}
	if errors.Is(err, mem.ErrConfig) || errors.Is(err, file.ErrConfig) {
		err = fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if err != nil {
		return err
	}
	if e.drive, err = drive.New(drive.Config{Device: e.dev, Pool: e.pool}); err != nil {
		return err
	}
	for _, t := range []tenant.ID{foreground, background} {
		e.drive.SetTenant(t, pipeline.Settings{Weight: 1})
	}
	// A partition of a new store has a name and a seed of its own.
	var id [24]byte
	if _, err = rand.Read(id[:]); err != nil {
		return err
	}
	info, begun := e.dev.Info(), time.Now()
	e.part, err = partition.Open(partition.Config{Drive: e.drive, Background: background, Volatile: c.Volatile,
		Store: kvstore.Config{
			PartitionBytes: info.SizeBytes, KeysPerSegment: c.KeysPerSegment, Requests: c.Requests,
			GroupBytes: c.GroupBytes, GroupDelayNS: c.GroupDelayNS,
			Format: c.Format, UUID: uuid.UUID(id[:16]), HashSeed: binary.LittleEndian.Uint64(id[16:]),
		}})
	o := e.drive.Stats()
	e.opening = [3]int64{time.Since(begun).Microseconds(), o.Requests[ssd.Read].Load(), o.Bytes[ssd.Read].Load()}
	if errors.Is(err, kvstore.ErrConfig) {
		err = fmt.Errorf("%w: %w", ErrConfig, err)
	}
	return err
}

// ignoreNotExist turns the error that a file to be removed does not exist into nil.
func ignoreNotExist(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// Name implements DB.
func (e *Embedded) Name() string { return e.name }

// MaxValueBytes implements DB.
func (e *Embedded) MaxValueBytes() int { return e.part.MaxValueBytes() }

// Buffer implements DB.
func (e *Embedded) Buffer(size int) ([]byte, func() error, error) {
	return make([]byte, size), func() error { return nil }, nil
}

// Close implements DB.
func (e *Embedded) Close() error {
	var errs []error
	if e.part != nil {
		errs = append(errs, e.part.Close(closeTimeout))
	}
	if e.drive != nil {
		errs = append(errs, e.drive.Close())
	}
	if e.dev != nil {
		errs = append(errs, e.dev.Close())
	}
	if e.pool != nil {
		errs = append(errs, e.pool.Close())
	}
	return errors.Join(errs...)
}

// Counters implements Counting.
func (e *Embedded) Counters() []Counter {
	s, o := e.part.Stats(), e.drive.Stats()
	return []Counter{
		{"DeviceReads", o.Requests[ssd.Read].Load(), false},
		{"DeviceWrites", o.Requests[ssd.Write].Load(), false},
		{"DeviceReadBytes", o.Bytes[ssd.Read].Load(), false},
		{"DeviceWriteBytes", o.Bytes[ssd.Write].Load(), false},
		{"UserBytes", s.UserBytes, false},
		{"Compactions", s.Compactions, false},
		{"Checkpoints", s.Checkpoints, false},
		{"Objects", s.Objects, true},
		{"Segments", s.Segments, true},
		{"LiveBytes", s.LiveBytes, true},
		{"BufferBytes", s.MemoryBytes, true},
		{"PartitionBytes", e.dev.Info().SizeBytes, true},
		{"OpeningUS", e.opening[0], true},
		{"OpeningReads", e.opening[1], true},
		{"OpeningReadBytes", e.opening[2], true},
	}
}

// OpenQueue implements DB.
func (e *Embedded) OpenQueue(_ context.Context, depth int) (Queue, error) {
	q := &embeddedQueue{part: e.part, reqs: make([]partition.Request, depth),
		done: make([]*partition.Request, 0, depth),
		kick: make(chan struct{}, 1), interrupted: make(chan struct{}), timer: time.NewTimer(time.Hour)}
	q.timer.Stop()
	for i := range q.reqs {
		q.reqs[i] = partition.Request{Sink: q, Slot: uint32(i), KeyLen: KeyBytes, Tenant: foreground}
	}
	return q, nil
}

// embeddedQueue is a partition in the engine's terms, and the sink of its Requests.
type embeddedQueue struct {
	part        *partition.Partition
	reqs        []partition.Request // by tag
	batch       partition.Batch
	kick        chan struct{}
	interrupted chan struct{}
	once        sync.Once
	timer       *time.Timer

	mu   sync.Mutex
	done []*partition.Request // guarded by mu
}

// KVDone implements partition.Sink.
func (q *embeddedQueue) KVDone(r *partition.Request) (kick bool) { // hot: 0 allocs
	q.mu.Lock()
	q.done = append(q.done, r)
	kick = len(q.done) == 1
	q.mu.Unlock()
	return kick
}

// Kick implements partition.Sink.
func (q *embeddedQueue) Kick() {
	select {
	case q.kick <- struct{}{}:
	default:
	}
}

func (q *embeddedQueue) Submit(ops []Op) (int, error) { // hot: 0 allocs
	for i := range ops {
		o := &ops[i]
		r := &q.reqs[o.Tag]
		r.Op = kvstore.Get
		if o.Put {
			r.Op = kvstore.Put
		}
		r.Key, r.Value = *o.Key, o.Value
		q.batch.Add(r)
	}
	q.part.Submit(&q.batch)
	return len(ops), nil
}

// errQueueInterrupted is returned by Poll after Interrupt.
var errQueueInterrupted = errors.New("interrupted")

func (q *embeddedQueue) Poll(dst []Done, wait time.Duration) (int, error) { // hot: 0 allocs
	if n := q.take(dst); n > 0 || wait == 0 {
		return n, nil
	}
	var late <-chan time.Time
	if wait > 0 {
		q.timer.Reset(wait)
		defer q.timer.Stop()
		late = q.timer.C
	}
	for {
		select {
		case <-q.kick:
			if n := q.take(dst); n > 0 {
				return n, nil
			}
		case <-late:
			return q.take(dst), nil
		case <-q.interrupted:
			return q.take(dst), errQueueInterrupted
		}
	}
}

// take writes the finished operations to dst.
func (q *embeddedQueue) take(dst []Done) int { // hot: 0 allocs
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(len(dst), len(q.done))
	for i, r := range q.done[:n] {
		d := Done{Tag: r.Slot}
		switch r.Status {
		case kvstore.OK:
			d.ValueLen = r.ValueLen
		case kvstore.NotFound:
			d.Result = NotFound
		case kvstore.CapacityExceeded:
			d.Result, d.Err = Refused, errCapacity
		case kvstore.InvalidKey, kvstore.InvalidValue:
			d.Result, d.Err = Refused, errInvalid
		case kvstore.Corrupt:
			d.Result, d.Err = Failed, errCorrupt
		default:
			d.Result, d.Err = Failed, errDevice
		}
		dst[i] = d
	}
	q.done = q.done[:copy(q.done, q.done[n:])]
	return n
}

var (
	errCapacity = errors.New("capacity exceeded")
	errInvalid  = errors.New("invalid key or value")
	errCorrupt  = errors.New("a checksum is wrong")
	errDevice   = errors.New("a device I/O failed")
)

func (q *embeddedQueue) Interrupt() { q.once.Do(func() { close(q.interrupted) }) }

func (q *embeddedQueue) Close() error { return nil }
