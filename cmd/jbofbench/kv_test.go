package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"jbofd/internal/bench/ycsb"
)

const workloads = "../../configs/ycsb/"

func TestBadKVFlagsExitWith2AndNameFlagValueAndAllowed(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	if err := os.WriteFile(state, make([]byte, 8192), 0o644); err != nil {
		t.Fatal(err)
	}
	const mem = " --embedded mem:64m -p recordcount=10"
	for _, c := range []struct {
		args string
		want []string
	}{
		{"kv", []string{"recordcount", "missing"}},
		{"kv -p recordcount=10", []string{"--target", "--embedded"}},
		{"kv -p recordcount=many", []string{"recordcount", "many"}},
		{"kv -p recordcount", []string{"-p", "recordcount", "name=value"}},
		{"kv -P none", []string{"-P", "none"}},
		{"kv run -P " + workloads + "workloade" + mem, []string{"scanproportion", "0.95", "ordered scans are not offered"}},
		{"kv --embedded mem:x -p recordcount=10", []string{"mem:x", "suffix"}},
		{"kv --depth 5000" + mem, []string{"--depth", "5000", "1024"}},
		{"kv --rate_process x" + mem, []string{"--rate_process", "linear", "poisson"}},
		{"kv --durability some" + mem, []string{"--durability", "some", "none"}},
		{"kv -threads 2000" + mem, []string{"threadcount", "2000", "1024"}},
		{"kv -target fast" + mem, []string{"--rate", "fast"}},
		{"kv run --state " + state + mem, []string{state, "not one"}},
		{"kv run" + mem, []string{"operationcount"}},
		{"kv load --target 1.2.3.4 --nqn nqn.x -p recordcount=10", []string{"--target", "1.2.3.4"}},
		{"kv load --target tcp://127.0.0.1:1 -p recordcount=10", []string{"--nqn"}},
		{"kv sing", []string{"sing"}},
	} {
		status, _, stderr := command(t, strings.Fields(c.args)...)
		if status != 2 {
			t.Errorf("%s: exit status %d, want 2", c.args, status)
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
		{"kv", "load", "-p", "recordcount=10", "--embedded", filepath.Join(t.TempDir(), "none")},
	} {
		if status, _, stderr := command(t, args...); status != 1 || stderr == "" {
			t.Errorf("%q: exit status %d, %q", args, status, stderr)
		}
	}
}

// TestKVLoadsRunsAndVerifies a store in a file, by three processes as it were.
func TestKVLoadsRunsAndVerifies(t *testing.T) {
	dir := t.TempDir()
	common := []string{"-P", workloads + "workloada", "-p", "recordcount=2000", "-p", "operationcount=5000", "-p", "insertproportion=0.1", "--embedded", filepath.Join(dir, "ssd"),
		"--state", filepath.Join(dir, "state"), "--depth", "16", "-q"}
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"load", "--size", "256m"}, []string{"[OVERALL], Phase, LOAD\n", "[INSERT], Operations, 2000\n"}},
		{[]string{"run"}, []string{"[OVERALL], Phase, RUN\n", "[READ], Return=OK, ", "[UPDATE], 99thPercentileLatency(us), ", "[VERIFY], Return=OK, "}},
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
	// A new store in place of the old one has lost everything.
	if status, stdout, _ := command(t, append([]string{"kv", "verify", "--format"}, common...)...); status != 1 || !strings.Contains(stdout, "[VERIFY], Return=UNEXPECTED_STATE, ") {
		t.Errorf("verify of an empty store: exit status %d, %s", status, stdout)
	}
}

func TestKVJSONIsAReport(t *testing.T) {
	status, stdout, stderr := command(t, strings.Fields("kv -P "+workloads+"workloadf -p recordcount=500 -p operationcount=1000 --embedded mem:256m --json --quiet -threads 2 -target 20000")...)
	var rep ycsb.Report
	if err := json.Unmarshal([]byte(stdout), &rep); status != 0 || err != nil || rep.Kind != "KVReport" || !rep.OK() || rep.Load.Operations != 500 || rep.Run.Operations != 1000 || rep.Workload.TargetOpsPerSec != 20000 || rep.Workload.Threads != 2 {
		t.Errorf("exit status %d, %v, %s%s", status, err, stdout, stderr)
	}
}

func TestKVStatusLinesAreYCSBs(t *testing.T) {
	status, _, stderr := command(t, strings.Fields("kv load -s -p recordcount=500 --embedded mem:256m")...)
	if status != 0 || !strings.Contains(stderr, "500 operations; ") || !strings.Contains(stderr, "[INSERT: Count=500, Max=") {
		t.Errorf("exit status %d, %s", status, stderr)
	}
}
