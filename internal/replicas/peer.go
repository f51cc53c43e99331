package replicas

import (
	"fmt"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/cluster/view"
	"jbofd/internal/crrs"
	"jbofd/internal/nvme"
	"jbofd/internal/peers"
	"jbofd/internal/replica"
	"jbofd/internal/turn"
)

// peerRequest is a command of a replica to another node.
type peerRequest struct {
	peers.Command
	g  *Replicas
	m  *member
	to crrs.Peer
	// buf has the value of a Ship, sums the answer to a Compare.
	buf  bufpool.Buf
	sums []byte
	node turn.Node[peerRequest]
	next *peerRequest
	// sentNS is when it was sent, on Config.Clock.
	sentNS int64
}

// PeerDone implements peers.Sink.
func (p *peerRequest) PeerDone(c *peers.Command) (kick bool) { return p.g.answered.Push(&p.node) }

// Kick implements peers.Sink.
func (p *peerRequest) Kick() { p.g.driver.Run() }

// send sends a command to another node. It allocates when there are more than before.
//
// hot: 0 allocs
func (g *Replicas) send(m *member, c *replica.Command) {
	p := g.freePeer
	if g.peerSpares.take(); p == nil {
		p = &peerRequest{g: g}
		p.Command.Sink, p.node.Item = p, p
	} else {
		g.freePeer = p.next
	}
	p.m, p.to, p.next, p.sentNS = m, c.To, nil, g.clockNS
	p.To, p.SQE, p.Tag, p.Data = view.PartitionID(c.To), c.SQE, c.Tag, c.Data
	p.SQE.KVReplica().SetSender(uint16(g.self))
	switch c.SQE.Opcode() {
	case nvme.CmdKVFetch:
		p.Data = c.Buf
	case nvme.CmdKVShip:
		buf, ok := g.cfg.Pool.Get(g.account, nvme.KVReadHeaderSize+c.Room)
		if !ok {
			g.recycle(p)
			g.touch(m).Completed(c.Tag, nvme.NamespaceNotReady, 0, nil)
			return
		}
		p.buf, p.Data = buf, buf.B[:nvme.KVReadHeaderSize+c.Room]
	case nvme.CmdKVCompare:
		n := int(c.SQE.KVReplica().LenBytes())
		if cap(p.sums) < n {
			p.sums = make([]byte, n)
		}
		p.Data = p.sums[:n]
	}
	g.atPeers++
	g.toPeers.Add(&p.Command)
}

func (g *Replicas) recycle(p *peerRequest) {
	if !p.buf.IsZero() {
		g.cfg.Pool.Put(p.buf)
		p.buf = bufpool.Buf{}
	}
	p.m, p.Data, p.next = nil, nil, g.freePeer
	g.freePeer = p
	g.peerSpares.n++
}

// takeAnswer takes the outcome of a command to its replica.
func (g *Replicas) takeAnswer(p *peerRequest) {
	g.atPeers--
	if g.cfg.Observe != nil {
		n := len(p.Data)
		if p.Lost {
			n = 0
		} else if p.SQE.Opcode() != nvme.CmdKVForward {
			n = min(p.Received, n)
		}
		took := g.clockNS - p.sentNS
		if !p.tells() {
			took = Untimed
		}
		g.cfg.Observe(p.SQE.Opcode(), n, took, p.Lost)
	}
	switch m := p.m; {
	case g.closed:
	case p.Lost:
		g.touch(m).Failed(p.Tag)
		g.retryLater(m, p.to)
	default:
		g.noteRefusal(p)
		g.touch(m).Completed(p.Tag, p.Status, p.Result, p.Data[:min(p.Received, len(p.Data))])
	}
	g.recycle(p)
}

// refusal is a command that another node has refused for good: where, what, and why.
type refusal struct {
	to     crrs.Peer
	opcode uint8
	status nvme.Status
}

// refusalPause is how long after a line in the log about a refusal there may be another one.
const refusalPause = int64(time.Minute)

// noteRefusal logs a refusal for which the protocol has no rule: the same command would be refused again and again, and
// the chain would wait for it, or the copy. Nodes that are configured alike refuse nothing in that way.
func (g *Replicas) noteRefusal(p *peerRequest) {
	if p.Status&nvme.DNR == 0 {
		return
	}
	switch p.Status.Code() {
	case nvme.KVWrongView, nvme.KeyDoesNotExist, nvme.UnrecoveredReadError:
		return
	}
	r := refusal{p.to, p.SQE.Opcode(), p.Status}
	if next, known := g.refusals[r]; known && g.clockNS < next {
		return
	}
	if g.refusals == nil || len(g.refusals) >= maxRefusals {
		g.refusals = map[refusal]int64{}
	}
	g.refusals[r] = g.clockNS + refusalPause
	node := ""
	if g.active != nil && int(p.to) < len(g.active.Partitions) {
		node = g.active.Nodes[g.active.Partitions[p.to].Node].Name
	}
	g.cfg.Log.Error("a node refuses a command of a chain for good, which is repeated: are limits.mdts and the sizes "+
		"of the partitions such that all nodes take the same longest value?", "peer", node, "partition",
		g.cfg.ID.String(), "range", p.m.number, "opcode", fmt.Sprintf("%#02x", r.opcode), "status", r.status.String())
}

// maxRefusals bounds the kinds of refusals that are remembered.
const maxRefusals = 64

// tells reports whether the time that a command took says how long the other node needs for what it was asked: it was
// not refused, and a Forward was answered because its own write is committed, not to make room for others.
func (p *peerRequest) tells() bool {
	if p.Lost || p.Status.Code() != nvme.Success && p.Status.Code() != nvme.KeyDoesNotExist {
		return false
	}
	return p.SQE.Opcode() != nvme.CmdKVForward || p.Result&^nvme.KVChainFull >= p.SQE.KVReplica().Sequence()
}

// retryLater has a replica send again what was lost.
func (g *Replicas) retryLater(m *member, to crrs.Peer) {
	for _, known := range m.lost {
		if known == to {
			return
		}
	}
	m.lost = append(m.lost, to)
	if m.retryNS == 0 {
		m.retryNS = g.clockNS + retryLostNS // the member is touched, so that finish puts it where it belongs
	}
}

// reach has replicas send to a node what was lost on the way.
func (g *Replicas) reach(node string) {
	if g.active == nil || g.closed {
		return
	}
	for _, m := range g.members {
		for _, e := range g.active.Chains[m.number] {
			if g.active.Nodes[g.active.Partitions[e.Partition].Node].Name == node {
				g.touch(m).Reconnected(crrs.Peer(e.Partition))
			}
		}
	}
}
