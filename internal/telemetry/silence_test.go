package telemetry

import (
	"encoding/json"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"jbofd/internal/ssd"
)

// TestADriveThatCompletesNothingIsDegraded, and the daemon is ready all the same. It takes what it completes or fails
// for an answer, and neither a drive without requests nor a process that was stopped is taken for a silent one.
func TestADriveThatCompletesNothingIsDegraded(t *testing.T) {
	tel := New(Options{})
	tel.Health().Clear("daemon")
	var st SSDStats
	tel.SetSSD(SSD{Info: ssd.Info{Name: "ssd0"}, Stats: func(s *SSDStats) { *s = st }})
	tel.SetSSD(SSD{Info: ssd.Info{Name: "left out"}})
	now := time.Unix(1000, 0)
	silent := false
	// look looks at the drives for so many seconds.
	look := func(what string, seconds int, want bool) {
		t.Helper()
		for range seconds {
			now = now.Add(time.Second)
			begun, ended := tel.LookAtDrives(now)
			switch {
			case slices.Equal(begun, []string{"ssd0"}) && !silent:
				silent = true
			case slices.Equal(ended, []string{"ssd0"}) && silent:
				silent = false
			case len(begun)+len(ended) > 0:
				t.Errorf("%s: %v are silent, %v answer", what, begun, ended)
			}
		}
		if silent != want || len(tel.Degraded()) > 0 != want {
			t.Errorf("%s: silent %t, degraded %v", what, silent, tel.Degraded())
		}
		rec := httptest.NewRecorder()
		tel.Handler(false).ServeHTTP(rec, httptest.NewRequest("GET", "/readyz", nil))
		var got struct {
			Ready    bool
			Degraded []Reason
		}
		if err := json.Unmarshal(rec.Body.Bytes(), &got); err != nil || rec.Code != 200 || !got.Ready ||
			len(got.Degraded) > 0 != want {
			t.Errorf("%s: %d %s", what, rec.Code, rec.Body)
		}
	}
	look("it has nothing to do", 20, false)
	st.InFlight = 3
	look("it has had requests for a while", 7, false)
	look("for too long", 1, true)
	if r := tel.Degraded(); r[0].Component != "ssd ssd0" || !strings.Contains(r[0].Reason, "completed none for 7s") {
		t.Errorf("%v", r)
	}
	rec := httptest.NewRecorder()
	tel.Handler(false).ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	if want := `jbof_ssd_silent_seconds{ssd="ssd0"} 7` + "\n"; !strings.Contains(rec.Body.String(), want) {
		t.Errorf("the metrics lack %s", want)
	}
	st.Completed[ssd.Write]++
	look("it has completed one", 1, false)
	look("and no other", 8, true)
	st.Errors++
	look("it has failed one", 5, false)
	look("and no other", 5, true)
	st.InFlight = 0
	look("nothing is left", 1, false)
	st.InFlight = 1
	look("it has another one", 6, false)
	now = now.Add(time.Hour) // the process was stopped
	look("which it had no time to complete", 6, false)
	for range 20 {
		st.Completed[ssd.Read]++
		look("it works", 1, false)
	}
	look("it does not", 8, true)
	tel.SetSSD(SSD{Info: ssd.Info{Name: "ssd0"}}) // it is taken out of service
	if r := tel.Degraded(); len(r) > 0 {
		t.Errorf("not in service: %v", r)
	}
	silent = false
	tel.SetSSD(SSD{Info: ssd.Info{Name: "ssd0"}, Stats: func(s *SSDStats) { *s = st }})
	look("another one in its place", 7, false)
	look("which answers nothing either", 1, true)
	tel.RemoveSSD("ssd0")
	if r := tel.Degraded(); len(r) > 0 {
		t.Errorf("after its removal: %v", r)
	}
}
