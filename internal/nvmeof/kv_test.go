package nvmeof_test

import (
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/pipeline"
	"jbofd/internal/uuid"
)

const kvMax = 512 << 10

// pairs is a key-value namespace on SSD 3.
func pairs(nsid uint32) *nvmeof.Namespace {
	n := block(nsid, 0, 128<<20, 64<<20)
	n.CSI, n.SSD, n.Partition, n.MaxValueBytes = nvme.CSIKV, 3, 7, kvMax
	n.UsedBytes = func() int64 { return 54321 }
	return n
}

// kvState is testState with key-value namespaces 3 and 6 in open.
func kvState() nvmeof.State {
	s := testState()
	s.Subsystems[0].Namespaces = append(s.Subsystems[0].Namespaces, pairs(3), pairs(6))
	return s
}

func kvRig(t *testing.T) *rig {
	r := newRig(t)
	r.target.Apply(kvState())
	return r
}

var enableAll = enable.WithCSS(nvme.CCCSSIOCS)

// connectKV connects a host that enables all command sets.
func (r *rig) connectKV(host string, change ...func(*args)) *nvmeof.Controller {
	r.t.Helper()
	reply := r.tryConnect(host, open, change...)
	if !reply.Status.OK() {
		r.t.Fatal(reply.Status)
	}
	r.setCC(reply.Controller, enableAll)
	r.noActions()
	return reply.Controller
}

// kvCommand is a command with a key and the length of its value or buffer.
func kvCommand(op uint8, nsid uint32, key string, n uint32, change ...func(*nvme.SQE)) *nvme.SQE {
	return command(op, func(s *nvme.SQE) {
		s.SetPSDT(nvme.PSDTSGL)
		s.SetNSID(nsid)
		s.KV().SetKey([]byte(key))
		s.KV().SetLenBytes(n)
		for _, f := range change {
			f(s)
		}
	})
}

func options(v uint8) func(*nvme.SQE) { return func(s *nvme.SQE) { s.KV().SetOptions(v) } }
func keyLen(v uint8) func(*nvme.SQE)  { return func(s *nvme.SQE) { s.KV().SetKeyLen(v) } }

func kvTable() *nvmeof.NamespaceTable {
	return nvmeof.NewNamespaceTable(kvState().Subsystems[0].Namespaces, hostA)
}

func TestPlanOfKeysAndValues(t *testing.T) {
	const all = nvme.KVStoreMustExist | nvme.KVStoreNoCompress
	table := kvTable()
	for _, x := range []struct {
		name string
		sqe  *nvme.SQE
		want nvmeof.Plan
	}{
		{"store", kvCommand(nvme.CmdKVStore, 3, "k", 100), nvmeof.Plan{Kind: nvmeof.KindKV, ToController: 100}},
		{"store of nothing", kvCommand(nvme.CmdKVStore, 3, "k", 0), nvmeof.Plan{Kind: nvmeof.KindKV}},
		{"store of the longest", kvCommand(nvme.CmdKVStore, 3, "0123456789abcdef", kvMax, options(all)),
			nvmeof.Plan{Kind: nvmeof.KindKV, ToController: kvMax}},
		{"retrieve", kvCommand(nvme.CmdKVRetrieve, 3, "k", 100),
			nvmeof.Plan{Kind: nvmeof.KindKV, ToHost: 100, AnswerBytes: 100}},
		{"retrieve into nothing", kvCommand(nvme.CmdKVRetrieve, 3, "k", 0), nvmeof.Plan{Kind: nvmeof.KindKV}},
		{"retrieve into more than there can be", kvCommand(nvme.CmdKVRetrieve, 3, "k", 1<<32-1,
			options(nvme.KVRetrieveRaw)), nvmeof.Plan{Kind: nvmeof.KindKV, ToHost: 1<<32 - 1, AnswerBytes: kvMax}},
		{"list from the first key on", kvCommand(nvme.CmdKVList, 3, "", 4096),
			nvmeof.Plan{Kind: nvmeof.KindKV, ToHost: 4096, AnswerBytes: 4096}},
		{"list of more than MDTS", kvCommand(nvme.CmdKVList, 6, "k", 1<<30),
			nvmeof.Plan{Kind: nvmeof.KindKV, ToHost: 1 << 30, AnswerBytes: 1 << 20}},
		{"delete", kvCommand(nvme.CmdKVDelete, 3, "k", 0), nvmeof.Plan{Kind: nvmeof.KindKV, MissingOK: true}},
		{"exist", kvCommand(nvme.CmdKVExist, 3, "k", 99), nvmeof.Plan{Kind: nvmeof.KindKV}}, // has no length
		{"flush", kvCommand(nvme.CmdFlush, 3, "", 0), nvmeof.Plan{Op: pipeline.Flush}},
	} {
		// of the slot's last command
		got := nvmeof.Plan{Op: 99, FUA: true, Len: 99, Ranges: 99, AnswerBytes: 99, MissingOK: true}
		if s := nvmeof.PlanIO(x.sqe, table, testLimits, &got); s != nvme.Success {
			t.Errorf("%s: %v", x.name, s)
			continue
		}
		if got.Namespace != table.Get(x.sqe.NSID()) {
			t.Errorf("%s: namespace %+v", x.name, got.Namespace)
		}
		if got.Namespace = nil; got != x.want {
			t.Errorf("%s: %+v, want %+v", x.name, got, x.want)
		}
	}
}

func TestPlanRefusesBadKeysAndValues(t *testing.T) {
	table := kvTable()
	var cases []struct {
		name string
		sqe  *nvme.SQE
		want nvme.Status
	}
	add := func(name string, want nvme.Status, sqe *nvme.SQE) {
		cases = append(cases, struct {
			name string
			sqe  *nvme.SQE
			want nvme.Status
		}{name, sqe, want})
	}
	for _, op := range []uint8{nvme.CmdKVStore, nvme.CmdKVRetrieve, nvme.CmdKVList, nvme.CmdKVDelete, nvme.CmdKVExist} {
		if op != nvme.CmdKVList {
			add("no key", nvme.InvalidKeySize, kvCommand(op, 3, "", 64))
		}
		add("a key of 17", nvme.InvalidKeySize, kvCommand(op, 3, "k", 64, keyLen(17)))
		add("a key of 255", nvme.InvalidKeySize, kvCommand(op, 3, "k", 64, keyLen(255)))
		add("option 7", nvme.InvalidField, kvCommand(op, 3, "k", 64, options(0x80)))
		add("fused first", nvme.InvalidField, kvCommand(op, 3, "k", 64, fuse(nvme.FuseFirst)))
		add("fused second", nvme.InvalidField, kvCommand(op, 3, "k", 64, fuse(nvme.FuseSecond)))
		add("PRPs", nvme.InvalidField, kvCommand(op, 3, "k", 64, func(s *nvme.SQE) { s.SetPSDT(nvme.PSDTPRP) }))
		add("no namespace", nvme.InvalidNamespaceOrFormat, kvCommand(op, 4, "k", 64))
		add("all namespaces", nvme.InvalidNamespaceOrFormat, kvCommand(op, nvme.NSIDBroadcast, "k", 64))
	}
	add("a value beyond the namespace's longest", nvme.InvalidValueSize, kvCommand(nvme.CmdKVStore, 3, "k", kvMax+1))
	add("a value of 4 GiB", nvme.InvalidValueSize, kvCommand(nvme.CmdKVStore, 3, "k", 1<<32-1))
	add("must exist and must not", nvme.InvalidField,
		kvCommand(nvme.CmdKVStore, 3, "k", 1, options(nvme.KVStoreMustExist|nvme.KVStoreMustNotExist)))
	add("Retrieve with an option of Store", nvme.InvalidField,
		kvCommand(nvme.CmdKVRetrieve, 3, "k", 1, options(nvme.KVStoreMustNotExist)))
	add("a list without room for its length", nvme.InvalidField, kvCommand(nvme.CmdKVList, 3, "", 3))
	for _, op := range []uint8{nvme.CmdCompare, nvme.CmdWriteZeroes, nvme.CmdDSM, nvme.CmdVerify, nvme.CmdWriteUncorr,
		0x0D, 0x0E, 0x11, 0x15, 0x80, 0xFF} {
		add("an opcode that is not of keys and values", nvme.InvalidOpcode, kvCommand(op, 3, "k", 64))
	}
	for _, op := range []uint8{nvme.CmdKVList, nvme.CmdKVDelete, nvme.CmdKVExist} {
		add("to blocks", nvme.InvalidOpcode, kvCommand(op, 1, "k", 64))
	}
	for _, x := range cases {
		var p nvmeof.Plan
		wantStatus(t, x.name, nvmeof.PlanIO(x.sqe, table, testLimits, &p), x.want|nvme.DNR)
	}
	small := testLimits
	small.MDTSBytes = 64 << 10
	var p nvmeof.Plan
	wantStatus(t, "a value beyond MDTS", nvmeof.PlanIO(kvCommand(nvme.CmdKVStore, 3, "k", 64<<10+1), table, small, &p),
		nvme.InvalidValueSize|nvme.DNR)
	inaccessible := pairs(3)
	inaccessible.ANAState = nvme.ANAStateInaccessible
	lost := nvmeof.NewNamespaceTable([]*nvmeof.Namespace{inaccessible}, hostA)
	wantStatus(t, "inaccessible", nvmeof.PlanIO(kvCommand(nvme.CmdKVStore, 3, "k", 1), lost, testLimits, &p),
		nvme.ANAInaccessible)
}

func TestPlanningOfKeysAndValuesAllocatesNothing(t *testing.T) {
	table := kvTable()
	sqes := []*nvme.SQE{kvCommand(nvme.CmdKVStore, 3, "k", 100), kvCommand(nvme.CmdKVRetrieve, 3, "k", 100),
		kvCommand(nvme.CmdKVList, 3, "", 100),
		kvCommand(nvme.CmdKVDelete, 3, "k", 0), kvCommand(nvme.CmdKVExist, 3, "", 0)}
	var p nvmeof.Plan
	if n := testing.AllocsPerRun(100, func() {
		for _, sqe := range sqes {
			nvmeof.PlanIO(sqe, table, testLimits, &p)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzPlanIO sends arbitrary commands to namespaces of both command sets: a plan stays within the namespace and the
// limits, or has an error status.
func FuzzPlanIO(f *testing.F) {
	for _, op := range []uint8{nvme.CmdFlush, nvme.CmdKVStore, nvme.CmdKVRetrieve, nvme.CmdKVList, nvme.CmdKVDelete,
		nvme.CmdKVExist, nvme.CmdCompare, nvme.CmdDSM, nvme.CmdKVXStore, nvme.CmdKVXRetrieve, nvme.CmdKVXDelete} {
		for _, nsid := range []uint32{1, 2, 3} {
			f.Add(kvCommand(op, nsid, "key", 4096)[:])
			f.Add(kvCommand(op, nsid, "0123456789abcdef", 1<<31, options(3))[:])
		}
	}
	for _, op := range []uint8{nvme.CmdKVScan, nvme.CmdKVCopyIn, nvme.CmdKVCopyOut, nvme.CmdKVCount, nvme.CmdKVDigest,
		nvme.CmdKVDrop} {
		f.Add(rangeCommand(op, 4096)[:])
		f.Add(rangeCommand(op, 0, fuse(nvme.FuseFirst))[:])
	}
	table := kvTable().WithExtendedKV()
	f.Fuzz(func(t *testing.T, b []byte) {
		var sqe nvme.SQE
		copy(sqe[:], b)
		sqe.SetNSID(sqe.NSID() % 8)
		before := sqe
		p := nvmeof.Plan{Op: 77, ToHost: 77}
		s := nvmeof.PlanIO(&sqe, table, testLimits, &p)
		if sqe != before {
			t.Fatal("the command was changed")
		}
		if !s.OK() {
			if !s.DNR() {
				t.Fatalf("%v without DNR", s)
			}
			return
		}
		ns := table.Get(sqe.NSID())
		if ns == nil || p.Namespace != ns {
			t.Fatalf("planned for namespace %+v, NSID %d", p.Namespace, sqe.NSID())
		}
		if p.Kind == nvmeof.KindKV && ns.CSI != nvme.CSIKV || p.Kind != nvmeof.KindKV && ns.CSI == nvme.CSIKV &&
			p.Op != pipeline.Flush {
			t.Fatalf("%+v of a namespace with CSI %d", p, ns.CSI)
		}
		if p.ToController > 0 && p.ToHost > 0 || p.ToController > testLimits.MDTSBytes || p.AnswerBytes > p.ToHost ||
			p.AnswerBytes > testLimits.MDTSBytes {
			t.Fatalf("%d to the controller, %d of %d to the host", p.ToController, p.AnswerBytes, p.ToHost)
		}
		switch k := sqe.KV(); {
		case p.Kind != nvmeof.KindKV && p.ToHost > testLimits.MDTSBytes:
			t.Fatalf("%d bytes to the host", p.ToHost)
		case p.Kind != nvmeof.KindKV && p.Len > 0 &&
			(p.Offset < ns.OffsetBytes || p.Offset.Add(p.Len) > ns.OffsetBytes.Add(ns.SizeBytes)):
			t.Fatalf("%d bytes at %d are not in the namespace", p.Len, p.Offset)
		case p.Kind == nvmeof.KindKV && sqe.Fuse() != nvme.FuseNone:
			t.Fatalf("fuse %d", sqe.Fuse())
		case p.Kind == nvmeof.KindKV && nvme.KVRangeCommand(sqe.Opcode()):
			const entry = nvme.KVEntryOverhead
			if !sqe.KVRange().Valid() {
				t.Fatalf("a range that is not valid: %x", sqe[:])
			}
			if sums := uint32(nvme.KVRangeHeaderBytes + nvme.KVMaxSums*nvme.KVSumBytes); p.ToController > kvMax+entry ||
				p.AnswerBytes > max(kvMax+entry, sums) ||
				sqe.Opcode() != nvme.CmdKVDrop && p.ToController+p.AnswerBytes < nvme.KVRangeHeaderBytes {
				t.Fatalf("data of %d", max(p.ToController, p.AnswerBytes))
			}
		case p.Kind == nvmeof.KindKV && !k.ValidKey():
			t.Fatalf("a key of %d", k.KeyLen())
		case p.Kind == nvmeof.KindKV && nvme.KVExtended(sqe.Opcode()):
			if p.ToController > nvme.KVWriteHeaderSize+kvMax || p.AnswerBytes > nvme.KVReadHeaderSize+kvMax ||
				p.ToController < nvme.KVWriteHeaderSize && p.AnswerBytes < nvme.KVReadHeaderSize {
				t.Fatalf("data of %d", max(p.ToController, p.AnswerBytes))
			}
		case p.Kind == nvmeof.KindKV && p.ToController > kvMax, p.Kind == nvmeof.KindKV &&
			sqe.Opcode() == nvme.CmdKVRetrieve && p.AnswerBytes > kvMax:
			t.Fatalf("a value of %d", max(p.ToController, p.AnswerBytes))
		}
	})
}

func ofKV(i *nvme.IdentifySQE) { i.SetCSI(nvme.CSIKV) }

func TestIdentifyOfKeysAndValues(t *testing.T) {
	r := kvRig(t)
	c := r.connectKV(hostA)
	for _, cns := range []uint8{nvme.CNSNamespaceCSI, nvme.CNSAllocatedNSCSI} {
		reply, data := r.do(c, 0, identify(cns, 3, ofKV), nil)
		if !reply.Status.OK() {
			t.Fatal(reply.Status)
		}
		d := (*nvme.IdentifyNamespaceKV)(data)
		if err := d.Check(); err != nil {
			t.Error(err)
		}
		if reply.Used == nil || reply.Used() != 54321 {
			t.Error("the driver is not told how to know what is in use")
		}
		if d.NSZE() != 64<<20 || d.NUSE() != 0 || d.NMIC() != nvme.NMICShared || d.ANAGRPID() != 1 || d.SSD() != 3 ||
			d.NKVF() != 0 || d.NSFEAT() != 0 ||
			d.NGUID() != (uuid.UUID{2, 3}) || d.EUI64() != ([8]byte{3, 3}) {
			t.Errorf("NSZE %d NUSE %d NMIC %d ANAGRPID %d SSD %d NGUID %v", d.NSZE(), d.NUSE(), d.NMIC(), d.ANAGRPID(),
				d.SSD(), d.NGUID())
		}
		if f := d.Format(); f.KVKML() != 16 || f.KVVML() != kvMax || f.MNKS() != 0 {
			t.Errorf("keys of %d, values of %d", f.KVKML(), f.KVVML())
		}
		reply, data = r.do(c, 0, identify(cns, 4, ofKV), nil)
		if !reply.Status.OK() || reply.Used != nil || slices.ContainsFunc(data, func(b byte) bool { return b != 0 }) {
			t.Errorf("an inactive namespace is not zeroes: %v", reply.Status)
		}
	}
	_, data := r.must(c, identify(nvme.CNSControllerCSI, 0, ofKV), nil)
	if slices.ContainsFunc(data, func(b byte) bool { return b != 0 }) {
		t.Error("the controller's structure has fields")
	}
	_, data = r.must(c, identify(nvme.CNSNSDescriptors, 3), nil)
	csi := -1
	for typ, id := range nvme.NSDescriptors(data).All() {
		if typ == nvme.NIDTCSI {
			csi = int(id[0])
		}
	}
	if csi != int(nvme.CSIKV) {
		t.Errorf("its descriptor says CSI %d", csi)
	}
	_, data = r.must(c, identify(nvme.CNSNamespaceIndependent, 3), nil)
	if n := (*nvme.IdentifyNamespaceIndependent)(data); n.NSTAT() != nvme.NSTATReady || n.ANAGRPID() != 1 {
		t.Errorf("NSTAT %#x, ANAGRPID %d", n.NSTAT(), n.ANAGRPID())
	}
	for _, x := range []struct {
		name string
		sqe  *nvme.SQE
		want nvme.Status
	}{
		{"the structure of blocks", identify(nvme.CNSNamespace, 3), nvme.InvalidIOCommandSet},
		{"the structure of blocks, allocated", identify(nvme.CNSAllocatedNamespace, 3), nvme.InvalidIOCommandSet},
		{"CSI 0 of keys and values", identify(nvme.CNSNamespaceCSI, 3), nvme.InvalidIOCommandSet},
		{"CSI 1 of blocks", identify(nvme.CNSNamespaceCSI, 1, ofKV), nvme.InvalidIOCommandSet},
		{"CSI 2", identify(nvme.CNSNamespaceCSI, 3, func(i *nvme.IdentifySQE) { i.SetCSI(nvme.CSIZNS) }),
			nvme.InvalidField},
		{"a list of CSI 2", identify(nvme.CNSActiveNSListCSI, 0, func(i *nvme.IdentifySQE) { i.SetCSI(nvme.CSIZNS) }),
			nvme.InvalidField},
	} {
		reply, _ := r.do(c, 0, x.sqe, nil)
		wantStatus(t, x.name, reply.Status, x.want|nvme.DNR)
	}
	_, data = r.must(c, getLog(nvme.LIDEffects, 4096, func(g *nvme.GetLogSQE) { g.SetCSI(nvme.CSIKV) }), nil)
	l := (*nvme.EffectsLog)(data)
	if l.IO(nvme.CmdKVStore) != nvme.EffectSupported|nvme.EffectLBCC || l.IO(nvme.CmdKVList) != nvme.EffectSupported ||
		l.IO(nvme.CmdCompare) != 0 || l.Admin(nvme.AdminIdentify) == 0 {
		t.Errorf("effects: store %#x, list %#x, compare %#x", l.IO(nvme.CmdKVStore), l.IO(nvme.CmdKVList),
			l.IO(nvme.CmdCompare))
	}
}

func TestEachCommandSetHasItsList(t *testing.T) {
	r := kvRig(t)
	c := r.connectKV(hostA)
	for _, x := range []struct {
		cns   uint8
		csi   nvme.CSI
		after uint32
		want  []uint32
	}{
		{nvme.CNSActiveNSList, 0, 0, []uint32{1, 2, 3, 5, 6}},
		{nvme.CNSActiveNSListCSI, nvme.CSINVM, 0, []uint32{1, 2, 5}},
		{nvme.CNSActiveNSListCSI, nvme.CSIKV, 0, []uint32{3, 6}},
		{nvme.CNSAllocatedNSListCSI, nvme.CSIKV, 3, []uint32{6}},
		{nvme.CNSAllocatedNSListCSI, nvme.CSIKV, 6, nil},
	} {
		_, data := r.must(c, identify(x.cns, x.after, func(i *nvme.IdentifySQE) { i.SetCSI(x.csi) }), nil)
		if got := ids((*nvme.NSList)(data)); !slices.Equal(got, x.want) {
			t.Errorf("CNS %#x, CSI %d after %d: %v, want %v", x.cns, x.csi, x.after, got, x.want)
		}
	}
}

// A host that has enabled only the NVM command set is not affected by key-value namespaces.
func TestAHostOfBlocksDoesNotSeeKeysAndValues(t *testing.T) {
	r := kvRig(t)
	c := r.connect(hostA, open)
	_, data := r.must(c, identify(nvme.CNSActiveNSList, 0), nil)
	if got := ids((*nvme.NSList)(data)); !slices.Equal(got, []uint32{1, 2, 5}) {
		t.Errorf("namespaces %v", got)
	}
	_, data = r.must(c, identify(nvme.CNSNamespace, 3), nil)
	if !(*nvme.IdentifyNamespace)(data).Inactive() {
		t.Error("a namespace of keys and values is not inactive")
	}
	reply, _ := r.do(c, 0, identify(nvme.CNSNamespaceCSI, 3, ofKV), nil)
	wantStatus(t, "CSI 1", reply.Status, nvme.InvalidField|nvme.DNR)
	q := r.tryConnect(hostA, open, queue(c, 1))
	if q.Table.Get(3) != nil || q.Table.Get(1) == nil {
		t.Error("its queue knows other namespaces")
	}
	// After it has enabled all command sets, it sees them, without an event.
	r.setCC(c, 0)
	r.setCC(c, enableAll)
	r.wantActions("close 2: controller reset")
	_, data = r.must(c, identify(nvme.CNSActiveNSListCSI, 0, ofKV), nil)
	if got := ids((*nvme.NSList)(data)); !slices.Equal(got, []uint32{3, 6}) {
		t.Errorf("namespaces %v", got)
	}
	if q = r.tryConnect(hostA, open, queue(c, 1)); q.Table.Get(3) == nil {
		t.Error("its queue does not know them")
	}
}

// A change of a key-value namespace is an event for the hosts that see it.
func TestKVNamespaceEventsReachHostsThatSeeThem(t *testing.T) {
	r := kvRig(t)
	a, b := r.connectKV(hostA), r.connect(hostB, open)
	for _, c := range []*nvmeof.Controller{a, b} {
		r.must(c, setFeature(nvme.FIDAsyncEvent, nvme.AECNamespace), nil)
	}
	slot := r.aer(a)
	r.aer(b)
	s := kvState()
	s.Subsystems[0].Namespaces[3].MaxValueBytes++
	r.target.Apply(s)
	if got, want := r.actions(), fmt.Sprintf("event %d: %#x", slot, uint64(nvme.AERNamespaceChanged)); got != want {
		t.Errorf("actions %q, want %q", got, want)
	}
}

func TestErrorOnDeleteIsAFeatureOfEachNamespace(t *testing.T) {
	r := kvRig(t)
	c := r.connectKV(hostA)
	q := r.tryConnect(hostA, open, queue(c, 1))
	table := q.Table
	feature := func(sqe *nvme.SQE, nsid uint32) *nvme.SQE {
		sqe.SetNSID(nsid)
		return sqe
	}
	missingOK := func(nsid uint32) bool {
		var p nvmeof.Plan
		if s := nvmeof.PlanIO(kvCommand(nvme.CmdKVDelete, nsid, "k", 0), table, testLimits, &p); !s.OK() {
			t.Fatal(s)
		}
		return p.MissingOK
	}
	set := func(nsid, v uint32) {
		t.Helper()
		r.must(c, feature(setFeature(nvme.FIDKeyValue, v), nsid), nil)
		tables := 0
		for _, a := range r.take() {
			if a.Kind == nvmeof.ActionTable && a.Conn == 2 && a.Version > q.Version {
				table, q.Version = a.Table, a.Version
				tables++
			}
		}
		if tables != 1 {
			t.Errorf("%d tables for the queue", tables)
		}
	}
	get := func(nsid uint32) uint64 {
		v, _ := r.must(c, feature(getFeature(nvme.FIDKeyValue, nvme.SELCurrent), nsid), nil)
		return v
	}
	if !missingOK(3) || !missingOK(6) || get(3) != 0 {
		t.Error("the default is not that missing keys are all right")
	}
	set(3, nvme.KVErrorOnDelete)
	if missingOK(3) || !missingOK(6) || get(3) != 1 || get(6) != 0 {
		t.Error("set for one, it does not hold for that one alone")
	}
	set(nvme.NSIDBroadcast, nvme.KVErrorOnDelete)
	if missingOK(3) || missingOK(6) || get(6) != 1 {
		t.Error("set for all, it does not hold for all")
	}
	set(3, 0)
	r.target.Apply(kvState()) // keeps it
	for _, a := range r.take() {
		table = a.Table
	}
	if !missingOK(3) || missingOK(6) {
		t.Error("a change of the configuration has changed it")
	}
	bits, _ := r.must(c, feature(getFeature(nvme.FIDKeyValue, nvme.SELSupported), 3), nil)
	if bits != nvme.FeatureChangeable|nvme.FeatureNSSpecific {
		t.Errorf("capabilities %#x", bits)
	}
	for _, x := range []struct {
		name    string
		nsid, v uint32
		want    nvme.Status
	}{{"of blocks", 1, 1, nvme.InvalidField}, {"of no namespace", 4, 1, nvme.InvalidNamespaceOrFormat},
		{"a reserved bit", 3, 2, nvme.InvalidField}} {
		reply, _ := r.do(c, 0, feature(setFeature(nvme.FIDKeyValue, x.v), x.nsid), nil)
		wantStatus(t, x.name, reply.Status, x.want|nvme.DNR)
	}
	reply, _ := r.do(c, 0, feature(getFeature(nvme.FIDKeyValue, nvme.SELCurrent), 1), nil)
	wantStatus(t, "read of blocks", reply.Status, nvme.InvalidField|nvme.DNR)
	// A controller reset clears it.
	r.setCC(c, 0)
	r.setCC(c, enableAll)
	r.actions()
	if table = r.tryConnect(hostA, open, queue(c, 1)).Table; !missingOK(6) {
		t.Error("it has survived a reset")
	}
}
