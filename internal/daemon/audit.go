package daemon

import (
	"context"
	"fmt"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/publish"
	"jbofd/internal/uuid"
)

// auditPoll is how often it is looked whether an audit has ended.
const auditPoll = 20 * time.Millisecond

// AuditKV has every segment of a key-value namespace looked at, and returns what was found when that is done. With
// repair, what is lost is given up. If ctx ends before, the audit goes on.
//
// Errors: no key-value namespace of that UUID is served; errReplicated, for a repair; an audit is running already; the
// daemon is to stop, or the namespace is removed, before the audit has ended.
func (n *Node) AuditKV(ctx context.Context, name string, repair bool) (admin.KVAudit, error) {
	u, err := uuid.Parse(name)
	if err != nil {
		return admin.KVAudit{}, fmt.Errorf("uuid %q: %w", name, err)
	}
	s := n.publisher.Store(u)
	switch {
	case s == nil:
		return admin.KVAudit{}, n.noStore(u)
	case repair && n.isReplicated(u):
		return admin.KVAudit{}, fmt.Errorf("namespace %s is a partition of the cluster: %w", name, errReplicated)
	case !s.Audit(repair):
		return admin.KVAudit{}, fmt.Errorf("an audit of namespace %s is running already, or it is being closed", name)
	}
	log := n.log.With("subsystem", s.NQN, "nsid", s.NSID, "repair", repair)
	log.Info("audit of a key-value namespace begins")
	tick := time.NewTicker(auditPoll)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return admin.KVAudit{}, ctx.Err()
		case <-n.stopping:
			return admin.KVAudit{}, errStopping
		}
		switch a := auditOf(s); {
		case n.publisher.Store(u) != s:
			return a, fmt.Errorf("namespace %s was closed while it was looked at", name)
		case !a.Running && a.Segments > 0:
			log.Info("audit of a key-value namespace ended", "lossy", a.LossySegments, "unreadable",
				a.UnreadableSegments, "repaired", a.RepairedSegments, "lost_keys", a.LostKeys, "freed_chunks",
				a.FreedChunks, "damaged_chunks", a.DamagedChunks)
			a.APIVersion = admin.Version
			return a, nil
		}
	}
}

// listAudits answers the admin API.
func (n *Node) listAudits() any {
	l := admin.List[admin.KVAudit]{APIVersion: admin.Version, Items: []admin.KVAudit{}}
	for _, s := range n.publisher.Stores() {
		l.Items = append(l.Items, auditOf(s))
	}
	return l
}

func auditOf(s *publish.Store) admin.KVAudit {
	a := s.AuditState()
	return admin.KVAudit{UUID: s.UUID.String(), SubNQN: s.NQN, NSID: s.NSID, Running: a.Running, Repair: a.Repairing,
		LookedAt: a.Looked, Segments: a.Segments, LossySegments: a.Lossy, UnreadableSegments: a.Unreadable,
		RepairedSegments: a.Repaired, KnownKeys: a.Known, LostKeys: a.Lost, FreedChunks: a.FreedChunks,
		DamagedChunks: a.DamagedChunks}
}
