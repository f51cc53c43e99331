package admin

import (
	"time"

	"jbofd/internal/ssd"
)

// Health is what a drive says of itself: its SMART / Health Information log (NVMe Base 2.0, section 5.16.1.3). The
// names and units are those of nvme smart-log -o json.
type Health struct {
	CriticalWarning uint8 `json:"critical_warning"`
	// Temperature is in kelvin.
	Temperature uint16 `json:"temperature"`
	// AvailableSpare, SpareThreshold and PercentUsed are in percent.
	AvailableSpare uint8 `json:"avail_spare"`
	SpareThreshold uint8 `json:"spare_thresh"`
	PercentUsed    uint8 `json:"percent_used"`
	// DataUnitsRead and DataUnitsWritten count 512,000 bytes.
	DataUnitsRead    uint64 `json:"data_units_read"`
	DataUnitsWritten uint64 `json:"data_units_written"`
	HostReads        uint64 `json:"host_read_commands"`
	HostWrites       uint64 `json:"host_write_commands"`
	// ControllerBusyTime, WarningTempTime and CriticalTempTime are in minutes.
	ControllerBusyTime uint64 `json:"controller_busy_time"`
	PowerCycles        uint64 `json:"power_cycles"`
	PowerOnHours       uint64 `json:"power_on_hours"`
	UnsafeShutdowns    uint64 `json:"unsafe_shutdowns"`
	MediaErrors        uint64 `json:"media_errors"`
	ErrorLogEntries    uint64 `json:"num_err_log_entries"`
	WarningTempTime    uint32 `json:"warning_temp_time"`
	CriticalTempTime   uint32 `json:"critical_comp_time"`
	// WarningTemperature and CriticalTemperature are from where on it is too warm, in kelvin; 0: it does not say.
	WarningTemperature  uint16 `json:"warning_temperature"`
	CriticalTemperature uint16 `json:"critical_temperature"`
	// Read is when the drive has said this.
	Read time.Time `json:"read"`
}

// NewHealth returns the health of a drive.
func NewHealth(h *ssd.Health) *Health {
	l := &h.SMART
	return &Health{CriticalWarning: l.CriticalWarning(), Temperature: l.Temperature(),
		AvailableSpare: l.AvailableSpare(), SpareThreshold: l.AvailableSpareThreshold(),
		PercentUsed: l.PercentageUsed(), DataUnitsRead: l.DataUnitsRead().Uint64(),
		DataUnitsWritten: l.DataUnitsWritten().Uint64(), HostReads: l.HostReads().Uint64(),
		HostWrites: l.HostWrites().Uint64(), ControllerBusyTime: l.ControllerBusyTime().Uint64(),
		PowerCycles: l.PowerCycles().Uint64(), PowerOnHours: l.PowerOnHours().Uint64(),
		UnsafeShutdowns: l.UnsafeShutdowns().Uint64(), MediaErrors: l.MediaErrors().Uint64(),
		ErrorLogEntries: l.ErrorLogEntries().Uint64(), WarningTempTime: l.WarningTempTime(),
		CriticalTempTime: l.CriticalTempTime(), WarningTemperature: h.WarningKelvin,
		CriticalTemperature: h.CriticalKelvin, Read: h.At.UTC()}
}
