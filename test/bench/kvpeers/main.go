// Command kvpeers measures jbofd's key-value store against Pebble, Badger and RocksDB: the same load from as many
// goroutines, on the same file system, one engine after the other, each in a process of its own.
//
//	kvpeers ──> child: jbofd   ──> load ─> reopen ─> settle ─> GET ─> PUT ─> settle ─> check ──> JSON ──┐
//	        ──> child: pebble  ──> …                                                                     ├──> table
//	        ──> child: badger  ──> …                                                                     │
//	        ──> child          ──> …                                                                   ──┘
//	              └─> rocksdb, which contains a port of the load
//
// After the check, the PUTs go on until the process is killed, and another child measures how the store is opened then.
//
// It is a module of its own, so that what is measured against stays out of jbofd's go.mod.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// childFlag makes a process the child of another: it reads its Config from stdin.
const childFlag = "--child"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if len(os.Args) == 2 && os.Args[1] == childFlag {
		err = child(ctx, os.Stdin, os.Stdout)
	} else {
		err = parent(ctx, os.Args[1:], os.Stdout, os.Stderr)
	}
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "kvpeers: %v\n", err)
		os.Exit(1)
	}
}

// parent runs one child for each engine and prints what they found.
func parent(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	cfg, names, asJSON, err := parse(args, stderr)
	if err != nil {
		return err
	}
	if names, err = cfg.build(ctx, names, stderr); err != nil {
		return err
	}
	if cfg.Program != "" {
		defer func() { err = errors.Join(err, os.RemoveAll(filepath.Dir(cfg.Program))) }()
	}
	var results []Result
	var failed error
	for _, name := range names {
		if !asJSON {
			fmt.Fprintf(stderr, "%s %s: %d objects, %d B values …\n", time.Now().Format(time.TimeOnly), name,
				cfg.Objects, cfg.ValueBytes)
		}
		r, err := runChild(ctx, cfg, name, stderr)
		if err != nil {
			failed = fmt.Errorf("%s: %w", name, err)
			break // and say what is known of the others
		}
		results = append(results, r)
	}
	if asJSON {
		e := json.NewEncoder(stdout)
		e.SetIndent("", "  ")
		return errors.Join(failed, e.Encode(struct {
			Config  Config
			Results []Result
		}{cfg, results}))
	}
	return errors.Join(failed, table(stdout, cfg, results))
}

// engineNames are all engines, in the order of the table.
const engineNames = "jbofd,jbofd-batched,pebble,badger,rocksdb,rocksdb-buffered"

// build builds RocksDB's program if it is wanted, and returns the engines to measure. Without names they are all that
// can be built.
func (c *Config) build(ctx context.Context, names []string, stderr io.Writer) ([]string, error) {
	all := len(names) == 0
	if all {
		names = strings.Split(engineNames, ",")
	}
	if !slices.ContainsFunc(names, isRocksDB) {
		return names, nil
	}
	dir, err := os.MkdirTemp("", "kvpeers-program-")
	if err != nil {
		return nil, err
	}
	if c.Program, err = buildRocksDB(ctx, dir); err == nil {
		return names, nil
	}
	if all && errors.Is(err, errNoRocksDB) {
		fmt.Fprintf(stderr, "kvpeers: without rocksdb: %v\n", err)
		names, err = slices.DeleteFunc(names, isRocksDB), nil
	}
	return names, errors.Join(err, os.RemoveAll(dir))
}

// parse reads the command line. No names: those that can be built.
func parse(args []string, stderr io.Writer) (cfg Config, names []string, asJSON bool, err error) {
	f := flag.NewFlagSet("kvpeers", flag.ContinueOnError)
	f.SetOutput(stderr)
	list := f.String("engines", "", "which ones of "+engineNames+", in this order; all that can be built by default")
	f.StringVar(&cfg.Dir, "dir", ".", "a directory of the file system to measure on; a folder is made in it for each "+
		"engine, and removed")
	f.Int64Var(&cfg.Objects, "objects", 3_000_000, "how many objects to load")
	f.IntVar(&cfg.ValueBytes, "value", 256, "their length in bytes, at least 24")
	f.IntVar(&cfg.Workers, "workers", 64, "goroutines with one blocking operation each; operations outstanding for "+
		"jbofd-batched")
	f.DurationVar(&cfg.PhaseTime, "time", 20*time.Second, "how long to measure GETs, and PUTs")
	f.DurationVar(&cfg.SettleTime, "settle", time.Minute, "how long to wait at most for work that was put off, after "+
		"loading and after the PUTs")
	memory := f.Int64("memory-mib", 0, "what a peer's caches and memtables may take; 0: a fortieth of the data")
	cache := f.Int64("page-cache-mib", 0, "how much page cache the engine's files may have; 0: a fortieth of the "+
		"data, so that with its own memory it is a twentieth; -1: no limit")
	f.Float64Var(&cfg.Fill, "fill", 0.6, "user bytes by the size of jbofd's partition")
	f.Uint64Var(&cfg.Seed, "seed", 1, "of the choice of keys")
	f.StringVar(&cfg.Profile, "profile", "", "write CPU profiles of the GETs and the PUTs to this directory; "+
		"not of rocksdb")
	f.BoolVar(&asJSON, "json", false, "print JSON and not a table")
	if err := f.Parse(args); err != nil {
		return cfg, nil, false, err
	}
	if *list != "" {
		names = strings.Split(*list, ",")
	}
	for _, n := range names {
		if _, ok := engines[n]; !ok {
			return cfg, nil, false, fmt.Errorf("--engines: there is no %q, want some of %s", n, engineNames)
		}
	}
	if f.NArg() > 0 || cfg.Objects < 1 || cfg.ValueBytes < minValueBytes || cfg.ValueBytes > 1<<20 || cfg.Workers < 1 ||
		cfg.Fill <= 0 || cfg.Fill > 0.95 {
		return cfg, nil, false, fmt.Errorf("want --objects and --workers of at least 1, --value from %d to 1048576, "+
			"--fill up to 0.95, and no arguments", minValueBytes)
	}
	cfg.MemoryBytes, cfg.PageCacheBytes = *memory<<20, *cache<<20
	if cfg.MemoryBytes == 0 {
		cfg.MemoryBytes = cfg.dataBytes() / 40
	}
	if cfg.PageCacheBytes == 0 {
		cfg.PageCacheBytes = cfg.dataBytes() / 40
	}
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return cfg, nil, false, err
	}
	if cfg.Profile != "" {
		if cfg.Profile, err = filepath.Abs(cfg.Profile); err != nil {
			return cfg, nil, false, err
		}
	}
	return cfg, names, asJSON, nil
}

// runChild measures one engine in processes of its own, on a folder of its own.
func runChild(ctx context.Context, cfg Config, name string, stderr io.Writer) (r Result, err error) {
	dir, err := os.MkdirTemp(cfg.Dir, "kvpeers-"+name+"-")
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	cfg.Engine, cfg.Dir, cfg.Kill = name, dir, true
	if err := spawn(ctx, cfg, &r, stderr); err != nil {
		return r, err
	}
	for n := range kills {
		cfg.Recover, cfg.Kill = true, n+1 < kills
		var once Recovery
		if err := spawn(ctx, cfg, &once, stderr); err != nil {
			return r, fmt.Errorf("after kill %d: %w", n+1, err)
		}
		r.Recoveries = append(r.Recoveries, once)
	}
	return r, nil
}

// spawn runs a child and decodes its report. A child that is to be killed must have been.
func spawn(ctx context.Context, cfg Config, report any, stderr io.Writer) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	in, err := json.Marshal(cfg)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, self, childFlag)
	cmd.Stdin = strings.NewReader(string(in))
	cmd.Stderr = stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if cfg.Kill {
		if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
			return errors.Join(err, fmt.Errorf("the child was not killed: %v", cmd.ProcessState))
		}
	} else if err != nil {
		return err
	}
	return json.Unmarshal(out, report)
}

// child measures the engine that in asks for.
func child(ctx context.Context, in io.Reader, out io.Writer) (err error) {
	var cfg Config
	if err := json.NewDecoder(in).Decode(&cfg); err != nil {
		return err
	}
	report := func(r any) error { return json.NewEncoder(out).Encode(r) }
	if isRocksDB(cfg.Engine) {
		p, err := startRocksDB(ctx, &cfg)
		if err != nil {
			return err
		}
		cfg.process = p
		defer func() { err = errors.Join(err, p.stop()) }()
	}
	if cfg.Recover {
		return recovered(ctx, cfg, report)
	}
	return run(ctx, cfg, report)
}
