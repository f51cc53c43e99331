package view

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
)

func example(t testing.TB) *View {
	v := &View{Cluster: [16]byte{1}, Epoch: 300, Replicas: 2, HashSeed: 7, Chains: make([]Chain, 16),
		ChainEpochs: make([]uint32, 16)}
	v.addNode("a", "rack-1", 2, 100)
	v.addNode("b", "", 1, 50)
	v.Nodes[1].Out, v.Partitions[1].Out = true, true
	for r := range v.Chains {
		v.Chains[r] = Chain{{0, Serving, 1}, {2, Leaving, 299}, {1, Filling, 300}}
	}
	v.Chains[3] = Chain{{0, LastCopy, 20}, {1, Waiting, 30}}
	v.Chains[4], v.ChainEpochs[4] = Chain{}, 1000
	if err := v.Check(); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestARecordIsTheView(t *testing.T) {
	v := example(t)
	got, err := Decode(v.Encode())
	if err != nil || !reflect.DeepEqual(got, v) {
		t.Fatalf("got %+v, %v, want %+v", got, err, v)
	}
}

func TestADamagedRecordIsRefused(t *testing.T) {
	good := example(t).Encode()
	for i := range good {
		for bit := range 8 {
			b := bytes.Clone(good)
			b[i] ^= 1 << bit
			if _, err := Decode(b); !errors.Is(err, ErrInvalid) {
				t.Fatalf("bit %d of byte %d: %v", bit, i, err)
			}
		}
		if _, err := Decode(good[:i]); !errors.Is(err, ErrInvalid) {
			t.Fatalf("the first %d bytes: %v", i, err)
		}
	}
}

func TestARecordOfAnotherVersionIsRefusedWithBoth(t *testing.T) {
	b := example(t).Encode()
	b[recVersion] = 9
	_, err := Decode(b)
	if err == nil || !strings.Contains(err.Error(), "is 9, this program knows 1") {
		t.Fatal(err)
	}
}

func TestCheckNamesWhatIsWrong(t *testing.T) {
	for want, change := range map[string]func(v *View){
		"cluster":                 func(v *View) { v.Cluster = [16]byte{} },
		"epoch is 0":              func(v *View) { v.Epoch = 0 },
		"replicas is 6":           func(v *View) { v.Replicas = 6 },
		"number of ranges is 15":  func(v *View) { v.Chains = v.Chains[1:] },
		"chains' epochs is 15":    func(v *View) { v.ChainEpochs = v.ChainEpochs[1:] },
		"two nodes have the name": func(v *View) { v.Nodes[1].Name = "a" },
		"occurs twice":            func(v *View) { v.Partitions[1].ID = v.Partitions[0].ID },
		"node is 2":               func(v *View) { v.Partitions[1].Node = 2 },
		"2 members are filling": func(v *View) {
			v.Chains[0] = Chain{{0, Serving, 1}, {1, Filling, 1}, {2, Filling, 1}}
		},
		"a last copy beside":       func(v *View) { v.Chains[0] = Chain{{0, Serving, 1}, {1, LastCopy, 1}} },
		"no member holds the data": func(v *View) { v.Chains[0] = Chain{{0, Filling, 1}} },
		"is a member twice":        func(v *View) { v.Chains[0] = Chain{{0, Serving, 1}, {0, Serving, 1}} },
		"which does not exist":     func(v *View) { v.Chains[0] = Chain{{3, Serving, 1}} },
		"behind one that is": func(v *View) {
			v.Chains[0] = Chain{{0, Serving, 1}, {1, Waiting, 1}, {2, Filling, 1}}
		},
		"since epoch 301, want at mo": func(v *View) { v.Chains[0] = Chain{{0, Serving, 301}} },
	} {
		v := example(t)
		change(v)
		if err := v.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestARangeIsAPartOfTheRing(t *testing.T) {
	v := &View{Chains: make([]Chain, 64)}
	next := uint64(0)
	for r := range v.Chains {
		first, last := v.Range(r)
		if first != next || v.RangeOf(first) != r || v.RangeOf(last) != r {
			t.Fatalf("range %d is %#x to %#x, want from %#x", r, first, last, next)
		}
		next = last + 1
	}
	if next != 0 {
		t.Fatalf("the last range ends at %#x", next-1)
	}
}

// FuzzDecode: no record makes Decode panic, or return a view that Encode does not reproduce.
func FuzzDecode(f *testing.F) {
	v := example(f)
	f.Add(v.Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= recHeader {
			// The checksum is right, or hardly an input would come further.
			le.PutUint32(b[recLength:], uint32(len(b)))
			le.PutUint32(b[recCRC:], checksum(b))
		}
		v, err := Decode(b)
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		again, err := Decode(v.Encode())
		if err != nil || !reflect.DeepEqual(v, again) {
			t.Fatalf("%+v, again %+v, %v", v, again, err)
		}
	})
}
