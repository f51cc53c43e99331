package cluster

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"reflect"
	"testing"

	"jbofd/internal/cluster/view"
	"jbofd/internal/uuid"
)

func someMap() *Map {
	v := &view.View{Cluster: uuid.UUID{1}, Epoch: 7, Replicas: 2, HashSeed: 5, Chains: make([]view.Chain, 16),
		ChainEpochs: make([]uint32, 16), Nodes: []view.Node{{Name: "a"}, {Name: "b", Domain: "rack", Out: true}},
		Partitions: []view.Partition{{ID: uuid.UUID{2}, Weight: 9}, {ID: uuid.UUID{3}, Node: 1, Weight: 9, Out: true}}}
	for r := range v.Chains {
		v.Chains[r] = view.Chain{{Partition: 0, Since: 3}, {Partition: 1, State: view.Filling, Since: 7}}
	}
	return &Map{View: v, Admitted: []Incarnation{NewIncarnation(1, 4), 0}}
}

// records are one of each kind, with its decoder.
func records() map[string]struct {
	bytes  []byte
	decode func([]byte) (any, error)
	want   any
} {
	type record = struct {
		bytes  []byte
		decode func([]byte) (any, error)
		want   any
	}
	s := &Settings{Cluster: uuid.UUID{1}, Protocol: Protocol, Replicas: 3, Out: []string{"a", "b"},
		Lost:      []Incarnation{NewIncarnation(7, 2)},
		Losses:    []Loss{{Range: 7, ChainEpoch: 9, Commands: 1}, {Range: 1 << 15}},
		Forgotten: []Forgotten{{"c", 6}, {Name: "d"}}, ValueBytes: 1000}
	n := &nodeRecord{protocol: 1, incarnation: NewIncarnation(7, 2), domain: "rack", address: "10.0.0.1:4420",
		partitions: []Partition{{uuid.UUID{4}, 100}, {uuid.UUID{5}, 200}}}
	m := &managerRecord{term: 8, id: Identity{Name: "a", Address: "10.0.0.1:4420", Incarnation: 9}}
	return map[string]record{
		"config":  {s.Encode(), func(b []byte) (any, error) { return DecodeSettings(b) }, s},
		"node":    {n.encode(), func(b []byte) (any, error) { return decodeNode(b) }, n},
		"manager": {m.encode(), func(b []byte) (any, error) { return decodeManager(b) }, m},
		"view":    {someMap().Encode(), func(b []byte) (any, error) { return DecodeMap(b) }, someMap()},
	}
}

// TestRecordsReturn encodes and decodes each record.
func TestRecordsReturn(t *testing.T) {
	for name, r := range records() {
		got, err := r.decode(r.bytes)
		if err != nil || !reflect.DeepEqual(got, r.want) {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, r.want)
		}
	}
}

// TestAChangedRecordIsRefused flips each bit of each record, cuts it anywhere, and appends to it. With a valid checksum
// too, nothing but an error may come of what does not fit.
func TestAChangedRecordIsRefused(t *testing.T) {
	for name, r := range records() {
		for bit := range len(r.bytes) * 8 {
			b := bytes.Clone(r.bytes)
			b[bit/8] ^= 1 << (bit % 8)
			if _, err := r.decode(b); !errors.Is(err, ErrForeign) && !errors.Is(err, ErrProtocol) {
				t.Fatalf("%s with bit %d flipped: %v", name, bit, err)
			}
		}
		for n := headerBytes; n < len(r.bytes); n++ {
			if _, err := r.decode(seal(bytes.Clone(r.bytes[:n]))); err == nil {
				t.Fatalf("%s of %d bytes instead of %d is taken", name, n, len(r.bytes))
			}
		}
		if _, err := r.decode(seal(append(bytes.Clone(r.bytes), 0))); err == nil {
			t.Fatalf("%s with a byte more is taken", name)
		}
		for range 2000 { // whatever it says: no panic, no memory beyond its length
			b := bytes.Clone(r.bytes)
			for range 1 + rand.IntN(4) {
				b[headerBytes+rand.IntN(len(b)-headerBytes)] = byte(rand.IntN(256))
			}
			if got, err := r.decode(seal(b)); err == nil && reflect.ValueOf(got).IsNil() {
				t.Fatalf("%s: neither a value nor an error", name)
			}
		}
	}
}
