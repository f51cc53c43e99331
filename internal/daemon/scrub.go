package daemon

import (
	"fmt"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/kvstore"
	"jbofd/internal/publish"
	"jbofd/internal/uuid"
)

// ScrubKV changes the rate of the scrub of a key-value namespace, until the namespace is opened again; 0: it pauses.
//
// Errors: no key-value namespace of that UUID is served; a negative rate.
func (n *Node) ScrubKV(name string, bytesPerSec int64) (admin.KVScrub, error) {
	u, err := uuid.Parse(name)
	if err != nil {
		return admin.KVScrub{}, fmt.Errorf("uuid %q: %w", name, err)
	}
	s := n.publisher.Store(u)
	switch {
	case s == nil:
		return admin.KVScrub{}, n.noStore(u)
	case bytesPerSec < 0:
		return admin.KVScrub{}, fmt.Errorf("a rate of %d bytes per second, must be 0 or more", bytesPerSec)
	}
	s.SetScrubRate(bytesPerSec)
	n.log.Info("the rate of the scrub was changed", "subsystem", s.NQN, "nsid", s.NSID, "bytes_per_sec", bytesPerSec)
	a := n.scrubOf(s)
	a.APIVersion = admin.Version
	return a, nil
}

// listScrubs answers the admin API.
func (n *Node) listScrubs() any {
	l := admin.List[admin.KVScrub]{APIVersion: admin.Version, Items: []admin.KVScrub{}}
	for _, s := range n.publisher.Stores() {
		l.Items = append(l.Items, n.scrubOf(s))
	}
	return l
}

func (n *Node) scrubOf(s *publish.Store) admin.KVScrub {
	c := s.ScrubState()
	a := admin.KVScrub{UUID: s.UUID.String(), SubNQN: s.NQN, NSID: s.NSID, BytesPerSec: c.BytesPerSec, Chunk: c.Chunk,
		Chunks: c.Chunks, Passes: c.Passes, Present: passOf(c.Present), Last: passOf(c.Last)}
	if n.cluster != nil {
		a.KnownLosses = n.cluster.host.lossesOf(s.UUID)
	}
	return a
}

func passOf(p kvstore.ScrubPass) admin.KVScrubPass {
	return admin.KVScrubPass{Seconds: p.TookNS / int64(time.Second), Damaged: p.Damaged, UnreadableBlocks: p.Unreadable}
}
