package replicas

import (
	"testing"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/kvstore"
	"jbofd/internal/uuid"
)

// TestADriveFailsUntilAWriteIsDone: a damaged member counts until a write of any member is done that was begun some
// time later. Nothing else that the store answers ends it, and neither does that of a write from before.
func TestADriveFailsUntilAWriteIsDone(t *testing.T) {
	const failedNS = 5e9
	write := func(atNS int64, st kvstore.Status) *storeRequest {
		s := &storeRequest{kind: writeKind, atNS: atNS}
		s.Status = st
		return s
	}
	read := write(failedNS+settleNS, kvstore.OK)
	read.kind = readKind
	batch := write(failedNS+settleNS, kvstore.OK)
	batch.kind = otherKind
	for name, c := range map[string]struct {
		answer *storeRequest
		fails  bool
	}{
		"a write":               {write(failedNS+settleNS, kvstore.OK), false},
		"one that was begun":    {write(failedNS-1, kvstore.OK), true},
		"one that followed it":  {write(failedNS+settleNS-1, kvstore.OK), true},
		"one that fails":        {write(failedNS+settleNS, kvstore.DeviceError), true},
		"one that has no place": {write(failedNS+settleNS, kvstore.CapacityExceeded), true},
		"a read":                {read, true},
		"a batch of a copy":     {batch, true},
	} {
		g := &Replicas{members: []*member{{}, {damaged: true}}}
		if g.isFailing() {
			t.Errorf("%s: a drive fails of which nothing is known", name)
		}
		g.failing.failed(failedNS)
		if !g.isFailing() {
			t.Errorf("%s: a member is damaged, and the drive does not fail", name)
		}
		g.failing.wrote(c.answer)
		if g.isFailing() != c.fails || g.failing.ended == c.fails {
			t.Errorf("%s: the drive fails: %v, to be reported: %v, want %v", name, !c.fails, g.failing.ended, c.fails)
		}
		if c.fails {
			g.members[1].damaged = false
			if g.isFailing() {
				t.Errorf("%s: no member is damaged, and the drive fails", name)
			}
			continue
		}
		if g.failing.failed(failedNS + 7*settleNS); !g.isFailing() {
			t.Errorf("%s: another damage does not count", name)
		}
	}
}

// TestADriveThatWorksForOthersIsReportedSo, at the end of the turn in which that is known.
func TestADriveThatWorksForOthersIsReportedSo(t *testing.T) {
	g := newLeader(16)
	id := uuid.UUID{9}
	g.cfg.ID, g.cfg.Changed = id, func() {}
	g.active.Partitions[0].ID = id
	g.active.Nodes = []view.Node{{Name: "n0"}, {Name: "n1"}}
	g.newest = &cluster.Map{View: g.active.View}
	g.members[3].damaged = true
	g.failing.failed(g.clockNS)
	if g.makeReport(); len(g.Report().Failing) != 1 {
		t.Fatal("the drive fails, and the manager is not told")
	}
	s := &storeRequest{g: g, m: g.members[5], kind: otherKind, atNS: g.clockNS + settleNS}
	s.Status, s.kind = kvstore.OK, writeKind
	g.failing.wrote(s)
	if g.makeReport(); len(g.Report().Failing) != 0 {
		t.Error("the drive works for another member, and the manager is told that it fails")
	}
}
