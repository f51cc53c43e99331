package config

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"jbofd/internal/nvmeof"
)

var update = flag.Bool("update", false, "write testdata and docs/configuration.md anew")

// golden compares got with a file, or writes it under -update.
func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (go test -update writes it anew)\n got:\n%s\nwant:\n%s", path, got, want)
	}
}

func TestEveryProblemIsReportedWithItsPlace(t *testing.T) {
	files, err := filepath.Glob("testdata/bad/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no testdata: %v", err)
	}
	for _, f := range files {
		t.Run(strings.TrimSuffix(filepath.Base(f), ".yaml"), func(t *testing.T) {
			data, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			c, err := Parse(filepath.Base(f), data)
			if c != nil || err == nil {
				t.Fatalf("accepted")
			}
			var all Errors
			if !errors.As(err, &all) {
				t.Fatalf("error is %T, want Errors", err)
			}
			for _, p := range all {
				if strings.HasSuffix(p.Reason, "allowed:") || strings.HasSuffix(p.Reason, "allowed: ") {
					t.Errorf("%v: does not say what is allowed", p)
				}
			}
			golden(t, strings.TrimSuffix(f, ".yaml")+".txt", err.Error()+"\n")
		})
	}
}

// minimal is a minimal valid configuration.
const minimal = `
listeners: [{address: "127.0.0.1:0"}]
ssds: [{name: s, backend: mem, size: 1GiB}]
`

func mustParse(t *testing.T, text string) *Config {
	t.Helper()
	c, err := Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestWhatTheFileLeavesOutHasItsDefault(t *testing.T) {
	c := mustParse(t, minimal+`
subsystems:
  - nqn: nqn.2026-11.example.jbofd:a
    allow_any_host: true
    namespaces: [{nsid: 1, ssd: s, size: 8MiB}]
`)
	if c.Limits.QueueDepth != 128 || c.Limits.IOQueues != 64 || c.Limits.InCapsuleBytes != 8192 ||
		c.Limits.MDTS != 1<<20 || c.Limits.Buffers != 128<<20 {
		t.Errorf("limits %+v", c.Limits)
	}
	if c.Limits.DiscoveryIdleTimeout != 2*time.Minute {
		t.Errorf("discovery_idle_timeout %v", c.Limits.DiscoveryIdleTimeout)
	}
	if n := c.Subsystems[0].Namespaces[0]; n.BlockSize != 4096 || n.Type != "block" || n.Size != 8<<20 {
		t.Errorf("namespace %+v", n)
	}
	if s := c.SSDs[0]; s.Engine != "auto" || s.Fault != nil {
		t.Errorf("ssd %+v", s)
	}
	if c.Metrics.Pprof {
		t.Error("pprof is on by default")
	}
}

func TestTheEmbeddedDefaultIsValidAndOnLoopbackOnly(t *testing.T) {
	c := Default()
	for _, a := range []string{c.Metrics.Address, c.Discovery.Address, c.Listeners[0].Address} {
		if !strings.HasPrefix(a, "127.0.0.1:") {
			t.Errorf("listens on %s", a)
		}
	}
	if len(c.SSDs) != 3 || c.SSDs[0].Path != "data/ssd0.img" || !c.SSDs[1].Create || c.SSDs[1].Size != 1<<30 {
		t.Errorf("ssds %+v", c.SSDs)
	}
}

// equal compares configurations without their positions in the file.
func equal(a, b *Config) bool {
	x, y := *a, *b
	x.pos, y.pos = nil, nil
	return reflect.DeepEqual(x, y)
}

func TestTheEffectiveConfigurationReadsBackEqual(t *testing.T) {
	check := func(t interface{ Fatalf(string, ...any) }, c *Config) {
		out := c.Effective()
		back, err := Parse("effective.yaml", out)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if again := back.Effective(); string(again) != string(out) {
			t.Fatalf("not stable:\n%s\n%s", out, again)
		}
		if !equal(c, back) {
			t.Fatalf("reads back different:\n%s", out)
		}
	}
	check(t, Default())
	full, err := os.ReadFile("testdata/full.yaml")
	if err != nil {
		t.Fatal(err)
	}
	check(t, mustParse(t, string(full)))
	rapid.Check(t, func(rt *rapid.T) {
		c := Default()
		c.Node.DataDir = rapid.StringN(1, 20, -1).Draw(rt, "data_dir")
		c.SSDs[0].Path = rapid.StringMatching(`[ -~é]{1,20}`).Draw(rt, "path") + "x"
		c.Admin.Socket = rapid.StringMatching(`[ -~é]{0,20}`).Draw(rt, "socket")
		c.Limits.DiscoveryIdleTimeout = time.Duration(rapid.Int64Range(int64(time.Second), int64(time.Hour)).Draw(rt,
			"idle"))
		c.Limits.StallTimeout = time.Duration(rapid.Int64Range(1, 3600).Draw(rt, "stall")) * time.Second
		c.Limits.Buffers = Bytes(rapid.Int64Range(32<<20, 1<<40).Draw(rt, "buffers"))
		c.SSDs[1].Fault = &Fault{Seed: rapid.Int64Min(0).Draw(rt, "seed"),
			ReadErrorProbability: rapid.Float64Range(0, 1).Draw(rt, "p")}
		check(rt, c)
	})
}

func TestColonsNeedNoQuotesInFlowStyle(t *testing.T) {
	c := mustParse(t, `
metrics: {address: 127.0.0.1:9420}
listeners: [{transport: tcp, address: 127.0.0.1:4420}]
ssds: [{name: s, backend: mem, size: 1GiB}]
subsystems:
  - {nqn: nqn.2026-11.example.jbofd:a, namespaces: [{nsid: 1, ssd: s, size: 1MiB, hosts: [nqn.2026-11.example.host:5]}],
     hosts: [ nqn.2014-08.org.nvmexpress:uuid:6f8b1c1e-6c29-4b5a-9a55-0d7f3f4f2c11, nqn.2026-11.example.host:5 ]}
`)
	s := c.Subsystems[0]
	want := []string{"nqn.2014-08.org.nvmexpress:uuid:6f8b1c1e-6c29-4b5a-9a55-0d7f3f4f2c11",
		"nqn.2026-11.example.host:5"}
	if !reflect.DeepEqual(s.Hosts, want) || !reflect.DeepEqual(s.Namespaces[0].Hosts, want[1:]) ||
		c.Listeners[0].Address != "127.0.0.1:4420" {
		t.Errorf("%+v", c)
	}
	if _, err := Parse("x", []byte(minimal+"subsystems: [{nqn: nqn.2026-11.example.jbofd:a, hosts: "+
		"[nqn.2026-11.example: a]}]")); err == nil {
		t.Error("a mapping with a space after the colon passes for a string")
	}
}

func TestSizesAreWrittenAsTheyAreRead(t *testing.T) {
	for text, want := range map[string]Bytes{"0": 0, "4096": 4096, "8KiB": 8192, "8 KiB": 8192, "1GiB": 1 << 30,
		"2TiB": 2 << 40, "7B": 7} {
		got, err := ParseBytes(text)
		if err != nil || got != want {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "GiB", "1GB", "1.5GiB", "-1", "8388608TiB", "99999999999999999999", "1 G"} {
		if got, err := ParseBytes(text); err == nil {
			t.Errorf("%q is %d", text, got)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		want := Bytes(rapid.Int64Min(0).Draw(t, "n"))
		if got, err := ParseBytes(want.String()); err != nil || got != want {
			t.Fatalf("%d written as %q is read as %d, %v", want, want, got, err)
		}
		d := time.Duration(rapid.Int64().Draw(t, "d"))
		if got, err := parseDuration(formatDuration(d)); err != nil || got != d {
			t.Fatalf("%d written as %q is read as %d, %v", d, formatDuration(d), got, err)
		}
	})
}

func TestTheEnvironmentReplacesScalarsOfSections(t *testing.T) {
	c, err := ParseEnv("f.yaml", []byte(minimal+"log: {level: loud}"), []string{
		"JBOFD_LOG_LEVEL=debug", "JBOFD_LIMITS_BUFFERS=64MiB", "JBOFD_METRICS_PPROF=true", "JBOFD_NODE_DATA_DIR=/tmp/x",
		"JBOFD_LIMITS_KATO_MIN=2s", "JBOFD_ADMIN_SOCKET=", "JBOFD_TEST_SEED=7", "HOME=/root",
	})
	if err == nil || !strings.Contains(err.Error(), "loud") {
		t.Fatalf("a bad value in the file is hidden by the environment: %v", err)
	}
	c, err = ParseEnv("f.yaml", []byte(minimal), []string{
		"JBOFD_LOG_LEVEL=debug", "JBOFD_LIMITS_BUFFERS=64MiB", "JBOFD_METRICS_PPROF=true", "JBOFD_NODE_DATA_DIR=/tmp/x",
		"JBOFD_LIMITS_KATO_MIN=2s", "JBOFD_ADMIN_SOCKET=", "JBOFD_TEST_SEED=7", "HOME=/root",
	})
	if err != nil {
		t.Fatal(err)
	}
	if c.Log.Level != "debug" || c.Limits.Buffers != 64<<20 || !c.Metrics.Pprof || c.Node.DataDir != "/tmp/x" ||
		c.Limits.KATOMin != 2*time.Second || c.Admin.Socket != "" {
		t.Errorf("%+v", c)
	}
}

func TestTheEnvironmentIsAsStrictAsTheFile(t *testing.T) {
	_, err := ParseEnv("f.yaml", []byte(minimal), []string{"JBOFD_LOG_LEVEL=loud", "JBOFD_LOG_LEVLE=info",
		"JBOFD_METRICS_ADDRESS=here", "JBOFD_LISTENERS_ADDRESS=0.0.0.0:4420",
		"JBOFD_CLUSTER_NAME=demo"})
	want := []string{
		`environment JBOFD_LOG_LEVEL: log.level: "loud" is not allowed; allowed: debug, info, warn, error`,
		`environment JBOFD_LOG_LEVLE: unknown variable; allowed: JBOFD_LOG_LEVEL, JBOFD_LOG_FORMAT, ` +
			`JBOFD_LOG_PEER_LINES_PER_SEC`,
		`environment JBOFD_LISTENERS_ADDRESS: unknown variable; allowed: none, because listeners is a list, ` +
			`which only the file has`,
		`environment JBOFD_CLUSTER_NAME: unknown variable; allowed: none, because cluster is a section that may be ` +
			`absent, which only the file has`,
		`environment JBOFD_METRICS_ADDRESS: metrics.address: "here" is not an address; ` +
			`allowed: IP:port, as in 0.0.0.0:4420 or [::1]:4420`,
	}
	if err == nil || err.Error() != strings.Join(want, "\n") {
		t.Errorf("got:\n%v", err)
	}
}

func TestLoadNamesTheFileItCannotRead(t *testing.T) {
	_, err := Load("testdata/none.yaml", Machine{})
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "testdata/none.yaml") {
		t.Errorf("%v", err)
	}
}

func FuzzParseNeverPanics(f *testing.F) {
	files, _ := filepath.Glob("testdata/*/*.yaml")
	for _, name := range append(files, "demo.yaml", "testdata/full.yaml") {
		data, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("fuzz.yaml", data)
		if err != nil {
			return
		}
		out := c.Effective()
		if _, err := Parse("effective.yaml", out); err != nil {
			t.Fatalf("the effective configuration is refused: %v\n%s", err, out)
		}
	})
}

func TestNSIDsAreThoseThatASubsystemCanHold(t *testing.T) {
	text := func(nsid int) []byte {
		return []byte(fmt.Sprintf("%ssubsystems: [{nqn: nqn.2026-11.example.jbofd:a, allow_any_host: true, "+
			"namespaces: [{nsid: %d, ssd: s, size: 1MiB}]}]", minimal, nsid))
	}
	if _, err := Parse("x", text(nvmeof.MaxNSID)); err != nil {
		t.Error(err)
	}
	if _, err := Parse("x", text(nvmeof.MaxNSID+1)); err == nil {
		t.Error("an NSID above nvmeof.MaxNSID passes")
	}
}

// TestAProblemOfAFieldNamesWhereItsValueIsFrom: the environment, the file, or the default.
func TestAProblemOfAFieldNamesWhereItsValueIsFrom(t *testing.T) {
	for _, c := range []struct{ yaml, environ, want string }{
		{minimal, "JBOFD_ADMIN_SOCKET=/x", "environment JBOFD_ADMIN_SOCKET: "},
		{minimal + "admin: {socket: /x}\n", "", "f.yaml:"},
		{minimal, "", "f.yaml: "},
	} {
		cfg, err := ParseEnv("f.yaml", []byte(c.yaml), []string{c.environ})
		if err != nil {
			t.Fatal(err)
		}
		taken := errors.New("taken")
		if err := cfg.FieldProblem("admin.socket", taken); !strings.HasPrefix(err.Error(), c.want) ||
			!strings.HasSuffix(err.Error(), ": admin.socket: taken") || !errors.Is(err, taken) {
			t.Errorf("%q and %q: %q, want %q", c.yaml, c.environ, err, c.want)
		}
	}
}
