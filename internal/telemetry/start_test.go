package telemetry

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"jbofd/internal/pipeline"
)

// TestCountersAreThereBeforeTheirFirstEvent: rate() and increase() do not see the first event of a counter that appears
// with it, and with it the alerts miss it.
func TestCountersAreThereBeforeTheirFirstEvent(t *testing.T) {
	tel := New(Options{})
	tel.Tenant("nqn.2026-11.example.host:a").IO("ssd0", "read")
	families := gather(t, tel)
	labels := func(name, label string) (values []string) {
		t.Helper()
		if families[name] == nil {
			t.Errorf("%s is not there", name)
			return nil
		}
		for _, m := range families[name].Metric {
			if m.GetCounter().GetValue() != 0 {
				t.Errorf("%s is %v at the start", name, m.GetCounter().GetValue())
			}
			for _, l := range m.Label {
				if l.GetName() == label {
					values = append(values, l.GetValue())
				}
			}
		}
		return values
	}
	for name, want := range map[string]struct {
		label  string
		values []string
	}{
		"jbof_connect_failures_total":    {"reason", connectReasons},
		"jbof_connections_refused_total": {"reason", refusedReasons},
		"jbof_protocol_errors_total":     {"reason", protocolReasons},
		"jbof_config_reloads_total":      {"result", []string{"failure", "success"}},
		"jbof_keepalive_timeouts_total":  {},

		"jbof_unreported_write_failures_total": {},
		"jbof_log_messages_dropped_total":      {},
		"jbof_tenants_dropped_total":           {},
		"jbof_io_errors_total":                 {"sc", []string{"0x80", "0x81"}},
		"jbof_io_completed_total":              {"op", []string{"read"}},
		"jbof_connection_established_total":    {"transport", []string{"tcp"}},
	} {
		got := labels(name, want.label)
		for _, v := range want.values {
			if !slices.Contains(got, v) {
				t.Errorf("%s has no %s %q at the start: %q", name, want.label, v, got)
			}
		}
	}
}

// TestTheReasonsAreThoseOfTheTarget reads them from the source of the packages that use them.
func TestTheReasonsAreThoseOfTheTarget(t *testing.T) {
	find := func(expr string) (words []string) {
		t.Helper()
		re := regexp.MustCompile(expr)
		err := filepath.WalkDir("../nvmeof", func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			for _, m := range re.FindAllSubmatch(text, -1) {
				words = append(words, string(m[1]))
			}
			return err
		})
		if err != nil || len(words) == 0 {
			t.Fatalf("%s: %d words, %v", expr, len(words), err)
		}
		return words
	}
	for _, c := range []struct {
		known []string
		expr  string
	}{
		{connectReasons, `refuse(?:Field)?\((?:nvme\.\w+, )?"([a-z_]+)"`},
		{connectReasons, `return "([a-z_]+)", fmt\.Sprintf`},
		{refusedReasons, `ConnectionRefused\("([a-z_]+)"\)`},
		{protocolReasons, `ProtocolError\("([a-z_]+)"\)`},
	} {
		for _, word := range find(c.expr) {
			if !slices.Contains(c.known, word) {
				t.Errorf("reason %q (%s) is not among those that are there at the start", word, c.expr)
			}
		}
	}
}

// TestBucketsTellAQuantileWithinAFactorOfTwoAndAHalf, where tenants feel it: 10 ms to 2 s.
func TestBucketsTellAQuantileWithinAFactorOfTwoAndAHalf(t *testing.T) {
	fine := func(name string, bounds []float64) {
		last := 0.0
		for _, b := range bounds {
			if last > 0 && b > 0.01 && last < 2 && b/last > 2.5001 {
				t.Errorf("%s: no bucket between %v and %v", name, last, b)
			}
			last = b
		}
		if last < 2 {
			t.Errorf("%s: the last bucket ends at %v", name, last)
		}
	}
	s := &IOSeries{}
	s.Observe(1, 0, time.Millisecond)
	_, _, io := s.histogram()
	_, _, wait := waits(&pipeline.WaitHistogram{})
	for name, le := range map[string]map[float64]uint64{"jbof_io_duration_seconds": io,
		"jbof_scheduler_wait_seconds": wait} {
		var bounds []float64
		for b := range le {
			bounds = append(bounds, b)
		}
		slices.Sort(bounds)
		fine(name, bounds)
	}
}
