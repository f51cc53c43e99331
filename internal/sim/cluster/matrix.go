package cluster

import (
	"fmt"

	"jbofd/internal/flowctl"
)

// Drives of Matrix: small, and slower than their preset, so that a run takes seconds. What counts are the ratios
// between runs.
const (
	Preset     = "dct983"
	DriveBytes = 64 << 20
	Slowdown   = 10
)

// Matrix returns the scenarios: those of the paper's figures in which several boxes take part, and one hot key.
func Matrix(seed uint64) (all []Scenario) {
	base := Scenario{Nodes: 3, Replicas: 3, Ranges: 32, Records: 20_000, ValueBytes: 1024, Reads: 1, Theta: 0.99,
		Hosts: 8, Depth: 32, NetworkNS: 10_000, WarmNS: 3e8, MeasuredNS: 1e9, Seed: seed}
	add := func(row, name, figure string, change func(s *Scenario)) {
		s := base
		s.Row, s.Name, s.Figure = row, name, figure
		change(&s)
		all = append(all, s)
	}
	for _, depth := range []int{1, 4, 16, 64} {
		add("load", fmt.Sprintf("B-%d", depth*base.Hosts), "6", func(s *Scenario) { s.Reads, s.Depth = 0.95, depth })
	}
	for _, ranges := range []int{1, 32} {
		for _, theta := range []float64{0.9, 0.95, 0.99} {
			for _, tail := range []bool{true, false} {
				name := fmt.Sprintf("C-zipf%v-%d-chains", theta, ranges)
				if ranges == 1 {
					name = fmt.Sprintf("C-zipf%v-1-chain", theta)
				}
				add("crrs", name+onOff(tail, "-tail"), "7", func(s *Scenario) {
					s.Theta, s.Ranges, s.ReadTail = theta, ranges, tail
				})
			}
		}
	}
	for _, w := range []struct {
		name  string
		reads float64
	}{{"B", 0.95}, {"C", 1}} {
		for _, inTurn := range []bool{true, false} {
			add("tokens", w.name+onOff(inTurn, "-in-turn"), "8", func(s *Scenario) {
				if s.Reads = w.reads; inTurn {
					s.NoTokens, s.Choice = true, flowctl.InTurn
				}
			})
		}
	}
	for _, w := range []struct {
		name  string
		reads float64
	}{{"B", 0.95}, {"C", 1}} {
		for _, off := range []bool{true, false} {
			add("overload", w.name+onOff(off, "-off"), "8", func(s *Scenario) {
				s.Nodes, s.Ranges, s.Depth, s.Reads = 12, 64, 256, w.reads
				if off {
					s.NoTokens, s.Choice, s.FIFO = true, flowctl.InTurn, true
				}
			})
		}
	}
	for _, w := range []struct {
		name  string
		reads float64
	}{{"A", 0.5}, {"B", 0.95}} {
		for _, e := range []Event{Join, Leave, Die} {
			add("change", w.name+"-"+string(e), "9", func(s *Scenario) {
				s.Nodes, s.Reads, s.Event = 4, w.reads, e
				s.AgeNS, s.WarmNS = 4e9, 1e9
				s.MeasuredNS, s.BinNS, s.AtNS = 12e9, 5e8, 2e9 // until there are all copies, and some seconds more
			})
		}
	}
	for _, locked := range []bool{true, false} {
		add("hot-key", "writes"+onOff(locked, "-locked"), "", func(s *Scenario) {
			s.OneKey, s.Reads, s.Locked, s.Ranges, s.Depth = true, 0, locked, 1, 8
		})
	}
	return all
}

func onOff(on bool, suffix string) string {
	if on {
		return suffix
	}
	return ""
}

// String is row/name.
func (sc *Scenario) String() string { return sc.Row + "/" + sc.Name }

// baseline is the name of the scenario with which another one of its row is compared: without what it shows. Empty: it
// is one itself, or there is none.
func (sc *Scenario) baseline() string {
	switch {
	case sc.Row == "crrs" && !sc.ReadTail:
		return sc.Name + "-tail"
	case sc.Row == "tokens" && sc.Choice != flowctl.InTurn:
		return sc.Name + "-in-turn"
	case sc.Row == "overload" && !sc.FIFO:
		return sc.Name + "-off"
	case sc.Row == "hot-key" && !sc.Locked:
		return sc.Name + "-locked"
	}
	return ""
}

// Verdict compares a run with what is wanted.
type Verdict struct {
	What string `json:"what"`
	// Wanted says what is, Measured what was. Paper is what the paper reports, for other hardware.
	Wanted   string `json:"wanted"`
	Measured string `json:"measured"`
	Paper    string `json:"paper,omitempty"`
	Met      bool   `json:"met"`
}

// paper has what LEED's evaluation reports: figures 7 and 8 are what the method gains, figure 9 is what is left.
var paper = map[string]string{
	"crrs/0.9": "7.3 times, p99.9 -94 %", "crrs/0.95": "5.1 times, p99.9 -96 %", "crrs/0.99": "4.2 times, p99.9 -64 %",
	"tokens/B": "+52 %, p99.9 -34 %", "overload/B": "+52 %, p99.9 -34 %",
	"change/A-join": "51 %", "change/B-join": "84 %", "change/A-leave": "34 %",
	"change/B-leave": "56 %",
}

// Verdicts compares results with what is wanted of them.
func Verdicts(results []*Result) (out []Verdict) {
	byName := map[string]*Result{}
	for _, r := range results {
		byName[r.Scenario.String()] = r
	}
	for _, r := range results {
		sc := &r.Scenario
		base := byName[sc.Row+"/"+sc.baseline()]
		v := Verdict{What: sc.String()}
		switch {
		case sc.Row == "crrs" && base != nil:
			gain, tail := r.OpsPerSec/base.OpsPerSec, change(r.Reads.P999NS, base.Reads.P999NS)
			v.Wanted, v.Paper = "2.5 times, p99.9 -50 %", paper[fmt.Sprintf("crrs/%v", sc.Theta)]
			v.Measured, v.Met = fmt.Sprintf("%.2f times, p99.9 %+.0f %%", gain, tail), gain >= 2.5 && tail <= -50
		case (sc.Row == "tokens" || sc.Row == "overload") && base != nil:
			gain, tail := 100*r.OpsPerSec/base.OpsPerSec-100, change(r.Reads.P999NS, base.Reads.P999NS)
			v.Wanted, v.Paper = "+40 %, p99.9 -30 %", paper[sc.String()]
			v.Measured, v.Met = fmt.Sprintf("%+.0f %%, p99.9 %+.0f %%", gain, tail), gain >= 40 && tail <= -30
		case sc.Row == "hot-key" && base != nil:
			gain := r.OpsPerSec / base.OpsPerSec
			v.Wanted, v.Measured, v.Met = "5 times", fmt.Sprintf("%.1f times", gain), gain >= 5
		case sc.Row == "change":
			k := r.kept()
			v.Wanted, v.Paper = "75 % left", paper["change/"+sc.Name]
			v.Measured = fmt.Sprintf("%.0f %% left (%.0f %% in %.1f s), %.0f %% when filled, all copies after %.1f s",
				100*k.least, 100*k.leastBin, float64(sc.BinNS)/1e9, 100*k.last, k.fullS)
			v.Met = k.least >= 0.75
		default:
			continue
		}
		out = append(out, v)
	}
	return out
}

// change is by how many percent a figure differs from another one.
func change(now, before int64) float64 { return 100*float64(now)/float64(max(before, 1)) - 100 }

// kept is the throughput after an Event, by the mean of what was before it: the least of two bins in a row, the least
// of one bin, and the mean from when all copies were there; and after how long they were.
type kept struct{ least, leastBin, last, fullS float64 }

func (r *Result) kept() kept {
	sc := &r.Scenario
	n := int(sc.AtNS / sc.BinNS)
	before, after := r.Series[:n], r.Series[n:int(sc.MeasuredNS/sc.BinNS)]
	k := kept{least: 1, leastBin: 1, fullS: float64(r.FullNS) / 1e9}
	for i := range after {
		k.leastBin = min(k.leastBin, mean(after[i:i+1])/mean(before))
	}
	for i := range max(len(after)-1, 1) {
		k.least = min(k.least, mean(after[i:min(i+2, len(after))])/mean(before))
	}
	full := min(int((r.FullNS+sc.BinNS-1)/sc.BinNS), len(after)-1)
	k.last = mean(after[full:]) / mean(before)
	return k
}

func mean(all []float64) (m float64) {
	for _, v := range all {
		m += v / float64(len(all))
	}
	return m
}
