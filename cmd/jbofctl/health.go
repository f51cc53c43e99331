package main

import (
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"jbofd/internal/admin"
)

// smartAnswer is what a drive says of itself.
type smartAnswer struct {
	APIVersion string `json:"apiVersion"`
	Name       string `json:"name,omitempty"`
	Path       string `json:"path,omitempty"`
	admin.Health
}

// smartLog shows the SMART log of a drive, with the names of nvme smart-log.
func (x *cli) smartLog(c *cobra.Command, args []string) error {
	a, err := x.findSSD(c, args[0])
	if err != nil {
		return err
	}
	if a.Health == nil {
		return fmt.Errorf("drive %s (%s) says nothing of its health", args[0], a.Backend)
	}
	h := a.Health
	return x.print(c, smartAnswer{a.APIVersion, a.Name, a.Path, *h}, func(t *tabwriter.Writer) {
		row(t, "critical_warning", warnings(h.CriticalWarning))
		row(t, "temperature", celsius(h.Temperature))
		row(t, "available_spare", percent(h.AvailableSpare))
		row(t, "available_spare_threshold", percent(h.SpareThreshold))
		row(t, "percentage_used", percent(h.PercentUsed))
		row(t, "data_units_read", units(h.DataUnitsRead))
		row(t, "data_units_written", units(h.DataUnitsWritten))
		row(t, "host_read_commands", h.HostReads)
		row(t, "host_write_commands", h.HostWrites)
		row(t, "controller_busy_time", h.ControllerBusyTime)
		row(t, "power_cycles", h.PowerCycles)
		row(t, "power_on_hours", h.PowerOnHours)
		row(t, "unsafe_shutdowns", h.UnsafeShutdowns)
		row(t, "media_errors", h.MediaErrors)
		row(t, "num_err_log_entries", h.ErrorLogEntries)
		row(t, "warning_temperature", celsius(h.WarningTemperature))
		row(t, "warning_temp_time", h.WarningTempTime)
		row(t, "critical_temperature", celsius(h.CriticalTemperature))
		row(t, "critical_comp_time", h.CriticalTempTime)
		row(t, "read", h.Read.Format("2006-01-02T15:04:05Z07:00"))
	})
}

// health is a drive's health in a line; "" if it says nothing.
func health(h *admin.Health) string {
	if h == nil {
		return ""
	}
	return fmt.Sprintf("warnings: %s; %s, spare %s, used %s, media errors %d", warnings(h.CriticalWarning),
		celsius(h.Temperature), percent(h.AvailableSpare), percent(h.PercentUsed), h.MediaErrors)
}

// warnings names the bits of a critical warning.
func warnings(w uint8) string {
	if w == 0 {
		return "0"
	}
	var names []string
	for bit, name := range []string{"spare", "temperature", "reliability", "read_only", "backup"} {
		if w>>bit&1 != 0 {
			names = append(names, name)
		}
	}
	return strings.TrimSpace(fmt.Sprintf("%#x %s", w, strings.Join(names, " ")))
}

// celsius is a temperature that is stated in kelvin; 0 is none.
func celsius(kelvin uint16) string {
	if kelvin == 0 {
		return "unknown"
	}
	return fmt.Sprintf("%d °C", int(kelvin)-273)
}

func percent(v uint8) string { return fmt.Sprintf("%d%%", v) }

// units is a count of 512,000 bytes.
func units(n uint64) string {
	return fmt.Sprintf("%d (%s)", n, size(int64(min(n, 1<<43)*512000)))
}
