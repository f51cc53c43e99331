package sim

import (
	"reflect"
	"testing"

	"jbofd/internal/ssd/model/flash"
)

// busy is a scenario with something of everything, short.
func busy() Scenario {
	s := scenario("test", "busy", flash.Fragmented, join(readers(4, size4K), writers(4, size4K, flash.Fragmented), readers(2, size128K)))
	for _, x := range []Scenario{churn()[0], special()[0]} {
		s.Tenants = append(s.Tenants, x.Tenants[len(x.Tenants)-2:]...)
	}
	s.SizeBytes = 1 << 30
	s.BinNS = binNS
	s.Phases = []Phase{{"steady", 50 * Millisecond, 150 * Millisecond}}
	return s
}

func mustRun(t *testing.T, l *Lab, sc Scenario, policy string) *Result {
	t.Helper()
	res, err := l.Run(sc, policy)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range res.Violations {
		t.Errorf("%v, %s: %s", &sc, policy, v)
	}
	return res
}

func TestASeedDecidesEverything(t *testing.T) {
	for _, policy := range Policies() {
		a, b := mustRun(t, NewLab(7), busy(), policy), mustRun(t, NewLab(7), busy(), policy)
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s: two runs with one seed differ", policy)
		}
		c := mustRun(t, NewLab(8), busy(), policy)
		if c.Seed = a.Seed; reflect.DeepEqual(a, c) {
			t.Errorf("%s: two seeds give the same", policy)
		}
	}
}

func TestEveryIOEndsOnce(t *testing.T) {
	lab := NewLab(1)
	for _, policy := range Policies() {
		res := mustRun(t, lab, busy(), policy)
		if res.Sent != res.Completed+res.Cancelled || res.Completed < 1000 || res.Cancelled == 0 {
			t.Errorf("%s: %d sent, %d completed, %d cancelled", policy, res.Sent, res.Completed, res.Cancelled)
		}
	}
}
