package tcp

// Awaited calls f for every slot whose data was asked for with an R2T and has not
// arrived whole, with the bytes that have.
func (c *Conn) Awaited(f func(slot, got int)) {
	for i := range c.slots {
		if s := &c.slots[i]; s.state == slotFetching {
			f(i, s.got)
		}
	}
}
