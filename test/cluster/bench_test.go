package cluster

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"jbofd/internal/bench/ycsb"
	"jbofd/internal/buildtags"
)

// benchmark is jbofbench kv for a cluster, with a file that knows what was acknowledged.
type benchmark struct {
	all   boxes
	state string
}

const benchRecords = 3000

// benchLoad is a run: some seconds, in the first of which a node is lost, at a rate that leaves other tests some time.
var benchLoad = []string{"-p", "maxexecutiontime=3", "-p", "operationcount=1000000", "--rate", "3000"}

// start starts a phase. Its progress is to be read from stderr.
func (b *benchmark) start(phase string, args []string) (cmd *exec.Cmd, stdout *bytes.Buffer, stderr io.Reader) {
	t := b.all[0].t
	t.Helper()
	var nodes []string
	for _, n := range b.all {
		nodes = append(nodes, n.host+":4420")
	}
	args = append([]string{"kv", phase, "-P", "../../configs/ycsb/workloadb", "-p",
		fmt.Sprint("recordcount=", benchRecords), "-p", "fieldlength=20", "--depth", "8", "--threads", "2",
		"--cluster", strings.Join(nodes, ","), "--nqn", subNQN, "--state", b.state, "-s"}, args...)
	cmd, stdout = exec.Command(tool(t, "jbofbench"), args...), &bytes.Buffer{}
	cmd.Stdout = stdout
	stderr, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	return cmd, stdout, stderr
}

// run runs a phase, and kills a node, unless it is nil, when the first line of its status says that it is on its way.
func (b *benchmark) run(phase string, victim *box, args ...string) (status int, stdout, stderr string) {
	t := b.all[0].t
	t.Helper()
	cmd, out, lines := b.start(phase, args)
	var all strings.Builder
	for s := bufio.NewScanner(lines); s.Scan(); {
		fmt.Fprintln(&all, s.Text())
		if victim != nil && strings.Contains(s.Text(), " operations; ") {
			victim.kill()
			victim = nil
		}
	}
	err := cmd.Wait()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), all.String()
}

// counts are the numbers of a report in YCSB's text: those that begin with Return= by series and result.
func counts(t *testing.T, text string) (operations, results map[string]uint64) {
	t.Helper()
	operations, results = map[string]uint64{}, map[string]uint64{}
	line := regexp.MustCompile(`(?m)^\[([A-Z]+)\], (Operations|Return=\w+), (\d+)$`)
	for _, m := range line.FindAllStringSubmatch(text, -1) {
		n, err := strconv.ParseUint(m[3], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		if m[2] == "Operations" {
			operations[m[1]] = n
		} else {
			results[m[1]+" "+strings.TrimPrefix(m[2], "Return=")] = n
		}
	}
	return operations, results
}

// leader returns the node that is the ChainHead of most ranges. One that came late may be that of none.
func (all boxes) leader() *box {
	t := all[0].t
	t.Helper()
	chains, err := all[0].admin.Chains(t.Context(), -1)
	if err != nil {
		t.Fatal(err)
	}
	leads := map[string]int{}
	for _, c := range chains.Items {
		leads[c.Members[0].Node]++
	}
	return slices.MaxFunc(all, func(a, b *box) int { return cmp.Compare(leads[a.name], leads[b.name]) })
}

// TestTheBenchmarkOfAClusterCountsWhatFails: a node is killed under each of two runs. The first one repeats what it
// has under way until the others have taken over, and nothing fails. The second one has the patience of a tenth of a
// lease and goes on after errors: what has failed is counted, by how it ended, and its exit status says so. Its
// numbers add up, and whatever was acknowledged is there.
func TestTheBenchmarkOfAClusterCountsWhatFails(t *testing.T) {
	if buildtags.Race {
		t.Skip("the benchmark is a process of its own")
	}
	t.Parallel()
	all := newBoxes(t, 3, 3)
	b := &benchmark{all: all, state: filepath.Join(t.TempDir(), "state")}
	status, stdout, stderr := b.run("load", nil)
	ops, results := counts(t, stdout)
	if status != 0 || ops["INSERT"] != benchRecords || results["INSERT OK"] != benchRecords {
		t.Fatalf("load: exit status %d, %v, %v\n%s%s", status, ops, results, stdout, stderr)
	}

	victim := all.leader()
	status, stdout, stderr = b.run("run", victim, benchLoad...)
	ops, results = counts(t, stdout)
	if status != 0 || ops["READ"] == 0 || ops["UPDATE"] == 0 || ops["READ"] != results["READ OK"] ||
		ops["UPDATE"] != results["UPDATE OK"] || strings.Contains(stderr, "failed") {
		t.Errorf("a run with patience: exit status %d, %v, %v\n%s%s", status, ops, results, stdout, stderr)
	}
	if !regexp.MustCompile(`(?m)^\[STORE\], Retries, [1-9]`).MatchString(stdout) {
		t.Errorf("a node was lost, and nothing was repeated:\n%s", stdout)
	}
	victim.start()
	all.full()

	victim = all.leader()
	status, stdout, stderr = b.run("run", victim, append(slices.Clip(benchLoad), "--op_timeout", "100ms",
		"--continue_on_error", "--json")...)
	var report ycsb.Report
	if err := json.Unmarshal([]byte(stdout), &report); err != nil || report.Run == nil {
		t.Fatalf("exit status %d, %v\n%s%s", status, err, stdout, stderr)
	}
	sum, failed, done := uint64(0), uint64(0), uint64(0)
	for _, s := range report.Run.Series {
		for result, n := range s.Results {
			sum += n
			switch result {
			case "OK":
				done += n
			case "SERVICE_UNAVAILABLE", "ERROR":
				failed += n
			default:
				t.Errorf("%d of %s ended as %s", n, s.Name, result)
			}
		}
	}
	t.Logf("%d operations, %d failed: %v", sum, failed, report.Run.Messages)
	p := report.Run
	if status != 1 || sum != p.Operations || failed == 0 || failed != p.Failed || p.Wrong != 0 || done < 10*failed ||
		uint64(p.Store["Unavailable"]+p.Store["Indeterminate"]) != failed || len(p.Messages) == 0 ||
		!strings.Contains(stderr, fmt.Sprintf("%d failed operations, 0 verification", failed)) {
		t.Errorf("a run without patience: exit status %d, %d operations, %d failed\n%s%s", status, sum, failed, stdout,
			stderr)
	}
	victim.start()
	all.full()

	status, stdout, stderr = b.run("verify", nil)
	if status != 0 || !strings.Contains(stdout, fmt.Sprintf("[VERIFY], Return=OK, %d\n", benchRecords)) {
		t.Errorf("verify: exit status %d\n%s%s", status, stdout, stderr)
	}
}
