package swap

import (
	"encoding/binary"
	"fmt"

	"jbofd/internal/kvstore"
)

// value returns the value of a version of a key.
func value(key int, version int32, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(int(version)*7 + key*13 + i)
	}
	binary.LittleEndian.PutUint32(b, uint32(version))
	return b
}

func keyOf(i int) []byte {
	k := []byte(fmt.Sprintf("%02x", i))
	for len(k) < 1+i%16 {
		k = append(k, byte(i*len(k)))
	}
	return k
}

// submit sends a request; false: there is no room for it.
func (w *world) submit(h *testSource, do kvstore.Op, cond kvstore.Condition, key, size int) bool {
	q := &testReq{key: key, r: kvstore.Request{Op: do, Condition: cond, Tag: h.tag, Key: keyOf(key)}}
	op := &linOp{do: do, cond: cond}
	switch do {
	case kvstore.Put:
		op.version = h.next[key] + 1
		q.r.Value = value(key, op.version, size)
	case kvstore.Get, kvstore.List:
		q.buf = make([]byte, 4*testValue)
		q.r.Value = q.buf
	}
	if do != kvstore.List {
		slot, ok := h.keys[key].invoke(op, w.fail == 0 || do == kvstore.Get)
		if !ok {
			h.keys[key].tidy()
			return false
		}
		q.slot = slot
	}
	// The store's tags are few.
	tag := uint64(0)
	for h.reqs[tag] != nil {
		tag++
	}
	q.r.Tag = tag
	h.reqs[tag] = q
	undo := func() bool {
		delete(h.reqs, tag)
		if do != kvstore.List {
			h.keys[key].nothing(q.slot)
		}
		return false
	}
	switch h.m.Submit(&q.r) {
	case Full:
		return undo()
	case ToStore:
		if !h.store.submit(&q.r, false) {
			return undo()
		}
		if do == kvstore.Put || do == kvstore.Delete {
			h.m.RequestBegan(uint32(tag), q.r.Key)
		}
	}
	if do == kvstore.Put {
		h.next[key]++
	}
	return true
}

// reply checks an answer.
func (w *world) reply(h *testSource, p kvstore.Reply) {
	q := h.reqs[p.Tag]
	if q == nil {
		w.t.Fatalf("a reply to no request: %+v", p)
	}
	delete(h.reqs, p.Tag)
	if q.r.Op == kvstore.List {
		if p.Status == kvstore.OK {
			w.lists++
		}
		return
	}
	l := h.keys[q.key]
	if p.Status == kvstore.DeviceError || p.Status == kvstore.Corrupt {
		if w.fail == 0 || p.Status == kvstore.Corrupt {
			w.t.Fatalf("op %d of key %d: status %d", q.r.Op, q.key, p.Status)
		}
		w.sum.errors++
		l.fail(q.slot)
		l.tidy()
		return
	}
	if p.Status == kvstore.CapacityExceeded {
		if !l.nothing(q.slot) {
			w.t.Fatalf("key %d: a write without effect has had one", q.key)
		}
		return
	}
	met := int32(p.Status)
	switch {
	case q.r.Op == kvstore.Get && p.Status == kvstore.NotFound, q.r.Op == kvstore.Exist && p.Status == kvstore.NotFound:
		met = 0
	case q.r.Op == kvstore.Get:
		met = int32(binary.LittleEndian.Uint32(q.buf))
		if string(q.buf[:p.ValueLen]) != string(value(q.key, met, p.ValueLen)) {
			w.t.Fatalf("key %d: not what was put", q.key)
		}
	case q.r.Op == kvstore.Exist:
		met = 1
	}
	if p.Status == kvstore.OK && q.r.Op == kvstore.Get {
		if v := h.given[[2]int32{int32(q.key), met}]; p.Version == 0 || v != 0 && v != p.Version {
			w.t.Fatalf("key %d: the value has version %d, it was %d", q.key, p.Version, v)
		}
		h.given[[2]int32{int32(q.key), met}] = p.Version
	}
	before := l.values()
	if !l.respond(q.slot, met) {
		w.t.Fatalf("key %d: op %d (condition %d) has met %d, nothing explains that; before it was one of %v", q.key,
			q.r.Op, q.r.Condition, met, before)
	}
	l.tidy()
}

// random runs n requests, up to depth of them at once, and waits for them unless there is a crash.
func (w *world) random(n, depth int) {
	w.t.Helper()
	idle := 0
	for done := 0; !w.crashed; {
		for _, h := range w.sources {
			if w.rng.IntN(400) == 0 {
				h.busy = !h.busy
			}
			h.store.full = w.fickle && (h.store.full != (w.rng.IntN(1500) == 0))
			if done >= n || len(h.reqs) >= depth || w.rng.IntN(3) > 0 {
				continue
			}
			do := [...]kvstore.Op{kvstore.Get, kvstore.Put, kvstore.Put, kvstore.Put, kvstore.Put, kvstore.Exist,
				kvstore.Delete}[w.rng.IntN(7)]
			cond := kvstore.Always
			if do == kvstore.Put && w.rng.IntN(5) == 0 {
				cond = kvstore.Condition(1 + w.rng.IntN(2))
			}
			size := 4 + w.rng.IntN(300)
			switch k := w.rng.IntN(20); {
			case k == 0 || w.long:
				size = 4 + w.rng.IntN(testValue-4)
			case k == 1:
				size = testValue + 1 + w.rng.IntN(testValue) // is returned first
			}
			if w.rng.IntN(2000) == 0 {
				do = kvstore.List
			}
			if w.submit(h, do, cond, w.rng.IntN(w.keys), size) {
				done++
			}
		}
		pending := 0
		for _, h := range w.sources {
			pending += len(h.reqs)
		}
		if done >= n && pending == 0 {
			return
		}
		before := pending
		w.step()
		idle++
		after := 0
		for _, h := range w.sources {
			after += len(h.reqs)
		}
		if after != before {
			idle = 0
		}
		if idle > 400000 {
			w.t.Fatalf("%d requests get no answer\n%s", pending, w.state())
		}
	}
}

func (w *world) state() string {
	out := ""
	for i, h := range w.sources {
		out += fmt.Sprintf("source %d: used %d sweep n %d open %d stage %d area %d manifest %+v toStore %d atStore %d "+
			"load.to %d\n", i, h.m.used, h.m.batch.n, h.m.batch.open, h.m.batch.stage, h.m.batch.area,
			h.m.manifest.dirty, h.m.toStore.N, h.m.atStore, h.m.load.to)
		for _, m := range h.m.batch.members[:h.m.batch.n] {
			e := h.m.entries[m.entry]
			out += fmt.Sprintf("  member %+v appends %d indeterminate %d waiting %d\n", m, e.appends, e.indeterminate,
				e.waiting.N)
		}
		for k := range h.m.areas {
			a := &h.m.areas[k]
			out += fmt.Sprintf("  area %d: entries %d appends %d wanted %d listed %v/%v floor %d acked %d\n", k,
				a.entries, a.appends, a.wanted, a.listed, a.wantListed, a.floor, a.acked)
		}
		for _, q := range h.reqs {
			out += fmt.Sprintf("  request op %d key %d len %d\n", q.r.Op, q.key, len(q.r.Value))
		}
	}
	for i, a := range w.areas {
		out += fmt.Sprintf("area %d: head %d tail %d durable %d in %d io %d failures %d sources %+v\n", i, a.m.head,
			a.m.tail, a.m.durable, len(a.in), len(a.io), a.m.failures, a.m.sources)
	}
	return out
}

// verify gets every key and checks that acknowledged writes are there.
func (w *world) verify() {
	w.t.Helper()
	for _, h := range w.sources {
		for key := range h.keys {
			for !w.submit(h, kvstore.Get, kvstore.Always, key, 0) {
				w.step()
			}
			for n := 0; len(h.reqs) > 0; n++ {
				w.step()
				if n > 400000 {
					w.t.Fatalf("a Get gets no answer\n%s", w.state())
				}
			}
		}
	}
}

// settle waits until no outcome is open: requests that are repeated succeed.
func (w *world) settle() {
	for range 3 {
		w.now += retryNS
		for range 200 {
			w.step()
		}
	}
}
