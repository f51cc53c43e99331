package partition

// Take empties the batch and returns its first Request, the others linked by Next in the order in which
// they were added: for those who stand in for a Partition.
func (b *Batch) Take() (first *Request) {
	for r := b.newest; r != nil; {
		r.Next = first
		first = r
		r = r.next
	}
	*b = Batch{}
	return first
}
