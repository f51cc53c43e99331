package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"jbofd/internal/bench"
	"jbofd/internal/testutil/loopback"
)

func command(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	status = execute(context.Background(), args, &out, &err)
	return status, out.String(), err.String()
}

func TestBadFlagsExitWith2AndNameFlagValueAndAllowed(t *testing.T) {
	for _, c := range []struct {
		args string
		want []string
	}{
		{"block", []string{"--target", "--raw"}},
		{"block --raw mem:1m --rw rd", []string{"--rw", "rd", "randread"}},
		{"block --raw mem:1m --bs 4z", []string{"--bs", "4z", "suffix"}},
		{"block --raw mem:1m --bs 6k", []string{"--bs", "6144", "4096"}},
		{"block --raw mem:x", []string{"--raw", "mem:x"}},
		{"block --raw mem:1m --verify md5", []string{"--verify", "md5", "crc32c"}},
		{"block --raw mem:1m --runtime soon", []string{"--runtime", "soon"}},
		{"block --raw mem:1m --rate_process x", []string{"--rate_process", "linear", "poisson"}},
		{"block --raw mem:1m --rate 1m --rate_iops 5", []string{"--rate", "--rate_iops"}},
		{"block --raw mem:1m --cpus_allowed 5-2", []string{"--cpus_allowed", "5-2"}},
		{"block --target 1.2.3.4 --nqn nqn.x", []string{"--target", "1.2.3.4", "tcp://HOST:PORT", "rdma://HOST:PORT"}},
		{"block --target fc://1.2.3.4:1 --nqn nqn.x",
			[]string{"--target", "fc://", "tcp://HOST:PORT", "rdma://HOST:PORT"}},
		{"block --target rdma://1.2.3.4:1 --nqn nqn.x --data_digest", []string{"--data_digest", "tcp://"}},
		{"block --target tcp://127.0.0.1:1", []string{"--nqn"}},
		{"block --target tcp://127.0.0.1:1 --nqn nqn.x --hostid 7", []string{"--hostid", "7"}},
		{"block --target tcp://127.0.0.1:1 --nqn nqn.x --iodepth 5000", []string{"--iodepth", "5000", "1024"}},
		{"block --target tcp://127.0.0.1:1 --nqn nqn.x --rw rd", []string{"--rw", "rd", "randread"}},
		{"block --no-such-flag", []string{"no_such_flag", "see jbofbench block --help"}},
		{"sing", []string{"sing"}},
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

func TestOutOfReachExitsWith1(t *testing.T) {
	for _, args := range [][]string{
		{"block", "--raw", filepath.Join(t.TempDir(), "none")},
		{"block", "--target", "tcp://127.0.0.1:1", "--nqn", "nqn.x"},
		{"discover", "--target", "tcp://127.0.0.1:1"},
	} {
		if status, _, stderr := command(t, args...); status != 1 || stderr == "" {
			t.Errorf("%q: exit status %d, %q", args, status, stderr)
		}
	}
}

func TestJSONIsAReport(t *testing.T) {
	status, stdout, stderr := command(t, "block", "--raw", "mem:1m", "--rw=randrw", "--verify", "crc32c", "--iodepth",
		"4", "--json", "--quiet")
	var rep bench.Report
	if err := json.Unmarshal([]byte(stdout), &rep); status != 0 || err != nil || rep.APIVersion != bench.APIVersion ||
		!rep.OK() {
		t.Errorf("exit status %d, %v, %s%s", status, err, stdout, stderr)
	}
}

func TestHyphensAndUnderscoresAreTheSame(t *testing.T) {
	if status, _, stderr := command(t, "block", "--raw=mem:1m", "--raw-block=512", "--rw", "write", "--bs=512",
		"--do-verify=false", "--verify", "crc32c", "--time-based", "-q"); status != 0 {
		t.Errorf("exit status %d, %s", status, stderr)
	}
}

// TestCtrlCIsReportedAsSuch: a report of an interrupted run looked like that of a complete one, with exit status 0.
func TestCtrlCIsReportedAsSuch(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out, errs bytes.Buffer
	status := execute(ctx, strings.Fields("block --raw mem:1m --rw randread --runtime 60 -q"), &out, &errs)
	if status != exitInterrupted || !strings.Contains(out.String(), "interrupted: the figures are of the ") ||
		!strings.HasSuffix(errs.String(), "jbofbench: interrupted\n") {
		t.Errorf("exit status %d\n%s\n%s", status, &out, &errs)
	}
	out.Reset()
	status = execute(ctx, strings.Fields("block --raw mem:1m --rw randread --runtime 60 -q --json"), &out, &errs)
	var rep bench.Report
	if err := json.Unmarshal(out.Bytes(), &rep); status != exitInterrupted || err != nil || !rep.Interrupted {
		t.Errorf("exit status %d, %v\n%s", status, err, &out)
	}
	errs.Reset()
	status = execute(ctx, strings.Fields("block --target tcp://127.0.0.1:1 --nqn nqn.x"), &out, &errs)
	if status != exitInterrupted || errs.String() != "jbofbench: interrupted\n" {
		t.Errorf("while it connects: exit status %d, %s", status, &errs)
	}
}

func TestVersionAndCompletionExist(t *testing.T) {
	if status, out, _ := command(t, "--version"); status != 0 || !strings.Contains(out, version) {
		t.Errorf("exit status %d, %s", status, out)
	}
	if status, out, _ := command(t, "--help"); status != 0 || !strings.Contains(out, "completion") {
		t.Errorf("exit status %d, %s", status, out)
	}
}

// TestUnitsAreInTheNames of sizes in JSON, so that programs need not guess.
func TestUnitsAreInTheNames(t *testing.T) {
	_, out, _ := command(t, "block", "--raw", "mem:1m", "--json", "-q")
	var rep struct {
		Target struct{ BlockSizeBytes int64 }
	}
	if err := json.Unmarshal([]byte(out), &rep); err != nil || rep.Target.BlockSizeBytes != 4096 {
		t.Errorf("%v: %+v", err, rep)
	}
}

// TestAConnectThatTakesLongIsExplained on standard error while it waits: a target holds a Connect, or answers it
// Controller Busy, while commands of the host's earlier association are under way.
func TestAConnectThatTakesLongIsExplained(t *testing.T) {
	silent := loopback.Listen(t)
	defer silent.Close()
	for _, line := range []string{"block --nqn nqn.x", "kv --nqn nqn.x -p recordcount=1 -p operationcount=1",
		"discover"} {
		t.Run(line, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			errs := &until{text: "still connecting", seen: cancel}
			args := append(strings.Fields(line), "--target", "tcp://"+silent.Addr().String())
			if status := execute(ctx, args, io.Discard, errs); status != exitInterrupted {
				t.Errorf("exit status %d", status)
			}
			if out := errs.b.String(); !strings.Contains(out, `msg="still connecting"`) ||
				!strings.Contains(out, `reason="no answer yet"`) {
				t.Errorf("standard error is %s", out)
			}
		})
	}
}

// until is a writer that calls seen when a text was written.
type until struct {
	mu   sync.Mutex
	b    bytes.Buffer
	text string
	seen func()
}

func (u *until) Write(p []byte) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.b.Write(p)
	if strings.Contains(u.b.String(), u.text) {
		u.seen()
	}
	return len(p), nil
}
