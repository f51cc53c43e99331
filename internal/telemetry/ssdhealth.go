package telemetry

import (
	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
)

// The metrics of what drives say of themselves. Their names are those of the usual exporters of NVMe's SMART log.
var (
	ssdWarning = gauge("jbof_ssd_critical_warning", "1 while the drive warns: spare is below its threshold, the "+
		"temperature is beyond a threshold, reliability is degraded, it is read_only, or the backup of its "+
		"volatile memory has failed; else 0.", "ssd", "warning")
	ssdTemperature = gauge("jbof_ssd_temperature_celsius", "Temperature of the drive.", "ssd")
	ssdTooWarm     = gauge("jbof_ssd_temperature_threshold_celsius", "Temperature from which on the drive is too "+
		"warm, by level: warning or critical.", "ssd", "level")
	ssdSpare      = gauge("jbof_ssd_available_spare_ratio", "Spare capacity that is left, 0 to 1.", "ssd")
	ssdSpareLeast = gauge("jbof_ssd_available_spare_threshold_ratio", "Spare capacity below which the drive "+
		"warns, 0 to 1.", "ssd")
	ssdUsed = gauge("jbof_ssd_percentage_used_ratio", "How much of its life the drive has used, as its maker "+
		"estimates; 1 is all of it, up to 2.55.", "ssd")
	ssdUnitsRead = counter("jbof_ssd_data_units_read_total", "Data that was read from the drive in its life, in "+
		"units of 512,000 bytes.", "ssd")
	ssdUnitsWritten = counter("jbof_ssd_data_units_written_total", "Data that was written to the drive in its "+
		"life, in units of 512,000 bytes.", "ssd")
	ssdPowerCycles = counter("jbof_ssd_power_cycles_total", "Power cycles of the drive in its life.", "ssd")
	ssdPowerOn     = counter("jbof_ssd_power_on_seconds_total", "How long the drive was switched on in its life, in "+
		"whole hours.", "ssd")
	ssdUnsafe = counter("jbof_ssd_unsafe_shutdowns_total", "How often the drive has lost its power without "+
		"having been shut down, in its life.", "ssd")
	ssdMediaErrors = counter("jbof_ssd_media_errors_total", "Errors of its media that the drive has found and "+
		"could not correct, in its life.", "ssd")
	ssdErrorEntries = counter("jbof_ssd_error_log_entries_total", "Entries that the drive has added to its "+
		"error log in its life.", "ssd")
	ssdEvents = counter("jbof_ssd_events_total", "What has happened to the drive since it was opened, by type: what "+
		"it has reported of its own accord (error, smart, notice, other), commands that took too long (timeout), and "+
		"resets of its controller (reset).", "ssd", "type")
)

// warningNames are what the bits of a critical warning say.
var warningNames = [...]string{"spare", "temperature", "reliability", "read_only", "backup"}

func healthMetrics() []metric {
	return []metric{ssdWarning, ssdTemperature, ssdTooWarm, ssdSpare, ssdSpareLeast, ssdUsed, ssdUnitsRead,
		ssdUnitsWritten, ssdPowerCycles, ssdPowerOn, ssdUnsafe, ssdMediaErrors, ssdErrorEntries, ssdEvents}
}

// collectHealth puts what a drive says of itself.
func collectHealth(name string, h *ssd.Health, put func(m metric, v float64, labels ...string)) {
	l := &h.SMART
	for bit, warning := range warningNames {
		put(ssdWarning, boolValue(l.CriticalWarning()>>bit&1 != 0), name, warning)
	}
	celsius := func(m metric, kelvin uint16, labels ...string) {
		if kelvin != 0 {
			put(m, float64(nvme.Celsius(kelvin)), labels...)
		}
	}
	celsius(ssdTemperature, l.Temperature(), name)
	celsius(ssdTooWarm, h.WarningKelvin, name, "warning")
	celsius(ssdTooWarm, h.CriticalKelvin, name, "critical")
	put(ssdSpare, float64(l.AvailableSpare())/100, name)
	put(ssdSpareLeast, float64(l.AvailableSpareThreshold())/100, name)
	put(ssdUsed, float64(l.PercentageUsed())/100, name)
	put(ssdPowerOn, l.PowerOnHours().Float64()*3600, name)
	for _, c := range []struct {
		m metric
		v nvme.Uint128
	}{{ssdUnitsRead, l.DataUnitsRead()}, {ssdUnitsWritten, l.DataUnitsWritten()}, {ssdPowerCycles, l.PowerCycles()},
		{ssdUnsafe, l.UnsafeShutdowns()}, {ssdMediaErrors, l.MediaErrors()},
		{ssdErrorEntries, l.ErrorLogEntries()}} {
		put(c.m, c.v.Float64(), name)
	}
	for kind := range ssd.HealthEvents {
		put(ssdEvents, float64(h.Events[kind]), name, kind.String())
	}
}
