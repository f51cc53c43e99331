package target

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/fence"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/ssd/mem"
)

const (
	hostA = "nqn.2014-08.org.nvmexpress:uuid:aaaaaaaa-0000-0000-0000-000000000001"
	hostB = "nqn.2014-08.org.nvmexpress:uuid:bbbbbbbb-0000-0000-0000-000000000002"
	sub   = "nqn.2026-11.example.jbofd:t"
)

// fakeConn is a connection that records its calls. In methods that must be called without the service's lock it takes
// that lock: if the caller held it, the test would hang.
type fakeConn struct {
	f    *Service
	id   nvmeof.ConnID
	ctrl *nvmeof.Controller
	qid  uint16
	seen atomic.Int64
	// arrived is what ArrivedNS returns.
	arrived atomic.Int64
	usage   nvmeof.Usage
	share   fence.Share
	lost    atomic.Bool
	aers    map[uint16]int // slots by CID

	mu     sync.Mutex
	told   []string
	tenant Tenant
	queued []uint16 // CIDs that can be aborted
}

func (c *fakeConn) tell(format string, args ...any) {
	c.f.Counts()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.told = append(c.told, fmt.Sprintf(format, args...))
}

// take returns the calls since the last take.
func (c *fakeConn) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.told
	c.told = nil
	return t
}

// Complete implements Conn.
func (c *fakeConn) Complete(slot int, status nvme.Status, result uint64) {
	c.tell("complete %d %v %#x", slot, status, result)
}

// SetTable implements Conn.
func (c *fakeConn) SetTable(t *nvmeof.NamespaceTable, version uint64) {
	c.tell("table %v", t.AppendIDs(nil, 0, 10))
}

// SetTenant implements Conn.
func (c *fakeConn) SetTenant(t Tenant) {
	c.f.Counts()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tenant = t
}

// payer is the tenant of the last SetTenant.
func (c *fakeConn) payer() Tenant {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.tenant
}

// SetCredits implements Conn.
func (c *fakeConn) SetCredits(s nvmeof.CreditState) { c.tell("credits %v", s.On) }

// Abort implements Conn.
func (c *fakeConn) Abort(cid uint16) bool {
	c.tell("abort %d", cid)
	return slices.Contains(c.queued, cid)
}

// EventSlot implements Conn.
func (c *fakeConn) EventSlot(cid uint16) (int, bool) {
	c.f.Counts()
	slot, ok := c.aers[cid]
	return slot, ok
}

// SeenNS implements Conn.
func (c *fakeConn) SeenNS() int64 { return c.seen.Load() }

func (c *fakeConn) ArrivedNS(int64) int64 { return c.arrived.Load() }

// Usage implements Conn.
func (c *fakeConn) Usage() nvmeof.Usage { return c.usage }

// Share implements Conn.
func (c *fakeConn) Share() *fence.Share { return &c.share }

// Lost implements Conn.
func (c *fakeConn) Lost() bool { return c.lost.Load() }

// Stop implements Conn.
func (c *fakeConn) Stop() { c.tell("stop") }

// Connected implements Conn.
func (c *fakeConn) Connected(r nvmeof.ConnectReply) bool {
	c.tell("connected %v", r.Status)
	c.mu.Lock()
	c.ctrl = r.Controller
	c.mu.Unlock()
	return true
}

// Shut implements Conn.
func (c *fakeConn) Shut(reason string) { c.tell("shut: %s", reason) }

// Describe implements Conn.
func (c *fakeConn) Describe() ConnInfo { return ConnInfo{ID: uint64(c.id), QID: c.qid} }

// rig is a service on the system's clock, which synctest controls.
type rig struct {
	*Service
	t       *testing.T
	expired chan string
}

func newRig(t *testing.T) *rig { return newRigWith(t, 0) }

// newRigWith also has drives in memory. It cannot be used with synctest, which does not wait for their goroutines.
func newRigWith(t *testing.T, drives int) *rig {
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, expired: make(chan string, 8)}
	var owners []*drive.Drive
	for i := range drives {
		dev, err := mem.Open(mem.Config{Name: fmt.Sprint("ssd", i), SizeBytes: 16 << 20})
		if err != nil {
			t.Fatal(err)
		}
		o, err := drive.New(drive.Config{Device: dev, Pool: pool})
		if err != nil {
			t.Fatal(err)
		}
		owners = append(owners, o)
	}
	if drives > 0 {
		owners = append(owners, nil) // one that could not be opened
	}
	start := time.Now()
	r.Service = New(Config{
		Target: nvmeof.New(nvmeof.Config{Firmware: "1", Limits: nvmeof.Limits{MDTSBytes: 1 << 20, FusedBytes: 4096},
			InCapsuleBytes: 8192,
			MaxEntries:     128, MaxIOQueues: 8, MaxControllers: 100, MaxHosts: 100, MaxDiscovery: 500,
			MaxDiscoveryPerPeer: 500, MaxDiscoveryKATOMS: 300_000, MinKATOMS: 1000, DiscoveryIdleMS: 60000}),
		SSDs: owners, Pool: pool, Clock: func() int64 { return int64(time.Since(start)) + 1 },
		Log: slog.New(slog.DiscardHandler),
		Events: Events{KeepAliveExpired: func(c *nvmeof.Controller, idle time.Duration) {
			r.Counts() // no lock held
			r.expired <- fmt.Sprintf("%s idle %v, last %s", c.HostNQN[len(c.HostNQN)-1:], idle.Round(time.Millisecond),
				c.LastCommand())
		}},
	})
	r.Apply(state(1, 2))
	t.Cleanup(func() {
		r.Close()
		r.Close()
		for _, o := range owners {
			if o != nil {
				if err := errors.Join(o.Close(), o.Device().Close()); err != nil {
					t.Error(err)
				}
			}
		}
		pool.CloseTest(t)
	})
	return r
}

func state(nsids ...uint32) nvmeof.State {
	s := nvmeof.State{Subsystems: []nvmeof.SubsystemState{{NQN: sub, AllowAnyHost: true}}}
	for _, id := range nsids {
		s.Subsystems[0].Namespaces = append(s.Subsystems[0].Namespaces,
			&nvmeof.Namespace{NSID: id, SizeBytes: 1 << 20, BlockShift: 12, ANAGroup: 1,
				ANAState: nvme.ANAStateOptimized})
	}
	return s
}

// connect connects a queue of host: the admin queue of a new controller, or queue qid of admin's controller.
func (r *rig) connect(host string, admin *fakeConn, qid uint16, katoMS uint32) *fakeConn {
	c := &fakeConn{f: r.Service, qid: qid, aers: map[uint16]int{}}
	c.id = r.Add(c)
	var sqe nvme.SQE
	var data nvme.ConnectData
	sqe.Connect().Init()
	sqe.Connect().SetSQSIZE(31)
	sqe.Connect().SetQID(qid)
	sqe.Connect().SetKATO(katoMS)
	data.SetHostNQN(host)
	data.SetSubNQN(sub)
	data.SetCNTLID(nvme.CNTLIDDynamic)
	if admin != nil {
		data.SetCNTLID(admin.ctrl.ID)
	}
	reply := r.Connect(nvmeof.ConnectArgs{Conn: c.id, SQE: &sqe, Data: &data})
	if !reply.Status.OK() {
		r.t.Errorf("connect: %v: %s", reply.Status, reply.Reason)
		return c
	}
	c.ctrl = reply.Controller
	if qid == 0 {
		sqe.Property().Init(nvme.FabricsPropertySet, nvme.PropCC)
		sqe.Property().SetVALUE(uint64(nvme.CC(0).WithEN(true).WithIOSQES(6).WithIOCQES(4)))
		r.admin(c, 0, &sqe)
	}
	return c
}

// admin executes a command on c's queue.
func (r *rig) admin(c *fakeConn, slot int, sqe *nvme.SQE) (nvmeof.Reply, []byte) {
	sqe.SetPSDT(nvme.PSDTSGL)
	in, out, _ := nvmeof.PlanAdmin(sqe, nvmeof.Limits{MDTSBytes: 1 << 20})
	data := make([]byte, max(in, out))
	c.seen.Store(r.Clock())
	reply := r.Admin(nvmeof.AdminArgs{Controller: c.ctrl, QID: c.qid, Slot: slot, SQE: sqe, Data: data})
	return reply, data[:reply.Len]
}

func (r *rig) remove(c *fakeConn) { r.Remove(c.id, c.ctrl, c.qid, c.usage) }

func command(opcode uint8, change func(*nvme.SQE)) *nvme.SQE {
	var sqe nvme.SQE
	sqe.SetOpcode(opcode)
	if change != nil {
		change(&sqe)
	}
	return &sqe
}

func setFeature(fid uint8, v uint32) *nvme.SQE {
	return command(nvme.AdminSetFeatures, func(s *nvme.SQE) { s.Features().SetFID(fid); s.Features().SetValue(v) })
}

func want(t *testing.T, c *fakeConn, told ...string) {
	t.Helper()
	if got := c.take(); !slices.Equal(got, told) {
		t.Errorf("connection %d was told %q, want %q", c.id, got, told)
	}
}

func TestActionsReachTheirConnectionsWithoutTheLock(t *testing.T) {
	r := newRig(t)
	a := r.connect(hostA, nil, 0, 0)
	io := r.connect(hostA, a, 1, 0)
	b := r.connect(hostB, nil, 0, 0)
	r.admin(a, 0, setFeature(nvme.FIDAsyncEvent, nvme.AECNamespace))
	r.admin(a, 5, command(nvme.AdminAsyncEvent, nil))
	r.Apply(state(1))
	want(t, a, "complete 5 Success (sct 0x0, sc 0x00) 0x40002")
	want(t, io, "table [1]")
	want(t, b)
	only := state(1)
	only.Subsystems[0].AllowAnyHost, only.Subsystems[0].Hosts = false, []string{hostB}
	r.Apply(only)
	reason := "shut: host " + hostA + " is no longer allowed"
	want(t, io, reason)
	want(t, a, reason)
	want(t, b)
	// Their ends are reported later, by other goroutines.
	r.remove(io)
	r.remove(a)
	if conns, controllers, hosts := r.Counts(); conns != 1 || controllers != 1 || hosts != 1 {
		t.Errorf("%d connections, %d controllers, %d hosts", conns, controllers, hosts)
	}
}

func TestLosingTheAdminConnectionShutsTheOthers(t *testing.T) {
	r := newRig(t)
	a := r.connect(hostA, nil, 0, 0)
	io := r.connect(hostA, a, 1, 0)
	r.remove(a)
	want(t, a)
	want(t, io, "shut: the admin queue was disconnected")
	r.remove(io)
	if n := len(r.Conns()); n != 0 {
		t.Errorf("%d connections", n)
	}
	if len(r.retired) != 0 {
		t.Error("figures of a controller that is gone are kept")
	}
}

func TestKeepAliveExpiresAtItsTimeAndIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		a := r.connect(hostA, nil, 0, 5000)
		io := r.connect(hostA, a, 1, 0)
		quiet := r.connect(hostB, nil, 0, 0)
		r.admin(a, 0, command(nvme.AdminKeepAlive, nil))
		start := time.Now()
		if got := <-r.expired; got != "1 idle 5.1s, last Keep Alive" {
			t.Error(got)
		}
		if d := time.Since(start); d > 5200*time.Millisecond {
			t.Errorf("after %v", d)
		}
		synctest.Wait()
		want(t, io, "shut: keep alive timeout")
		want(t, a, "shut: keep alive timeout")
		want(t, quiet)
	})
}

func TestIOPutsTheKeepAliveTimerOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		a := r.connect(hostA, nil, 0, 2000)
		io := r.connect(hostA, a, 1, 0)
		start := time.Now()
		for range 10 { // I/O for 10 s, and nothing else
			<-time.After(time.Second)
			io.seen.Store(r.Clock())
		}
		select {
		case got := <-r.expired:
			t.Fatalf("expired under I/O: %s", got)
		default:
		}
		<-r.expired
		if d := time.Since(start); d < 12*time.Second || d > 12200*time.Millisecond {
			t.Errorf("expired after %v, the last I/O was at 10 s", d)
		}
	})
}

// TestWhatHasArrivedPutsTheKeepAliveTimerOff although the connection has not taken it in: the process was stopped.
func TestWhatHasArrivedPutsTheKeepAliveTimerOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		a := r.connect(hostA, nil, 0, 2000)
		io := r.connect(hostA, a, 1, 0)
		start := time.Now()
		<-time.After(time.Second)
		io.arrived.Store(r.Clock())
		<-r.expired
		if d := time.Since(start); d < 3*time.Second || d > 3200*time.Millisecond {
			t.Errorf("expired after %v, something has arrived at 1 s", d)
		}
	})
}

func TestAShorterTimeoutWakesTheTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		a := r.connect(hostA, nil, 0, 600_000)
		start := time.Now()
		r.admin(a, 0, setFeature(nvme.FIDKeepAlive, 1000))
		<-r.expired
		if d := time.Since(start); d > 1200*time.Millisecond {
			t.Errorf("KATO of 1 s expired after %v", d)
		}
		start = time.Now()
		r.connect(hostB, nil, 0, 3000)
		<-r.expired
		if d := time.Since(start); d > 3200*time.Millisecond {
			t.Errorf("KATO of 3 s expired after %v", d)
		}
	})
}

func TestAbortReportsWhetherTheCommandWasTaken(t *testing.T) {
	r := newRig(t)
	a := r.connect(hostA, nil, 0, 0)
	io := r.connect(hostA, a, 1, 0)
	other := r.connect(hostB, nil, 0, 0)
	r.connect(hostB, other, 2, 0)
	io.queued = []uint16{7}
	r.admin(a, 3, command(nvme.AdminAsyncEvent, nil))
	a.aers[30], a.aers[31] = 3, 4 // 4 is another admin command
	for _, x := range []struct {
		name      string
		sqid, cid uint16
		result    uint64
	}{
		{"queued", 1, 7, 0}, {"under way", 1, 8, nvme.AbortNotDone}, {"event request", 0, 30, 0},
		{"event request twice", 0, 30, nvme.AbortNotDone},
		{"another admin command", 0, 31, nvme.AbortNotDone}, {"unknown admin command", 0, 99, nvme.AbortNotDone},
		{"another host's queue", 2, 7, nvme.AbortNotDone}, {"no such queue", 9, 7, nvme.AbortNotDone},
	} {
		reply, _ := r.admin(a, 9, command(nvme.AdminAbort,
			func(s *nvme.SQE) { s.Abort().SetSQID(x.sqid); s.Abort().SetCID(x.cid) }))
		if !reply.Status.OK() || reply.Result != x.result {
			t.Errorf("%s: %v, result %d, want %d", x.name, reply.Status, reply.Result, x.result)
		}
	}
	want(t, a, "complete 3 Command Abort Requested (sct 0x0, sc 0x07) 0x0")
	want(t, io, "abort 7", "abort 8")
}

func TestUsageOutlivesTheConnectionsOfItsController(t *testing.T) {
	r := newRig(t)
	a := r.connect(hostA, nil, 0, 0)
	one, two := r.connect(hostA, a, 1, 0), r.connect(hostA, a, 2, 0)
	one.usage = nvmeof.Usage{Reads: 1, Writes: 10, MediaErrors: 100}
	two.usage = nvmeof.Usage{Reads: 2, Writes: 20, MediaErrors: 200}
	stranger := r.connect(hostB, nil, 0, 0)
	r.connect(hostB, stranger, 1, 0).usage = nvmeof.Usage{Reads: 1000}
	check := func(when string) {
		t.Helper()
		_, data := r.admin(a, 0, command(nvme.AdminGetLogPage,
			func(s *nvme.SQE) { s.GetLog().SetLID(nvme.LIDSMART); s.GetLog().SetLenBytes(512) }))
		l := (*nvme.SMARTLog)(data)
		if l.HostReads().Uint64() != 3 || l.HostWrites().Uint64() != 30 || l.MediaErrors().Uint64() != 300 {
			t.Errorf("%s: %d reads, %d writes, %d errors", when, l.HostReads().Uint64(), l.HostWrites().Uint64(),
				l.MediaErrors().Uint64())
		}
	}
	check("connected")
	r.remove(one)
	check("one gone")
	r.remove(two)
	check("both gone")
	r.remove(a)
	if len(r.retired) != 0 {
		t.Error("figures of a controller that is gone are kept")
	}
}

func TestRecordedErrorsShowInTheLog(t *testing.T) {
	r := newRig(t)
	a := r.connect(hostA, nil, 0, 0)
	r.RecordErrors(a.ctrl, []nvmeof.Failed{{QID: 1, CID: 9, Status: nvme.LBAOutOfRange | nvme.DNR}})
	_, data := r.admin(a, 0, command(nvme.AdminGetLogPage,
		func(s *nvme.SQE) { s.GetLog().SetLID(nvme.LIDError); s.GetLog().SetLenBytes(64) }))
	if e := (*nvme.ErrorLogEntry)(data); e.CID() != 9 || e.Status() != nvme.LBAOutOfRange|nvme.DNR {
		t.Errorf("CID %d, %v", e.CID(), e.Status())
	}
}

// Hosts connect and leave while the configuration changes. The race detector and the locking in the fake connections
// find errors.
func TestConnectionsComeAndGoWhileTheConfigurationChanges(t *testing.T) {
	r := newRig(t)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			host := fmt.Sprintf("%s%d", hostA, i)
			for n := range 30 {
				a := r.connect(host, nil, 0, 10000)
				r.OpenTenant(a.id, a, host, netip.Addr{}, true)
				r.admin(a, 0, setFeature(nvme.FIDAsyncEvent, nvme.AECNamespace|nvme.AECANA))
				r.admin(a, 1, command(nvme.AdminAsyncEvent, nil))
				a.aers[1] = 1
				io := r.connect(host, a, uint16(n%8)+1, 0)
				r.admin(a, 2, command(nvme.AdminAbort, func(s *nvme.SQE) { s.Abort().SetCID(1) }))
				r.RecordErrors(a.ctrl, []nvmeof.Failed{{QID: 1}})
				r.Conns()
				var ends sync.WaitGroup
				ends.Go(func() { r.remove(io) })
				ends.Go(func() { r.remove(a) })
				ends.Wait()
				r.CloseTenant(a.id)
				if len(a.take()) > 8 {
					t.Error("an event request completed more than once")
				}
			}
		})
	}
	wg.Go(func() {
		for n := range 60 {
			r.Apply(state(1, uint32(n%3)+2))
			r.SetTenants([]TenantConfig{{Name: "gold", Hosts: []string{fmt.Sprintf("%s%d", hostA, n%4)}}})
		}
	})
	wg.Wait()
	if conns, controllers, hosts := r.Counts(); conns+controllers+hosts != 0 || len(r.retired) != 0 ||
		len(r.Tenants()) != 1 || len(r.tenants.open) != 0 {
		t.Errorf("left: %d connections, %d controllers, %d hosts, %d retired, %d tenants", conns, controllers, hosts,
			len(r.retired), len(r.Tenants())-1)
	}
}
