package replicas

// dueHeap has the members that want a turn at some time, as a binary heap with the earliest dueNS first: so a turn
// costs by what is due, whatever the number of ranges. Members know their index, so that their time can be changed.
type dueHeap []*member

// set gives a member its place, after its times have changed.
//
// hot: 0 allocs
func (h *dueHeap) set(m *member) {
	at := m.wakeNS
	if m.retryNS != 0 && (at == 0 || m.retryNS < at) {
		at = m.retryNS
	}
	switch was := m.dueNS; {
	case at == was:
		return
	case at == 0:
		h.remove(m)
	case was == 0:
		m.dueNS = at
		*h = append(*h, m)
		h.up(len(*h)-1, m)
	default:
		m.dueNS = at
		h.up(h.down(m.index, m), m)
	}
}

func (h *dueHeap) remove(m *member) {
	i, last := m.index, len(*h)-1
	moved := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	if m.dueNS, m.index = 0, -1; i < last {
		h.up(h.down(i, moved), moved)
	}
}

// up puts a member at index i, or nearer to the root if its time is earlier than those there.
func (h dueHeap) up(i int, m *member) {
	for i > 0 {
		parent := (i - 1) / 2
		if h[parent].dueNS <= m.dueNS {
			break
		}
		h[i] = h[parent]
		h[i].index = i
		i = parent
	}
	h[i], m.index = m, i
}

// down moves what comes before m up into the hole at index i, and returns where the hole is then.
func (h dueHeap) down(i int, m *member) int {
	for {
		least := 2*i + 1
		if least >= len(h) {
			return i
		}
		if right := least + 1; right < len(h) && h[right].dueNS < h[least].dueNS {
			least = right
		}
		if h[least].dueNS >= m.dueNS {
			return i
		}
		h[i] = h[least]
		h[i].index = i
		i = least
	}
}
