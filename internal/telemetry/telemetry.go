// Package telemetry is what the daemon tells the outside about itself: metrics
// for Prometheus, health for probes, and log lines at a bounded rate.
//
// The I/O path counts in plain structs of atomics (IOSeries, ErrorSeries) that a
// connection asks for once; they become Prometheus metrics only when somebody
// scrapes. What others count already (devices, buffers) is read at that moment by
// functions that the daemon registers. Nothing here is global.
//
// Series are bounded: labels are tenant, ssd, op, status and a few words of our
// own, never an address, a key or a connection. Beyond Options.MaxTenants tenants
// are counted together as "other".
package telemetry

import (
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"jbofd/internal/ssd"
)

// OtherTenant is the tenant under which those without series of their own are counted.
const OtherTenant = "other"

// maxReasons bounds the different reasons of one counter; further ones are counted as "other".
const maxReasons = 32

// Options describe a Telemetry.
type Options struct {
	// Version and Commit are the build's, for jbof_build_info.
	Version, Commit string
	// Node is the node's name.
	Node string
	// MaxTenants is how many tenants get series of their own; 0: 1000.
	MaxTenants int
}

// Telemetry holds a daemon's metrics and health. All its methods may be called
// from any goroutine.
type Telemetry struct {
	opts     Options
	registry *prometheus.Registry
	health   *Health

	established, open                           reasons // by transport
	connectFailures, refused, protocolErrors    reasons
	reloads                                     reasons
	keepAliveTimeouts, logDropped, tenantsOther atomic.Uint64

	// mu guards what follows; the I/O path does not take it.
	mu         sync.Mutex
	tenants    map[string]struct{}
	io         map[ioKey]*IOSeries
	errors     map[string]*ErrorSeries
	ssds       map[string]SSD
	subsystems []Subsystem
	buffers    func() BufferStats
	scheduling func() []Scheduling
	rdma       func() RDMAStats
	kv         func() []KVStats
	swap       func() []SwapStats
}

type ioKey struct{ tenant, ssd, op string }

// New returns a Telemetry whose health is "starting" until Health().Clear("daemon").
func New(o Options) *Telemetry {
	if o.MaxTenants <= 0 {
		o.MaxTenants = 1000
	}
	t := &Telemetry{
		opts:     o,
		registry: prometheus.NewPedanticRegistry(),
		health:   newHealth(),
		tenants:  map[string]struct{}{},
		io:       map[ioKey]*IOSeries{},
		errors:   map[string]*ErrorSeries{},
		ssds:     map[string]SSD{},
	}
	t.health.Block("daemon", "starting")
	// A counter that is not there before its first event hides that event from rate().
	for _, result := range []string{"success", "failure"} {
		t.reloads.add(result, 0)
	}
	t.established.add("tcp", 0)
	t.open.add("tcp", 0)
	t.registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		collector{t},
	)
	return t
}

// Gatherer gives the metrics to whoever exports them.
func (t *Telemetry) Gatherer() prometheus.Gatherer { return t.registry }

// Health is what /readyz answers with.
func (t *Telemetry) Health() *Health { return t.health }

// tenantName returns the name under which a tenant is counted. The caller holds mu.
func (t *Telemetry) tenantName(tenant string) string {
	name, ok := t.nameOf(tenant)
	if !ok {
		t.tenantsOther.Add(1)
	}
	return name
}

// nameOf is tenantName without counting; ok is false for those without series of their
// own. The caller holds mu.
func (t *Telemetry) nameOf(tenant string) (name string, ok bool) {
	if !utf8.ValidString(tenant) {
		tenant = strings.ToValidUTF8(tenant, "\uFFFD")
	}
	if _, ok := t.tenants[tenant]; ok {
		return tenant, true
	}
	if len(t.tenants) >= t.opts.MaxTenants {
		return OtherTenant, false
	}
	tenant = strings.Clone(tenant)
	t.tenants[tenant] = struct{}{}
	return tenant, true
}

// IO returns the series of one tenant's operations of one kind on one SSD, always
// the same for the same three. A connection asks once and keeps it.
func (t *Telemetry) IO(tenant, ssdName, op string) *IOSeries {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := ioKey{t.tenantName(tenant), ssdName, op}
	s := t.io[k]
	if s == nil {
		s = &IOSeries{}
		t.io[k] = s
	}
	return s
}

// Errors returns the series of one tenant's failed commands. A connection asks
// once and keeps it.
func (t *Telemetry) Errors(tenant string) *ErrorSeries {
	t.mu.Lock()
	defer t.mu.Unlock()
	name := t.tenantName(tenant)
	s := t.errors[name]
	if s == nil {
		s = &ErrorSeries{}
		t.errors[name] = s
	}
	return s
}

// ConnectionEstablished counts a connection whose Connect command succeeded.
func (t *Telemetry) ConnectionEstablished(transport string) {
	t.established.add(transport, 1)
	t.open.add(transport, 1)
}

// ConnectionClosed ends what ConnectionEstablished began.
func (t *Telemetry) ConnectionClosed(transport string) { t.open.add(transport, -1) }

// ConnectFailed counts a Connect command that was answered with an error.
func (t *Telemetry) ConnectFailed(reason string) { t.connectFailures.add(reason, 1) }

// ConnectionRefused counts a connection that a limit of ours turned away.
func (t *Telemetry) ConnectionRefused(reason string) { t.refused.add(reason, 1) }

// ProtocolError counts a connection that was ended because the peer broke the protocol.
func (t *Telemetry) ProtocolError(reason string) { t.protocolErrors.add(reason, 1) }

// KeepAliveTimeout counts an association that was ended because its host fell silent.
func (t *Telemetry) KeepAliveTimeout() { t.keepAliveTimeouts.Add(1) }

// LogDropped counts log messages that were suppressed.
func (t *Telemetry) LogDropped(n int) { t.logDropped.Add(uint64(n)) }

// Reloaded counts a reload of the configuration.
func (t *Telemetry) Reloaded(ok bool) {
	result := "failure"
	if ok {
		result = "success"
	}
	t.reloads.add(result, 1)
}

// SSD is a drive to report on.
type SSD struct {
	Info ssd.Info
	// Healthy returns nil or why the drive cannot serve; it does no I/O. nil: always healthy.
	Healthy func() error
	// Fallback returns nil or why the drive is used in a slower way than wished; nil: never.
	Fallback func() error
	// Stats fills in the drive's counters; it may be called at any time until RemoveSSD. nil: none.
	Stats func(*SSDStats)
}

// SSDStats are a drive's counters since the start.
type SSDStats struct {
	// Completed, Bytes and TimeNS count what the drive completed without error.
	Completed, Bytes, TimeNS [ssd.Ops]int64
	// Errors counts requests that the drive failed; NoSpace those of them for want of space.
	Errors, NoSpace int64
	// InFlight is outstanding at the drive, Queued waits before it.
	InFlight, Queued int64
	// BufferWaits counts commands that had to wait for a buffer; Aborted those taken out of the queue.
	BufferWaits, Aborted int64
}

// SetSSD adds a drive to the report, or replaces the one of that name. While it
// is not healthy, the daemon is not ready.
func (t *Telemetry) SetSSD(s SSD) {
	t.mu.Lock()
	t.ssds[s.Info.Name] = s
	t.mu.Unlock()
	t.health.watch("ssd "+s.Info.Name, s.Healthy)
}

// RemoveSSD takes a drive out of the report.
func (t *Telemetry) RemoveSSD(name string) {
	t.mu.Lock()
	delete(t.ssds, name)
	t.mu.Unlock()
	t.health.watch("ssd "+name, nil)
}

// Subsystem is a subsystem to report on.
type Subsystem struct {
	NQN, Serial, Model string
	Namespaces         []Namespace
}

// Namespace is a namespace to report on.
type Namespace struct {
	NSID            uint32
	SSD, UUID, Type string
	SizeBytes       int64
	BlockSize       int
}

// SetSubsystems replaces the subsystems reported. The slice is not changed afterwards.
func (t *Telemetry) SetSubsystems(s []Subsystem) {
	t.mu.Lock()
	t.subsystems = s
	t.mu.Unlock()
}

// BufferStats are the figures of the memory for data.
type BufferStats struct {
	// TotalBytes is the bound, InUseBytes what is handed out, TakenBytes what has been made resident.
	TotalBytes, InUseBytes, TakenBytes int64
	// Waits counts requests that had to wait for memory.
	Waits uint64
}

// SetBuffers says where the figures of the memory for data come from.
func (t *Telemetry) SetBuffers(f func() BufferStats) {
	t.mu.Lock()
	t.buffers = f
	t.mu.Unlock()
}

func goVersion() string { return runtime.Version() }

// reasons is a counter, or gauge, for each of a few words.
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
