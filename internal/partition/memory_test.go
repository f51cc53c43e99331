package partition

import (
	"errors"
	"strings"
	"testing"

	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/kvstore"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/mem"
)

// TestOpeningBeyondTheMemoryIsAnErrorThatNamesWhatIsMissing, and keeps no memory and does not write to the drive.
func TestOpeningBeyondTheMemoryIsAnErrorThatNamesWhatIsMissing(t *testing.T) {
	for _, arenaBytes := range []int64{bufpool.ArenaRegionBytes, 4 << 20, 8 << 20} {
		pool, err := bufpool.New(bufpool.Config{TotalBytes: 16 << 20, ArenaBytes: arenaBytes})
		if err != nil {
			t.Fatal(err)
		}
		dev, err := mem.Open(mem.Config{Name: "ssd0", SizeBytes: partitionBytes + 2*offset})
		if err != nil {
			t.Fatal(err)
		}
		d, err := drive.New(drive.Config{Device: dev, Pool: pool})
		if err != nil {
			t.Fatal(err)
		}
		r := &rig{t: t, pool: pool, dev: dev, o: d, size: partitionBytes}
		_, err = r.open(true)
		if !errors.Is(err, kvstore.ErrNoMemory) || !errors.Is(err, bufpool.ErrNoMemory) ||
			!strings.Contains(err.Error(), "bytes for kv store at 1048576 of ssd0") {
			t.Errorf("with %d bytes: %v", arenaBytes, err)
		}
		if n := d.Stats().Requests[ssd.Write].Load(); n != 0 {
			t.Errorf("with %d bytes: %d writes", arenaBytes, n)
		}
		if s := pool.Stats(); s.ArenaBytes != 0 {
			t.Errorf("with %d bytes: %d are taken", arenaBytes, s.ArenaBytes)
		}
		if err := errors.Join(d.Close(), dev.Close()); err != nil {
			t.Error(err)
		}
		pool.CloseTest(t)
	}
}

// TestThePoolAccountsForAPartition: its account is named after its drive and offset, and its I/O buffers are in memory
// that devices register.
func TestThePoolAccountsForAPartition(t *testing.T) {
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	p := r.mustOpen(true)
	taken := p.Stats().MemoryBytes
	accounts := map[string]int64{}
	for _, a := range r.pool.AppendAccounts(nil) {
		accounts[a.Name] = a.InUseBytes
	}
	if taken == 0 || accounts["kv store at 1048576 of ssd0"] != taken || r.pool.Stats().ArenaBytes != taken {
		t.Errorf("the partition has %d bytes, the accounts are %v, all arenas %d", taken, accounts,
			r.pool.Stats().ArenaBytes)
	}
	b, err := p.memory.Alloc(8192)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, ok := r.pool.RegionOf(b); !ok {
		t.Error("a buffer of the partition is in no region of the pool")
	}
	r.close(p)
	if n := r.pool.Stats().ArenaBytes; n != 0 {
		t.Errorf("%d bytes after Close", n)
	}
}
