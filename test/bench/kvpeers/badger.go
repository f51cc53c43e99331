package main

import (
	"math"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"
	"golang.org/x/sys/unix"
)

// badgerStore is Badger without compression, which the values do not allow, and so without a block cache: it
// reads its tables by mmap.
type badgerStore struct {
	db  *badger.DB
	dir string
}

func openBadger(cfg *Config, durable bool) (engine, error) {
	// Two memtables of an eighth each, the rest is for indices and bloom filters.
	memtable := min(max(cfg.MemoryBytes/8, 1<<20), 64<<20)
	memtable = max(memtable, int64(cfg.ValueBytes)*10) // a transaction has to fit into 15 % of it
	db, err := badger.Open(badger.DefaultOptions(cfg.Dir).
		WithLogger(quiet{}).
		WithSyncWrites(durable).
		WithDetectConflicts(false).
		WithCompression(options.None).
		WithBlockCacheSize(0).
		WithIndexCacheSize(max(cfg.MemoryBytes-2*memtable, 1<<20)).
		WithNumMemtables(2).
		WithMemTableSize(memtable).
		WithValueThreshold(min(1<<20, memtable*15/100)).
		WithNumCompactors(2).
		WithMetricsEnabled(false).
		WithValueLogFileSize(256 << 20))
	if err != nil {
		return nil, err
	}
	return &badgerStore{db, cfg.Dir}, nil
}

// ready tells the kernel that the mapped tables will be read at random places. Badger does not, and then reads as much
// for each value as the drive's read-ahead says, which may be megabytes.
func (s *badgerStore) ready() { adviseMappings(s.dir, unix.MADV_RANDOM) }

func (s *badgerStore) session() session { return s }

func (s *badgerStore) do(o *op) {
	if o.put {
		// Badger keeps what it is given until it is written; Update returns after that.
		o.err = s.db.Update(func(t *badger.Txn) error { return t.Set(o.key[:], o.value) })
		return
	}
	o.err = s.db.View(func(t *badger.Txn) error {
		item, err := t.Get(o.key[:])
		if err != nil {
			return err
		}
		return item.Value(func(v []byte) error {
			o.value = o.value[:copy(o.value, v)]
			return nil
		})
	})
}

func (s *badgerStore) settled() bool {
	score := 0.0
	for _, l := range s.db.Levels() {
		score = math.Max(score, l.Score)
	}
	return score < 1
}

func (s *badgerStore) close() error { return s.db.Close() }
