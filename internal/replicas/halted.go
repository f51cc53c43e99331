package replicas

import (
	"math"

	"jbofd/internal/cluster/view"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// halted counts the objects that the partition has of each halted range, as a member or not. When an operator gives up
// the data of the last copies, the partition with the most objects is to serve the range: view.AcceptLoss. One that has
// left the chain a minute before may have nearly all.
//
// A halted range gets no writes, so that one count is enough for each epoch of the chain.
type halted struct {
	// counts are those of the ranges that are halted, by number; todo are those to be counted, the first one first.
	counts map[int]haltedCount
	todo   []int
	// asked: the store has a request, about the first one of todo from a cursor on. dueNS is when the next one may be
	// made, because it could not do the last one.
	asked   bool
	dueNS   int64
	from    nvme.KVCursor
	value   [nvme.KVRangeHeaderBytes + nvme.KVTotalsBytes]byte
	request kvstore.Request
}

// mostHalted is for how many halted ranges of which it is not a member a partition reports its count. Then all reports
// of a node with a dozen partitions fit into cluster.MaxMessageBytes.
const mostHalted = 4096

// haltedCount is how many objects there are of a range whose chain has that epoch. queued: it is among those to count.
type haltedCount struct {
	chainEpoch uint32
	queued     bool
	objects    uint64
}

// seeHalted notes whether a range is halted.
func (g *Replicas) seeHalted(number int, c view.Chain) {
	h := &g.halted
	n, known := h.counts[number]
	switch is := g.joined && len(c) > 0 && c.Halted(); {
	case is && (!known || n.chainEpoch != g.active.ChainEpochs[number]):
		if h.counts == nil {
			h.counts = map[int]haltedCount{}
		}
		if !n.queued {
			h.todo = append(h.todo, number)
		}
		n.chainEpoch, n.queued = g.active.ChainEpochs[number], true
		h.counts[number] = n
	case !is && known:
		delete(h.counts, number)
	}
}

// countHalted asks the store for the count of the next range, if there is one.
//
// hot: 0 allocs
func (g *Replicas) countHalted() {
	h := &g.halted
	for len(h.todo) > 0 && !h.asked && g.clockNS >= h.dueNS {
		number := h.todo[0]
		if _, is := h.counts[number]; !is { // not any more
			h.todo, h.from = h.todo[1:], nvme.KVCursor{}
			continue
		}
		first, last := g.active.Range(number)
		h.asked = true
		h.request = kvstore.Request{Op: kvstore.Count, Background: true, Value: h.value[:],
			Key: h.from.Key[:h.from.KeyLen], Range: kvstore.Range{First: first, Last: last,
				From: max(first, h.from.Position)}}
		g.store(nil, &h.request).of = haltedRanges
	}
}

// countAgainNS is the delay before the store is asked again if it could not answer.
const countAgainNS = 100e6

// nextCountNS is when to ask the store again; 0: it has something to do, or there is nothing to ask.
func (g *Replicas) nextCountNS() int64 {
	if h := &g.halted; len(h.todo) > 0 && !h.asked {
		return h.dueNS
	}
	return 0
}

// countedHalted handles the store's answer. Lost objects are not counted.
func (g *Replicas) countedHalted(p *kvstore.Reply) {
	h := &g.halted
	h.asked = false
	number := h.todo[0]
	if p.Status != kvstore.OK && !isLossy(p.Status) || p.ValueLen != len(h.value) {
		h.todo, h.from, h.dueNS = append(h.todo[1:], number), nvme.KVCursor{}, g.clockNS+countAgainNS
		return
	}
	b := nvme.KVRange(h.value[:])
	if n, is := h.counts[number]; is {
		if h.from == (nvme.KVCursor{}) {
			n.objects = 0
		}
		n.objects += b.Totals().Objects() + b.Totals().Tombstones()
		n.queued = !b.Complete()
		h.counts[number] = n
	}
	if h.from = b.To(); !b.Complete() {
		return
	}
	h.todo, h.from = h.todo[1:], nvme.KVCursor{}
	if len(h.todo) == 0 {
		g.makeReport()
	}
}

func isLossy(st kvstore.Status) bool { return st == kvstore.Corrupt || st == kvstore.DeviceError }

// objectsOf is how many objects of a halted range the partition has, as far as they were counted.
func (g *Replicas) objectsOf(number int) uint32 {
	return uint32(min(g.halted.counts[number].objects, math.MaxUint32))
}

// haltedReport is the report of a range of which the partition is not a member.
func (g *Replicas) haltedReport(number int) (r view.Report, is bool) {
	if _, is = g.halted.counts[number]; !is {
		return r, false
	}
	r.Local, r.Objects = view.Incomplete, g.objectsOf(number)
	if m := g.ranges[number]; g.drops.busy(number) || m != nil && m.r.Damaged() {
		r.Local = view.Damaged
	}
	return r, r.Objects > 0 || r.Local == view.Damaged
}
