package telemetry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"pgregory.net/rapid"

	"jbofd/internal/nvme"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// full returns a Telemetry with something in every series.
func full() *Telemetry {
	t := New(Options{Version: "v0.1.0", Commit: "abc", Node: "jbof0"})
	t.Tenant("nqn.2026-11.example.host:a").IO("ssd0", "read").Observe(1, 4096, 80*time.Microsecond)
	t.Tenant("nqn.2026-11.example.host:a").Errors().Inc(2, 0x81)
	t.ConnectionEstablished("tcp")
	t.ConnectFailed("invalid_host")
	t.ConnectionRefused("connections")
	t.ProtocolError("header_digest")
	t.KeepAliveTimeout()
	t.UnreportedWriteFailures(2)
	t.LogDropped(3)
	t.Reloaded(true)
	t.SetSSD(SSD{
		Info:    ssd.Info{Name: "ssd0", Backend: "file", Engine: "io_uring", Path: "/dev/nvme0n1", SizeBytes: 1 << 30},
		Healthy: func() error { return nil },
		Stats:   func(s *SSDStats) { s.Completed[ssd.Read], s.TimeNS[ssd.Read] = 7, 1_500_000_000 },
		Health: func() (ssd.Health, bool) {
			h := ssd.Health{WarningKelvin: 343, CriticalKelvin: 353}
			h.Events[ssd.EventSMART] = 2
			h.SMART.SetCriticalWarning(nvme.SMARTWarnReadOnly)
			h.SMART.SetTemperature(311)
			h.SMART.SetAvailableSpare(93)
			h.SMART.SetAvailableSpareThreshold(10)
			h.SMART.SetPercentageUsed(120)
			h.SMART.SetMediaErrors(nvme.Uint128{Lo: 3, Hi: 1})
			h.SMART.SetUnsafeShutdowns(nvme.U128(17))
			return h, true
		},
	})
	t.SetSubsystems([]Subsystem{{NQN: "nqn.2026-11.example.jbofd:a", Serial: "S1", Model: "jbofd",
		Namespaces: []Namespace{{NSID: 1, SSD: "ssd0", UUID: "6f8b1c1e-6c29-4b5a-9a55-0d7f3f4f2c11", Type: "block",
			SizeBytes: 1 << 20, BlockSize: 4096}}}})
	t.SetRDMA(func() RDMAStats {
		return RDMAStats{Devices: 1, CompletionQueues: 2, Receives: 64, Held: 3, RegisteredBytes: 1 << 20, Doorbells: 7,
			Crossings: 9}
	})
	t.SetKV(func() []KVStats {
		return []KVStats{{Subsystem: "nqn.2026-11.example.jbofd:a", NSID: 2, Objects: 10, Segments: 16,
			MemoryBytes: 100, UserBytes: 1000, KeyLogBytes: 400, MovedBytes: 200, SwapKeys: 3}}
	}, func() []SwapStats {
		return []SwapStats{{SSD: "ssd0", Area: "6f8b1c1e-6c29-4b5a-9a55-0d7f3f4f2c12", Up: true, SizeBytes: 64 << 20,
			UsedBytes: 4096},
			{SSD: "ssd1", Area: "6f8b1c1e-6c29-4b5a-9a55-0d7f3f4f2c13", SizeBytes: 64 << 20}}
	})
	t.SetCluster(func() ClusterStats {
		return ClusterStats{Epoch: 7, ActiveEpoch: 6, Manager: true, AuthoritySeconds: 0.4, ViewAgeSeconds: 60,
			Nodes: 3, NodesUp: 2, Ranges: map[string]int{"full": 100, "filling": 28}, UnderReplicated: 28,
			Roles: map[string]int{"chain_head": 40}, Dirty: 5, LeftRanges: 6, DroppedRanges: 7, DroppedBytes: 8,
			KnownLosses: 9, FoundLosses: 10, SilentPartitions: 11, FailingPartitions: 12, OutPartitions: 13}
	}, func() error { return nil })
	t.Peers().Observe(0, 1024, 300*time.Microsecond, false)
	t.Peers().Observe(3, 0, 0, true)
	t.Peers().Observe(2, 512, -1, false)
	t.SetBuffers(func() BufferStats { return BufferStats{TotalBytes: 100, InUseBytes: 40, TakenBytes: 60, Waits: 1} })
	t.SetScheduling(func() []Scheduling { return []Scheduling{sharing("nqn.2026-11.example.host:a")} })
	return t
}

// sharing is a drive that those tenants share.
func sharing(tenants ...string) Scheduling {
	s := Scheduling{SSD: "ssd0", Policy: "jbof", Stats: pipeline.Stats{WriteCost: 3, TargetBytesPerSec: 2e9,
		CompletedBytesPerSec: 1e9,
		InflightNS:           1_000_000, WindowNS: 2_000_000, ActiveTenants: len(tenants)}}
	s.Stats.Class[pipeline.WriteClass] = pipeline.ClassStats{LatencyNS: 80_000, ThresholdNS: 500_000,
		State: pipeline.Congested}
	for _, name := range tenants {
		st := pipeline.TenantStats{Weight: 4, Share: 0.25, CostNS: 2_500_000_000, Credit: 32, Queued: 5, Inflight: 6}
		st.Wait.Count[0], st.Wait.Count[3], st.Wait.Count[pipeline.WaitBuckets-1], st.Wait.SumNS = 1, 2, 4,
			9_000_000_000
		st.LimitedNS[pipeline.LimitCap] = 1_500_000_000
		s.Tenants = append(s.Tenants, TenantScheduling{name, st})
	}
	return s
}

func gather(t *testing.T, tel *Telemetry) map[string]*dto.MetricFamily {
	t.Helper()
	families, err := tel.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*dto.MetricFamily{}
	for _, f := range families {
		out[f.GetName()] = f
	}
	return out
}

func TestMetricsFollowPrometheusConventions(t *testing.T) {
	tel := full()
	problems, err := testutil.GatherAndLint(tel.Gatherer())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	// The linter must find a planted fault.
	bad, err := promlint.New(strings.NewReader("# TYPE jbof_latency_us counter\njbof_latency_us 1\n")).Lint()
	if err != nil || len(bad) == 0 {
		t.Errorf("a planted fault was not found: %v, %v", bad, err)
	}
}

func TestEveryMetricIsExportedOnceItHasSomething(t *testing.T) {
	families := gather(t, full())
	for _, m := range metrics() {
		f := families[m.name]
		if f == nil {
			t.Errorf("%s is missing", m.name)
			continue
		}
		if f.GetHelp() != m.help {
			t.Errorf("%s: help %q", m.name, f.GetHelp())
		}
		delete(families, m.name)
	}
	for name := range families {
		if strings.HasPrefix(name, "jbof_") {
			t.Errorf("%s is exported but not declared", name)
		}
	}
	for _, name := range []string{"go_goroutines", "process_resident_memory_bytes", "process_cpu_seconds_total"} {
		if families[name] == nil {
			t.Errorf("%s is missing", name)
		}
	}
}

func TestScrapesReturnWhatWasObserved(t *testing.T) {
	families := gather(t, full())
	h := families["jbof_io_duration_seconds"].Metric[0].Histogram
	if h.GetSampleCount() != 1 || h.GetSampleSum() != 80e-6 {
		t.Errorf("histogram %v", h)
	}
	if n := len(h.Bucket) + 1; n > 18 {
		t.Errorf("%d buckets with the unbounded one, want at most 18", n)
	}
	if first, last := h.Bucket[0].GetUpperBound(), h.Bucket[len(h.Bucket)-1].GetUpperBound(); first != 10e-6 ||
		last != 2 {
		t.Errorf("buckets from %v to %v", first, last)
	}
	for name, want := range map[string]float64{
		"jbof_ssd_reads_completed_total": 7, "jbof_ssd_read_time_seconds_total": 1.5, "jbof_io_bytes_total": 4096,
		"jbof_io_errors_total": 1, "jbof_connections": 1, "jbof_namespace_capacity_bytes": 1 << 20,
	} {
		got := 0.0
		for _, m := range families[name].Metric {
			got += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
		if got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
}

func TestALatencyIsCountedInTheFirstBucketThatHoldsIt(t *testing.T) {
	check := func(t interface{ Fatalf(string, ...any) }, ns int64) {
		s := &IOSeries{}
		s.Observe(1, 0, time.Duration(ns))
		want := 0
		for want < len(boundsNS) && ns > boundsNS[want] {
			want++
		}
		for i := range s.bucket {
			if got := s.bucket[i].Load(); got != 0 != (i == want) {
				t.Fatalf("%d ns: bucket %d holds %d, want it in %d", ns, i, got, want)
			}
		}
	}
	for _, b := range boundsNS {
		for d := int64(-1); d <= 1; d++ {
			check(t, b+d)
		}
	}
	for shift := range 63 {
		check(t, 1<<shift)
		check(t, 1<<shift-1)
	}
	rapid.Check(t, func(t *rapid.T) { check(t, rapid.Int64Range(0, 1<<62).Draw(t, "ns")) })
}

func TestNothingIsLostAmongManyObservers(t *testing.T) {
	tel := New(Options{})
	const workers, each = 8, 1000
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			s, e := tel.Tenant("h").IO("ssd0", "write"), tel.Tenant("h").Errors()
			for i := range each {
				s.Observe(2, 512, time.Duration(i)*time.Microsecond)
				e.Inc(uint8(i%8), uint8(i))
			}
		})
	}
	wg.Wait()
	s := tel.Tenant("h").IO("ssd0", "write")
	if s.Completed() != workers*each*2 || s.Bytes() != workers*each*512 {
		t.Errorf("%d commands, %d bytes", s.Completed(), s.Bytes())
	}
	total := 0.0
	for _, m := range gather(t, tel)["jbof_io_errors_total"].Metric {
		total += m.Counter.GetValue()
	}
	if total != workers*each {
		t.Errorf("%v errors", total)
	}
}

func TestObservingAllocatesNothing(t *testing.T) {
	tel := New(Options{})
	s, e := tel.Tenant("h").IO("ssd0", "read"), tel.Tenant("h").Errors()
	e.Inc(0, 0)
	var tally Tally
	if n := testing.AllocsPerRun(100, func() {
		s.Observe(1, 4096, 80*time.Microsecond)
		tally.Observe(s, 4096, 80*time.Microsecond)
		tally.Flush()
		e.Inc(0, 2)
	}); n != 0 {
		t.Errorf("%v allocs", n)
	}
}

func TestReasonsAreBounded(t *testing.T) {
	tel := New(Options{})
	for i := range 10 * maxReasons {
		tel.ProtocolError(fmt.Sprint("reason", i))
	}
	if n := len(gather(t, tel)["jbof_protocol_errors_total"].Metric); n > maxReasons+1 {
		t.Errorf("%d series", n)
	}
}

func TestHowADriveIsSharedIsScraped(t *testing.T) {
	families := gather(t, full())
	value := func(name string, labels ...string) float64 {
		t.Helper()
	next:
		for _, m := range families[name].GetMetric() {
			for i := 0; i < len(labels); i += 2 {
				if !slices.ContainsFunc(m.Label, func(l *dto.LabelPair) bool {
					return l.GetName() == labels[i] &&
						l.GetValue() == labels[i+1]
				}) {
					continue next
				}
			}
			return m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
		t.Errorf("no %s with %v", name, labels)
		return 0
	}
	for _, x := range []struct {
		want   float64
		name   string
		labels []string
	}{
		{0.25, "jbof_scheduler_share", nil}, {4, "jbof_scheduler_weight", nil}, {32, "jbof_scheduler_credit", nil},
		{5, "jbof_scheduler_queued", nil},
		{6, "jbof_scheduler_inflight", nil}, {2.5, "jbof_scheduler_device_seconds_total", nil},
		{1.5, "jbof_scheduler_limited_seconds_total", []string{"reason", "cap"}},
		{0, "jbof_scheduler_limited_seconds_total", []string{"reason", "credit"}},
		{1, "jbof_scheduler_state", []string{"class", "write", "state", "congested"}},
		{0, "jbof_scheduler_state", []string{"class", "write", "state", "overloaded"}},
		{1, "jbof_scheduler_state", []string{"class", "read", "state", "underutilised"}},
		{80e-6, "jbof_scheduler_latency_seconds", []string{"class", "write"}},
		{500e-6, "jbof_scheduler_latency_threshold_seconds", []string{"class", "write"}},
		{3, "jbof_scheduler_write_cost", nil},
		{2e9, "jbof_scheduler_target_bytes_per_second", nil}, {1e9, "jbof_scheduler_completed_bytes_per_second", nil},
		{0.001, "jbof_scheduler_inflight_seconds", nil},
		{0.002, "jbof_scheduler_window_seconds", nil}, {1, "jbof_scheduler_active_tenants", nil},
		{1, "jbof_scheduler_info", []string{"policy", "jbof"}},
	} {
		if got := value(x.name, x.labels...); got != x.want {
			t.Errorf("%s %v is %v, want %v", x.name, x.labels, got, x.want)
		}
	}
	h := families["jbof_scheduler_wait_seconds"].Metric[0].Histogram
	if h.GetSampleCount() != 7 || h.GetSampleSum() != 9 || len(h.Bucket) != 17 {
		t.Errorf("waits %v", h)
	}
	if first := h.Bucket[0]; first.GetUpperBound() != 4e-6 || first.GetCumulativeCount() != 1 ||
		h.Bucket[1].GetCumulativeCount() != 3 {
		t.Errorf("waits %v", h)
	}
}

func TestTenantsWithoutSeriesShareTheSchedulersToo(t *testing.T) {
	tel := New(Options{MaxTenants: 2})
	tel.Tenant("a")
	tel.Tenant("h\xff") // and h\xfe have one name once they are text
	tel.SetScheduling(func() []Scheduling { return []Scheduling{sharing("a", "h\xff", "h\xfe", "other", "c", "d")} })
	for range 3 {
		families := gather(t, tel)
		weights := map[string]float64{}
		for _, m := range families["jbof_scheduler_weight"].Metric {
			for _, l := range m.Label {
				if l.GetName() == "tenant" {
					weights[l.GetValue()] += m.GetGauge().GetValue()
				}
			}
		}
		if want := map[string]float64{"a": 4, "h\uFFFD": 4, "other": 16}; !maps.Equal(weights, want) {
			t.Errorf("weights %v, want %v", weights, want)
		}
		if n := len(families["jbof_scheduler_device_seconds_total"].Metric); n != 2 {
			t.Errorf("%d tenants have counters, want 2", n)
		}
		if n := families["jbof_tenants_dropped_total"].Metric[0].GetCounter().GetValue(); n != 0 {
			t.Errorf("scrapes count as %v tenants dropped", n)
		}
	}
}

func TestInvalidLabelValuesDoNotBreakAScrape(t *testing.T) {
	tel := New(Options{})
	for range 2 {
		tel.Tenant("host\xff").IO("ssd0", "read").Observe(1, 1, 0)
	}
	tel.ProtocolError("\xfe")
	gather(t, tel)
}

// get returns a path's status and body.
func get(t *testing.T, s *Server, path string) (int, string) {
	t.Helper()
	r, err := http.Get("http://" + s.Addr().String() + path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(body)
}

func serve(t *testing.T, tel *Telemetry, o ServerOptions) *Server {
	t.Helper()
	o.Address = "127.0.0.1:0"
	s, err := tel.Serve(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		for range 2 {
			if err := s.Close(ctx); err != nil {
				t.Errorf("close: %v", err)
			}
		}
	})
	return s
}

func TestTheServerAnswersScrapesAndProbes(t *testing.T) {
	tel := full()
	s := serve(t, tel, ServerOptions{})
	if code, body := get(t, s, "/metrics"); code != 200 ||
		!strings.Contains(body, `jbof_io_completed_total{op="read",ssd="ssd0",tenant="nqn.2026-11.example.host:a"} 1`) {
		t.Errorf("/metrics: %d\n%s", code, body)
	}
	if code, _ := get(t, s, "/healthz"); code != 200 {
		t.Errorf("/healthz: %d", code)
	}
	if code, _ := get(t, s, "/debug/pprof/"); code != 404 {
		t.Errorf("/debug/pprof/ without being asked for: %d", code)
	}
	if code, body := get(t, s, "/"); code != 200 || !strings.Contains(body, `href="/metrics"`) ||
		strings.Contains(body, "pprof") {
		t.Errorf("/: %d\n%s", code, body)
	}
	if code, _ := get(t, s, "/nothing"); code != 404 {
		t.Errorf("/nothing: %d", code)
	}
}

func TestPprofIsServedWhenAskedFor(t *testing.T) {
	s := serve(t, New(Options{}), ServerOptions{Pprof: true})
	if code, _ := get(t, s, "/debug/pprof/goroutine?debug=1"); code != 200 {
		t.Errorf("%d", code)
	}
	if _, body := get(t, s, "/"); !strings.Contains(body, `href="/debug/pprof/"`) {
		t.Errorf("/ has no link to it:\n%s", body)
	}
}

func TestReadinessNamesEveryReason(t *testing.T) {
	tel := New(Options{})
	s := serve(t, tel, ServerOptions{})
	var broken error
	tel.SetSSD(SSD{Info: ssd.Info{Name: "ssd0"}, Healthy: func() error { return broken }})
	expect := func(code int, reasons ...Reason) {
		t.Helper()
		got, body := get(t, s, "/readyz")
		var answer struct {
			Ready   bool
			Reasons []Reason
		}
		if err := json.Unmarshal([]byte(body), &answer); err != nil {
			t.Fatal(err)
		}
		if got != code || answer.Ready != (code == 200) || fmt.Sprint(answer.Reasons) != fmt.Sprint(reasons) {
			t.Errorf("%d %s, want %d %v", got, body, code, reasons)
		}
	}
	expect(503, Reason{"daemon", "starting"})
	tel.Health().Clear("daemon")
	expect(200)
	broken = errors.New("device is gone")
	expect(503, Reason{"ssd ssd0", "device is gone"})
	tel.Health().Block("daemon", "draining")
	expect(503, Reason{"daemon", "draining"}, Reason{"ssd ssd0", "device is gone"})
	if code, _ := get(t, s, "/healthz"); code != 200 {
		t.Errorf("not alive because not ready: %d", code)
	}
	tel.RemoveSSD("ssd0")
	expect(503, Reason{"daemon", "draining"})
}

func TestAnAddressInUseIsNamed(t *testing.T) {
	tel := New(Options{})
	s := serve(t, tel, ServerOptions{})
	_, err := tel.Serve(ServerOptions{Address: s.Addr().String()})
	if err == nil || !strings.Contains(err.Error(), s.Addr().String()) {
		t.Errorf("%v", err)
	}
}

// countingListener hands out pipes and counts them.
type countingListener struct {
	conns chan net.Conn
	done  chan struct{}
}

func (l *countingListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l *countingListener) Close() error   { close(l.done); return nil }
func (l *countingListener) Addr() net.Addr { return &net.TCPAddr{} }

func TestNoMoreHTTPConnectionsThanTheBound(t *testing.T) {
	inner := &countingListener{conns: make(chan net.Conn, 3), done: make(chan struct{})}
	for range 3 {
		_, c := net.Pipe()
		inner.conns <- c
	}
	l := newLimitListener(inner, 2)
	a, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Accept(); err != nil {
		t.Fatal(err)
	}
	third := make(chan error)
	go func() {
		_, err := l.Accept()
		third <- err
	}()
	if len(inner.conns) != 1 {
		t.Error("the third connection was taken")
	}
	for range 2 { // closing twice frees one place
		_ = a.Close()
	}
	if err := <-third; err != nil {
		t.Errorf("no place after one was freed: %v", err)
	}
	go func() {
		_, err := l.Accept()
		third <- err
	}()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-third; !errors.Is(err, net.ErrClosed) {
		t.Errorf("waiting for a place while closing: %v", err)
	}
}

func TestTheLastReloadIsAGauge(t *testing.T) {
	tel := New(Options{})
	value := func(name string) float64 {
		t.Helper()
		families, err := tel.Gatherer().Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == name {
				return f.Metric[0].Gauge.GetValue()
			}
		}
		t.Fatalf("no %s", name)
		return 0
	}
	const ok, at = "jbof_config_last_reload_successful", "jbof_config_last_reload_success_timestamp_seconds"
	began := value(at)
	if value(ok) != 1 || time.Since(time.Unix(int64(began), 0)) > time.Minute {
		t.Errorf("at the start: %v, %v", value(ok), began)
	}
	tel.Reloaded(false)
	if value(ok) != 0 || value(at) != began {
		t.Errorf("after a refused reload: %v, %v", value(ok), value(at))
	}
	tel.Reloaded(true)
	if value(ok) != 1 || value(at) <= began {
		t.Errorf("after a reload: %v, %v; before %v", value(ok), value(at), began)
	}
}

func BenchmarkObserve(b *testing.B) {
	s := New(Options{}).Tenant("h").IO("ssd0", "read")
	b.ReportAllocs()
	for i := range b.N {
		s.Observe(1, 4096, time.Duration(80_000+i&0xffff))
	}
}
