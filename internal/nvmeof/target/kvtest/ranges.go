package kvtest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/partition"
)

// position is that of a key in a Store, whose order is that of the keys' bytes.
func position(key string) uint64 {
	var b [8]byte
	copy(b[:], key)
	return binary.BigEndian.Uint64(b[:])
}

// doRange does a request for a range. Digests have no hashes, only counts.
func (s *Store) doRange(r *partition.Request) kvstore.Status {
	switch r.Op {
	case kvstore.Drop:
		if r.ObjectVersion = r.Version; r.Version == 0 {
			r.ObjectVersion = s.version
		}
		for k, o := range s.about {
			if p := position(k); p >= r.Range.First && p <= r.Range.Last && o.version <= r.ObjectVersion {
				delete(s.values, k)
				delete(s.about, k)
			}
		}
		return kvstore.OK
	case kvstore.CopyIn:
		b := nvme.KVRange(r.Value)
		if b.Check() != nil || b.Kind() != nvme.KVCopy {
			return kvstore.InvalidValue
		}
		for e := range b.Entries() {
			if o := s.about[string(e.Key())]; o == nil || o.version < e.Version() {
				s.values[string(e.Key())] = bytes.Clone(e.Value())
				s.about[string(e.Key())] = &object{e.Version(), e.Expires()}
				r.ValueLen++
			}
		}
		return kvstore.OK
	}
	from := nvme.KVCursorAt(r.Range.From, r.Key[:r.KeyLen])
	if r.Range.FromKey {
		from.Position = position(string(r.Key[:r.KeyLen]))
		r.Range.First = from.Position
	}
	kind := [...]nvme.KVRangeKind{kvstore.Scan: nvme.KVScan, kvstore.CopyOut: nvme.KVCopy, kvstore.Count: nvme.KVCount,
		kvstore.Digest: nvme.KVDigest}[r.Op]
	b := nvme.NewKVRange(r.Value, kind, r.Range.First, r.Range.Last, from)
	b.SetTime(r.Range.Unix)
	switch kind {
	case nvme.KVCount:
		b = b[:nvme.KVRangeHeaderBytes+nvme.KVTotalsBytes]
		b.SetItems(1)
	case nvme.KVDigest:
		shift := r.Range.Width - 1
		b.SetItems(int((r.Range.Last-r.Range.First)>>shift) + 1)
		b.SetShift(shift)
		b = b[:nvme.KVRangeHeaderBytes+b.Items()*nvme.KVSumBytes]
	}
	clear(b[nvme.KVRangeHeaderBytes:])
	to, flags := nvme.KVLastOf(r.Range.Last), uint8(nvme.KVComplete)
	for _, k := range s.keys() {
		c, o := nvme.KVCursorAt(position(k), []byte(k)), s.about[k]
		if c.Compare(&from) <= 0 || c.Position > r.Range.Last {
			continue
		}
		switch kind {
		case nvme.KVCount:
			b.Totals().Add(1, 0, uint64(len(k)+len(s.values[k])))
			continue
		case nvme.KVDigest:
			b.Sum(int((c.Position-r.Range.First)>>b.Shift())).Add(1, o.version)
			continue
		}
		e, longer, ok := b.Append([]byte(k), len(s.values[k]), 0)
		if !ok {
			if flags = 0; b.Items() == 0 {
				r.ValueLen = len(b) + nvme.KVEntryBytes(kind, len(k), len(s.values[k]), 0)
				return kvstore.InvalidValue
			}
			break
		}
		b, to = longer, c
		e.SetPosition(c.Position)
		e.SetVersion(o.version)
		e.SetExpires(o.expires)
		if kind == nvme.KVCopy {
			copy(e.Value(), s.values[k])
		}
	}
	if flags != 0 {
		to = nvme.KVLastOf(r.Range.Last)
	}
	b.SetFlags(flags)
	b.SetTo(to)
	b.Seal()
	r.ValueLen = len(b)
	return kvstore.OK
}

// ReadRange executes a Scan, CopyOut, Count or Digest of everything from a cursor on, with a buffer of n bytes.
func ReadRange(host Host, opcode uint8, nsid uint32, from nvme.KVCursor, n int) (nvme.KVRange, uint64, nvme.Status) {
	e := Command(opcode, nsid, "", n)
	q := e.KVRange()
	q.SetFrom(from)
	q.SetLast(math.MaxUint64)
	if opcode == nvme.CmdKVDigest {
		q.SetShift(60)
	}
	data := bytes.Repeat([]byte{0xA5}, n)
	result, st := host(e, data)
	return nvme.KVRange(data), result, st
}

// ranges tests the commands for ranges of a host to which extended key-value is granted.
func ranges(t *testing.T, s *Store, nsid uint32, host Host) {
	t.Helper()
	all := nvme.KVCursor{}
	if result, st := host(dropCommand(nsid, 0), nil); !st.OK() || result == 0 {
		t.Fatalf("drop: %v, clock %d", st, result)
	}
	var keys []string
	size := 0
	for i := range 40 {
		key := fmt.Sprintf("range%02d", i)
		keys = append(keys, key)
		s.Set(key, pattern(i, i*1000))
		size += len(key) + i*1000
	}
	defer s.Fail(nil)
	s.Fail(func(r *partition.Request) kvstore.Status {
		if r.Background {
			t.Errorf("op %d of a host is paid for by the background", r.Op)
		}
		return kvstore.OK
	})
	copied := make(map[string][]byte)
	var batches []nvme.KVRange
	for _, opcode := range []uint8{nvme.CmdKVScan, nvme.CmdKVCopyOut} {
		found := 0
		for from, complete := all, false; !complete; {
			b, result, st := ReadRange(host, opcode, nsid, from, 50_000)
			if !st.OK() || b.Check() != nil || int(uint32(result)) != b.LenBytes() {
				t.Fatalf("opcode %#x: %v, DW0 %d, %v", opcode, st, uint32(result), b.Check())
			}
			if b[b.LenBytes()-1] == 0xA5 || b.LenBytes() < len(b) && b[b.LenBytes()] != 0xA5 {
				t.Errorf("opcode %#x: the data does not end with the KVRange", opcode)
			}
			for e := range b.Entries() {
				if string(e.Key()) != keys[found] {
					t.Fatalf("opcode %#x: %q, want %q", opcode, e.Key(), keys[found])
				}
				if found++; opcode == nvme.CmdKVCopyOut {
					copied[string(e.Key())] = e.Value()
				}
			}
			if opcode == nvme.CmdKVCopyOut {
				batches = append(batches, b[:b.LenBytes()])
			}
			from, complete = b.To(), b.Complete()
		}
		if found != len(keys) {
			t.Errorf("opcode %#x: %d of %d keys", opcode, found, len(keys))
		}
	}
	for i, k := range keys {
		if !bytes.Equal(copied[k], pattern(i, i*1000)) {
			t.Errorf("the value of %q differs", k)
		}
	}
	b, _, st := ReadRange(host, nvme.CmdKVCount, nsid, all, 4096)
	if !st.OK() || b.Check() != nil || b.Totals().Objects() != uint64(len(keys)) ||
		b.Totals().Bytes() != uint64(size) {
		t.Errorf("count: %v, %v", st, b.Check())
	}
	b, _, st = ReadRange(host, nvme.CmdKVDigest, nsid, all, 4096)
	if !st.OK() || b.Check() != nil || b.Items() != 16 || b.Sum('r'>>4).Count() != uint64(len(keys)) {
		t.Errorf("digest: %v, %v", st, b.Check())
	}
	_, result, st := ReadRange(host, nvme.CmdKVCopyOut, nsid, nvme.KVCursorAt(0, []byte(keys[38])), 4096)
	if want := nvme.KVRangeHeaderBytes + nvme.KVEntryBytes(nvme.KVCopy, 7, 39_000, 0); st !=
		nvme.InvalidValueSize|nvme.DNR || int(uint32(result)) != want {
		t.Errorf("a value that does not fit: %v, DW0 %d, want %d", st, uint32(result), want)
	}
	if clock, st := host(dropCommand(nsid, 0), nil); !st.OK() || clock < uint64(len(keys)) {
		t.Errorf("drop: %v, clock %d", st, clock)
	}
	if _, ok := s.Value(keys[0]); ok {
		t.Error("a drop has no effect")
	}
	for _, b := range batches {
		result, st := host(Command(nvme.CmdKVCopyIn, nsid, "", len(b)), b)
		if !st.OK() || int(uint32(result)) != b.Items() {
			t.Errorf("copy in: %v, DW0 %d, want %d", st, uint32(result), b.Items())
		}
	}
	for i, k := range keys {
		if v, ok := s.Value(k); !ok || !bytes.Equal(v, pattern(i, i*1000)) {
			t.Errorf("the copy of %q differs", k)
		}
	}
	rangeStatuses(t, s, nsid, host, batches[0])
}

// rangeStatuses tests what commands for ranges answer if the partition fails.
func rangeStatuses(t *testing.T, s *Store, nsid uint32, host Host, batch nvme.KVRange) {
	t.Helper()
	damaged := bytes.Clone(batch)
	damaged[len(damaged)-9] ^= 1
	if _, st := host(Command(nvme.CmdKVCopyIn, nsid, "", len(damaged)), damaged); st != nvme.InvalidField|nvme.DNR {
		t.Errorf("copy in of a damaged batch: %v", st)
	}
	for _, x := range []struct {
		status                kvstore.Status
		read, copyIn, dropped nvme.Status
	}{
		{kvstore.DeviceError, nvme.UnrecoveredReadError, nvme.WriteFault, nvme.WriteFault},
		{kvstore.CapacityExceeded, nvme.CapacityExceeded, nvme.CapacityExceeded, nvme.CapacityExceeded},
		{kvstore.NoMemory, nvme.InternalError, nvme.InternalError, nvme.InternalError},
		{kvstore.InvalidValue, nvme.InvalidField, nvme.InvalidField, nvme.InvalidField},
	} {
		s.Fail(func(*partition.Request) kvstore.Status { return x.status })
		_, _, read := ReadRange(host, nvme.CmdKVScan, nsid, nvme.KVCursor{}, 4096)
		_, copyIn := host(Command(nvme.CmdKVCopyIn, nsid, "", len(batch)), batch)
		result, dropped := host(dropCommand(nsid, 7), nil)
		if read.Code() != x.read || copyIn.Code() != x.copyIn || dropped.Code() != x.dropped || result != 0 {
			t.Errorf("the partition says %d: %v, %v, %v", x.status, read, copyIn, dropped)
		}
	}
	// What is known beside a loss is an answer like others.
	s.Fail(func(r *partition.Request) kvstore.Status {
		s.doRange(r)
		return kvstore.Corrupt
	})
	b, _, st := ReadRange(host, nvme.CmdKVScan, nsid, nvme.KVCursor{}, 4096)
	if !st.OK() || b.Check() != nil || b.Items() == 0 {
		t.Errorf("a scan with a loss: %v, %v", st, b.Check())
	}
}

// dropCommand drops everything up to a clock.
func dropCommand(nsid uint32, clock uint64) nvme.SQE {
	e := Command(nvme.CmdKVDrop, nsid, "", 0)
	e.KVRange().SetLast(math.MaxUint64)
	e.KVRange().SetClock(clock)
	return e
}
