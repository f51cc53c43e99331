package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"jbofd/client"
	"jbofd/internal/nvme"
)

// twoTenants has two subsystems on two drives. Only host a may connect to subsystem a. Both hosts may connect to
// subsystem b, but only host b sees its namespace 2.
const twoTenants = `  - nqn: nqn.2026-11.example.jbofd:a
    hosts: [nqn.2026-11.example.host:a]
    namespaces:
      - {nsid: 1, ssd: ssd0, size: 16MiB, block_size: 512}
  - nqn: nqn.2026-11.example.jbofd:b
    hosts: [nqn.2026-11.example.host:a, nqn.2026-11.example.host:b]
    namespaces:
      - {nsid: 1, ssd: ssd1, size: 16MiB, block_size: 4096}
      - {nsid: 2, ssd: ssd0, size: 8MiB, block_size: 512, hosts: [nqn.2026-11.example.host:b]}
`

const twoFiles = fileSSD + "  - {name: ssd1, backend: file, path: \"@DIR@/ssd1.img\", size: 64MiB, create: true}\n"

// TestHostsSeeOnlyTheirNamespaces: hosts can connect only to subsystems that allow them and see only their namespaces.
// Discovery lists nothing else, on its own port and on the I/O port.
func TestHostsSeeOnlyTheirNamespaces(t *testing.T) {
	t.Parallel()
	d := start(t, setup{ssds: twoFiles, subsystems: twoTenants,
		discovery: ", referrals: [{address: \"192.0.2.7:8009\"}]"})
	for _, c := range []struct {
		host string
		sees map[string][]uint32
	}{
		{hostA, map[string][]uint32{nqnA: {1}, nqnB: {1}}},
		{hostB, map[string][]uint32{nqnB: {1, 2}}},
		{"nqn.2026-11.example.host:stranger", nil},
	} {
		for _, sub := range []string{nqnA, nqnB} {
			o := d.options(c.host, sub)
			o.CtrlLossTimeout = -1
			want, allowed := c.sees[sub]
			if !allowed {
				cl, err := client.Connect(ctx(t), o)
				var st *client.StatusError
				if !errors.As(err, &st) || st.Status.Code() != nvme.ConnectInvalidHost || !st.Status.DNR() {
					t.Errorf("%s to %s: %v, want status Connect Invalid Host, do not retry", c.host, sub, err)
				}
				if err == nil {
					_ = cl.Close()
				}
				continue
			}
			ids, err := d.connect(o).NamespaceIDs(ctx(t))
			if err != nil || !slices.Equal(ids, want) {
				t.Errorf("%s sees namespaces %v of %s, %v; want %v", c.host, ids, sub, err, want)
			}
		}
		for _, address := range []string{d.discovery, d.addr} {
			log, err := client.Discover(ctx(t), client.Options{Address: address, HostNQN: c.host})
			if err != nil {
				t.Fatal(err)
			}
			var subs []string
			referred := false
			for _, e := range log.Entries {
				if e.Type != client.Storage {
					referred = referred || e.Type == client.Referral && e.Address() == "192.0.2.7:8009"
					continue
				}
				subs = append(subs, e.SubNQN)
				if e.Transport != "tcp" || e.Family != "ipv4" || e.Address() != d.addr {
					t.Errorf("%s on %s is told of %s at %s %s %s, want tcp ipv4 %s", c.host, address, e.SubNQN,
						e.Transport, e.Family, e.Address(), d.addr)
				}
			}
			if !referred {
				t.Errorf("%s on %s is not referred to the other discovery service: %+v", c.host, address, log.Entries)
			}
			slices.Sort(subs)
			var want []string
			for sub := range c.sees {
				want = append(want, sub)
			}
			slices.Sort(want)
			if !slices.Equal(subs, want) {
				t.Errorf("%s on %s discovers %v, want %v", c.host, address, subs, want)
			}
		}
	}
	if n := d.metric("jbof_connect_failures_total", "reason", "host"); n != 3 {
		t.Errorf("%v refused hosts are counted, want 3", n)
	}
	// A host cannot use a namespace that it does not see.
	a := d.connect(d.options(hostA, nqnB))
	if _, err := a.IOPassthru(ctx(t), func() nvme.SQE { e := rw(nvme.CmdFlush, 0, 0, 1); e.SetNSID(2); return e }(),
		nil); !errors.Is(err, client.ErrNamespaceGone) {
		t.Errorf("a host flushes a namespace that is not its own: %v", err)
	}
}

// TestIdentityIsStableOverRestarts: serial, model, UUID, NGUID and EUI64, and the data.
func TestIdentityIsStableOverRestarts(t *testing.T) {
	t.Parallel()
	d := start(t, setup{ssds: twoFiles, subsystems: twoTenants})
	data := make([]byte, 64<<10)
	fill(data, 0, 1)
	look := func() (out []string) {
		for _, x := range []struct {
			sub   string
			nsids []uint32
		}{{nqnA, []uint32{1}}, {nqnB, []uint32{1}}} {
			c := d.connect(d.options(hostA, x.sub))
			id, err := c.Identity(ctx(t))
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, fmt.Sprint(id.Serial, id.Model, id.SubNQN))
			for _, nsid := range x.nsids {
				i := open(t, c, nsid).Info()
				if i.UUID == [16]byte{} || i.NGUID == [16]byte{} || i.EUI64 == [8]byte{} {
					t.Errorf("%s namespace %d: an empty identifier: %+v", x.sub, nsid, i)
				}
				out = append(out, fmt.Sprintf("%+v", i))
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		return out
	}
	n := d.namespace(d.options(hostA, nqnA), 1)
	if _, err := n.WriteAt(ctx(t), data, 1<<20, client.FUA); err != nil {
		t.Fatal(err)
	}
	before := look()
	for _, how := range []string{"SIGTERM", "kill -9"} {
		if how == "SIGTERM" {
			d.term()
		} else {
			d.kill()
		}
		d.launch()
		if after := look(); !slices.Equal(before, after) {
			t.Errorf("after %s:\n%v\nbefore:\n%v", how, after, before)
		}
		got := make([]byte, len(data))
		if _, err := n.ReadAt(ctx(t), got, 1<<20); err != nil || !bytes.Equal(got, data) {
			t.Errorf("after %s: the data differ, or %v", how, err)
		}
	}
}

// TestNamespacesComeGrowAndGoLive: a connected host is notified of the change and sees it, its I/O to other namespaces
// continues, and a persistent discovery connection is notified of a new subsystem.
func TestNamespacesComeGrowAndGoLive(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	events := make(chan client.Event, 100)
	o := d.options(hostA, nqnA)
	o.OnEvent = func(e client.Event) {
		if e.Kind != client.EventANA { // a change of a group's namespaces is an ANA event as well
			events <- e
		}
	}
	c := d.connect(o)
	disc, err := client.ConnectDiscovery(ctx(t), client.Options{Address: d.discovery, HostNQN: hostA})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = disc.Close() })
	if log, err := disc.Log(ctx(t)); err != nil {
		t.Fatal(err)
	} else if i := slices.IndexFunc(log.Entries,
		func(e client.DiscoveryEntry) bool { return e.SubNQN == nqnB }); i >= 0 {
		t.Fatal("the subsystem to come is there already")
	}
	good := startVictim(t, d, d.options(hostB, nqnA), 1)

	expect := func(what string, nsid uint32) {
		t.Helper()
		select {
		case e := <-events:
			if e.Kind != client.EventNamespaces || !slices.Equal(e.NSIDs, []uint32{nsid}) {
				t.Errorf("%s: event %+v", what, e)
			}
		case <-time.After(wait):
			t.Fatalf("%s: no event", what)
		}
	}
	s := oneMem
	s.subsystems += "      - {nsid: 2, ssd: ssd0, size: 8MiB, block_size: 4096}\n"
	if !d.reload(s) {
		t.Fatal("adding a namespace was refused")
	}
	expect("added", 2)
	two := open(t, c, 2)
	data := make([]byte, 8192)
	fill(data, 0, 2)
	if _, err := two.WriteAt(ctx(t), data, 0, 0); err != nil {
		t.Fatal(err)
	}

	s.subsystems = strings.Replace(s.subsystems, "size: 8MiB", "size: 12MiB", 1)
	if !d.reload(s) {
		t.Fatal("growing a namespace was refused")
	}
	expect("grown", 2)
	if err := two.Refresh(ctx(t)); err != nil || two.Size() != 12<<20 {
		t.Errorf("the grown namespace has %d bytes, %v", two.Size(), err)
	}
	if _, err := two.WriteAt(ctx(t), data, 12<<20-8192, 0); err != nil {
		t.Errorf("writing at the new end: %v", err)
	}
	got := make([]byte, len(data))
	if _, err := two.ReadAt(ctx(t), got, 0); err != nil || !bytes.Equal(got, data) {
		t.Errorf("the grown namespace lost its data, or %v", err)
	}

	if !d.reload(oneMem) {
		t.Fatal("removing a namespace was refused")
	}
	expect("removed", 2)
	if _, err := two.ReadAt(ctx(t), got, 0); !errors.Is(err, client.ErrNamespaceGone) {
		t.Errorf("reading a removed namespace: %v", err)
	}

	s = oneMem
	s.subsystems += "  - {nqn: " + nqnB + ", hosts: [" + hostA + "], namespaces: [{nsid: 1, ssd: ssd0, size: 4MiB}]}\n"
	if !d.reload(s) {
		t.Fatal("adding a subsystem was refused")
	}
	select {
	case <-disc.Changed():
	case <-time.After(wait):
		t.Fatal("discovery has not told of the new subsystem")
	}
	if log, err := disc.Log(ctx(t)); err != nil ||
		!slices.ContainsFunc(log.Entries, func(e client.DiscoveryEntry) bool { return e.SubNQN == nqnB }) {
		t.Errorf("the new subsystem is not in the discovery log %+v, %v", log, err)
	}
	nb := d.namespace(d.options(hostA, nqnB), 1)

	// A host that is no longer allowed is disconnected.
	s.subsystems = strings.Replace(s.subsystems, "hosts: ["+hostA+"]", "hosts: ["+hostB+"]", 1)
	if !d.reload(s) {
		t.Fatal("changing the hosts was refused")
	}
	eventually(t, "the host that may no longer is put out",
		func() bool { return d.metric("jbof_connections") == 2+2+1 })
	_ = nb
	good.progress(10)
	good.stop()
}

// TestABadReloadChangesNothing: the reason is logged with the line, and the old configuration stays.
func TestABadReloadChangesNothing(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	n := d.namespace(d.options(hostA, nqnA), 1)
	for _, c := range []struct {
		name, subsystems string
		words            []string
	}{
		{"unknown key", strings.Replace(openSubsystem, "allow_any_host", "allow_anyone", 1),
			[]string{"jbofd.yaml:", "allow_anyone"}},
		{"unknown ssd", strings.Replace(openSubsystem, "ssd0", "ssd7", 1), []string{"ssd7"}},
		{"shrunk", strings.Replace(openSubsystem, "64MiB", "32MiB", 1), []string{"jbofd.yaml:", "size: 32MiB"}},
		{"no room", strings.Replace(openSubsystem, "64MiB", "64GiB", 1), []string{"64GiB"}},
		{"not YAML", "  - ][\n", []string{"jbofd.yaml:"}},
	} {
		s := oneMem
		s.subsystems = c.subsystems
		if d.reload(s) {
			t.Errorf("%s: accepted", c.name)
		}
		if len(d.log.find(append(c.words, "reload refused")...)) == 0 {
			t.Errorf("%s: no line of the log says %q", c.name, c.words)
		}
		if _, err := n.ReadAt(ctx(t), make([]byte, 4096), 0); err != nil {
			t.Errorf("%s: the old namespace does not serve: %v", c.name, err)
		}
		if err := n.Refresh(ctx(t)); err != nil || n.Size() != 64<<20 {
			t.Errorf("%s: the namespace has %d bytes, %v", c.name, n.Size(), err)
		}
	}
	// Adding an SSD requires a restart.
	s := oneMem
	s.ssds += "  - {name: ssd1, backend: mem, size: 64MiB}\n"
	if d.reload(s) {
		t.Error("a new ssd was accepted live")
	}
	if !d.reload(oneMem) {
		t.Error("the old configuration is refused now")
	}
}

// TestStoppingUnderLoad: SIGTERM ends the daemon in time although hosts continue to send commands. Completed commands
// took effect, and hosts find their data after the restart.
func TestStoppingUnderLoad(t *testing.T) {
	t.Parallel()
	d := start(t, setup{ssds: fileSSD, subsystems: openSubsystem})
	good := startVictim(t, d, d.options(hostA, nqnA), 8)
	good.progress(100)
	if took := d.term(); took > stopLimit {
		t.Errorf("stopped after %v, the limit is %v", took, stopLimit)
	} else {
		t.Logf("stopped after %v under load", took)
	}
	if len(d.log.find("after drain_timeout")) > 0 {
		t.Error("commands that were under way were not finished in time, with a drive that is fast")
	}
	d.launch()
	good.progress(100)
	good.stop()
}

// TestStopWaitsForOutstandingCommands: SIGTERM waits for the outstanding commands of a full queue on a slow
// drive.
func TestStopWaitsForOutstandingCommands(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.ssds = "  - {name: ssd0, backend: mem, size: 128MiB, fault: {delay: 1s, delay_probability: 1}}\n"
	d := start(t, s)
	o := d.options(hostA, nqnA)
	o.QPairs, o.CtrlLossTimeout = 1, -1
	q, err := d.connect(o).OpenQPair(ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = q.Close() }()
	const n = 32
	cmds := make([]client.Command, n)
	for i := range cmds {
		client.SetRW(&cmds[i], client.OpWrite, 1, uint64(i), 1)
		cmds[i].Data = make([]byte, 512)
	}
	if k, err := q.Submit(cmds); k != n || err != nil {
		t.Fatal(k, err)
	}
	eventually(t, "the commands are with the drive", func() bool { return d.metric("jbof_ssd_io_now") == n })
	done := make(chan time.Duration)
	go func() { done <- d.term() }()
	comps := make([]client.Completion, n)
	for got := 0; got < n; {
		k, err := q.Poll(comps, wait)
		if err != nil || k == 0 {
			t.Fatalf("%d of %d commands were answered, then %v", got, n, err)
		}
		for _, c := range comps[:k] {
			if !c.Status.OK() {
				t.Errorf("status %v", c.Status)
			}
		}
		got += k
	}
	if took := <-done; took > stopLimit {
		t.Errorf("stopped after %v", took)
	}
}

// TestValidateSaysWhatIsWrong: the error states file, line, field and the allowed values.
func TestValidateSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	d := newDaemon(t, oneMem)
	if out, err := exec.Command(*binaryPath, "validate", d.file).CombinedOutput(); err != nil {
		t.Errorf("a good file: %v\n%s", err, out)
	}
	s := oneMem
	s.subsystems = strings.Replace(openSubsystem, "block_size: 512", "block_size: 513", 1)
	d.write(s)
	out, err := exec.Command(*binaryPath, "validate", d.file).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "jbofd.yaml:") || !strings.Contains(string(out), "block_size") ||
		!strings.Contains(string(out), "4096") {
		t.Errorf("a bad file: %v\n%s", err, out)
	}
}

// TestALiveScrapeIsClean: promlint finds nothing, every name is in docs/operations.md, tenants have series of their
// own, and the probes answer.
func TestALiveScrapeIsClean(t *testing.T) {
	t.Parallel()
	d := start(t, setup{ssds: twoFiles, subsystems: twoTenants})
	a, b := d.namespace(d.options(hostA, nqnA), 1), d.namespace(d.options(hostB, nqnB), 1)
	for i, n := range []*client.Namespace{a, b} {
		for range i + 2 {
			if _, err := n.WriteAt(ctx(t), make([]byte, 8192), 0, 0); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := n.ReadAt(ctx(t), make([]byte, 4096), 0); err != nil {
			t.Fatal(err)
		}
		if err := n.Flush(ctx(t)); err != nil {
			t.Fatal(err)
		}
	}
	_, body := d.get("/metrics")
	problems, err := promlint.New(strings.NewReader(body)).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if strings.HasPrefix(p.Metric, "jbof_") {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
	docs, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	f := d.scrape()
	for name := range f {
		if strings.HasPrefix(name, "jbof_") && !bytes.Contains(docs, []byte("`"+name+"`")) {
			t.Errorf("%s is not in docs/operations.md", name)
		}
	}
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"jbof_io_completed_total", []string{"tenant", hostA, "ssd", "ssd0", "op", "write"}, 2},
		{"jbof_io_bytes_total", []string{"tenant", hostA, "ssd", "ssd0", "op", "write"}, 2 * 8192},
		{"jbof_io_completed_total", []string{"tenant", hostB, "ssd", "ssd1", "op", "write"}, 3},
		{"jbof_io_duration_seconds", []string{"tenant", hostB, "ssd", "ssd1", "op", "write"}, 3},
		{"jbof_io_completed_total", []string{"tenant", hostB, "op", "flush"}, 1},
		{"jbof_io_bytes_total", []string{"tenant", hostA, "op", "read"}, 4096},
		{"jbof_ready", nil, 1},
		{"jbof_ssd_up", nil, 2},
		{"jbof_ssd_writes_completed_total", []string{"ssd", "ssd1"}, 3},
		{"jbof_connections", []string{"transport", "tcp"}, 4},
		{"jbof_connection_established_total", nil, 4},
		{"jbof_namespace_capacity_bytes", []string{"subsystem", nqnB, "nsid", "1"}, 16 << 20},
		{"jbof_node_info", []string{"node", "e2e"}, 1},
	} {
		if got := sum(f[c.name], c.labels...); got != c.want {
			t.Errorf("%s%v is %v, want %v", c.name, c.labels, got, c.want)
		}
	}
	for _, m := range f["jbof_io_duration_seconds"].GetMetric() {
		if n := len(m.GetHistogram().GetBucket()); n > 17+1 { // and +Inf; narrow enough between 10 ms and 2 s for a p99
			t.Errorf("a histogram of %d buckets", n)
		}
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		if code, body := d.get(path); code != 200 {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
}

// TestReloadsUnderLoad: namespaces are added and removed while hosts use another one. The hosts see no error, and the
// reloads leak nothing.
func TestReloadsUnderLoad(t *testing.T) {
	t.Parallel()
	d := start(t, setup{ssds: fileSSD, subsystems: openSubsystem})
	good := startVictim(t, d, d.options(hostA, nqnA), 4)
	c := d.connect(d.options(hostB, nqnA))
	more := setup{ssds: fileSSD,
		subsystems: openSubsystem + "      - {nsid: 2, ssd: ssd0, size: 8MiB, block_size: 4096}\n"}
	for i := range 15 {
		if !d.reload(more) {
			t.Fatalf("reload %d: adding was refused", i)
		}
		n := open(t, c, 2)
		if _, err := n.WriteAt(ctx(t), make([]byte, 64<<10), 0, 0); err != nil {
			t.Fatal(err)
		}
		if !d.reload(setup{ssds: fileSSD, subsystems: openSubsystem}) {
			t.Fatalf("reload %d: removing was refused", i)
		}
		if _, err := n.ReadAt(ctx(t), make([]byte, 4096), 0); !errors.Is(err, client.ErrNamespaceGone) {
			t.Fatalf("reading a removed namespace: %v", err)
		}
		good.progress(10)
	}
	good.stop()
	if n := c.Losses(); n != 0 {
		t.Errorf("%d connections were lost", n)
	}
}

// TestTheAdminSocketAnswersItsOwner: it reports the state of the daemon and reloads its configuration. Other users
// cannot open it.
func TestTheAdminSocketAnswersItsOwner(t *testing.T) {
	t.Parallel()
	d := start(t, setup{ssds: twoFiles, subsystems: twoTenants})
	if st, err := os.Stat(d.socket()); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the socket's mode is %v, %v", st.Mode(), err)
	}
	d.connect(d.options(hostA, nqnA))
	var connections struct {
		Items []struct {
			HostNQN, SubNQN string
			QID             int
		}
	}
	if err := d.admin("GET", "/v1/connections", &connections); err != nil || len(connections.Items) != 2 ||
		connections.Items[0].HostNQN != hostA || connections.Items[1].QID != 1 {
		t.Errorf("connections %+v, %v", connections, err)
	}
	var ssds struct {
		Items []struct {
			Name, Engine string
			Extents      []struct{ NSID int }
		}
	}
	if err := d.admin("GET", "/v1/ssds", &ssds); err != nil || len(ssds.Items) != 2 ||
		len(ssds.Items[0].Extents) != 2 || ssds.Items[1].Name != "ssd1" {
		t.Errorf("ssds %+v, %v", ssds, err)
	}
	var subs struct {
		Items []struct {
			NQN        string
			Namespaces []struct{ UUID string }
		}
	}
	if err := d.admin("GET", "/v1/subsystems", &subs); err != nil || len(subs.Items) != 2 ||
		len(subs.Items[1].Namespaces) != 2 || subs.Items[0].Namespaces[0].UUID == "" {
		t.Errorf("subsystems %+v, %v", subs, err)
	}
	var answer any
	if err := d.admin("POST", "/v1/reload", &answer); err != nil {
		t.Error(err)
	}
	d.write(setup{ssds: twoFiles, subsystems: "  - {nqn: none}\n"})
	if err := d.admin("POST", "/v1/reload", &answer); err == nil || !strings.Contains(err.Error(), "nqn") {
		t.Errorf("a bad reload: %v", err)
	}
}

// TestTooManyTenantsShareSeries: hosts beyond metrics.max_tenants are counted as tenant "other".
func TestTooManyTenantsShareSeries(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.metrics = ", max_tenants: 2"
	d := start(t, s)
	for i := range 5 {
		n := d.namespace(d.options(fmt.Sprintf("%s-%d", hostA, i), nqnA), 1)
		if _, err := n.WriteAt(ctx(t), make([]byte, 4096), 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	f := d.scrape()
	if n := sum(f["jbof_io_completed_total"], "op", "write"); n != 5 {
		t.Errorf("%v writes are counted, want 5", n)
	}
	if n := sum(f["jbof_io_completed_total"], "tenant", "other", "op", "write"); n != 3 {
		t.Errorf("%v writes of tenant other are counted, want 3", n)
	}
	if sum(f["jbof_tenants_dropped_total"]) == 0 {
		t.Error("no dropped tenants are counted")
	}
}
