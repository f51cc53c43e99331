package config

import (
	"strings"
	"testing"
)

const running = `
log: {level: info}
listeners: [{address: "127.0.0.1:4420"}]
ssds:
  - {name: s, backend: mem, size: 1GiB}
  - {name: t, backend: mem, size: 1GiB}
subsystems:
  - nqn: nqn.2026-11.example.jbofd:a
    hosts: [host-a, host-b]
    namespaces:
      - {nsid: 1, ssd: s, size: 64MiB}
      - {nsid: 2, ssd: s, size: 64MiB, hosts: [host-a]}
  - nqn: nqn.2026-11.example.jbofd:b
    allow_any_host: true
    namespaces: [{nsid: 1, ssd: t, size: 64MiB}]
`

// edit replaces pairs of strings in the running configuration's text.
func edit(t *testing.T, pairs ...string) *Config {
	t.Helper()
	for i := 0; i < len(pairs); i += 2 {
		if !strings.Contains(running, pairs[i]) {
			t.Fatalf("nothing to edit: %q", pairs[i])
		}
	}
	return mustParse(t, strings.NewReplacer(pairs...).Replace(running))
}

func TestAReloadFollowsWhatCanChangeLive(t *testing.T) {
	for _, c := range []struct {
		name  string
		pairs []string
		want  string
	}{
		{"nothing", nil, "no change"},
		{"order of hosts", []string{"[host-a, host-b]", "[host-b, host-a]"}, "no change"},
		{"log level", []string{"level: info", "level: debug"}, "log level: debug"},
		{"referral", []string{"log:", "discovery: {referrals: [{address: \"192.0.2.1:8009\"}]}\nlog:"},
			"referrals changed"},
		{"hosts", []string{"[host-a, host-b]", "[host-a]"}, "subsystem hosts changed: nqn.2026-11.example.jbofd:a"},
		{"allow_any_host", []string{"allow_any_host: true", "hosts: [host-a]"},
			"subsystem hosts changed: nqn.2026-11.example.jbofd:b"},
		{"namespace added", []string{"nsid: 2, ssd: s, size: 64MiB, hosts: [host-a]}",
			"nsid: 2, ssd: s, size: 64MiB, hosts: [host-a]}\n      - {nsid: 7, ssd: t, size: 1MiB}"},
			"namespace added: nqn.2026-11.example.jbofd:a nsid 7 (1MiB)"},
		{"namespace removed", []string{"      - {nsid: 1, ssd: s, size: 64MiB}\n", ""},
			"namespace removed: nqn.2026-11.example.jbofd:a nsid 1 (64MiB)"},
		{"namespace grown", []string{"nsid: 1, ssd: s, size: 64MiB", "nsid: 1, ssd: s, size: 65MiB"},
			"namespace grown: nqn.2026-11.example.jbofd:a nsid 1 (65MiB)"},
		{"namespace hosts", []string{"hosts: [host-a]}", "hosts: []}"},
			"namespace hosts changed: nqn.2026-11.example.jbofd:a nsid 2 (64MiB)"},
		{"subsystem renamed", []string{"jbofd:b", "jbofd:c"}, "subsystem added: nqn.2026-11.example.jbofd:c; " +
			"subsystem removed: nqn.2026-11.example.jbofd:b"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Diff(mustParse(t, running), edit(t, c.pairs...))
			if err != nil {
				t.Fatal(err)
			}
			if got.String() != c.want || got.Empty() != (c.want == "no change") {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}

func TestAReloadChangesTenants(t *testing.T) {
	with := func(tenants string) *Config { return mustParse(t, running+"tenants: ["+tenants+"]\n") }
	const gold, tin = "{name: gold, hosts: [host-a, host-b], weight: 4}",
		"{name: tin, hosts: [host-c], limits: {rw_ios_per_sec: 10}}"
	before := with(gold + "," + tin)
	for _, c := range []struct{ tenants, want string }{
		{tin + ", {name: gold, hosts: [host-b, host-a], weight: 4}", "no change"},
		{gold, "tenant removed: tin"},
		{"", "tenant removed: gold; tenant removed: tin"},
		{gold + "," + tin + ", {name: new, hosts: [host-d]}", "tenant added: new"},
		{gold + ", {name: tin, hosts: [host-c], limits: {rw_ios_per_sec: 11}}", "tenant changed: tin"},
		{"{name: gold, hosts: [host-a], weight: 4}, {name: tin, hosts: [host-c, host-b], limits: {rw_ios_per_sec: 10}}",
			"tenant changed: gold; tenant changed: tin"},
		{"{name: gold, hosts: [host-a, host-b]}," + tin, "tenant changed: gold"},
	} {
		got, err := Diff(before, with(c.tenants))
		if err != nil {
			t.Fatal(err)
		}
		if got.String() != c.want {
			t.Errorf("%s: %q, want %q", c.tenants, got, c.want)
		}
	}
}

func TestAReloadRefusesWhatNeedsARestart(t *testing.T) {
	to := edit(t, "log: {level: info}", "log: {level: debug, format: json}\nlimits: {stall_timeout: 5s, "+
		"buffers: 64MiB}",
		"127.0.0.1:4420", "127.0.0.1:4421",
		"{name: s, backend: mem, size: 1GiB}", "{name: s, backend: mem, size: 2GiB, fault: {seed: 2}}",
		"nqn: nqn.2026-11.example.jbofd:b", "nqn: nqn.2026-11.example.jbofd:b\n    serial: X",
		"nsid: 1, ssd: s, size: 64MiB", "nsid: 1, ssd: t, size: 32MiB, block_size: 512")
	changes, err := Diff(mustParse(t, running), to)
	want := []string{
		`test.yaml:2:29: log.format: "text" became "json", which needs a restart`,
		`test.yaml:3:25: limits.stall_timeout: 30s became 5s, which needs a restart`,
		`test.yaml:3:38: limits.buffers: 128MiB became 64MiB, which needs a restart`,
		`test.yaml:4:23: listeners[0].address: "127.0.0.1:4420" became "127.0.0.1:4421", which needs a restart`,
		`test.yaml:6:35: ssds[0].size: 1GiB became 2GiB, which needs a restart`,
		`test.yaml:6:41: ssds[0].fault: absent became present, which needs a restart`,
		`test.yaml:12:24: subsystems[0].namespaces[0].ssd: "s" became "t", which makes it another namespace: ` +
			`give it another nsid, or remove it by one reload and add it by the next`,
		`test.yaml:12:33: subsystems[0].namespaces[0].size: 32MiB is less than the present 64MiB; ` +
			`allowed: the same or more`,
		`test.yaml:12:52: subsystems[0].namespaces[0].block_size: 4096 became 512, which makes it another ` +
			`namespace: give it another nsid, or remove it by one reload, erase it with jbofctl namespace delete, ` +
			`and add it by the next reload`,
		`test.yaml:15:13: subsystems[1].serial: "" became "X", which needs a restart`,
	}
	if err == nil || err.Error() != strings.Join(want, "\n") {
		t.Errorf("got:\n%v\nwant:\n%s", err, strings.Join(want, "\n"))
	}
	if !changes.Empty() {
		t.Errorf("changes %v beside an error", changes)
	}
}

// TestAUUIDMayBeWrittenDownLater: an absent UUID is the one that the drive's label remembers.
func TestAUUIDMayBeWrittenDownLater(t *testing.T) {
	with := func(uuid string) *Config {
		return edit(t, "nsid: 1, ssd: s, size: 64MiB", "nsid: 1, ssd: s, size: 64MiB"+uuid)
	}
	const one, other = ", uuid: 6f8b1c1e-6c29-4b5a-9a55-0d7f3f4f2c11", ", uuid: 6f8b1c1e-6c29-4b5a-9a55-0d7f3f4f2c12"
	for _, c := range [][2]string{{"", one}, {one, ""}, {one, one}} {
		if got, err := Diff(with(c[0]), with(c[1])); err != nil || !got.Empty() {
			t.Errorf("from %q to %q: %v, %v", c[0], c[1], got, err)
		}
	}
	if _, err := Diff(with(one), with(other)); err == nil || !strings.Contains(err.Error(), "another namespace") {
		t.Errorf("another UUID: %v", err)
	}
}

func TestAKVNamespaceChangesItsSizeAndKeepsItsOptions(t *testing.T) {
	kv := strings.NewReplacer("nsid: 1, ssd: s, size: 64MiB", "nsid: 1, ssd: s, size: 66MiB, type: kv").Replace(running)
	for size, want := range map[string]string{
		"64MiB": "namespace shrunk: nqn.2026-11.example.jbofd:a nsid 1 (64MiB)",
		"67MiB": "namespace grown: nqn.2026-11.example.jbofd:a nsid 1 (67MiB)",
	} {
		to := strings.NewReplacer("size: 66MiB, type: kv", "size: "+size+", type: kv").Replace(kv)
		if got, err := Diff(mustParse(t, kv), mustParse(t, to)); err != nil || got.String() != want {
			t.Errorf("to %s: %v, %v, want %s", size, got, err, want)
		}
	}
	to := strings.NewReplacer("size: 66MiB, type: kv", "size: 66MiB, type: kv, kv: {requests: 2}").Replace(kv)
	want := `test.yaml:11:65: subsystems[0].namespaces[0].kv.requests: 256 became 2, which needs a restart`
	if _, err := Diff(mustParse(t, kv), mustParse(t, to)); err == nil || err.Error() != want {
		t.Errorf("got:\n%v\nwant:\n%s", err, want)
	}
}

func TestMovingAListOrAnSSDNeedsARestart(t *testing.T) {
	for _, pairs := range [][]string{
		{"  - {name: t, backend: mem, size: 1GiB}",
			"  - {name: t, backend: mem, size: 1GiB}\n  - {name: u, backend: mem, size: 1GiB}"},
		{"  - {name: t, backend: mem, size: 1GiB}", "  - {name: t, backend: mem, size: 1GiB, kv_swap: 64MiB}"},
		{`[{address: "127.0.0.1:4420"}]`, `[{address: "127.0.0.1:4420"}, {address: "127.0.0.1:4421"}]`},
	} {
		if _, err := Diff(mustParse(t, running), edit(t, pairs...)); err == nil ||
			!strings.Contains(err.Error(), "which needs a restart") {
			t.Errorf("%v: %v", pairs, err)
		}
	}
}
