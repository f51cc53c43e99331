package node

import (
	"encoding/binary"

	"jbofd/internal/lab"
	"jbofd/internal/nvme"
)

// value fills b with the pseudo-random bytes that a write with this stamp stores. They follow from the stamp alone, so
// that a read identifies the write that it returns.
func value(b []byte, stamp uint64) {
	x := stamp | 1<<63
	var word [8]byte
	for i := 0; i < len(b); i += 8 {
		x = x*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(word[:], x^x>>29)
		copy(b[i:], word[:])
	}
}

// isValue reports whether got is the beginning of the value that w has stored, and n the length of that value. got may
// also be longer than the value; only the first n bytes count.
func isValue(got []byte, n int, w *write) bool {
	if w.stamp == 0 || w.size != n {
		return false
	}
	want := make([]byte, min(n, len(got)))
	value(want, w.stamp)
	return string(want) == string(got[:len(want)])
}

// key issues a random command for a random key of a namespace, and checks the result against the key's register.
func (h *Host) key(p *lab.Proc, q *hostQueue, ns *namespace) {
	i := h.rng.IntN(len(ns.registers))
	r := ns.registers[i]
	var sqe nvme.SQE
	sqe.SetNSID(ns.nsid)
	k := sqe.KV()
	k.SetKey([]byte(r.name))
	switch n := h.rng.IntN(20); {
	case n < 7:
		sqe.SetOpcode(nvme.CmdKVRetrieve)
		h.retrieve(p, q, sqe, ns, r)
	case n < 9:
		sqe.SetOpcode(nvme.CmdKVExist)
		h.exist(p, q, sqe, ns, r)
	case n < 17:
		sqe.SetOpcode(nvme.CmdKVStore)
		if h.rng.IntN(3) == 0 {
			k.SetOptions([]uint8{nvme.KVStoreMustExist, nvme.KVStoreMustNotExist}[h.rng.IntN(2)])
		}
		h.store(p, q, sqe, ns, r, [...]int{1, 100, 300, 1000, 2000, h.rng.IntN(6000) + 1}[h.rng.IntN(6)])
	default:
		sqe.SetOpcode(nvme.CmdKVDelete)
		h.store(p, q, sqe, ns, r, 0)
	}
}

func (h *Host) retrieve(p *lab.Proc, q *hostQueue, sqe nvme.SQE, ns *namespace, r *register) {
	buf := make([]byte, [...]int{8, 512, maxValueBytes}[h.rng.IntN(3)])
	sqe.KV().SetLenBytes(uint32(len(buf)))
	start := h.lab.Sim.Now()
	began := r.open(start)
	o := h.io(p, q, sqe, buf, true)
	r.close(began)
	switch {
	case o.ok():
		n := int(uint32(o.result))
		if err := r.read(start, h.lab.Sim.Now(), func(w *write) bool { return isValue(buf, n, w) }); err != nil {
			h.lab.Violation("%s: a Retrieve of %s from %.3f returns %d bytes, %x: %v", h.name, r.name,
				float64(start)/1e3, n, buf[:min(n, 16, len(buf))], err)
		}
	case !o.lost && o.status.Code() == nvme.KeyDoesNotExist:
		h.missing(r, start, "Retrieve", nil)
	default:
		h.expect(ns, o, "Retrieve of %s", r.name)
	}
}

// missing checks the result of a command that has found no key: it reports a violation unless the key may have been
// absent at some time between start and now. what names the command in the report. except, if not nil, is the command's
// own write, which cannot explain the command's result.
func (h *Host) missing(r *register, start int64, what string, except *write) {
	if err := r.read(start, h.lab.Sim.Now(), func(w *write) bool { return w.stamp == 0 && w != except }); err != nil {
		h.lab.Violation("%s: a %s of %s from %.3f finds no such key: %v", h.name, what, r.name, float64(start)/1e3, err)
	}
}

// present is the counterpart of missing for a command that has found its key but has not read the value: it reports a
// violation unless the key may have existed at some time between start and now.
func (h *Host) present(r *register, start int64, what string, except *write) {
	may := r.possible(start, h.lab.Sim.Now())
	if r.loose {
		may = r.all
	}
	for _, w := range may {
		if w.stamp != 0 && w != except {
			return
		}
	}
	if r.unknown(start) {
		return
	}
	h.lab.Violation("%s: a %s of %s from %.3f finds the key: all writes: %s", h.name, what, r.name, float64(start)/1e3,
		list(r.writes))
}

func (h *Host) exist(p *lab.Proc, q *hostQueue, sqe nvme.SQE, ns *namespace, r *register) {
	start := h.lab.Sim.Now()
	began := r.open(start)
	o := h.io(p, q, sqe, nil, false)
	r.close(began)
	switch {
	case o.ok():
		h.present(r, start, "Exist", nil)
	case !o.lost && o.status.Code() == nvme.KeyDoesNotExist:
		h.missing(r, start, "Exist", nil)
	default:
		h.expect(ns, o, "Exist of %s", r.name)
	}
}

// store runs a Store of size bytes, or a Delete if size is 0, and records it as a write of the register. It drops the
// write again if the status says that nothing was written.
func (h *Host) store(p *lab.Proc, q *hostQueue, sqe nvme.SQE, ns *namespace, r *register, size int) {
	start := h.lab.Sim.Now()
	began := r.open(start)
	defer r.close(began)
	what, stamp := "Delete", uint64(0)
	var data []byte
	if size > 0 {
		what, stamp = "Store", h.lab.stamp()
		data = make([]byte, size)
		value(data, stamp)
		sqe.KV().SetLenBytes(uint32(size))
	}
	w := r.begin(stamp, size, start, h.name)
	o := h.io(p, q, sqe, data, false)
	options := sqe.KV().Options()
	switch {
	case o.ok():
		if size > 0 && options&nvme.KVStoreMustExist != 0 {
			h.present(r, start, what, w)
		}
		if options&nvme.KVStoreMustNotExist != 0 {
			h.missing(r, start, what, w)
		}
	case o.lost:
	case o.status.Code() == nvme.KeyDoesNotExist && options&nvme.KVStoreMustExist != 0:
		h.missing(r, start, what, w)
		r.drop(w)
		return
	case o.status.Code() == nvme.KeyExists && options&nvme.KVStoreMustNotExist != 0:
		h.present(r, start, what, w)
		r.drop(w)
		return
	case o.status.Code() == nvme.CapacityExceeded && size > 0:
		r.drop(w)
		return
	default:
		h.expect(ns, o, "%s of %s", what, r.name)
	}
	h.ended(q, o, r, w, true)
}
