package kvop

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
)

// versioned is the content of a target with extended key-value.
type versioned struct {
	objects map[string]object
	gone    map[string]uint64
	done    map[[2]uint64]uint64
	version uint64
	seen    map[[2]uint64]bool // identities of first tries
}

type object struct {
	value   []byte
	version uint64
	expires uint32
}

func newVersioned() *versioned {
	return &versioned{objects: map[string]object{}, gone: map[string]uint64{}, done: map[[2]uint64]uint64{},
		seen: map[[2]uint64]bool{}}
}

// run carries out a command as a target does.
func (d *versioned) run(t *testing.T, c *host.Command, uncounted bool) (out host.Completion) {
	t.Helper()
	var buf [nvme.MaxKVKey]byte
	k := c.SQE.KV()
	key := string(k.Key(&buf))
	o, there := d.objects[key]
	if int(k.LenBytes()) != len(c.Data) {
		t.Errorf("opcode %#x: length %d, %d bytes of data", c.SQE.Opcode(), k.LenBytes(), len(c.Data))
	}
	answer := func(head, v []byte) {
		out.Received = uint32(copy(c.Data, append(bytes.Clone(head), v...)))
		out.Result = uint64(len(v)) | 77<<32 // with a credit
		if uncounted {
			out.Received = uint32(len(c.Data))
		}
	}
	switch c.SQE.Opcode() {
	case nvme.CmdKVXStore, nvme.CmdKVXDelete:
		return d.write(t, c, key)
	case nvme.CmdKVXRetrieve, nvme.CmdKVRetrieve, nvme.CmdKVExist:
		if !there {
			out.Status = nvme.KeyDoesNotExist | nvme.DNR
			return out
		}
		switch c.SQE.Opcode() {
		case nvme.CmdKVXRetrieve:
			var h nvme.KVReadHeader
			h.SetVersion(o.version)
			h.SetExpires(o.expires)
			answer(h[:], o.value)
		case nvme.CmdKVRetrieve:
			answer(nil, o.value)
		}
	case nvme.CmdKVStore:
		if k.Options() != 0 {
			t.Errorf("a Store with options %d", k.Options())
		}
		d.version++
		d.objects[key] = object{value: bytes.Clone(c.Data), version: d.version}
	case nvme.CmdKVDelete:
		d.version++
		delete(d.objects, key)
	}
	return out
}

func (d *versioned) write(t *testing.T, c *host.Command, key string) (out host.Completion) {
	h := (*nvme.KVWriteHeader)(c.Data)
	store := c.SQE.Opcode() == nvme.CmdKVXStore
	if err := h.Check(c.SQE.Opcode()); err != nil {
		t.Error(err)
	}
	id := [2]uint64{h.Client(), h.Sequence()}
	retry := h.Flags()&nvme.KVRetry != 0
	if v, ok := d.done[id]; ok && retry {
		return host.Completion{Result: v}
	}
	if id[0] != 0 && !retry {
		if d.seen[id] {
			t.Errorf("identity %x is used twice", id)
		}
		d.seen[id] = true
	}
	o, there := d.objects[key]
	fail := func(st nvme.Status) host.Completion { return host.Completion{Status: st | nvme.DNR, Result: o.version} }
	switch cond := h.Condition(); {
	case cond == nvme.KVIfAbsent && there:
		return fail(nvme.KeyExists)
	case cond == nvme.KVIfPresent && !there:
		return fail(nvme.KeyDoesNotExist)
	case cond == nvme.KVIfVersion && o.version != h.Version():
		return fail(nvme.KVVersionMismatch)
	case cond == nvme.KVIfNewer && h.Version() <= max(o.version, d.gone[key]):
		return fail(nvme.KVSuperseded)
	case cond == nvme.KVIfNewer:
		d.version = max(d.version, h.Version())
		out.Result = h.Version()
	case !store && !there:
		return host.Completion{}
	default:
		d.version++
		out.Result = d.version
	}
	if store {
		d.objects[key] = object{bytes.Clone(c.Data[nvme.KVWriteHeaderSize:]), out.Result, h.Expires()}
	} else {
		delete(d.objects, key)
		if h.Flags()&nvme.KVTombstone != 0 {
			d.gone[key] = out.Result
		}
	}
	if id[0] != 0 {
		d.done[id] = out.Result
	}
	return out
}

// do runs an operation and returns its commands' opcodes. lose, if set, says whether the answer of a command is lost,
// and whether it was carried out before.
func (d *versioned) do(t *testing.T, o *Op, s *Space, a *Args, lose func() (lost, carriedOut bool)) (commands []byte) {
	t.Helper()
	if err := o.Start(s, a); err != nil {
		t.Fatal(err)
	}
	for done := false; !done; {
		commands = append(commands, o.Cmd.SQE.Opcode())
		if lose != nil {
			lost, carriedOut := lose()
			if carriedOut {
				d.run(t, &o.Cmd, false)
			}
			if lost {
				if !o.MayRepeat() {
					t.Fatalf("%s must not be repeated", a.Kind)
				}
				o.Lost()
				continue
			}
		}
		comp := d.run(t, &o.Cmd, !s.Counted)
		done = o.Step(s, &comp)
	}
	return commands
}

func extended(long, counted bool) *Space {
	s := space(long, counted)
	s.Extended = true
	return s
}

func TestEachExtendedOperationSendsItsCommands(t *testing.T) {
	const store, read, del, retrieve = nvme.CmdKVXStore, nvme.CmdKVXRetrieve, nvme.CmdKVXDelete, nvme.CmdKVRetrieve
	for _, c := range []struct {
		kind    Kind
		there   bool // with version 1
		version uint64
		short   []byte
		long    []byte
		want    nvme.Status
		gives   uint64
	}{
		{GetVersion, true, 0, []byte{read}, []byte{read}, 0, 1},
		{GetVersion, false, 0, []byte{read}, []byte{read}, nvme.KeyDoesNotExist, 0},
		{Put, true, 0, []byte{store}, []byte{store, retrieve, store}, 0, 2},
		{Put, false, 0, []byte{store}, []byte{store}, 0, 1},
		{PutIfAbsent, true, 0, []byte{store}, []byte{store, retrieve}, nvme.KeyExists, 1},
		{PutIfAbsent, false, 0, []byte{store}, []byte{store}, 0, 1},
		{PutIfPresent, true, 0, []byte{store}, []byte{retrieve, store}, 0, 2},
		{PutIfPresent, false, 0, []byte{store}, []byte{retrieve}, nvme.KeyDoesNotExist, 0},
		{PutIfVersion, true, 1, []byte{store}, []byte{store}, 0, 2},
		{PutIfVersion, true, 2, []byte{store}, []byte{store}, nvme.KVVersionMismatch, 1},
		{PutIfVersion, true, 0, []byte{store}, []byte{store, retrieve}, nvme.KVVersionMismatch, 1},
		{PutIfVersion, false, 0, []byte{store}, []byte{store}, 0, 1},
		{PutIfVersion, false, 1, []byte{store}, []byte{store}, nvme.KVVersionMismatch, 0},
		{PutIfNewer, true, 1, []byte{store}, []byte{retrieve, store}, nvme.KVSuperseded, 1},
		{PutIfNewer, true, 5, []byte{store}, []byte{retrieve, store}, 0, 5},
		{PutIfNewer, false, 5, []byte{store}, []byte{retrieve, store}, 0, 5},
		{Delete, true, 0, []byte{del}, []byte{retrieve, del}, 0, 2},
		{Delete, false, 0, []byte{del}, []byte{retrieve}, 0, 0},
		{DeleteIfVersion, true, 1, []byte{del}, []byte{del}, 0, 2},
		{DeleteIfVersion, true, 2, []byte{del}, []byte{del}, nvme.KVVersionMismatch, 1},
		{DeleteIfNewer, true, 1, []byte{del}, []byte{retrieve, del}, nvme.KVSuperseded, 1},
		{DeleteIfNewer, true, 9, []byte{del}, []byte{retrieve, del}, 0, 9},
		{DeleteIfNewer, false, 9, []byte{del}, []byte{retrieve, del}, 0, 9},
	} {
		for _, long := range []bool{false, true} {
			for _, counted := range []bool{false, true} {
				var o Op
				d, s, key := newVersioned(), extended(long, counted), []byte("some key")
				if c.there {
					d.do(t, &o, s, &Args{Kind: Put, Key: key, Value: []byte("old"), Client: 1, KeepSeconds: 1}, nil)
				}
				a := &Args{Kind: c.kind, Key: key, Value: []byte("new"), Version: c.version, Client: 7, Seq: 1 << 8,
					KeepSeconds: 60}
				if c.kind == GetVersion {
					a.Client, a.Value = 0, make([]byte, 10)
				}
				got := d.do(t, &o, s, a, nil)
				want := c.short
				if long {
					want = c.long
				}
				if !bytes.Equal(got, want) || o.Status.Code() != c.want || o.Err != nil || o.Version != c.gives {
					t.Errorf("%s, there %t, version %d, long %t: commands % x, want % x; status %s, want %s; %v; "+
						"version %d, want %d", c.kind, c.there, c.version, long, got, want, o.Status, c.want, o.Err,
						o.Version, c.gives)
				}
				if c.kind == GetVersion && c.there && (o.Size != 3 || string(a.Value[:3]) != "old") {
					t.Errorf("GetVersion, long %t: %d bytes, %q", long, o.Size, a.Value)
				}
			}
		}
	}
}

// TestLostAnswersNeverRepeatAWrite loses answers, of commands that were carried out and of others, in all kinds of
// writes: each takes effect once, and reports the version that it has given.
func TestLostAnswersNeverRepeatAWrite(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	for _, long := range []bool{false, true} {
		var o Op
		d, s := newVersioned(), extended(long, true)
		lose := func() (lost, carriedOut bool) {
			lost = rng.IntN(2) == 0
			return lost, lost && rng.IntN(2) == 0
		}
		seq := uint64(0)
		for step := range 2000 {
			key := fmt.Appendf(nil, "key %d", rng.IntN(3))
			var now Op
			d.do(t, &now, s, &Args{Kind: GetVersion, Key: key, Value: make([]byte, 100)}, nil)
			there := now.Status.OK()
			kinds := []Kind{Put, PutIfAbsent, PutIfPresent, PutIfVersion, PutIfNewer, Delete, DeleteIfVersion,
				DeleteIfNewer}
			a := &Args{Kind: kinds[rng.IntN(len(kinds))], Key: key, Value: fmt.Appendf(nil, "value %d", step),
				Client: 9, Seq: seq, KeepSeconds: 1}
			seq += SeqPerOp
			changes := true
			switch a.Kind {
			case PutIfAbsent:
				changes = !there
			case PutIfPresent:
				changes = there
			case PutIfVersion, DeleteIfVersion:
				if a.Version = now.Version + uint64(rng.IntN(2)); a.Kind == DeleteIfVersion && a.Version == 0 {
					a.Version = 1
				}
				changes = a.Version == now.Version
			case PutIfNewer, DeleteIfNewer:
				a.Version = max(d.version, 1) + uint64(rng.IntN(2))
				dev := string(key)
				if long {
					h := Hash(key)
					dev = string(h[:])
				}
				changes = a.Version > max(now.Version, d.gone[dev])
			case Delete:
				changes = there
			}
			before := d.version
			d.do(t, &o, s, a, lose)
			if o.Err != nil {
				t.Fatalf("step %d: %s: %v", step, a.Kind, o.Err)
			}
			ifNewer := a.Kind == PutIfNewer || a.Kind == DeleteIfNewer
			if given := d.version - before; !ifNewer && (given != 0 != changes || given > 1) {
				t.Fatalf("step %d: %s, key there %t: %v, it was carried out %d times", step, a.Kind, there, o.Status,
					given)
			}
			if o.Status.OK() != changes && a.Kind != Delete {
				t.Fatalf("step %d: %s, version %d of %d: %v", step, a.Kind, a.Version, now.Version, o.Status)
			}
			if changes && o.Version != d.version && !ifNewer {
				t.Fatalf("step %d: %s reports version %d, it has given %d", step, a.Kind, o.Version, d.version)
			}
		}
	}
}

func TestOperationsNameTheExtensionThatTheyNeed(t *testing.T) {
	for _, a := range []Args{{Kind: GetVersion}, {Kind: PutIfVersion, Version: 3}, {Kind: PutIfNewer, Version: 3},
		{Kind: DeleteIfVersion, Version: 3}, {Kind: DeleteIfNewer, Version: 3}, {Kind: Put, Expires: 5},
		{Kind: Delete, Tombstone: true}, {Kind: PutIfAbsent, WantVersion: true}} {
		var o Op
		a.Key = []byte("k")
		err := o.Start(space(false, true), &a)
		if !errors.Is(err, host.ErrUnsupported) || !bytes.Contains([]byte(err.Error()), []byte(a.Kind.String())) ||
			!bytes.Contains([]byte(err.Error()), []byte("extended key-value (wire extension bit 3)")) {
			t.Errorf("%s: %v", a.Kind, err)
		}
		if err := o.Start(extended(false, true), &a); err != nil {
			t.Errorf("%s: %v", a.Kind, err)
		}
	}
	for _, a := range []Args{{Kind: PutIfNewer}, {Kind: DeleteIfVersion}, {Kind: DeleteIfNewer},
		{Kind: Get, Expires: 1}, {Kind: Put, Tombstone: true}, {Kind: Delete, Expires: 1}} {
		var o Op
		a.Key = []byte("k")
		if err := o.Start(extended(false, true), &a); !errors.Is(err, host.ErrInvalid) {
			t.Errorf("%+v: %v", a, err)
		}
	}
}

// TestAValueWithoutSpaceForItsHeaderIsStoredWithoutIdentity, unless the operation needs the header.
func TestAValueWithoutSpaceForItsHeaderIsStoredWithoutIdentity(t *testing.T) {
	s := extended(false, true)
	room := s.MaxTransfer - nvme.KVWriteHeaderSize
	for _, x := range []struct {
		n      int
		opcode uint8
	}{{room, nvme.CmdKVXStore}, {room + 1, nvme.CmdKVStore}, {s.MaxTransfer, nvme.CmdKVStore}} {
		for _, kind := range []Kind{Put, PutIfAbsent} {
			var o Op
			a := &Args{Kind: kind, Key: []byte("k"), Value: make([]byte, x.n), Client: 1, KeepSeconds: 1}
			if err := o.Start(s, a); err != nil {
				t.Fatal(err)
			}
			if o.Cmd.SQE.Opcode() != x.opcode || o.MayRepeat() != (kind == Put || x.opcode == nvme.CmdKVXStore) {
				t.Errorf("%s of %d bytes: opcode %#x, may be repeated: %t", kind, x.n, o.Cmd.SQE.Opcode(),
					o.MayRepeat())
			}
			o.Lost()
			if o.Retry() != (x.opcode == nvme.CmdKVXStore) {
				t.Errorf("%s of %d bytes: a retry: %t", kind, x.n, o.Retry())
			}
			a.Expires = 1
			if err := o.Start(s, a); errors.Is(err, host.ErrValueTooLarge) != (x.n > room) {
				t.Errorf("%s of %d bytes with an expiry: %v", kind, x.n, err)
			}
		}
	}
}

func TestARetryThatATargetDoesNotKnowIsIndeterminate(t *testing.T) {
	for _, lost := range []bool{false, true} {
		var o Op
		s := extended(false, true)
		if err := o.Start(s, &Args{Kind: PutIfAbsent, Key: []byte("k"), Client: 1, KeepSeconds: 1}); err != nil {
			t.Fatal(err)
		}
		if lost {
			o.Lost()
		}
		if !o.Step(s, &host.Completion{Status: nvme.InvalidOpcode | nvme.DNR}) ||
			errors.Is(o.Err, host.ErrIndeterminate) != lost || o.Status.OK() != lost {
			t.Errorf("lost %t: %v, %v", lost, o.Status, o.Err)
		}
	}
}

func TestBrokenReadHeadersAreProtocolErrors(t *testing.T) {
	for _, long := range []bool{false, true} {
		var o Op
		s := extended(long, true)
		if err := o.Start(s, &Args{Kind: GetVersion, Key: []byte("k"), Value: make([]byte, 100)}); err != nil {
			t.Fatal(err)
		}
		for _, c := range []host.Completion{{Received: 15}, {Received: 16, Result: 1}, {Received: 116, Result: 99}} {
			if !o.Step(s, &c) || !errors.Is(o.Err, host.ErrProtocol) {
				t.Errorf("long %t: %+v: %v", long, c, o.Err)
			}
		}
		o.Err = nil
		o.Cmd.Data[15] = 1
		if !o.Step(s, &host.Completion{Received: 16}) || !errors.Is(o.Err, host.ErrProtocol) {
			t.Errorf("long %t, a reserved byte: %v", long, o.Err)
		}
	}
}

func TestExtendedOperationsAllocateNothing(t *testing.T) {
	for _, long := range []bool{false, true} {
		var o Op
		s, key, value := extended(long, true), []byte("some key"), make([]byte, 1000)
		if n := testing.AllocsPerRun(100, func() {
			for kind := range kinds {
				a := Args{Kind: kind, Key: key, Value: value, Version: 1}
				if kind.IsWrite() {
					a.Client, a.KeepSeconds = 1, 1
				}
				if err := o.Start(s, &a); err != nil {
					t.Fatal(err)
				}
				o.Lost()
				o.Step(s, &host.Completion{Status: nvme.KVIndeterminate})
			}
		}); n != 0 {
			t.Errorf("long %t: %v allocations", long, n)
		}
	}
}
