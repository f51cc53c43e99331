package main

import (
	"bytes"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"jbofd/internal/admin"
	"jbofd/internal/ssd/file"
	"jbofd/internal/ssd/label"
)

// run runs a command line without a terminal.
func run(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = execute(t.Context(), args, terminal{in: strings.NewReader(""), out: &out, err: &err})
	return code, out.String(), err.String()
}

const uuid = "0425d6c3-77cf-4e62-873e-0484d7ac5274"

var (
	answer      = admin.Answer{APIVersion: admin.Version}
	oneListener = admin.Addresses{Listeners: []string{"10.0.0.1:4420"}}
)

// answers is a daemon with constant answers.
var answers = map[string]any{
	admin.PathStatus: admin.Status{APIVersion: admin.Version, Version: "1.2.3", Node: "box7", Ready: false, Hosts: 3,
		Reasons:  []admin.Reason{{Component: "ssd ssd1", Reason: "it vanished"}},
		Degraded: []admin.Reason{{Component: "ssd ssd0", Reason: "it is silent"}}, Addresses: oneListener},
	admin.PathSSDs: admin.List[admin.SSD]{APIVersion: admin.Version, Items: []admin.SSD{
		{Name: "ssd0", Backend: "file", Engine: "io_uring", Path: "/dev/nvme7n1", SizeBytes: 4 << 30,
			FreeBytes: 3 << 30, Policy: "jbof", CongestionState: "avoidance", WriteCost: 3.14, Extents: []admin.Extent{
				{UUID: uuid, Use: "block", NSID: 9, SubNQN: "nqn.2026-11.example.jbofd:old", LengthBytes: 1 << 30}},
			Health: &admin.Health{CriticalWarning: 9, Temperature: 311, AvailableSpare: 7, SpareThreshold: 10,
				PercentUsed: 83, DataUnitsWritten: 4 << 20, MediaErrors: 21, UnsafeShutdowns: 5,
				WarningTemperature: 343, Read: time.Unix(1700000000, 0).UTC()}},
		{Name: "ssd1", Error: "it vanished", Extents: []admin.Extent{}}}},
	admin.PathSubsystems: admin.List[admin.Subsystem]{APIVersion: admin.Version,
		Items: []admin.Subsystem{{SubNQN: "nqn.2026-11.example.jbofd:blocks", AllowAnyHost: true, Hosts: []string{},
			Namespaces: []admin.Namespace{{NSID: 1, SSD: "ssd0", SizeBytes: 1 << 30, BlockSizeBytes: 4096,
				UUID: "u-u-i-d", Hosts: []string{}}}}}},
	admin.PathConnections: admin.List[admin.Connection]{APIVersion: admin.Version,
		Items: []admin.Connection{{ID: 5, Transport: "tcp", Remote: "10.0.0.2:999", HostNQN: "nqn.host", QID: 2}}},
	admin.PathTenants: admin.List[admin.Tenant]{APIVersion: admin.Version,
		Items: []admin.Tenant{{Name: "gold", SSD: "ssd0", Configured: true, Hosts: []string{"nqn.host"},
			Connections: 3, Weight: 4, RWIOsPerSec: 1000, WMBytesPerSec: 50, Share: 0.251, Credit: 32, Queued: 7,
			Inflight: 9, LimitedBy: "cap"}}},
	admin.PathReload: admin.Reload{APIVersion: admin.Version,
		Changes: []admin.Change{{What: "log level", Name: "debug"},
			{What: "namespace added", Name: "nqn.2026-11.example.jbofd:blocks", NSID: 7, SizeBytes: 2 << 30}}},
	admin.PathSwap: admin.List[admin.SwapArea]{APIVersion: admin.Version, Items: []admin.SwapArea{
		{UUID: uuid, SSD: "ssd0", SizeBytes: 64 << 20, UsedBytes: 1 << 20, State: "open",
			Sources: []admin.SwapSource{{UUID: "u-u-i-d", SubNQN: "nqn.2026-11.example.jbofd:kv", NSID: 3, Open: true,
				Keys: 77}}},
		{UUID: "l-o-s-t", State: "missing", Sources: []admin.SwapSource{}}}},
	admin.PathSwapDiscard: answer,
	admin.PathKVOpen:      answer,
	admin.PathKVAudits:    admin.List[admin.KVAudit]{APIVersion: admin.Version, Items: []admin.KVAudit{}},
	admin.PathKVScrubs: admin.List[admin.KVScrub]{APIVersion: admin.Version, Items: []admin.KVScrub{
		{UUID: uuid, SubNQN: "nqn.2026-11.example.jbofd:kv", NSID: 3, BytesPerSec: 1 << 20, Chunk: 30, Chunks: 120,
			Passes: 2, Present: admin.KVScrubPass{Seconds: 61}, Last: admin.KVScrubPass{Seconds: 3600, Damaged: 77},
			KnownLosses: 5}, {UUID: "u-u-i-d", Chunks: 9}}},
	admin.PathKVScrub: admin.KVScrub{APIVersion: admin.Version, UUID: uuid},
	admin.PathCluster: admin.Cluster{APIVersion: admin.Version, Name: "demo", UUID: uuid, Node: "n1", Manager: "n2",
		SubNQN: "nqn.2026-11.example.jbofd:kv", Problem: "etcd does not answer", Epoch: 7, ActiveEpoch: 6,
		ViewMS: 61_000, AuthorityMS: 400, Replicas: 2,
		Ranges: admin.ClusterRanges{Total: 4, Full: 1, Filling: 1, UnderReplicated: 1, Halted: 1, HaltedUp: 1},
		Nodes: []admin.ClusterNode{{Name: "n1", State: "up", Replicas: 3, Filling: 1, Partitions: 1, Domain: "rack1",
			Address: "10.0.0.1:4430", Target: "tcp://10.0.0.1:4420"}, {Name: "n2", State: "away", Out: true}},
		Partitions: []admin.ClusterPartition{{UUID: uuid, Node: "n1", SSD: "ssd7", NSID: 42, Weight: 4, Replicas: 3,
			Share: 0.75}, {UUID: "o-t-h-e-r", Node: "n2"}}},
	admin.PathClusterChains: admin.List[admin.Chain]{APIVersion: admin.Version, Items: []admin.Chain{
		{Range: 3, State: "under_replicated", Version: 9, Members: []admin.ChainMember{
			{Node: "n1", UUID: uuid, State: "serving"}, {Node: "n2", UUID: "u-u-i-d", State: "filling"}}},
		{Range: 4, State: "halted", Members: []admin.ChainMember{
			{Node: "n1", UUID: uuid, State: "last copy", Up: true},
			{Node: "n2", UUID: "u-u-i-d", State: "last copy"}}}}},
	admin.PathClusterInit: admin.ClusterMade{Replicas: 2, Ranges: 512},
	admin.PathKVAudit: admin.KVAudit{APIVersion: admin.Version, UUID: uuid, Segments: 12345, LossySegments: 2,
		KnownKeys: 7},
}

// serve starts a daemon's admin socket and returns its path.
func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ctl") // short: a unix socket's path must be
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(h)
	srv.Listener = l
	srv.Start()
	t.Cleanup(func() {
		srv.Close()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return path
}

func fake(t *testing.T) string {
	return serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == admin.PathNamespaceDelete {
			w.WriteHeader(http.StatusConflict)
			_ = json.NewEncoder(w).Encode(admin.Answer{APIVersion: admin.Version, Error: "it is configured"})
			return
		}
		if r.URL.Path == admin.PathClusterChange {
			var what admin.ChangeCluster
			if err := json.NewDecoder(r.Body).Decode(&what); err != nil {
				t.Error(err)
			}
			_ = json.NewEncoder(w).Encode(admin.ClusterChanged{Answer: answer, AcceptLoss: what.AcceptLoss})
			return
		}
		_ = json.NewEncoder(w).Encode(answers[r.URL.Path])
	}))
}

func TestTablesShowWhatTheDaemonSays(t *testing.T) {
	s := fake(t)
	for _, c := range []struct {
		line string
		want []string
	}{
		{"status", []string{"box7", "1.2.3", "ready", "no", "ssd1: it vanished", "ssd0: it is silent",
			"10.0.0.1:4420"}},
		{"ssd list", []string{"NAME", "ssd0", "4GiB", "3GiB", "io_uring", "/dev/nvme7n1", "failed", "POLICY", "jbof",
			"avoidance", "3.1"}},
		{"ssd show ssd0", []string{"ssd0", "4GiB", "nqn.2026-11.example.jbofd:old", uuid,
			"warnings: 0x9 spare read_only; 38 °C, spare 7%, used 83%, media errors 21"}},
		{"ssd smart-log ssd0", []string{"0x9 spare read_only", "38 °C", "7%", "10%", "83%", "4194304 (2000GiB)", "21",
			"70 °C", "unknown", "2023-11-14T22:13:20Z"}},
		{"ssd show ssd1", []string{"failed", "it vanished"}},
		{"subsystem list", []string{"nqn.2026-11.example.jbofd:blocks", "any"}},
		{"namespace list", []string{"nqn.2026-11.example.jbofd:blocks", "yes", "u-u-i-d",
			"nqn.2026-11.example.jbofd:old", "no", uuid}},
		{"connection list", []string{"10.0.0.2:999", "nqn.host"}},
		{"tenant list", []string{"gold", "ssd0", "rw_ios:1000,w_mbytes:50", "25%", "128KiB", "cap"}},
		{"swap list", []string{uuid, "ssd0", "open", "64MiB", "1MiB", "nqn.2026-11.example.jbofd:kv", "77", "l-o-s-t",
			"missing"}},
		{"swap discard --yes " + uuid, []string{"given up"}},
		{"kv scrub", []string{"1MiB/s", "25%", "1m1s", "1h0m0s", "77", "5", "paused"}},
		{"kv scrub --rate 200MiB " + uuid, []string{"25%"}},
		{"cluster init --replicas 2", []string{"made: 512 ranges", "to be 2 copies"}},
		{"cluster status", []string{"demo", uuid, "n1", "problem", "etcd does not answer",
			"7, for 1m1s; this node acts on 6", "n2", "400ms",
			"4: 1 full, 1 filling, 1 under-replicated, 1 halted, 0 unassigned", "rack1", "10.0.0.1:4430",
			"tcp://10.0.0.1:4420", "away, out", "1 with a last copy on a node that is up"}},
		{"cluster ring", []string{uuid, "n1", "ssd7", "42", "75.0%", "o-t-h-e-r"}},
		{"cluster chains", []string{"under-replicated", "n1/" + uuid[:8] + " serving > n2/u-u-i-d filling",
			"n1/" + uuid[:8] + " last copy (up) > n2/u-u-i-d last copy\n"}},
		{"cluster replicas 3", []string{"3 copies"}},
		{"cluster drain n2", []string{"n2", "no ranges"}},
		{"cluster accept-loss --yes 3 7", []string{"the data of 2 ranges are given up: 3 7"}},
		{"cluster lost --yes n1 n2", []string{"not waited for"}},
		{"cluster join n2", []string{"n2", "its share"}},
		{"config reload", []string{"reloaded", "log level: debug",
			"namespace added: nqn.2026-11.example.jbofd:blocks nsid 7 (2GiB)"}},
		{"reload", []string{"reloaded", "log level: debug"}},
		{"reload --dry-run", []string{"would change", "log level: debug"}},
	} {
		code, out, errs := run(t, append(strings.Fields(c.line), "--socket", s)...)
		if code != 0 || errs != "" {
			t.Errorf("%s: exit status %d, %s", c.line, code, errs)
		}
		for _, w := range c.want {
			if !strings.Contains(out, w) {
				t.Errorf("%s: no %q in\n%s", c.line, w, out)
			}
		}
	}
}

func TestExitStatusTellsFailureFromMisuse(t *testing.T) {
	s := fake(t)
	for _, c := range []struct {
		want int
		line string
	}{
		{0, "--help"}, {0, "--version"}, {0, "ssd format --help"},
		{1, "status --socket /nonexistent/socket"}, {1, "ssd show nosuch --socket " + s},
		{1, "ssd smart-log ssd1 --socket " + s},
		{1, "namespace delete --yes " + uuid + " --socket " + s},
		{2, "status extra"}, {2, "status --nosuch"}, {2, "-o xml status"}, {2, "ssd"}, {2, "ssd nosuch"}, {2, "nosuch"},
		{2, "ssd show"}, {2, "ssd format"},
		{2, "completion tcsh"}, {2, "completion"}, {2, "--timeout -1s status"}, {2, "status --wait -1s"},
		{2, "cluster"}, {2, "cluster replicas 6"}, {2, "cluster replicas x"}, {2, "cluster drain"},
		{2, "cluster init now"}, {2, "cluster accept-loss --yes"}, {2, "cluster accept-loss --yes --all 3"},
		{2, "cluster lost --yes"}, {2, "cluster lost n1 --socket " + s},
		{2, "cluster accept-loss x --yes"}, {2, "cluster accept-loss 3 --socket " + s},
		{2, "cluster chains --range -2 --socket " + s}, {1, "cluster leave --timeout 10ms --socket " + s},
		{2, "namespace delete xyz --yes --socket " + s}, {2, "swap discard xyz --yes --socket " + s},
		{2, "swap discard " + uuid + " --socket " + s}, {2, "namespace delete " + uuid + " --socket " + s},
	} {
		if code, out, errs := run(t, strings.Fields(c.line)...); code != c.want {
			t.Errorf("jbofctl %s: exit status %d, want %d\n%s%s", c.line, code, c.want, out, errs)
		}
	}
}

// drive makes a file of 8 MiB that begins with some bytes.
func drive(t *testing.T, at int64, begin string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.img")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(8 << 20); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte(begin), at); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

// labelOf reads the label of a drive; "" if it has none.
func labelOf(t *testing.T, path string) string {
	t.Helper()
	dev, err := openDrive(path, true)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	l, err := label.Inspect(dev)
	if err != nil {
		return ""
	}
	return l.DriveUUID.String()
}

func TestFormatWithoutATerminalNeedsConfirmationByFlag(t *testing.T) {
	blank := func() string { return drive(t, 0, "") }
	foreign := func() string { return drive(t, 0x438, "\x53\xEF") }
	labelled := func() string {
		p := drive(t, 0, "")
		if code, _, errs := run(t, "ssd", "format", "--yes", p); code != 0 {
			t.Fatal(errs)
		}
		return p
	}
	for _, c := range []struct {
		name  string
		path  string
		flags string
		want  int
		says  string
	}{
		{"blank", blank(), "", 2, "is blank"},
		{"blank", blank(), "--yes", 0, "formatted"},
		{"blank", blank(), "--force", 0, "formatted"},
		{"foreign", foreign(), "", 2, "ext2/3/4"},
		{"foreign", foreign(), "--yes", 2, "ext2/3/4"},
		{"foreign", foreign(), "--force", 0, "formatted"},
		{"foreign", foreign(), "--force --yes", 0, "formatted"},
		{"labelled", labelled(), "", 2, "of a jbofd"},
		{"labelled", labelled(), "--yes", 2, "of a jbofd"},
		{"labelled", labelled(), "--force", 0, "formatted"},
	} {
		before, err := os.ReadFile(c.path)
		if err != nil {
			t.Fatal(err)
		}
		code, out, errs := run(t, append([]string{"ssd", "format", c.path}, strings.Fields(c.flags)...)...)
		if code != c.want || !strings.Contains(out+errs, c.says) {
			t.Errorf("%s %s: exit status %d, want %d with %q\n%s%s", c.name, c.flags, code, c.want, c.says, out, errs)
		}
		after, err := os.ReadFile(c.path)
		if err != nil {
			t.Fatal(err)
		}
		if changed := !bytes.Equal(before, after); changed != (code == 0) {
			t.Errorf("%s %s: exit status %d, but changed is %v", c.name, c.flags, code, changed)
		}
		if code == 0 && labelOf(t, c.path) == "" {
			t.Errorf("%s %s: no label", c.name, c.flags)
		}
	}
}

func TestFormatErasesWhatWasThere(t *testing.T) {
	p := drive(t, 4<<20, "secret")
	if code, _, errs := run(t, "ssd", "format", "--force", p); code != 0 {
		t.Fatal(errs)
	}
	data, err := os.ReadFile(p)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(data, []byte("secret")) {
		t.Error("the old content is still there")
	}
}

func TestFormatRefusesADriveInUse(t *testing.T) {
	p := drive(t, 0, "")
	dev, err := file.Open(file.Config{Name: "other", Path: p})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	code, _, errs := run(t, "ssd", "format", "--force", "--yes", p)
	if code != 1 || !strings.Contains(errs, "in use") {
		t.Errorf("exit status %d, %s", code, errs)
	}
}

func TestFormatOfSomethingElseFails(t *testing.T) {
	for _, p := range []string{filepath.Join(t.TempDir(), "nothing"), t.TempDir(), "/dev/null"} {
		if code, _, errs := run(t, "ssd", "format", "--force", p); code != 1 || !strings.Contains(errs, p) &&
			!strings.Contains(errs, filepath.Base(p)) {
			t.Errorf("%s: exit status %d, %s", p, code, errs)
		}
	}
}

func TestShowByPathChangesNothing(t *testing.T) {
	for _, begin := range []string{"", "XFSB"} {
		p := drive(t, 0, begin)
		before, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		code, out, errs := run(t, "ssd", "show", p, "--socket", "/nonexistent/socket")
		if code != 0 || !strings.Contains(out, "8MiB") {
			t.Errorf("%q: exit status %d\n%s%s", begin, code, out, errs)
		}
		if after, err := os.ReadFile(p); err != nil || !bytes.Equal(before, after) {
			t.Errorf("%q: changed (%v)", begin, err)
		}
	}
}

// TestAFileThatIsNoDriveStaysAsItIs, to its last byte, also if only reading it is allowed.
func TestAFileThatIsNoDriveStaysAsItIs(t *testing.T) {
	for _, n := range []int{7066, 8<<20 + 300} {
		path := filepath.Join(t.TempDir(), "README.md")
		text := bytes.Repeat([]byte("text "), n/5+1)[:n]
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, line := range []string{"ssd show", "ssd format", "ssd format --yes", "kv check"} {
			code, out, errs := run(t, append(strings.Fields(line), path, "--socket", "/nonexistent/socket")...)
			if strings.Contains(line, "format") && code == 0 {
				t.Errorf("%s of %d bytes: exit status %d\n%s%s", line, n, code, out, errs)
			}
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, text) {
				t.Errorf("%s has changed a file of %d bytes (%v)", line, n, err)
			}
		}
	}
}

func TestDocumentationMentionsEveryCommandAndFlag(t *testing.T) {
	data, err := os.ReadFile("../../docs/jbofctl.md")
	if err != nil {
		t.Fatal(err)
	}
	doc := string(data)
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if !c.HasSubCommands() {
			if !strings.Contains(doc, "`"+c.CommandPath()) {
				t.Errorf("docs/jbofctl.md does not mention %q", c.CommandPath())
			}
			if f := c.Flags().Lookup("yes"); f != nil && !strings.Contains(doc, "`--yes") {
				t.Errorf("docs/jbofctl.md does not mention --yes of %q", c.CommandPath())
			}
		}
		for _, s := range c.Commands() {
			walk(s)
		}
	}
	walk(command(&cli{}))
	for _, flag := range []string{"--socket", "--timeout", "-o table|json|yaml", "--force", socketEnv, defaultSocket} {
		if !strings.Contains(doc, flag) {
			t.Errorf("docs/jbofctl.md does not mention %s", flag)
		}
	}
}

func TestStatusCheckDistinguishesNotReadyFromUnreachable(t *testing.T) {
	s := fake(t)
	if code, out, errs := run(t, "status", "--check", "--socket", s); code != 3 ||
		!strings.Contains(out, "it vanished") || !strings.Contains(errs, "not ready") {
		t.Errorf("not ready: exit status %d, %s%s", code, out, errs)
	}
	if code, _, errs := run(t, "status", "--check", "--socket", filepath.Join(t.TempDir(), "none")); code != 1 {
		t.Errorf("not there: exit status %d, %s", code, errs)
	}
	up := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(admin.Status{APIVersion: admin.Version, Ready: true})
	}))
	if code, _, errs := run(t, "status", "--check", "--socket", up); code != 0 || errs != "" {
		t.Errorf("ready: exit status %d, %s", code, errs)
	}
}

// TestStatusWaitsForTheNode, and for its socket.
func TestStatusWaitsForTheNode(t *testing.T) {
	asked := 0
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked++
		_ = json.NewEncoder(w).Encode(admin.Status{APIVersion: admin.Version, Node: "box7", Ready: asked > 3,
			Reasons: []admin.Reason{{Component: "daemon", Reason: "starting"}}})
	}))
	if code, out, errs := run(t, "status", "--wait", "1m", "--socket", s); code != 0 || asked != 4 ||
		!strings.Contains(out, "box7") {
		t.Errorf("exit status %d after %d questions, %s%s", code, asked, out, errs)
	}
	asked = -1 << 30
	if code, out, _ := run(t, "status", "--wait", "1ms", "--socket", s); code != 3 ||
		!strings.Contains(out, "starting") {
		t.Errorf("never ready: exit status %d, %s", code, out)
	}
	if code, _, _ := run(t, "status", "--wait", "1ms", "--socket", filepath.Join(t.TempDir(), "none")); code != 1 {
		t.Errorf("not there: exit status %d", code)
	}
}

// TestTheDemonstrationsSocketIsFound: make run has it in ./data, where jbofctl once did not look.
func TestTheDemonstrationsSocketIsFound(t *testing.T) {
	usual, demo := fake(t), fake(t)
	none := filepath.Join(t.TempDir(), "none")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ env, usual, demo, want string }{
		{"", usual, demo, usual},
		{"", none, demo, demo},
		{"", file, demo, demo},
		{"", none, none, none},
		{"/x", usual, demo, "/x"},
	} {
		if got := socketFrom(c.env, c.usual, c.demo); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

func TestVersionAndCompletionExist(t *testing.T) {
	if code, out, _ := run(t, "--version"); code != 0 || !strings.Contains(out, version) {
		t.Errorf("exit status %d, %s", code, out)
	}
	if code, out, _ := run(t, "--help"); code != 0 || !strings.Contains(out, "completion") {
		t.Errorf("exit status %d, %s", code, out)
	}
	if code, out, errs := run(t, "completion", "bash"); code != 0 || !strings.Contains(out, "jbofctl") {
		t.Errorf("exit status %d, %.200s%s", code, out, errs)
	}
}

// TestBadValuesAreAnsweredOnceAndWithWhatIsAllowed: Go's own error for a duration names no unit, and the error of a
// UUID repeated it.
func TestBadValuesAreAnsweredOnceAndWithWhatIsAllowed(t *testing.T) {
	for line, want := range map[string]string{
		"status --timeout abc":     "must be a duration, such as 500ms, 30s or 2m",
		"status --wait 10":         "must be a duration, such as 500ms, 30s or 2m",
		"namespace delete nope":    `jbofctl: UUID "nope": must be 32 hexadecimal digits`,
		"swap discard nope --yes":  `jbofctl: UUID "nope": must be 32 hexadecimal digits`,
		"kv check --keys x /none":  "must be a whole number",
		"kv scrub x":               "jbofctl namespace list",
		"kv scrub --rate 1MiB":     "needs the UUID",
		"kv scrub --rate fast x":   "jbofctl namespace list",
		"kv check --keys -1 /none": "--keys is -1, must be 0 or more",
		"kv export":                "jbofctl: kv export needs one argument, UUID; got 0",
	} {
		if code, _, errs := run(t, strings.Fields(line)...); code != exitUsage || !strings.Contains(errs, want) {
			t.Errorf("%s: exit status %d, no %q in %s", line, code, want, errs)
		}
	}
}

// TestAKVCheckThatFindsALossFails with an exit status of its own, and a repair asks first.
func TestAKVCheckThatFindsALossFails(t *testing.T) {
	s := fake(t)
	code, out, errs := run(t, "kv", "check", uuid, "--socket", s)
	if code != exitNotReady || !strings.Contains(out, "12345") || !strings.Contains(errs, "lost") {
		t.Errorf("exit status %d\n%s\n%s", code, out, errs)
	}
	if code, out, errs := run(t, "kv", "repair", uuid, "--socket", s); code != exitUsage || out != "" ||
		!strings.Contains(errs, "--yes") {
		t.Errorf("a repair without a question: exit status %d\n%s\n%s", code, out, errs)
	}
	if code, out, errs := run(t, "kv", "check", "17", "--socket", s); code != exitUsage || out != "" ||
		!strings.Contains(errs, "namespace list") {
		t.Errorf("a check of no UUID: exit status %d\n%s\n%s", code, out, errs)
	}
}

// TestALossIsShownAndThenAccepted: kv open says what is lost, and passes it on when the operator accepts it.
func TestALossIsShownAndThenAccepted(t *testing.T) {
	var got admin.OpenKV
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var answer any = admin.Answer{APIVersion: admin.Version}
		if r.URL.Path == admin.PathKVOpen {
			if err := json.NewDecoder(r.Body).Decode(&got); err != nil {
				t.Error(err)
			}
		} else {
			loss := &admin.KVLoss{Statement: "7 of 9 are missing", Token: "token"}
			answer = admin.List[admin.Subsystem]{Items: []admin.Subsystem{{Namespaces: []admin.Namespace{
				{UUID: "u-u-i-d"}, {UUID: uuid, Error: "it is damaged", Loss: loss}}}}}
		}
		_ = json.NewEncoder(w).Encode(answer)
	}))
	code, out, errs := run(t, "kv", "open", uuid, "--socket", s)
	if code != exitFailed || out != "" || !strings.Contains(errs, "7 of 9 are missing") ||
		!strings.Contains(errs, "--accept-loss") || got.UUID != "" {
		t.Errorf("exit status %d\n%s\n%s", code, out, errs)
	}
	code, out, errs = run(t, "kv", "open", uuid, "--accept-loss", "--socket", s)
	if code != exitUsage || out != "" || !strings.Contains(errs, "--yes") || got.UUID != "" {
		t.Errorf("without a question: exit status %d\n%s\n%s", code, out, errs)
	}
	code, out, errs = run(t, "kv", "open", uuid, "--accept-loss", "--yes", "--socket", s)
	if code != 0 || !strings.Contains(out, "opened") || got.UUID != uuid || got.AcceptLoss != "token" {
		t.Errorf("exit status %d, asked for %+v\n%s\n%s", code, got, out, errs)
	}
	for line, want := range map[string]string{
		"kv open 17": "namespace list",
		"kv open 0425d6c3-77cf-4e62-873e-0484d7ac5275": "no namespace",
	} {
		if code, _, errs := run(t, append(strings.Fields(line), "--socket", s)...); code == 0 ||
			!strings.Contains(errs, want) {
			t.Errorf("%s: exit status %d\n%s", line, code, errs)
		}
	}
}
