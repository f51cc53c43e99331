package publish

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/kvstore"
	"jbofd/internal/lab"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/partition"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// rig is a service with one drive, in virtual time.
type rig struct {
	t         *testing.T
	sim       *lab.Sim
	disk      *lab.Drive
	drive     *drive.Drive
	pool      *bufpool.Pool
	publisher *Publisher
	closed    error
	stopping  chan struct{}
}

const storeBytes = 25 * 128 << 10

func newRig(t *testing.T) *rig {
	r := &rig{t: t, sim: lab.NewSim(1), stopping: make(chan struct{})}
	r.disk = lab.NewDrive(lab.DriveConfig{SizeBytes: 2 * storeBytes, BlockSize: 512, Rand: rand.New(rand.NewPCG(1, 1)),
		Misuse: func(what string) { t.Error(what) }})
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	r.pool = pool
	r.drive, err = drive.New(drive.Config{Device: lab.NewDevice(r.sim, "ssd0", r.disk), Pool: pool, Env: r.sim})
	if err != nil {
		t.Fatal(err)
	}
	machine := nvmeof.New(nvmeof.Config{Limits: nvmeof.Limits{MDTSBytes: 64 << 10}})
	service := target.New(target.Config{Target: machine, SSDs: []*drive.Drive{r.drive}, Pool: pool, Env: r.sim})
	r.publisher = New(Config{Service: service, Stopping: r.stopping,
		Closed: func(_ *Store, err error) { r.closed = err }})
	return r
}

func (r *rig) open(format bool) (*Store, error) { return r.openAt(0, uuid.UUID{7}, format) }

func (r *rig) openAt(offset units.DriveOffset, id uuid.UUID, format bool) (*Store, error) {
	if err := r.publisher.Vacate(r.drive, nil); err != nil {
		return nil, err
	}
	p, err := partition.Open(partition.Config{Drive: r.drive, OffsetBytes: offset, Background: target.Background,
		Store: kvstore.Config{PartitionBytes: storeBytes, ChunkBytes: 128 << 10, Format: format, UUID: id}})
	if err != nil {
		return nil, err
	}
	return NewStore(p, id, "nqn.2026-11.example:publish", 1), nil
}

// TestStoresThatAreClosedTogetherShareTheRateOfTheirDrive: a checkpoint may take twice as long if two are written at
// the same time. CheckpointTime is that of both.
func TestStoresThatAreClosedTogetherShareTheRateOfTheirDrive(t *testing.T) {
	for _, stores := range []int{1, 2} {
		r := newRig(t)
		bytes := int64(0)
		for i := range stores {
			id := uuid.UUID{7, byte(i)}
			s, err := r.openAt(units.DriveOffset(i*storeBytes), id, true)
			if err != nil {
				t.Fatal(err)
			}
			r.publisher.open[id] = s
			bytes = s.LastCheckpointBytes()
		}
		alone := time.Duration(bytes * int64(time.Second) / partition.MinCheckpointRate)
		got, want := r.publisher.CheckpointTime(), time.Duration(stores)*alone
		if got < want || got > want+time.Microsecond {
			t.Errorf("%d stores: CheckpointTime is %v, want %v", stores, got, want)
		}
		// The pages of one store's checkpoint take longer than a store that is alone may take for them.
		patience := 2 * alone
		r.disk.Hold = func(q *ssd.Request) int64 {
			if q.Op == ssd.Write && q.Len > 4096 {
				return int64(patience+alone*3/2) * q.Len / bytes
			}
			return 0
		}
		r.publisher.CloseAll(patience)
		if closed := r.closed == nil; closed != (stores > 1) {
			t.Errorf("%d stores: closed in time %v: %v", stores, closed, r.closed)
		}
		r.disk.Hold = nil
		r.sim.Run(r.sim.Now()+int64(time.Minute), func() bool { return len(r.disk.Flights) == 0 })
	}
}

// TestAStoreIsNotReadWhileItsFormerSelfWrites: a store whose drive is slow is given up when its namespace is removed.
// When the namespace comes back, the store is not read before the drive has done the old writes, and does not open if
// that takes too long.
func TestAStoreIsNotReadWhileItsFormerSelfWrites(t *testing.T) {
	r := newRig(t)
	s, err := r.open(true)
	if err != nil {
		t.Fatal(err)
	}
	r.disk.Hold = func(q *ssd.Request) int64 {
		if q.Op == ssd.Read {
			return 0
		}
		return int64(15 * time.Second)
	}
	s.Checkpoint()
	r.publisher.Close(s, time.Second)
	if r.closed == nil || len(r.disk.Flights) == 0 {
		t.Fatalf("the close ends with %v, %d requests at the drive", r.closed, len(r.disk.Flights))
	}
	r.disk.Hold = nil
	r.disk.Observe = func(q *ssd.Request) {
		if slices.ContainsFunc(r.disk.Flights, func(f lab.Flight) bool { return f.Op == ssd.Write }) {
			t.Errorf("%v at %d while a write of the former store is at the drive", q.Op, q.Offset)
		}
	}
	if _, err := r.open(false); !errors.Is(err, target.ErrInFlight) {
		t.Fatalf("while the drive takes 15 s for a write: %v, want %v", err, target.ErrInFlight)
	}
	if s, err = r.open(false); err != nil {
		t.Fatal(err)
	}
	r.disk.Observe = nil
	r.publisher.Close(s, time.Second)
	if r.closed != nil {
		t.Error(r.closed)
	}
}

// TestTheStoreOfAVanishedDriveIsClosedAtOnce: there is nothing to wait for, and its memory comes back.
func TestTheStoreOfAVanishedDriveIsClosedAtOnce(t *testing.T) {
	for _, when := range []string{"before", "while closing"} {
		r := newRig(t)
		before := r.pool.Stats().ArenaBytes
		s, err := r.open(true)
		if err != nil {
			t.Fatal(err)
		}
		if when == "before" {
			r.disk.Vanish()
		} else {
			r.disk.Hold = func(*ssd.Request) int64 { return int64(2 * time.Second) }
			r.sim.After(int64(time.Second), func() {
				r.disk.Hold = nil
				r.disk.Vanish()
			})
		}
		began := r.sim.Now()
		r.publisher.Close(s, closeTimeout)
		if took := time.Duration(r.sim.Now() - began); !errors.Is(r.closed, ssd.ErrGone) || took > 3*time.Second {
			t.Errorf("vanished %s: the close takes %v and ends with %v", when, took, r.closed)
		}
		if n := r.pool.Stats().ArenaBytes; n != before || len(r.disk.Flights) > 0 {
			t.Errorf("vanished %s: %d bytes of arenas, %d before the store; %d requests at the drive", when, n, before,
				len(r.disk.Flights))
		}
		if err := r.publisher.Vacate(r.drive, nil); err != nil {
			t.Errorf("vanished %s: %v", when, err)
		}
	}
}

// TestAStopOfTheNodeEndsTheWaitForAStore: a store whose drive is slow is given the time of a last checkpoint.
func TestAStopOfTheNodeEndsTheWaitForAStore(t *testing.T) {
	r := newRig(t)
	s, err := r.open(true)
	if err != nil {
		t.Fatal(err)
	}
	r.disk.Hold = func(*ssd.Request) int64 { return int64(15 * time.Second) }
	r.sim.After(int64(time.Second), func() { close(r.stopping) })
	began := r.sim.Now()
	r.publisher.Close(s, closeTimeout)
	if took := time.Duration(r.sim.Now() - began); r.closed == nil || took > 1600*time.Millisecond {
		t.Errorf("a close that is told to stop after 1 s takes %v and ends with %v", took, r.closed)
	}
}

// TestADriveIsDrainedOnceForAStoreThatWasGivenUp: Erase has waited for what the store had at the drive. What hosts send
// afterwards does not keep a new store from its extent, however slow the drive is.
func TestADriveIsDrainedOnceForAStoreThatWasGivenUp(t *testing.T) {
	r := newRig(t)
	s, err := r.open(true)
	if err != nil {
		t.Fatal(err)
	}
	r.disk.Hold = func(*ssd.Request) int64 { return int64(5 * time.Second) }
	r.publisher.Close(s, time.Second)
	r.disk.Hold = nil
	if err := r.publisher.Erase(r.drive, 0, storeBytes, nil, nil); r.closed == nil || err != nil {
		t.Fatalf("the close ends with %v, the erasure with %v", r.closed, err)
	}
	r.disk.Hold = func(*ssd.Request) int64 { return int64(30 * time.Second) }
	io := &drive.IO{Op: pipeline.Flush}
	sink := make(waitSink, 1)
	io.Init(sink, 0)
	var b drive.Batch
	b.Add(io)
	r.drive.Submit(&b)
	if err := r.publisher.Vacate(r.drive, nil); err != nil {
		t.Error(err)
	}
	r.sim.Wait(sink, -1)
}

// TestErasedIsZeroAndDrained: Erase zeroes a range after the commands that the drive has.
func TestErasedIsZeroAndDrained(t *testing.T) {
	r := newRig(t)
	r.disk.Store(4096, []byte("what a host has written"))
	var told []units.Bytes
	progress := func(done units.Bytes) { told = append(told, done) }
	if err := r.publisher.Erase(r.drive, 4096, 8192, progress, nil); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(told, []units.Bytes{8192}) {
		t.Errorf("told of %d bytes, want 8192", told)
	}
	for i, b := range r.disk.Durable[4096:][:8192] {
		if b != 0 {
			t.Fatalf("byte %d is %#x", i, b)
		}
	}
	stop := make(chan struct{})
	close(stop)
	if err := r.publisher.Erase(r.drive, 4096, 8192, nil, stop); !errors.Is(err, target.ErrStopped) {
		t.Errorf("after the stop: %v, want %v", err, target.ErrStopped)
	}
}

// TestNothingWaitsForADriveThatHangsWhileItIsErased: it ends when the node is to stop, and after a minute. What the
// drive has then keeps it from being erased again. A slow drive is waited for.
func TestNothingWaitsForADriveThatHangsWhileItIsErased(t *testing.T) {
	const hour = int64(time.Hour)
	for _, c := range []struct {
		name  string
		op    ssd.Op
		takes int64
		stop  bool
		wants error
		most  time.Duration
	}{
		{"zeroes", ssd.WriteZeroes, hour, false, ErrUnanswered, time.Minute + time.Second},
		{"the flush", ssd.Flush, hour, false, ErrUnanswered, time.Minute + time.Second},
		{"zeroes and a stop", ssd.WriteZeroes, hour, true, target.ErrStopped, time.Second / 2},
		{"the flush and a stop", ssd.Flush, hour, true, target.ErrStopped, time.Second / 2},
		{"slow zeroes", ssd.WriteZeroes, 50e9, false, nil, time.Hour},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, stop := newRig(t), make(chan struct{})
			r.disk.Hold = func(q *ssd.Request) int64 {
				if q.Op != c.op {
					return 0
				}
				if c.stop {
					r.sim.After(1e6, func() { close(stop) })
				}
				return c.takes
			}
			began := r.sim.Now()
			err := r.publisher.Erase(r.drive, 0, storeBytes, nil, stop)
			took := time.Duration(r.sim.Now() - began)
			if !errors.Is(err, c.wants) || took > c.most {
				t.Errorf("%v after %v", err, took)
			}
			if r.disk.Hold = nil; c.wants != nil {
				if err := r.publisher.Erase(r.drive, 0, storeBytes, nil, nil); !errors.Is(err, target.ErrInFlight) {
					t.Errorf("erased again: %v", err)
				}
			}
			r.sim.Run(r.sim.Now()+2*hour, func() bool { return len(r.disk.Flights) == 0 })
			if err := r.publisher.Erase(r.drive, 0, storeBytes, nil, nil); err != nil {
				t.Errorf("the drive has answered: %v", err)
			}
		})
	}
}
