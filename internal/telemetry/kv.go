package telemetry

import "strconv"

// KVStats are the statistics of a key-value namespace at the time of a scrape. Counters start when the namespace is
// opened.
type KVStats struct {
	// Subsystem and NSID identify the namespace.
	Subsystem string
	NSID      uint32
	// Objects is the number of keys, Segments the number of entries in the segment table, and MemoryBytes the memory of
	// table and buffers.
	Objects, Segments, MemoryBytes int64
	// LiveBytes are in use by keys and values, KeyBytes of them by keys, tombstones and identities of writes. FreeBytes
	// are available without compaction.
	LiveBytes, KeyBytes, FreeBytes int64
	// UserBytes counts the bytes of values that users have put. The other fields count the bytes written on their
	// behalf: to the key log, to the value log, by compaction, and by checkpoints.
	UserBytes, KeyLogBytes, ValueLogBytes, MovedBytes, CheckpointBytes int64
	// Compactions counts chunks that compaction has emptied. Checkpoints counts completed checkpoints.
	Compactions, Checkpoints int64
	// ScrubbedBytes counts bytes read in search of damage. DamagedRecords counts damaged records that scrubbing or
	// requests have found.
	ScrubbedBytes, DamagedRecords int64
	// LostHeaders is the number of chunk headers that could not be read when the namespace was opened, BadChunks that
	// of the chunks that are not used because they cannot be read.
	LostHeaders, BadChunks int64
	// Waiting is the number of requests that have not begun.
	Waiting int
	// SwapKeys is the number of keys that are in swap areas now. SwapPuts counts writes to swap areas, including those
	// of deletes. SwapReads counts reads from swap areas. SwapReturned counts keys returned to the namespace's own
	// drive.
	SwapKeys, SwapPuts, SwapReads, SwapReturned int64
	// SwapMoved counts records rewritten within their swap area. SwapRefused counts records for which a swap area had
	// no space. SwapFailures counts failed attempts to return a key, which are repeated.
	SwapMoved, SwapRefused, SwapFailures int64
}

// SwapStats are the statistics of a swap area at the time of a scrape. Counters start when the area is opened.
type SwapStats struct {
	// SSD is the drive that holds the area. Area is its UUID.
	SSD, Area string
	// Up reports that the area could be opened. Otherwise only SizeBytes is valid.
	Up bool
	// UsedBytes of the SizeBytes are in use. WrittenBytes counts the bytes written for Records records.
	SizeBytes, UsedBytes, WrittenBytes, Records int64
	// Refusals counts records for which there was no space. Failures counts failed writes.
	Refusals, Failures int64
}

// SetKV sets the sources of the statistics of key-value namespaces and of swap areas. Without it none are reported.
func (t *Telemetry) SetKV(namespaces func() []KVStats, areas func() []SwapStats) {
	t.mu.Lock()
	t.kv, t.swap = namespaces, areas
	t.mu.Unlock()
}

var (
	kvObjects = gauge("jbof_kv_objects", "Keys in a key-value namespace, without those that are in swap "+
		"areas only.", "subsystem", "nsid")
	kvSegments = gauge("jbof_kv_segments", "Entries of the namespace's segment table, 5 bytes of memory each.",
		"subsystem", "nsid")
	kvMemory = gauge("jbof_kv_memory_bytes", "Memory of the namespace's tables and buffers, without that of the "+
		"keys in swap areas.", "subsystem", "nsid")
	kvLive = gauge("jbof_kv_live_bytes", "Space in use by keys and values.", "subsystem", "nsid")
	kvKeys = gauge("jbof_kv_key_bytes", "Part of the live bytes that is not values: keys, tombstones of Deletes, and "+
		"what is known of writes in case they are repeated. Much more than 40 for each object are tombstones.",
		"subsystem", "nsid")
	kvFree = gauge("jbof_kv_free_bytes", "Space that can be written at once; compaction makes more of what is "+
		"not in use.", "subsystem", "nsid")
	kvWaiting = gauge("jbof_kv_waiting", "Commands that wait for a free request of the store.", "subsystem", "nsid")
	kvUser    = counter("jbof_kv_user_bytes_total", "Bytes of values that hosts have stored.", "subsystem", "nsid")
	kvWritten = counter("jbof_kv_written_bytes_total", "Bytes written to the drive for those values, by purpose: "+
		"keys, values, moved (by compaction), checkpoint.", "subsystem", "nsid", "log")
	kvCompactions = counter("jbof_kv_compactions_total", "Chunks of the logs that compaction has emptied.", "subsystem",
		"nsid")
	kvCheckpoints = counter("jbof_kv_checkpoints_total", "Checkpoints of the segment table.", "subsystem", "nsid")
	kvScrubbed    = counter("jbof_kv_scrubbed_bytes_total", "Bytes read in the background to look for damage.",
		"subsystem", "nsid")
	kvDamaged = counter("jbof_kv_damaged_records_total", "Records that were found damaged: not what had been written.",
		"subsystem", "nsid")
	kvLostHeaders = gauge("jbof_kv_lost_headers", "Chunk headers that could not be read, or were damaged, when the "+
		"namespace was opened; nothing is lost with them.", "subsystem", "nsid")
	kvBadChunks = gauge("jbof_kv_bad_chunks", "Chunks that are not used because they cannot be read.", "subsystem",
		"nsid")

	kvSwapKeys = gauge("jbof_kv_swap_keys", "Keys whose newest values are in swap areas of other drives.",
		"subsystem", "nsid")
	kvSwapPuts = counter("jbof_kv_swap_writes_total", "Stores and Deletes that went to a swap area instead of the "+
		"namespace's own drive.", "subsystem", "nsid")
	kvSwapReads    = counter("jbof_kv_swap_reads_total", "Values read from swap areas.", "subsystem", "nsid")
	kvSwapReturned = counter("jbof_kv_swap_returned_total", "Keys that were returned from swap areas to the "+
		"namespace's own drive.", "subsystem", "nsid")
	kvSwapMoved = counter("jbof_kv_swap_moved_total", "Keys rewritten within their swap area, because its log "+
		"needed the space and the namespace's drive was still congested.", "subsystem", "nsid")
	kvSwapRefused = counter("jbof_kv_swap_refused_total", "Stores and Deletes for which a swap area had no room.",
		"subsystem", "nsid")
	kvSwapFailures = counter("jbof_kv_swap_failures_total", "Failed attempts to return keys from a swap area to the "+
		"namespace's own drive; they are repeated.", "subsystem", "nsid")

	swapUp       = gauge("jbof_kv_swap_area_up", "1 if the swap area could be opened, else 0.", "ssd", "area")
	swapCapacity = gauge("jbof_kv_swap_area_capacity_bytes", "Size of the swap area.", "ssd", "area")
	swapUsed     = gauge("jbof_kv_swap_area_used_bytes", "Part of the swap area's log that is in use.", "ssd", "area")
	swapWritten  = counter("jbof_kv_swap_area_written_bytes_total", "Bytes written to the swap area.", "ssd", "area")
	swapRecords  = counter("jbof_kv_swap_area_records_total", "Records written to the swap area, for namespaces of "+
		"other drives.", "ssd", "area")
	swapRefusals = counter("jbof_kv_swap_area_refusals_total", "Records for which the swap area had no room.", "ssd",
		"area")
	swapFailures = counter("jbof_kv_swap_area_failures_total", "Writes to the swap area that have failed.", "ssd",
		"area")
)

// kvMetrics returns the metric families of this file.
func kvMetrics() []metric {
	return []metric{kvObjects, kvSegments, kvMemory, kvLive, kvKeys, kvFree, kvWaiting, kvUser, kvWritten,
		kvCompactions, kvCheckpoints, kvScrubbed, kvDamaged, kvLostHeaders, kvBadChunks,
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
			{kvObjects, s.Objects}, {kvSegments, s.Segments}, {kvMemory, s.MemoryBytes}, {kvLive, s.LiveBytes},
			{kvKeys, s.KeyBytes}, {kvFree, s.FreeBytes},
			{kvWaiting, int64(s.Waiting)}, {kvUser, s.UserBytes}, {kvCompactions, s.Compactions},
			{kvCheckpoints, s.Checkpoints},
			{kvScrubbed, s.ScrubbedBytes}, {kvDamaged, s.DamagedRecords}, {kvLostHeaders, s.LostHeaders},
			{kvBadChunks, s.BadChunks},
			{kvSwapKeys, s.SwapKeys}, {kvSwapPuts, s.SwapPuts}, {kvSwapReads, s.SwapReads},
			{kvSwapReturned, s.SwapReturned},
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
