package main

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
)

// pebbleStore is Pebble with bloom filters and without compression, which the values do not allow.
type pebbleStore struct {
	db    *pebble.DB
	write *pebble.WriteOptions
}

// quiet drops what an engine says of its doings.
type quiet struct{}

func (quiet) Infof(string, ...any)    {}
func (quiet) Errorf(string, ...any)   {}
func (quiet) Warningf(string, ...any) {}
func (quiet) Debugf(string, ...any)   {}
func (quiet) Fatalf(f string, a ...any) { // it must not return
	panic("pebble: " + fmt.Sprintf(f, a...))
}

func openPebble(cfg *Config, durable bool) (engine, error) {
	// Two memtables of an eighth each, the rest is block cache.
	memtable := min(max(cfg.MemoryBytes/8, 1<<20), 64<<20)
	o := &pebble.Options{
		Logger:                      quiet{},
		FormatMajorVersion:          pebble.FormatNewest,
		CacheSize:                   max(cfg.MemoryBytes-2*memtable, 1<<20),
		MemTableSize:                uint64(memtable),
		MemTableStopWritesThreshold: 2,
		CompactionConcurrencyRange:  func() (int, int) { return 1, 2 },
	}
	for i := range o.Levels {
		o.Levels[i].FilterPolicy = bloom.FilterPolicy(10)
	}
	o.ApplyCompressionSettings(func() pebble.DBCompressionSettings { return pebble.DBCompressionNone })
	db, err := pebble.Open(cfg.Dir, o)
	if err != nil {
		return nil, err
	}
	s := &pebbleStore{db, pebble.NoSync}
	if durable {
		s.write = pebble.Sync
	}
	return s, nil
}

func (s *pebbleStore) session() session { return s }

func (s *pebbleStore) do(o *op) {
	if o.put {
		o.err = s.db.Set(o.key[:], o.value, s.write)
		return
	}
	v, closer, err := s.db.Get(o.key[:])
	if o.err = err; err == nil {
		o.value = o.value[:copy(o.value, v)]
		o.err = closer.Close()
	}
}

func (s *pebbleStore) settled() bool {
	m := s.db.Metrics()
	return m.Compact.NumInProgress == 0 && m.Flush.NumInProgress == 0
}

func (s *pebbleStore) ready() {}

func (s *pebbleStore) close() error { return errors.Join(s.db.Flush(), s.db.Close()) }
