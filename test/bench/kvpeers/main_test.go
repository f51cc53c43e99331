package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestMain lets the test binary be the child that parent starts.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == childFlag {
		if err := child(context.Background(), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	var err error
	if programFolder, err = os.MkdirTemp("", "kvpeers-test-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if err := os.RemoveAll(programFolder); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func small(t *testing.T, engine string) Config {
	return Config{Engine: engine, Dir: t.TempDir(), Objects: 3000, ValueBytes: 256, Workers: 8,
		PhaseTime:  100 * time.Millisecond,
		SettleTime: 10 * time.Second, MemoryBytes: 8 << 20, PageCacheBytes: 1 << 20, Fill: 0.6, Seed: 1}
}

// TestEngineReturnsLastValue: whatever was put last is read, by any session, and after a stop; and a key that was not
// put is an error.
func TestEngineReturnsLastValue(t *testing.T) {
	for name, open := range engines {
		t.Run(name, func(t *testing.T) {
			cfg := small(t, name)
			if isRocksDB(name) {
				cfg.Program = rocksdbProgram(t)
			}
			e, err := open(&cfg, true)
			if err != nil {
				t.Fatal(err)
			}
			const objects, rounds = 500, 3
			var all sync.WaitGroup
			for w := range 4 {
				s := e.session()
				all.Go(func() {
					o := op{put: true, value: make([]byte, cfg.ValueBytes)}
					for version := range uint64(rounds) {
						for o.index = int64(w); o.index < objects; o.index += 4 {
							putKey(&o.key, o.index)
							putValue(o.value, o.index, version)
							if s.do(&o); o.err != nil {
								t.Errorf("put of %d: %v", o.index, o.err)
								return
							}
						}
					}
				})
			}
			all.Wait()
			check := func() {
				s := e.session()
				scratch := make([]byte, cfg.ValueBytes)
				for index := range int64(objects + 1) {
					o := op{index: index, value: make([]byte, cfg.ValueBytes)}
					putKey(&o.key, index)
					s.do(&o)
					if index == objects {
						if o.err == nil {
							t.Error("a key that was not put is found")
						}
						continue
					}
					if o.err != nil {
						t.Fatalf("get of %d: %v", index, o.err)
					}
					if v, err := checkValue(o.value, scratch, index); err != nil || v != rounds-1 {
						t.Fatalf("object %d: version %d (%v), want %d", index, v, err, rounds-1)
					}
				}
			}
			check()
			if err := e.close(); err != nil {
				t.Fatal(err)
			}
			if e, err = open(&cfg, true); err != nil {
				t.Fatal(err)
			}
			check()
			if err := e.close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestCheckValueFindsWhatWasNotPut(t *testing.T) {
	for _, n := range []int{minValueBytes, 29, 256} {
		b, scratch := make([]byte, n), make([]byte, n)
		putValue(b, 7, 3)
		if v, err := checkValue(b, scratch, 7); err != nil || v != 3 {
			t.Fatalf("%d bytes: version %d, %v", n, v, err)
		}
		if _, err := checkValue(b, scratch, 8); err == nil {
			t.Errorf("%d bytes: another object's value is taken", n)
		}
		for bit := range n * 8 {
			b[bit/8] ^= 1 << (bit % 8)
			if _, err := checkValue(b, scratch, 7); err == nil {
				t.Errorf("%d bytes: the flip of bit %d is not found", n, bit)
			}
			b[bit/8] ^= 1 << (bit % 8)
		}
		if _, err := checkValue(b[:n-1], scratch, 7); err == nil {
			t.Errorf("%d bytes: a short value is taken", n)
		}
	}
}

// TestParentMeasuresEveryEngine: the whole way, through child processes to JSON and to a table.
func TestParentMeasuresEveryEngine(t *testing.T) {
	args := []string{"--dir", t.TempDir(), "--objects", "3000", "--workers", "8", "--time", "100ms", "--settle", "10s",
		"--memory-mib", "8", "--page-cache-mib", "1"}
	var out, log bytes.Buffer
	if err := parent(t.Context(), append(args, "--json"), &out, &log); err != nil {
		t.Fatalf("%v\n%s", err, log.Bytes())
	}
	var got struct {
		Config  Config
		Results []Result
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	var want, names []string
	for name := range engines {
		if !isRocksDB(name) || !strings.Contains(log.String(), errNoRocksDB.Error()) {
			want = append(want, name)
		}
	}
	for _, r := range got.Results {
		names = append(names, r.Engine)
	}
	slices.Sort(want)
	slices.Sort(names)
	if !slices.Equal(names, want) {
		t.Fatalf("results of %v, want %v\n%s", names, want, log.Bytes())
	}
	for _, r := range got.Results {
		if r.Load.Operations != 3000 {
			t.Errorf("%s: %d objects loaded, want 3000", r.Engine, r.Load.Operations)
		}
		if r.Get.Operations == 0 || r.Put.Operations == 0 || r.Get.P50US <= 0 || r.Put.P99US < r.Put.P50US ||
			r.Checked < r.Get.Operations {
			t.Errorf("%s: implausible: %+v", r.Engine, r)
		}
		if len(r.Recoveries) != kills {
			t.Errorf("%s: recovered %d times, want %d", r.Engine, len(r.Recoveries), kills)
		}
		for _, n := range r.Recoveries {
			if n.OpenMS <= 0 || n.Checked == 0 {
				t.Errorf("%s: implausible: %+v", r.Engine, n)
			}
		}
		if r.RSSPeakBytes == 0 || r.DiskBytes < 3000*272 {
			t.Errorf("%s: RSS %d, disk %d", r.Engine, r.RSSPeakBytes, r.DiskBytes)
		}
	}
	var lines bytes.Buffer
	if err := table(&lines, got.Config, got.Results); err != nil {
		t.Fatal(err)
	}
	for _, name := range want {
		if !strings.Contains(lines.String(), name) {
			t.Errorf("the table does not name %s:\n%s", name, lines.Bytes())
		}
	}
	if left, err := os.ReadDir(args[1]); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

func TestParseRefuses(t *testing.T) {
	for _, args := range [][]string{{"--engines", "leveldb"}, {"--value", "23"}, {"--objects", "0"}, {"--workers", "0"},
		{"--fill", "1"}, {"more"}} {
		if _, _, _, err := parse(args, &bytes.Buffer{}); err == nil {
			t.Errorf("%v is taken", args)
		}
	}
}
