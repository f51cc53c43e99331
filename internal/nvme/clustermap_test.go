package nvme

import (
	"bytes"
	"encoding/hex"
	"slices"
	"strings"
	"testing"

	"jbofd/internal/uuid"
)

// clusterMapHead is the header of smallMap.
var clusterMapHead = ClusterMapHeader{Cluster: uuid.UUID{0xC1, 15: 0xC2}, Epoch: 0x0102030405060708,
	HashSeed: 0x1122334455667788, Ranges: 16, Partitions: 300, Members: 3}

// smallMap is a map of 16 ranges, 300 partitions and 2 nodes.
func smallMap() ClusterMap {
	b := NewClusterMap(clusterMapHead)
	for r := range 16 {
		b.SetRange(r, uint32(r+1), []uint16{uint16(r)})
	}
	b.SetRange(4, 7, []uint16{2, 258})
	b.SetRange(5, 9, nil)
	for i := range 300 {
		b.SetPartition(i, uuid.UUID{0xAA, 15: byte(i)}, uint16(i%2))
	}
	b = b.AppendNode(ClusterMapNode{"n1", "tcp://192.0.2.1:4420", "nqn.2026-11.example.jbofd:kv"})
	b = b.AppendNode(ClusterMapNode{Name: "node2", SubNQN: "nqn.2026-11.example.jbofd:kv"}).Seal()
	b.SetGeneration(0x0A0B0C0D)
	return b
}

func TestClusterMapGolden(t *testing.T) {
	b := smallMap()
	const (
		ranges, partitions = 64 + 4*16, 64 + 16*16
		nodes              = partitions + 300*20
	)
	for _, c := range []struct {
		what     string
		from, to int
		want     string
	}{
		{"header", 0, 64, "4a42434d 0100 0000 14190000 0d0c0b0a c1000000000000000000000000000 0c2" +
			"0807060504030201 8877665544332211 10000000 2c010000 0200 03 0000000000"},
		{"ranges 4 and 5", ranges, ranges + 32, "07000000 02 000000 0200 0201 0000 0000" +
			"09000000 00 000000 0000 0000 0000 0000"},
		{"partition 1", partitions + 20, partitions + 40, "aa000000000000000000000000000001 0100 0000"},
		{"node 0", nodes, nodes + 56, "02 14 1c 00" + hex.EncodeToString([]byte("n1tcp://192.0.2.1:4420"+
			"nqn.2026-11.example.jbofd:kv")) + "0000"},
		{"node 1", nodes + 56, nodes + 96, "05 00 1c 00" + hex.EncodeToString([]byte("node2"+
			"nqn.2026-11.example.jbofd:kv")) + "000000"},
		{"the end", nodes + 96, len(b), "CRC"},
	} {
		got, want := hex.EncodeToString(b[c.from:c.to]), strings.ReplaceAll(c.want, " ", "")
		if want == "CRC" {
			want = hex.EncodeToString(le.AppendUint32(nil, b.crc()))
		}
		if got != want {
			t.Errorf("%s: %s, want %s", c.what, got, want)
		}
	}
	if err := b.Check(); err != nil {
		t.Fatal(err)
	}
	if b.Cluster() != clusterMapHead.Cluster || b.Epoch() != clusterMapHead.Epoch || b.Ranges() != 16 ||
		b.HashSeed() != clusterMapHead.HashSeed || b.Partitions() != 300 || b.Members() != 3 || b.Nodes() != 2 ||
		b.Generation() != 0x0A0B0C0D || b.LenBytes() != len(b) {
		t.Errorf("the header reads %s, epoch %d, %d ranges", b.Cluster(), b.Epoch(), b.Ranges())
	}
	if b.ChainEpoch(4) != 7 || b.MembersOf(4) != 2 || b.Member(4, 0) != 2 || b.Member(4, 1) != 258 ||
		b.MembersOf(5) != 0 {
		t.Errorf("range 4: epoch %d, %d members", b.ChainEpoch(4), b.MembersOf(4))
	}
	if id, node := b.Partition(299); id != (uuid.UUID{0xAA, 15: 299 & 0xFF}) || node != 1 {
		t.Errorf("partition 299: %s of node %d", id, node)
	}
	all := slices.Collect(b.AllNodes())
	if len(all) != 2 || all[0].Address != "tcp://192.0.2.1:4420" || all[1].Name != "node2" || all[1].Address != "" {
		t.Errorf("nodes %q", all)
	}
	for range b.AllNodes() {
		break
	}
	if n := b.AppendNode(ClusterMapNode{Name: strings.Repeat("x", 300)}); n[len(n)-256] != 'x' || len(n) != len(b)+260 {
		t.Errorf("a long name: %d bytes", len(n)-len(b))
	}
}

// TestEachDamageOfAClusterMapIsNamed: what the checksum does not tell, because the map was sealed so.
func TestEachDamageOfAClusterMapIsNamed(t *testing.T) {
	const ranges, partitions, nodes = 64, 64 + 16*16, 64 + 16*16 + 300*20
	for _, c := range []struct {
		change func(b ClusterMap)
		say    string
	}{
		{func(b ClusterMap) { b[0] = 'X' }, "magic"},
		{func(b ClusterMap) { b[4] = 2 }, "version"},
		{func(b ClusterMap) { b[6] = 1 }, "reserved"},
		{func(b ClusterMap) { b[59] = 1 }, "reserved"},
		{func(b ClusterMap) { b[63] = 1 }, "reserved"},
		{func(b ClusterMap) { b[8]++ }, "length in bytes"},
		{func(b ClusterMap) { b[8] += 4 }, "length in bytes"},
		{func(b ClusterMap) { b[11] = 1 }, "length in bytes"},
		{func(b ClusterMap) { clear(b[32:40]) }, "epoch"},
		{func(b ClusterMap) { b[48] = 24 }, "number of ranges"},
		{func(b ClusterMap) { b[48] = 8 }, "number of ranges"},
		{func(b ClusterMap) { b[48], b[50] = 0, 2 }, "number of ranges"},
		{func(b ClusterMap) { b[52], b[54] = 1, 1 }, "number of partitions"},
		{func(b ClusterMap) { b[53] = 0x10 }, "length in bytes"},
		{func(b ClusterMap) { b[57] = 0x11 }, "number of nodes"},
		{func(b ClusterMap) { b[56] = 1 }, "node of partition 1"},
		{func(b ClusterMap) { b[56] = 3 }, "node 2"},
		{func(b ClusterMap) { b[58] = 17 }, "width"},
		{func(b ClusterMap) { b[58] = 16 }, "range"},
		{func(b ClusterMap) { b[ranges+4] = 4 }, "range 0"},
		{func(b ClusterMap) { b[ranges+5] = 1 }, "range 0"},
		{func(b ClusterMap) { b[ranges+16+10] = 1 }, "range 1"},
		{func(b ClusterMap) { b[ranges+8], b[ranges+9] = 0x2C, 1 }, "member 0 of range 0"},
		{func(b ClusterMap) { b[partitions+16] = 2 }, "node of partition 0"},
		{func(b ClusterMap) { b[partitions+19] = 1 }, "node of partition 0"},
		{func(b ClusterMap) { b[nodes] = 255 }, "node 0"},
		{func(b ClusterMap) { b[nodes+3] = 1 }, "node 0"},
		{func(b ClusterMap) { b[nodes+55] = 1 }, "node 0"},
	} {
		b := smallMap()
		c.change(b)
		wantError(t, c.say+", not sealed", b.Check(), "cluster map: ")
		b.setCRC()
		wantError(t, c.say, b.Check(), c.say)
	}
	for n := range 3 {
		b := smallMap()
		wantError(t, "a part", b[:[]int{0, 63, len(b) - 4}[n]].Check(), "length")
	}
	b := smallMap()
	b[70]++
	wantError(t, "a changed byte", b.Check(), "CRC32C")
	if err := b[:64].CheckHeader(); err != nil {
		t.Error(err)
	}
}

func TestPositionsOfKeysNeverChange(t *testing.T) {
	for _, c := range []struct {
		seed uint64
		key  string
		want uint64
	}{
		{0, "a", 0x1d898ee5ca37468c}, {0x1122334455667788, "a", 0x8eac571af6a22f9c},
		{0x1122334455667788, "a\x00", 0x2dcdc6fca7def25b},
		{0x1122334455667788, "0123456789abcdef", 0xeab4057a3d6d0811},
	} {
		if got := KVPosition(c.seed, []byte(c.key)); got != c.want {
			t.Errorf("seed %#x, key %q: position %#x, want %#x", c.seed, c.key, got, c.want)
		}
	}
}

// FuzzClusterMap: a map that passes Check survives being rewritten, and no getter panics.
func FuzzClusterMap(f *testing.F) {
	f.Add([]byte(smallMap()))
	small := NewClusterMap(ClusterMapHeader{Cluster: uuid.UUID{1}, Epoch: 1, Ranges: 16, Partitions: 1, Members: 1})
	small.SetRange(3, 1, []uint16{0})
	f.Add([]byte(small.AppendNode(ClusterMapNode{Name: "a", Address: "b", SubNQN: "c"}).Seal()))
	f.Add([]byte(NewClusterMap(ClusterMapHeader{Epoch: 1, Ranges: 16}).Seal()))
	f.Fuzz(func(t *testing.T, data []byte) {
		if b := ClusterMap(data); len(b) >= ClusterMapHeaderBytes {
			b.setCRC() // a fuzzer finds no checksums
		}
		b := ClusterMap(data)
		headErr := b.CheckHeader()
		if err := b.Check(); err != nil {
			return
		}
		if headErr != nil {
			t.Fatal(headErr)
		}
		again := NewClusterMap(ClusterMapHeader{Cluster: b.Cluster(), Epoch: b.Epoch(), HashSeed: b.HashSeed(),
			Ranges: b.Ranges(), Partitions: b.Partitions(), Members: b.Members()})
		for r := range b.Ranges() {
			var members []uint16
			for i := range b.MembersOf(r) {
				members = append(members, b.Member(r, i))
			}
			again.SetRange(r, b.ChainEpoch(r), members)
		}
		for i := range b.Partitions() {
			id, node := b.Partition(i)
			again.SetPartition(i, id, node)
		}
		for n := range b.AllNodes() {
			again = again.AppendNode(n)
		}
		again = again.Seal()
		again.SetGeneration(b.Generation())
		if !bytes.Equal(again, b) {
			t.Fatalf("% x reads back as % x", b, again)
		}
	})
}
