package main

import "time"

// op is one GET or PUT.
type op struct {
	put bool
	key [keyBytes]byte
	// value is what to PUT; of a GET room for the value, and then the value.
	value []byte
	err   error

	begun time.Time
	index int64 // of the object
	slot  int   // in a queue
}

// engine is an open store.
type engine interface {
	// session is for one goroutine.
	session() session
	// settled says whether all work that was put off is done.
	settled() bool
	// ready is called before the GETs.
	ready()
	close() error
}

// session does one operation at a time and returns when it is done: with a PUT, when it is durable.
type session interface {
	do(o *op)
}

// queue has many operations outstanding.
type queue interface {
	// submit begins with these operations.
	submit(ops []*op)
	// wait returns some that are done.
	wait() []*op
}

// outside is an engine in a process of its own, Config.process, which runs the load of whole phases itself.
type outside interface {
	engine
	phase(c *crowd) error
}

// engines open or create a store in cfg.Dir. Without durable, PUTs need not be durable before close: that is
// for loading.
var engines = map[string]func(cfg *Config, durable bool) (engine, error){
	"jbofd":            openJBOFD,
	"jbofd-batched":    openJBOFD,
	"pebble":           openPebble,
	"badger":           openBadger,
	"rocksdb":          openRocksDB,
	"rocksdb-buffered": openRocksDB,
}
