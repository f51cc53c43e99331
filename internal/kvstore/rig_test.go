package kvstore_test

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

var longFlag = kvstore.LongFlag

// seeds returns the seed of a test that needs only one.
func seeds(t *testing.T) uint64 {
	t.Helper()
	return kvstore.FixedSeed(t)
}

// every returns n, or 1 in a long run (-long).
func every(n int) int {
	if *longFlag {
		return 1
	}
	return n
}

// times returns n, or a multiple of it in a long run (-long).
func times(n int) int {
	if *longFlag {
		return 20 * n
	}
	return n
}

// toDrive converts a store's I/O to a request for the drive.
func toDrive(q *kvstore.IO) ssd.Request {
	r := ssd.Request{Op: ssd.Op(q.Op), Offset: int64(q.Offset), Len: int64(len(q.Buf)), Buf: q.Buf, Tag: uint64(q.Tag)}
	if q.FUA {
		r.Flags = ssd.FUA
	}
	return r
}

// rig drives a Store on a simulated drive in virtual time.
type rig struct {
	t     testing.TB
	rng   *rand.Rand
	dev   *lab.Drive
	ios   map[uint64]kvstore.IO // by tag: the I/Os in flight and the last one of each tag
	cfg   kvstore.Config
	s     *kvstore.Store
	now   int64
	act   kvstore.Actions
	reply func(kvstore.Reply)
	// crashIn is the number of further writes after which the process dies; 0: never. power: the drive loses power,
	// too.
	crashIn        int
	power, crashed bool
	damage         []kvstore.Damage
	// sweep is how many chunks a checkpoint goes through in one turn; 0: all that there are in a test.
	sweep int
	// memory is what the store gets, unless the configuration says otherwise.
	memory *memory
}

// memory gives a store the memory of the one before it. It belongs to a rig and its copies, of which one at a time has
// a store, for they share the SegTbl, too.
type memory struct {
	used [][]byte
	free map[int][][]byte // by length
}

func (m *memory) alloc(n int) ([]byte, error) {
	var b []byte
	if all := m.free[n]; len(all) > 0 {
		b, m.free[n] = all[len(all)-1], all[:len(all)-1]
		clear(b)
	} else {
		b = make([]byte, n)
	}
	m.used = append(m.used, b)
	return b, nil
}

// takeBack takes all memory back.
func (m *memory) takeBack() {
	for _, b := range m.used {
		m.free[len(b)] = append(m.free[len(b)], b)
	}
	m.used = m.used[:0]
}

// newRig formats a partition.
func newRig(t testing.TB, seed uint64, cfg kvstore.Config) *rig {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 7))
	r := &rig{t: t, rng: rng, cfg: cfg, ios: map[uint64]kvstore.IO{}, memory: &memory{free: map[int][][]byte{}}}
	r.dev = lab.NewDrive(lab.DriveConfig{
		SizeBytes: cfg.PartitionBytes, BlockSize: cfg.BlockSize, Volatile: cfg.FUA || cfg.Volatile, Rand: rng,
		Misuse: func(what string) { t.Fatal(what) },
	})
	r.dev.SlowOneIn = 40
	if seed%3 == 2 {
		r.sweep = 1 + int(seed/3%8)
	}
	for i := int64(0); i < cfg.PartitionBytes/2; i += 8 {
		binary.LittleEndian.PutUint64(r.dev.Durable[i:], rng.Uint64())
	}
	copy(r.dev.Visible, r.dev.Durable)
	if seed%3 == 0 {
		r.cfg.ListChunks()
	}
	if seed%5 < 3 {
		r.cfg.Eager()
	}
	if cfg.SegTbl == nil {
		r.cfg.SegTbl = make([]byte, 5*20000)
	}
	r.cfg.Format, r.cfg.UUID, r.cfg.HashSeed = true, [16]byte{byte(seed), 2, 3}, seed*77
	if err := r.open(); err != nil {
		t.Fatal(err)
	}
	r.cfg.Format = false
	return r
}

// open makes a Store and waits until it is open or has failed to open, or the process dies.
func (r *rig) open() error {
	r.t.Helper()
	cfg := r.cfg
	if cfg.Alloc == nil {
		r.memory.takeBack()
		cfg.Alloc = r.memory.alloc
	}
	s, err := kvstore.New(cfg)
	if err != nil {
		return err
	}
	r.s, r.crashed, r.damage = s, false, nil
	r.act = kvstore.Actions{}
	for !s.Ready() && !r.crashed {
		if !r.step() && !s.Ready() && !r.crashed {
			if s.Err() == nil {
				r.t.Fatalf("the store neither opens nor refuses: %s", s.State())
			}
			return s.Err()
		}
	}
	return nil
}

// wall is the time of day, in unix seconds.
func (r *rig) wall() uint32 { return 1e9 + uint32(r.now/1e9) }

// turn lets the store act, once.
func (r *rig) turn() {
	if r.sweep > 0 {
		r.s.Sweep(r.sweep)
	}
	r.s.SetWall(r.wall())
	r.s.Turn(r.now, &r.act)
	for _, q := range r.act.IOs {
		r.ios[uint64(q.Tag)] = q
		r.dev.Submit(r.now, toDrive(&q))
	}
	r.act.IOs = r.act.IOs[:0]
	for _, p := range r.act.Replies {
		r.reply(p)
	}
	r.act.Replies = r.act.Replies[:0]
	r.damage = append(r.damage, r.act.Damage...)
	r.act.Damage = r.act.Damage[:0]
}

// step lets the store act, and then completes an I/O or advances the time. It returns false if there is nothing to wait
// for, or the process has died.
func (r *rig) step() bool {
	r.turn()
	i := r.dev.Next()
	if wake := r.act.WakeNS; wake != 0 && (i < 0 || wake < r.dev.Flights[i].DueNS) {
		r.now = max(r.now+1, wake)
		return true
	}
	if i < 0 {
		return false
	}
	f := &r.dev.Flights[i]
	r.now = max(r.now, f.DueNS)
	if r.crashIn > 0 && f.Op == ssd.Write {
		if r.crashIn--; r.crashIn == 0 {
			r.crash()
			return false
		}
	}
	q, err := r.dev.End(i)
	r.s.Complete(uint32(q.Tag), err)
	return true
}

func (r *rig) crash() {
	r.crashed, r.crashIn = true, 0
	if r.power {
		r.dev.PowerLoss()
	} else {
		r.dev.Kill()
	}
}

// settle steps until nothing is left to do.
func (r *rig) settle() {
	r.t.Helper()
	for n := 0; !r.crashed && (n == 0 || !r.s.Idle()); n++ {
		if !r.step() && !r.crashed && !r.s.Idle() {
			r.t.Fatalf("the store neither acts nor is idle: %+v", r.s.Stats())
		}
		if n > 1e6 {
			r.t.Fatalf("the store does not come to rest: %+v", r.s.Stats())
		}
	}
}

// stop stops the store.
func (r *rig) stop() {
	r.t.Helper()
	r.s.Stop()
	for n := 0; !r.crashed && !r.s.Stopped(); n++ {
		if !r.step() && !r.crashed && !r.s.Stopped() || n > 1e6 {
			r.t.Fatalf("the store does not stop: %+v", r.s.Stats())
		}
	}
}
