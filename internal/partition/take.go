package partition

// Take empties the batch and returns its first Request; Next links the others in the order in which they were added.
// Test doubles of a Partition use it.
func (b *Batch) Take() (first *Request) {
	for n := b.chain.Newest(); n != nil; n = n.Older() {
		n.Item.Next = first
		first = n.Item
	}
	b.chain.Take()
	return first
}
