package nvmeof_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

const (
	hostA = "nqn.2014-08.org.nvmexpress:uuid:aaaaaaaa-0000-0000-0000-000000000001"
	hostB = "nqn.2014-08.org.nvmexpress:uuid:bbbbbbbb-0000-0000-0000-000000000002"
	open  = "nqn.2026-11.example.jbofd:open"   // any host
	shut  = "nqn.2026-11.example.jbofd:closed" // hostA only
	ms    = int64(1e6)
)

var testLimits = nvmeof.Limits{MDTSBytes: 1 << 20, FusedBytes: 64 << 10}

// ioPort listens on every address, discoveryPort serves nothing but discovery.
var (
	ioPort = nvmeof.Port{ID: 1, TRTYPE: nvme.TRTYPETCP, ADRFAM: nvme.ADRFAMIPv4, Address: "0.0.0.0",
		Service: "4420", Wildcard: true}
	fixedPort = nvmeof.Port{ID: 2, TRTYPE: nvme.TRTYPETCP, ADRFAM: nvme.ADRFAMIPv4, Address: "10.1.1.1",
		Service: "4421"}
	discoveryPort = nvmeof.Port{ID: 3, TRTYPE: nvme.TRTYPETCP, ADRFAM: nvme.ADRFAMIPv4, Address: "0.0.0.0",
		Service: "8009", Wildcard: true, Discovery: true}
)

// block is a namespace of size bytes on SSD 0.
func block(nsid uint32, shift uint8, offset units.DriveOffset, size units.Bytes) *nvmeof.Namespace {
	n := &nvmeof.Namespace{NSID: nsid, OffsetBytes: offset, SizeBytes: size, BlockShift: shift, ANAGroup: 1,
		ANAState: nvme.ANAStateOptimized, DeallocatedReadsZero: true}
	n.UUID, n.NGUID, n.EUI64 = uuid.UUID{1, byte(nsid)}, [16]byte{2, byte(nsid)}, [8]byte{3, byte(nsid)}
	return n
}

// testState has namespaces 1 and 2 for all hosts, and 5 for hostA only, in open.
func testState() nvmeof.State {
	private := block(5, 12, 32<<20, 4<<20)
	private.Hosts = []string{hostA}
	return nvmeof.State{
		Ports: []nvmeof.Port{ioPort, fixedPort, discoveryPort},
		Subsystems: []nvmeof.SubsystemState{
			{NQN: open, Serial: "SN1", Model: "test model", AllowAnyHost: true,
				Namespaces: []*nvmeof.Namespace{block(1, 9, 1<<20, 8<<20), block(2, 12, 16<<20, 16<<20), private}},
			{NQN: shut, Serial: "SN2", Model: "test model", Hosts: []string{hostA},
				Namespaces: []*nvmeof.Namespace{block(1, 12, 64<<20, 1<<20)}},
		},
	}
}

// rig is a target and its driver, which numbers connections and has the clock.
type rig struct {
	t      *testing.T
	target *nvmeof.Target
	now    int64
	last   nvmeof.ConnID
	slot   int
	usage  nvmeof.Usage
	health func(int) (nvme.SMARTLog, bool)
	// slow: fences and flushes end only when the test says so. Otherwise they end at once.
	slow    bool
	pending []nvmeof.Action
}

// settle takes the target's actions, and carries them out as a driver with idle drives does.
func (r *rig) settle() {
	for actions := r.target.TakeActions(); len(actions) > 0; actions = r.target.TakeActions() {
		for _, a := range actions {
			switch {
			case r.slow:
			case a.Kind == nvmeof.ActionFence:
				r.target.Drained(r.now, a.Controller, a.Epoch)
			case a.Kind == nvmeof.ActionFlush:
				r.target.Flushed(a.Controller, a.Flush, true)
			}
		}
		r.pending = append(r.pending, actions...)
	}
}

func newRig(t *testing.T, change ...func(*nvmeof.Config)) *rig {
	cfg := nvmeof.Config{Firmware: "fw1", NodeUUID: uuid.UUID{0xAB}, Limits: testLimits, InCapsuleBytes: 8192,
		MaxEntries: 129, MaxIOQueues: 4,
		MaxControllers: 100, MaxHosts: 100, MaxDiscovery: 100, MaxDiscoveryPerPeer: 100, MaxDiscoveryKATOMS: 300000,
		MinKATOMS: 1000, DiscoveryIdleMS: 60000, WallMS: 1_000_000}
	for _, f := range change {
		f(&cfg)
	}
	r := &rig{t: t, target: nvmeof.New(cfg), now: 1}
	r.target.Apply(testState())
	return r
}

// take returns the target's actions since the last take.
func (r *rig) take() []nvmeof.Action {
	r.settle()
	actions := r.pending
	r.pending = nil
	return actions
}

// args are the arguments of a Connect, which a change function may modify.
type args struct {
	sqe  nvme.SQE
	c    *nvme.ConnectSQE
	data nvme.ConnectData
	port nvmeof.Port
	addr string
	from netip.Addr
	peer netip.Addr
}

func (r *rig) tryConnect(host, sub string, change ...func(*args)) nvmeof.ConnectReply {
	r.t.Helper()
	a := &args{port: ioPort, addr: "192.0.2.7", from: nodeAddr}
	a.c = a.sqe.Connect()
	a.c.Init()
	a.c.SetSQSIZE(31)
	a.data.SetHostNQN(host)
	a.data.SetSubNQN(sub)
	id := uuid.UUID{1}
	if len(host) > 31 {
		id[1] = host[31]
	}
	a.data.SetHostID(id)
	a.data.SetCNTLID(nvme.CNTLIDDynamic)
	for _, f := range change {
		f(a)
	}
	r.last++
	r.settle()
	return r.target.Connect(r.now, nvmeof.ConnectArgs{Conn: r.last, Port: a.port, LocalAddress: a.addr, From: a.from,
		Peer: a.peer, SQE: &a.sqe, Data: &a.data})
}

// connect makes an association and enables its controller.
func (r *rig) connect(host, sub string, change ...func(*args)) *nvmeof.Controller {
	r.t.Helper()
	reply := r.tryConnect(host, sub, change...)
	if !reply.Status.OK() {
		r.t.Fatalf("connect of %s to %s: %v: %s", host, sub, reply.Status, reply.Reason)
	}
	if got := uint16(reply.Result); got != reply.Controller.ID {
		r.t.Fatalf("Connect's result names CNTLID %d, the controller is %d", got, reply.Controller.ID)
	}
	r.setCC(reply.Controller, enable)
	r.noActions()
	return reply.Controller
}

func withKATO(v uint32) func(*args) { return func(a *args) { a.c.SetKATO(v) } }

// queue turns a Connect into that of an I/O queue.
func queue(c *nvmeof.Controller, qid uint16) func(*args) {
	return func(a *args) {
		a.c.SetQID(qid)
		a.data.SetCNTLID(c.ID)
	}
}

var enable = nvme.CC(0).WithEN(true).WithIOSQES(6).WithIOCQES(4)

// do executes an admin command as a driver does.
func (r *rig) do(c *nvmeof.Controller, qid uint16, sqe *nvme.SQE, in []byte) (nvmeof.Reply, []byte) {
	r.t.Helper()
	sqe.SetPSDT(nvme.PSDTSGL)
	toController, toHost, s := nvmeof.PlanAdmin(sqe, testLimits)
	if !s.OK() {
		return nvmeof.Reply{Status: s}, nil
	}
	data := make([]byte, max(toController, toHost))
	copy(data, in)
	r.slot++
	reply := r.target.Admin(r.now, nvmeof.AdminArgs{Controller: c, QID: qid, Slot: r.slot, SQE: sqe, Data: data,
		Usage: func(*nvmeof.Controller) nvmeof.Usage { return r.usage }, Health: r.health})
	r.settle()
	return reply, data[:reply.Len]
}

// must is do for a command that has to succeed.
func (r *rig) must(c *nvmeof.Controller, sqe *nvme.SQE, in []byte) (uint64, []byte) {
	r.t.Helper()
	reply, data := r.do(c, 0, sqe, in)
	if !reply.Status.OK() {
		r.t.Fatalf("opcode %#x: %v", sqe.Opcode(), reply.Status)
	}
	return reply.Result, data
}

func (r *rig) property(c *nvmeof.Controller, off uint32) uint64 {
	r.t.Helper()
	var sqe nvme.SQE
	sqe.Property().Init(nvme.FabricsPropertyGet, off)
	v, _ := r.must(c, &sqe, nil)
	return v
}

func (r *rig) csts(c *nvmeof.Controller) nvme.CSTS {
	r.t.Helper()
	return nvme.CSTS(r.property(c, nvme.PropCSTS))
}

func (r *rig) setCC(c *nvmeof.Controller, cc nvme.CC) {
	r.t.Helper()
	var sqe nvme.SQE
	sqe.Property().Init(nvme.FabricsPropertySet, nvme.PropCC)
	sqe.Property().SetVALUE(uint64(cc))
	r.must(c, &sqe, nil)
}

func command(opcode uint8, change func(*nvme.SQE)) *nvme.SQE {
	var sqe nvme.SQE
	sqe.SetOpcode(opcode)
	if change != nil {
		change(&sqe)
	}
	return &sqe
}

func identify(cns uint8, nsid uint32, change ...func(*nvme.IdentifySQE)) *nvme.SQE {
	return command(nvme.AdminIdentify, func(s *nvme.SQE) {
		s.Identify().SetCNS(cns)
		s.SetNSID(nsid)
		for _, f := range change {
			f(s.Identify())
		}
	})
}

func getLog(lid uint8, n uint64, change ...func(*nvme.GetLogSQE)) *nvme.SQE {
	return command(nvme.AdminGetLogPage, func(s *nvme.SQE) {
		s.GetLog().SetLID(lid)
		s.GetLog().SetLenBytes(n)
		for _, f := range change {
			f(s.GetLog())
		}
	})
}

func setFeature(fid uint8, v uint32) *nvme.SQE {
	return command(nvme.AdminSetFeatures, func(s *nvme.SQE) {
		s.Features().SetFID(fid)
		s.Features().SetValue(v)
	})
}

func getFeature(fid, sel uint8) *nvme.SQE {
	return command(nvme.AdminGetFeatures, func(s *nvme.SQE) {
		s.Features().SetFID(fid)
		s.Features().SetSEL(sel)
	})
}

// aer sends an Asynchronous Event Request and returns its slot.
func (r *rig) aer(c *nvmeof.Controller) int {
	r.t.Helper()
	reply, _ := r.do(c, 0, command(nvme.AdminAsyncEvent, nil), nil)
	if !reply.Pending {
		r.t.Fatalf("event request: %+v", reply)
	}
	return r.slot
}

// actions takes the target's actions, one line each.
func (r *rig) actions() string {
	var lines []string
	for _, a := range r.take() {
		switch a.Kind {
		case nvmeof.ActionClose:
			lines = append(lines, fmt.Sprintf("close %d: %s", a.Conn, a.Reason))
		case nvmeof.ActionComplete:
			if a.Status.OK() {
				lines = append(lines, fmt.Sprintf("event %d: %#x", a.Slot, a.Result))
			} else {
				lines = append(lines, fmt.Sprintf("event %d: %v", a.Slot, a.Status))
			}
		case nvmeof.ActionTable:
			lines = append(lines, fmt.Sprintf("table %d: %v", a.Conn, a.Table.AppendIDs(nil, 0, 100)))
		case nvmeof.ActionExpired:
			lines = append(lines, fmt.Sprintf("expired %d after %dms, last %s", a.Controller.ID, a.IdleNS/ms,
				a.Controller.LastCommand()))
		}
	}
	return strings.Join(lines, "\n")
}

func (r *rig) wantActions(want ...string) {
	r.t.Helper()
	if got := r.actions(); got != strings.Join(want, "\n") {
		r.t.Errorf("actions:\n%s\nwant:\n%s", got, strings.Join(want, "\n"))
	}
}

func (r *rig) noActions() { r.t.Helper(); r.wantActions() }

// wantStatus checks a status with its DNR bit.
func wantStatus(t *testing.T, what string, got, want nvme.Status) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func ids(l *nvme.NSList) []uint32 { return slices.Collect(l.All()) }
