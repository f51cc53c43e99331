// Package telemetry reports the state of the daemon: metrics for Prometheus, health for probes, and log messages at a
// limited rate.
//
// The I/O path counts in plain structs of atomics (IOSeries, ErrorSeries). A connection requests them once from its
// Tenant. They are converted to Prometheus metrics only during a scrape. The counters of other packages (devices,
// buffers) are read during the scrape by functions that the daemon registers. The package has no global state.
//
// The number of series is bounded. Labels are tenant, ssd, op, status and a fixed set of words, never an address, a key
// or a connection. Hosts beyond Options.MaxTenants are counted together as "other"; see Tenant.
package telemetry

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"jbofd/internal/ssd"
)

// The reasons for which connections are refused and ended. A test checks the lists against the packages that use the
// reasons.
var (
	connectReasons = []string{"cntlid", "connections", "controllers", "format", "host", "host_connections", "hosts",
		"nqn", "qid", "sequence", "sqsize",
		"subsystem", "transport"}
	refusedReasons  = []string{"accept", "pending", "resources", "sockets"}
	protocolReasons = []string{"header_field", "sequence", "header_digest", "data_out_of_range", "transfer_limit",
		"unsupported_parameter",
		"reported_by_host", "private_data", "other"}
)

// maxReasons limits the number of different reasons of one counter. Further reasons are counted as "other".
const maxReasons = 32

// Options describe a Telemetry.
type Options struct {
	// Version and Commit are those of the build, for jbof_build_info.
	Version, Commit string
	// Node is the name of the node.
	Node string
	// MaxTenants is the number of hosts that get their own series, in addition to configured tenants; 0 stands for
	// 1000.
	MaxTenants int
}

// Telemetry holds the metrics and the health of a daemon. All its methods may be called from any goroutine.
type Telemetry struct {
	opts     Options
	registry *prometheus.Registry
	health   *Health

	established, open                           reasons // by transport
	connectFailures, refused, protocolErrors    reasons
	reloads                                     reasons
	keepAliveTimeouts, logDropped, tenantsOther atomic.Uint64
	unreported                                  atomic.Uint64
	// reloadFailed: the last reload was refused. loadedAtNS is the time at which the current configuration was loaded,
	// in Unix time.
	reloadFailed atomic.Bool
	loadedAtNS   atomic.Int64

	// mu guards the following fields. The I/O path does not take it.
	mu         sync.Mutex
	tenants    map[string]*Tenant
	ssds       map[string]SSD
	silence    map[string]silence // by the names of drives
	subsystems []Subsystem
	buffers    func() BufferStats
	scheduling func() []Scheduling
	rdma       func() RDMAStats
	kv         func() []KVStats
	swap       func() []SwapStats
	cluster    func() ClusterStats
	peers      PeerSeries
}

// New returns a Telemetry whose health is "starting" until Health().Clear("daemon").
func New(o Options) *Telemetry {
	if o.MaxTenants <= 0 {
		o.MaxTenants = 1000
	}
	t := &Telemetry{
		opts:     o,
		registry: prometheus.NewPedanticRegistry(),
		health:   newHealth(),
		tenants:  map[string]*Tenant{},
		ssds:     map[string]SSD{},
		silence:  map[string]silence{},
	}
	t.addTenant(OtherTenant).configured = true
	t.health.Block("daemon", "starting")
	t.loadedAtNS.Store(time.Now().UnixNano())
	// If a counter did not exist before its first event, rate() and increase() would miss that event.
	for r, words := range map[*reasons][]string{
		&t.reloads:         {"success", "failure"},
		&t.established:     {"tcp"},
		&t.open:            {"tcp"},
		&t.connectFailures: connectReasons,
		&t.refused:         refusedReasons,
		&t.protocolErrors:  protocolReasons,
	} {
		for _, word := range words {
			r.add(word, 0)
		}
	}
	t.registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		collector{t},
	)
	return t
}

// Gatherer returns the metrics for an exporter.
func (t *Telemetry) Gatherer() prometheus.Gatherer { return t.registry }

// Health returns the health that /readyz reports.
func (t *Telemetry) Health() *Health { return t.health }

// ConnectionEstablished counts a connection whose Connect command succeeded.
func (t *Telemetry) ConnectionEstablished(transport string) {
	t.established.add(transport, 1)
	t.open.add(transport, 1)
}

// ConnectionClosed counts the end of a connection that ConnectionEstablished has counted.
func (t *Telemetry) ConnectionClosed(transport string) { t.open.add(transport, -1) }

// ConnectFailed counts a Connect command that failed.
func (t *Telemetry) ConnectFailed(reason string) { t.connectFailures.add(reason, 1) }

// ConnectionRefused counts a connection that was refused because of a configured limit.
func (t *Telemetry) ConnectionRefused(reason string) { t.refused.add(reason, 1) }

// ProtocolError counts a connection that was ended because the peer violated the protocol.
func (t *Telemetry) ProtocolError(reason string) { t.protocolErrors.add(reason, 1) }

// UnreportedWriteFailures counts writes that have failed after their connection had ended.
func (t *Telemetry) UnreportedWriteFailures(n uint64) { t.unreported.Add(n) }

// UnreportedWrites is how many UnreportedWriteFailures has counted.
func (t *Telemetry) UnreportedWrites() uint64 { return t.unreported.Load() }

// KeepAliveTimeout counts an association that was ended because its keep-alive timer expired.
func (t *Telemetry) KeepAliveTimeout() { t.keepAliveTimeouts.Add(1) }

// LogDropped counts log messages that were suppressed.
func (t *Telemetry) LogDropped(n int) { t.logDropped.Add(uint64(n)) }

// Reloaded records the outcome of a reload of the configuration.
func (t *Telemetry) Reloaded(ok bool) {
	if !ok {
		t.reloads.add("failure", 1)
		t.reloadFailed.Store(true)
		return
	}
	t.reloads.add("success", 1)
	t.reloadFailed.Store(false)
	t.loadedAtNS.Store(time.Now().UnixNano())
}

// SSD is a drive to report.
type SSD struct {
	Info ssd.Info
	// Healthy returns nil or the reason why the drive cannot serve I/O. It does no I/O. A nil function stands for
	// always healthy.
	Healthy func() error
	// Fallback returns nil or the reason why the drive is used in a slower way than configured. A nil function stands
	// for never.
	Fallback func() error
	// Health returns what the drive says of itself, or false. It does no I/O. A nil function stands for nothing.
	Health func() (ssd.Health, bool)
	// Stats fills in the drive's counters. It may be called at any time until RemoveSSD. A nil function stands for no
	// counters.
	Stats func(*SSDStats)
}

// SSDStats are a drive's counters since the start of the daemon.
type SSDStats struct {
	// Completed, Bytes and TimeNS count the requests that the drive completed without error.
	Completed, Bytes, TimeNS [ssd.Ops]int64
	// Errors counts requests that the drive failed. NoSpace counts those of them that failed for lack of space.
	Errors, NoSpace int64
	// InFlight is the number of requests at the drive. Queued is the number that wait for it.
	InFlight, Queued int64
	// BufferWaits counts commands that had to wait for a buffer. Aborted counts commands that were removed from the
	// queue.
	BufferWaits, Aborted int64
}

// SetSSD adds a drive to the report, or replaces the drive with that name. The daemon is not ready while the drive is
// not healthy.
func (t *Telemetry) SetSSD(s SSD) {
	t.mu.Lock()
	t.ssds[s.Info.Name] = s
	delete(t.silence, s.Info.Name) // of the drive before
	t.mu.Unlock()
	t.health.watch("ssd "+s.Info.Name, s.Healthy)
}

// RemoveSSD removes a drive from the report.
func (t *Telemetry) RemoveSSD(name string) {
	t.mu.Lock()
	delete(t.ssds, name)
	delete(t.silence, name)
	t.mu.Unlock()
	t.health.watch("ssd "+name, nil)
}

// Subsystem is a subsystem to report.
type Subsystem struct {
	NQN, Serial, Model string
	Namespaces         []Namespace
}

// Namespace is a namespace to report.
type Namespace struct {
	NSID            uint32
	SSD, UUID, Type string
	SizeBytes       int64
	BlockSize       int
}

// SetSubsystems replaces the reported subsystems. The caller must not change the slice afterwards.
func (t *Telemetry) SetSubsystems(s []Subsystem) {
	t.mu.Lock()
	t.subsystems = s
	t.mu.Unlock()
}

// BufferStats are the statistics of the memory for data.
type BufferStats struct {
	// TotalBytes is the limit, InUseBytes the memory in use, and TakenBytes the memory made resident.
	TotalBytes, InUseBytes, TakenBytes int64
	// ArenaBytes is the memory of key-value stores and swap areas, in addition to TotalBytes.
	ArenaBytes int64
	// Waits counts requests that had to wait for memory.
	Waits uint64
}

// SetBuffers sets the source of the statistics of the memory for data.
func (t *Telemetry) SetBuffers(f func() BufferStats) {
	t.mu.Lock()
	t.buffers = f
	t.mu.Unlock()
}

func goVersion() string { return runtime.Version() }

// reasons is a counter or gauge for each of a small set of words.
type reasons struct {
	// mu guards n.
	mu sync.Mutex
	n  map[string]int64
}

func (r *reasons) add(word string, by int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n == nil {
		r.n = map[string]int64{}
	}
	if _, ok := r.n[word]; !ok && len(r.n) >= maxReasons {
		word = "other"
	}
	r.n[word] += by
}

func (r *reasons) each(f func(word string, n int64)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for w, n := range r.n {
		f(w, n)
	}
}
