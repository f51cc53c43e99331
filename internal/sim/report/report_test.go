package report

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"jbofd/internal/sim"
)

func TestStagesFollowEachOtherAndAllStepsAreDone(t *testing.T) {
	var first, second atomic.Int32
	var stages [2][]sim.Step
	for range 50 {
		stages[0] = append(stages[0], sim.Step{Name: "a", Do: func() error { first.Add(1); return nil }})
		stages[1] = append(stages[1], sim.Step{Name: "b", Do: func() error {
			if first.Load() != 50 {
				return errors.New("too early")
			}
			second.Add(1)
			return nil
		}})
	}
	calls := 0
	err := Execute(context.Background(), stages[:], func(done, total int, _ string) {
		if calls++; done != calls || total != 100 {
			t.Errorf("progress %d of %d at call %d", done, total, calls)
		}
	})
	if err != nil || second.Load() != 50 || calls != 100 {
		t.Errorf("error %v, %d steps of the second stage, %d calls", err, second.Load(), calls)
	}
}

func TestAFailedStepEndsThePlan(t *testing.T) {
	bad := errors.New("bad")
	stages := [][]sim.Step{{{Name: "first", Do: func() error { return bad }}},
		{{Name: "second", Do: func() error { t.Error("is done"); return nil }}}}
	if err := Execute(context.Background(), stages, func(int, int, string) {}); !errors.Is(err, bad) ||
		!strings.Contains(err.Error(), "first") {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := Execute(ctx, stages[1:], func(int, int, string) {}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// TestTheNumberOfProcessorsDoesNotChangeResults runs a plan sequentially and in parallel.
func TestTheNumberOfProcessorsDoesNotChangeResults(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	one := small(t)
	runtime.GOMAXPROCS(4)
	if !reflect.DeepEqual(one, small(t)) {
		t.Error("on four processors the results are others than on one")
	}
}

// small runs some of the matrix on small drives, for a short time.
func small(t *testing.T) []*sim.Result {
	t.Helper()
	var scenarios []sim.Scenario
	for _, s := range sim.Matrix() {
		if s.String() != "utilisation/128K-read-clean" && s.String() != "dynamic/switch-clean" &&
			s.String() != "light-heavy/128K-read-clean" {
			continue
		}
		s.SizeBytes = 256 << 20
		if len(s.Phases) == 1 {
			s.Phases[0].FromNS, s.Phases[0].ToNS = 50*sim.Millisecond, 150*sim.Millisecond
		}
		scenarios = append(scenarios, s)
	}
	stages, results, err := sim.NewLab(1).Plan(scenarios, []string{"fifo", "jbof"})
	if err != nil {
		t.Fatal(err)
	}
	if err := Execute(context.Background(), stages, func(int, int, string) {}); err != nil {
		t.Fatal(err)
	}
	return results
}

func TestTheFolderHoldsTablesAndPlotsThatThereAreFilesFor(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	results := small(t)
	if err := WriteFolder(dir, 1, results); err != nil {
		t.Fatal(err)
	}

	var doc struct {
		APIVersion string
		Results    []*sim.Result
	}
	b, err := os.ReadFile(filepath.Join(dir, "results.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &doc); err != nil || doc.APIVersion != APIVersion || len(doc.Results) != len(results) {
		t.Errorf("results.json: %v, %q, %d results of %d", err, doc.APIVersion, len(doc.Results), len(results))
	}

	f, err := os.Open(filepath.Join(dir, "results.csv"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines, err := csv.NewReader(f).ReadAll()
	want := 1
	for _, r := range results {
		for _, p := range r.Phases {
			want += len(p.Tenants)
		}
	}
	if err != nil || len(lines) != want {
		t.Errorf("results.csv: %v, %d lines, want %d", err, len(lines), want)
	}

	md, err := os.ReadFile(filepath.Join(dir, "report.md"))
	if err != nil {
		t.Fatal(err)
	}
	var linked []string
	for _, m := range regexp.MustCompile(`\]\((.*)\)`).FindAllSubmatch(md, -1) {
		linked = append(linked, string(m[1]))
	}
	plots, err := filepath.Glob(filepath.Join(dir, "*.svg"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range plots {
		if !slices.Contains(linked, filepath.Base(p)) {
			t.Errorf("report.md does not show %s", filepath.Base(p))
		}
		checkSVG(t, p)
	}
	if len(linked) != len(plots) {
		t.Errorf("report.md shows %d plots, there are %d", len(linked), len(plots))
	}
	for _, name := range []string{"futil-utilisation", "tail-light-heavy", "series-dynamic-switch-clean",
		"write-cost-dynamic-switch-clean", "cdf-utilisation-128K-read-clean"} {
		if !slices.Contains(linked, name+".svg") {
			t.Errorf("there is no %s.svg", name)
		}
	}
}

// checkSVG checks that a plot is well-formed and returns its text.
func checkSVG(t *testing.T, file string) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	d := xml.NewDecoder(strings.NewReader(string(b)))
	texts := ""
	for {
		tok, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if c, ok := tok.(xml.CharData); ok {
			texts += string(c) + "\n"
		}
	}
	for _, want := range []string{"fifo", "jbof"} {
		if !strings.Contains(texts, want) && !strings.HasPrefix(filepath.Base(file), "write-cost") {
			t.Errorf("%s does not name %s", filepath.Base(file), want)
		}
	}
}

func TestTheTableNamesWhatBroke(t *testing.T) {
	var b strings.Builder
	r := &sim.Result{Row: "row", Scenario: "sc", Policy: "p", ViolationCount: 1, Violations: []string{"at 1 s: x"},
		Phases: []sim.PhaseResult{{Name: "ph", Utilisation: 0.5}}}
	if err := WriteTable(&b, []*sim.Result{r}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"row/sc", "0.500", "BROKEN row/sc, p: at 1 s: x"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q does not say %q", b.String(), want)
		}
	}
}
