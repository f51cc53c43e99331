package demo

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"jbofd/internal/buildtags"
	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/loopback"
)

// TestAClusterLosesANodeAndNothingElse runs the whole demonstration, shortened.
func TestAClusterLosesANodeAndNothingElse(t *testing.T) {
	if buildtags.Race {
		t.Skip("its daemons are not built with the race detector; those of test/cluster are")
	}
	dir, err := os.MkdirTemp("", "demo") // a short path, because it contains unix sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	var out bytes.Buffer
	cfg := ClusterConfig{Daemon: etcdproc.Binary(t), Dir: dir, Runtime: time.Second, Environ: os.Environ(), Out: &out}
	for i := range cfg.Hosts {
		cfg.Hosts[i], _, _ = net.SplitHostPort(loopback.Address())
	}
	if err := RunCluster(t.Context(), cfg); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, want := range []string{`kill -9 of n2`, `\d+ reads/s +\d+ writes/s`, `all copies are there again after`,
		`(?m)^acknowledged writes lost +0 of 4096 keys$`, `(?m)^stale reads +0$`, `PASS: nothing`,
		`(?m)^operations a second +\d+; \d+ without n2; [1-9]\d* after its return$`,
		`(?m)^load of this machine before +\d+\.\d+, of \d+ CPUs`} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("output does not match %s", want)
		}
	}
	if t.Failed() {
		t.Log(out.String())
	}
}

// TestASecondDemonstrationLeavesTheFirstAlone, whose files it would remove.
func TestASecondDemonstrationLeavesTheFirstAlone(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data", "cluster")
	unlock, err := lockDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	cfg := ClusterConfig{Daemon: "/nonexistent", Dir: filepath.Dir(filepath.Dir(dir)), Out: &bytes.Buffer{}}
	if err := RunCluster(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "another demonstration") {
		t.Errorf("a second one: %v", err)
	}
	if _, err := os.Stat(dir); err != nil {
		t.Error(err)
	}
	unlock()
	if unlock, err = lockDir(dir); err != nil {
		t.Fatal(err)
	}
	unlock()
}
