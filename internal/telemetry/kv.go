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
	// SwapKeys are in swap areas now. SwapPuts, Deletes too, were written there, SwapReads read there, SwapReturned have come home.
	SwapKeys, SwapPuts, SwapReads, SwapReturned int64
	// SwapMoved were written again in their area, SwapRefused found no room, SwapFailures of coming home are tried again.
	SwapMoved, SwapRefused, SwapFailures int64
}

// SwapStats are figures of a swap area at the moment of a scrape. Counters count since it was opened.
type SwapStats struct {
	// SSD is the drive it is on, Area its UUID.
	SSD, Area string
	// Up: it could be opened. Otherwise only SizeBytes is known.
	Up bool
	// UsedBytes of its SizeBytes are in use. WrittenBytes were written for Records.
	SizeBytes, UsedBytes, WrittenBytes, Records int64
	// Refusals are records for which there was no room, Failures writes that have failed.
	Refusals, Failures int64
}

// SetKV says where the figures of key-value namespaces and of swap areas come from; without, there are none.
func (t *Telemetry) SetKV(namespaces func() []KVStats, areas func() []SwapStats) {
	t.mu.Lock()
	t.kv, t.swap = namespaces, areas
	t.mu.Unlock()
}

var (
	kvObjects     = gauge("jbof_kv_objects", "Keys in a key-value namespace, without those that are in swap areas only.", "subsystem", "nsid")
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

	kvSwapKeys     = gauge("jbof_kv_swap_keys", "Keys whose newest values are in swap areas of other drives.", "subsystem", "nsid")
	kvSwapPuts     = counter("jbof_kv_swap_writes_total", "Stores and Deletes that went to a swap area instead of the namespace's own drive.", "subsystem", "nsid")
	kvSwapReads    = counter("jbof_kv_swap_reads_total", "Values read from swap areas.", "subsystem", "nsid")
	kvSwapReturned = counter("jbof_kv_swap_returned_total", "Keys that have come home from swap areas.", "subsystem", "nsid")
	kvSwapMoved    = counter("jbof_kv_swap_moved_total", "Keys written again in their swap area, because the namespace's drive had no time and the area's log must go on.", "subsystem", "nsid")
	kvSwapRefused  = counter("jbof_kv_swap_refused_total", "Stores and Deletes for which a swap area had no room.", "subsystem", "nsid")
	kvSwapFailures = counter("jbof_kv_swap_failures_total", "Attempts of keys to come home from a swap area that have failed; they are repeated.", "subsystem", "nsid")

	swapUp       = gauge("jbof_kv_swap_area_up", "1 if the swap area could be opened, else 0.", "ssd", "area")
	swapCapacity = gauge("jbof_kv_swap_area_capacity_bytes", "Size of the swap area.", "ssd", "area")
	swapUsed     = gauge("jbof_kv_swap_area_used_bytes", "Part of the swap area's log that is in use.", "ssd", "area")
	swapWritten  = counter("jbof_kv_swap_area_written_bytes_total", "Bytes written to the swap area.", "ssd", "area")
	swapRecords  = counter("jbof_kv_swap_area_records_total", "Records written to the swap area, for namespaces of other drives.", "ssd", "area")
	swapRefusals = counter("jbof_kv_swap_area_refusals_total", "Records for which the swap area had no room.", "ssd", "area")
	swapFailures = counter("jbof_kv_swap_area_failures_total", "Writes to the swap area that have failed.", "ssd", "area")
)

// kvMetrics are the families of this file.
func kvMetrics() []metric {
	return []metric{kvObjects, kvSegments, kvMemory, kvLive, kvFree, kvWaiting, kvUser, kvWritten, kvCompactions, kvCheckpoints, kvScrubbed, kvDamaged,
		kvSwapKeys, kvSwapPuts, kvSwapReads, kvSwapReturned, kvSwapMoved, kvSwapRefused, kvSwapFailures,
		swapUp, swapCapacity, swapUsed, swapWritten, swapRecords, swapRefusals, swapFailures}
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
			{kvSwapKeys, s.SwapKeys}, {kvSwapPuts, s.SwapPuts}, {kvSwapReads, s.SwapReads}, {kvSwapReturned, s.SwapReturned},
			{kvSwapMoved, s.SwapMoved}, {kvSwapRefused, s.SwapRefused}, {kvSwapFailures, s.SwapFailures},
		} {
			put(v.m, float64(v.v), s.Subsystem, nsid)
		}
		put(kvWritten, float64(s.KeyLogBytes), s.Subsystem, nsid, "keys")
		put(kvWritten, float64(s.ValueLogBytes), s.Subsystem, nsid, "values")
		put(kvWritten, float64(s.MovedBytes), s.Subsystem, nsid, "moved")
		put(kvWritten, float64(s.CheckpointBytes), s.Subsystem, nsid, "checkpoint")
	}
}

func collectSwap(all []SwapStats, put func(m metric, v float64, labels ...string)) {
	for _, s := range all {
		put(swapCapacity, float64(s.SizeBytes), s.SSD, s.Area)
		if !s.Up {
			put(swapUp, 0, s.SSD, s.Area)
			continue
		}
		put(swapUp, 1, s.SSD, s.Area)
		put(swapUsed, float64(s.UsedBytes), s.SSD, s.Area)
		put(swapWritten, float64(s.WrittenBytes), s.SSD, s.Area)
		put(swapRecords, float64(s.Records), s.SSD, s.Area)
		put(swapRefusals, float64(s.Refusals), s.SSD, s.Area)
		put(swapFailures, float64(s.Failures), s.SSD, s.Area)
	}
}
