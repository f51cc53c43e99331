package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// status is the part of the answer to GET /v1/status that the tests use.
type status struct {
	Addresses struct {
		Metrics, Discovery string
		Listeners          []string
	}
	Ready   bool
	Reasons []struct{ Component, Reason string }
}

// admin sends a request to the admin API.
func (d *daemon) admin(method, path string, into any) error {
	c := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", d.socket())
		}}}
	req, err := http.NewRequest(method, "http://jbofd"+path, nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, body)
	}
	return json.Unmarshal(body, into)
}

var scraper = &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// get returns a page of the metrics server.
func (d *daemon) get(path string) (code int, body string) {
	d.t.Helper()
	resp, err := scraper.Get("http://" + d.metrics + path)
	if err != nil {
		d.t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil {
		d.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// scrape returns all metrics.
func (d *daemon) scrape() map[string]*dto.MetricFamily {
	d.t.Helper()
	_, body := d.get("/metrics")
	p := expfmt.NewTextParser(model.UTF8Validation)
	families, err := p.TextToMetricFamilies(strings.NewReader(body))
	if err != nil {
		d.t.Fatalf("/metrics: %v", err)
	}
	return families
}

// metric adds up the series of a family that carry the labels, given as name and value in turn.
func (d *daemon) metric(name string, labels ...string) float64 {
	d.t.Helper()
	return sum(d.scrape()[name], labels...)
}

func sum(f *dto.MetricFamily, labels ...string) (v float64) {
	for _, m := range f.GetMetric() {
		match := 0
		for i := 0; i < len(labels); i += 2 {
			for _, l := range m.Label {
				if l.GetName() == labels[i] && l.GetValue() == labels[i+1] {
					match += 2
				}
			}
		}
		if match == len(labels) {
			v += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return v
}

// logBuffer collects a daemon's log. Any goroutine may use it.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logBuffer) tail(n int) string {
	s := l.String()
	if len(s) > n {
		s = "[...]" + s[len(s)-n:]
	}
	return s
}

// find returns the lines that contain all the words.
func (l *logBuffer) find(words ...string) (lines []string) {
line:
	for s := range strings.Lines(l.String()) {
		for _, w := range words {
			if !strings.Contains(s, w) {
				continue line
			}
		}
		lines = append(lines, strings.TrimSpace(s))
	}
	return lines
}

// cpuTime is the processor time that the daemon's threads have used: the scheduler's own figures, in
// nanoseconds, where /proc/PID/stat has ticks of 10 ms.
func (d *daemon) cpuTime() (total time.Duration) {
	d.t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", d.cmd.Process.Pid))
	if err != nil || len(threads) == 0 {
		d.t.Fatalf("no /proc/PID/task/*/schedstat, %v", err)
	}
	for _, path := range threads {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		ns, err := strconv.ParseInt(strings.Fields(string(b))[0], 10, 64)
		if err != nil {
			d.t.Fatal(err)
		}
		total += time.Duration(ns)
	}
	return total
}

// rss returns the daemon's resident memory in bytes.
func (d *daemon) rss() int64 {
	d.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.cmd.Process.Pid))
	if err != nil {
		d.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kb, err := strconv.ParseInt(strings.Fields(v)[0], 10, 64)
			if err != nil {
				d.t.Fatal(err)
			}
			return kb << 10
		}
	}
	d.t.Fatal("no VmRSS")
	return 0
}

// goroutines returns the number of the daemon's goroutines, apart from that the number of its drives' workers, and the
// stacks of all. The profile is exact, whereas go_goroutines also counts a varying number of goroutines that collect
// the metrics.
func (d *daemon) goroutines() (n, workers float64, stacks string) {
	d.t.Helper()
	code, stacks := d.get("/debug/pprof/goroutine?debug=1")
	if _, err := fmt.Sscanf(stacks, "goroutine profile: total %g", &n); err != nil {
		d.t.Fatalf("goroutine profile: %d, %v: %s", code, err, stacks)
	}
	for _, m := range workerStack.FindAllStringSubmatch(stacks, -1) {
		same, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			d.t.Fatal(err)
		}
		workers += same
	}
	return n - workers, workers, stacks
}

// workerStack is in the profile what a number of goroutines have in common that are workers.
var workerStack = regexp.MustCompile(`(?m)^(\d+) @ .*\n(?:#.*\n)*#.*/internal/ssd/file\.\(\*workers\)\.run\+`)
