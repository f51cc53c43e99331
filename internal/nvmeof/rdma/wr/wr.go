// Package wr holds work requests and completions: what goes to an RDMA device and what comes back,
// in structs without pointers that have C's layout. Machines make and read them; package
// verbs carries them.
//
// Source: ibv_post_send(3), ibv_poll_cq(3).
package wr

import "fmt"

// Op is what a work request does.
type Op uint8

// Operations of a Send.
const (
	// OpSend sends a message; it takes one of the peer's receives.
	OpSend Op = iota
	// OpSendInvalidate sends one and makes the peer's key RKey invalid.
	OpSendInvalidate
	// OpWrite writes to the peer's memory, OpRead reads from it.
	OpWrite
	OpRead
	// OpRecv is what completions of receives say.
	OpRecv
)

// Flags of a Send.
type Flags uint8

const (
	// FlagSignaled asks for a completion; without, only a failure completes.
	FlagSignaled Flags = 1 << iota
	// FlagFence waits for the queue pair's RDMA READs before.
	FlagFence
	// FlagInline takes the data along at once: it may change when PostSend has returned, and needs no LKey.
	FlagInline
)

// Send is a work request for a send queue, in the layout that C has.
type Send struct {
	ID uint64
	// QP is verbs' QP.Handle.
	QP uint64
	// Addr, Len and LKey are the local data.
	Addr uint64
	// RemoteAddr and RKey are the peer's memory; RKey of OpSendInvalidate the key to invalidate.
	RemoteAddr uint64
	Len        uint32
	LKey       uint32
	RKey       uint32
	Op         Op
	Flags      Flags
	_          [2]byte
}

// Recv is a work request for a receive queue.
type Recv struct {
	ID   uint64
	Addr uint64
	Len  uint32
	LKey uint32
}

// Completion is a completion.
type Completion struct {
	ID uint64
	// QPNum is verbs' QP.Num.
	QPNum uint32
	// Len is how many bytes came, of an OpRecv.
	Len uint32
	// RKey is the local key that the peer's message has made invalid, if Invalidated.
	RKey        uint32
	VendorErr   uint32
	Status      Status
	Op          Op // not valid if Status is not StatusOK
	Invalidated bool
	_           [1]byte
}

// Status is a completion's outcome: enum ibv_wc_status.
type Status uint8

// Outcomes, with libibverbs' values.
const (
	StatusOK            Status = 0
	StatusLocalLength   Status = 1
	StatusLocalProt     Status = 4
	StatusFlushed       Status = 5
	StatusLocalAccess   Status = 8
	StatusRemoteInvalid Status = 9
	StatusRemoteAccess  Status = 10
	StatusRemoteOp      Status = 11
	StatusRetryExceeded Status = 12
	StatusRNRExceeded   Status = 13
	StatusGeneral       Status = 21
)

var statusNames = map[Status]string{
	StatusOK: "success", StatusLocalLength: "local length error", StatusLocalProt: "local protection error",
	StatusFlushed: "flushed", StatusLocalAccess: "local access error", StatusRemoteInvalid: "remote invalid request error",
	StatusRemoteAccess: "remote access error", StatusRemoteOp: "remote operation error", StatusRetryExceeded: "transport retries exceeded",
	StatusRNRExceeded: "receiver-not-ready retries exceeded", StatusGeneral: "general error",
}

// String names the status.
func (s Status) String() string {
	if n, ok := statusNames[s]; ok {
		return n
	}
	return fmt.Sprintf("status %d", uint8(s))
}
