package telemetry

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"jbofd/internal/ssd"
)

// metric is the description of a metric family.
type metric struct {
	desc *prometheus.Desc
	name string
	kind prometheus.ValueType
	help string
	// labels are the label names in the order of the values.
	labels []string
}

func newMetric(kind prometheus.ValueType, name, help string, labels ...string) metric {
	return metric{prometheus.NewDesc(name, help, labels, nil), name, kind, help, labels}
}

func counter(name, help string, labels ...string) metric {
	return newMetric(prometheus.CounterValue, name, help, labels...)
}

func gauge(name, help string, labels ...string) metric {
	return newMetric(prometheus.GaugeValue, name, help, labels...)
}

// The metric families. A test checks that docs/operations.md lists all of them.
var (
	buildInfo = gauge("jbof_build_info", "What this daemon was built from; always 1.", "version", "commit", "goversion")
	nodeInfo  = gauge("jbof_node_info", "The node's name; always 1.", "node")
	ready     = gauge("jbof_ready", "1 while /readyz answers that the node is ready, else 0.")

	ioCompleted = counter("jbof_io_completed_total", "I/O commands completed, failed ones included.", "tenant", "ssd",
		"op")
	ioBytes    = counter("jbof_io_bytes_total", "Bytes that completed I/O commands moved.", "tenant", "ssd", "op")
	ioDuration = newMetric(prometheus.UntypedValue, "jbof_io_duration_seconds",
		"Time from an I/O command's arrival to its completion.", "tenant", "ssd", "op")
	ioErrors = counter("jbof_io_errors_total", "Commands completed with an error, by NVMe status code type and "+
		"status code.", "tenant", "sct", "sc")

	connections = gauge("jbof_connections", "Connections (queue pairs) established now.", "transport")
	established = counter("jbof_connection_established_total", "Connections whose Connect command succeeded.",
		"transport")
	connectFailed = counter("jbof_connect_failures_total", "Connect commands answered with an error.", "reason")
	connRefused   = counter("jbof_connections_refused_total", "Connections refused before a Connect command, by "+
		"reason: a limit of the configuration, or resources.", "reason")
	keepAlive = counter("jbof_keepalive_timeouts_total", "Associations ended because their keep alive timeout "+
		"passed.")
	unreported = counter("jbof_unreported_write_failures_total", "Writes that a drive or store has failed after their "+
		"connection had ended, so that no host was told.")
	protocolErrors = counter("jbof_protocol_errors_total", "Connections ended because the peer broke the protocol.",
		"reason")

	ssdInfo = gauge("jbof_ssd_info", "What a drive is; always 1.", "ssd", "backend", "engine", "path", "model",
		"serial")
	ssdUp       = gauge("jbof_ssd_up", "1 while the drive can serve, else 0.", "ssd")
	ssdFallback = gauge("jbof_ssd_io_fallback", "1 while the drive uses a slower I/O path than configured or "+
		"possible: io_uring was refused or the file system is not fit for it, or memory could not be registered; "+
		"else 0.", "ssd")
	ssdCapacity = gauge("jbof_ssd_capacity_bytes", "Capacity of the drive.", "ssd")
	ssdNow      = gauge("jbof_ssd_io_now", "Requests outstanding at the drive.", "ssd")
	ssdQueued   = gauge("jbof_ssd_io_queued", "Commands that wait in the pipeline before the drive.", "ssd")
	ssdSilent   = gauge("jbof_ssd_silent_seconds", "For how long the drive has had requests and completed none.", "ssd")
	ssdErrors   = counter("jbof_ssd_errors_total", "Requests that the drive failed.", "ssd")
	ssdNoSpace  = counter("jbof_ssd_no_space_errors_total", "Requests that failed because the file system or thin "+
		"volume under the drive is full.", "ssd")
	ssdBufferWaits = counter("jbof_ssd_buffer_waits_total", "Commands that waited for a data buffer.", "ssd")
	ssdAborted     = counter("jbof_ssd_aborted_total", "Commands aborted while they waited in the pipeline before "+
		"the drive.", "ssd")

	subsystemInfo = gauge("jbof_subsystem_info", "What a subsystem is; always 1.", "subsystem", "serial", "model")
	namespaceInfo = gauge("jbof_namespace_info", "What a namespace is and on which drive; always 1.", "subsystem",
		"nsid", "ssd", "uuid", "type", "block_size")
	namespaceCapacity = gauge("jbof_namespace_capacity_bytes", "Capacity of the namespace.", "subsystem", "nsid")

	bufferBytes = gauge("jbof_buffer_pool_bytes", "Data buffers by state: used by commands, or free up to "+
		"limits.buffers.", "state")
	bufferTaken = gauge("jbof_buffer_pool_resident_bytes", "Memory that was made accessible since the start for "+
		"data buffers, and for those of jbof_buffer_arena_bytes: the process holds at most that for them, and less "+
		"where nothing was written yet.")
	bufferArena = gauge("jbof_buffer_arena_bytes", "Memory for the buffers of key-value stores and swap areas, beside "+
		"jbof_buffer_pool_bytes.")
	bufferWaits = counter("jbof_buffer_pool_waits_total", "Requests for data buffers that had to wait.")

	logDropped     = counter("jbof_log_messages_dropped_total", "Log lines suppressed by rate limits.")
	tenantsDropped = counter("jbof_tenants_dropped_total", "Times that a tenant without series of its own was counted "+
		"as tenant \"other\".")
	configReloads = counter("jbof_config_reloads_total", "Reloads of the configuration, by result: success, or "+
		"failure if it was refused.", "result")
	configOK = gauge("jbof_config_last_reload_successful", "1 if the last reload of the configuration took effect, "+
		"or there was none; 0 if it was refused.")
	configTime = gauge("jbof_config_last_reload_success_timestamp_seconds",
		"When the configuration in force was loaded, in Unix time.")
)

// deviceMetrics holds the drive's counters by ssd.Op, named as node_exporter names them. Operations without such a name
// are left out.
var deviceMetrics = [ssd.Ops]struct{ completed, bytes, time *metric }{
	ssd.Read: {
		perSSD("jbof_ssd_reads_completed_total", "Reads the drive completed."),
		perSSD("jbof_ssd_read_bytes_total", "Bytes read from the drive."),
		perSSD("jbof_ssd_read_time_seconds_total", "Time that reads spent at the drive, added up.")},
	ssd.Write: {
		perSSD("jbof_ssd_writes_completed_total", "Writes the drive completed."),
		perSSD("jbof_ssd_written_bytes_total", "Bytes written to the drive."),
		perSSD("jbof_ssd_write_time_seconds_total", "Time that writes spent at the drive, added up.")},
	ssd.Flush: {
		perSSD("jbof_ssd_flush_requests_total", "Flushes the drive completed."), nil,
		perSSD("jbof_ssd_flush_requests_time_seconds_total", "Time that flushes spent at the drive, added up.")},
	ssd.Deallocate: {
		perSSD("jbof_ssd_discards_completed_total", "Deallocations the drive completed."),
		perSSD("jbof_ssd_discarded_bytes_total", "Bytes deallocated on the drive."),
		perSSD("jbof_ssd_discard_time_seconds_total", "Time that deallocations spent at the drive, added up.")},
	ssd.WriteZeroes: {
		perSSD("jbof_ssd_write_zeroes_completed_total", "Write-zeroes requests the drive completed."),
		perSSD("jbof_ssd_zeroed_bytes_total", "Bytes zeroed on the drive."),
		perSSD("jbof_ssd_write_zeroes_time_seconds_total", "Time that write-zeroes requests spent at the drive, "+
			"added up.")},
}

func perSSD(name, help string) *metric {
	m := counter(name, help, "ssd")
	return &m
}

// metrics returns the descriptions of all families.
func metrics() []metric {
	all := []metric{
		buildInfo, nodeInfo, ready, ioCompleted, ioBytes, ioDuration, ioErrors,
		connections, established, connectFailed, connRefused, keepAlive, unreported, protocolErrors,
		ssdInfo, ssdUp, ssdFallback, ssdCapacity, ssdNow, ssdQueued, ssdSilent, ssdErrors, ssdNoSpace,
		ssdBufferWaits, ssdAborted,
	}
	for _, d := range deviceMetrics {
		for _, m := range []*metric{d.completed, d.bytes, d.time} {
			if m != nil {
				all = append(all, *m)
			}
		}
	}
	all = append(all, healthMetrics()...)
	all = append(all, schedulerMetrics()...)
	all = append(all, rdmaMetrics()...)
	all = append(all, kvMetrics()...)
	all = append(all, clusterMetrics()...)
	return append(all, subsystemInfo, namespaceInfo, namespaceCapacity, bufferBytes, bufferTaken, bufferArena,
		bufferWaits,
		logDropped, tenantsDropped, configReloads, configOK, configTime)
}

// collector converts a Telemetry to Prometheus metrics during a scrape.
type collector struct{ t *Telemetry }

func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range metrics() {
		ch <- m.desc
	}
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	t := c.t
	put := func(m metric, v float64, labels ...string) {
		for i, l := range labels {
			labels[i] = strings.ToValidUTF8(l, "\uFFFD")
		}
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, v, labels...)
	}
	words := func(m metric, r *reasons) {
		r.each(func(word string, n int64) { put(m, float64(n), word) })
	}
	put(buildInfo, 1, t.opts.Version, t.opts.Commit, goVersion())
	put(nodeInfo, 1, t.opts.Node)
	put(ready, boolValue(t.health.Ready()))
	words(connections, &t.open)
	words(established, &t.established)
	words(connectFailed, &t.connectFailures)
	words(connRefused, &t.refused)
	words(protocolErrors, &t.protocolErrors)
	words(configReloads, &t.reloads)
	put(configOK, boolValue(!t.reloadFailed.Load()))
	put(configTime, float64(t.loadedAtNS.Load())/1e9)
	put(keepAlive, float64(t.keepAliveTimeouts.Load()))
	put(unreported, float64(t.unreported.Load()))
	put(logDropped, float64(t.logDropped.Load()))
	put(tenantsDropped, float64(t.tenantsOther.Load()))

	// Copy the state that mu guards, so that neither a slow scraper nor the functions called below delay a connection
	// that requests its series.
	type ioSeries struct {
		tenant string
		ioKey
		s *IOSeries
	}
	type errorSeries struct {
		tenant string
		s      *ErrorSeries
	}
	t.mu.Lock()
	t.expire(time.Now())
	var io []ioSeries
	errs := make([]errorSeries, 0, len(t.tenants))
	for name, x := range t.tenants {
		for k, s := range x.io {
			io = append(io, ioSeries{name, k, s})
		}
		errs = append(errs, errorSeries{name, &x.errors})
	}
	drives := make([]SSD, 0, len(t.ssds))
	silent := make(map[string]float64, len(t.ssds))
	for name, s := range t.ssds {
		drives = append(drives, s)
		silent[name] = t.silence[name].lasted().Seconds()
	}
	subsystems, buffers, scheduling, rdma, kv, swap := t.subsystems, t.buffers, t.scheduling, t.rdma, t.kv, t.swap
	cluster := t.cluster
	t.mu.Unlock()

	for _, s := range io {
		count, sum, le := s.s.histogram()
		if count == 0 && s.op != "read" && s.op != "write" {
			// Most tenants never use every operation, so unused series are left out. Reads and writes are reported from
			// the tenant's first connection on, so that rate() sees the first of them.
			continue
		}
		put(ioCompleted, float64(count), s.tenant, s.ssd, s.op)
		put(ioBytes, float64(s.s.Bytes()), s.tenant, s.ssd, s.op)
		ch <- prometheus.MustNewConstHistogram(ioDuration.desc, count, sum, le, s.tenant, s.ssd, s.op)
	}
	for _, e := range errs {
		e.s.each(func(sct, sc uint8, n uint64) {
			put(ioErrors, float64(n), e.tenant, fmt.Sprintf("%#x", sct), fmt.Sprintf("%#02x", sc))
		})
	}
	for _, s := range drives {
		collectSSD(s, put)
		if s.Stats != nil {
			put(ssdSilent, silent[s.Info.Name], s.Info.Name)
		}
	}
	if scheduling != nil {
		collectScheduling(t, scheduling(), put, ch)
	}
	for _, s := range subsystems {
		put(subsystemInfo, 1, s.NQN, s.Serial, s.Model)
		for _, n := range s.Namespaces {
			nsid := strconv.FormatUint(uint64(n.NSID), 10)
			put(namespaceInfo, 1, s.NQN, nsid, n.SSD, n.UUID, n.Type, strconv.Itoa(n.BlockSize))
			put(namespaceCapacity, float64(n.SizeBytes), s.NQN, nsid)
		}
	}
	if buffers != nil {
		b := buffers()
		put(bufferBytes, float64(b.InUseBytes), "used")
		put(bufferBytes, float64(b.TotalBytes-b.InUseBytes), "free")
		put(bufferTaken, float64(b.TakenBytes))
		put(bufferArena, float64(b.ArenaBytes))
		put(bufferWaits, float64(b.Waits))
	}
	if rdma != nil {
		collectRDMA(rdma(), put)
	}
	if kv != nil {
		collectKV(kv(), put)
	}
	if swap != nil {
		collectSwap(swap(), put)
	}
	if cluster != nil {
		collectCluster(cluster(), &t.peers, put, ch)
	}
}

func collectSSD(s SSD, put func(m metric, v float64, labels ...string)) {
	i := s.Info
	put(ssdInfo, 1, i.Name, i.Backend, i.Engine, i.Path, i.Model, i.Serial)
	put(ssdCapacity, float64(i.SizeBytes), i.Name)
	put(ssdUp, boolValue(s.Healthy == nil || s.Healthy() == nil), i.Name)
	put(ssdFallback, boolValue(s.Fallback != nil && s.Fallback() != nil), i.Name)
	if s.Health != nil {
		if h, ok := s.Health(); ok {
			collectHealth(i.Name, &h, put)
		}
	}
	if s.Stats == nil {
		return
	}
	var st SSDStats
	s.Stats(&st)
	put(ssdNow, float64(st.InFlight), i.Name)
	put(ssdQueued, float64(st.Queued), i.Name)
	put(ssdErrors, float64(st.Errors), i.Name)
	put(ssdNoSpace, float64(st.NoSpace), i.Name)
	put(ssdBufferWaits, float64(st.BufferWaits), i.Name)
	put(ssdAborted, float64(st.Aborted), i.Name)
	for op, d := range deviceMetrics {
		if d.completed != nil {
			put(*d.completed, float64(st.Completed[op]), i.Name)
		}
		if d.bytes != nil {
			put(*d.bytes, float64(st.Bytes[op]), i.Name)
		}
		if d.time != nil {
			put(*d.time, float64(st.TimeNS[op])/1e9, i.Name)
		}
	}
}

func boolValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
