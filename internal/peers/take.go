package peers

// Take empties the batch and returns its first command; Next links the others, in order. Test doubles of Peers use it.
func (b *Batch) Take() (first *Command) {
	last := &first
	for n := b.chain.Take(); n != nil; {
		c := n.Item
		n = n.Detach()
		c.Next = nil
		*last, last = c, &c.Next
	}
	return first
}
