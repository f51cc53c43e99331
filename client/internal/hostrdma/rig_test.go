package hostrdma

import (
	"fmt"
	"strings"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/wr"
)

const (
	regionAddr = 0x100000
	regionLKey = 7
	pieceAddr  = 0x20000000 // of slot 0; the others follow at intervals of 16 MiB
	directAddr = 0x10000000
	directRKey = 0x99
)

// lender is a Memory with a given number of buffers.
type lender struct {
	pieces, out int
	has         map[uint16][]byte
	direct      []byte
}

func (l *lender) Find(b []byte) (uint64, uint32, bool) {
	for i := range l.direct {
		if &l.direct[i] == &b[0] && i+len(b) <= len(l.direct) {
			return directAddr + uint64(i), directRKey, true
		}
	}
	return 0, 0, false
}

func (l *lender) Get(slot uint16, n int) ([]byte, uint64, uint32, bool) {
	if l.has[slot] != nil {
		panic("a slot borrows twice")
	}
	if l.out == l.pieces {
		return nil, 0, 0, false
	}
	l.out++
	l.has[slot] = make([]byte, n)
	return l.has[slot], pieceAddr + uint64(slot)<<24, 0x77, true
}

func (l *lender) Put(slot uint16) {
	if l.has[slot] == nil {
		panic("a slot gives back what it has not")
	}
	delete(l.has, slot)
	l.out--
}

// peer is the device and the target.
type peer struct {
	q   *QPair
	mem *lender
	// posted are the SENDs in flight, recvs the receives, as posted.
	posted []wr.Send
	recvs  []wr.Recv
	bad    []string
}

func newPeer(o Options, pieces int) *peer {
	p := &peer{mem: &lender{pieces: pieces, has: map[uint16][]byte{}, direct: make([]byte, 64<<10)}}
	o.Region, o.Addr, o.LKey, o.QP = make([]byte, RegionBytes(o.Depth, o.InCapsuleBytes)), regionAddr, regionLKey, 5
	o.Memory = p.mem
	if o.MaxBytes == 0 {
		o.MaxBytes = 1 << 20
	}
	p.q = New(o)
	p.postRecvs()
	return p
}

func (p *peer) postRecvs() int {
	r := p.q.Recvs()
	p.recvs = append(p.recvs, r...)
	n := len(r)
	p.q.Posted(n)
	return n
}

// post takes up to limit work requests (0: all) from the machine.
func (p *peer) post(limit int) (taken []wr.Send) {
	for {
		ws := p.q.Sends()
		if limit > 0 {
			ws = ws[:min(len(ws), limit-len(taken))]
		}
		if len(ws) == 0 {
			break
		}
		taken = append(taken, ws...)
		p.q.Sent(len(ws))
	}
	p.posted = append(p.posted, taken...)
	return taken
}

// capsule is what a SEND carries.
func (p *peer) capsule(w *wr.Send) []byte {
	return p.q.opts.Region[w.Addr-regionAddr:][:w.Len]
}

func (p *peer) describe(w *wr.Send) string {
	b := p.capsule(w)
	e := (*nvme.SQE)(b)
	g := e.SGL()
	var s strings.Builder
	fmt.Fprintf(&s, "SEND opcode=%#02x cid=%#x psdt=%d", e.Opcode(), e.CID(), e.PSDT())
	if g.Type() == nvme.SGLTypeKeyedDataBlock {
		fmt.Fprintf(&s, " keyed/%x addr=%#x len=%d key=%#x", g.Subtype(), g.Address(), g.KeyedLength(), g.Key())
	} else {
		fmt.Fprintf(&s, " sgl=%x/%x addr=%d len=%d", g.Type(), g.Subtype(), g.Address(), g.Length())
	}
	if d := b[nvme.SQESize:]; len(d) > 0 {
		fmt.Fprintf(&s, " data=%d [%x...]", len(d), d[:min(4, len(d))])
	} else if d := p.mem.has[uint16(host.SlotOf(e.CID()))]; d != nil && g.KeyedLength() > 0 && e.Opcode()&1 != 0 {
		fmt.Fprintf(&s, " borrowed=[%x...]", d[:min(4, len(d))])
	}
	if w.Flags&wr.FlagSignaled != 0 {
		s.WriteString(" signaled")
	}
	if w.Flags&wr.FlagInline != 0 {
		s.WriteString(" inline")
	}
	if w.ID != uint64(e.CID()) || w.LKey != regionLKey || w.QP != 5 || w.Op != wr.OpSend {
		fmt.Fprintf(&s, " BAD %+v", *w)
	}
	return s.String()
}

// sent completes the SENDs up to the next one that asks for it.
func (p *peer) sent() (wr.Completion, bool) {
	for i := range p.posted {
		if p.posted[i].Flags&wr.FlagSignaled != 0 {
			c := wr.Completion{ID: p.posted[i].ID, Op: wr.OpSend}
			p.posted = p.posted[i+1:]
			return c, true
		}
	}
	return wr.Completion{}, false
}

// response lets a receive complete with a response capsule.
func (p *peer) response(cid uint16, st nvme.Status, result uint64) wr.Completion {
	var e nvme.CQE
	e.SetCID(cid)
	e.SetStatus(st)
	e.SetResult64(result)
	return p.receive(e[:])
}

func (p *peer) receive(b []byte) wr.Completion {
	r := p.recvs[0]
	p.recvs = p.recvs[1:]
	copy(p.q.opts.Region[r.Addr-regionAddr:][:r.Len], b)
	return wr.Completion{ID: r.ID, Op: wr.OpRecv, Len: uint32(len(b))}
}
