package telemetry

import (
	"strings"
	"testing"

	"jbofd/internal/ssd"
)

// What a drive says of itself is exported in the units of its metrics; one that says nothing has no such series.
func TestHealthOfDrives(t *testing.T) {
	tel := full()
	tel.SetSSD(SSD{Info: ssd.Info{Name: "silent"}, Health: func() (ssd.Health, bool) { return ssd.Health{}, false }})
	got := map[string]float64{}
	for _, f := range gather(t, tel) {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetValue())
			}
			got[f.GetName()+" "+strings.Join(labels, " ")] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	for series, want := range map[string]float64{
		"jbof_ssd_critical_warning ssd0 read_only":             1,
		"jbof_ssd_critical_warning ssd0 spare":                 0,
		"jbof_ssd_temperature_celsius ssd0":                    38,
		"jbof_ssd_temperature_threshold_celsius critical ssd0": 80,
		"jbof_ssd_temperature_threshold_celsius warning ssd0":  70,
		"jbof_ssd_available_spare_ratio ssd0":                  0.93,
		"jbof_ssd_available_spare_threshold_ratio ssd0":        0.1,
		"jbof_ssd_percentage_used_ratio ssd0":                  1.2,
		"jbof_ssd_media_errors_total ssd0":                     1<<64 + 3,
		"jbof_ssd_unsafe_shutdowns_total ssd0":                 17,
		"jbof_ssd_events_total ssd0 smart":                     2,
		"jbof_ssd_events_total ssd0 error":                     0,
	} {
		if v, ok := got[series]; !ok || v != want {
			t.Errorf("%s is %v (%v), want %v", series, v, ok, want)
		}
	}
	for series := range got {
		if strings.HasSuffix(series, " silent") &&
			!strings.Contains(series, "_info") && !strings.Contains(series, "_up") &&
			!strings.Contains(series, "_capacity") && !strings.Contains(series, "_fallback") {
			t.Errorf("%s of a drive that says nothing", series)
		}
	}
}
