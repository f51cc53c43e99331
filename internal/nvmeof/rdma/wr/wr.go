// Package wr defines RDMA work requests and completions as structs without pointers, in the memory layout that the C
// code uses. State machines make and read them; package verbs passes them to and from devices.
//
// Source: ibv_post_send(3), ibv_poll_cq(3).
package wr

import "fmt"

// Op is the operation of a work request.
type Op uint8

// Operations of a Send.
const (
	// OpSend sends a message, which consumes one of the peer's receives.
	OpSend Op = iota
	// OpSendInvalidate sends a message and invalidates the peer's memory key RKey.
	OpSendInvalidate
	// OpWrite writes to the peer's memory. OpRead reads from it.
	OpWrite
	OpRead
	// OpRecv is the operation in the completion of a receive.
	OpRecv
)

// Flags of a Send.
type Flags uint8

const (
	// FlagSignaled requests a completion. Without it only a failure generates one.
	FlagSignaled Flags = 1 << iota
	// FlagFence delays the request until the queue pair's earlier RDMA READs have completed.
	FlagFence
	// FlagInline copies the data into the request when it is posted: the buffer may be reused when PostSend returns,
	// and LKey is not needed.
	FlagInline
)

// Send is a work request for a send queue. Its layout matches the C code.
type Send struct {
	ID uint64
	// QP is the queue pair, as QP.Handle of package verbs returns it.
	QP uint64
	// Addr, Len and LKey describe the local data.
	Addr uint64
	// RemoteAddr and RKey describe the peer's memory. For OpSendInvalidate, RKey is the key to invalidate.
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

// Completion is the completion of a work request.
type Completion struct {
	ID uint64
	// QPNum is the queue pair, as QP.Num of package verbs returns it.
	QPNum uint32
	// Len is the number of received bytes, for OpRecv.
	Len uint32
	// RKey is the local key that the peer's message has invalidated, if Invalidated is set.
	RKey        uint32
	VendorErr   uint32
	Status      Status
	Op          Op // not valid if Status is not StatusOK
	Invalidated bool
	_           [1]byte
}

// Status is the outcome of a work request: enum ibv_wc_status.
type Status uint8

// Outcomes, with the values of libibverbs.
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
	StatusFlushed: "flushed", StatusLocalAccess: "local access error",
	StatusRemoteInvalid: "remote invalid request error",
	StatusRemoteAccess:  "remote access error", StatusRemoteOp: "remote operation error",
	StatusRetryExceeded: "transport retries exceeded",
	StatusRNRExceeded:   "receiver-not-ready retries exceeded", StatusGeneral: "general error",
}

// String names the status.
func (s Status) String() string {
	if n, ok := statusNames[s]; ok {
		return n
	}
	return fmt.Sprintf("status %d", uint8(s))
}
