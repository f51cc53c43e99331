package nvme

import (
	"bytes"
	"testing"

	"pgregory.net/rapid"
)

func drawKey(t *rapid.T, label string) []byte {
	return rapid.SliceOfN(rapid.Byte(), 1, MaxKVKey).Draw(t, label)
}

func TestKeyStandsInItsDwordsInOrder(t *testing.T) {
	k := new(SQE).KV()
	for i := range k {
		k[i] = 0xee
	}
	k.SetKey([]byte("0123456789abcdef"))
	if string(k[8:16]) != "01234567" || string(k[56:64]) != "89abcdef" || k.KeyLen() != 16 {
		t.Errorf("% x", k[:])
	}
	k.SetKey([]byte("xyz"))
	if string(k[8:16]) != "xyz\x00\x00\x00\x00\x00" || k.KeyHigh() != [8]byte{} || k.KeyLen() != 3 {
		t.Errorf("a shorter key leaves bytes of the one before: % x", k[:])
	}
	if k[16] != 0xee || k[55] != 0xee || k[45] != 0xee {
		t.Errorf("SetKey changes other fields: % x", k[:])
	}
}

func TestKeyReadsBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		key := drawKey(t, "key")
		var k KVSQE
		k.SetKey(key)
		var buf [MaxKVKey]byte
		if got := k.Key(&buf); !bytes.Equal(got, key) || !k.ValidKey() {
			t.Fatalf("%x reads back as %x", key, got)
		}
	})
}

func TestOnlyListGoesWithoutAKey(t *testing.T) {
	for op, want := range map[uint8]bool{CmdKVStore: false, CmdKVRetrieve: false, CmdKVDelete: false, CmdKVExist: false,
		CmdKVList: true} {
		if got := kvCommand(op, "").ValidKey(); got != want {
			t.Errorf("opcode %#x without a key: valid %t", op, got)
		}
		k := kvCommand(op, "0123456789abcdef")
		if !k.ValidKey() {
			t.Errorf("opcode %#x with 16 bytes of key is not valid", op)
		}
		k.SetKeyLen(17)
		var buf [MaxKVKey]byte
		if k.ValidKey() || len(k.Key(&buf)) != MaxKVKey {
			t.Errorf("opcode %#x with 17 bytes of key is valid", op)
		}
	}
}

func TestKVOpcodesNameTheirDirection(t *testing.T) {
	for op, want := range map[uint8][2]bool{
		CmdKVStore: {true, false}, CmdKVRetrieve: {false, true}, CmdKVList: {false, true}, CmdKVDelete: {},
		CmdKVExist: {}, CmdKVXStore: {true, false}, CmdKVXRetrieve: {false, true}, CmdKVXDelete: {true, false},
	} {
		toController, toHost := DataDirection(op)
		if got := [2]bool{toController, toHost}; got != want {
			t.Errorf("opcode %#x: %v, want %v", op, got, want)
		}
	}
}

func TestKVListHoldsWhatFitsAndNoMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		buf := bytes.Repeat([]byte{0xee}, rapid.IntRange(4, 300).Draw(t, "buffer"))
		l := NewKVList(buf)
		var want [][]byte
		for _, key := range rapid.SliceOfN(rapid.Custom(func(t *rapid.T) []byte { return drawKey(t, "key") }), 0,
			30).Draw(t, "keys") {
			before, ok := len(l), false
			if l, ok = l.Append(key); ok {
				want = append(want, key)
			} else if before+2+len(key)+3 <= len(buf) || len(l) != before {
				t.Fatalf("no room for %d bytes of key at %d of %d", len(key), before, len(buf))
			}
		}
		if l.Check() != nil || l.Len() != len(want) || len(l) > len(buf) || len(l)%4 != 0 {
			t.Fatalf("%d keys in %d bytes, want %d: %v", l.Len(), len(l), len(want), l.Check())
		}
		i := 0
		for key := range KVList(buf).All() { // the unused part of the buffer follows
			if !bytes.Equal(key, want[i]) {
				t.Fatalf("key %d is %x, want %x", i, key, want[i])
			}
			i++
		}
		if i != len(want) {
			t.Fatalf("%d keys, want %d", i, len(want))
		}
		if len(want) > 0 {
			if n := len(l) - kvListEntry(len(want[len(want)-1])); l[:n].Check() == nil {
				t.Fatal("a list cut before its last key passes")
			}
		}
	})
}

func TestSmallestKVListBufferHoldsAnyKey(t *testing.T) {
	for n := 1; n <= MaxKVKey; n++ {
		if _, ok := NewKVList(make([]byte, MinKVList)).Append(make([]byte, n)); !ok {
			t.Errorf("no room for %d bytes", n)
		}
	}
}

func TestKVAccessorsAllocateNothing(t *testing.T) {
	key := []byte("0123456789abcdef")
	buf := make([]byte, 4096)
	var sum int
	if n := testing.AllocsPerRun(100, func() {
		var s SQE
		s.KV().SetKey(key)
		var b [MaxKVKey]byte
		l := NewKVList(buf)
		for ok := true; ok; {
			l, ok = l.Append(s.KV().Key(&b))
		}
		for k := range l.All() {
			sum += len(k)
		}
	}); n != 0 {
		t.Errorf("%v allocs", n)
	}
}

func TestKVFormatsStandInTheirPlaces(t *testing.T) {
	var n IdentifyNamespaceKV
	n.SetNKVF(15)
	for i := range MaxKVFormats {
		var f KVFormat
		f.SetKVKML(uint16(i + 1))
		n.SetKVF(i, f)
	}
	for i := range MaxKVFormats {
		n.SetKVFC(uint8(i))
		if f := n.Format(); f.KVKML() != uint16(i+1) || n[72+16*i] != byte(i+1) || n.Check() != nil {
			t.Errorf("format %d: key length %d, %v", i, f.KVKML(), n.Check())
		}
	}
	if f := n.KVF(16); f != (KVFormat{}) || n[328] != 0 {
		t.Error("there is a format beyond the last")
	}
	if !new(IdentifyNamespaceKV).Inactive() || n.Inactive() {
		t.Error("zeroes alone are inactive")
	}
}
