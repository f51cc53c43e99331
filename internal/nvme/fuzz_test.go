package nvme

import (
	"bytes"
	"reflect"
	"strings"
	"testing"

	"jbofd/internal/testutil/wiredump"
	"jbofd/internal/uuid"
)

func seed(f *testing.F, names ...string) {
	for _, n := range names {
		f.Add(append([]byte(nil), wiredump.Bytes(examples[n]())...))
	}
	f.Add([]byte{})
}

// FuzzViews calls each getter and check of every view on arbitrary bytes: none may panic or change the bytes.
func FuzzViews(f *testing.F) {
	for n := range examples {
		seed(f, n)
	}
	more := []func() any{
		func() any { return new(NSList) }, func() any { return new(ControllerList) },
		func() any { return new(IOCommandSets) },
		func() any { return new(EffectsLog) }, func() any { return new(SupportedLogPages) },
	}
	for _, mk := range views {
		more = append(more, mk)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, mk := range more {
			v := mk()
			all := wiredump.Bytes(v)
			copy(all, b)
			before := string(all)
			callGetters(v, len(b)+int(all[0]))
			if string(all) != before {
				t.Fatalf("%T: a getter changed the bytes", v)
			}
		}
	})
}

// callGetters calls all getters of a view, those with an argument of 256 values with every sixteenth one, beginning at
// from.
func callGetters(v any, from int) {
	rv := reflect.ValueOf(v)
	for i := range rv.NumMethod() {
		name := rv.Type().Method(i).Name
		if strings.HasPrefix(name, "Set") || strings.HasPrefix(name, "Init") || strings.HasPrefix(name, "Fill") {
			continue
		}
		m := rv.Method(i)
		switch {
		case m.Type().NumIn() == 0:
			for _, out := range m.Call(nil) {
				if out.Kind() == reflect.Func { // an iterator
					drain(out)
				}
			}
		case m.Type().In(0).Kind() == reflect.Int && name != "CDW":
			for _, n := range []int{-1, 0, 1, 7, 63, 64, 511, 512, 1 << 30} {
				m.Call([]reflect.Value{reflect.ValueOf(n)})
			}
		case m.Type().In(0).Kind() == reflect.Uint8:
			for n := from % 16; n < 256; n += 16 {
				m.Call([]reflect.Value{reflect.ValueOf(uint8(n))})
			}
		}
	}
}

func drain(iter reflect.Value) {
	yield := reflect.MakeFunc(iter.Type().In(0), func([]reflect.Value) []reflect.Value {
		return []reflect.Value{reflect.ValueOf(true)}
	})
	iter.Call([]reflect.Value{yield})
}

// FuzzConnectData: data that passes Check survives being rewritten by our own host.
func FuzzConnectData(f *testing.F) {
	seed(f, "connect-data")
	f.Fuzz(func(t *testing.T, b []byte) {
		var d, e ConnectData
		copy(d[:], b)
		fault := d.Check()
		if fault != nil {
			if !fault.InData || fault.Offset != ConnectDataOffSUBNQN && fault.Offset != ConnectDataOffHOSTNQN {
				t.Fatalf("fault %+v", fault)
			}
			return
		}
		e.SetHostID(d.HostID())
		e.SetCNTLID(d.CNTLID())
		e.SetSubNQN(d.SubNQN())
		e.SetHostNQN(d.HostNQN())
		if e.Check() != nil || e.HostID() != d.HostID() || e.CNTLID() != d.CNTLID() || e.SubNQN() != d.SubNQN() ||
			e.HostNQN() != d.HostNQN() {
			t.Fatal("does not read back")
		}
		if CheckNQN(d.SubNQN()) != nil || CheckNQN(d.HostNQN()) != nil {
			t.Fatal("passed with a bad NQN")
		}
	})
}

// FuzzDiscoveryLog: a log that passes Check has all its entries, and each is usable.
func FuzzDiscoveryLog(f *testing.F) {
	log := append(wiredump.Bytes(examples["discovery-header"]()), wiredump.Bytes(examples["discovery-entry"]())...)
	f.Add(log)
	f.Add(log[:1500])
	f.Fuzz(func(t *testing.T, b []byte) {
		l := DiscoveryLog(b)
		err := l.Check()
		for i := range l.Len() {
			callGetters(l.Entry(i), i)
		}
		if err != nil {
			return
		}
		if uint64(l.Len()) != l.Header().NUMREC() {
			t.Fatalf("%d entries, NUMREC %d", l.Len(), l.Header().NUMREC())
		}
		for i := range l.Len() {
			if err := CheckNQN(l.Entry(i).SubNQN()); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// FuzzANALog: rewriting the groups of a log that passes Check gives the same bytes, up to reserved bytes and trailing
// data.
func FuzzANALog(f *testing.F) {
	seed(f, "ana-log")
	f.Fuzz(func(t *testing.T, b []byte) {
		l := ANALog(b)
		err := l.Check()
		out := AppendANAHeader(nil, l.ChangeCount(), uint16(l.NumGroups()))
		for g := range l.Groups() {
			var nsids []uint32
			for i := range g.Len() {
				nsids = append(nsids, g.NSID(i))
			}
			out = AppendANAGroup(out, g.ID(), g.ChangeCount(), g.State(), nsids)
		}
		if err != nil {
			return
		}
		if len(out) > len(b) || ANALog(out).Check() != nil {
			t.Fatalf("reads back as %d bytes of %d: %v", len(out), len(b), ANALog(out).Check())
		}
	})
}

// FuzzNSDescriptors: rewriting the descriptors of a list that passes Check gives the same bytes, up to reserved bytes
// and trailing data.
func FuzzNSDescriptors(f *testing.F) {
	seed(f, "namespace-descriptors")
	f.Add([]byte{3, 0xff, 0, 0, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		d := NSDescriptors(b)
		err := d.Check()
		var out []byte
		for nt, nid := range d.All() {
			out = AppendNSDescriptor(out, nt, nid)
		}
		if len(out) > len(b) {
			t.Fatalf("%d bytes of %d", len(out), len(b))
		}
		if err == nil && NSDescriptors(out).Check() != nil {
			t.Fatal(NSDescriptors(out).Check())
		}
	})
}

// FuzzKVList: rewriting the keys of a list that passes Check gives the same list, up to padding and trailing data. No
// getter panics on other lists.
func FuzzKVList(f *testing.F) {
	seed(f, "kv-list-data")
	f.Add([]byte{2, 0, 0, 0, 1, 0, 'a', 0, 3, 0, 'b', 'c', 'd'})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		l := KVList(b)
		err := l.Check()
		out := NewKVList(make([]byte, len(b)+8))
		n := 0
		for key := range l.All() {
			if len(key) == 0 || len(key) > MaxKVKey {
				t.Fatalf("a key of %d bytes", len(key))
			}
			var ok bool
			if out, ok = out.Append(key); !ok {
				t.Fatalf("%d bytes do not hold the keys of %d", cap(out), len(b))
			}
			n++
		}
		if n != out.Len() || out.Check() != nil {
			t.Fatalf("%d keys read back as %d: %v", n, out.Len(), out.Check())
		}
		if err == nil && n != l.Len() || err != nil && n == l.Len() && len(b) >= 4 {
			t.Fatalf("%d keys of %d, Check: %v", n, l.Len(), err)
		}
	})
}

// FuzzKVSQE: a command's key survives being rewritten.
func FuzzKVSQE(f *testing.F) {
	seed(f, "kv-store", "kv-list", "kv-exist")
	f.Fuzz(func(t *testing.T, b []byte) {
		var k, again KVSQE
		copy(k[:], b)
		var buf, buf2 [MaxKVKey]byte
		key := k.Key(&buf)
		if k.ValidKey() && len(key) != int(k.KeyLen()) {
			t.Fatalf("%d bytes of a key of %d", len(key), k.KeyLen())
		}
		again.SetKey(key)
		if got := again.Key(&buf2); !bytes.Equal(got, key) {
			t.Fatalf("key %x reads back as %x", key, got)
		}
		checkRangeSQE(t, SQE(k))
	})
}

// FuzzKVWriteHeader: a header with a fault has it at the offset that Fault names, and only Check's error otherwise; one
// without survives being rewritten.
func FuzzKVWriteHeader(f *testing.F) {
	seed(f, "kv-write-header", "kv-write-header-delete")
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, opcode := range []uint8{CmdKVXStore, CmdKVXDelete} {
			var h, again KVWriteHeader
			copy(h[:], b)
			at, ok := h.Fault(opcode)
			if err := h.Check(opcode); ok != (err == nil) || at < 0 || at >= KVWriteHeaderSize {
				t.Fatalf("fault at %d, %t, Check: %v", at, ok, err)
			}
			if !ok {
				continue
			}
			again.SetVersion(h.Version())
			again.SetClient(h.Client())
			again.SetSequence(h.Sequence())
			again.SetExpires(h.Expires())
			again.SetKeep(h.Keep())
			again.SetAnswered(h.Answered())
			again.SetCondition(h.Condition())
			again.SetFlags(h.Flags())
			if again != h {
				t.Fatalf("% x reads back as % x", h[:], again[:])
			}
		}
	})
}

// FuzzText: names and identifiers.
func FuzzText(f *testing.F) {
	f.Add(hostNQN)
	f.Add("1b4e28ba-2fa1-11d2-883f-0016d3cca427")
	f.Add("\x00\xff")
	f.Fuzz(func(t *testing.T, s string) {
		if CheckNQN(s) == nil {
			var d ConnectData
			if d.SetHostNQN(s); d.HostNQN() != s {
				t.Fatalf("%q reads back as %q", s, d.HostNQN())
			}
		}
		if u, err := uuid.Parse(s); err == nil {
			if v, err := uuid.Parse(u.String()); err != nil || v != u {
				t.Fatalf("%q: %v, %v", s, v, err)
			}
		}
		var c IdentifyController
		c.SetMN(s)
		if !isASCII(c.MN()) || bytes.IndexByte(c[24:64], 0) >= 0 {
			t.Fatalf("MN of %q: %q", s, c.MN())
		}
	})
}
