package peers

// Advance lets quarters of Config.Timeout pass for a node.
func (p *Peers) Advance(node string, quarters uint32) {
	n := p.nodes[node]
	now := n.tick.Add(quarters)
	for i := range n.queues {
		n.queues[i].check(now)
	}
}
