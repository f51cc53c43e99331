//go:build rdma && cgo

package verbs

/*
#cgo CFLAGS: -Wall -O2
#cgo LDFLAGS: -lrdmacm -libverbs

#include "rdma.h"

// Nothing in rdma.c keeps a pointer or calls Go.
#cgo noescape jbof_channel_open
#cgo noescape jbof_cm_get
#cgo noescape jbof_id_create
#cgo noescape jbof_id_bind
#cgo noescape jbof_id_resolve_addr
#cgo noescape jbof_id_connect
#cgo noescape jbof_id_accept
#cgo noescape jbof_id_reject
#cgo noescape jbof_id_addrs
#cgo noescape jbof_context_attr
#cgo noescape jbof_context_async
#cgo noescape jbof_context_ack
#cgo noescape jbof_domain_open
#cgo noescape jbof_mr_register
#cgo noescape jbof_cq_create
#cgo noescape jbof_cq_poll
#cgo noescape jbof_srq_create
#cgo noescape jbof_srq_post
#cgo noescape jbof_qp_create
#cgo noescape jbof_qp_post_recv
#cgo noescape jbof_post_send
#cgo nocallback jbof_channel_open
#cgo nocallback jbof_channel_close
#cgo nocallback jbof_cm_get
#cgo nocallback jbof_cm_ack
#cgo nocallback jbof_id_create
#cgo nocallback jbof_id_destroy
#cgo nocallback jbof_id_bind
#cgo nocallback jbof_id_listen
#cgo nocallback jbof_id_resolve_addr
#cgo nocallback jbof_id_resolve_route
#cgo nocallback jbof_id_connect
#cgo nocallback jbof_id_accept
#cgo nocallback jbof_id_reject
#cgo nocallback jbof_id_disconnect
#cgo nocallback jbof_id_notify
#cgo nocallback jbof_id_context
#cgo nocallback jbof_id_addrs
#cgo nocallback jbof_context_attr
#cgo nocallback jbof_context_async_fd
#cgo nocallback jbof_context_async
#cgo nocallback jbof_context_ack
#cgo nocallback jbof_context_let_go
#cgo nocallback jbof_domain_open
#cgo nocallback jbof_domain_close
#cgo nocallback jbof_mr_register
#cgo nocallback jbof_mr_close
#cgo nocallback jbof_cq_create
#cgo nocallback jbof_cq_close
#cgo nocallback jbof_cq_poll
#cgo nocallback jbof_cq_arm
#cgo nocallback jbof_cq_event
#cgo nocallback jbof_srq_create
#cgo nocallback jbof_srq_close
#cgo nocallback jbof_srq_post
#cgo nocallback jbof_qp_create
#cgo nocallback jbof_qp_close
#cgo nocallback jbof_qp_post_recv
#cgo nocallback jbof_post_send
*/
import "C"

import (
	"net"
	"net/netip"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// This file contains all calls into C. Each function makes one call and takes Go types. C objects are represented by
// handles.

// The memory layout of the C structs. rdma.c asserts the same numbers, so a mismatch does not compile.
var (
	_ [0]struct{} = [unsafe.Sizeof(SendWR{}) - 48]struct{}{}
	_ [0]struct{} = [unsafe.Offsetof(SendWR{}.Len) - 32]struct{}{}
	_ [0]struct{} = [unsafe.Offsetof(SendWR{}.Op) - 44]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(RecvWR{}) - 24]struct{}{}
	_ [0]struct{} = [unsafe.Offsetof(RecvWR{}.Len) - 16]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(WC{}) - 32]struct{}{}
	_ [0]struct{} = [unsafe.Offsetof(WC{}.Status) - 24]struct{}{}
	_ [0]struct{} = [unsafe.Offsetof(WC{}.Invalidated) - 26]struct{}{}
)

// handle identifies a C object by its address; 0 stands for no object.
type handle uint64

// errno converts the return value of a call: 0, or a negative error number.
func errno(r C.int32_t) unix.Errno {
	if r < 0 {
		return unix.Errno(-r)
	}
	return 0
}

func toC(a netip.AddrPort) C.struct_jbof_addr {
	ip := a.Addr()
	c := C.struct_jbof_addr{port: C.uint16_t(a.Port())}
	if ip.Is4() || ip.Is4In6() {
		c.v4 = 1
	}
	for i, b := range ip.As16() {
		c.ip[i] = C.uint8_t(b)
	}
	if n, err := strconv.ParseUint(ip.Zone(), 10, 32); err == nil {
		c.scope = C.uint32_t(n)
	} else if i, err := net.InterfaceByName(ip.Zone()); err == nil {
		c.scope = C.uint32_t(i.Index)
	}
	return c
}

func fromC(c *C.struct_jbof_addr) netip.AddrPort {
	if c.none != 0 {
		return netip.AddrPort{}
	}
	var b [16]byte
	for i := range b {
		b[i] = byte(c.ip[i])
	}
	ip := netip.AddrFrom16(b)
	switch {
	case c.v4 != 0:
		ip = netip.AddrFrom4([4]byte(b[12:]))
	case ip.Is4In6():
		ip = ip.Unmap()
	case c.scope != 0:
		ip = ip.WithZone(strconv.FormatUint(uint64(c.scope), 10))
	}
	return netip.AddrPortFrom(ip, uint16(c.port))
}

func paramToC(p Params) (c C.struct_jbof_param) {
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&c.data)), len(c.data)), p.PrivateData)
	c.len = C.uint16_t(len(p.PrivateData))
	c.responder, c.initiator = C.uint8_t(p.ResponderResources), C.uint8_t(p.InitiatorDepth)
	c.retry, c.rnr = C.uint8_t(p.RetryCount), C.uint8_t(p.RNRRetryCount)
	return c
}

// peerFromC returns the parameters that the peer sent. The connection manager swaps the two depths, to tell the
// receiver of the event what it may use. This function swaps them back, so that Params are from the sender's point of
// view.
func peerFromC(c *C.struct_jbof_param) Params {
	p := Params{ResponderResources: uint8(c.initiator), InitiatorDepth: uint8(c.responder), RetryCount: uint8(c.retry),
		RNRRetryCount: uint8(c.rnr)}
	p.PrivateData = append(p.PrivateData, unsafe.Slice((*byte)(unsafe.Pointer(&c.data)), int(c.len))...)
	return p
}

// Connection manager.

func channelOpen() (ch handle, fd int, err unix.Errno) {
	var cfd, cerr C.int32_t
	ch = handle(C.jbof_channel_open(&cfd, &cerr))
	return ch, int(cfd), errno(cerr)
}

func channelClose(ch handle) { C.jbof_channel_close(C.uint64_t(ch)) }

// cmEvent is an event of the connection manager.
type cmEvent struct {
	event, id, listener handle
	kind, status        int32
	peer                Params
}

// cmGet returns the next event, or EAGAIN if there is none. The event must be acknowledged before its identifiers can
// be destroyed.
func cmGet(ch handle) (cmEvent, unix.Errno) {
	var c C.struct_jbof_cm_event
	if e := errno(C.jbof_cm_get(C.uint64_t(ch), &c)); e != 0 {
		return cmEvent{}, e
	}
	return cmEvent{
		event: handle(c.event), id: handle(c.id), listener: handle(c.listener),
		kind: int32(c.kind), status: int32(c.status), peer: peerFromC(&c.param),
	}, 0
}

func cmAck(event handle) { C.jbof_cm_ack(C.uint64_t(event)) }

func idCreate(ch handle) (handle, unix.Errno) {
	var cerr C.int32_t
	id := C.jbof_id_create(C.uint64_t(ch), &cerr)
	return handle(id), errno(cerr)
}

func idDestroy(id handle) unix.Errno { return errno(C.jbof_id_destroy(C.uint64_t(id))) }

func idBind(id handle, a netip.AddrPort) unix.Errno {
	c := toC(a)
	return errno(C.jbof_id_bind(C.uint64_t(id), &c))
}

func idListen(id handle, backlog int) unix.Errno {
	return errno(C.jbof_id_listen(C.uint64_t(id), C.int32_t(backlog)))
}

// idResolveAddr resolves the way from an address of this machine, the zero AddrPort: any, to another one.
func idResolveAddr(id handle, from, to netip.AddrPort, timeoutMS int) unix.Errno {
	c := toC(to)
	if !from.IsValid() {
		return errno(C.jbof_id_resolve_addr(C.uint64_t(id), nil, &c, C.int32_t(timeoutMS)))
	}
	f := toC(from)
	return errno(C.jbof_id_resolve_addr(C.uint64_t(id), &f, &c, C.int32_t(timeoutMS)))
}

func idResolveRoute(id handle, timeoutMS int) unix.Errno {
	return errno(C.jbof_id_resolve_route(C.uint64_t(id), C.int32_t(timeoutMS)))
}

func idConnect(id handle, p Params) unix.Errno {
	c := paramToC(p)
	return errno(C.jbof_id_connect(C.uint64_t(id), &c))
}

func idAccept(id handle, p Params) unix.Errno {
	c := paramToC(p)
	return errno(C.jbof_id_accept(C.uint64_t(id), &c))
}

func idReject(id handle, private []byte) unix.Errno {
	c := paramToC(Params{PrivateData: private})
	return errno(C.jbof_id_reject(C.uint64_t(id), &c))
}

func idDisconnect(id handle) unix.Errno { return errno(C.jbof_id_disconnect(C.uint64_t(id))) }

// idNotify tells the connection manager that the queue pair has received a message from its peer. The connection then
// counts as established even if the connection manager's own message was lost.
func idNotify(id handle) unix.Errno { return errno(C.jbof_id_notify(C.uint64_t(id))) }

func idContext(id handle) handle { return handle(C.jbof_id_context(C.uint64_t(id))) }

func idAddrs(id handle) (local, remote netip.AddrPort) {
	var l, r C.struct_jbof_addr
	C.jbof_id_addrs(C.uint64_t(id), &l, &r)
	return fromC(&l), fromC(&r)
}

// Devices.

func contextAttr(ctx handle) (Attr, unix.Errno) {
	var c C.struct_jbof_attr
	if e := errno(C.jbof_context_attr(C.uint64_t(ctx), &c)); e != 0 {
		return Attr{}, e
	}
	return Attr{
		Name:   C.GoString(&c.name[0]),
		MaxQPs: int(c.max_qp), MaxQPWRs: int(c.max_qp_wr), MaxCQEs: int(c.max_cqe), MaxSRQWRs: int(c.max_srq_wr),
		MaxMRs:                int(c.max_mr),
		MaxMRBytes:            uint64(c.max_mr_bytes),
		MaxResponderResources: uint8(c.responder), MaxInitiatorDepth: uint8(c.initiator),
	}, 0
}

// contextAsyncFD returns a file descriptor for the device's events. The caller owns the descriptor.
func contextAsyncFD(ctx handle) (int, unix.Errno) {
	r := C.jbof_context_async_fd(C.uint64_t(ctx))
	return int(r), errno(r)
}

// asyncEvent is an event of a device. The event concerns object.
type asyncEvent struct {
	kind   int
	object handle
	c      C.struct_jbof_async_event
}

// Kinds of asyncEvent.
const (
	asyncQP     = C.JBOF_ASYNC_QP
	asyncLast   = C.JBOF_ASYNC_LAST
	asyncCQ     = C.JBOF_ASYNC_CQ
	asyncSRQ    = C.JBOF_ASYNC_SRQ
	asyncComm   = C.JBOF_ASYNC_COMM
	asyncDevice = C.JBOF_ASYNC_DEVICE
)

// contextAsync returns the next event, or EAGAIN if there is none. The event must be acknowledged before its object can
// be destroyed.
func contextAsync(ctx handle) (e asyncEvent, err unix.Errno) {
	err = errno(C.jbof_context_async(C.uint64_t(ctx), &e.c))
	e.kind, e.object = int(e.c.kind), handle(e.c.object)
	return e, err
}

func contextAck(e asyncEvent) { C.jbof_context_ack(&e.c) }

// contextLetGo tells the system not to wait for this process any longer, which has no open objects on the removed
// device.
func contextLetGo(ctx handle) { C.jbof_context_let_go(C.uint64_t(ctx)) }

func domainOpen(ctx handle) (handle, unix.Errno) {
	var cerr C.int32_t
	d := C.jbof_domain_open(C.uint64_t(ctx), &cerr)
	return handle(d), errno(cerr)
}

func domainClose(d handle) unix.Errno { return errno(C.jbof_domain_close(C.uint64_t(d))) }

func mrRegister(d handle, b []byte, a Access) (mr handle, addr uint64, lkey, rkey uint32, err unix.Errno) {
	var c C.struct_jbof_mr_info
	addr = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	err = errno(C.jbof_mr_register(C.uint64_t(d), C.uint64_t(addr), C.uint64_t(len(b)), C.uint32_t(a), &c))
	return handle(c.mr), addr, uint32(c.lkey), uint32(c.rkey), err
}

func mrClose(mr handle) unix.Errno { return errno(C.jbof_mr_close(C.uint64_t(mr))) }

// Queues.

// cqCreate returns the queue and a file descriptor for its notifications. The caller owns the descriptor.
func cqCreate(d handle, entries int) (cq handle, fd int, err unix.Errno) {
	var cfd, cerr C.int32_t
	cq = handle(C.jbof_cq_create(C.uint64_t(d), C.int32_t(entries), &cfd, &cerr))
	return cq, int(cfd), errno(cerr)
}

func cqClose(cq handle) unix.Errno { return errno(C.jbof_cq_close(C.uint64_t(cq))) }

// hot: 0 allocs
func cqPoll(cq handle, dst []WC) (int, unix.Errno) {
	r := C.jbof_cq_poll(C.uint64_t(cq), (*C.struct_jbof_wc)(unsafe.Pointer(unsafe.SliceData(dst))), C.int32_t(len(dst)))
	return max(0, int(r)), errno(r)
}

func cqArm(cq handle) unix.Errno { return errno(C.jbof_cq_arm(C.uint64_t(cq))) }

// cqEvent consumes a notification, or returns EAGAIN if there is none.
func cqEvent(cq handle) unix.Errno { return errno(C.jbof_cq_event(C.uint64_t(cq))) }

func srqCreate(d handle, entries int) (handle, unix.Errno) {
	var cerr C.int32_t
	s := C.jbof_srq_create(C.uint64_t(d), C.uint32_t(entries), &cerr)
	return handle(s), errno(cerr)
}

func srqClose(s handle) unix.Errno { return errno(C.jbof_srq_close(C.uint64_t(s))) }

// posted is the result of posting a batch.
type posted struct {
	n, doorbells int
	err          unix.Errno
}

func postedFromC(c C.struct_jbof_posted) posted {
	return posted{n: int(c.n), doorbells: int(c.doorbells), err: unix.Errno(c.err)}
}

// hot: 0 allocs
func srqPost(s handle, wrs []RecvWR) posted {
	return postedFromC(C.jbof_srq_post(C.uint64_t(s), (*C.struct_jbof_recv_wr)(unsafe.Pointer(unsafe.SliceData(wrs))),
		C.int32_t(len(wrs))))
}

// hot: 0 allocs
func qpPostRecv(d handle, qp uint64, wrs []RecvWR) posted {
	return postedFromC(C.jbof_qp_post_recv(C.uint64_t(d), C.uint64_t(qp),
		(*C.struct_jbof_recv_wr)(unsafe.Pointer(unsafe.SliceData(wrs))), C.int32_t(len(wrs))))
}

// hot: 0 allocs
func postSend(d handle, wrs []SendWR) posted {
	return postedFromC(C.jbof_post_send(C.uint64_t(d), (*C.struct_jbof_send_wr)(unsafe.Pointer(unsafe.SliceData(wrs))),
		C.int32_t(len(wrs))))
}

// qpConfig is QPConfig with handles in place of objects.
type qpConfig struct {
	domain, sendCQ, recvCQ, srq handle
	sends, recvs, inline        int
}

// qpCreate creates the queue pair of the identifier. The result qp is the value of QP.Handle.
func qpCreate(id handle, c qpConfig) (qp uint64, num uint32, inline int, err unix.Errno) {
	in := C.struct_jbof_qp_config{
		domain: C.uint64_t(c.domain), send_cq: C.uint64_t(c.sendCQ), recv_cq: C.uint64_t(c.recvCQ),
		srq:   C.uint64_t(c.srq),
		sends: C.uint32_t(c.sends), recvs: C.uint32_t(c.recvs), inline_bytes: C.uint32_t(c.inline),
	}
	var out C.struct_jbof_qp_info
	err = errno(C.jbof_qp_create(C.uint64_t(id), &in, &out))
	return uint64(out.handle), uint32(out.num), int(out.inline_bytes), err
}

func qpClose(id, d handle, qp uint64) unix.Errno {
	return errno(C.jbof_qp_close(C.uint64_t(id), C.uint64_t(d), C.uint64_t(qp)))
}
