package kvtest

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/partition"
)

// MaxValue is the longest value of the namespace that Conformance works on.
const MaxValue = 1 << 20

// Host executes one command with its data and returns DW0 and DW1 of its completion.
type Host func(sqe nvme.SQE, data []byte) (result uint64, status nvme.Status)

// Command makes a command to namespace nsid; n is the length of the value or of the buffer.
func Command(opcode uint8, nsid uint32, key string, n int) (e nvme.SQE) {
	e.SetOpcode(opcode)
	e.SetNSID(nsid)
	e.KV().SetKey([]byte(key))
	e.KV().SetLenBytes(uint32(n))
	return e
}

// pattern is n bytes that tell where they belong.
func pattern(seed, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8*13 + seed)
	}
	return b
}

// Conformance tests that commands to namespace nsid, which s serves, do what the KV Command Set says.
func Conformance(t *testing.T, s *Store, nsid uint32, host Host) {
	t.Helper()
	for _, n := range []int{0, 1, 5, 512, 4096, 8192, 8193, 65536, 300_001, MaxValue} {
		key := fmt.Sprint("size ", n)
		want := pattern(n, n)
		if _, st := host(Command(nvme.CmdKVStore, nsid, key, n), want); !st.OK() {
			t.Errorf("store of %d bytes: %v", n, st)
			continue
		}
		if v, ok := s.Value(key); !ok || !bytes.Equal(v, want) {
			t.Errorf("store of %d bytes: the partition has %d bytes, others", n, len(v))
		}
		for _, room := range []int{0, 1, n / 2, n, min(n+3, MaxValue), MaxValue} {
			got := bytes.Repeat([]byte{0xA5}, room)
			result, st := host(Command(nvme.CmdKVRetrieve, nsid, key, room), got)
			have := min(n, room)
			if !st.OK() || uint32(result) != uint32(n) || !bytes.Equal(got[:have], want[:have]) {
				t.Errorf("retrieve of %d bytes into %d: %v, DW0 %d", n, room, st, uint32(result))
			}
			if slices.ContainsFunc(got[have:], func(b byte) bool { return b != 0xA5 }) {
				t.Errorf("retrieve of %d bytes into %d: bytes behind the value have changed", n, room)
			}
		}
	}
	conditions(t, nsid, host)
	lists(t, nsid, host)
	versions(t, s, nsid, host)
	headers(t, s, nsid, host)
	statuses(t, s, nsid, host)
	malformed(t, s, nsid, host)
	ranges(t, s, nsid, host)
}

// conditions tests Store's options, Exist and Delete.
func conditions(t *testing.T, nsid uint32, host Host) {
	t.Helper()
	const key = "sixteen bytes..."
	store := func(options uint8, value string) nvme.Status {
		e := Command(nvme.CmdKVStore, nsid, key, len(value))
		e.KV().SetOptions(options)
		_, st := host(e, []byte(value))
		return st.Code()
	}
	simple := func(opcode uint8) nvme.Status {
		_, st := host(Command(opcode, nsid, key, 0), nil)
		return st.Code()
	}
	for i, x := range []struct{ got, want nvme.Status }{
		{simple(nvme.CmdKVExist), nvme.KeyDoesNotExist},
		{simple(nvme.CmdKVRetrieve), nvme.KeyDoesNotExist},
		{store(nvme.KVStoreMustExist, "no"), nvme.KeyDoesNotExist},
		{store(nvme.KVStoreMustNotExist|nvme.KVStoreNoCompress, "first"), nvme.Success},
		{store(nvme.KVStoreMustNotExist, "no"), nvme.KeyExists},
		{store(nvme.KVStoreMustExist, "second"), nvme.Success},
		{simple(nvme.CmdKVExist), nvme.Success},
		{simple(nvme.CmdKVDelete), nvme.Success},
		{simple(nvme.CmdKVExist), nvme.KeyDoesNotExist},
		{simple(nvme.CmdKVDelete), nvme.Success}, // unless the host wants to know
		{simple(nvme.CmdFlush), nvme.Success},
	} {
		if x.got != x.want {
			t.Errorf("step %d of the conditions: %v, want %v", i, x.got, x.want)
		}
	}
}

// lists tests List with all buffers.
func lists(t *testing.T, nsid uint32, host Host) {
	t.Helper()
	var want []string
	for i := range 40 {
		key := fmt.Sprintf("~list%0*d", i%10+1, i)
		want = append(want, key)
		if _, st := host(Command(nvme.CmdKVStore, nsid, key, 1), []byte{1}); !st.OK() {
			t.Fatalf("store of %q: %v", key, st)
		}
	}
	slices.Sort(want)
	for _, room := range []int{nvme.MinKVList, 100, 4096, MaxValue} {
		var got []string
		for from := "~list"; ; {
			buf := make([]byte, room)
			if _, st := host(Command(nvme.CmdKVList, nsid, from, room), buf); !st.OK() {
				t.Fatalf("list from %q: %v", from, st)
			}
			l := nvme.KVList(buf)
			if err := l.Check(); err != nil {
				t.Fatal(err)
			}
			n := 0
			for k := range l.All() {
				if s := string(k); len(got) == 0 || s != got[len(got)-1] {
					got = append(got, s)
					n++
				}
			}
			if n == 0 {
				break
			}
			from = got[len(got)-1]
			if room == nvme.MinKVList {
				from += "\x00" // a list of one key says nothing new with the last one
				from = from[:min(len(from), nvme.MaxKVKey)]
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("lists of %d bytes: %q, want %q", room, got, want)
		}
	}
	buf := make([]byte, 4096)
	if _, st := host(Command(nvme.CmdKVList, nsid, "", len(buf)), buf); !st.OK() ||
		nvme.KVList(buf).Len() <= len(want) {
		t.Errorf("list without a key: %v, %d keys", st, nvme.KVList(buf).Len())
	}
}

// statuses tests that what the partition says reaches the host.
func statuses(t *testing.T, s *Store, nsid uint32, host Host) {
	t.Helper()
	defer s.Fail(nil)
	for _, x := range []struct {
		status       kvstore.Status
		store, other nvme.Status
	}{
		{kvstore.CapacityExceeded, nvme.CapacityExceeded, nvme.CapacityExceeded},
		{kvstore.DeviceError, nvme.WriteFault, nvme.UnrecoveredReadError},
		{kvstore.Corrupt, nvme.UnrecoveredReadError, nvme.UnrecoveredReadError},
		{kvstore.InvalidKey, nvme.InvalidKeySize, nvme.InvalidKeySize},
		{kvstore.InvalidValue, nvme.InvalidValueSize, nvme.InvalidValueSize},
		{200, nvme.InternalError, nvme.InternalError},
	} {
		s.Fail(func(*partition.Request) kvstore.Status { return x.status })
		for _, op := range []uint8{nvme.CmdKVStore, nvme.CmdKVRetrieve, nvme.CmdKVList, nvme.CmdKVDelete,
			nvme.CmdKVExist} {
			want := x.other
			if op == nvme.CmdKVStore || op == nvme.CmdKVDelete {
				want = x.store
			}
			n := 64
			if op == nvme.CmdKVDelete || op == nvme.CmdKVExist {
				n = 0
			}
			if result, st := host(Command(op, nsid, "k", n), make([]byte, n)); st != want|nvme.DNR ||
				uint32(result) != 0 {
				t.Errorf("opcode %#x, the partition says %d: %v, DW0 %d, want %v", op, x.status, st, uint32(result),
					want)
			}
		}
	}
}

// malformed tests that commands that are not valid fail, and do not reach the partition.
func malformed(t *testing.T, s *Store, nsid uint32, host Host) {
	t.Helper()
	_, before := s.Counts()
	for _, x := range []struct {
		name   string
		opcode uint8
		n      int
		change func(e *nvme.SQE)
		want   nvme.Status
	}{
		{"no key", nvme.CmdKVStore, 1, func(e *nvme.SQE) { e.KV().SetKeyLen(0) }, nvme.InvalidKeySize},
		{"a long key", nvme.CmdKVRetrieve, 1, func(e *nvme.SQE) { e.KV().SetKeyLen(17) }, nvme.InvalidKeySize},
		{"a very long key", nvme.CmdKVList, 64, func(e *nvme.SQE) { e.KV().SetKeyLen(255) }, nvme.InvalidKeySize},
		{"no key to delete", nvme.CmdKVDelete, 0, func(e *nvme.SQE) { e.KV().SetKeyLen(0) }, nvme.InvalidKeySize},
		{"no key to look for", nvme.CmdKVExist, 0, func(e *nvme.SQE) { e.KV().SetKeyLen(0) }, nvme.InvalidKeySize},
		{"a value too long", nvme.CmdKVStore, 4096, func(e *nvme.SQE) { e.KV().SetLenBytes(MaxValue + 1) },
			nvme.InvalidValueSize},
		{"the longest of all values", nvme.CmdKVStore, 4096, func(e *nvme.SQE) { e.KV().SetLenBytes(1<<32 - 1) },
			nvme.InvalidValueSize},
		{"a value longer than its SGL", nvme.CmdKVStore, 4096, func(e *nvme.SQE) { e.KV().SetLenBytes(4097) },
			nvme.DataSGLLengthInvalid},
		{"a value shorter than its SGL", nvme.CmdKVStore, 4096, func(e *nvme.SQE) { e.KV().SetLenBytes(4095) },
			nvme.DataSGLLengthInvalid},
		{"a buffer longer than its SGL", nvme.CmdKVRetrieve, 4096, func(e *nvme.SQE) { e.KV().SetLenBytes(1 << 30) },
			nvme.DataSGLLengthInvalid},
		{"a buffer shorter than its SGL", nvme.CmdKVList, 4096, func(e *nvme.SQE) { e.KV().SetLenBytes(64) },
			nvme.DataSGLLengthInvalid},
		{"a list without room for its length", nvme.CmdKVList, 3, nil, nvme.InvalidField},
		{"both options", nvme.CmdKVStore, 1, func(e *nvme.SQE) { e.KV().SetOptions(3) }, nvme.InvalidField},
		{"a reserved option", nvme.CmdKVStore, 1, func(e *nvme.SQE) { e.KV().SetOptions(8) }, nvme.InvalidField},
		{"an option of a Retrieve", nvme.CmdKVRetrieve, 1, func(e *nvme.SQE) { e.KV().SetOptions(2) },
			nvme.InvalidField},
		{"an option of a Delete", nvme.CmdKVDelete, 0, func(e *nvme.SQE) { e.KV().SetOptions(1) }, nvme.InvalidField},
		{"a fused Store", nvme.CmdKVStore, 1, func(e *nvme.SQE) { e.SetFuse(nvme.FuseFirst) }, nvme.InvalidField},
		{"Compare", nvme.CmdCompare, 4096, nil, nvme.InvalidOpcode},
		{"Write Zeroes", nvme.CmdWriteZeroes, 0, nil, nvme.InvalidOpcode},
		{"Dataset Management", nvme.CmdDSM, 16, nil, nvme.InvalidOpcode},
	} {
		e := Command(x.opcode, nsid, "malformed", x.n)
		if x.change != nil {
			x.change(&e)
		}
		if _, st := host(e, make([]byte, x.n)); st != x.want|nvme.DNR {
			t.Errorf("%s: %v, want %v", x.name, st, x.want)
		}
	}
	if _, after := s.Counts(); after != before {
		t.Errorf("%d malformed commands have reached the partition", after-before)
	}
}
