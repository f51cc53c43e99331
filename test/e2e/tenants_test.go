package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/units"
)

// tenant is an entry of the section tenants.
func tenant(name, hosts, more string) string {
	return fmt.Sprintf("  - {name: %s, hosts: [%s]%s}\n", name, hosts, more)
}

// load is a host that continuously reads or writes, with workers commands outstanding.
type load struct {
	n      *client.Namespace
	c      *client.Controller
	bytes  int64
	ops    atomic.Int64
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// startLoad connects a host that generates load until the test ends.
func startLoad(t *testing.T, d *daemon, host string, workers, size int, writes bool) *load {
	t.Helper()
	o := d.options(host, nqnA)
	o.Queues, o.CommandTimeout = 2, time.Minute
	l := &load{c: d.connect(o), bytes: int64(size)}
	l.n = open(t, l.c, 1)
	background, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	for w := range workers {
		l.wg.Go(func() {
			p := make([]byte, size)
			off := int64(w) * int64(size) % (l.n.Size() - int64(size)) &^ 511
			for {
				var err error
				if writes {
					_, err = l.n.WriteAt(background, p, off, 0)
				} else {
					_, err = l.n.ReadAt(background, p, off)
				}
				if background.Err() != nil {
					return
				}
				if err != nil {
					t.Errorf("%s: %v", host, err)
					return
				}
				l.ops.Add(1)
			}
		})
	}
	t.Cleanup(l.stop)
	return l
}

func (l *load) stop() {
	l.cancel()
	l.wg.Wait()
}

// rate returns the number of commands per second over the given time. It measures between the completions of two
// commands, so that a low rate can be measured exactly.
func (l *load) rate(over time.Duration) float64 {
	begin, first := l.tick()
	end, last := begin, first
	for end.Sub(begin) < over {
		end, last = l.tick()
	}
	return float64(last-first) / end.Sub(begin).Seconds()
}

// tick waits for the completion of a command.
func (l *load) tick() (at time.Time, ops int64) {
	tick := time.NewTicker(200 * time.Microsecond)
	defer tick.Stop()
	before := l.ops.Load()
	for deadline := time.Now().Add(wait); ; <-tick.C {
		if ops := l.ops.Load(); ops != before || time.Now().After(deadline) {
			return time.Now(), ops
		}
	}
}

// holds checks that the rate over a second is within 5 % of want. The rate may never be higher. On a busy machine it
// may be lower for many seconds, so the check is repeated.
func (l *load) holds(t *testing.T, what string, want float64) {
	t.Helper()
	var rates []float64
	for range 20 {
		r := l.rate(time.Second)
		rates = append(rates, r)
		if r > 1.05*want {
			t.Errorf("%s: %.1f a second, the cap is %.0f", what, r, want)
			return
		}
		if r >= 0.95*want {
			return
		}
	}
	t.Errorf("%s: %.1f a second, the cap is %.0f", what, rates, want)
}

// TestCapsHold checks caps over a second on the real daemon: few commands, many commands, and bytes. I/O that a cap
// does not cover is not delayed.
func TestCapsHold(t *testing.T) {
	s := oneMem
	host := func(name string) string { return hostA + "-" + name }
	caps := ""
	for _, c := range []struct{ name, limits string }{
		{"ten", "rw_ios_per_sec: 10"}, {"thousand", "rw_ios_per_sec: 1000"}, {"many", "rw_ios_per_sec: 50000"},
		{"bytes", "rw_mbytes_per_sec: 20"}, {"reads", "r_mbytes_per_sec: 30, w_mbytes_per_sec: 10"},
	} {
		caps += tenant(c.name, host(c.name), ", limits: {"+c.limits+"}")
	}
	s.tenants = caps
	d := start(t, s)
	run := func(name string, workers, size int, writes bool, want float64) {
		l := startLoad(t, d, host(name), workers, size, writes)
		defer l.stop()
		l.tick() // use up the saved tokens
		l.holds(t, name, want)
	}
	run("ten", 8, 4096, false, 10)
	run("thousand", 64, 4096, true, 1000)
	// Commands of 1 MiB: each may begin as soon as no debt is left.
	run("bytes", 4, 256<<10, false, 80)
	run("bytes", 16, 16<<10, true, 20*64)

	reads := startLoad(t, d, host("reads"), 8, 64<<10, false)
	writes := startLoad(t, d, host("reads"), 8, 64<<10, true)
	reads.holds(t, "reads beside writes", 30*16)
	writes.holds(t, "writes beside reads", 10*16)
	reads.stop()
	writes.stop()

	free := startLoad(t, d, hostB, 128, 512, false)
	free.tick()
	can := free.rate(time.Second)
	free.stop()
	if can < 1.3*50_000 {
		t.Skipf("this machine does %.0f commands a second at present: too few to be held to 50,000", can)
	}
	run("many", 128, 512, false, 50_000)
}

// TestTenantsChangeUnderLoad by SIGHUP: caps, weights and membership, without a dropped connection.
func TestTenantsChangeUnderLoad(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.tenants = tenant("gold", hostA, ", weight: 4, limits: {rw_ios_per_sec: 400}") + tenant("tin", hostB, "")
	d := start(t, s)
	l := startLoad(t, d, hostA, 16, 4096, false)
	l.tick()
	l.holds(t, "at first", 400)
	change := func(tenants string) {
		t.Helper()
		s.tenants = tenants
		if !d.reload(s) {
			t.Fatalf("refused: %s", tenants)
		}
		l.tick()
	}
	weight := func(tenant string, want float64) {
		t.Helper()
		if got := d.metric("jbof_scheduler_weight", "tenant", tenant, "ssd", "ssd0"); got != want {
			t.Errorf("tenant %s has weight %v, want %v", tenant, got, want)
		}
	}
	weight("gold", 4)
	weight("tin", 1)
	change(tenant("gold", hostA, ", weight: 7, limits: {rw_ios_per_sec: 900}") + tenant("tin", hostB, ""))
	l.holds(t, "a higher cap", 900)
	weight("gold", 7)
	change(tenant("gold", hostA, ", weight: 7, limits: {rw_ios_per_sec: 100}") + tenant("tin", hostB, ""))
	l.rate(time.Second / 2) // the commands admitted before
	l.holds(t, "a lower cap", 100)
	if n := d.metric("jbof_scheduler_limited_seconds_total", "tenant", "gold", "reason", "cap"); n < 1 {
		t.Errorf("%v seconds limited by the cap are counted", n)
	}
	// The host moves to a tenant with another cap, and then belongs to no configured tenant.
	change(tenant("gold", hostB, ", weight: 7") + tenant("tin", hostA, ", weight: 2, limits: {rw_ios_per_sec: 250}"))
	l.rate(time.Second / 2)
	l.holds(t, "another tenant's cap", 250)
	weight("tin", 2)
	var list struct {
		Items []struct {
			Name, SSD, LimitedBy string
			Configured           bool
			Weight, Connections  int
			RWIOsPerSec          int64
		}
	}
	eventually(t, "both tenants are listed, one at its cap", func() bool {
		if err := d.admin("GET", "/v1/tenants", &list); err != nil || len(list.Items) != 2 ||
			list.Items[0].Name != "gold" ||
			list.Items[1].Name != "tin" || list.Items[1].Connections != 3 || list.Items[1].RWIOsPerSec != 250 {
			t.Fatalf("tenants %+v, %v", list, err)
		}
		return list.Items[1].LimitedBy == "cap"
	})
	change("")
	eventually(t, "it works without a cap", func() bool { return l.rate(50*time.Millisecond) > 1000 })
	weight(hostA, 1)
	if err := d.admin("GET", "/v1/tenants", &list); err != nil || len(list.Items) != 1 || list.Items[0].Name != hostA ||
		list.Items[0].Configured {
		t.Errorf("tenants %+v, %v", list, err)
	}
	if n := l.c.Losses(); n != 0 {
		t.Errorf("%d connections were lost", n)
	}
}

// TestWrongTenantsAreRefused: the log names file, line and field, and the previous configuration stays in force.
func TestWrongTenantsAreRefused(t *testing.T) {
	t.Parallel()
	s := oneMem
	good := tenant("gold", hostA, ", weight: 4, limits: {rw_ios_per_sec: 200}")
	s.tenants = good
	d := start(t, s)
	l := startLoad(t, d, hostA, 8, 4096, false)
	for _, c := range []struct{ tenants, field, words string }{
		{tenant("gold", hostA, ", weight: 0"), "tenants[0].weight", "1 to 10000"},
		{tenant("gold", hostA, ", weight: 10001"), "tenants[0].weight", "10001"},
		{tenant("gold", hostA, ", limits: {rw_ios_per_sec: -5}"), "tenants[0].limits.rw_ios_per_sec", "-5"},
		{tenant("gold", hostA, ", limits: {iops: 5}"), "tenants[0].limits.iops", "unknown key"},
		{tenant("gold", "", ""), "tenants[0].hosts", "one or more"},
		{good + tenant("gold", hostB, ""), "tenants[1].name", "given twice"},
		{good + tenant("tin", hostA, ""), "tenants[1].hosts[0]", "given twice"},
	} {
		bad := s
		bad.tenants = c.tenants
		if d.reload(bad) {
			t.Errorf("accepted: %s", c.tenants)
		}
		if len(d.log.find("reload refused", "jbofd.yaml:", c.field, c.words)) == 0 {
			t.Errorf("no line of the log says %s and %q", c.field, c.words)
		}
	}
	d.write(s)
	l.holds(t, "after bad reloads", 200)
	if w := d.metric("jbof_scheduler_weight", "tenant", "gold"); w != 4 {
		t.Errorf("weight %v, want 4", w)
	}
	if n := l.c.Losses(); n != 0 {
		t.Errorf("%d connections were lost", n)
	}
	// At the start the same configuration is an error as well.
	bad := s
	bad.tenants = tenant("gold", "", "")
	other := newDaemon(t, bad)
	other.spawn()
	<-other.exited
	if other.cmd.ProcessState.Success() || !strings.Contains(other.log.String(), "tenants[0].hosts") {
		t.Errorf("started with a wrong tenant: %v", other.cmd.ProcessState)
	}
}

// capped is a host with a full queue, whose cap admits one command per second.
func capped(t *testing.T) (d *daemon, admin, io *rawHost) {
	t.Helper()
	s := oneMem
	s.tenants = tenant("slow", hostB, ", limits: {rw_ios_per_sec: 1}")
	s.limits = "drain_timeout: 500ms"
	d = start(t, s)
	admin, io = d.fullQueue()
	return d, admin, io
}

// fullQueue connects the capped host and fills its queue with reads, and with writes whose data was not transferred
// yet.
func (d *daemon) fullQueue() (admin, io *rawHost) {
	d.t.Helper()
	admin, io = d.rawQueue(hostB, nqnA, 0, 128)
	var p []byte
	for i := range 127 {
		if i%2 == 0 {
			p = append(p, io.capsule(rw(nvme.CmdRead, uint16(i), 0, 8), nil, 4096)...)
		} else {
			p = append(p, io.capsule(rw(nvme.CmdWrite, uint16(i), 0, 256), nil, 128<<10)...)
		}
	}
	io.send(p)
	eventually(d.t, "the queue waits for the cap", func() bool {
		return d.metric("jbof_scheduler_queued", "tenant", "slow") >= 120
	})
	return admin, io
}

// TestACappedTenantDoesNotHarmOthers: with a full queue it holds almost no memory, and another host is as fast as
// alone.
func TestACappedTenantDoesNotHarmOthers(t *testing.T) {
	t.Parallel()
	d, _, _ := capped(t)
	if used := d.metric("jbof_buffer_pool_bytes", "state", "used"); used > 6*128<<10 {
		t.Errorf("%.0f bytes of buffers are in use for commands that wait", used)
	}
	good := startVictim(t, d, d.options(hostA, nqnA), 4)
	good.progress(2000)
	if worst := good.p99(); worst > 250*time.Millisecond {
		t.Errorf("p99 of the other host: %v", worst)
	}
	good.stop()
	if n := d.metric("jbof_scheduler_limited_seconds_total", "tenant", hostA, "reason", "cap"); n != 0 {
		t.Errorf("the other host was limited by a cap for %v s", n)
	}
}

// TestACappedQueueClosesAtOnce, when the host disconnects and when the daemon stops.
func TestACappedQueueClosesAtOnce(t *testing.T) {
	t.Parallel()
	d, admin, io := capped(t)
	began := time.Now()
	io.close()
	admin.close()
	eventually(t, "the connections are gone", func() bool { return d.metric("jbof_connections") == 0 })
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("127 commands that wait for a cap took %v to go", took)
	}
	f := d.scrape()
	if q, n := sum(f["jbof_ssd_io_queued"]), sum(f["jbof_scheduler_queued"]); q != 0 || n != 0 {
		t.Errorf("%v and %v commands are still queued", q, n)
	}
	d.quiet()
	d.fullQueue()
	if took := d.term(); took > stopLimit {
		t.Errorf("SIGTERM with a queue that waits for a cap: stopped after %v, the limit is %v", took, stopLimit)
	}
}

// TestACommandBehindACapIsAborted and completed at once.
func TestACommandBehindACapIsAborted(t *testing.T) {
	t.Parallel()
	d, admin, io := capped(t)
	want := map[uint16]bool{126: true, 101: true, 50: true}
	for cid := range want {
		var e nvme.SQE
		e.SetOpcode(nvme.AdminAbort)
		e.SetCID(7)
		e.Abort().SetSQID(1)
		e.Abort().SetCID(cid)
		if c := admin.do(e); !c.Status().OK() || c.DW0() != 0 {
			t.Errorf("Abort of command %d: %v, DW0 %d", cid, c.Status(), c.DW0())
		}
	}
	began := time.Now()
	for len(want) > 0 && time.Since(began) < 10*time.Second {
		c := io.response() // the cap admits some other commands in the meantime
		if st := c.Status(); st.Code() == nvme.AbortRequested && !want[c.CID()] || st.OK() && want[c.CID()] {
			t.Errorf("command %d: %v", c.CID(), st)
		}
		delete(want, c.CID())
	}
	if len(want) > 0 {
		t.Errorf("aborted and not answered: %v", want)
	}
	if n := d.metric("jbof_ssd_aborted_total"); n != 3 {
		t.Errorf("%v aborted commands are counted, want 3", n)
	}
}

// TestTenantsComeAndGoUnderLoad: a thousand connections of many hosts, with and without a configured tenant, some
// closed with outstanding commands. Afterwards all counts are as before.
func TestTenantsComeAndGoUnderLoad(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.tenants = tenant("gold", hostA, ", weight: 4") + tenant("slow", hostB+"-0, "+hostB+"-1",
		", limits: {rw_ios_per_sec: 50}")
	d := start(t, s)
	good := startVictim(t, d, d.options(hostA, nqnA), 2)
	counts := func() string {
		var list struct {
			Items []struct {
				Name             string
				Connections      int
				Queued, Inflight int
			}
		}
		if err := d.admin("GET", "/v1/tenants", &list); err != nil {
			t.Fatal(err)
		}
		for i := range list.Items {
			if list.Items[i].Name == "gold" { // this tenant has commands outstanding
				list.Items[i].Queued, list.Items[i].Inflight = 0, 0
			}
		}
		return fmt.Sprint(list.Items)
	}
	before := counts()
	var wg sync.WaitGroup
	var n atomic.Int32
	for w := range 4 {
		wg.Go(func() {
			for i := n.Add(1); i <= 500; i = n.Add(1) { // two connections each
				admin, io := d.rawQueue(fmt.Sprintf("%s-%d", hostB, i%16), nqnA, 0, 128)
				var p []byte
				for k := range 40 {
					p = append(p, io.capsule(rw([]uint8{nvme.CmdRead, nvme.CmdWrite}[k%2], uint16(k), units.LBA(w), 8),
						nil, 4096)...)
				}
				io.send(p)
				for range i % 3 {
					_, _ = io.next()
				}
				io.close()
				admin.close()
			}
		})
	}
	wg.Wait()
	eventually(t, "all but one host are gone", func() bool { return d.metric("jbof_connections") == 2 })
	eventually(t, "the tenants are as before: "+before, func() bool { return counts() == before })
	good.progress(20)
	good.stop()
	eventually(t, "nothing is queued or outstanding", func() bool {
		f := d.scrape()
		return sum(f["jbof_scheduler_queued"])+sum(f["jbof_scheduler_inflight"])+sum(f["jbof_ssd_io_queued"])+
			sum(f["jbof_ssd_io_now"]) == 0
	})
}
