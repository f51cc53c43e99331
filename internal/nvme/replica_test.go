package nvme

import (
	"encoding/hex"
	"math"
	"slices"
	"testing"
)

// replication are the opcodes of replication.
var replication = []uint8{CmdKVForward, CmdKVDurable, CmdKVSync, CmdKVShip, CmdKVCompare, CmdKVFetch}

// replicaSQE is a message of epoch 7 of range 0x1234.
func replicaSQE(opcode uint8, fill func(*KVReplicaSQE)) SQE {
	var e SQE
	e.SetOpcode(opcode)
	e.KVReplica().SetEpoch(7)
	e.KVReplica().SetRange(0x1234)
	e.KVReplica().SetSender(0x0f02)
	if fill != nil {
		fill(e.KVReplica())
	}
	return e
}

// messages are one of each kind, and those with and without a key.
var messages = []struct {
	name string
	e    SQE
	want string // CDW2, CDW3, CDW10 to CDW15
}{
	{"forward", replicaSQE(CmdKVForward, func(k *KVReplicaSQE) {
		k.SetLenBytes(KVForwardHeaderSize + 100)
		k.SetKeyLen(3)
		k.SetKeep(8)
		k.SetSequence(258)
		k.SetMark(257)
	}), "07000000" + "34120000" + "94000000" + "0308020f" + "0201000000000000" + "0101000000000000"},
	{"forward of a delete, to be answered at once", replicaSQE(CmdKVForward, func(k *KVReplicaSQE) {
		k.SetFlags(KVForwardDelete)
		k.SetLenBytes(KVForwardHeaderSize)
		k.SetKeyLen(16)
		k.SetSequence(1)
	}), "07000000" + "34120100" + "30000000" + "1000020f" + "0100000000000000" + "0000000000000000"},
	{"durable", replicaSQE(CmdKVDurable, func(k *KVReplicaSQE) {
		k.SetClock(0x10000000005)
		k.SetMark(0x0807060504030201)
	}), "07000000" + "34120000" + "00000000" + "0000020f" + "0500000000010000" + "0102030405060708"},
	{"sync", replicaSQE(CmdKVSync, nil),
		"07000000" + "34120000" + "00000000" + "0000020f" + "0000000000000000" + "0000000000000000"},
	{"ship", replicaSQE(CmdKVShip, func(k *KVReplicaSQE) {
		k.SetLenBytes(KVReadHeaderSize + 4096)
		k.SetKey([]byte("0123456789"))
	}), "07000000" + "34120000" + "10100000" + "0a00020f" + "3031323334353637" + "3839000000000000"},
	{"compare", replicaSQE(CmdKVCompare, func(k *KVReplicaSQE) {
		k.SetLenBytes(KVRangeHeaderBytes + 64*KVSumBytes)
		k.SetFirst(0x1234 << 48)
		k.SetBits(48)
		k.SetRound(0x0605)
	}), "07000000" + "34123006" + "60040000" + "0005020f" + "0000000000003412" + "0000000000000000"},
	{"compare of all positions", replicaSQE(CmdKVCompare, func(k *KVReplicaSQE) { k.SetBits(64) }),
		"07000000" + "34124000" + "00000000" + "0000020f" + "0000000000000000" + "0000000000000000"},
	{"fetch from a position", replicaSQE(CmdKVFetch, func(k *KVReplicaSQE) {
		k.SetLenBytes(1 << 20)
		k.SetFirst(0x1234567890abcdef)
		k.SetBits(48)
		k.SetRound(0xfffe)
	}), "07000000" + "341230ff" + "00001000" + "00fe020f" + "efcdab9078563412" + "0000000000000000"},
	{"fetch behind a key", replicaSQE(CmdKVFetch, func(k *KVReplicaSQE) {
		k.SetLenBytes(1 << 20)
		k.SetKey([]byte("0123456789abcdef"))
		k.SetBits(1)
	}), "07000000" + "34120100" + "00001000" + "1000020f" + "3031323334353637" + "3839616263646566"},
}

func TestKVReplicaSQEGolden(t *testing.T) {
	for _, c := range messages {
		if got := hex.EncodeToString(append(append([]byte{}, c.e[8:16]...), c.e[40:]...)); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
		if op := c.e.Opcode(); !c.e.KVReplica().Valid() || !KVReplication(op) || KVExtended(op) {
			t.Errorf("%s: not valid, or not a message", c.name)
		}
		checkReplicaSQE(t, c.e)
	}
	if n := testing.AllocsPerRun(100, func() {
		for i := range messages {
			e := messages[i].e
			var key [MaxKVKey]byte
			if k := e.KVReplica(); k.Valid() {
				k.SetKey(k.Key(&key))
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestAShorterKeyLeavesNothingOfTheOneBefore(t *testing.T) {
	e := replicaSQE(CmdKVShip, func(k *KVReplicaSQE) {
		k.SetKey([]byte("0123456789abcdef"))
		k.SetKey([]byte("ab"))
	})
	var key [MaxKVKey]byte
	if k := e.KVReplica(); !k.Valid() || string(k.Key(&key)) != "ab" {
		t.Errorf("% x", e[40:])
	}
}

func TestReplicationOpcodesNameTheirDirection(t *testing.T) {
	seen := map[uint8]bool{}
	for _, op := range replication {
		toController, toHost := DataDirection(op)
		data := op == CmdKVShip || op == CmdKVCompare || op == CmdKVFetch
		if toController != (op == CmdKVForward) || toHost != data {
			t.Errorf("opcode %#x: to the controller %t, to the host %t", op, toController, toHost)
		}
		if KVVersioned(op) != (op == CmdKVForward || op == CmdKVDurable) || seen[op] {
			t.Errorf("opcode %#x: its result, or it is there twice", op)
		}
		seen[op] = true
	}
	for op := range 256 {
		if KVReplication(uint8(op)) != seen[uint8(op)] {
			t.Errorf("opcode %#x: a message: %t", op, !seen[uint8(op)])
		}
	}
}

// TestKVReplicaSQEReservedBitsAreRefused: whichever bit of a message is changed, it is refused if nothing reads it.
func TestKVReplicaSQEReservedBitsAreRefused(t *testing.T) {
	// What is used, from a byte to another one, exclusive.
	used := map[uint8][][2]int{
		CmdKVForward: {{40, 46}, {48, 64}},
		CmdKVDurable: {{48, 64}},
		CmdKVSync:    {},
		CmdKVShip:    {{40, 45}, {48, 58}},
		CmdKVCompare: {{14, 16}, {40, 44}, {45, 46}, {48, 56}},
		CmdKVFetch:   {{14, 16}, {40, 46}, {48, 64}},
	}
	for _, c := range messages {
		for at := 14; at < 64; at++ {
			is := func(f [2]int) bool { return at >= f[0] && at < f[1] }
			if at >= 16 && at < 40 || slices.ContainsFunc(used[c.e.Opcode()], is) {
				continue
			}
			for bit := range 8 {
				e := c.e
				if at == 14 && e.Opcode() == CmdKVForward && bit == 0 || at == 46 || at == 47 {
					continue
				}
				if e[at] ^= 1 << bit; e.KVReplica().Valid() {
					t.Errorf("%s: bit %d of byte %d is valid", c.name, bit, at)
				}
			}
		}
		e := c.e
		if e.KVReplica().SetEpoch(0); e.KVReplica().Valid() {
			t.Errorf("%s of epoch 0 is valid", c.name)
		}
	}
	for what, e := range map[string]SQE{
		"a forward without a place": replicaSQE(CmdKVForward, func(k *KVReplicaSQE) { k.SetKeyLen(1) }),
		"a forward without a key":   replicaSQE(CmdKVForward, func(k *KVReplicaSQE) { k.SetSequence(1) }),
		"a forward of a key of 17": replicaSQE(CmdKVForward, func(k *KVReplicaSQE) {
			k.SetSequence(1)
			k.SetKeyLen(17)
		}),
		"a ship without a key":   replicaSQE(CmdKVShip, nil),
		"a ship of a key of 17":  replicaSQE(CmdKVShip, func(k *KVReplicaSQE) { k.SetKeyLen(17) }),
		"a fetch of a key of 17": replicaSQE(CmdKVFetch, func(k *KVReplicaSQE) { k.SetKeyLen(17) }),
		"a fetch at a position and more": replicaSQE(CmdKVFetch, func(k *KVReplicaSQE) {
			k.SetMark(1)
		}),
		"a fetch behind a key and more": replicaSQE(CmdKVFetch, func(k *KVReplicaSQE) {
			k.SetKey([]byte("ab"))
			k.SetKeyLen(1)
		}),
		"a fetch of 2^65":             replicaSQE(CmdKVFetch, func(k *KVReplicaSQE) { k.SetBits(65) }),
		"a compare of 2^65":           replicaSQE(CmdKVCompare, func(k *KVReplicaSQE) { k.SetBits(65) }),
		"a compare between multiples": replicaSQE(CmdKVCompare, func(k *KVReplicaSQE) { k.SetBits(4); k.SetFirst(8) }),
		"a clock of 2^63":             replicaSQE(CmdKVDurable, func(k *KVReplicaSQE) { k.SetClock(1 << 63) }),
		"another command":             replicaSQE(CmdKVXStore, nil),
	} {
		if e.KVReplica().Valid() {
			t.Errorf("%s is valid", what)
		}
	}
}

func TestCompareNamesItsSubRanges(t *testing.T) {
	for _, c := range []struct {
		bits  uint8
		n     int
		shift uint8
	}{{0, 1, 0}, {1, 2, 0}, {6, 64, 0}, {7, 64, 1}, {48, 64, 42}, {64, 64, 58}} {
		e := replicaSQE(CmdKVCompare, func(k *KVReplicaSQE) { k.SetBits(c.bits) })
		k := e.KVReplica()
		k.SetFirst(math.MaxUint64 &^ (1<<c.bits - 1)) // the last part of this length
		if n, shift := k.SubRanges(); n != c.n || shift != c.shift || !k.Valid() || k.Last() != math.MaxUint64 {
			t.Errorf("2^%d positions: %d sub-ranges of 2^%d, the last position is %#x", c.bits, n, shift, k.Last())
		}
	}
}

func TestKVForwardHeaderNamesTheWrongField(t *testing.T) {
	for _, c := range []struct {
		change func(h *KVForwardHeader)
		at     int
		say    string
	}{
		{func(h *KVForwardHeader) { h.SetVersion(0) }, 0, "Version"},
		{func(h *KVForwardHeader) { h.SetVersion(1 << 63) }, 0, "Version"},
		{func(h *KVForwardHeader) { h.SetClient(0); h.SetKeepUntil(0) }, 16, "Sequence"},
		{func(h *KVForwardHeader) { h.SetClient(0); h.SetSequence(0) }, 28, "KeepUntil"},
		{func(h *KVForwardHeader) { h.SetKeepUntil(0) }, 28, "KeepUntil"},
		{func(h *KVForwardHeader) { h[35] = 1 }, 32, "Key"},
		{func(h *KVForwardHeader) { h[47] = 1 }, 32, "Key"},
	} {
		h := examples["kv-forward-header"]().(*KVForwardHeader)
		c.change(h)
		if at, ok := h.Fault(3); ok || at != c.at {
			t.Errorf("%s: fault at %d, %t", c.say, at, ok)
		}
		wantError(t, c.say, h.Check(3), c.say)
	}
	h := KVForwardHeader{}
	h.SetVersion(MaxKVVersion)
	h.SetKey([MaxKVKey]byte{15: 1})
	if err := h.Check(MaxKVKey); err != nil {
		t.Error(err)
	}
	if h.Check(17) != nil || h.Check(0) == nil {
		t.Error("a key that is too long, and none")
	}
}

// checkReplicaSQE: a valid message survives being rewritten.
func checkReplicaSQE(t *testing.T, e SQE) {
	t.Helper()
	for _, opcode := range replication {
		e.SetOpcode(opcode)
		k := e.KVReplica()
		if !k.Valid() {
			continue
		}
		again := replicaSQE(opcode, func(o *KVReplicaSQE) {
			o.SetEpoch(k.Epoch())
			o.SetRange(k.Range())
			o.SetSender(k.Sender())
			o.SetLenBytes(k.LenBytes())
			var key [MaxKVKey]byte
			switch opcode {
			case CmdKVForward:
				o.SetFlags(k.Flags())
				o.SetKeyLen(k.KeyLen())
				o.SetKeep(k.Keep())
				o.SetAnswered(k.Answered())
				o.SetSequence(k.Sequence())
				o.SetMark(k.Mark())
			case CmdKVDurable:
				o.SetClock(k.Clock())
				o.SetMark(k.Mark())
			case CmdKVShip:
				o.SetKey(k.Key(&key))
			case CmdKVCompare:
				o.SetBits(k.Bits())
				o.SetRound(k.Round())
				o.SetFirst(k.First())
				if n, shift := k.SubRanges(); n < 1 || n > 64 || k.Last()-k.First() != uint64(n)<<shift-1 {
					t.Fatalf("%d sub-ranges of 2^%d positions from %#x to %#x", n, shift, k.First(), k.Last())
				}
			case CmdKVFetch:
				o.SetBits(k.Bits())
				o.SetRound(k.Round())
				if k.KeyLen() == 0 {
					o.SetFirst(k.First())
				} else {
					o.SetKey(k.Key(&key))
				}
			}
		})
		for _, part := range [][2]int{{8, 16}, {40, 64}} {
			if from, to := part[0], part[1]; string(again[from:to]) != string(e[from:to]) {
				t.Fatalf("opcode %#x: % x is rewritten as % x", opcode, e[from:to], again[from:to])
			}
		}
	}
}

// FuzzKVReplica: a valid message survives being rewritten, and a header with a fault has it where Fault says.
func FuzzKVReplica(f *testing.F) {
	h := examples["kv-forward-header"]().(*KVForwardHeader)
	for _, c := range messages {
		f.Add(c.e[:], h[:])
	}
	f.Fuzz(func(t *testing.T, command, header []byte) {
		var e SQE
		copy(e[:], command)
		checkReplicaSQE(t, e)
		n := e.KVReplica().KeyLen()
		var h, again KVForwardHeader
		copy(h[:], header)
		at, ok := h.Fault(n)
		if err := h.Check(n); ok != (err == nil) || ok != (at == 0 && h.Version()-1 < MaxKVVersion) {
			t.Fatalf("fault at %d, %t, Check: %v", at, ok, err)
		}
		again.SetVersion(h.Version())
		again.SetClient(h.Client())
		again.SetSequence(h.Sequence())
		again.SetExpires(h.Expires())
		again.SetKeepUntil(h.KeepUntil())
		again.SetKey(h.Key())
		if again != h {
			t.Fatalf("% x reads back as % x", h[:], again[:])
		}
	})
}
