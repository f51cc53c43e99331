// Package verbs is jbofd's interface to RDMA: devices, memory regions, queue pairs, completion queues and the
// connection manager, behind small interfaces whose calls take batches. Open returns the implementation over libibverbs
// and librdmacm (build tag rdma). Package memverbs implements the same interfaces as a model in memory.
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
// Work requests and completions are structs without pointers in arrays that the caller owns, so that one call into C
// posts or polls a whole batch. Memory is described by address and key, as on the wire. The caller chooses a work
// request's ID. By convention it holds a tag and a generation, because a completion may arrive after the object it was
// posted for is gone.
//
// The caller closes everything that it opened, in the order QP, SRQ, CQ, MR, Domain. Provider.Counts returns the number
// of objects that are still open.
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

// Provider gives access to RDMA devices through the connection manager. Its methods may be called from any goroutine.
type Provider interface {
	// Listen accepts connections to address; port 0 picks a free port. A wildcard address covers every device,
	// including devices that appear later.
	//
	// Errors: ErrNoDevice if no RDMA device has the address; otherwise the system's error.
	Listen(address netip.AddrPort, backlog int) (Listener, error)
	// Resolve finds the device and the route that lead to remote.
	//
	// Errors: ErrNoDevice; ErrUnreachable; the error of the context.
	Resolve(ctx context.Context, remote netip.AddrPort) (Endpoint, error)
	// ResolveFrom is Resolve for a connection that comes from local, the address of a device of this machine; the zero
	// Addr: that of the route.
	//
	// Errors: those of Resolve; ErrNoDevice also if no device has local.
	ResolveFrom(ctx context.Context, local netip.Addr, remote netip.AddrPort) (Endpoint, error)
	// Counts returns how many objects are open.
	Counts() Counts
	// Crossings returns how often Go has called into C to post or to poll. A model in memory counts the calls that
	// would have crossed.
	Crossings() uint64
	// Close closes the provider. The caller must have closed everything that it opened from the provider.
	Close() error
}

// Counts is the number of objects that a provider's users have not closed.
type Counts struct {
	Listeners, Endpoints, Domains, MRs, SRQs, CQs, QPs int
	// RegisteredBytes is the total size of all memory regions.
	RegisteredBytes int64
}

// Listener accepts connection requests.
type Listener interface {
	// Addr returns the address that the listener is bound to, with the port that was picked.
	Addr() netip.AddrPort
	// Accept returns the next connection request. The caller answers it with Endpoint.Accept or Endpoint.Reject, and
	// closes the endpoint in either case.
	//
	// Errors: net.ErrClosed after Close; ErrDeviceRemoved after the removal of the device that the listener was bound
	// to. The caller may then listen again once the device is back.
	Accept() (Endpoint, error)
	// Close makes Accept return. Established connections stay. Idempotent.
	Close() error
}

// Event is a change in the state of a connection.
type Event uint8

// Events of an Endpoint.
const (
	// Established: both sides are ready to send.
	Established Event = iota
	// Disconnected: the peer has disconnected or has become unreachable. Outstanding work requests are flushed.
	Disconnected
	// Fatal: the queue pair has failed.
	Fatal
	// Removed: the device was removed. The user must close everything on it soon. Outstanding work requests may never
	// complete.
	Removed
)

// String names the event.
func (e Event) String() string {
	return [...]string{"established", "disconnected", "fatal error of the queue pair", "device removed"}[e]
}

// Params are the connection parameters of one side.
type Params struct {
	// PrivateData is sent to the peer. It is limited to MaxRequestData, MaxAcceptData or MaxRejectData bytes.
	PrivateData []byte
	// ResponderResources is the number of the peer's RDMA READs that this side serves at a time (IRD). InitiatorDepth
	// is the number of RDMA READs that this side may have outstanding (ORD).
	ResponderResources, InitiatorDepth uint8
	// RetryCount is the number of retransmissions of a lost packet (0 to 7). RNRRetryCount is the number of times that
	// the peer retries a message for which this side had no receive; 7 means without limit.
	RetryCount, RNRRetryCount uint8
}

// The maximum lengths of private data in a connection request over IP, an accept and a reject.
const (
	MaxRequestData = 56
	MaxAcceptData  = 196
	MaxRejectData  = 148
)

// Endpoint is one end of a connection: an incoming request or a route to a target. One goroutine at a time calls its
// methods; any goroutine may call Drained. The function given to OnEvent runs in a goroutine of the provider.
type Endpoint interface {
	// Device returns the device that carries the connection. All endpoints of one device return the same value.
	Device() Device
	// Local and Remote return the addresses.
	Local() netip.AddrPort
	Remote() netip.AddrPort
	// Peer returns the parameters that the other side sent. They are available at once for an incoming request, and
	// after Connect at the host.
	Peer() Params
	// CreateQP creates the endpoint's only queue pair. It is closed with the endpoint.
	CreateQP(QPConfig) (QP, error)
	// OnEvent sets the function that receives the endpoint's events. Call it before Accept or Connect. A goroutine of
	// the provider makes the calls, one at a time. The function must not block and must not call the endpoint. It is
	// not called after Close has returned.
	OnEvent(func(Event))
	// Accept accepts a request. The event Established follows.
	Accept(Params) error
	// Reject refuses a request.
	Reject(private []byte) error
	// Connect connects and returns when the target has accepted. Peer then returns the target's parameters. No event
	// Established follows.
	//
	// Errors: *RejectedError; ErrUnreachable; the error of the context.
	Connect(context.Context, Params) error
	// Disconnect ends the connection. Work requests of the queue pair complete with StatusFlushed. Idempotent.
	Disconnect() error
	// Drained is closed when a queue pair that was disconnected or has failed takes no more receives from a shared
	// receive queue. The completions of the receives that it took are then in the completion queue. A removed device,
	// or one that does not report this event, never closes the channel, so the caller must bound its wait.
	Drained() <-chan struct{}
	// Close frees the endpoint and its queue pair. Completions that were not polled yet are lost or arrive later.
	// Idempotent.
	Close() error
}

// Attr holds a device's limits.
type Attr struct {
	// Name is the device's name, for example mlx5_0.
	Name                                         string
	MaxQPs, MaxQPWRs, MaxCQEs, MaxSRQWRs, MaxMRs int
	// MaxMRBytes is the maximum length of a memory region.
	MaxMRBytes uint64
	// MaxResponderResources and MaxInitiatorDepth are the maxima of the fields of Params.
	MaxResponderResources, MaxInitiatorDepth uint8
}

// Device is an RDMA device.
type Device interface {
	Attr() Attr
	// OpenDomain opens a protection domain.
	//
	// Errors: ErrDeviceRemoved.
	OpenDomain() (Domain, error)
	// Removed is closed when the device is removed. Endpoints learn of the removal by an event; the channel is for
	// users that hold only a Domain. The system may delay the removal until all objects are closed.
	Removed() <-chan struct{}
}

// Domain is a protection domain: a set of queue pairs, memory regions and queues that may be used together. Its methods
// may be called from any goroutine, but only one goroutine at a time may post to one queue pair.
type Domain interface {
	// Register makes b accessible to the device. The memory must lie outside of the Go heap and must stay valid until
	// the MR is closed.
	Register(b []byte, a Access) (MR, error)
	// CreateCQ creates a completion queue with room for at least entries completions.
	CreateCQ(entries int) (CQ, error)
	// CreateSRQ creates a shared receive queue with room for entries receives.
	CreateSRQ(entries int) (SRQ, error)
	// PostSend posts work requests in order and returns how many were accepted. Consecutive requests of one queue pair
	// ring its doorbell once. The batch ends at the first request that its queue pair refuses, because its send queue
	// is full or the queue pair is closed; that request is wrs[n].
	//
	// Cost: one crossing, 0 allocs.
	PostSend(wrs []SendWR) (n int, err error)
	// Doorbells returns how often PostSend and PostRecv have rung a doorbell.
	Doorbells() uint64
	Close() error
}

// Access is the set of operations that a device may perform on memory. It may always read the memory locally.
type Access uint8

// Kinds of access.
const (
	// LocalWrite permits receives and this side's RDMA READs to write to the memory.
	LocalWrite Access = 1 << iota
	// RemoteRead and RemoteWrite permit the peer to read and to write with the RKey. RemoteWrite requires LocalWrite.
	RemoteRead
	RemoteWrite
)

// MR is a memory region: memory that is registered with a device.
type MR interface {
	// Addr returns the address of the first byte, as used in work requests and by the peer.
	Addr() uint64
	LKey() uint32
	RKey() uint32
	// Close ends the registration. Idempotent.
	Close() error
}

// QPConfig sizes a queue pair.
type QPConfig struct {
	Domain Domain
	// SendCQ and RecvCQ may be the same completion queue.
	SendCQ, RecvCQ CQ
	// SRQ is the shared receive queue; nil if the queue pair has a receive queue of its own.
	SRQ SRQ
	// Sends and Recvs are the sizes of the send and receive queue. Recvs is 0 with an SRQ.
	Sends, Recvs int
	// InlineBytes is the maximum length of data that is posted with FlagInline.
	InlineBytes int
}

// QP is a reliable connected queue pair.
type QP interface {
	// Num returns the number that identifies the queue pair in completions.
	Num() uint32
	// Handle returns the value that identifies the queue pair in a SendWR.
	Handle() uint64
	// InlineBytes returns the maximum length of data that may be posted with FlagInline.
	InlineBytes() int
	// PostRecv posts to the queue pair's own receive queue.
	PostRecv(wrs []RecvWR) (n int, err error)
}

// SRQ is a receive queue that several queue pairs share.
type SRQ interface {
	// PostRecv posts receives in order and returns how many were accepted. One goroutine at a time may call it.
	//
	// Cost: one crossing, one doorbell, 0 allocs.
	PostRecv(wrs []RecvWR) (n int, err error)
	Close() error
}

// CQ is a completion queue. Poll, Arm and Wait are called by one goroutine at a time.
type CQ interface {
	// Poll removes completions from the queue and copies them to dst.
	//
	// Cost: one crossing, 0 allocs.
	Poll(dst []WC) (n int, err error)
	// Arm requests a notification of the next completion. Completions that arrived earlier cause no notification, so
	// the caller must poll once more between Arm and Wait.
	Arm() error
	// Wait blocks until there is a notification, and consumes it.
	//
	// Errors: os.ErrDeadlineExceeded; net.ErrClosed after Close.
	Wait() error
	// SetDeadline sets the time at which Wait returns, for a Wait in progress too; the zero time means no deadline. It
	// may be called from any goroutine.
	SetDeadline(time.Time) error
	Close() error
}

// Work requests and completions are defined in package wr, so that state machines need not import this package.
type (
	SendWR   = wr.Send
	RecvWR   = wr.Recv
	WC       = wr.Completion
	Op       = wr.Op
	Flags    = wr.Flags
	WCStatus = wr.Status
)

// Operations, flags and outcomes, as defined in package wr.
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

// Sentinel errors.
var (
	// ErrUnavailable: the program was built without RDMA, or the machine has no RDMA stack.
	ErrUnavailable = errors.New("RDMA is not available")
	// ErrNoDevice: no RDMA device has the address or a route to it.
	ErrNoDevice = errors.New("no RDMA device for the address")
	// ErrUnreachable: the peer does not answer, or it does not listen on the port.
	ErrUnreachable = errors.New("unreachable")
	// ErrDeviceRemoved: the device was removed.
	ErrDeviceRemoved = errors.New("the RDMA device was removed")
	// ErrResources: the device or the system lacks the resources that were requested.
	ErrResources = errors.New("out of RDMA resources")
	// ErrQueueFull: a send or receive queue is full.
	ErrQueueFull = errors.New("queue full")
)

// RejectedError: the target rejected the connection.
type RejectedError struct {
	// Reason is the reason code of the connection manager; it is 28 if the target itself rejected the connection.
	// PrivateData is the private data of that reject.
	Reason      int
	PrivateData []byte
}

func (e *RejectedError) Error() string {
	return fmt.Sprintf("connection rejected (CM reason %d, %d bytes of private data)", e.Reason, len(e.PrivateData))
}
