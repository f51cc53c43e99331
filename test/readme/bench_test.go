package readme

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestTheFiguresOfAClusterAreMeasured by test/bench/cluster.sh, which ends all that it has started.
func TestTheFiguresOfAClusterAreMeasured(t *testing.T) {
	if testing.Short() {
		t.Skip("-short")
	}
	dir := clone(t)
	temporary := filepath.Join(dir, "tmp")
	if err := os.Mkdir(temporary, 0o755); err != nil {
		t.Fatal(err)
	}
	out := typed(t, dir, `test/bench/cluster.sh --quick 7 9
if grep -lsa "$PWD/[b]in/jbof" /proc/[0-9]*/cmdline; then echo "processes are left" >&2; exit 1; fi
if test/bench/cluster.sh 4 2> refused; then echo "there is no figure 4" >&2; exit 1; fi
cat refused
`, "TMPDIR="+temporary)
	for _, want := range []string{"| figure | how |", "\n| 7 | YCSB-C, zipf 0.99", "\n| 9 | YCSB-B", "no figure 4"} {
		if !strings.Contains(out, want) {
			t.Errorf("the output lacks %q", want)
		}
	}
	if left, err := os.ReadDir(temporary); err != nil || len(left) > 0 {
		t.Errorf("files are left: %v, %v", left, err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "cluster-bench.json"))
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Kind, Version string
		Seed          int
		Rows          []struct {
			Figure, Measured, KVRun string
			OpsPerSec, CPUPercent   float64
			ReadP999US              float64
			Failed                  int
			Timeline                []float64
		}
	}
	if err := json.Unmarshal(text, &doc); err != nil || doc.Kind != "ClusterBench" || doc.Version == "" ||
		doc.Seed != 1 || len(doc.Rows) != 3 {
		t.Fatalf("%v: %s", err, text)
	}
	for _, r := range doc.Rows {
		if r.Failed > 0 || r.OpsPerSec <= 0 || r.CPUPercent <= 0 || r.ReadP999US <= 0 ||
			!strings.Contains(r.KVRun, "readproportion=") {
			t.Errorf("%+v", r)
		}
	}
	if r := doc.Rows[1]; !strings.Contains(r.Measured, " times, reads p99.9 ") {
		t.Errorf("%+v", r)
	}
	if join := doc.Rows[2]; len(join.Timeline) < 5 || !strings.Contains(join.Measured, "least second") {
		t.Errorf("%+v", join)
	}
	if t.Failed() {
		t.Log(out)
	}
}
