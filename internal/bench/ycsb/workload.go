package ycsb

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ErrWorkload is wrapped by errors about a workload that cannot be run.
var ErrWorkload = errors.New("invalid workload")

// MaxValueBytes bounds the values of a workload.
const MaxValueBytes = 1 << 20

// Workload is what YCSB's CoreWorkload reads from its property files. A record is one value: its
// fields are written and read together.
type Workload struct {
	// Records are [InsertStart, RecordCount). A load writes InsertCount of them from InsertStart on, and a run
	// keeps to those, so that several processes can share the records out; if that is all, inserts of a
	// run go on at RecordCount.
	RecordCount, InsertStart, InsertCount uint64
	// OperationCount ends a run; 0: MaxExecution does.
	OperationCount uint64
	MaxExecution   time.Duration

	// Shares of the operations; they add up to 1.
	Read, Update, Insert, ReadModifyWrite float64

	// Distribution is how a record is chosen: uniform, zipfian, latest or hotspot.
	Distribution string
	// Theta is the exponent of zipfian and latest, at least 0 (which is uniform).
	Theta float64
	// HotData is the share of the records that HotOperations of the operations go to; for hotspot.
	HotData, HotOperations float64
	// Ordered: keys sort as record numbers do; otherwise they are scattered.
	Ordered bool

	// A value has Fields fields of MinField to MaxField bytes each, drawn uniformly.
	Fields, MinField, MaxField int

	// Threads are YCSB's: each has a queue of its own.
	Threads int
	// Target is the rate of all threads together in operations per second; 0: as fast as possible.
	Target float64
	// Granularity is how long the stretches of Phase.Timeline are; 0: there is none.
	Granularity time.Duration
}

// Distributions are the values of Workload.Distribution.
var Distributions = []string{"uniform", "zipfian", "latest", "hotspot"}

// ValueBytes is the length of the longest value of the workload.
func (w *Workload) ValueBytes() int { return w.Fields * w.MaxField }

// loaded is where the records end that a load writes.
func (w *Workload) loaded() uint64 { return w.InsertStart + w.InsertCount }

// CheckRun says what is missing for a run.
//
// Errors: ErrWorkload.
func (w *Workload) CheckRun() error {
	switch {
	case w.OperationCount == 0 && w.MaxExecution == 0:
		return fmt.Errorf("%w: operationcount is 0, must be at least 1, unless maxexecutiontime is given", ErrWorkload)
	case w.Insert > 0 && w.loaded() < w.RecordCount:
		return fmt.Errorf("%w: insertcount is %d, must be all records from insertstart on, %d, for a run with an "+
			"insertproportion", ErrWorkload, w.InsertCount, w.RecordCount-w.InsertStart)
	}
	return nil
}

// Properties are names and values as in YCSB's workload files.
type Properties map[string]string

// Read adds the properties in a file: lines of name=value; # and ! begin comments; a backslash at the end of a line
// continues it. name is for errors.
//
// Errors: ErrWorkload, with the line.
func (p Properties) Read(name string, r io.Reader) error {
	s := bufio.NewScanner(r)
	line, whole := 0, ""
	for more := true; more; {
		t := ""
		if more = s.Scan(); more { // else what the last line has begun ends there
			line++
			t = strings.TrimSpace(s.Text())
		}
		if whole == "" && (t == "" || t[0] == '#' || t[0] == '!') {
			continue
		}
		whole += t
		if head, ok := strings.CutSuffix(whole, `\`); ok {
			whole = head
			continue
		}
		if err := p.Set(whole); err != nil {
			return fmt.Errorf("%s:%d: %w", name, line, err)
		}
		whole = ""
	}
	if err := s.Err(); err != nil {
		return fmt.Errorf("%w: %s:%d: %w", ErrWorkload, name, line+1, err)
	}
	return nil
}

// Set adds one name=value, as after -p.
//
// Errors: ErrWorkload.
func (p Properties) Set(s string) error {
	i := strings.IndexAny(s, "=: \t")
	if i < 1 {
		return fmt.Errorf("%w: %q must be name=value", ErrWorkload, s)
	}
	name, value := s[:i], strings.TrimSpace(s[i:])
	if value != "" && (value[0] == '=' || value[0] == ':') {
		value = value[1:]
	}
	p[name] = strings.TrimSpace(value)
	return nil
}

// accepted are names that YCSB's own files use and that change nothing here.
var accepted = []string{"workload", "table", "db", "readallfields", "writeallfields", "dataintegrity", "scanproportion",
	"minscanlength", "maxscanlength", "scanlengthdistribution", "zeropadding", "measurement.interval"}

// measurementTypes are the ways of YCSB to measure. Histograms there are always, of timeseries the throughput as well.
var measurementTypes = []string{"histogram", "hdrhistogram", "hdrhistogram+histogram", "hdrhistogram+raw", "timeseries",
	"raw"}

// Workload checks the properties and fills in YCSB's defaults. The warnings are for the user.
//
// Errors: ErrWorkload, naming property, value and what is allowed, for each invalid one.
func (p Properties) Workload() (w Workload, warnings []string, err error) {
	r := reader{p: p, known: slices.Clone(accepted)}
	w.RecordCount = uint64(r.integer("recordcount", 0, 1, 1<<40))
	w.OperationCount = uint64(r.integer("operationcount", 0, 0, math.MaxInt64))
	w.MaxExecution = time.Duration(r.number("maxexecutiontime", 0, 0, 1e9) * float64(time.Second))
	w.InsertStart = uint64(r.integer("insertstart", 0, 0, 1<<40))
	w.Read = r.number("readproportion", 0.95, 0, 1)
	w.Update = r.number("updateproportion", 0.05, 0, 1)
	w.Insert = r.number("insertproportion", 0, 0, 1)
	w.ReadModifyWrite = r.number("readmodifywriteproportion", 0, 0, 1)
	w.Distribution = r.word("requestdistribution", "uniform", Distributions...)
	w.Theta = r.number("zipfianconstant", 0.99, 0, 10)
	w.HotData = r.number("hotspotdatafraction", 0.2, 0, 1)
	w.HotOperations = r.number("hotspotopnfraction", 0.8, 0, 1)
	w.Ordered = r.word("insertorder", "hashed", "hashed", "ordered") == "ordered"
	w.Fields = int(r.integer("fieldcount", 10, 1, MaxValueBytes))
	w.MaxField = int(r.integer("fieldlength", 100, 1, MaxValueBytes))
	w.MinField = int(r.integer("minfieldlength", 1, 1, MaxValueBytes))
	if r.word("fieldlengthdistribution", "constant", "constant", "uniform") == "constant" {
		w.MinField = w.MaxField
	}
	w.Threads = int(r.integer("threadcount", 1, 1, 1024))
	w.Target = r.number("target", 0, 0, 1e9)
	granularity := int64(0)
	if r.word("measurementtype", "", measurementTypes...) == "timeseries" {
		granularity = 1000
	}
	w.Granularity = time.Duration(r.integer("timeseries.granularity", granularity, 10, 1e9)) * time.Millisecond
	r.check(&w)
	if len(r.errs) > 0 {
		return w, nil, errors.Join(r.errs...)
	}
	return w, r.warnings, nil
}

// reader takes values out of Properties and collects what is wrong with them.
type reader struct {
	p        Properties
	known    []string
	warnings []string
	errs     []error
}

func (r *reader) bad(name string, allowed string) {
	r.errs = append(r.errs, fmt.Errorf("%w: %s is %q, must be %s", ErrWorkload, name, r.p[name], allowed))
}

func (r *reader) integer(name string, otherwise, least, most int64) int64 {
	r.known = append(r.known, name)
	s, ok := r.p[name]
	if !ok {
		return otherwise
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < least || n > most {
		r.bad(name, fmt.Sprintf("a whole number from %d to %d", least, most))
		return max(otherwise, least)
	}
	return n
}

func (r *reader) number(name string, otherwise, least, most float64) float64 {
	r.known = append(r.known, name)
	s, ok := r.p[name]
	if !ok {
		return otherwise
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || !(f >= least && f <= most) {
		r.bad(name, fmt.Sprintf("a number from %g to %g", least, most))
		return otherwise
	}
	return f
}

func (r *reader) word(name, otherwise string, allowed ...string) string {
	r.known = append(r.known, name)
	s, ok := r.p[name]
	if !ok {
		return otherwise
	}
	if !slices.Contains(allowed, s) {
		r.bad(name, "one of "+strings.Join(allowed, ", "))
		return otherwise
	}
	return s
}

// check looks at what depends on more than one property.
func (r *reader) check(w *Workload) {
	if _, ok := r.p["recordcount"]; !ok {
		r.errs = append(r.errs, fmt.Errorf("%w: recordcount is missing, must be a whole number of at least 1",
			ErrWorkload))
		return
	}
	if s := r.p["workload"]; s != "" && !strings.HasSuffix("."+s, ".CoreWorkload") {
		r.bad("workload", "CoreWorkload (of any package)")
	}
	if s, ok := r.p["scanproportion"]; ok {
		if f, err := strconv.ParseFloat(s, 64); err != nil || f != 0 {
			r.bad("scanproportion", "0: ordered scans are not offered, for the store finds keys by their hash")
		}
	}
	if w.InsertStart >= w.RecordCount {
		r.errs = append(r.errs, fmt.Errorf("%w: insertstart is %d, must be below recordcount, %d", ErrWorkload,
			w.InsertStart, w.RecordCount))
		return
	}
	most := w.RecordCount - w.InsertStart
	w.InsertCount = uint64(r.integer("insertcount", int64(most), 1, int64(most)))
	if w.MinField > w.MaxField {
		r.errs = append(r.errs, fmt.Errorf("%w: minfieldlength is %d, must be at most fieldlength, %d", ErrWorkload,
			w.MinField, w.MaxField))
	}
	if least, most := w.Fields*w.MinField, w.ValueBytes(); least < minValueBytes && most >= minValueBytes {
		w.MinField = (minValueBytes + w.Fields - 1) / w.Fields
	} else if most < minValueBytes || most > MaxValueBytes {
		r.errs = append(r.errs, fmt.Errorf("%w: fieldcount times fieldlength is %d, must be %d (so that every value "+
			"can be verified) to %d bytes", ErrWorkload, most, minValueBytes, MaxValueBytes))
	}
	sum := w.Read + w.Update + w.Insert + w.ReadModifyWrite
	switch {
	case sum == 0:
		r.errs = append(r.errs, fmt.Errorf("%w: readproportion, updateproportion, insertproportion and "+
			"readmodifywriteproportion are 0, one must be more", ErrWorkload))
		return
	case math.Abs(sum-1) > 1e-9:
		r.warn("the proportions add up to %g and count in relation to that (unset, readproportion is 0.95 and "+
			"updateproportion 0.05)", sum)
	}
	for _, f := range []*float64{&w.Read, &w.Update, &w.Insert, &w.ReadModifyWrite} {
		*f /= sum
	}
	for _, name := range []string{"readallfields", "writeallfields"} {
		if s, ok := r.p[name]; ok && s != "true" {
			r.warn("%s is %q, but a record is one value: it is read and written whole", name, s)
		}
	}
	var unknown []string
	for name := range r.p {
		if !slices.Contains(r.known, name) {
			unknown = append(unknown, name)
		}
	}
	if slices.Sort(unknown); len(unknown) > 0 {
		r.warn("properties without a meaning here: %s", strings.Join(unknown, ", "))
	}
}

func (r *reader) warn(format string, args ...any) {
	r.warnings = append(r.warnings, fmt.Sprintf(format, args...))
}
