// Package cm encodes and checks the private data that NVMe/RDMA carries in the messages of the RDMA connection manager.
// Its types are views over the bytes of a message.
//
//	 0        2        4        6        8        10              32
//	+--------+--------+--------+--------+--------+---------------+
//	| RECFMT | QID    | HRQSIZE| HSQSIZE| CNTLID | reserved      |  request
//	+--------+--------+--------+--------+--------+---------------+
//	| RECFMT | CRQSIZE| reserved                                 |  accept
//	+--------+--------+--------+---------------------------------+
//	| RECFMT | STS    |                                             reject
//	+--------+--------+
//
// Source: NVMe RDMA Transport 1.0, section 3.2; Linux's include/linux/nvme-rdma.h.
package cm

import (
	"encoding/binary"
	"fmt"
)

// Lengths in bytes. A received message may be longer because the fabric pads private data.
const (
	RequestLen = 32
	AcceptLen  = 32
	RejectLen  = 4
)

// Port is the default port of NVMe/RDMA.
const Port = 4420

// AdminEntries is the largest size of an admin queue.
const AdminEntries = 32

// Request is the private data of a connection request.
type Request [RequestLen]byte

func (r *Request) RECFMT() uint16     { return binary.LittleEndian.Uint16(r[0:]) }
func (r *Request) SetRECFMT(v uint16) { binary.LittleEndian.PutUint16(r[0:], v) }

// QID is the identifier of the queue that the connection carries.
func (r *Request) QID() uint16     { return binary.LittleEndian.Uint16(r[2:]) }
func (r *Request) SetQID(v uint16) { binary.LittleEndian.PutUint16(r[2:], v) }

// HRQSIZE is the number of receives that the host has for responses.
func (r *Request) HRQSIZE() uint16     { return binary.LittleEndian.Uint16(r[4:]) }
func (r *Request) SetHRQSIZE(v uint16) { binary.LittleEndian.PutUint16(r[4:], v) }

// HSQSIZE is the queue size minus one. It equals SQSIZE of the Connect command that follows.
func (r *Request) HSQSIZE() uint16     { return binary.LittleEndian.Uint16(r[6:]) }
func (r *Request) SetHSQSIZE(v uint16) { binary.LittleEndian.PutUint16(r[6:], v) }

// CNTLID is the controller to which an I/O queue belongs. Hosts of NVMe over Fabrics 1.0 leave it 0.
func (r *Request) CNTLID() uint16     { return binary.LittleEndian.Uint16(r[8:]) }
func (r *Request) SetCNTLID(v uint16) { binary.LittleEndian.PutUint16(r[8:], v) }

// Accept is the private data of a target's accept message.
type Accept [AcceptLen]byte

func (a *Accept) RECFMT() uint16     { return binary.LittleEndian.Uint16(a[0:]) }
func (a *Accept) SetRECFMT(v uint16) { binary.LittleEndian.PutUint16(a[0:], v) }

// CRQSIZE is the number of receives that the target has for the queue's commands.
func (a *Accept) CRQSIZE() uint16     { return binary.LittleEndian.Uint16(a[2:]) }
func (a *Accept) SetCRQSIZE(v uint16) { binary.LittleEndian.PutUint16(a[2:], v) }

// Reject is the private data of a target's reject message.
type Reject [RejectLen]byte

func (r *Reject) RECFMT() uint16     { return binary.LittleEndian.Uint16(r[0:]) }
func (r *Reject) SetRECFMT(v uint16) { binary.LittleEndian.PutUint16(r[0:], v) }

// STS is the reason of the rejection.
func (r *Reject) STS() Status     { return Status(binary.LittleEndian.Uint16(r[2:])) }
func (r *Reject) SetSTS(v Status) { binary.LittleEndian.PutUint16(r[2:], uint16(v)) }

// Status is the reason why a target rejects a connection.
type Status uint16

// Statuses of a reject.
const (
	InvalidLength  Status = 1
	InvalidRECFMT  Status = 2
	InvalidQID     Status = 3
	InvalidHSQSIZE Status = 4
	InvalidHRQSIZE Status = 5
	NoResources    Status = 6
	InvalidIRD     Status = 7
	InvalidORD     Status = 8
	InvalidCNTLID  Status = 9
)

// String names the status.
func (s Status) String() string {
	switch s {
	case InvalidLength:
		return "invalid private data length"
	case InvalidRECFMT:
		return "invalid RECFMT"
	case InvalidQID:
		return "invalid QID"
	case InvalidHSQSIZE:
		return "invalid HSQSIZE"
	case InvalidHRQSIZE:
		return "invalid HRQSIZE"
	case NoResources:
		return "no resources"
	case InvalidIRD:
		return "invalid IRD"
	case InvalidORD:
		return "invalid ORD"
	case InvalidCNTLID:
		return "invalid CNTLID"
	}
	return fmt.Sprintf("reject status %d", uint16(s))
}

// Fault describes a request that the target must reject: the status for the reject message and a text for the log.
type Fault struct {
	Status Status
	What   string
}

func (f *Fault) Error() string { return fmt.Sprintf("%s: %s", f.Status, f.What) }

// Reject returns the private data of the reject message.
func (f *Fault) Reject() []byte {
	var r Reject
	r.SetSTS(f.Status)
	return r[:]
}

func fault(s Status, format string, args ...any) *Fault {
	return &Fault{Status: s, What: fmt.Sprintf(format, args...)}
}

// NoRoom returns the fault of a request for which the target lacks resources.
func NoRoom(format string, args ...any) *Fault { return fault(NoResources, format, args...) }

// Limits are the limits that a target applies to requests.
type Limits struct {
	// MaxEntries is the largest size of an I/O queue. MaxQID is the largest queue identifier of a controller.
	MaxEntries int
	MaxQID     uint16
}

// maxCNTLID is the largest valid controller identifier.
const maxCNTLID = 0xFFEF

// Parse checks the private data of a request. The argument responderResources is the number of RDMA READs that the host
// serves at a time, as the connection manager reports it. It must not be 0, because the target reads write data with
// RDMA READs.
func Parse(b []byte, responderResources uint8, l Limits) (*Request, *Fault) {
	if len(b) < RequestLen {
		return nil, fault(InvalidLength, "%d bytes, must be at least %d", len(b), RequestLen)
	}
	r := (*Request)(b)
	entries := int(r.HSQSIZE()) + 1
	limit := l.MaxEntries
	if r.QID() == 0 {
		limit = AdminEntries // MaxEntries applies to I/O queues only
	}
	switch {
	case r.RECFMT() != 0:
		return nil, fault(InvalidRECFMT, "RECFMT %d, only 0 is known", r.RECFMT())
	case r.QID() > l.MaxQID:
		return nil, fault(InvalidQID, "QID %d, must be at most %d", r.QID(), l.MaxQID)
	case entries < 2 || entries > limit:
		return nil, fault(InvalidHSQSIZE, "HSQSIZE %d for queue %d, must be 1 to %d", r.HSQSIZE(), r.QID(), limit-1)
	case r.HRQSIZE() == 0:
		return nil, fault(InvalidHRQSIZE, "HRQSIZE 0, must be at least 1")
	case r.QID() != 0 && r.CNTLID() > maxCNTLID:
		return nil, fault(InvalidCNTLID, "CNTLID %#x, must be at most %#x", r.CNTLID(), maxCNTLID)
	case responderResources == 0:
		return nil, fault(InvalidIRD, "the host serves no RDMA READ, must be at least 1")
	}
	return r, nil
}
