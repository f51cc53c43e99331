package crrs

import (
	"fmt"

	"jbofd/internal/nvme"
	"jbofd/internal/slab"
)

// Port translates the messages of a Replica to NVMe commands, and the commands of other replicas to messages: the nodes
// are NVMe-oF hosts of each other (docs/wire-extensions.md, replication). A Ship, Compare or Fetch is a command, and
// the message that answers it is the command's completion. An Ack is the completion of a Forward or a Durable.
//
//	Replica ─ Sends ─> Flush ──> Command ··· queue of a host ··· target ···> Receive ─> Replica
//	Replica <────── Completed <─ Outcome <···························· Response <── Flush, SetRole, Ranged
//
// The driver calls SetRole, Receive, Ranged and Flush of the Port, not of the Replica, and Repeat in place of the
// Replica's Reconnected. It calls all other methods of the Replica directly.
type Port struct {
	r      *Replica
	number uint16
	keep   uint8

	// requests are commands that were sent and have not completed. asks counts those that ask for data.
	requests slab.Table[request]
	asks     int
	// short has the replicas to which messages were not sent for lack of a slot in requests. They go to Traffic.Repeat
	// when half of the slots are free again.
	short []Peer

	// served are the commands that were received and are not answered yet. kept has the slots of the Forwards among
	// them: they stay unanswered so that there is a completion to send when the committed mark rises (receiveForward).
	served slab.Table[served]
	kept   []int32
	// turn counts the commands that served has had. It is part of their tags, so that a late answer is not used for the
	// next command in the same slot.
	turn uint32

	// uses counts the requests that send the memory of a value, by Mem.
	uses []use
}

// request is a command that was sent.
type request struct {
	to    Peer
	kind  MessageKind
	epoch uint64
	tag   uint64
	mem   uint32
}

// served is a command that was received and is answered later.
type served struct {
	handle     uint64
	from       Peer
	kind       MessageKind
	epoch, seq uint64
	// turn is Port.turn when it came, for its tag.
	turn uint32
}

// use is the state of the memory of a value: how many requests send it, and whether the Replica has released it.
type use struct {
	requests int32
	released bool
}

// PortConfig describes a Port.
type PortConfig struct {
	Config
	// Range is the number of the range in the view.
	Range uint16
	// Keep is how many Forwards the Successor may keep unanswered, at least 1 and at most half of Requests. Package
	// peers may lower it in the command.
	Keep uint8
	// Requests is how many commands to other replicas may be outstanding, at least 4; further messages are sent later.
	// It is to be at least Window: Forwards that are repeated begin with the first one, and would never come to the
	// last one otherwise. A quarter of them may ask for data. So there is always room for marks, without which neither
	// Forwards nor Ships end.
	Requests int
	// Served is how many commands of other replicas may be outstanding here and answered later, at least 2.
	Served int
}

// Command is a command for another replica.
type Command struct {
	To Peer
	// Tag is for Completed or Failed, of which one must be called exactly once.
	Tag uint32
	// SQE lacks the namespace, which is that of the replica's partition.
	SQE nvme.SQE
	// Header and Value are the data of a Forward. The Value belongs to the transport until Completed or Failed: its Mem
	// is not among Actions.Released before.
	Header nvme.KVForwardHeader
	Value  []byte
	Mem    uint32
	// Room is the length in bytes of the buffer that a Ship needs for the value, after its header.
	Room int
	// Repairs: it is a Fetch of a repair, not of a pass.
	Repairs bool
}

// Outcome is how a Command has completed.
type Outcome struct {
	Status nvme.Status
	// Result is DW0 and DW1.
	Result uint64
	// Version and Expires are those of a Ship's answer, and Value as much of the value as the buffer has. For a Fetch,
	// Value is the batch and Mem its memory, which the Replica may keep.
	Version uint64
	Expires uint32
	Value   []byte
	Mem     uint32
	// Part has the Sums and the Time of a Compare's answer; To and Last of a Fetch's.
	Part *Part
}

// Incoming is a command that came from another replica. Command and header are valid.
type Incoming struct {
	// Handle is repeated in the Response.
	Handle uint64
	SQE    *nvme.SQE
	// Header and Value are the data of a Forward, and Mem its memory. For a Ship, Value is memory for the value; it
	// belongs to the Replica until the Response.
	Header *nvme.KVForwardHeader
	Value  []byte
	Mem    uint32
	// NoMemory: there is no memory for the Value of a Forward, which is dropped. The driver calls Replica.Missed later.
	// It must have memory for a write that Replica.Needs.
	NoMemory bool
	// Position is that of the key of a Fetch that has one.
	Position uint64
	// Payer is the driver's number of the tenant that is charged for a Forward or a Ship.
	Payer uint32
}

// Response answers an Incoming.
type Response struct {
	Handle uint64
	Status nvme.Status
	// Result is DW0 and DW1 of a Forward, a Durable, or with nvme.KVWrongView; of a Ship, the length of the value; of a
	// Compare or a Fetch with nvme.UnrecoveredReadError, where the loss ends (lossResult).
	Result uint64
	// Version, Expires and Value are those of a Ship. The Value does not change before the turn is carried out.
	Version uint64
	Expires uint32
	Value   []byte
	// Part has the Sums of a Compare, Data is the batch for a Fetch.
	Part *Part
	Data []byte
}

// Traffic is what a Port asks its driver to do, in addition to Actions. The driver empties the slices.
type Traffic struct {
	Commands  []Command
	Responses []Response
	// Repeat names replicas to which messages were lost although there is a connection: the driver calls Repeat for
	// them, soon.
	Repeat []Peer
	// Epoch is the greatest epoch that another replica has answered, if it is greater than that of the Role.
	Epoch uint64
}

// NewPort returns a Port with a Replica that is not a member of its chain yet.
func NewPort(cfg PortConfig) *Port {
	if cfg.Keep < 1 || int(cfg.Keep) > cfg.Requests/2 || cfg.Requests < 4 || cfg.Served < 2 {
		panic(fmt.Sprintf("crrs: %d requests, %d of them kept, and %d served", cfg.Requests, cfg.Keep, cfg.Served))
	}
	p := &Port{r: New(cfg.Config), number: cfg.Range, keep: cfg.Keep}
	p.requests.Init(p.r.tables.requests, cfg.Requests)
	p.served.Init(p.r.tables.served, cfg.Served)
	return p
}

// Replica returns the Port's Replica.
func (p *Port) Replica() *Replica { return p.r }

// SetRole adopts a view, as Replica.SetRole does, and answers the kept Forwards of an earlier epoch with KV Wrong View.
func (p *Port) SetRole(role Role, out *Actions, t *Traffic) {
	p.r.SetRole(role, out)
	for n := len(p.kept) - 1; n >= 0; n-- {
		if p.served.At(p.kept[n]).epoch != p.r.role.Epoch {
			p.refuseView(p.takeKept(n), t)
		}
	}
}

// Flush ends a turn: it calls Replica.Flush, and makes commands and Responses of out.Sends. It removes from
// out.Released the memory of values that are still being sent; end releases it later.
//
// hot: 0 allocs
func (p *Port) Flush(out *Actions, t *Traffic) {
	p.r.Flush(out)
	for i := 0; i < len(out.Sends); i++ { // a message that is not sent may lead to others
		s := &out.Sends[i]
		switch s.Kind {
		case Ack:
			p.acknowledge(s.Seq, t)
		case Answer, Sums, Batch:
			p.answerMessage(&s.Message, t)
		default:
			p.request(s, out, t)
		}
	}
	out.Sends = out.Sends[:0]
	if p.r.damaged {
		for len(p.kept) > 0 {
			p.refuseView(p.takeKept(len(p.kept)-1), t)
		}
	}
	n := 0
	for _, mem := range out.Released {
		if int(mem) < len(p.uses) && p.uses[mem].requests > 0 {
			p.uses[mem].released = true
			continue
		}
		out.Released[n] = mem
		n++
	}
	out.Released = out.Released[:n]
}

// request makes a command of a Forward, Durable, Sync, Ship, Compare or Fetch.
//
// If there is no slot for it, or for one more that asks for data, it is not sent. A Ship then ends as Unavailable at
// once, because a client waits for it; the others are repeated when there is room.
func (p *Port) request(s *Send, out *Actions, t *Traffic) {
	asks := s.Kind == Ship || s.Kind == Compare || s.Kind == Fetch
	if p.requests.Room() == 0 || asks && p.asks >= p.requests.Max()/4 {
		switch {
		case s.Kind == Ship:
			p.r.Receive(s.To, &Message{Kind: Answer, Epoch: s.Epoch, Tag: s.Tag, Status: Unavailable}, out)
			return
		case asks:
			p.r.noteLost(s.Tag, out)
		}
		p.fallShort(s.To)
		return
	}
	if asks {
		p.asks++
	}
	i := p.requests.Take()
	*p.requests.At(i) = request{to: s.To, kind: s.Kind, epoch: s.Epoch, tag: s.Tag}
	t.Commands = append(t.Commands, Command{To: s.To, Tag: uint32(i)})
	c := &t.Commands[len(t.Commands)-1]
	k := c.SQE.KVReplica()
	k.SetEpoch(uint32(s.Epoch))
	k.SetRange(p.number)
	switch s.Kind {
	case Forward:
		c.SQE.SetOpcode(nvme.CmdKVForward)
		k.SetKeyLen(s.Key.Len)
		k.SetKeep(p.keep)
		k.SetSequence(s.Seq)
		k.SetMark(s.Mark)
		k.SetAnswered(s.Answered)
		if s.Op == Delete {
			k.SetFlags(nvme.KVForwardDelete)
		} else {
			c.Value = s.Value
		}
		k.SetLenBytes(uint32(nvme.KVForwardHeaderSize + len(c.Value)))
		c.Mem = s.Mem
		c.Header.SetVersion(s.Version)
		c.Header.SetClient(s.ID.Client)
		c.Header.SetSequence(s.ID.Seq)
		c.Header.SetExpires(s.Expires)
		c.Header.SetKeepUntil(s.KeepUntil)
		c.Header.SetKey(s.Key.Bytes)
		p.use(s.Mem)
		p.requests.At(i).mem = s.Mem
	case Durable:
		c.SQE.SetOpcode(nvme.CmdKVDurable)
		k.SetMark(s.Seq)
		k.SetClock(s.Clock)
	case Sync:
		c.SQE.SetOpcode(nvme.CmdKVSync)
	case Ship:
		c.SQE.SetOpcode(nvme.CmdKVShip)
		k.SetKey(s.Key.Bytes[:s.Key.Len])
		k.SetLenBytes(uint32(nvme.KVReadHeaderSize + s.Len))
		c.Room = s.Len
	case Compare:
		c.SQE.SetOpcode(nvme.CmdKVCompare)
		k.SetRound(s.Round)
		k.SetFirst(s.Part.First)
		k.SetBits(s.Part.Bits)
		sums, _ := k.SubRanges()
		k.SetLenBytes(uint32(nvme.KVRangeHeaderBytes + sums*nvme.KVSumBytes))
	case Fetch:
		// The length is that of the driver's buffer, which sets it.
		c.SQE.SetOpcode(nvme.CmdKVFetch)
		k.SetRound(s.Round)
		c.Repairs = isRepair(s.Tag)
		k.SetFirst(max(s.Part.First, s.Part.From.Position))
		if f := &s.Part.From.Key; f.Len > 0 {
			k.SetKey(f.Bytes[:f.Len])
		}
		k.SetBits(s.Part.Bits)
	}
}

// use notes that a request sends the memory of a value.
func (p *Port) use(mem uint32) {
	if mem == 0 {
		return
	}
	for int(mem) >= len(p.uses) { // allocates when there is more memory than before
		p.uses = append(p.uses, use{})
	}
	p.uses[mem].requests++
}

// fallShort notes that messages to a replica were not sent.
func (p *Port) fallShort(to Peer) {
	for _, s := range p.short {
		if s == to {
			return
		}
	}
	p.short = append(p.short, to)
}

// end frees the slot of a request, and the memory that it has sent, and returns the request.
func (p *Port) end(tag uint32, out *Actions, t *Traffic) request {
	q := *p.requests.At(int32(tag))
	p.requests.Put(int32(tag))
	if q.kind == Ship || q.kind == Compare || q.kind == Fetch {
		p.asks--
	}
	if q.mem != 0 {
		if u := &p.uses[q.mem]; u.requests > 1 || !u.released {
			u.requests--
		} else {
			*u = use{}
			out.free(q.mem)
		}
	}
	if len(p.short) > 0 && p.requests.Room() >= p.requests.Max()/2 {
		t.Repeat = append(t.Repeat, p.short...)
		p.short = p.short[:0]
	}
	return q
}

// Completed handles the outcome of a Command, and passes the Replica the message that it stands for: an Ack for a
// Forward or a Durable, or an Answer, Sums or Batch. The message has the epoch in which the command was sent, so that
// the Replica ignores it if the view has changed. A command that has failed is repeated, except a Ship, which ends as
// Unavailable.
//
// hot: 0 allocs
func (p *Port) Completed(tag uint32, o *Outcome, out *Actions, t *Traffic) {
	q := p.end(tag, out, t)
	m := Message{Epoch: q.epoch, Tag: q.tag, Value: o.Value, Mem: o.Mem, Version: o.Version, Expires: o.Expires,
		Part: o.Part}
	st := o.Status.Code()
	if st == nvme.KVWrongView && o.Result&0xFFFF_FFFF > p.r.role.Epoch {
		t.Epoch = max(t.Epoch, o.Result&0xFFFF_FFFF)
	}
	switch {
	case q.kind == Ship:
		m.Kind, m.Len, m.Status = Answer, int(o.Result), Unavailable
		switch st {
		case nvme.Success:
			m.Status = OK
		case nvme.KeyDoesNotExist:
			m.Status = NotFound
		case nvme.KVWrongView:
			m.Status = WrongView
		case nvme.UnrecoveredReadError:
			m.Status = Unreadable
		}
	case q.kind == Fetch && isRepair(q.tag) && st != nvme.Success:
		p.r.repairRefused(q.tag, st == nvme.UnrecoveredReadError, out)
		out.free(o.Mem)
		return
	case (q.kind == Compare || q.kind == Fetch) && st == nvme.UnrecoveredReadError:
		p.r.copierLost(q.tag, lossEnd(o.Result))
		out.free(o.Mem)
		return
	case st == nvme.KVWrongView:
		// One of the two has an older view. It adopts the newer one in time, and asks for what it has missed then.
		out.free(o.Mem)
		return
	case st != nvme.Success:
		p.r.noteLost(q.tag, out)
		t.Repeat = append(t.Repeat, q.to)
		out.free(o.Mem)
		return
	case q.kind == Sync:
		return
	case q.kind == Compare:
		m.Kind = Sums
	case q.kind == Fetch:
		m.Kind = Batch
	default:
		m.Kind, m.Seq, m.Full = Ack, o.Result&^nvme.KVChainFull, o.Result&nvme.KVChainFull != 0
	}
	p.r.Receive(q.to, &m, out)
}

// Failed handles the loss of a Command: its outcome is not known, because the connection was lost. When there is a
// connection again, the driver calls Repeat.
func (p *Port) Failed(tag uint32, out *Actions, t *Traffic) {
	switch q := p.end(tag, out, t); q.kind {
	case Ship:
		p.r.Receive(q.to, &Message{Kind: Answer, Epoch: q.epoch, Tag: q.tag, Status: Unavailable}, out)
	case Compare, Fetch:
		p.r.noteLost(q.tag, out)
	}
}

// Postpone takes back a Command that asks for data and that the driver has not sent, because it has no memory for the
// data. When it may have some, it calls Resume.
func (p *Port) Postpone(tag uint32, out *Actions, t *Traffic) {
	p.r.noteLost(p.end(tag, out, t).tag, out)
}

// Resume has the postponed requests sent again.
func (p *Port) Resume() { p.r.askLost() }

// Repeat sends messages again that may have been lost on the way to a replica, and asks it for those that may have been
// lost on the way from it. The driver calls it when there is a connection again, after Failed for each command of the
// last one, and for each replica in Traffic.Repeat.
func (p *Port) Repeat(to Peer, out *Actions) {
	r := p.r
	if !r.role.Member || r.damaged {
		return
	}
	if to == r.role.Successor {
		r.resend(out)
	}
	if to == r.role.Predecessor {
		r.send(to, Message{Kind: Sync}, out)
		r.askLost()
	}
}
