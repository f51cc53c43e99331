package nvmeof_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/uuid"
)

// TestTranscripts plays the calls of hosts and of the driver. Each result is the machine's reply, if there is one,
// followed by its actions. Run with -rewrite to update them; then read the diff.
//
//	connect host= [sub=] [qid= ctrl=] [kato=] [id=]   a Connect command on a new connection; connections count from 1
//	cc ctrl= [en] [shn=] [css=]                        Property Set of CC
//	csts ctrl=                                         Property Get of CSTS
//	admin ctrl= op=                                    another admin command
//	disconnect ctrl= qid=                              Disconnect
//	lost conn=                                         the driver can see that the connection has ended
//	gone conn= [ctrl= qid=]                            the connection has ended
//	drained ctrl= [epoch=]                             nothing of before the epoch is in flight
//	flushed ctrl= [failed] [number=]                   the outcome of a flush
//	time ms=                                           time passes
//	apply [without=]                                   a configuration, perhaps without a host or subsystem
//	stop                                               the target stops
//	show                                               controllers, associations that have ended, the next time
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/transcripts", func(t *testing.T, path string) {
		p := &player{t: t}
		datadriven.RunTest(t, path, p.play)
	})
}

// player is the driver in a transcript.
type player struct {
	t      *testing.T
	target *nvmeof.Target
	now    int64
	conns  int
	lost   map[nvmeof.ConnID]bool
	ctrls  map[int]*nvmeof.Controller // by CNTLID
	flush  uint64
	slot   int
	out    strings.Builder
}

func (p *player) say(format string, args ...any) { fmt.Fprintf(&p.out, format+"\n", args...) }

var transcriptHosts = map[string]string{"a": hostA, "b": hostB}

func (p *player) play(t *testing.T, d *datadriven.TestData) string {
	p.out.Reset()
	num := func(key string, def int) int {
		if d.HasArg(key) {
			d.ScanArgs(t, key, &def)
		}
		return def
	}
	word := func(key, def string) string {
		if d.HasArg(key) {
			d.ScanArgs(t, key, &def)
		}
		return def
	}
	ctrl := func() *nvmeof.Controller {
		c := p.ctrls[num("ctrl", 1)]
		if c == nil {
			d.Fatalf(t, "no controller %d", num("ctrl", 1))
		}
		return c
	}
	switch d.Cmd {
	case "new":
		p.target = nvmeof.New(nvmeof.Config{Limits: testLimits, InCapsuleBytes: 8192, MaxEntries: 129, MaxIOQueues: 4,
			MaxControllers: num("controllers", 100),
			MaxHosts:       100, MinKATOMS: 1000, DiscoveryIdleMS: 60000, MaxDiscovery: 8, MaxDiscoveryPerPeer: 8,
			MaxDiscoveryKATOMS: 120000, QuiesceMS: 6000})
		p.target.Apply(testState())
		p.now, p.conns, p.lost, p.ctrls = 1, 0, map[nvmeof.ConnID]bool{}, map[int]*nvmeof.Controller{}
	case "connect":
		p.connect(word("host", "a"), map[string]string{"open": open, "shut": shut,
			"discovery": nvme.DiscoveryNQN}[word("sub", "open")],
			uint16(num("qid", 0)), uint16(num("ctrl", 0xffff)), uint32(num("kato", 0)), byte(num("id", 1)))
	case "cc":
		cc := nvme.CC(0).WithIOSQES(6).WithIOCQES(4).WithEN(d.HasArg("en")).WithCSS(uint8(num("css", 0)))
		cc = cc.WithSHN(map[string]uint8{"": nvme.SHNNone, "normal": nvme.SHNNormal,
			"abrupt": nvme.SHNAbrupt}[word("shn", "")])
		var e nvme.SQE
		e.Property().Init(nvme.FabricsPropertySet, nvme.PropCC)
		e.Property().SetVALUE(uint64(cc))
		p.admin(ctrl(), 0, &e)
	case "csts":
		var e nvme.SQE
		e.Property().Init(nvme.FabricsPropertyGet, nvme.PropCSTS)
		r := p.admin(ctrl(), 0, &e)
		s := nvme.CSTS(r.Result)
		p.out.Reset()
		p.say("RDY %v, CFS %v, SHST %02bb", s.RDY(), s.CFS(), s.SHST())
	case "admin":
		ops := map[string]uint8{"keepalive": nvme.AdminKeepAlive, "identify": nvme.AdminIdentify,
			"aer": nvme.AdminAsyncEvent}
		p.admin(ctrl(), 0, command(ops[word("op", "")],
			func(e *nvme.SQE) { e.Identify().SetCNS(uint8(num("cns", nvme.CNSController))) }))
	case "disconnect":
		var e nvme.SQE
		e.InitDisconnect()
		p.admin(ctrl(), uint16(num("qid", 1)), &e)
	case "lost":
		p.lost[nvmeof.ConnID(num("conn", 0))] = true
	case "gone":
		if d.HasArg("ctrl") {
			p.target.Disconnected(p.now, ctrl(), uint16(num("qid", 0)), nvmeof.ConnID(num("conn", 0)))
		} else {
			p.target.CancelConnect(nvmeof.ConnID(num("conn", 0)))
		}
	case "drained":
		p.target.Drained(p.now, ctrl(), uint64(num("epoch", int(ctrl().Epoch()))))
	case "flushed":
		p.target.Flushed(ctrl(), uint64(num("number", int(p.flush))), !d.HasArg("failed"))
	case "time":
		p.now += int64(num("ms", 0)) * ms
		p.target.Expire(p.now, silent)
	case "apply":
		s := testState()
		switch word("without", "") {
		case "open":
			s.Subsystems = s.Subsystems[1:]
		case "a":
			s.Subsystems[1].Hosts = []string{hostB}
		}
		p.target.Apply(s)
	case "stop":
		p.target.Stop("the target stops")
	case "show":
		for _, c := range p.target.Controllers() {
			p.say("controller %d, epoch %d, queues %v", c.ID, c.Epoch(), c.Queues())
		}
		if at, ok := p.target.NextExpiry(); ok {
			p.say("next at %d ms", at/ms)
		}
	default:
		d.Fatalf(t, "no such command")
	}
	p.actions()
	if p.out.Len() == 0 {
		return "ok\n"
	}
	return p.out.String()
}

func (p *player) connect(host, sub string, qid, cntlid uint16, kato uint32, id byte) {
	var e nvme.SQE
	var data nvme.ConnectData
	c := e.Connect()
	c.Init()
	c.SetSQSIZE(31)
	c.SetQID(qid)
	c.SetKATO(kato)
	data.SetHostNQN(transcriptHosts[host])
	data.SetSubNQN(sub)
	data.SetHostID(uuid.UUID{id, host[0]})
	data.SetCNTLID(cntlid)
	p.conns++
	r := p.target.Connect(p.now, nvmeof.ConnectArgs{Conn: nvmeof.ConnID(p.conns), Port: ioPort, SQE: &e, Data: &data,
		Lost: func(id nvmeof.ConnID) bool { return p.lost[id] }})
	p.say("connection %d: %s", p.conns, p.connected(&r))
}

// connected prints the outcome of a Connect.
func (p *player) connected(r *nvmeof.ConnectReply) string {
	switch {
	case r.Held:
		return "held"
	case !r.Status.OK():
		return fmt.Sprintf("%v: %s", r.Status, r.Reason)
	}
	p.ctrls[int(r.Controller.ID)] = r.Controller
	return fmt.Sprintf("queue %d of controller %d", r.QID, r.Controller.ID)
}

func (p *player) admin(c *nvmeof.Controller, qid uint16, e *nvme.SQE) nvmeof.Reply {
	e.SetPSDT(nvme.PSDTSGL)
	in, out, _ := nvmeof.PlanAdmin(e, testLimits)
	p.slot++
	r := p.target.Admin(p.now, nvmeof.AdminArgs{Controller: c, QID: qid, Slot: p.slot, SQE: e,
		Data: make([]byte, max(in, out))})
	switch {
	case r.Pending:
		p.say("pending")
	case r.Disconnect:
		p.say("%v, then the connection is closed", r.Status)
	default:
		p.say("%v", r.Status)
	}
	return r
}

// actions prints the machine's actions.
func (p *player) actions() {
	for _, a := range p.target.TakeActions() {
		switch a.Kind {
		case nvmeof.ActionClose:
			p.say("-> close %d: %s", a.Conn, a.Reason)
		case nvmeof.ActionComplete:
			p.say("-> event request %d: %v", a.Conn, a.Status)
		case nvmeof.ActionTable:
			p.say("-> table of %d: %v", a.Conn, a.Table.AppendIDs(nil, 0, 100))
		case nvmeof.ActionCredits:
			p.say("-> credits of %d: %v", a.Conn, a.Credits.On)
		case nvmeof.ActionExpired:
			p.say("-> keep alive of %d expired after %d ms", a.Controller.ID, a.IdleNS/ms)
		case nvmeof.ActionFence:
			p.say("-> fence %d below epoch %d", a.Controller.ID, a.Epoch)
		case nvmeof.ActionStop:
			p.say("-> stop %d", a.Conn)
		case nvmeof.ActionFlush:
			p.flush = a.Flush
			p.say("-> flush %d: drives %v", a.Controller.ID, a.SSDs)
		case nvmeof.ActionConnected:
			p.say("-> answer %d: %s", a.Conn, p.connected(a.Connect))
		case nvmeof.ActionOverdue:
			p.say("-> overdue %d: %s", a.Controller.ID, a.Reason)
		default:
			p.t.Fatalf("action of kind %d", a.Kind)
		}
	}
}
