package ycsb

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func parse(t *testing.T, text string) (Workload, []string, error) {
	t.Helper()
	p := Properties{}
	if err := p.Read("test", strings.NewReader(text)); err != nil {
		return Workload{}, nil, err
	}
	return p.Workload()
}

func TestPropertiesAreReadAsJavaDoes(t *testing.T) {
	w, warnings, err := parse(t, `
# a comment
! another
recordcount=1000
operationcount : 2000
  threadcount   4
fieldcount=\
   2
fieldlength = 50
requestdistribution=latest
zipfianconstant=1.1
insertorder=ordered
maxexecutiontime=2.5
target=1e4
insertstart=10
insertcount=20
readproportion=0.25
updateproportion=0.25
insertproportion=0.25
readmodifywriteproportion=0.25
scanproportion=0
workload=site.ycsb.workloads.CoreWorkload
readallfields=true
`)
	want := Workload{RecordCount: 1000, InsertStart: 10, InsertCount: 20, OperationCount: 2000,
		MaxExecution: 2500 * time.Millisecond,
		Read:         0.25, Update: 0.25, Insert: 0.25, ReadModifyWrite: 0.25, Distribution: "latest", Theta: 1.1,
		HotData: 0.2, HotOperations: 0.8,
		Ordered: true, Fields: 2, MinField: 50, MaxField: 50, Threads: 4, Target: 1e4}
	if err != nil || len(warnings) > 0 || w != want {
		t.Errorf("%+v, %v, %v; want %+v", w, warnings, err, want)
	}
}

func TestTheLastLineMayEndWithABackslash(t *testing.T) {
	if w, _, err := parse(t, "recordcount=1\\\n0\\"); err != nil || w.RecordCount != 10 {
		t.Errorf("%+v, %v", w, err)
	}
}

func TestAnUnreadableWorkloadFileIsNamed(t *testing.T) {
	err := Properties{}.Read("some file", strings.NewReader("a=b\n"+strings.Repeat("x", 1<<20)))
	if !errors.Is(err, ErrWorkload) || !strings.Contains(err.Error(), "some file:2: ") {
		t.Error(err)
	}
}

func TestDefaultsMatchYCSB(t *testing.T) {
	w, warnings, err := parse(t, "recordcount=5")
	want := Workload{RecordCount: 5, InsertCount: 5, Read: 0.95, Update: 0.05, Distribution: "uniform", Theta: 0.99,
		HotData: 0.2, HotOperations: 0.8,
		Fields: 10, MinField: 100, MaxField: 100, Threads: 1}
	if err != nil || len(warnings) > 0 || w != want {
		t.Errorf("%+v, %v, %v; want %+v", w, warnings, err, want)
	}
}

func TestBadPropertiesNameFieldValueAndAllowed(t *testing.T) {
	for text, want := range map[string][]string{
		"":                    {"recordcount", "missing"},
		"recordcount=many":    {"recordcount", "many", "from 1"},
		"recordcount=0":       {"recordcount", `"0"`},
		"readproportion=1.5":  {"readproportion", "1.5", "from 0 to 1"},
		"readproportion=NaN":  {"readproportion", "NaN"},
		"scanproportion=0.95": {"scanproportion", "0.95", "ordered scans are not offered"},
		"requestdistribution=exponent": {"requestdistribution", "exponent",
			"uniform, zipfian, latest, hotspot"},
		"zipfianconstant=-1":                   {"zipfianconstant", "-1"},
		"insertorder=random":                   {"insertorder", "random", "hashed, ordered"},
		"fieldlengthdistribution=zipf":         {"fieldlengthdistribution", "zipf", "constant, uniform"},
		"fieldlength=0":                        {"fieldlength", `"0"`},
		"fieldlength=1":                        {"fieldcount times fieldlength", "10", "24"},
		"fieldlength=1000000":                  {"fieldcount times fieldlength", "10000000", "1048576"},
		"minfieldlength=200":                   {}, // has no effect while lengths are constant
		"threadcount=0":                        {"threadcount", "from 1 to 1024"},
		"target=-5":                            {"target", "-5"},
		"insertstart=10":                       {"insertstart", "10", "recordcount"},
		"insertcount=11":                       {"insertcount", "11", "from 1 to 10"},
		"workload=TimeSeriesWorkload":          {"workload", "TimeSeriesWorkload", "CoreWorkload"},
		"readproportion=0\nupdateproportion=0": {"readproportion", "must be more"},
		"=5":                                   {"name=value"},
		"timeseries.granularity=1":             {"timeseries.granularity", "from 10"},
		"measurementtype=series":               {"measurementtype", "timeseries"},
		"minfieldlength=20\nfieldlength=10\nfieldlengthdistribution=uniform": {"minfieldlength", "20", "10"},
	} {
		full := text
		if !strings.Contains(text, "recordcount") && text != "" {
			full = "recordcount=10\n" + text
		}
		_, _, err := parse(t, full)
		if len(want) == 0 {
			if err != nil {
				t.Errorf("%q: %v", text, err)
			}
			continue
		}
		if !errors.Is(err, ErrWorkload) {
			t.Errorf("%q: %v is no ErrWorkload", text, err)
		}
		for _, s := range want {
			if !strings.Contains(fmt.Sprint(err), s) {
				t.Errorf("%q: %v does not say %q", text, err, s)
			}
		}
	}
}

func TestATimelineIsAskedForAsInYCSB(t *testing.T) {
	for text, want := range map[string]time.Duration{"": 0, "measurementtype=hdrhistogram": 0,
		"measurementtype=timeseries": time.Second, "timeseries.granularity=250": 250 * time.Millisecond,
		"measurementtype=timeseries\ntimeseries.granularity=50": 50 * time.Millisecond} {
		w, warnings, err := parse(t, "recordcount=10\n"+text)
		if err != nil || len(warnings) > 0 || w.Granularity != want {
			t.Errorf("%q: %v, %v, %v", text, w.Granularity, warnings, err)
		}
	}
}

func TestTheUserIsWarned(t *testing.T) {
	for text, want := range map[string]string{
		"exportfile=x\nstatus.interval=1": "exportfile, status.interval",
		"insertproportion=1":              "add up to 2",
		"writeallfields=false":            "writeallfields",
	} {
		_, warnings, err := parse(t, "recordcount=10\n"+text)
		if err != nil || len(warnings) != 1 || !strings.Contains(warnings[0], want) {
			t.Errorf("%q: %v, %v", text, warnings, err)
		}
	}
	if w, _, _ := parse(t, "recordcount=10\ninsertproportion=1"); math.Abs(w.Insert-0.5) > 1e-9 ||
		math.Abs(w.Read-0.475) > 1e-9 {
		t.Errorf("proportions are not in relation to their sum: %+v", w)
	}
}

// TestShippedWorkloadsMatchYCSB: all run except E, which is refused with a reason.
func TestShippedWorkloadsMatchYCSB(t *testing.T) {
	const dir = "../../../configs/ycsb"
	for file, want := range map[string]Workload{
		"workloada":         {Read: 0.5, Update: 0.5, Distribution: "zipfian"},
		"workloadb":         {Read: 0.95, Update: 0.05, Distribution: "zipfian"},
		"workloadc":         {Read: 1, Distribution: "zipfian"},
		"workloadd":         {Read: 0.95, Insert: 0.05, Distribution: "latest"},
		"workloade":         {},
		"workloadf":         {Read: 0.5, ReadModifyWrite: 0.5, Distribution: "zipfian"},
		"workloadwriteonly": {Update: 1, Distribution: "zipfian"},
	} {
		f, err := os.Open(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		p := Properties{}
		if err := errors.Join(p.Read(file, f), f.Close()); err != nil {
			t.Fatal(err)
		}
		w, warnings, err := p.Workload()
		if file == "workloade" {
			if !errors.Is(err, ErrWorkload) || !strings.Contains(err.Error(), "ordered scans are not offered") {
				t.Errorf("%s: %v", file, err)
			}
			continue
		}
		if err != nil || len(warnings) > 0 {
			t.Errorf("%s: %v, %v", file, warnings, err)
		}
		if w.Read != want.Read || w.Update != want.Update || w.Insert != want.Insert ||
			w.ReadModifyWrite != want.ReadModifyWrite || w.Distribution != want.Distribution {
			t.Errorf("%s: %+v", file, w)
		}
	}
}
