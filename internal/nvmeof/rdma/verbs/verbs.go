// Package verbs is RDMA as jbofd uses it: devices, memory regions, queue pairs,
// completion queues and the connection manager behind small interfaces that move
// batches. Open is the real thing, libibverbs and librdmacm (build tag rdma); package
// memverbs is a model of it in memory.
//
//	Provider ── Listen ──> Listener ── Accept ──┐
//	    └────── Resolve ────────────────────────┴─> Endpoint (a CM identifier)
//	                                                   │ CreateQP, Accept | Connect | Reject
//	Endpoint.Device ── OpenDomain ──> Domain           v
//	                                   ├ Register ──> MR   (keys for buffers)
//	                                   ├ CreateSRQ ─> SRQ  (PostRecv)
//	                                   ├ CreateCQ ──> CQ   (Poll, Arm, Wait)
//	                                   └ PostSend(batch of work requests, of any QPs)
//
// Work requests and completions are structs without pointers in arrays of the caller's, so
// that one crossing into C posts or polls a whole batch. Memory is named by address and key, as
// on the wire. A work request's ID is the caller's; by convention it is a tag and a generation,
// because completions may outlive what they were posted for.
//
// Everything that was opened is closed by its user, in the order QP, SRQ, CQ, MR, Domain;
// Provider.Counts tells what is left.
//
// Source: InfiniBand Architecture 1.3, volume 1, chapters 10 to 12; rdma_cm(7), ibv_post_send(3).
package verbs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"jbofd/internal/nvmeof/rdma/wr"
)

// Provider reaches RDMA devices through the connection manager. Its methods may be called from
// any goroutine.
type Provider interface {
	// Listen accepts connections to address; port 0 picks one. A wildcard address stands for
	// every device, also for those that come later.
	//
	// Errors: ErrNoDevice if no RDMA device has the address; the system's.
	Listen(address netip.AddrPort, backlog int) (Listener, error)
	// Resolve finds the device and the path by which remote is reached.
	//
	// Errors: ErrNoDevice; ErrUnreachable; the context's.
	Resolve(ctx context.Context, remote netip.AddrPort) (Endpoint, error)
	// Counts are the objects that exist.
	Counts() Counts
	// Crossings is how often Go has called into C to post or to poll; a model counts the calls that
	// would have.
	Crossings() uint64
	// Close ends the provider; everything of it must be closed.
	Close() error
}

// Counts are what a provider's users have not closed.
type Counts struct {
	Listeners, Endpoints, Domains, MRs, SRQs, CQs, QPs int
	// RegisteredBytes is the memory of all MRs.
	RegisteredBytes int64
}

// Listener accepts connection requests.
type Listener interface {
	// Addr is the address, with the port that was picked.
	Addr() netip.AddrPort
	// Accept returns the next connection request. The caller answers it with Endpoint.Accept
	// or Endpoint.Reject, and closes it in any case.
	//
	// Errors: net.ErrClosed after Close; ErrDeviceRemoved when the device that the listener was
	// bound to is gone: listen anew when it is back.
	Accept() (Endpoint, error)
	// Close ends Accept. Connections stay. Idempotent.
	Close() error
}

// Event is what happens to a connection.
type Event uint8

// Events of an Endpoint.
const (
	// Established: both sides are ready to send.
	Established Event = iota
	// Disconnected: the peer has disconnected, or cannot be reached any more. Work requests that are outstanding
	// are flushed.
	Disconnected
	// Fatal: the queue pair has failed.
	Fatal
	// Removed: the device is gone. Everything on it is to be closed soon; what is outstanding
	// may never complete.
	Removed
)

// String names the event.
func (e Event) String() string {
	return [...]string{"established", "disconnected", "fatal error of the queue pair", "device removed"}[e]
}

// Params are one side's part of a connection.
type Params struct {
	// PrivateData goes to the peer; at most MaxRequestData, MaxAcceptData bytes.
	PrivateData []byte
	// ResponderResources is how many RDMA READs of the peer this side serves at a time (IRD),
	// InitiatorDepth how many it has outstanding (ORD).
	ResponderResources, InitiatorDepth uint8
	// RetryCount is how often a lost packet is repeated (0 to 7); RNRRetryCount how often the
	// peer repeats a message that met no receive buffer of this side, 7: for ever.
	RetryCount, RNRRetryCount uint8
}

// Longest private data of a connection request over IP, an accept and a reject.
const (
	MaxRequestData = 56
	MaxAcceptData  = 196
	MaxRejectData  = 148
)

// Endpoint is one end of a connection: a request that came in, or a route to a target.
// Its methods but OnEvent's function are called by one goroutine at a time.
type Endpoint interface {
	// Device is the device that the connection runs over; the same value for all its endpoints.
	Device() Device
	// Local and Remote are the addresses.
	Local() netip.AddrPort
	Remote() netip.AddrPort
	// Peer is what the other side sent: of a request at once, at the host after Connect.
	Peer() Params
	// CreateQP makes the endpoint's queue pair; once. Closed with the endpoint.
	CreateQP(QPConfig) (QP, error)
	// OnEvent names a function for the endpoint's events; before Accept or Connect. It is called by
	// a goroutine of the provider, one at a time, must not block and must not call the endpoint.
	// After Close it is not called any more.
	OnEvent(func(Event))
	// Accept accepts a request; Established follows.
	Accept(Params) error
	// Reject refuses a request.
	Reject(private []byte) error
	// Connect connects and returns when the target has accepted; Peer is what it sent. No event
	// Established follows.
	//
	// Errors: *RejectedError; ErrUnreachable; the context's.
	Connect(context.Context, Params) error
	// Disconnect ends the connection: what is posted to the queue pair completes with StatusFlushed. Idempotent.
	Disconnect() error
	// Drained is closed when the queue pair, after it was disconnected or has failed, takes no more receives of a
	// shared queue: the completions of those that it has taken are in the completion queue. A
	// device that is gone, or one that does not tell, never closes it: bound the wait.
	Drained() <-chan struct{}
	// Close frees the endpoint and its queue pair. Completions that have not been polled are
	// lost or come later. Idempotent.
	Close() error
}

// Attr are a device's limits.
type Attr struct {
	// Name is the device's name, mlx5_0 for instance.
	Name                                         string
	MaxQPs, MaxQPWRs, MaxCQEs, MaxSRQWRs, MaxMRs int
	// MaxMRBytes is the longest memory region.
	MaxMRBytes uint64
	// MaxResponderResources and MaxInitiatorDepth bound Params' fields.
	MaxResponderResources, MaxInitiatorDepth uint8
}

// Device is an RDMA device.
type Device interface {
	Attr() Attr
	// OpenDomain opens a protection domain.
	//
	// Errors: ErrDeviceRemoved.
	OpenDomain() (Domain, error)
	// Removed is closed when the device is gone: what its endpoints learn by an event, for who has
	// none on it now but keeps a Domain. The system may hold up the removal until all is closed.
	Removed() <-chan struct{}
}

// Domain is a protection domain: queue pairs, memory and queues that may be used together. Its
// methods may be called from any goroutine, PostSend for one queue pair by one at a time.
type Domain interface {
	// Register lets the device reach b, which must be outside of the Go heap and stay until the
	// MR is closed.
	Register(b []byte, a Access) (MR, error)
	// CreateCQ makes a completion queue for so many completions at least.
	CreateCQ(entries int) (CQ, error)
	// CreateSRQ makes a shared receive queue for so many receives.
	CreateSRQ(entries int) (SRQ, error)
	// PostSend posts work requests in order and returns how many were taken. Consecutive ones of one queue
	// pair ring its doorbell once. A queue pair that refuses its request (its send queue is full, it
	// is gone) ends the batch: the request of that queue pair is wrs[n].
	//
	// Cost: one crossing, 0 allocs.
	PostSend(wrs []SendWR) (n int, err error)
	// Doorbells is how often PostSend and PostRecv have told the device of new requests.
	Doorbells() uint64
	Close() error
}

// Access says what a device may do with memory; it may always read it locally.
type Access uint8

// Kinds of access.
const (
	// LocalWrite: receives, and RDMA READs of this side, may fill it.
	LocalWrite Access = 1 << iota
	// RemoteRead and RemoteWrite: the peer may, by its RKey. RemoteWrite needs LocalWrite.
	RemoteRead
	RemoteWrite
)

// MR is memory that a device can reach.
type MR interface {
	// Addr is the address of its first byte, as work requests and the peer name it.
	Addr() uint64
	LKey() uint32
	RKey() uint32
	// Close ends the registration. Idempotent.
	Close() error
}

// QPConfig sizes a queue pair.
type QPConfig struct {
	Domain Domain
	// SendCQ and RecvCQ may be the same.
	SendCQ, RecvCQ CQ
	// SRQ is where receives come from; nil: the queue pair has its own.
	SRQ SRQ
	// Sends and Recvs are how many work requests may be outstanding; Recvs 0 with an SRQ.
	Sends, Recvs int
	// InlineBytes is the longest data that FlagInline is used for.
	InlineBytes int
}

// QP is a reliable connected queue pair.
type QP interface {
	// Num names it in completions.
	Num() uint32
	// Handle names it in a SendWR.
	Handle() uint64
	// InlineBytes is the longest data that FlagInline can be used for.
	InlineBytes() int
	// PostRecv posts to the queue pair's own receive queue.
	PostRecv(wrs []RecvWR) (n int, err error)
}

// SRQ is a receive queue that queue pairs share.
type SRQ interface {
	// PostRecv posts receives in order and returns how many were taken. By one goroutine at a
	// time.
	//
	// Cost: one crossing, one doorbell, 0 allocs.
	PostRecv(wrs []RecvWR) (n int, err error)
	Close() error
}

// CQ is a completion queue. Poll, Arm and Wait are called by one goroutine at a time.
type CQ interface {
	// Poll takes completions.
	//
	// Cost: one crossing, 0 allocs.
	Poll(dst []WC) (n int, err error)
	// Arm asks for a notice of the next completion. What came before is not noticed: poll once
	// more before Wait.
	Arm() error
	// Wait sleeps until a notice has come, and takes it.
	//
	// Errors: os.ErrDeadlineExceeded; net.ErrClosed after Close.
	Wait() error
	// SetDeadline ends Wait at that time, a present one too; the zero time: never. From any
	// goroutine.
	SetDeadline(time.Time) error
	Close() error
}

// Work requests and completions, which machines make and read without knowing this package.
type (
	SendWR   = wr.Send
	RecvWR   = wr.Recv
	WC       = wr.Completion
	Op       = wr.Op
	Flags    = wr.Flags
	WCStatus = wr.Status
)

// Operations, flags and outcomes: see package wr.
const (
	OpSend           = wr.OpSend
	OpSendInvalidate = wr.OpSendInvalidate
	OpWrite          = wr.OpWrite
	OpRead           = wr.OpRead
	OpRecv           = wr.OpRecv

	FlagSignaled = wr.FlagSignaled
	FlagFence    = wr.FlagFence
	FlagInline   = wr.FlagInline

	StatusOK            = wr.StatusOK
	StatusLocalLength   = wr.StatusLocalLength
	StatusLocalProt     = wr.StatusLocalProt
	StatusFlushed       = wr.StatusFlushed
	StatusLocalAccess   = wr.StatusLocalAccess
	StatusRemoteInvalid = wr.StatusRemoteInvalid
	StatusRemoteAccess  = wr.StatusRemoteAccess
	StatusRemoteOp      = wr.StatusRemoteOp
	StatusRetryExceeded = wr.StatusRetryExceeded
	StatusRNRExceeded   = wr.StatusRNRExceeded
	StatusGeneral       = wr.StatusGeneral
)

// Errors to decide by.
var (
	// ErrUnavailable: the program was built without RDMA, or the machine has no RDMA stack.
	ErrUnavailable = errors.New("RDMA is not available")
	// ErrNoDevice: no RDMA device has that address, or reaches it.
	ErrNoDevice = errors.New("no RDMA device for the address")
	// ErrUnreachable: the peer does not answer, or nobody listens there.
	ErrUnreachable = errors.New("unreachable")
	// ErrDeviceRemoved: the device is gone.
	ErrDeviceRemoved = errors.New("the RDMA device was removed")
	// ErrResources: the device or the system has no more of what was asked for.
	ErrResources = errors.New("out of RDMA resources")
	// ErrQueueFull: a send or receive queue takes no more now.
	ErrQueueFull = errors.New("queue full")
)

// RejectedError: the target has refused the connection.
type RejectedError struct {
	// Reason is the CM's, 28 for a target that has rejected it itself; PrivateData what it
	// gave with that.
	Reason      int
	PrivateData []byte
}

func (e *RejectedError) Error() string {
	return fmt.Sprintf("connection rejected (CM reason %d, %d bytes of private data)", e.Reason, len(e.PrivateData))
}
