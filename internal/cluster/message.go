package cluster

import (
	"encoding/binary"
	"fmt"

	"jbofd/internal/cluster/view"
)

// Messages have the header of records. What follows it is
//
//	"JBCP" Report   u64 term, u64 sequence number, i64 echo, 16 B cluster, u16 protocol, name, address,
//	                u64 incarnation, u64 epoch seen, u64 version, u8 flags; and if it is full,
//	                uvarint n, n times: u16 partition, u32 range, u8 local state, u64 epoch; of a ChainHead that
//	                yields the state is 128 more, and u32 version of the chain, u16 partition to lead it follow;
//	                of a halted range of which there is something it is 64 more, and u32 objects follow;
//	                uvarint n, n u16 partitions that cannot be used;
//	                uvarint n, n u16 partitions whose drive does not work
//	"JBCA" Answer   u64 term, u64 incarnation, name and address of the manager, u64 incarnation of the receiver,
//	                u64 sequence number, i64 stamp, u64 epoch, u8 flags, u64 version, u8 refusal,
//	                uvarint n, n B record of the view
//
// A Report has the same fields up to the incarnation in all protocol versions, and an Answer that refuses one has the
// same form, so that a node of another version can be told. An answer that grants authority, of a manager called "a" at
// "h:1", has 75 bytes:
//
//	4a 42 43 41  cc cc cc cc  01 00               "JBCA", CRC32C, version 1
//	08 00 00 00 00 00 00 00                       term 8
//	09 00 00 00 00 00 00 00  01 61  03 68 3a 31   incarnation 9, "a", "h:1"
//	07 00 …  15 00 …  63 00 …  05 00 …            to incarnation 7, sequence number 21, stamp 99, epoch 5
//	03  02 00 …  00  00                           acts and granted, version 2, not refused, no view
const (
	magicReport = "JBCP"
	magicAnswer = "JBCA"

	rangeReportBytes = 15

	flagActs    = 1
	flagGranted = 2
	flagReady   = 4

	flagFull      = 1
	flagConnected = 2

	localYields  = 128
	localObjects = 64
)

// MaxMessageBytes is the length of the longest message, which has a report of all ranges or a view. A view must fit a
// request of etcd, too, which are shorter by default.
const MaxMessageBytes = 4 << 20

// Encode returns the message. It has one of its two fields.
func (m *Message) Encode() []byte {
	if m.Report != nil {
		return m.Report.encode()
	}
	return m.Answer.encode()
}

func (r *Report) encode() []byte {
	b := le.AppendUint64(le.AppendUint64(begin(magicReport), r.Term), r.Seq)
	b = append(le.AppendUint64(b, uint64(r.Echo)), r.Cluster[:]...)
	b = appendString(appendString(le.AppendUint16(b, r.Protocol), r.Name), r.Address)
	b = le.AppendUint64(le.AppendUint64(b, uint64(r.Incarnation)), uint64(r.Seen))
	b = le.AppendUint64(b, r.Version)
	flags := byte(0)
	if r.Connected {
		flags |= flagConnected
	}
	if !r.Full {
		return seal(append(b, flags))
	}
	b = binary.AppendUvarint(append(b, flags|flagFull), uint64(len(r.Ranges)))
	for _, e := range r.Ranges {
		b = le.AppendUint32(le.AppendUint16(b, uint16(e.Partition)), uint32(e.Range))
		local := byte(e.Local)
		if e.Yield.ChainEpoch != 0 {
			local |= localYields
		}
		if e.Objects > 0 {
			local |= localObjects
		}
		b = le.AppendUint64(append(b, local), uint64(e.Epoch))
		if e.Yield.ChainEpoch != 0 {
			b = le.AppendUint16(le.AppendUint32(b, e.Yield.ChainEpoch), uint16(e.Yield.To))
		}
		if e.Objects > 0 {
			b = le.AppendUint32(b, e.Objects)
		}
	}
	for _, list := range [...][]view.PartitionID{r.Unusable, r.Failing} {
		b = binary.AppendUvarint(b, uint64(len(list)))
		for _, id := range list {
			b = le.AppendUint16(b, uint16(id))
		}
	}
	return seal(b)
}

func (a *Answer) encode() []byte {
	b := le.AppendUint64(le.AppendUint64(begin(magicAnswer), a.Term), uint64(a.Manager.Incarnation))
	b = appendString(appendString(b, a.Manager.Name), a.Manager.Address)
	b = le.AppendUint64(le.AppendUint64(b, uint64(a.To)), a.Seq)
	b = le.AppendUint64(le.AppendUint64(b, uint64(a.Stamp)), uint64(a.Epoch))
	flags := byte(0)
	if a.Acts {
		flags |= flagActs
	}
	if a.Granted {
		flags |= flagGranted
	}
	if a.Ready {
		flags |= flagReady
	}
	b = append(le.AppendUint64(append(b, flags), a.Version), byte(a.Refused))
	return seal(append(binary.AppendUvarint(b, uint64(len(a.View))), a.View...))
}

// DecodeMessage returns the message of b, whose memory it uses. It allocates no more than a small multiple of len(b).
//
// Errors: ErrForeign, ErrProtocol.
func DecodeMessage(b []byte) (*Message, error) {
	if len(b) > MaxMessageBytes {
		return nil, fmt.Errorf("%w: a message of %d bytes, want at most %d", ErrForeign, len(b), MaxMessageBytes)
	}
	if len(b) >= len(magicAnswer) && string(b[:len(magicAnswer)]) == magicAnswer {
		a, err := decodeAnswer(b)
		if err != nil {
			return nil, err
		}
		return &Message{Answer: a}, nil
	}
	r, err := decodeReport(b)
	if err != nil {
		return nil, err
	}
	return &Message{Report: r}, nil
}

func decodeReport(b []byte) (*Report, error) {
	d, err := open(magicReport, b)
	if err != nil {
		return nil, err
	}
	r := &Report{Term: d.u64(), Seq: d.u64(), Echo: int64(d.u64()), Cluster: d.uuid(), Protocol: d.u16(),
		Name: d.name(), Address: d.name(), Incarnation: Incarnation(d.u64())}
	if r.Protocol != Protocol && !d.bad {
		return r, nil // what follows has another form
	}
	r.Seen, r.Version = view.Epoch(d.u64()), d.u64()
	flags := d.below(2 * flagConnected)
	r.Full, r.Connected = flags&flagFull != 0, flags&flagConnected != 0
	if r.Full {
		for range d.count(rangeReportBytes) {
			e := RangeReport{Partition: view.PartitionID(d.u16()), Range: int(d.u32())}
			local := d.take(1)[0]
			e.Local, e.Epoch = view.Local(local&^(localYields|localObjects)), view.Epoch(d.u64())
			d.bad = d.bad || e.Range >= view.MaxRanges || e.Local > view.Complete
			if local&localYields != 0 {
				e.Yield = view.Yield{ChainEpoch: d.u32(), To: view.PartitionID(d.u16())}
				d.bad = d.bad || e.Yield.ChainEpoch == 0
			}
			if local&localObjects != 0 {
				e.Objects = d.u32()
				d.bad = d.bad || e.Objects == 0
			}
			r.Ranges = append(r.Ranges, e)
		}
		for _, list := range [...]*[]view.PartitionID{&r.Unusable, &r.Failing} {
			for range d.count(2) {
				*list = append(*list, view.PartitionID(d.u16()))
			}
		}
	}
	return r, d.end()
}

func decodeAnswer(b []byte) (*Answer, error) {
	d, err := open(magicAnswer, b)
	if err != nil {
		return nil, err
	}
	a := &Answer{Term: d.u64(), Manager: Identity{Incarnation: Incarnation(d.u64()), Name: d.name(), Address: d.name()},
		To: Incarnation(d.u64()), Seq: d.u64(), Stamp: int64(d.u64()), Epoch: view.Epoch(d.u64())}
	flags := d.below(2 * flagReady)
	a.Acts, a.Granted, a.Ready = flags&flagActs != 0, flags&flagGranted != 0, flags&flagReady != 0
	a.Version, a.Refused = d.u64(), Refusal(d.below(byte(NodeForgotten)+1))
	if n := d.count(1); n > 0 {
		a.View = d.take(uint64(n))
	}
	return a, d.end()
}

// below returns a byte that must be less than limit.
func (d *decoder) below(limit byte) byte {
	x := d.take(1)[0]
	d.bad = d.bad || x >= limit
	return x
}
