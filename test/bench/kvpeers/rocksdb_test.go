package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
)

// builtRocksDB builds the engine's program once, in a folder that TestMain removes.
var builtRocksDB = sync.OnceValues(func() (string, error) { return buildRocksDB(context.Background(), programFolder) })

var programFolder string

// rocksdbProgram builds the engine's program, or skips the test and says what is missing.
func rocksdbProgram(t *testing.T) string {
	program, err := builtRocksDB()
	if errors.Is(err, errNoRocksDB) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// loadVector is what rocksdb/vector.cc prints, made with this load: each phase's first objects and the first of its
// second run.
func loadVector() string {
	var out strings.Builder
	for _, valueBytes := range []int{24, 29, 40} {
		for _, phase := range []string{"load", "get", "put"} {
			c := &crowd{cfg: &Config{Objects: loadRun + 3, ValueBytes: valueBytes, Workers: 2, Seed: 7},
				put: phase != "get", loading: phase == "load"}
			for number := range 2 {
				w := c.worker(number)
				o := op{value: make([]byte, valueBytes)}
				for n := 0; n <= loadRun && w.begin(&o); n++ {
					if n >= 2 && n < loadRun-1 {
						continue
					}
					fmt.Fprintf(&out, "%s %d %d %x", phase, number, o.index, o.key)
					if o.put {
						fmt.Fprintf(&out, " %x", o.value)
					}
					out.WriteByte('\n')
				}
			}
		}
	}
	return out.String()
}

// TestLoadIsThatOfTheVector: objects, keys, versions and values are those of testdata/load.txt, which the port in C++
// is compared with as well.
func TestLoadIsThatOfTheVector(t *testing.T) {
	want, err := os.ReadFile("testdata/load.txt")
	if err != nil {
		t.Fatal(err)
	}
	compareLines(t, loadVector(), string(want))
}

// TestLoadInCXXIsThatOfTheVector: the engine in C++ gets the same load.
func TestLoadInCXXIsThatOfTheVector(t *testing.T) {
	program, err := buildCXX(t.Context(), t.TempDir(), "vector")
	if errors.Is(err, errNoRocksDB) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	got, err := exec.CommandContext(t.Context(), program).Output()
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/load.txt")
	if err != nil {
		t.Fatal(err)
	}
	compareLines(t, string(got), string(want))
}

func compareLines(t *testing.T, got, want string) {
	t.Helper()
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			t.Fatalf("line %d:\n%s\nwant\n%s", i+1, g[i], w[i])
		}
	}
	if len(g) != len(w) {
		t.Fatalf("%d lines, want %d", len(g), len(w))
	}
}

// TestRocksDBLoadsWhatGoChecks: what the port has loaded and put is what checkValue wants, its GETs find what was put
// from here, and an error for what is not a value of the load.
func TestRocksDBLoadsWhatGoChecks(t *testing.T) {
	cfg := small(t, "rocksdb")
	cfg.Objects = 300
	cfg.Program = rocksdbProgram(t)
	e, err := openRocksDB(&cfg, true)
	if err != nil {
		t.Fatal(err)
	}
	s := e.session()
	check := func(when string) (newest uint64) {
		scratch := make([]byte, cfg.ValueBytes)
		for index := range cfg.Objects {
			o := op{index: index, value: make([]byte, cfg.ValueBytes)}
			putKey(&o.key, index)
			if s.do(&o); o.err != nil {
				t.Fatalf("%s: object %d: %v", when, index, o.err)
			}
			v, err := checkValue(o.value, scratch, index)
			if err != nil {
				t.Fatalf("%s: %v", when, err)
			}
			newest = max(newest, v)
		}
		return newest
	}
	work := func(c *crowd) Phase {
		p, err := c.work(t.Context(), e)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	if p := work(&crowd{cfg: &cfg, put: true, loading: true}); p.Operations != cfg.Objects {
		t.Errorf("%d objects loaded, want %d", p.Operations, cfg.Objects)
	}
	if v := check("loaded"); v != 0 {
		t.Errorf("version %d is loaded, want 0", v)
	}
	p := work(&crowd{cfg: &cfg, put: true})
	// Each worker may hold a run of versions that it has not used up.
	most := p.Operations + int64(cfg.Workers)*loadRun
	if v := check("put"); v == 0 || int64(v) > most || p.CPUSeconds <= 0 || p.P99US < p.P50US || p.P50US <= 0 {
		t.Errorf("version %d after %+v", v, p)
	}
	o := op{put: true, value: make([]byte, cfg.ValueBytes)}
	for o.index = range cfg.Objects {
		putKey(&o.key, o.index)
		putValue(o.value, o.index, 1<<40)
		if s.do(&o); o.err != nil {
			t.Fatal(o.err)
		}
	}
	get := &crowd{cfg: &cfg}
	if p := work(get); p.Operations == 0 || get.checked.Load() != p.Operations {
		t.Errorf("%d values checked of %+v", get.checked.Load(), p)
	}
	o.value[cfg.ValueBytes-1] ^= 1
	for o.index = range cfg.Objects {
		putKey(&o.key, o.index)
		s.do(&o)
	}
	if _, err := get.work(t.Context(), e); err == nil || !strings.Contains(err.Error(), "is not what was put") {
		t.Errorf("wrong values are read: %v", err)
	}
	if err := e.close(); err != nil {
		t.Fatal(err)
	}
}

// TestWithoutRocksDB: without a compiler, the engines that are not asked for by name are left out, and RocksDB by name
// is an error; both say what to install.
func TestWithoutRocksDB(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	var log strings.Builder
	var cfg Config
	names, err := cfg.build(t.Context(), nil, &log)
	if err != nil || len(names) != len(engines)-2 || !strings.Contains(log.String(), "apt-get install g++") {
		t.Errorf("%v, %v, %s", names, err, log.String())
	}
	if _, err := cfg.build(t.Context(), []string{"rocksdb"}, &log); !errors.Is(err, errNoRocksDB) {
		t.Errorf("RocksDB without a compiler: %v", err)
	}
}
