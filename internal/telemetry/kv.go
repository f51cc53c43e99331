package telemetry

import "strconv"

// KVStats are figures of a key-value namespace at the moment of a scrape. Counters count since it was
// opened.
type KVStats struct {
	// Subsystem and NSID name the namespace.
	Subsystem string
	NSID      uint32
	// Objects are the keys in it, Segments the entries of its table, MemoryBytes what both table and buffers take.
	Objects, Segments, MemoryBytes int64
	// LiveBytes are in use by keys and values, FreeBytes are free at once.
	LiveBytes, FreeBytes int64
	// UserBytes are the values that were put; the others were written for them: to the key log, to the value log,
	// by compaction, and by checkpoints.
	UserBytes, KeyLogBytes, ValueLogBytes, MovedBytes, CheckpointBytes int64
	// Compactions are chunks emptied, Checkpoints those completed.
	Compactions, Checkpoints int64
	// ScrubbedBytes were read to look for damage, DamagedRecords found by that or by requests.
	ScrubbedBytes, DamagedRecords int64
	// Waiting requests have not begun.
	Waiting int
}

// SetKV says where the figures of key-value namespaces come from; without, there are none.
func (t *Telemetry) SetKV(f func() []KVStats) {
	t.mu.Lock()
	t.kv = f
	t.mu.Unlock()
}

var (
	kvObjects     = gauge("jbof_kv_objects", "Keys in a key-value namespace.", "subsystem", "nsid")
	kvSegments    = gauge("jbof_kv_segments", "Entries of its segment table, 5 bytes of memory each.", "subsystem", "nsid")
	kvMemory      = gauge("jbof_kv_memory_bytes", "Memory of its segment table and buffers.", "subsystem", "nsid")
	kvLive        = gauge("jbof_kv_live_bytes", "Space in use by keys and values.", "subsystem", "nsid")
	kvFree        = gauge("jbof_kv_free_bytes", "Space that can be written at once; compaction makes more of what is not in use.", "subsystem", "nsid")
	kvWaiting     = gauge("jbof_kv_waiting", "Commands that wait for the store to begin them.", "subsystem", "nsid")
	kvUser        = counter("jbof_kv_user_bytes_total", "Bytes of values that hosts have stored.", "subsystem", "nsid")
	kvWritten     = counter("jbof_kv_written_bytes_total", "Bytes written to the drive for them, by what for: keys, values, moved by compaction, checkpoint.", "subsystem", "nsid", "log")
	kvCompactions = counter("jbof_kv_compactions_total", "Chunks of the logs that compaction has emptied.", "subsystem", "nsid")
	kvCheckpoints = counter("jbof_kv_checkpoints_total", "Checkpoints of the segment table.", "subsystem", "nsid")
	kvScrubbed    = counter("jbof_kv_scrubbed_bytes_total", "Bytes read in the background to look for damage.", "subsystem", "nsid")
	kvDamaged     = counter("jbof_kv_damaged_records_total", "Records that were not what had been written.", "subsystem", "nsid")
)

// kvMetrics are the families of this file.
func kvMetrics() []metric {
	return []metric{kvObjects, kvSegments, kvMemory, kvLive, kvFree, kvWaiting, kvUser, kvWritten, kvCompactions, kvCheckpoints, kvScrubbed, kvDamaged}
}

func collectKV(all []KVStats, put func(m metric, v float64, labels ...string)) {
	for _, s := range all {
		nsid := strconv.FormatUint(uint64(s.NSID), 10)
		for _, v := range []struct {
			m metric
			v int64
		}{
			{kvObjects, s.Objects}, {kvSegments, s.Segments}, {kvMemory, s.MemoryBytes}, {kvLive, s.LiveBytes}, {kvFree, s.FreeBytes},
			{kvWaiting, int64(s.Waiting)}, {kvUser, s.UserBytes}, {kvCompactions, s.Compactions}, {kvCheckpoints, s.Checkpoints},
			{kvScrubbed, s.ScrubbedBytes}, {kvDamaged, s.DamagedRecords},
		} {
			put(v.m, float64(v.v), s.Subsystem, nsid)
		}
		put(kvWritten, float64(s.KeyLogBytes), s.Subsystem, nsid, "keys")
		put(kvWritten, float64(s.ValueLogBytes), s.Subsystem, nsid, "values")
		put(kvWritten, float64(s.MovedBytes), s.Subsystem, nsid, "moved")
		put(kvWritten, float64(s.CheckpointBytes), s.Subsystem, nsid, "checkpoint")
	}
}
