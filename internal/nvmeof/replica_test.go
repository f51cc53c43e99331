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
)

// replication are the opcodes of messages between nodes.
var replication = []uint8{nvme.CmdKVForward, nvme.CmdKVDurable, nvme.CmdKVSync, nvme.CmdKVShip, nvme.CmdKVCompare,
	nvme.CmdKVFetch}

// replicatedState is kvState with namespace 8 in open, which is replicated and which hostB sees. hostB is a node, too.
func replicatedState() nvmeof.State {
	s := kvState()
	n := pairs(8)
	n.Executor, n.OffsetBytes, n.Hosts = nvmeof.KindReplica, units.DriveOffset(256<<20), []string{hostA}
	s.Subsystems[0].Namespaces = append(s.Subsystems[0].Namespaces, n)
	s.Subsystems[0].AllowAnyHost, s.Subsystems[0].Hosts = false, []string{hostA}
	s.Subsystems[0].Nodes = nodesOf(hostB)
	return s
}

// nodeAddr is where nodes connect from.
var nodeAddr = netip.MustParseAddr("192.0.2.8")

func nodesOf(hosts ...string) (nodes []nvmeof.Node) {
	for _, h := range hosts {
		nodes = append(nodes, nvmeof.Node{NQN: h, From: []netip.Addr{nodeAddr}})
	}
	return nodes
}

func replicatedTable() *nvmeof.NamespaceTable {
	return nvmeof.NewNamespaceTable(replicatedState().Subsystems[0].Namespaces, hostA).WithReplication()
}

// message is a valid message with n bytes of data, or a buffer for them.
func message(op uint8, nsid, n uint32, change ...func(*nvme.KVReplicaSQE)) *nvme.SQE {
	return command(op, func(s *nvme.SQE) {
		s.SetPSDT(nvme.PSDTSGL)
		s.SetNSID(nsid)
		k := s.KVReplica()
		k.SetEpoch(1)
		k.SetLenBytes(n)
		switch op {
		case nvme.CmdKVForward:
			k.SetSequence(1)
			k.SetKeyLen(1)
		case nvme.CmdKVShip:
			k.SetKey([]byte("k"))
		}
		for _, f := range change {
			f(k)
		}
	})
}

// deleted makes a Forward one of a Delete.
func deleted(k *nvme.KVReplicaSQE) { k.SetFlags(nvme.KVForwardDelete) }

// length is the data of a message that needs some.
func length(op uint8) uint32 {
	switch op {
	case nvme.CmdKVDurable, nvme.CmdKVSync:
		return 0
	}
	return 200
}

func TestPlanOfMessagesBetweenNodes(t *testing.T) {
	const header, sums = nvme.KVForwardHeaderSize, nvme.KVRangeHeaderBytes + 64*nvme.KVSumBytes
	part := func(k *nvme.KVReplicaSQE) { k.SetBits(48) }
	table := replicatedTable()
	for _, x := range []struct {
		name string
		sqe  *nvme.SQE
		want nvmeof.Plan
	}{
		{"forward", message(nvme.CmdKVForward, 8, header+100), nvmeof.Plan{Wide: true, ToController: header + 100}},
		{"forward of nothing", message(nvme.CmdKVForward, 8, header), nvmeof.Plan{Wide: true, ToController: header}},
		{"forward of the longest", message(nvme.CmdKVForward, 8, header+kvMax),
			nvmeof.Plan{Wide: true, ToController: header + kvMax}},
		{"forward of a delete", message(nvme.CmdKVForward, 8, header, deleted),
			nvmeof.Plan{Wide: true, ToController: header}},
		{"durable", message(nvme.CmdKVDurable, 8, 0), nvmeof.Plan{Wide: true}},
		{"sync", message(nvme.CmdKVSync, 8, 0), nvmeof.Plan{}},
		{"ship", message(nvme.CmdKVShip, 8, 116), nvmeof.Plan{ToHost: 116, AnswerBytes: 116}},
		{"ship of the header", message(nvme.CmdKVShip, 8, 16), nvmeof.Plan{ToHost: 16, AnswerBytes: 16}},
		{"ship into more than there can be", message(nvme.CmdKVShip, 8, 1<<32-1),
			nvmeof.Plan{ToHost: 1<<32 - 1, AnswerBytes: 16 + kvMax}},
		{"compare", message(nvme.CmdKVCompare, 8, sums, part), nvmeof.Plan{ToHost: sums, AnswerBytes: sums}},
		{"compare of one position", message(nvme.CmdKVCompare, 8, 4096), nvmeof.Plan{ToHost: 4096, AnswerBytes: 112}},
		{"fetch", message(nvme.CmdKVFetch, 8, 65536, part), nvmeof.Plan{ToHost: 65536, AnswerBytes: 65536}},
		{"fetch of the least", message(nvme.CmdKVFetch, 8, 136), nvmeof.Plan{ToHost: 136, AnswerBytes: 136}},
		{"fetch of more than there can be", message(nvme.CmdKVFetch, 8, 1<<31),
			nvmeof.Plan{ToHost: 1 << 31, AnswerBytes: kvMax + nvme.KVEntryOverhead}},
	} {
		got := nvmeof.Plan{Op: 99, FUA: true, MissingOK: true}
		x.want.Kind = nvmeof.KindReplica
		if s := nvmeof.PlanIO(x.sqe, table, testLimits, &got); s != nvme.Success {
			t.Errorf("%s: %v", x.name, s)
		} else if got.Namespace = nil; got != x.want {
			t.Errorf("%s: %+v, want %+v", x.name, got, x.want)
		}
	}
	small := testLimits
	small.MDTSBytes = 64 << 10
	var p nvmeof.Plan
	wantStatus(t, "data beyond MDTS", nvmeof.PlanIO(message(nvme.CmdKVForward, 8, 64<<10+1), table, small, &p),
		nvme.InvalidValueSize|nvme.DNR)
	for _, op := range []uint8{nvme.CmdKVShip, nvme.CmdKVFetch} {
		if s := nvmeof.PlanIO(message(op, 8, 1<<20), table, small, &p); !s.OK() || p.AnswerBytes != 64<<10 {
			t.Errorf("opcode %#x: %v, an answer of %d bytes", op, s, p.AnswerBytes)
		}
	}
	if n := testing.AllocsPerRun(100, func() {
		var sqe nvme.SQE
		sqe.SetOpcode(nvme.CmdKVForward)
		sqe.SetNSID(8)
		sqe.SetPSDT(nvme.PSDTSGL)
		k := sqe.KVReplica()
		k.SetEpoch(1)
		k.SetSequence(1)
		k.SetKeyLen(1)
		k.SetLenBytes(header)
		if s := nvmeof.PlanIO(&sqe, table, testLimits, &p); !s.OK() {
			t.Error(s)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestPlanRefusesBadMessagesBetweenNodes(t *testing.T) {
	table := replicatedTable()
	check := func(what string, sqe *nvme.SQE, want nvme.Status) {
		t.Helper()
		var p nvmeof.Plan
		wantStatus(t, what, nvmeof.PlanIO(sqe, table, testLimits, &p), want|nvme.DNR)
	}
	const header = nvme.KVForwardHeaderSize
	for _, op := range replication {
		n := length(op)
		var p nvmeof.Plan
		if s := nvmeof.PlanIO(message(op, 8, n), table, testLimits, &p); !s.OK() {
			t.Errorf("opcode %#x: %v", op, s)
		}
		check("no epoch", message(op, 8, n, func(k *nvme.KVReplicaSQE) { k.SetEpoch(0) }), nvme.InvalidField)
		reserved := 15
		if op == nvme.CmdKVCompare || op == nvme.CmdKVFetch { // the round is there
			reserved = 60
		}
		check("a reserved byte", message(op, 8, n, func(k *nvme.KVReplicaSQE) { k[reserved] = 1 }), nvme.InvalidField)
		check("a key of 17", message(op, 8, n, func(k *nvme.KVReplicaSQE) { k.SetKeyLen(17) }), nvme.InvalidField)
		sqe := message(op, 8, n)
		sqe.SetFuse(nvme.FuseFirst)
		check("fused", sqe, nvme.InvalidField)
		sqe = message(op, 8, n)
		sqe.SetPSDT(nvme.PSDTPRP)
		check("PRPs", sqe, nvme.InvalidField)
		check("no namespace", message(op, 4, n), nvme.InvalidNamespaceOrFormat)
		check("to blocks", message(op, 1, n), nvme.InvalidOpcode)
		check("to keys and values that are not replicated", message(op, 3, n), nvme.InvalidOpcode)
	}
	check("no whole header", message(nvme.CmdKVForward, 8, header-1), nvme.InvalidField)
	check("a delete with a value", message(nvme.CmdKVForward, 8, header+1, deleted), nvme.InvalidField)
	check("a value too long", message(nvme.CmdKVForward, 8, header+kvMax+1), nvme.InvalidValueSize)
	check("a value of 4 GiB", message(nvme.CmdKVForward, 8, 1<<32-1), nvme.InvalidValueSize)
	check("data with a mark", message(nvme.CmdKVDurable, 8, 1), nvme.InvalidField)
	check("no room for the header", message(nvme.CmdKVShip, 8, 15), nvme.InvalidField)
	check("no room for a sum", message(nvme.CmdKVCompare, 8, 111), nvme.InvalidField)
	check("no room for 64 sums", message(nvme.CmdKVCompare, 8, 96+64*16-1, func(k *nvme.KVReplicaSQE) {
		k.SetBits(6)
	}), nvme.InvalidField)
	check("no room for an entry", message(nvme.CmdKVFetch, 8, 135), nvme.InvalidField)
}

// grant asks for extensions and returns those that were granted, and the table of the queue.
func (r *rig) grant(c *nvmeof.Controller, bits uint32, table *nvmeof.NamespaceTable) (uint32, *nvmeof.NamespaceTable) {
	r.t.Helper()
	reply, _ := r.do(c, 0, extension(bits), nil)
	if !reply.Status.OK() {
		r.t.Errorf("set extensions: %v", reply.Status)
	}
	for _, a := range r.take() {
		if a.Kind == nvmeof.ActionTable {
			table = a.Table
		}
	}
	return uint32(reply.Result), table
}

// offered is what Identify Controller says of the extensions.
func (r *rig) offered(c *nvmeof.Controller) uint32 {
	r.t.Helper()
	_, data := r.must(c, identify(nvme.CNSController, 0), nil)
	_, bits, _ := (*nvme.IdentifyController)(data).Extension()
	return bits
}

// TestOnlyNodesAreGrantedReplication: a host that is not a node is not offered it and gets Invalid Command Opcode, also
// with the extension asked for; a node does, until the grant is withdrawn.
func TestOnlyNodesAreGrantedReplication(t *testing.T) {
	r := newRig(t)
	r.target.Apply(replicatedState())
	taken := func(table *nvmeof.NamespaceTable) (n int) {
		for _, op := range replication {
			var p nvmeof.Plan
			switch s := nvmeof.PlanIO(message(op, 8, length(op)), table, testLimits, &p); s {
			case nvme.Success:
				n++
			case nvme.InvalidOpcode | nvme.DNR:
			default:
				t.Errorf("opcode %#x: %v", op, s)
			}
		}
		return n
	}
	listed := func(c *nvmeof.Controller) (n int) {
		_, data := r.must(c, getLog(nvme.LIDEffects, 4096, func(g *nvme.GetLogSQE) { g.SetCSI(nvme.CSIKV) }), nil)
		for _, op := range replication {
			want := nvme.Effects(nvme.EffectSupported)
			if op == nvme.CmdKVForward {
				want |= nvme.EffectLBCC
			}
			switch (*nvme.EffectsLog)(data).IO(op) {
			case want:
				n++
			case 0:
			default:
				t.Errorf("opcode %#x: effects %#x", op, (*nvme.EffectsLog)(data).IO(op))
			}
		}
		return n
	}
	const all = nvme.ExtCredits | nvme.ExtKV | nvme.ExtReplication
	host, node := r.connectKV(hostA), r.connectKV(hostB)
	hosts := r.tryConnect(hostA, open, queue(host, 1)).Table
	if r.offered(host) != all&^nvme.ExtReplication || r.offered(node) != all {
		t.Errorf("offered to a host %#x, to a node %#x", r.offered(host), r.offered(node))
	}
	granted, hosts := r.grant(host, all, hosts)
	if granted != all&^nvme.ExtReplication || taken(hosts) != 0 || listed(host) != 0 {
		t.Errorf("a host is granted %#x, and %d messages are taken from it, %d listed", granted, taken(hosts),
			listed(host))
	}
	nodes := r.tryConnect(hostB, open, queue(node, 1)).Table
	if taken(nodes) != 0 || listed(node) != 0 {
		t.Error("messages are taken before replication is granted")
	}
	granted, nodes = r.grant(node, nvme.ExtReplication, nodes)
	if granted != nvme.ExtReplication || taken(nodes) != len(replication) || listed(node) != len(replication) {
		t.Errorf("a node is granted %#x, and %d messages are taken from it, %d listed", granted, taken(nodes),
			listed(node))
	}
	var p nvmeof.Plan
	wantStatus(t, "extended key-value without a grant", nvmeof.PlanIO(kvCommand(nvme.CmdKVXStore, 8, "k", 100), nodes,
		testLimits, &p), nvme.InvalidOpcode|nvme.DNR)
	if s := nvmeof.PlanIO(kvCommand(nvme.CmdKVStore, 8, "k", 100), hosts, testLimits, &p); !s.OK() ||
		p.Kind != nvmeof.KindReplica {
		t.Errorf("a store in a replicated namespace: %v, kind %d", s, p.Kind)
	}
	if _, nodes = r.grant(node, nvme.ExtKV, nodes); taken(nodes) != 0 {
		t.Error("messages are taken after replication was withdrawn")
	}
	r.grant(node, all, nodes)
	r.setCC(node, 0)
	r.setCC(node, enableAll)
	r.take()
	if taken(r.tryConnect(hostB, open, queue(node, 1)).Table) != 0 {
		t.Error("messages are taken after a reset")
	}
}

// TestNodesSeeReplicatedNamespacesAndNoOthers: of those that only other hosts may see.
func TestNodesSeeReplicatedNamespacesAndNoOthers(t *testing.T) {
	r := newRig(t)
	r.target.Apply(replicatedState())
	for host, want := range map[string][]uint32{hostA: {1, 2, 3, 5, 6, 8}, hostB: {1, 2, 3, 6, 8}} {
		c := r.connectKV(host)
		table := r.tryConnect(host, open, queue(c, 1)).Table
		if got := table.AppendIDs(nil, 0, 100); !slices.Equal(got, want) {
			t.Errorf("%s sees %d, want %d", host, got, want)
		}
	}
	c := r.connect(hostB, open) // blocks only
	if got := r.tryConnect(hostB, open, queue(c, 1)).Table.AppendIDs(nil, 0, 100); !slices.Equal(got, []uint32{1, 2}) {
		t.Errorf("a node without command sets sees %d", got)
	}
}

// TestANodeComesFromItsAddresses: from elsewhere its NQN is refused, on each queue, although any host is allowed, and
// discovery does not show the subsystem.
func TestANodeComesFromItsAddresses(t *testing.T) {
	r := newRig(t)
	s := replicatedState()
	s.Subsystems[0].AllowAnyHost = true
	s.Subsystems[0].Nodes[0].From = append(s.Subsystems[0].Nodes[0].From, netip.MustParseAddr("fe80::7"))
	r.target.Apply(s)
	from := func(a string) func(*args) {
		return func(x *args) { x.from = netip.MustParseAddr(a) }
	}
	for a, want := range map[string]bool{"192.0.2.8": true, "::ffff:192.0.2.8": true, "fe80::7%eth0": true,
		"192.0.2.9": false, "fe80::8%eth0": false, "2001:db8::7": false} {
		reply := r.tryConnect(hostB, open, from(a))
		if why := "comes from " + a; !want &&
			(reply.Status != nvme.ConnectInvalidHost|nvme.DNR || !strings.Contains(reply.Reason, why)) {
			t.Errorf("from %s: %v, %q", a, reply.Status, reply.Reason)
		}
		if want && (!reply.Status.OK() || r.offered(r.connectKV(hostB, from(a)))&nvme.ExtReplication == 0) {
			t.Errorf("from %s: %v, %q", a, reply.Status, reply.Reason)
		}
		d := r.connect(hostB, nvme.DiscoveryNQN, from(a))
		if _, entries := r.discoveryLog(d); strings.Contains(fmt.Sprint(entries), open) != want {
			t.Errorf("from %s: discovery shows %q", a, entries)
		}
	}
	if reply := r.tryConnect(hostA, open, from("192.0.2.9")); !reply.Status.OK() {
		t.Errorf("a host: %v, %q", reply.Status, reply.Reason)
	}
	c := r.connectKV(hostB)
	if reply := r.tryConnect(hostB, open, queue(c, 1), from("192.0.2.9")); reply.Status.OK() {
		t.Error("a queue from elsewhere joins the controller of a node")
	}
}

// TestWhoIsNoNodeAnyMoreLosesItsAssociation: so that nothing that it has been granted outlives the configuration.
func TestWhoIsNoNodeAnyMoreLosesItsAssociation(t *testing.T) {
	for name, x := range map[string]struct {
		change func(s *nvmeof.SubsystemState)
		goes   bool
	}{
		"nothing":             {func(*nvmeof.SubsystemState) {}, false},
		"another node":        {func(s *nvmeof.SubsystemState) { s.Nodes = nodesOf(hostA, hostB) }, false},
		"not a node":          {func(s *nvmeof.SubsystemState) { s.Nodes = nil }, true},
		"not a node, a host":  {func(s *nvmeof.SubsystemState) { s.Nodes, s.AllowAnyHost = nil, true }, true},
		"a node elsewhere":    {func(s *nvmeof.SubsystemState) { s.Nodes[0].From = nil }, true},
		"a node and any host": {func(s *nvmeof.SubsystemState) { s.AllowAnyHost = true }, false},
	} {
		r := newRig(t)
		r.target.Apply(replicatedState())
		c := r.connectKV(hostB)
		s := replicatedState()
		x.change(&s.Subsystems[0])
		r.target.Apply(s)
		r.take()
		if here := slices.Contains(r.target.Controllers(), c); here == x.goes {
			t.Errorf("%s: the association is there: %t", name, here)
		}
	}
	r := newRig(t)
	r.target.Apply(replicatedState())
	if named, _ := r.target.Named(hostB); !named {
		t.Error("a node is no host that the configuration names")
	}
	d := r.connect(hostA, nvme.DiscoveryNQN)
	before, _ := r.discoveryLog(d)
	c := r.connectKV(hostA)
	s := replicatedState()
	s.Subsystems[0].Nodes = nodesOf(hostA, hostB)
	r.target.Apply(s)
	if after, _ := r.discoveryLog(d); after == before {
		t.Error("discovery does not say that another host may connect")
	}
	r.take()
	if r.offered(c)&nvme.ExtReplication != 0 {
		t.Error("a host becomes a node while it is connected")
	}
	if c = r.connectKV(hostA); r.offered(c)&nvme.ExtReplication == 0 {
		t.Error("a host that is a node when it connects is none")
	}
}
