package lookup

import "jbofd/internal/nvme"

// The result of a range op may have 1 MiB and 30,000 entries. To clear it for the sums of a Digest, to compute its
// checksum, or to look for an entry takes up to 100 µs. So these chores are done in pieces, those of all range ops in
// turn, and together no more of them between two calls of Machine.Continue than takes some 15 µs.

// chore is what a range op does with its result before it begins, or when it ends.
type chore uint8

const (
	clearing chore = iota // room for sums is cleared, before segments are read
	cutting               // the entries are found that come before the one that is left out
	sealing               // the checksum is computed
)

const (
	// choreBytes is how many bytes are cleared or summed up between two calls of Continue, choreEach how many at once.
	choreBytes, choreEach = 256 << 10, 64 << 10
	// choreEntry is for how many bytes it counts to pass an entry.
	choreEntry = 128
)

// startChore begins a chore of a range op. A short one is done at once.
func (m *Machine) startChore(i int32, c chore) {
	ro := &m.ranges[m.ops[i].ranged]
	ro.chore, ro.at = c, nvme.KVRangeHeaderBytes
	m.links.Push(&m.chores, i)
	if !m.inChores { // one may begin where another one ends
		m.doChores()
	}
}

// doChores does as much as there is time for.
func (m *Machine) doChores() {
	m.inChores = true
	for m.chores.N > 0 && m.choresDone < choreBytes {
		i := m.links.Pop(&m.chores)
		ro := &m.ranges[m.ops[i].ranged]
		ended := false
		switch ro.chore {
		case clearing:
			n := min(choreEach, len(ro.out)-ro.at)
			clear(ro.out[ro.at:][:n])
			m.choresDone += n
			ro.at += n
			ended = ro.at == len(ro.out)
		case cutting:
			ended = m.cutRange(ro)
		case sealing:
			m.choresDone += min(choreEach, len(ro.out))
			ended = ro.sealer.Sum(ro.out, choreEach)
		}
		if ended {
			m.choreEnded(i)
		} else {
			m.links.Push(&m.chores, i)
		}
	}
	m.inChores = false
}

// choreEnded does what comes next for a range op.
func (m *Machine) choreEnded(i int32) {
	ro := &m.ranges[m.ops[i].ranged]
	switch ro.chore {
	case clearing:
		m.list(i)
	case cutting:
		m.seal(i)
	case sealing:
		m.rangeSealed(i)
	}
}
