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

// Write executes an extended Store or Delete of a key with a header.
func Write(host Host, opcode uint8, nsid uint32, key string, value []byte, edit func(h *nvme.KVWriteHeader)) (uint64,
	nvme.Status) {
	data := append(make([]byte, nvme.KVWriteHeaderSize), value...)
	if edit != nil {
		edit((*nvme.KVWriteHeader)(data))
	}
	return host(Command(opcode, nsid, key, len(data)), data)
}

// Read executes an extended Retrieve with room for n bytes of value.
func Read(host Host, nsid uint32, key string, n int) (h nvme.KVReadHeader, value []byte, size int, st nvme.Status) {
	data := bytes.Repeat([]byte{0xA5}, nvme.KVReadHeaderSize+n)
	result, st := host(Command(nvme.CmdKVXRetrieve, nsid, key, len(data)), data)
	if !st.OK() {
		return h, nil, 0, st
	}
	size = int(uint32(result))
	return nvme.KVReadHeader(data), data[nvme.KVReadHeaderSize:], size, st
}

// versions tests what extended commands do with a namespace of a host to which they are granted.
func versions(t *testing.T, s *Store, nsid uint32, host Host) {
	t.Helper()
	sizes := []int{0, 1, 5, 4080, 4096 - nvme.KVWriteHeaderSize, 8192 - nvme.KVWriteHeaderSize, 8192, 65536, 300_001,
		MaxValue - nvme.KVWriteHeaderSize}
	last := uint64(0)
	for _, n := range sizes {
		key, want := fmt.Sprint("version ", n), pattern(n, n)
		v, st := Write(host, nvme.CmdKVXStore, nsid, key, want, nil)
		if !st.OK() || v <= last {
			t.Fatalf("store of %d bytes: %v, version %d after %d", n, st, v, last)
		}
		last = v
		if got, ok := s.Value(key); !ok || !bytes.Equal(got, want) {
			t.Errorf("store of %d bytes: the partition has %d bytes, others", n, len(got))
		}
		for _, room := range []int{0, 1, n / 2, n, min(n+3, MaxValue-nvme.KVReadHeaderSize)} {
			h, got, size, st := Read(host, nsid, key, room)
			have := min(n, room)
			if !st.OK() || size != n || !bytes.Equal(got[:have], want[:have]) || h.Version() != v || h.Expires() != 0 ||
				h.Check() != nil {
				t.Errorf("retrieve of %d bytes into %d: %v, size %d, version %d of %d", n, room, st, size, h.Version(),
					v)
			}
			if slices.ContainsFunc(got[have:], func(b byte) bool { return b != 0xA5 }) {
				t.Errorf("retrieve of %d bytes into %d: bytes behind the value have changed", n, room)
			}
		}
	}
	const key = "extended"
	edit := func(c nvme.KVCondition, version uint64, more ...func(h *nvme.KVWriteHeader)) func(h *nvme.KVWriteHeader) {
		return func(h *nvme.KVWriteHeader) {
			h.SetCondition(c)
			h.SetVersion(version)
			for _, f := range more {
				f(h)
			}
		}
	}
	flags := func(f uint8, expires uint32) func(h *nvme.KVWriteHeader) {
		return func(h *nvme.KVWriteHeader) { h.SetFlags(f | h.Flags()); h.SetExpires(expires) }
	}
	identity := func(seq uint64, retry bool) func(h *nvme.KVWriteHeader) {
		return func(h *nvme.KVWriteHeader) {
			h.SetClient(77)
			h.SetSequence(seq)
			h.SetKeep(60)
			if retry {
				h.SetFlags(h.Flags() | nvme.KVRetry)
			}
		}
	}
	const store, del = nvme.CmdKVXStore, nvme.CmdKVXDelete
	at := last
	for i, x := range []struct {
		opcode uint8
		edit   func(h *nvme.KVWriteHeader)
		result uint64
		want   nvme.Status
	}{
		{del, nil, 0, nvme.Success},
		{store, edit(nvme.KVIfPresent, 0), 0, nvme.KeyDoesNotExist},
		{store, edit(nvme.KVIfVersion, 5), 0, nvme.KVVersionMismatch},
		{store, edit(nvme.KVIfAbsent, 0), at + 1, nvme.Success},
		{store, edit(nvme.KVIfAbsent, 0), at + 1, nvme.KeyExists},
		{store, edit(nvme.KVIfVersion, 0), at + 1, nvme.KVVersionMismatch},
		{store, edit(nvme.KVIfVersion, at), at + 1, nvme.KVVersionMismatch},
		{store, edit(nvme.KVIfVersion, at+1), at + 2, nvme.Success},
		{store, edit(nvme.KVIfPresent, 0, flags(0, 1_900_000_000)), at + 3, nvme.Success},
		{del, edit(nvme.KVIfVersion, at), at + 3, nvme.KVVersionMismatch},
		{del, edit(nvme.KVIfVersion, at+3), at + 4, nvme.Success},
		{store, edit(nvme.KVIfVersion, 0, identity(1, false)), at + 5, nvme.Success},
		{store, edit(nvme.KVIfVersion, 0, identity(1, true)), at + 5, nvme.Success}, // a retry
		{store, edit(nvme.KVIfVersion, 0, identity(2, true)), at + 5, nvme.KVVersionMismatch},
		{store, edit(nvme.KVAlways, 0, identity(3, true)), at + 6, nvme.Success}, // its first copy has not come
		{del, edit(nvme.KVAlways, 0, identity(4, false)), at + 7, nvme.Success},
		{store, nil, at + 8, nvme.Success},
		{del, edit(nvme.KVAlways, 0, identity(4, true)), at + 7, nvme.Success},
		{store, edit(nvme.KVIfNewer, at+8), at + 8, nvme.KVSuperseded},
		{store, edit(nvme.KVIfNewer, 1<<40), 1 << 40, nvme.Success},
		{del, edit(nvme.KVIfNewer, 1<<40+9, flags(nvme.KVTombstone|nvme.KVRelative, 100)), 1<<40 + 9, nvme.Success},
		{store, edit(nvme.KVIfNewer, 1<<40+9), 0, nvme.KVSuperseded},
		{store, edit(nvme.KVAlways, 0, flags(nvme.KVRelative, 50)), 1<<40 + 10, nvme.Success},
	} {
		var value []byte
		if x.opcode == store {
			value = fmt.Appendf(nil, "value %d", i)
		}
		before, _ := s.Value(key)
		result, st := Write(host, x.opcode, nsid, key, value, x.edit)
		if st.Code() != x.want || result != x.result || st.OK() == st.DNR() {
			t.Errorf("step %d of the versions: %v, result %d, want %v, %d", i, st, result, x.want, x.result)
		}
		if now, _ := s.Value(key); x.want != nvme.Success && !bytes.Equal(before, now) {
			t.Errorf("step %d of the versions: %v, and the value has changed", i, st)
		}
		switch i {
		case 8:
			h, _, _, st := Read(host, nsid, key, 0)
			if !st.OK() || h.Version() != result || h.Expires() != 1_900_000_000 {
				t.Errorf("%v, version %d, expires at %d", st, h.Version(), h.Expires())
			}
		case 20:
			if v, e, ok := s.Tombstone(key); !ok || v != result || e != Now+100 {
				t.Errorf("tombstone %d, %d, %t", v, e, ok)
			}
			if _, _, _, st := Read(host, nsid, key, 0); st != nvme.KeyDoesNotExist|nvme.DNR {
				t.Errorf("read of a tombstone: %v", st)
			}
		}
	}
	if h, v, n, st := Read(host, nsid, key, 100); !st.OK() || h.Expires() != Now+50 || string(v[:n]) != "value 22" {
		t.Errorf("%v, expires at %d, %q", st, h.Expires(), v[:n])
	}
	defer s.Fail(nil)
	for status, want := range map[kvstore.Status]nvme.Status{kvstore.Indeterminate: nvme.KVIndeterminate,
		kvstore.DeviceError: nvme.WriteFault, kvstore.CapacityExceeded: nvme.CapacityExceeded} {
		s.Fail(func(*partition.Request) kvstore.Status { return status })
		if result, st := Write(host, store, nsid, key, nil, nil); st != want|nvme.DNR || result != 0 {
			t.Errorf("the partition says %d: %v, result %d", status, st, result)
		}
	}
}

// headers tests that commands with a wrong header fail, name the field and do not reach the partition.
func headers(t *testing.T, s *Store, nsid uint32, host Host) {
	t.Helper()
	_, before := s.Counts()
	for _, x := range []struct {
		at   int
		edit func(h *nvme.KVWriteHeader)
	}{
		{32, func(h *nvme.KVWriteHeader) { h.SetCondition(5) }},
		{33, func(h *nvme.KVWriteHeader) { h.SetFlags(0x80) }},
		{33, func(h *nvme.KVWriteHeader) { h.SetFlags(nvme.KVRetry) }},
		{0, func(h *nvme.KVWriteHeader) { h.SetVersion(1) }},
		{16, func(h *nvme.KVWriteHeader) { h.SetSequence(1) }},
		{28, func(h *nvme.KVWriteHeader) { h.SetClient(1) }},
		{34, func(h *nvme.KVWriteHeader) { h[34] = 1 }},
		{39, func(h *nvme.KVWriteHeader) { h[39] = 0x80 }},
		{40, func(h *nvme.KVWriteHeader) { h.SetAnswered(1) }},
	} {
		for _, opcode := range []uint8{nvme.CmdKVXStore, nvme.CmdKVXDelete} {
			for _, n := range []int{0, 100, 100_000} { // in the capsule, and not
				if opcode == nvme.CmdKVXDelete && n > 0 {
					continue
				}
				at, st := Write(host, opcode, nsid, "header", make([]byte, n), x.edit)
				if st != nvme.KVInvalidHeader|nvme.DNR || at != uint64(x.at) {
					t.Errorf("opcode %#x: %v, offset %d, want %d", opcode, st, at, x.at)
				}
			}
		}
	}
	if _, after := s.Counts(); after != before {
		t.Errorf("%d commands with a wrong header have reached the partition", after-before)
	}
}
