package kv

import "jbofd/internal/nvme"

// identities returns how many identities the target keeps, the last version, and how many retries have found theirs.
func (t *target) identities() (kept int, version uint64, retries int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.done), t.version, t.retries
}

// extensions are those that the target offers.
func (t *target) extensions() (bits uint32) {
	if t.credit != 0 {
		bits |= nvme.ExtCredits
	}
	if t.extended {
		bits |= nvme.ExtKV
	}
	return bits
}

// writer is a client that writes a key.
type writer struct {
	client uint64
	key    string
}

// ranged answers a command for a range.
func (c *conn) ranged(e *nvme.SQE, data []byte) {
	answer, result, st := c.s.ranges(e.KVRange(), data)
	if !st.OK() {
		c.reply(e.CID(), st, result)
		return
	}
	c.data(e.CID(), answer, result)
}

// write carries out an extended Store or Delete, of which c.wide is set.
func (c *conn) write(e *nvme.SQE, key string, data []byte) {
	s, h := c.s, (*nvme.KVWriteHeader)(data)
	if err := h.Check(e.Opcode()); err != nil {
		s.t.Error(err)
	}
	id, w := [2]uint64{h.Client(), h.Sequence()}, writer{h.Client(), key}
	if id[0] != 0 && id[1] < s.answered[w] {
		s.t.Errorf("write %d of %q comes when those before %d are answered", id[1], key, s.answered[w])
	}
	s.answered[w] = max(s.answered[w], h.Answered())
	if h.Flags()&nvme.KVRetry != 0 {
		if s.forgetful {
			c.reply(e.CID(), nvme.KVIndeterminate|nvme.DNR, 0)
			return
		}
		if v, ok := s.done[id]; ok {
			s.retries++
			c.reply(e.CID(), 0, v)
			return
		}
	} else if _, twice := s.done[id]; id[0] != 0 && twice {
		s.t.Errorf("identity %x comes twice, not as a retry", id)
	}
	value, a := data[nvme.KVWriteHeaderSize:], s.about[key]
	_, exists := s.values[key]
	st := nvme.Success
	switch cond := h.Condition(); {
	case cond == nvme.KVIfAbsent && exists:
		st = nvme.KeyExists
	case cond == nvme.KVIfPresent && !exists:
		st = nvme.KeyDoesNotExist
	case cond == nvme.KVIfVersion && h.Version() != a.version:
		st = nvme.KVVersionMismatch
	case cond == nvme.KVIfNewer && h.Version() <= a.version:
		st = nvme.KVSuperseded
	case e.Opcode() == nvme.CmdKVXStore && !exists && s.room > 0 && len(s.keys) >= s.room:
		st = nvme.CapacityExceeded
	}
	if st != nvme.Success {
		c.reply(e.CID(), st|nvme.DNR, a.version)
		return
	}
	v := s.version + 1
	switch {
	case h.Condition() == nvme.KVIfNewer:
		v, s.version = h.Version(), max(s.version, h.Version()-1)
		fallthrough
	default:
		if e.Opcode() == nvme.CmdKVXStore {
			s.store(key, value)
			s.about[key] = about{v, h.Expires()}
		} else if exists {
			s.remove(key)
			s.version++
		} else {
			v = 0
		}
	}
	if id[0] != 0 {
		s.done[id], s.keep = v, h.Keep()
	}
	c.reply(e.CID(), 0, v)
}
