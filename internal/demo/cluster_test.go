package demo

import (
	"bytes"
	"net"
	"os"
	"regexp"
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
		`(?m)^acknowledged writes lost +0 of 4096 keys$`, `(?m)^stale reads +0$`, `PASS: nothing`} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("output does not match %s", want)
		}
	}
	if t.Failed() {
		t.Log(out.String())
	}
}
