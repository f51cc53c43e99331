package peers

import "weak"

// Advance lets quarters of Config.Timeout pass for a node.
func (p *Peers) Advance(node string, quarters uint32) {
	n := p.nodes[node]
	now := n.tick.Add(quarters)
	for i := range n.queues {
		n.queues[i].check(now)
	}
}

// Disconnected returns what the goroutine of a node calls when it finds that its connection has ended.
func (p *Peers) Disconnected(node string) func(Loss) { return p.nodes[node].disconnected }

// Gone returns whether nothing refers to what there is of a node now.
func (p *Peers) Gone(node string) func() bool {
	n := weak.Make(p.nodes[node])
	return func() bool { return n.Value() == nil }
}
