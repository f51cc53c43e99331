package serve_test

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/nvmeof/target/kvtest"
	"jbofd/internal/nvmeof/tcp/serve"
	"jbofd/internal/partition"
	"jbofd/internal/ssd/mem"
)

// kvNSID is the key-value namespace beside the block namespace 1.
const kvNSID = 9

// kvRig is a rig with a key-value namespace on a store in memory.
func kvRig(t testing.TB, change func(*serve.Config)) (*rig, *kvtest.Store) {
	t.Helper()
	r, s := newRig(t, change), kvtest.NewStore()
	r.AddKV(kvNSID, s)
	return r, s
}

// kvHost makes a host of a controller.
func kvHost(t *testing.T, c *client.Controller) kvtest.Host {
	return func(e nvme.SQE, data []byte) (uint64, nvme.Status) {
		t.Helper()
		comp, err := c.IOPassthru(t.Context(), e, data)
		if err != nil && comp.Status.OK() {
			t.Fatal(err)
		}
		return comp.Result, comp.Status
	}
}

func TestKeysAndValuesOverTCP(t *testing.T) {
	for name, o := range map[string]client.Options{
		"standard host":             {Credits: client.CreditsOff},
		"with credits":              {Credits: client.CreditsOn},
		"with digests":              {HeaderDigest: true, DataDigest: true},
		"one R2T, one command deep": {MaxR2T: 1, QueueDepth: 1},
	} {
		t.Run(name, func(t *testing.T) {
			r, s := kvRig(t, nil)
			if o.Credits == client.CreditsOn {
				s.GiveCredit(70000)
			}
			o.Address, o.Queues = r.address, 1
			kvtest.Conformance(t, s, kvNSID, kvHost(t, connect(t, o)))
		})
	}
}

func TestBlocksBesideKeysAndValues(t *testing.T) {
	r, _ := kvRig(t, nil)
	c := connect(t, client.Options{Address: r.address})
	n := namespace(t, c, 1)
	want := bytes.Repeat([]byte{7}, blockBytes)
	if _, err := n.WriteAt(t.Context(), want, 0, 0); err != nil {
		t.Fatal(err)
	}
	host := kvHost(t, c)
	if _, st := host(kvtest.Command(nvme.CmdKVStore, kvNSID, "k", 3), []byte("abc")); !st.OK() {
		t.Fatal(st)
	}
	got := make([]byte, blockBytes)
	if _, err := n.ReadAt(t.Context(), got, 0); err != nil || !bytes.Equal(got, want) {
		t.Errorf("blocks: %v", err)
	}
	for _, op := range []uint8{nvme.CmdKVDelete, nvme.CmdKVExist} {
		if _, st := host(kvtest.Command(op, 1, "k", 0), nil); st != nvme.InvalidOpcode|nvme.DNR {
			t.Errorf("opcode %#x to blocks: %v", op, st)
		}
	}
	id := make([]byte, nvme.IdentifySize)
	var e nvme.SQE
	e.SetOpcode(nvme.AdminIdentify)
	e.SetNSID(kvNSID)
	e.Identify().SetCNS(nvme.CNSNamespaceCSI)
	e.Identify().SetCSI(nvme.CSIKV)
	if _, err := c.AdminPassthru(t.Context(), e, id); err != nil {
		t.Fatal(err)
	}
	if d := (*nvme.IdentifyNamespaceKV)(id); d.NSZE() != testBytes || d.NUSE() != 12345 {
		t.Errorf("%d of %d bytes in use", d.NUSE(), d.NSZE())
	}
}

// A buffer may be longer than any value and than MDTS, because the transfer is not.
func TestABufferMayBeLongerThanAnyValue(t *testing.T) {
	r, s := kvRig(t, nil)
	s.Set("key", []byte("value"))
	s.Set("large", bytes.Repeat([]byte{3}, kvtest.MaxValue))
	host := kvHost(t, connect(t, client.Options{Address: r.address}))
	for key, n := range map[string]int{"key": 5, "large": kvtest.MaxValue} {
		buf := make([]byte, 3*kvtest.MaxValue+1)
		result, st := host(kvtest.Command(nvme.CmdKVRetrieve, kvNSID, key, len(buf)), buf)
		v, _ := s.Value(key)
		if !st.OK() || int(result) != n || !bytes.Equal(buf[:n], v) || buf[n] != 0 {
			t.Errorf("%s: %v, DW0 %d", key, st, result)
		}
	}
	buf := make([]byte, 2*kvtest.MaxValue)
	if _, st := host(kvtest.Command(nvme.CmdKVList, kvNSID, "", len(buf)), buf); !st.OK() ||
		nvme.KVList(buf).Len() != 2 {
		t.Errorf("list: %v, %d keys", st, nvme.KVList(buf).Len())
	}
}

// A host that asks for it gets an error if there is nothing to delete.
func TestDeleteOfAMissingKeyFailsIfEnabled(t *testing.T) {
	r, _ := kvRig(t, nil)
	a, b := connect(t, client.Options{Address: r.address}), connect(t, client.Options{Address: r.address})
	del := func(c *client.Controller) nvme.Status {
		_, st := kvHost(t, c)(kvtest.Command(nvme.CmdKVDelete, kvNSID, "missing", 0), nil)
		return st
	}
	if _, err := a.SetFeature(t.Context(), client.Feature{FID: nvme.FIDKeyValue, NSID: kvNSID},
		nvme.KVErrorOnDelete); err != nil {
		t.Fatal(err)
	}
	if got := del(a); got != nvme.KeyDoesNotExist|nvme.DNR {
		t.Errorf("whoever asked: %v", got)
	}
	if got := del(b); !got.OK() {
		t.Errorf("another host: %v", got)
	}
	if _, err := a.SetFeature(t.Context(), client.Feature{FID: nvme.FIDKeyValue, NSID: kvNSID}, 0); err != nil {
		t.Fatal(err)
	}
	if got := del(a); !got.OK() {
		t.Errorf("whoever asks no more: %v", got)
	}
}

// Commands of a namespace whose partition does not exist yet fail, and may be repeated.
func TestANamespaceWithoutItsPartitionIsNotReady(t *testing.T) {
	r, s := kvRig(t, nil)
	r.Service.RemovePartition(r.State.Subsystems[0].Namespaces[1].Partition)
	host := kvHost(t, connect(t, client.Options{Address: r.address, MaxRetries: -1}))
	for op, n := range map[uint8]int{nvme.CmdKVStore: 20000, nvme.CmdKVRetrieve: 10, nvme.CmdKVExist: 0} {
		if _, st := host(kvtest.Command(op, kvNSID, "key", n), make([]byte, n)); st != nvme.NamespaceNotReady {
			t.Errorf("opcode %#x: %v", op, st)
		}
	}
	r.Service.AddPartition(s)
	if _, st := host(kvtest.Command(nvme.CmdKVStore, kvNSID, "key", 1), []byte{1}); !st.OK() {
		t.Errorf("with the partition: %v", st)
	}
}

// Completions of all commands carry credits for hosts that have enabled them.
func TestCompletionsOfKeysAndValuesCarryCredits(t *testing.T) {
	r, s := kvRig(t, nil)
	s.GiveCredit(321)
	for _, mode := range []client.CreditMode{client.CreditsOff, client.CreditsOn} {
		want := uint64(0)
		if mode == client.CreditsOn {
			want = uint64(nvme.MakeCredit(0, 321)) << 32
		}
		host := kvHost(t, connect(t, client.Options{Address: r.address, Credits: mode}))
		for _, x := range []struct {
			op    uint8
			bytes int
			dw0   uint64
		}{{nvme.CmdKVStore, 5, 0}, {nvme.CmdKVRetrieve, 2, 5}, {nvme.CmdKVExist, 0, 0}, {nvme.CmdKVList, 64, 0},
			{nvme.CmdKVDelete, 0, 0}} {
			if got, st := host(kvtest.Command(x.op, kvNSID, "key", x.bytes), make([]byte, x.bytes)); got != want|
				x.dw0 || !st.OK() {
				t.Errorf("mode %d, opcode %#x: result %#x, want %#x; %v", mode, x.op, got, want|x.dw0, st)
			}
		}
	}
}

// TestWideCompletionsCarryCredits: the result of an extended Store or Delete takes DW0 and DW1, and the credit is in
// SQID, also if the command fails at the partition. It is 0 if the command is refused before, or without credits.
func TestWideCompletionsCarryCredits(t *testing.T) {
	r, s := kvRig(t, nil)
	s.GiveCredit(321)
	version := uint64(0)
	for _, mode := range []client.CreditMode{client.CreditsOff, client.CreditsOn} {
		c := connect(t, client.Options{Address: r.address, Credits: mode})
		want := uint16(0)
		if mode == client.CreditsOn {
			want = 321
		}
		run := func(what string, op uint8, condition nvme.KVCondition, wantStatus nvme.Status, result uint64,
			credit uint16) {
			t.Helper()
			data := make([]byte, nvme.KVWriteHeaderSize)
			(*nvme.KVWriteHeader)(data).SetCondition(condition)
			comp, _ := c.IOPassthru(t.Context(), kvtest.Command(op, kvNSID, "key", len(data)), data)
			if comp.Status.Code() != wantStatus || comp.Result != result || comp.SQID != credit {
				t.Errorf("mode %d, %s: %v, result %#x, want %#x, SQID %d, want %d", mode, what, comp.Status,
					comp.Result, result, comp.SQID, credit)
			}
		}
		version++
		run("store", nvme.CmdKVXStore, nvme.KVAlways, nvme.Success, version, want)
		run("store that must not exist", nvme.CmdKVXStore, nvme.KVIfAbsent, nvme.KeyExists, version, want)
		run("wrong header", nvme.CmdKVXStore, 99, nvme.KVInvalidHeader, 32, 0)
		version++
		run("delete", nvme.CmdKVXDelete, nvme.KVAlways, nvme.Success, version, want)
		run("delete of nothing", nvme.CmdKVXDelete, nvme.KVAlways, nvme.Success, 0, want)
		// A slot that is used again for another command has no SQID left.
		comp, _ := c.IOPassthru(t.Context(), kvtest.Command(nvme.CmdKVExist, kvNSID, "key", 0), nil)
		if comp.Status.Code() != nvme.KeyDoesNotExist || comp.SQID != 0 {
			t.Errorf("mode %d, an Exist after them: %v, SQID %d", mode, comp.Status, comp.SQID)
		}
	}
}

// TestAHostWithoutTheExtensionHasNoExtendedCommands: to it, they are unknown opcodes.
func TestAHostWithoutTheExtensionHasNoExtendedCommands(t *testing.T) {
	r, s := kvRig(t, nil)
	s.Set("key", []byte("value"))
	host := kvHost(t, connect(t, client.Options{Address: r.address, NoExtendedKV: true}))
	for _, op := range []uint8{nvme.CmdKVXStore, nvme.CmdKVXRetrieve, nvme.CmdKVXDelete} {
		if _, st := host(kvtest.Command(op, kvNSID, "key", 48), make([]byte, 48)); st != nvme.InvalidOpcode|nvme.DNR {
			t.Errorf("opcode %#x: %v", op, st)
		}
	}
}

// A missing key is not in the error log; a device error is.
func TestTheErrorLogListsFailedKVCommands(t *testing.T) {
	r, s := kvRig(t, nil)
	c := connect(t, client.Options{Address: r.address})
	host := kvHost(t, c)
	for range 3 {
		host(kvtest.Command(nvme.CmdKVRetrieve, kvNSID, "missing", 8), make([]byte, 8))
	}
	s.Fail(func(*partition.Request) kvstore.Status { return kvstore.Corrupt })
	host(kvtest.Command(nvme.CmdKVRetrieve, kvNSID, "corrupt", 8), make([]byte, 8))
	b := make([]byte, 2*nvme.ErrorLogEntrySize)
	if err := c.GetLogPage(t.Context(), client.LogPage{LID: nvme.LIDError}, b); err != nil {
		t.Fatal(err)
	}
	e := (*nvme.ErrorLogEntry)(b)
	if e.Status().Code() != nvme.UnrecoveredReadError || e.Opcode() != nvme.CmdKVRetrieve || e.NSID() != kvNSID ||
		e.CSI() != uint8(nvme.CSIKV) || e.LBA() != 0 {
		t.Errorf("the newest entry: %v of opcode %#x, NSID %d, CSI %d", e.Status(), e.Opcode(), e.NSID(), e.CSI())
	}
	if e := (*nvme.ErrorLogEntry)(b[nvme.ErrorLogEntrySize:]); e.ErrorCount() != 0 {
		t.Errorf("another entry: %v", e.Status())
	}
}

// realKV adds a key-value namespace on a partition of the rig's drive.
func (r *rig) realKV(t testing.TB) {
	t.Helper()
	p, err := partition.Open(partition.Config{Drive: r.Service.SSD(0), Background: target.Background,
		Store: kvstore.Config{PartitionBytes: testBytes, Format: true, HashSeed: 1}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // before the drive's
		r.server.Close()
		if err := p.Close(10 * time.Second); err != nil {
			t.Error(err)
		}
	})
	r.State.Subsystems[0].Namespaces = append(r.State.Subsystems[0].Namespaces[:0],
		&nvmeof.Namespace{NSID: kvNSID, CSI: nvme.CSIKV, SizeBytes: testBytes,
			Partition: r.Service.AddPartition(p), MaxValueBytes: p.MaxValueBytes(), ANAGroup: 1,
			ANAState: nvme.ANAStateOptimized})
	r.Service.Apply(r.State)
}

// TestKeysAndValuesOnADrive runs random operations on a few keys and compares them with a map, on drives with 512-byte
// and 4096-byte blocks.
func TestKeysAndValuesOnADrive(t *testing.T) {
	t.Parallel()
	for _, block := range []int{512, 4096} {
		t.Run(fmt.Sprint(block), func(t *testing.T) { keysAndValuesOnADrive(t, block) })
	}
}

func keysAndValuesOnADrive(t *testing.T, block int) {
	dev, err := mem.Open(mem.Config{Name: "m0", SizeBytes: testBytes, BlockSize: block})
	if err != nil {
		t.Fatal(err)
	}
	r := newRigOf(t, nil, dev)
	r.realKV(t)
	host := kvHost(t, connect(t, client.Options{Address: r.address}))
	rng := rand.New(rand.NewPCG(1, 2))
	model := map[string][]byte{}
	buf := make([]byte, kvtest.MaxValue)
	for step := range 1500 {
		key := fmt.Sprint("key ", rng.IntN(20))
		want, there := model[key]
		missing := nvme.Success
		if !there {
			missing = nvme.KeyDoesNotExist | nvme.DNR
		}
		switch op := rng.IntN(6); op {
		case 0, 1:
			v := buf[:[]int{0, 1, 100, 304, 1000, 5000, 100_000, kvtest.MaxValue}[rng.IntN(8)]]
			for i := range v {
				v[i] = byte(step + i)
			}
			options := uint8(rng.IntN(3)) // none, must exist, must not exist
			e := kvtest.Command(nvme.CmdKVStore, kvNSID, key, len(v))
			e.KV().SetOptions(options)
			_, st := host(e, v)
			switch {
			case options == nvme.KVStoreMustExist && !there:
				if st.Code() != nvme.KeyDoesNotExist {
					t.Fatalf("step %d: store of a missing key: %v", step, st)
				}
			case options == nvme.KVStoreMustNotExist && there:
				if st.Code() != nvme.KeyExists {
					t.Fatalf("step %d: store of a key that exists: %v", step, st)
				}
			case st.Code() == nvme.CapacityExceeded:
			case !st.OK():
				t.Fatalf("step %d: store of %d bytes: %v", step, len(v), st)
			default:
				model[key] = bytes.Clone(v)
			}
		case 2, 3:
			room := rng.IntN(2 * (len(want) + 10))
			got := make([]byte, min(room, kvtest.MaxValue))
			dw0, st := host(kvtest.Command(nvme.CmdKVRetrieve, kvNSID, key, len(got)), got)
			if n := min(len(got), len(want)); st != missing || int(dw0) != len(want) ||
				!bytes.Equal(got[:n], want[:n]) {
				t.Fatalf("step %d: retrieve of %d bytes: %v, DW0 %d", step, len(want), st, dw0)
			}
		case 4:
			if _, st := host(kvtest.Command(nvme.CmdKVExist, kvNSID, key, 0), nil); st != missing {
				t.Fatalf("step %d: exist: %v, want %v", step, st, missing)
			}
		case 5:
			if _, st := host(kvtest.Command(nvme.CmdKVDelete, kvNSID, key, 0), nil); !st.OK() {
				t.Fatalf("step %d: delete: %v", step, st)
			}
			delete(model, key)
		}
	}
	var got []string
	for from := ""; ; {
		list := make([]byte, 64)
		if _, st := host(kvtest.Command(nvme.CmdKVList, kvNSID, from, len(list)), list); !st.OK() {
			t.Fatalf("list: %v", st)
		}
		n := len(got)
		for k := range nvme.KVList(list).All() {
			if !slices.Contains(got, string(k)) {
				got = append(got, string(k))
			}
		}
		if len(got) == n {
			break
		}
		from = got[len(got)-1]
	}
	if slices.Sort(got); !slices.Equal(got, slices.Sorted(maps.Keys(model))) {
		t.Errorf("keys %q, want %q", got, slices.Sorted(maps.Keys(model)))
	}
}
