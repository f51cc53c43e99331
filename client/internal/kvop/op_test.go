package kvop

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
)

// device is a target's content: values by device key.
type device map[string][]byte

// run carries out a command as a target does. uncounted: the transport does not report how much data came.
func (d device) run(c *host.Command, uncounted bool) (out host.Completion) {
	var buf [nvme.MaxKVKey]byte
	k := c.SQE.KV()
	key := string(k.Key(&buf))
	v, there := d[key]
	switch c.SQE.Opcode() {
	case nvme.CmdKVStore:
		switch o := k.Options(); {
		case o&nvme.KVStoreMustExist != 0 && !there:
			out.Status = nvme.KeyDoesNotExist | nvme.DNR
		case o&nvme.KVStoreMustNotExist != 0 && there:
			out.Status = nvme.KeyExists | nvme.DNR
		default:
			d[key] = bytes.Clone(c.Data)
		}
	case nvme.CmdKVDelete:
		delete(d, key)
	case nvme.CmdKVExist:
		if !there {
			out.Status = nvme.KeyDoesNotExist | nvme.DNR
		}
	case nvme.CmdKVRetrieve:
		if !there {
			out.Status = nvme.KeyDoesNotExist | nvme.DNR
			break
		}
		out.Received = uint32(copy(c.Data, v))
		out.Result = uint64(len(v)) | 77<<32 // with a credit
		if uncounted {
			out.Received = uint32(len(c.Data))
		}
	}
	return out
}

// do runs an operation and returns its commands' opcodes.
func (d device) do(t *testing.T, o *Op, s *Space, kind Kind, key, value []byte) (commands []byte) {
	t.Helper()
	if err := o.Start(s, &Args{Kind: kind, Key: key, Value: value}); err != nil {
		t.Fatal(err)
	}
	for done := false; !done; {
		commands = append(commands, o.Cmd.SQE.Opcode())
		comp := d.run(&o.Cmd, !s.Counted)
		done = o.Step(s, &comp)
	}
	return commands
}

func space(long, counted bool) *Space {
	s := &Space{NSID: 2, MaxKey: 16, MaxValue: 1 << 20, MaxTransfer: 1 << 20, Counted: counted}
	if long {
		s.Hash = Hash
	}
	return s
}

func TestEachOperationSendsItsCommands(t *testing.T) {
	const store, retrieve, del, exist = nvme.CmdKVStore, nvme.CmdKVRetrieve, nvme.CmdKVDelete, nvme.CmdKVExist
	for _, c := range []struct {
		kind  Kind
		there bool
		short []byte
		long  []byte
		want  nvme.Status
	}{
		{Get, true, []byte{retrieve}, []byte{retrieve}, 0},
		{Get, false, []byte{retrieve}, []byte{retrieve}, nvme.KeyDoesNotExist},
		{Exists, true, []byte{exist}, []byte{retrieve}, 0},
		{Exists, false, []byte{exist}, []byte{retrieve}, nvme.KeyDoesNotExist},
		{Put, true, []byte{store}, []byte{store, retrieve, store}, 0},
		{Put, false, []byte{store}, []byte{store}, 0},
		{PutIfAbsent, true, []byte{store}, []byte{store, retrieve}, nvme.KeyExists},
		{PutIfAbsent, false, []byte{store}, []byte{store}, 0},
		{PutIfPresent, true, []byte{store}, []byte{retrieve, store}, 0},
		{PutIfPresent, false, []byte{store}, []byte{retrieve}, nvme.KeyDoesNotExist},
		{Delete, true, []byte{del}, []byte{retrieve, del}, 0},
		{Delete, false, []byte{del}, []byte{retrieve}, 0},
	} {
		for _, long := range []bool{false, true} {
			for _, counted := range []bool{false, true} {
				var o Op
				d, s, key := device{}, space(long, counted), []byte("some key")
				if c.there {
					d.do(t, &o, s, Put, key, []byte("old"))
				}
				got := d.do(t, &o, s, c.kind, key, []byte("new"))
				want := c.short
				if long {
					want = c.long
				}
				if !bytes.Equal(got, want) || o.Status.Code() != c.want || o.Err != nil {
					t.Errorf("%s, there %t, long %t: commands % x, want % x; status %s, want %s; %v", c.kind, c.there,
						long, got,
						want, o.Status, c.want, o.Err)
				}
				if o.Kind() != c.kind {
					t.Errorf("kind %s", o.Kind())
				}
			}
		}
	}
}

func TestSizeExcludesHeaderAndKey(t *testing.T) {
	for _, long := range []bool{false, true} {
		for _, counted := range []bool{false, true} {
			var o Op
			d, s, key := device{}, space(long, counted), []byte("some key")
			value := []byte("a value of some length")
			d.do(t, &o, s, Put, key, value)
			for room := range len(value) + 5 {
				dst := bytes.Repeat([]byte{'.'}, room)
				d.do(t, &o, s, Get, key, dst)
				fits := min(room, len(value))
				if o.Size != len(value) || o.Err != nil || !bytes.Equal(dst[:fits], value[:fits]) {
					t.Errorf("long %t, counted %t, room %d: size %d, %v, %q", long, counted, room, o.Size, o.Err, dst)
				}
			}
		}
	}
}

// TestAGetThatOneCommandCannotServeSaysSo: a host with a larger transfer limit has put the value.
func TestAGetThatOneCommandCannotServeSaysSo(t *testing.T) {
	for _, long := range []bool{false, true} {
		for _, counted := range []bool{false, true} {
			var o Op
			d, s, key := device{}, space(long, counted), []byte("some key")
			d.do(t, &o, s, Put, key, make([]byte, 100))
			s.MaxTransfer = 50
			brings := 50
			if long {
				brings -= LongBytes(len(key))
			}
			for room, fails := range map[int]bool{0: false, brings: false, brings + 1: true, 100: true, 200: true} {
				d.do(t, &o, s, Get, key, make([]byte, room))
				if o.Size != 100 || errors.Is(o.Err, host.ErrValueTooLarge) != fails {
					t.Errorf("long %t, counted %t, room %d: size %d, %v, want an error %t", long, counted, room, o.Size,
						o.Err, fails)
				}
			}
		}
	}
}

func TestRetrieveWithoutASizeIsAProtocolError(t *testing.T) {
	for _, long := range []bool{false, true} {
		var o Op
		s := space(long, true)
		if err := o.Start(s, &Args{Kind: Get, Key: []byte("k"), Value: make([]byte, 100)}); err != nil {
			t.Fatal(err)
		}
		for _, c := range []host.Completion{{Received: 100}, {Received: 50, Result: 60}, {Received: 100, Result: 99}} {
			if !o.Step(s, &c) || !errors.Is(o.Err, host.ErrProtocol) {
				t.Errorf("long %t: %+v: %v", long, c, o.Err)
			}
		}
	}
}

func TestAPutIsRestartedABoundedNumberOfTimes(t *testing.T) {
	var o Op
	s := space(true, true)
	if err := o.Start(s, &Args{Kind: Put, Key: []byte("k"), Value: nil}); err != nil {
		t.Fatal(err)
	}
	n := 0
	for done := false; !done; n++ {
		c := host.Completion{Status: nvme.KeyDoesNotExist}
		if o.Cmd.SQE.Opcode() == nvme.CmdKVStore {
			c.Status = nvme.KeyExists
		}
		done = o.Step(s, &c)
	}
	if !errors.Is(o.Err, host.ErrProtocol) || n > 3*maxRestarts {
		t.Errorf("%v after %d commands", o.Err, n)
	}
}

func TestConditionalStoresMustNotBeRepeated(t *testing.T) {
	for kind := range GetVersion { // the others need an extension
		for _, long := range []bool{false, true} {
			var o Op
			if err := o.Start(space(long, true), &Args{Kind: kind, Key: []byte("k"), Value: nil}); err != nil {
				t.Fatal(err)
			}
			if got, want := o.MayRepeat(), kind != PutIfAbsent && (kind != PutIfPresent || long); got != want {
				t.Errorf("%s, long %t: %t", kind, long, got)
			}
		}
	}
	// A PutIfAbsent then knows for certain that the key existed before its own Store.
	var o Op
	s := space(true, true)
	if err := o.Start(s, &Args{Kind: PutIfAbsent, Key: []byte("k"), Value: nil}); err != nil {
		t.Fatal(err)
	}
	if o.Step(s, &host.Completion{Status: nvme.KeyExists}) || !o.MayRepeat() {
		t.Error("a PutIfAbsent's look at the key is not repeated")
	}
	if err := o.Start(s, &Args{Kind: PutIfPresent, Key: []byte("k"), Value: nil}); err != nil {
		t.Fatal(err)
	}
	n := copy(o.Cmd.Data, o.buf[:o.own])
	if o.Step(s, &host.Completion{Result: uint64(n), Received: uint32(n)}) || o.MayRepeat() {
		t.Error("the Store of a PutIfPresent with a long key may be repeated")
	}
}

func TestStartRefusesInvalidArguments(t *testing.T) {
	for _, c := range []struct {
		what  string
		s     *Space
		kind  Kind
		key   int
		value int
		want  error
	}{
		{"no key", space(false, true), Get, 0, 0, host.ErrInvalid},
		{"a key of 17 bytes", space(false, true), Get, 17, 0, host.ErrInvalid},
		{"a longer key than the format has", &Space{MaxKey: 8, MaxValue: 10, MaxTransfer: 10}, Get, 9, 0,
			host.ErrInvalid},
		{"no such kind", space(false, true), kinds, 1, 0, host.ErrInvalid},
		{"a key of 64 KiB and a byte", space(true, true), Get, 64<<10 + 1, 0, host.ErrInvalid},
		{"a value of 1 MiB and a byte", space(false, true), Put, 1, 1<<20 + 1, host.ErrValueTooLarge},
		{"with its key more than 1 MiB", space(true, true), Put, 1, 1<<20 - 12, host.ErrValueTooLarge},
		{"with its key 1 MiB", space(true, true), Put, 1, 1<<20 - 13, nil},
		{"a Get of more than 1 MiB", space(false, true), Get, 1, 2 << 20, nil},
		{"a Get of more than 1 MiB", space(true, true), Get, 1, 2 << 20, nil},
	} {
		var o Op
		err := o.Start(c.s, &Args{Kind: c.kind, Key: make([]byte, c.key), Value: make([]byte, c.value)})
		if !errors.Is(err, c.want) || c.want == nil && err != nil {
			t.Errorf("%s: %v, want %v", c.what, err, c.want)
		}
		if c.want == nil && len(o.Cmd.Data) > c.s.MaxTransfer {
			t.Errorf("%s: a command of %d bytes", c.what, len(o.Cmd.Data))
		}
	}
}

func TestAReusedOpKeepsNoState(t *testing.T) {
	var o Op
	d, s := device{}, space(true, true)
	d.do(t, &o, s, Put, bytes.Repeat([]byte("long"), 100), bytes.Repeat([]byte("value"), 100))
	d.do(t, &o, s, Put, []byte("k"), nil)
	d.do(t, &o, s, Put, []byte("k"), []byte("v"))
	dst := make([]byte, 10)
	d.do(t, &o, s, Get, []byte("k"), dst)
	if o.Size != 1 || dst[0] != 'v' || o.Err != nil || !o.Status.OK() {
		t.Errorf("size %d, %q, %v, %s", o.Size, dst, o.Err, o.Status)
	}
	o.Forget()
	if o.Cmd.Data != nil {
		t.Error("Forget leaves the data")
	}
	short := space(false, true)
	if got := d.do(t, &o, short, Exists, []byte("k"), nil); len(got) != 1 {
		t.Errorf("% x", got)
	}
}

func TestLongKeyLayout(t *testing.T) {
	var o Op
	d := device{}
	d.do(t, &o, space(true, true), Put, []byte("key"), []byte("value"))
	h := Hash([]byte("key"))
	// The first 128 bits of SHA-256("key").
	if want := "\x2c\x70\xe1\x2b\x7a\x06\x46\xf9\x22\x79\xf4\x27\xc7\xb3\x8e\x73"; string(h[:]) != want {
		t.Errorf("hash % x", h)
	}
	if got, want := string(d[string(h[:])]), "JKVL\x01\x00\x00\x00\x03\x00\x00\x00keyvalue"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestKindsHaveNames(t *testing.T) {
	for k := range kinds {
		if s := k.String(); s == "" || strings.Contains(s, "(") {
			t.Errorf("%d: %q", k, s)
		}
	}
	if s := kinds.String(); s != "Kind(11)" {
		t.Error(s)
	}
}

func FuzzLongKey(f *testing.F) {
	f.Add(appendLong(nil, []byte("key")), []byte("key"))
	f.Add([]byte("JKVL\x01\x00\x00\x00\xff\xff\xff\xff"), []byte("x"))
	f.Add([]byte("JKVL"), []byte("x"))
	f.Fuzz(func(t *testing.T, b, key []byte) {
		if len(key) == 0 || len(key) > MaxLongKey {
			return
		}
		own := appendLong(nil, key)
		mine, foreign := valueOwner(b, own)
		got, whole := LongKey(b)
		n, ok := KeyLen(b)
		switch {
		case mine && (foreign || !whole || !bytes.Equal(got, key)):
			t.Fatalf("%q is taken for a value of %q: its key is %q, %t", b, key, got, whole)
		case !mine && whole && bytes.Equal(got, key):
			t.Fatalf("%q is not taken for a value of %q", b, key)
		case foreign == ok && !mine:
			t.Fatalf("%q: foreign %t, KeyLen %d %t", b, foreign, n, ok)
		case whole && (len(got) != n || !bytes.Equal(appendLong(nil, got), b[:LongBytes(n)])):
			t.Fatalf("%q does not read back", b)
		}
	})
}
