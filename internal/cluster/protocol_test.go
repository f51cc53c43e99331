package cluster

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/testutil/wiredump"
)

var rewrite = flag.Bool("rewrite", false, "write the wire form of a new Protocol")

// TestAnotherWireFormHasAnotherNumber compares the records, the messages of nodes, and their commands (docs/
// wire-extensions.md, bit 5) with those that this Protocol has had so far. If they differ, the change is a mistake, or
// Protocol is to be raised: then -rewrite writes the new form, and the file of the earlier one may go.
func TestAnotherWireFormHasAnotherNumber(t *testing.T) {
	var form bytes.Buffer
	all := records()
	for _, name := range slices.Sorted(func(yield func(string) bool) {
		for name := range all {
			if !yield(name) {
				return
			}
		}
	}) {
		fmt.Fprintf(&form, "record %s\n%s", name, hexLines(all[name].bytes))
	}
	fmt.Fprintf(&form, "record stamp\n%s", hexLines(encodeStamp(8, 3)))
	for _, m := range someMessages() {
		fmt.Fprintf(&form, "message %s\n%s", m.Encode()[:4], hexLines(m.Encode()))
	}
	fmt.Fprintf(&form, "command\n%s", wiredump.Layout(new(nvme.SQE).KVReplica()))
	for _, e := range someCommands() {
		fmt.Fprintf(&form, "command %x\n%s", e.Opcode(), hexLines(e[:]))
	}
	fmt.Fprintf(&form, "forward header\n%s", wiredump.Layout(new(nvme.KVForwardHeader)))
	fmt.Fprintf(&form, "read header\n%s", wiredump.Layout(new(nvme.KVReadHeader)))
	fmt.Fprintf(&form, "copy\n%s", hexLines(someCopy()))
	fmt.Fprintf(&form, "digest\n%s", hexLines(someDigest()))
	fmt.Fprintf(&form, "opcodes %x\nstatuses %x\nflags %x\n", []uint8{nvme.CmdKVDurable, nvme.CmdKVForward,
		nvme.CmdKVShip, nvme.CmdKVSync, nvme.CmdKVCompare, nvme.CmdKVFetch},
		[]uint16{uint16(nvme.KVWrongView), uint16(nvme.KVInvalidHeader),
			uint16(nvme.NamespaceNotReady), uint16(nvme.UnrecoveredReadError)},
		[]uint64{nvme.KVChainFull, nvme.KVForwardDelete, nvme.KVComplete, nvme.KVLost})

	file := filepath.Join("testdata", fmt.Sprintf("protocol.%d", Protocol))
	want, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist) && *rewrite:
		if err := os.WriteFile(file, form.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	case err != nil:
		t.Fatalf("%v: if Protocol was raised, -rewrite writes it", err)
	case !bytes.Equal(want, form.Bytes()):
		was, is := strings.Split(string(want), "\n"), strings.Split(form.String(), "\n")
		for i := range is {
			if i >= len(was) || was[i] != is[i] {
				t.Fatalf("line %d of the wire form is %q, and another one in %s: raise Protocol", i+1, is[i], file)
			}
		}
		t.Fatalf("the wire form has %d lines, %s has %d: raise Protocol", len(is), file, len(was))
	}
}

// TestExamplesOfTheWireFormHaveAllFields: what no example has could change its form without being seen.
func TestExamplesOfTheWireFormHaveAllFields(t *testing.T) {
	set := map[string]bool{}
	for _, r := range records() {
		fieldsOf(set, reflect.ValueOf(r.want), 0)
	}
	for _, m := range someMessages() {
		fieldsOf(set, reflect.ValueOf(m), 0)
	}
	for field, is := range set {
		if !is {
			t.Errorf("%s is zero in all examples", field)
		}
	}
}

// fieldsOf notes which fields of a value are not zero, those of its parts included.
func fieldsOf(set map[string]bool, v reflect.Value, depth int) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			fieldsOf(set, v.Elem(), depth)
		}
	case reflect.Slice:
		for i := range v.Len() {
			fieldsOf(set, v.Index(i), depth)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			name := v.Type().String() + "." + v.Type().Field(i).Name
			set[name] = set[name] || !v.Field(i).IsZero()
			fieldsOf(set, v.Field(i), depth+1)
		}
	}
}

// someCommands are a Forward, a Durable, and a Fetch behind a key.
func someCommands() []nvme.SQE {
	some := func(opcode uint8, fill func(*nvme.KVReplicaSQE)) (e nvme.SQE) {
		e.SetOpcode(opcode)
		k := e.KVReplica()
		k.SetEpoch(0x01020304)
		k.SetRange(0x1234)
		k.SetSender(0x0f02)
		fill(k)
		return e
	}
	return []nvme.SQE{
		some(nvme.CmdKVForward, func(k *nvme.KVReplicaSQE) {
			k.SetFlags(nvme.KVForwardDelete)
			k.SetLenBytes(nvme.KVForwardHeaderSize)
			k.SetKeyLen(3)
			k.SetKeep(8)
			k.SetSequence(258)
			k.SetMark(257)
			k.SetAnswered(0x0c0b)
		}),
		some(nvme.CmdKVDurable, func(k *nvme.KVReplicaSQE) {
			k.SetClock(0x10000000005)
			k.SetMark(0x0807060504030201)
		}),
		some(nvme.CmdKVFetch, func(k *nvme.KVReplicaSQE) {
			k.SetLenBytes(1 << 20)
			k.SetBits(48)
			k.SetRound(0x0605)
			k.SetKey([]byte("0123456789abc"))
		}),
	}
}

// someCopy is the data of a Fetch: an object with an identity, a tombstone, and a key that is there for its identity.
func someCopy() nvme.KVRange {
	b := nvme.NewKVRange(make([]byte, 512), nvme.KVCopy, 4, 0xFF, nvme.KVCursorAt(4, []byte("a")))
	e, b, _ := b.Append([]byte("ab"), 3, 1)
	e.SetPosition(5)
	e.SetVersion(7)
	e.SetIdentity(0, nvme.KVIdentity{Client: 1, Seq: 2, Version: 6, KeepUntil: 98})
	e.SetEvicted(true)
	copy(e.Value(), "xyz")
	e, b, _ = b.Append([]byte("c"), 0, 0)
	e.SetPosition(5)
	e.SetVersion(0x102)
	e.SetExpires(99)
	e.SetTombstone()
	e, b, _ = b.Append([]byte("d"), 0, 1)
	e.SetPosition(6)
	e.SetVersion(0x103)
	e.SetGone()
	e.SetIdentity(0, nvme.KVIdentity{Client: 0xC1, Seq: 0x5E, Version: 0x101, KeepUntil: 99})
	b.SetTo(nvme.KVCursorAt(6, []byte("d")))
	b.SetFlags(nvme.KVLost)
	b.SetTime(50)
	b.SetOrigin(0x2A)
	b.Seal()
	return b
}

// someDigest is the data of a Compare.
func someDigest() nvme.KVRange {
	b := nvme.NewKVRange(make([]byte, 256), nvme.KVDigest, 0, math.MaxUint64, nvme.KVCursorAt(0, nil))
	n, shift := nvme.KVSubRanges(0, math.MaxUint64, 2)
	b.SetShift(shift)
	b.SetItems(n)
	b = b[:nvme.KVRangeHeaderBytes+n*nvme.KVSumBytes]
	b.Sum(0).Add(2, 0x10)
	b.Sum(1).Add(1, 0xFFFFFFFFFFFFFFFF)
	b.Seal()
	return b
}

func hexLines(b []byte) string {
	var out strings.Builder
	for line := range slices.Chunk(b, 32) {
		fmt.Fprintln(&out, hex.EncodeToString(line))
	}
	return out.String()
}

// TestANodeOfAnotherProtocolIsToldSo, also if its reports have another form behind the identity of the node.
func TestANodeOfAnotherProtocolIsToldSo(t *testing.T) {
	r := *someMessages()[1].Report
	r.Protocol--
	b := r.encode()
	for _, b := range [][]byte{b, b[:len(b)-1], append(bytes.Clone(b), 1)} {
		m, err := DecodeMessage(seal(bytes.Clone(b)))
		if err != nil {
			t.Fatal(err)
		}
		if got := m.Report; got.Protocol != Protocol-1 || got.Name != r.Name || got.Address != r.Address ||
			got.Incarnation != r.Incarnation || got.Term != r.Term || got.Seq != r.Seq || got.Full {
			t.Errorf("%+v, want what it has of %+v up to the incarnation", got, r)
		}
	}
}
