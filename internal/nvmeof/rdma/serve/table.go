package serve

// table finds connections by the number of their queue pair: open addressing with linear
// probing, at most half full.
type table struct {
	keys  []uint32
	conns []*conn
	n     int
}

func (t *table) init() { t.keys, t.conns, t.n = make([]uint32, 16), make([]*conn, 16), 0 }

// at is where the search for qp begins.
func (t *table) at(qp uint32) int { return int(qp*0x9E3779B1>>8) & (len(t.keys) - 1) }

// get returns the connection of a queue pair, or nil.
//
// hot: 0 allocs
func (t *table) get(qp uint32) *conn {
	for i := t.at(qp); t.conns[i] != nil; i = (i + 1) & (len(t.keys) - 1) {
		if t.keys[i] == qp {
			return t.conns[i]
		}
	}
	return nil
}

// put adds a connection.
func (t *table) put(qp uint32, c *conn) {
	if 2*(t.n+1) > len(t.keys) {
		old := *t
		t.keys, t.conns, t.n = make([]uint32, 2*len(old.keys)), make([]*conn, 2*len(old.keys)), 0
		for i, c := range old.conns {
			if c != nil {
				t.put(old.keys[i], c)
			}
		}
	}
	i := t.at(qp)
	for t.conns[i] != nil {
		i = (i + 1) & (len(t.keys) - 1)
	}
	t.keys[i], t.conns[i] = qp, c
	t.n++
}

// remove forgets the connection of a queue pair.
func (t *table) remove(qp uint32) {
	mask := len(t.keys) - 1
	i := t.at(qp)
	for t.conns[i] == nil || t.keys[i] != qp {
		if t.conns[i] == nil {
			return
		}
		i = (i + 1) & mask
	}
	t.conns[i] = nil
	t.n--
	// What was put behind it because it was there moves up.
	for j := (i + 1) & mask; t.conns[j] != nil; j = (j + 1) & mask {
		if home := t.at(t.keys[j]); (j-home)&mask >= (j-i)&mask {
			t.keys[i], t.conns[i] = t.keys[j], t.conns[j]
			t.conns[j] = nil
			i = j
		}
	}
}

// each calls f for every connection.
func (t *table) each(f func(*conn)) {
	for _, c := range t.conns {
		if c != nil {
			f(c)
		}
	}
}
