package replicas

// Late returns how many commands of other nodes were answered before their replicas had done with them.
func (g *Replicas) Late() int {
	g.driver.Lock()
	defer g.driver.Unlock()
	return g.late
}
