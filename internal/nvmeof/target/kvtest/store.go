// Package kvtest helps to test namespaces of keys and values: a Store in memory that stands in for a
// partition, and what every transport must do with one.
package kvtest

import (
	"bytes"
	"slices"
	"sync"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/partition"
)

// Store is a kv.Partition in memory. Its methods may be called from any goroutine.
type Store struct {
	mu     sync.Mutex
	values map[string][]byte
	// about are what is known of values besides, gone are tombstones, and done are the identities of Requests that have
	// succeeded. version is the latest that was given.
	about   map[string]*object
	gone    map[string]object
	done    map[kvstore.Identity]uint64
	version uint64
	// held: Requests wait in waiting for Release.
	held     bool
	waiting  []*partition.Request
	batches  int
	requests int
	fail     func(*partition.Request) kvstore.Status
	credit   int
}

// NewStore makes an empty one.
func NewStore() *Store {
	return &Store{values: map[string][]byte{}, about: map[string]*object{}, gone: map[string]object{},
		done: map[kvstore.Identity]uint64{}}
}

// object is the version of an object or tombstone and when it expires.
type object struct {
	version uint64
	expires uint32
}

// Now is the time of a Store in seconds since 1970. It does not pass, so that nothing expires.
const Now = 1_800_000_000

// Submit implements kv.Partition. Nothing can be aborted: a Store has started everything that it has.
func (s *Store) Submit(b *partition.Batch) {
	s.mu.Lock()
	first := b.Take()
	s.batches++
	for r := first; r != nil; r = r.Next {
		s.requests++
	}
	if s.held {
		for r := first; r != nil; r = r.Next {
			s.waiting = append(s.waiting, r)
		}
		s.mu.Unlock()
		return
	}
	var sinks [16]partition.Sink
	kicks := sinks[:0]
	for r := first; r != nil; {
		next := r.Next
		kicks = s.execute(r, kicks)
		r = next
	}
	s.mu.Unlock()
	kick(kicks)
}

func kick(sinks []partition.Sink) {
	for _, k := range sinks {
		k.Kick()
	}
}

// execute does r and adds its sink to kicks if that must be kicked. mu is held.
func (s *Store) execute(r *partition.Request, kicks []partition.Sink) []partition.Sink {
	r.CreditUnits, r.ValueLen = s.credit, 0
	r.Status = s.do(r)
	if sink := r.Sink; sink.KVDone(r) {
		kicks = append(kicks, sink)
	}
	return kicks
}

func (s *Store) do(r *partition.Request) kvstore.Status {
	if s.fail != nil {
		if st := s.fail(r); st != kvstore.OK {
			return st
		}
	}
	if r.Op.IsRange() {
		return s.doRange(r)
	}
	old, there := s.values[string(r.Key[:r.KeyLen])]
	switch r.Op {
	case kvstore.List:
		r.ValueLen = s.list(r)
		return kvstore.OK
	case kvstore.Put, kvstore.Delete:
		return s.change(r)
	}
	if !there {
		r.ObjectVersion, r.ObjectExpires = 0, 0
		return kvstore.NotFound
	}
	o := s.objectOf(r)
	r.ObjectVersion, r.ObjectExpires = o.version, o.expires
	switch r.Op {
	case kvstore.Get:
		r.ValueLen = len(old)
		if r.Room != nil && len(r.Value) < len(old) {
			r.Room(len(old))
		}
		copy(r.Value, old)
	}
	return kvstore.OK
}

// change does a Put or Delete.
func (s *Store) change(r *partition.Request) kvstore.Status {
	id := kvstore.Identity{Client: r.ID.Client, Seq: r.ID.Seq}
	if v, ok := s.done[id]; ok && r.ID.Retry {
		r.ObjectVersion = v
		return kvstore.OK
	}
	old, there := s.values[string(r.Key[:r.KeyLen])]
	o := s.objectOf(r)
	if st := s.mayChange(r, there, o); st != kvstore.OK {
		r.ObjectVersion = o.version
		return st
	}
	s.version++
	o = object{s.version, r.Expires}
	if r.Condition == kvstore.IfNewer {
		o.version, s.version = r.Version, max(s.version-1, r.Version)
	}
	if r.ExpiresIn {
		o.expires += Now
	}
	r.ObjectVersion = o.version
	switch {
	case r.Op == kvstore.Delete:
		delete(s.values, string(r.Key[:r.KeyLen]))
		delete(s.about, string(r.Key[:r.KeyLen]))
		if r.Tombstone {
			s.gone[string(r.Key[:r.KeyLen])] = o
		}
	case there && len(old) == len(r.Value):
		copy(old, r.Value)
		*s.about[string(r.Key[:r.KeyLen])] = o
	default:
		key := string(r.Key[:r.KeyLen])
		about := o // only this one is on the heap
		s.values[key], s.about[key] = bytes.Clone(r.Value), &about
		delete(s.gone, key)
	}
	if id.Client != 0 {
		s.done[id] = o.version
	}
	return kvstore.OK
}

// objectOf returns what is known of the Request's key; zero if it does not exist.
func (s *Store) objectOf(r *partition.Request) object {
	if o := s.about[string(r.Key[:r.KeyLen])]; o != nil {
		return *o
	}
	return object{}
}

// mayChange judges the condition of a Put or Delete.
func (s *Store) mayChange(r *partition.Request, there bool, o object) kvstore.Status {
	switch {
	case r.Condition == kvstore.IfVersion && r.Version != o.version:
		return kvstore.VersionMismatch
	case r.Condition == kvstore.IfNewer && r.Version <= max(o.version, s.gone[string(r.Key[:r.KeyLen])].version):
		return kvstore.Superseded
	case r.Condition == kvstore.IfAbsent && there:
		return kvstore.Exists
	case r.Condition == kvstore.IfPresent && !there, r.Op == kvstore.Delete && !there &&
		(r.Condition != kvstore.IfNewer || !r.Tombstone):
		return kvstore.NotFound
	}
	return kvstore.OK
}

// list fills a list of the keys from r's on, in the order of their bytes.
func (s *Store) list(r *partition.Request) int {
	l := nvme.NewKVList(r.Value)
	for _, k := range s.keys() {
		if k < string(r.Key[:r.KeyLen]) {
			continue
		}
		var ok bool
		if l, ok = l.Append([]byte(k)); !ok {
			break
		}
	}
	return len(l)
}

func (s *Store) keys() []string {
	keys := make([]string, 0, len(s.values))
	for k := range s.values {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// Hold lets Requests wait until Release.
func (s *Store) Hold() {
	s.mu.Lock()
	s.held = true
	s.mu.Unlock()
}

// Release does what waits and holds nothing more.
func (s *Store) Release() {
	s.mu.Lock()
	var kicks []partition.Sink
	for _, r := range s.waiting {
		kicks = s.execute(r, kicks)
	}
	s.held, s.waiting = false, nil
	s.mu.Unlock()
	kick(kicks)
}

// Waiting is how many Requests wait for Release.
func (s *Store) Waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.waiting)
}

// Counts are the batches and the Requests that have come.
func (s *Store) Counts() (batches, requests int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.batches, s.requests
}

// Fail makes Requests end with what f returns, unless that is OK; nil: none fails.
func (s *Store) Fail(f func(*partition.Request) kvstore.Status) {
	s.mu.Lock()
	s.fail = f
	s.mu.Unlock()
}

// GiveCredit sets the credit that completions carry.
func (s *Store) GiveCredit(units int) {
	s.mu.Lock()
	s.credit = units
	s.mu.Unlock()
}

// Value returns what is stored.
func (s *Store) Value(key string) (value []byte, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.values[key]
	return bytes.Clone(v), ok
}

// Set stores a value.
func (s *Store) Set(key string, value []byte) {
	s.mu.Lock()
	s.version++
	s.values[key], s.about[key] = bytes.Clone(value), &object{version: s.version}
	s.mu.Unlock()
}

// Tombstone returns the version of a key's tombstone and when it expires; ok is false if there is none.
func (s *Store) Tombstone(key string) (version uint64, expires uint32, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o, ok := s.gone[key]
	return o.version, o.expires, ok
}
