package report

import (
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"text/tabwriter"
	"time"

	"jbofd/internal/sim"
)

// processorSeconds is the approximate processor time for a second of virtual time, measured over the whole matrix.
const processorSeconds = 0.2

// Estimate returns approximately how long the simulations of scenarios under so many policies take on this machine.
func Estimate(scenarios []sim.Scenario, policies int) time.Duration {
	return time.Duration(VirtualTime(scenarios, policies).Seconds() * processorSeconds / float64(
		runtime.GOMAXPROCS(0)) * float64(time.Second))
}

// VirtualTime returns the virtual time of the simulations of scenarios under so many policies.
func VirtualTime(scenarios []sim.Scenario, policies int) (total time.Duration) {
	for i := range scenarios {
		total += time.Duration(scenarios[i].EndNS()) * time.Duration(policies)
	}
	return total
}

// Fair is the minimum f-Util of all tenants at which a phase counts as fair.
const Fair = 0.8

// Verdict is the summary of a policy over all phases of all scenarios.
type Verdict struct {
	Policy string
	// Phases counts the measured phases. FairPhases counts those in which every tenant got at least Fair of its share.
	Phases, FairPhases int
	// Worst is the lowest f-Util of all tenants. It occurred in the scenario WorstIn.
	Worst   float64
	WorstIn string
	// Utilisation is the mean of PhaseResult.Utilisation over all phases.
	Utilisation float64
	// Tail is the geometric mean over phases of the ratio of the p99.9 latency to that under policy fifo; 0 without
	// results of fifo. AppTail is the same from the application's request, with the wait at the host.
	Tail, AppTail float64
	// Broken counts violated invariants of the simulation.
	Broken int
}

// Verdicts summarises each policy. The policy with most fair phases comes first.
func Verdicts(results []*sim.Result) []Verdict {
	type phase struct{ scenario, name string }
	fifo := map[phase]*sim.PhaseResult{}
	for _, r := range results {
		for i := range r.Phases {
			if r.Policy == "fifo" {
				fifo[phase{r.Row + "/" + r.Scenario, r.Phases[i].Name}] = &r.Phases[i]
			}
		}
	}
	type sums struct {
		*Verdict
		util          float64
		logs, appLogs float64
		tails         int
	}
	var all []*sums
	for _, r := range results {
		at := slices.IndexFunc(all, func(s *sums) bool { return s.Policy == r.Policy })
		if at < 0 {
			at = len(all)
			all = append(all, &sums{Verdict: &Verdict{Policy: r.Policy, Worst: math.Inf(1)}})
		}
		v := all[at]
		v.Broken += r.ViolationCount
		name := r.Row + "/" + r.Scenario
		for _, p := range r.Phases {
			v.Phases++
			v.util += p.Utilisation
			if p.FUtilMin >= Fair {
				v.FairPhases++
			}
			if p.FUtilMin < v.Worst {
				v.Worst, v.WorstIn = p.FUtilMin, name
			}
			if base := fifo[phase{name, p.Name}]; base != nil && base.Latency.P999NS > 0 && p.Latency.P999NS > 0 {
				v.logs += math.Log(float64(p.Latency.P999NS) / float64(base.Latency.P999NS))
				v.appLogs += math.Log(float64(p.AppLatency.P999NS) / float64(base.AppLatency.P999NS))
				v.tails++
			}
		}
	}
	out := make([]Verdict, 0, len(all))
	for _, v := range all {
		if v.Phases > 0 {
			v.Utilisation = v.util / float64(v.Phases)
		}
		if v.tails > 0 {
			v.Tail, v.AppTail = math.Exp(v.logs/float64(v.tails)), math.Exp(v.appLogs/float64(v.tails))
		}
		out = append(out, *v.Verdict)
	}
	slices.SortStableFunc(out, func(a, b Verdict) int { return b.FairPhases*a.Phases - a.FairPhases*b.Phases })
	return out
}

// WriteVerdicts writes a line for each policy and an explanation of the columns.
func WriteVerdicts(w io.Writer, verdicts []Verdict) error {
	fmt.Fprintf(w, "\nVerdict: fair is a phase in which every tenant gets at least %.1f of its share; p99.9 is by "+
		"that of fifo,\nfrom sending and from the application's request.\n", Fair)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "policy\tfair phases\tworst f-Util\tin\tutilisation\tp99.9\tapp p99.9\tbroken invariants")
	for _, v := range verdicts {
		tail, app := "-", "-"
		if v.Tail > 0 {
			tail, app = fmt.Sprintf("%.2f", v.Tail), fmt.Sprintf("%.2f", v.AppTail)
		}
		fmt.Fprintf(t, "%s\t%d of %d\t%.2f\t%s\t%.2f\t%s\t%s\t%d\n", v.Policy, v.FairPhases, v.Phases, v.Worst,
			v.WorstIn, v.Utilisation, tail, app, v.Broken)
	}
	return t.Flush()
}
