package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"jbofd/internal/bench"
	"jbofd/internal/bench/ycsb"
)

const workloads = "../../configs/ycsb/"

func TestBadKVFlagsExitWith2AndNameFlagValueAndAllowed(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	if err := os.WriteFile(state, make([]byte, 8192), 0o644); err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(t.TempDir(), "binary")
	if err := os.WriteFile(binary, make([]byte, 1<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	const mem = " --embedded mem:64m -p recordcount=10"
	for _, c := range []struct {
		args string
		want []string
	}{
		{"kv", []string{"recordcount", "missing", "-P FILE"}},
		{"kv load -p recordcount=10", []string{"--target", "--embedded"}},
		{"kv -p recordcount=many", []string{"recordcount", "many"}},
		{"kv -p recordcount", []string{"-p", "recordcount", "name=value"}},
		{"kv -P none", []string{"-P", "none"}},
		{"kv run -P " + workloads + "workloade" + mem,
			[]string{"scanproportion", "0.95", "ordered scans are not offered"}},
		{"kv load --embedded mem:x -p recordcount=10", []string{"mem:x", "suffix"}},
		{"kv load --depth 5000" + mem, []string{"--depth", "5000", "1024"}},
		{"kv load --rate_process x" + mem, []string{"--rate_process", "linear", "poisson"}},
		{"kv load --durability some" + mem, []string{"--durability", "some", "none"}},
		{"kv -x 7" + mem, []string{"'x' in -x", "see jbofbench kv --help"}},
		{"kv -load -threads 2000" + mem, []string{"threadcount", "2000", "1024"}},
		{"kv -t" + mem, []string{"operationcount"}},
		{"kv -threads 2000" + mem, []string{"threadcount", "2000", "1024"}},
		{"kv -target fast" + mem, []string{"--rate", "fast"}},
		{"kv load --state " + state + mem, []string{state, "not one"}},
		{"kv run" + mem, []string{"operationcount"}},
		{"kv" + mem, []string{"operationcount"}},
		{"kv -p insertproportion=0.5 -p insertcount=5 -p operationcount=5" + mem, []string{"insertcount", "5", "10"}},
		{"kv load --rate -1" + mem, []string{"target", "-1"}},
		{"kv load --threads 0" + mem, []string{"threadcount", "0"}},
		{"kv load -P " + binary + mem, []string{binary}},
		{"kv load --nsid 3" + mem, []string{"--nsid", "--target"}},
		{"kv load --format --target tcp://127.0.0.1:1 --nqn nqn.x -p recordcount=10",
			[]string{"--format", "--embedded"}},
		{"kv load --cluster 127.0.0.1:1 -p recordcount=10", []string{"--nqn"}},
		{"kv load --cluster 127.0.0.1:1 --nqn nqn.x --nsid 2 -p recordcount=10", []string{"--nsid", "--target"}},
		{"kv load --cluster 127.0.0.1:1 --nqn nqn.x --read_from head -p recordcount=10",
			[]string{"--read_from", "head", "any", "tail", "turn"}},
		{"kv load --hedge 1ms" + mem, []string{"--hedge", "--cluster"}},
		{"kv load --read_timeout 1s" + mem, []string{"--read_timeout", "--cluster"}},
		{"kv load --cluster 127.0.0.1:1 --nqn nqn.x --read_timeout -1s -p recordcount=10",
			[]string{"ReadTimeout", "-1s", "positive"}},
		{"kv load --cluster 127.0.0.1:1" + mem, []string{"--cluster", "--embedded"}},
		{"kv load --target 1.2.3.4 --nqn nqn.x -p recordcount=10", []string{"--target", "1.2.3.4"}},
		{"kv load --target tcp://127.0.0.1:1 -p recordcount=10", []string{"--nqn"}},
		{"kv sing", []string{"sing"}},
	} {
		status, stdout, stderr := command(t, strings.Fields(c.args)...)
		if status != 2 || stdout != "" {
			t.Errorf("%s: exit status %d, want 2 before anything was done: %s", c.args, status, stdout)
		}
		for _, w := range c.want {
			if !strings.Contains(stderr, w) {
				t.Errorf("%s: %q does not say %q", c.args, stderr, w)
			}
		}
	}
}

func TestAKVTargetOutOfReachExitsWith1(t *testing.T) {
	for _, args := range [][]string{
		{"kv", "load", "-p", "recordcount=10", "--target", "tcp://127.0.0.1:1", "--nqn", "nqn.x"},
		{"kv", "load", "-p", "recordcount=10", "--cluster", "127.0.0.1:1,127.0.0.1:2", "--nqn",
			"nqn.2026-11.example.jbofd:kv"},
		{"kv", "load", "-p", "recordcount=10", "--embedded", filepath.Join(t.TempDir(), "none")},
	} {
		if status, _, stderr := command(t, args...); status != 1 || stderr == "" {
			t.Errorf("%q: exit status %d, %q", args, status, stderr)
		}
	}
}

// TestAFileThatCannotBeFormattedIsRemoved, so that the next attempt finds no file. A file is made only if a size is
// given.
func TestAFileThatCannotBeFormattedIsRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ssd")
	load := []string{"kv", "load", "-q", "-p", "recordcount=10", "--embedded", path}
	if status, _, stderr := command(t, load...); status != 1 || !strings.Contains(stderr, "--size") {
		t.Errorf("no file: exit status %d, %s", status, stderr)
	}
	if status, _, stderr := command(t, append(load, "--size", "1m")...); status != 2 ||
		!strings.Contains(stderr, "1048576") {
		t.Errorf("a file that is too small: exit status %d, %s", status, stderr)
	}
	if status, _, stderr := command(t, append(load, "--size", "96m")...); status != 0 {
		t.Errorf("exit status %d, %s", status, stderr)
	}
}

// TestAnInterruptedBenchmarkSaysSo, after its results, and its exit status stops scripts.
func TestAnInterruptedBenchmarkSaysSo(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	var stdout, stderr bytes.Buffer
	// The status line is written during the run.
	status := execute(ctx, strings.Fields("kv load -s -p recordcount=1000000000 --embedded mem:256m -p fieldlength=10"),
		&stdout, writerFunc(func(b []byte) (int, error) {
			cancel()
			return stderr.Write(b)
		}))
	if status != exitInterrupted || !strings.Contains(stderr.String(), "interrupted after ") ||
		!strings.Contains(stdout.String(), "[INSERT], Operations, ") {
		t.Errorf("exit status %d, %s%s", status, stdout.String(), stderr.String())
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// TestProgressStaysOnOneLineOfATerminal, however narrow it is. Without a terminal, lines are complete.
func TestProgressStaysOnOneLineOfATerminal(t *testing.T) {
	p := ycsb.Progress{Phase: "run", Elapsed: 10 * time.Second, Ops: 5000, Total: 10000, OpsPerSec: 500,
		Series: []ycsb.Series{{Name: "READ", LatencyNS: &bench.LatencyNS{P99: 12345}}}}
	for _, columns := range []int{0, 1, 40, 300} {
		var out bytes.Buffer
		s := &screen{w: &out}
		if columns > 0 {
			s.columns = func() int { return columns }
		}
		show := showKV(s)
		show(p)
		p.Last = true
		show(p)
		p.Last = false
		if columns == 0 {
			if got := out.String(); strings.Count(got, "\n") != 2 ||
				!strings.Contains(got, "[###############...............]  50 % 5000 operations in 10 s, 0.5 k/s, 10s "+
					"left, read p99 12.3µs\n") {
				t.Errorf("no terminal: %q", got)
			}
			continue
		}
		lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\r")
		if len(lines) != 3 || strings.Contains(lines[1], "\n") {
			t.Fatalf("%d columns: %q", columns, lines)
		}
		for _, l := range lines[1:] {
			l, ok := strings.CutSuffix(l, "\x1b[K")
			if n := len([]rune(l)); !ok || n > columns-1 || columns == 40 && n < 39 {
				t.Errorf("%d columns: %q", columns, l)
			}
		}
	}
}

// TestKVLoadsRunsAndVerifies a store in a file, as by three processes.
func TestKVLoadsRunsAndVerifies(t *testing.T) {
	dir := t.TempDir()
	common := []string{"-P", workloads + "workloada", "-p", "recordcount=2000", "-p", "operationcount=5000", "-p",
		"insertproportion=0.1", "--embedded", filepath.Join(dir, "ssd"),
		"--state", filepath.Join(dir, "state"), "--depth", "16", "-q"}
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"load", "--size", "256m"}, []string{"[OVERALL], Phase, LOAD\n", "[INSERT], Operations, 2000\n"}},
		{[]string{"run"}, []string{"[OVERALL], Phase, RUN\n", "[READ], Return=OK, ",
			"[UPDATE], 99thPercentileLatency(us), ", "[VERIFY], Return=OK, "}},
		{[]string{"verify"}, []string{"[OVERALL], Phase, VERIFY\n", "[STORE], Objects, "}},
	} {
		status, stdout, stderr := command(t, append(append([]string{"kv"}, c.args...), common...)...)
		if status != 0 {
			t.Fatalf("%q: exit status %d, %s%s", c.args, status, stdout, stderr)
		}
		for _, w := range c.want {
			if !strings.Contains(stdout, w) {
				t.Errorf("%q: %q is not in\n%s", c.args, w, stdout)
			}
		}
	}
	// A new store in place of the old one counts as complete data loss.
	if status, stdout, _ := command(t, append([]string{"kv", "verify", "--format"}, common...)...); status != 1 ||
		!strings.Contains(stdout, "[VERIFY], Return=UNEXPECTED_STATE, ") {
		t.Errorf("verify of an empty store: exit status %d, %s", status, stdout)
	}
}

func TestKVJSONIsAReport(t *testing.T) {
	status, stdout, stderr := command(t,
		strings.Fields("kv -P "+workloads+"workloadf -p recordcount=500 -p operationcount=1000 --embedded mem:256m "+
			"--json --quiet -threads 2 -target 20000")...)
	var rep ycsb.Report
	if err := json.Unmarshal([]byte(stdout), &rep); status != 0 || err != nil || rep.Kind != "KVReport" || !rep.OK() ||
		rep.Load.Operations != 500 || rep.Run.Operations != 1000 || rep.Workload.TargetOpsPerSec != 20000 ||
		rep.Workload.Threads != 2 {
		t.Errorf("exit status %d, %v, %s%s", status, err, stdout, stderr)
	}
}

func TestKVStatusLinesHaveTheFormatOfYCSB(t *testing.T) {
	status, _, stderr := command(t, strings.Fields("kv load -s -p recordcount=500 --embedded mem:256m")...)
	if status != 0 || !strings.Contains(stderr, "500 operations; ") ||
		!strings.Contains(stderr, "[INSERT: Count=500, Max=") {
		t.Errorf("exit status %d, %s", status, stderr)
	}
}
