package node

import (
	"fmt"
	"slices"
	"strings"
)

// The model of a block or a key is a register: the writes that a read may still return. A read is correct if it returns
// a write that began before the read ended and that no other write had certainly replaced before the read began. A
// write replaces another one if it began after the other one had ended and is known to have taken effect: it was
// acknowledged, or a read has returned it.
//
// A write without a response (its connection was lost) has no end: it may take effect at any time until it is fenced.
// Once the target has reported that no command of the controller is in flight, or has let the host connect again, a
// write that has not taken effect must never do so. A target that does not fence is detected by a read that returns
// such a write after a newer one was acknowledged.

// never is later than any virtual time.
const never = int64(1) << 62

// write is one write of a register.
type write struct {
	// stamp identifies the write; it is never drawn twice. 0 stands for zeroes, or for a key that does not exist.
	stamp uint64
	size  int // of a value in bytes
	// The write takes effect between startNS and endNS. By effectNS it is known to have taken effect.
	startNS, endNS, effectNS int64
	// durableNS is when the write became durable: from then on it survives a loss of power.
	durableNS int64
	// choice is the number of a set of writes. Exactly one write of the set has survived a loss of power; which one is
	// not known before a read. 0: the write is in no set.
	choice uint64
	by     string
	// copy is the same write in the register of the namespace that has taken this one's place; see renew. dropped: it
	// has not taken effect and never will.
	copy    *write
	dropped bool
}

// end says that the write takes effect before now, or never.
func (w *write) end(nowNS int64) {
	for ; w != nil; w = w.copy {
		w.endNS = min(w.endNS, nowNS)
	}
}

func (w *write) String() string {
	s := fmt.Sprintf("%#x", w.stamp)
	if w.size > 0 {
		s += fmt.Sprintf(" (%d bytes)", w.size)
	}
	at := func(ns int64) string {
		if ns >= never {
			return "?"
		}
		return fmt.Sprintf("%.3f", float64(ns)/1e3)
	}
	return fmt.Sprintf("%s by %s [%s, %s] effect %s durable %s", s, w.by, at(w.startNS), at(w.endNS), at(w.effectNS),
		at(w.durableNS))
}

// register is a block or a key.
type register struct {
	name   string
	writes []*write
	reads  map[*int64]bool // start times of the reads in progress
	// deleted: the namespace was deleted, so that what is read belongs to another one.
	deleted bool
	// harmedNS is when the drive last corrupted the data, if harmed: the data may then be anything. A write heals them.
	// scarNS is harmedNS until a later write is durable: a loss of power may bring the harm back. 0: not so.
	harmed           bool
	harmedNS, scarNS int64
	// sureNS is when such a write has healed the data, or the node has started: what reads have returned that began
	// before is not known.
	sureNS int64
	// loose: the store was damaged and has been opened again since: what it returns may be of any time. all are the
	// writes of which it may be, of keys only.
	loose bool
	all   []*write
}

func newRegister(name string) *register {
	return &register{name: name, writes: []*write{{by: "format"}}, reads: map[*int64]bool{}}
}

// begin adds a write that begins now.
func (r *register) begin(stamp uint64, size int, nowNS int64, by string) *write {
	w := &write{stamp: stamp, size: size, startNS: nowNS, endNS: never, effectNS: never, durableNS: never, by: by}
	r.writes = append(r.writes, w)
	if size > 0 {
		r.all = append(r.all, w)
	}
	return w
}

// renew returns the register of a new namespace in place of this one's, which was deleted. A write that has no end yet
// may have reached the target after that.
func (r *register) renew() *register {
	r.deleted = true
	n := newRegister(r.name)
	for _, w := range r.writes {
		if w.endNS == never {
			w.copy = &write{stamp: w.stamp, size: w.size, startNS: w.startNS, endNS: never, effectNS: never,
				durableNS: never, by: w.by}
			n.writes = append(n.writes, w.copy)
			n.all = append(n.all, w.copy)
		}
	}
	return n
}

// harm records that the drive has corrupted the data.
func (r *register) harm(nowNS int64) { r.harmed, r.harmedNS, r.scarNS = true, nowNS, nowNS }

// unknown reports that a read from startNS on may have returned anything.
func (r *register) unknown(startNS int64) bool {
	return r.harmed || r.deleted || r.sureNS != 0 && startNS <= r.sureNS
}

// acknowledge records that a write was answered with success.
func (r *register) acknowledge(w *write, nowNS int64, durable bool) {
	w.end(nowNS)
	w.effectNS = min(w.effectNS, nowNS)
	if r.harmed && w.startNS > r.harmedNS {
		r.harmed, r.sureNS = false, nowNS
	}
	if durable {
		r.durable(w, nowNS)
	}
	r.prune(nowNS)
}

// durable records that a write is durable.
func (r *register) durable(w *write, nowNS int64) {
	w.durableNS = min(w.durableNS, nowNS)
	if w.startNS > r.scarNS {
		r.scarNS = 0
	}
}

// fail records that a write has failed: it has taken effect before now, as a whole, or never will. Which is not known.
func (r *register) fail(w *write, nowNS int64) { w.end(nowNS) }

// drop removes a write that has not taken effect and never will.
func (r *register) drop(w *write) {
	for c := w.copy; c != nil; c = c.copy {
		c.dropped = true
	}
	r.writes = slices.DeleteFunc(r.writes, func(o *write) bool { return o == w })
}

// replaced reports whether another write has certainly replaced w before beforeNS.
func (r *register) replaced(w *write, beforeNS int64) bool {
	for _, o := range r.writes {
		if o != w && o.startNS > w.endNS && o.effectNS < beforeNS {
			return true
		}
	}
	return false
}

// possible returns the writes that a read from startNS to endNS may return.
func (r *register) possible(startNS, endNS int64) (all []*write) {
	for _, w := range r.writes {
		if w.startNS <= endNS && !w.dropped && !r.replaced(w, startNS) {
			all = append(all, w)
		}
	}
	return all
}

// open adds a read that begins now. Until it is closed, prune keeps the writes that the read may return.
func (r *register) open(nowNS int64) (began *int64) {
	began = new(int64)
	*began = nowNS
	r.reads[began] = true
	return began
}

func (r *register) close(began *int64) { delete(r.reads, began) }

// read checks the result of a read from startNS to endNS. is reports whether the result is that of a write w. If only
// one possible write matches, read learns from it that w has taken effect. If none matches, it returns an error.
func (r *register) read(startNS, endNS int64, is func(w *write) bool) error {
	if r.unknown(startNS) {
		return nil
	}
	if r.loose {
		if is(&write{}) || slices.ContainsFunc(r.all, is) {
			return nil
		}
		return fmt.Errorf("it was never stored; want one of %s", list(r.all))
	}
	may := r.possible(startNS, endNS)
	i := slices.IndexFunc(may, is)
	if i < 0 {
		return fmt.Errorf("want one of %s; all writes: %s", list(may), list(r.writes))
	}
	for _, w := range may[i+1:] {
		if is(w) {
			return nil // several writes of zeroes, or Deletes, match: the read does not tell which one it has seen
		}
	}
	w := may[i]
	w.effectNS = min(w.effectNS, endNS)
	if w.choice != 0 {
		choice := w.choice
		w.choice = 0
		r.writes = slices.DeleteFunc(r.writes, func(o *write) bool { return o.choice == choice })
	}
	return nil
}

func list(all []*write) string {
	var s []string
	for i, w := range all {
		if i >= 12 {
			s = append(s, fmt.Sprintf("and %d more", len(all)-i))
			break
		}
		s = append(s, w.String())
	}
	return "{" + strings.Join(s, "; ") + "}"
}

// prune removes the writes that no read in progress and no later read can return, and that no loss of power can bring
// back.
func (r *register) prune(nowNS int64) {
	oldest := nowNS
	for began := range r.reads {
		oldest = min(oldest, *began)
	}
	keep := r.writes[:0:0]
	for _, w := range r.writes {
		if !r.replaced(w, oldest) || !r.replacedForGood(w) {
			keep = append(keep, w)
		}
	}
	r.writes = keep
}

// replacedForGood reports whether a durable write has replaced w, so that a loss of power cannot bring w back.
func (r *register) replacedForGood(w *write) bool {
	for _, o := range r.writes {
		if o != w && o.startNS > w.endNS && o.durableNS < never && o.effectNS < never {
			return true
		}
	}
	return false
}

// flushed records that a flush that began at startNS has ended: the writes that had taken effect by then are durable.
func (r *register) flushed(startNS, nowNS int64) {
	for _, w := range r.writes {
		if w.effectNS <= startNS {
			r.durable(w, nowNS)
		}
	}
	r.prune(nowNS)
}

// fence records that a write that began before now and has not taken effect yet never will.
func (r *register) fence(nowNS int64) {
	for _, w := range r.writes {
		w.end(nowNS)
	}
}

// crash records the end of the node's process: no write that has not taken effect yet ever will. If power is set, the
// drives have also lost some of the writes that were not durable. Any write that no durable one has replaced may then
// be the one that has survived, so these become a set with the number choice.
func (r *register) crash(nowNS int64, power bool, choice uint64) {
	r.fence(nowNS)
	r.sureNS = nowNS
	if !power {
		return
	}
	if r.scarNS != 0 {
		r.harm(nowNS)
	}
	keep := r.writes[:0:0]
	for _, w := range r.writes {
		if !r.replacedForGood(w) {
			keep = append(keep, w)
		}
	}
	r.writes = keep
	for _, w := range r.writes {
		w.startNS, w.endNS, w.effectNS, w.durableNS, w.choice = nowNS, nowNS, never, never, choice
	}
	if len(r.writes) == 1 {
		r.writes[0].effectNS, r.writes[0].durableNS, r.writes[0].choice = nowNS, nowNS, 0
	}
}
