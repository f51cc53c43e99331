package swap

import (
	"encoding/binary"
	"hash/crc32"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// TestAnAreaOfVersion1IsReadAndUpgraded: a record that a program of version 1 has written is found. It has a version
// when it is read. The area takes new records when both superblocks say that it has them.
func TestAnAreaOfVersion1IsReadAndUpgraded(t *testing.T) {
	cfg := AreaConfig{AreaBytes: format.SwapLogStart + 64<<10, BlockSize: testBlock, GroupBytes: testGroup,
		MaxValueBytes: testValue, FUA: true}
	disk := make([]byte, cfg.AreaBytes)
	castagnoli := crc32.MakeTable(crc32.Castagnoli)
	if err := FormatArea(cfg, uuid.UUID{5}, 77, func(offset units.ExtentOffset, b []byte) error {
		copy(disk[offset:], b)
		s := disk[offset:][:len(b)]
		s[8] = 1 // the version
		binary.LittleEndian.PutUint32(s[12:], crc32.Update(crc32.Update(0, castagnoli, s[:12]), castagnoli, s[16:]))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	super := format.AreaSuperblock(disk[:format.SuperblockBytes])
	if err := super.Check(cfg.AreaBytes); err != nil || super.Version() != 1 {
		t.Fatalf("%v, version %d", err, super.Version())
	}
	log, source := format.NewSwapLog(super), uuid.UUID{7}
	g := format.SwapGroup(disk[format.SwapLogStart:][:testBlock])
	const at = format.SwapGroupHeaderBytes
	r := format.SwapRecord(g[at:])
	r.SetKind(format.SwapPut)
	r.SetKey([]byte("key"))
	r.SetSource(source)
	r.SetValueLen(5)
	r.SetAt(at)
	r.SetPlace(at)
	r[4] = 'R'
	copy(r[56:], "hello")
	binary.LittleEndian.PutUint32(r, crc32.Update(log.Seed(at), castagnoli, r[4:61]))
	g.SetLengthBytes(testBlock)
	g.SetRecords(1)
	g.Seal(log.Seed(0))

	a, err := OpenArea(cfg, readFrom(disk))
	if err != nil {
		t.Fatal(err)
	}
	attachment, err := a.Attach(source)
	if err != nil || len(attachment.Records) != 1 || attachment.Records[0].Version != 0 {
		t.Fatalf("%v, %+v, want one record without a version", err, attachment)
	}
	part := make([]byte, sourceBytes)
	if err := FormatManifest(source, func(offset units.ExtentOffset, b []byte) error {
		copy(part[offset:], b)
		return nil
	}, heap); err != nil {
		t.Fatal(err)
	}
	for i, place := range format.SwapManifestOffsets {
		m := format.SwapManifest(part[place:][:format.SwapManifestBytes])
		m.AddArea(uuid.UUID{5}, 0)
		m.SetGeneration(uint64(1 + i))
		m.Seal()
	}
	manifest, err := LoadManifest(readFrom(part), heap)
	if err != nil {
		t.Fatal(err)
	}
	store := &testStore{clock: 40}
	src, err := NewSource(SourceConfig{Manifest: manifest, UUID: source, BlockSize: testBlock, FUA: true, Keys: 64,
		Requests: 16, MaxValueBytes: testValue, Versions: store,
		Areas: []AreaRef{{UUID: a.UUID(), Log: a.Log(), BlockSize: testBlock, Attachment: attachment}}})
	if err != nil {
		t.Fatal(err)
	}
	var act Actions
	buf := make([]byte, 100)
	if v := src.Submit(&kvstore.Request{Op: kvstore.Get, Tag: 3, Key: []byte("key"), Value: buf}); v != Taken {
		t.Fatalf("verdict %d", v)
	}
	src.Turn(1, &act)
	for _, q := range act.IOs {
		if q.Area == 0 {
			copy(q.Buf, disk[q.Offset:])
		}
		src.Complete(q.Tag, nil)
	}
	src.Turn(2, &act)
	if len(act.Replies) != 1 || act.Replies[0].Version != 41 || string(buf[:act.Replies[0].ValueLen]) != "hello" {
		t.Errorf("%+v, %q, want version 41 and hello", act.Replies, buf[:5])
	}

	put := Append{Source: attachment.Source, Kind: format.SwapPut, Key: []byte("new"), Value: []byte("x"), Version: 99}
	var out AreaActions
	for n := 0; ; n++ {
		a.Submit(&put)
		a.Turn(int64(n), &out)
		if len(out.Outcomes) == 0 || out.Outcomes[0].Result != Refused {
			break
		}
		if n > 2 {
			t.Fatal("the area takes nothing")
		}
		for _, q := range out.IOs {
			copy(disk[q.Offset:], q.Buf)
			a.Complete(q.Tag, nil)
		}
		out = AreaActions{}
	}
	for i := range 2 {
		s := format.AreaSuperblock(disk[i*format.SuperblockBytes:][:format.SuperblockBytes])
		if err := s.Check(cfg.AreaBytes); err != nil || s.Version() != format.AreaVersion {
			t.Errorf("superblock %d: %v, version %d", i, err, s.Version())
		}
	}
}
