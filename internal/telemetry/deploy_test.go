package telemetry

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/prometheus/client_golang/prometheus"
)

var update = flag.Bool("update", false, "write the table of metrics in docs/operations.md anew")

const (
	dashboardFile  = "../../deploy/grafana/jbofd.json"
	alertsFile     = "../../deploy/prometheus/alerts.yaml"
	operationsFile = "../../docs/operations.md"
)

func readFile(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// dashboard is the part of a Grafana dashboard that the tests look at.
type dashboard struct {
	UID        string
	Panels     []panel
	Templating struct {
		List []struct{ Name, Type, Definition string }
	}
}

type panel struct {
	ID      int
	Type    string
	Title   string
	GridPos struct{ H, W, X, Y int }
	Targets []struct{ Expr string }
}

// alert is one alert rule.
type alert struct {
	Alert       string
	Expr        string
	Annotations map[string]string
}

func alerts(t *testing.T) []alert {
	t.Helper()
	var file struct {
		Groups []struct{ Rules []alert }
	}
	if err := yaml.Unmarshal([]byte(readFile(t, alertsFile)), &file); err != nil {
		t.Fatal(err)
	}
	var all []alert
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	if len(all) == 0 {
		t.Fatal("no alerts")
	}
	return all
}

func parseDashboard(t *testing.T) dashboard {
	t.Helper()
	var d dashboard
	if err := json.Unmarshal([]byte(readFile(t, dashboardFile)), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

var (
	selector = regexp.MustCompile(`\b((?:jbof|go|process)_[a-z_]+)(?:\{([^}]*)\})?`)
	matcher  = regexp.MustCompile(`([a-z_]+)(?:=~|!~|!=|=)"`)
	grouping = regexp.MustCompile(`\b(?:by|on|group_left) ?\(([a-z_, ]*)\)`)
)

// unknownIn returns the names in an expression that the registry does not have.
func unknownIn(t *testing.T, expr string, exported map[string]bool) (unknown []string) {
	t.Helper()
	labels := map[string][]string{}
	for _, m := range metrics() {
		labels[m.name] = m.labels
	}
	extra := []string{"job", "instance", "le"}
	known := slices.Clone(extra)
	for _, s := range selector.FindAllStringSubmatch(expr, -1) {
		name := s[1]
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			if base := strings.TrimSuffix(name, suffix); exported[base] {
				name = base
			}
		}
		if !exported[name] {
			unknown = append(unknown, name)
			continue
		}
		known = append(known, labels[name]...)
		for _, m := range matcher.FindAllStringSubmatch(s[2], -1) {
			if !slices.Contains(append(extra, labels[name]...), m[1]) {
				unknown = append(unknown, name+"{"+m[1]+"}")
			}
		}
	}
	for _, g := range grouping.FindAllStringSubmatch(expr, -1) {
		for l := range strings.SplitSeq(g[1], ",") {
			if l = strings.TrimSpace(l); l != "" && !slices.Contains(known, l) {
				unknown = append(unknown, "by "+l)
			}
		}
	}
	return unknown
}

func exportedNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for name := range gather(t, full()) {
		names[name] = true
	}
	return names
}

func TestTheDashboardReadsMetricsThatExist(t *testing.T) {
	exported, d := exportedNames(t), parseDashboard(t)
	exprs := map[string]string{}
	for _, v := range d.Templating.List {
		if v.Type == "query" {
			exprs["variable "+v.Name] = v.Definition
		}
	}
	used := map[string]bool{}
	for _, p := range d.Panels {
		for i, target := range p.Targets {
			exprs[fmt.Sprint(p.Title, " ", i)] = target.Expr
			for _, s := range selector.FindAllStringSubmatch(target.Expr, -1) {
				used[s[1]] = true
			}
			if strings.Contains(target.Expr, "rate(") != strings.Contains(target.Expr, "[$__rate_interval]") &&
				!strings.Contains(target.Expr, "increase(") {
				t.Errorf("%s: a rate over something other than $__rate_interval: %s", p.Title, target.Expr)
			}
			if strings.Count(target.Expr, "(") != strings.Count(target.Expr, ")") ||
				strings.Count(target.Expr, "{") != strings.Count(target.Expr, "}") {
				t.Errorf("%s: brackets: %s", p.Title, target.Expr)
			}
		}
	}
	for where, expr := range exprs {
		if u := unknownIn(t, expr, exported); len(u) > 0 {
			t.Errorf("%s: no such metric or label: %v", where, u)
		}
	}
	for _, name := range []string{"jbof_io_completed_total", "jbof_io_duration_seconds_bucket", "jbof_ssd_up",
		"jbof_connections", "process_cpu_seconds_total"} {
		if !used[name] {
			t.Errorf("the dashboard does not show %s", name)
		}
	}
	// Planted faults must be found.
	for _, bad := range []string{`jbof_nothing_total`, `rate(jbof_io_completed_total{disk="x"}[5m])`,
		`sum by (disk) (jbof_ssd_up)`} {
		if len(unknownIn(t, bad, exported)) == 0 {
			t.Errorf("%s passes", bad)
		}
	}
}

func TestTheDashboardCanBeProvisionedAnywhere(t *testing.T) {
	d := parseDashboard(t)
	if d.UID != "jbofd" {
		t.Errorf("uid %q", d.UID)
	}
	var names []string
	for _, v := range d.Templating.List {
		names = append(names, v.Name)
	}
	if want := []string{"datasource", "job", "instance", "tenant", "ssd"}; !slices.Equal(names, want) {
		t.Errorf("variables %v, want %v", names, want)
	}
	text := readFile(t, dashboardFile)
	if n := strings.Count(text, `"uid": "`) - strings.Count(text, `"uid": "${datasource}"`); n != 1 {
		t.Errorf("%d uids beside ${datasource}, want the dashboard's own", n)
	}
	ids := map[int]bool{}
	for i, p := range d.Panels {
		if ids[p.ID] {
			t.Errorf("panel id %d twice", p.ID)
		}
		ids[p.ID] = true
		for _, o := range d.Panels[:i] {
			a, b := p.GridPos, o.GridPos
			if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
				t.Errorf("panels %q and %q lie on one another", p.Title, o.Title)
			}
		}
	}
}

func TestAlertsReadMetricsThatExistAndLeadToTheirRunbook(t *testing.T) {
	exported, docs := exportedNames(t), readFile(t, operationsFile)
	for _, a := range alerts(t) {
		if u := unknownIn(t, a.Expr, exported); len(u) > 0 {
			t.Errorf("%s: no such metric or label: %v", a.Alert, u)
		}
		if want := "docs/operations.md#" + strings.ToLower(a.Alert); a.Annotations["runbook_url"] != want {
			t.Errorf("%s: runbook %q, want %q", a.Alert, a.Annotations["runbook_url"], want)
		}
		if !strings.Contains(docs, "\n#### "+a.Alert+"\n") {
			t.Errorf("docs/operations.md has no section %s", a.Alert)
		}
		if a.Annotations["summary"] == "" {
			t.Errorf("%s: no summary", a.Alert)
		}
	}
}

// TestTheScrapeConfigurationFindsADaemonAndTheAlerts: its targets are where a daemon serves metrics by default.
func TestTheScrapeConfigurationFindsADaemonAndTheAlerts(t *testing.T) {
	const file = "../../deploy/prometheus/prometheus.yaml"
	var c struct {
		RuleFiles     []string `yaml:"rule_files"`
		ScrapeConfigs []struct {
			JobName       string                       `yaml:"job_name"`
			StaticConfigs []struct{ Targets []string } `yaml:"static_configs"`
		} `yaml:"scrape_configs"`
	}
	if err := yaml.Unmarshal([]byte(readFile(t, file)), &c); err != nil {
		t.Fatal(err)
	}
	for _, f := range c.RuleFiles {
		readFile(t, "../../deploy/prometheus/"+f)
	}
	if len(c.RuleFiles) == 0 || len(c.ScrapeConfigs) != 1 || !strings.HasPrefix(c.ScrapeConfigs[0].JobName, "jbofd") {
		t.Fatalf("%+v", c)
	}
	if target := c.ScrapeConfigs[0].StaticConfigs[0].Targets[0]; !strings.Contains(readFile(t, "../config/config.go"),
		`yaml:"address" default:"`+target+`"`) {
		t.Errorf("%s is not the default of metrics.address", target)
	}
}

const (
	tableBegin = "<!-- metrics: made by go test ./internal/telemetry -update -->\n"
	tableEnd   = "<!-- end of metrics -->\n"
)

func TestTheTableOfMetricsIsWhatTheCodeExports(t *testing.T) {
	var b strings.Builder
	b.WriteString(tableBegin + "| Metric | Type | Labels | Meaning |\n|---|---|---|---|\n")
	for _, m := range metrics() {
		kind := map[prometheus.ValueType]string{prometheus.CounterValue: "counter", prometheus.GaugeValue: "gauge",
			prometheus.UntypedValue: "histogram"}[m.kind]
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.name, kind, strings.Join(m.labels, ", "), m.help)
	}
	docs := readFile(t, operationsFile)
	i, j := strings.Index(docs, tableBegin), strings.Index(docs, tableEnd)
	if i < 0 || j < i {
		t.Fatal("docs/operations.md has no table of metrics")
	}
	if *update {
		if err := os.WriteFile(operationsFile, []byte(docs[:i]+b.String()+docs[j:]), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if docs[i:j] != b.String() {
		t.Error("the table in docs/operations.md is not what the code exports (go test -update writes it anew)")
	}
}

// The settings of the unit that the daemon depends on.
func TestTheUnitIsHardenedAndGivesTimeToDrain(t *testing.T) {
	unit := readFile(t, "../../deploy/jbofd.service")
	for _, want := range []string{
		"Type=notify", "ExecReload=/bin/kill -HUP $MAINPID", "TimeoutStopSec=15s", "WatchdogSec=",
		"LimitMEMLOCK=infinity", "LimitNOFILE=",
		"StateDirectory=", "RuntimeDirectory=", "NoNewPrivileges=yes", "ProtectSystem=strict", "ProtectHome=yes",
		"ProtectKernelModules=yes",
		"ProtectKernelTunables=yes", "ProtectControlGroups=yes", "ProtectClock=yes", "ProtectHostname=yes",
		"RestrictNamespaces=yes",
		"RestrictSUIDSGID=yes", "LockPersonality=yes", "SystemCallArchitectures=native", "UMask=0077",
		"RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
		"DevicePolicy=closed", "SystemCallFilter=@system-service", "MemoryDenyWriteExecute=yes",
		"CapabilityBoundingSet=\n",
	} {
		if !strings.Contains(unit, "\n"+want) {
			t.Errorf("deploy/jbofd.service lacks %s", want)
		}
	}
	// The unit names all devices that the daemon may open, and a JBOF's those of VFIO.
	box := readFile(t, "../../deploy/jbof/jbofd.conf")
	for _, want := range []string{"DeviceAllow=/dev/vfio/vfio rw\n", "DeviceAllow=char-vfio rw\n"} {
		if !strings.Contains(box, "\n"+want) {
			t.Errorf("deploy/jbof/jbofd.conf lacks %s", want)
		}
	}
}
