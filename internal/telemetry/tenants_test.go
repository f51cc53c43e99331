package telemetry

import (
	"fmt"
	"maps"
	"testing"
	"testing/synctest"
	"time"
)

// reads returns the number of reads scraped, by tenant.
func reads(t *testing.T, tel *Telemetry) map[string]float64 {
	t.Helper()
	got := map[string]float64{}
	for _, m := range gather(t, tel)["jbof_io_completed_total"].GetMetric() {
		for _, l := range m.Label {
			if l.GetName() == "tenant" {
				got[l.GetValue()] = m.Counter.GetValue()
			}
		}
	}
	return got
}

// read opens a tenant's series and counts a read.
func (t *Telemetry) read(name string) *Tenant {
	x := t.Tenant(name)
	x.IO("ssd0", "read").Observe(1, 1, 0)
	return x
}

func wantReads(t *testing.T, tel *Telemetry, want map[string]float64) {
	t.Helper()
	if got := reads(t, tel); !maps.Equal(got, want) {
		t.Errorf("reads %v, want %v", got, want)
	}
}

func TestHostsBeyondTheCapAreCountedTogether(t *testing.T) {
	tel := New(Options{MaxTenants: 2})
	for i := range 5 {
		tel.read(fmt.Sprintf("host%d", i))
	}
	tel.read("host0")
	wantReads(t, tel, map[string]float64{"host0": 2, "host1": 1, OtherTenant: 3})
	if n := gather(t, tel)["jbof_tenants_dropped_total"].Metric[0].Counter.GetValue(); n != 3 {
		t.Errorf("dropped %v, want 3", n)
	}
}

// More names than allowed, of connected hosts or not, do not remove a configured tenant's series.
func TestConfiguredTenantsAlwaysHaveSeries(t *testing.T) {
	for _, leave := range []bool{false, true} {
		tel := New(Options{MaxTenants: 10})
		tel.SetTenants([]string{"gold"})
		for i := range 1010 {
			x := tel.read(fmt.Sprintf("invented%d", i))
			if leave {
				x.Close()
			}
		}
		tel.SetTenants([]string{"gold", "silver"})
		tel.read("gold").Close()
		tel.read("silver").Close()
		tel.read("nqn.x").Close()
		got := reads(t, tel)
		if got["gold"] != 1 || got["silver"] != 1 {
			t.Errorf("hosts gone %t: gold %v, silver %v, want 1 each", leave, got["gold"], got["silver"])
		}
		if leave && got["nqn.x"] != 1 {
			t.Errorf("a host finds no room although all others are gone")
		}
		if len(got) > 10+3 {
			t.Errorf("hosts gone %t: %d tenants have series: of at most 10 hosts, two tenants and the others", leave,
				len(got))
		}
	}
}

func TestTheNameUnusedForLongestMakesRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tel := New(Options{MaxTenants: 3})
		a, b, c := tel.read("a"), tel.read("b"), tel.read("c")
		b.Close()
		time.Sleep(time.Second) // virtual
		a.Close()
		tel.read("d")
		wantReads(t, tel, map[string]float64{"a": 1, "c": 1, "d": 1})
		tel.read("a")
		tel.read("e")
		wantReads(t, tel, map[string]float64{"a": 2, "c": 1, "d": 1, OtherTenant: 1})
		c.Close()
		tel.read("e")
		wantReads(t, tel, map[string]float64{"a": 2, "e": 1, "d": 1, OtherTenant: 1})
	})
}

func TestUnusedNamesExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tel := New(Options{})
		tel.SetTenants([]string{"gold"})
		tel.read("gold").Close()
		tel.read("gone").Close()
		tel.read("there")
		time.Sleep(unusedFor - time.Second)
		wantReads(t, tel, map[string]float64{"gold": 1, "gone": 1, "there": 1})
		time.Sleep(2 * time.Second)
		wantReads(t, tel, map[string]float64{"gold": 1, "there": 1})
		tel.SetTenants(nil)
		time.Sleep(unusedFor + time.Second)
		wantReads(t, tel, map[string]float64{"there": 1})
	})
}
