// The C side of package verbs: thin calls over librdmacm and libibverbs that Go can make
// without a pointer of its own left behind. Objects are named by their address as a number
// (uint64_t). A call that can fail returns a negative errno, or stores one in *err. Nothing here
// calls Go.
#ifndef JBOF_RDMA_H
#define JBOF_RDMA_H

#include <stdint.h>

// An address: IPv4 mapped into ip, or IPv6.
struct jbof_addr {
	uint8_t ip[16];
	uint32_t scope;
	uint16_t port;
	uint8_t v4;
	uint8_t none; // no address at all
};

struct jbof_param {
	uint8_t data[256];
	uint16_t len;
	uint8_t responder, initiator, retry, rnr;
};

// A connection manager's event. For a connection request id is the new identifier and listener
// the one that it came to.
struct jbof_cm_event {
	uint64_t event, id, listener;
	int32_t kind, status;
	struct jbof_param param;
};

// An asynchronous event of a device, reduced to what kind of object it is about: by object, the
// name that Go has for it (a queue pair's is its identifier's). type and element are for the
// acknowledgement.
struct jbof_async_event {
	uint64_t object, element;
	uint32_t type;
	uint32_t kind; // enum jbof_async
};

enum jbof_async {
	JBOF_ASYNC_OTHER,
	JBOF_ASYNC_QP,     // a queue pair has failed
	JBOF_ASYNC_LAST,   // a queue pair in the error state takes no more shared receives
	JBOF_ASYNC_CQ,     // a completion queue has overrun
	JBOF_ASYNC_SRQ,    // a shared receive queue has failed
	JBOF_ASYNC_COMM,   // a queue pair got a message before the CM's word that it is connected
	JBOF_ASYNC_DEVICE, // the device has failed
};

struct jbof_attr {
	char name[64];
	uint64_t max_mr_bytes;
	int32_t max_qp, max_qp_wr, max_cqe, max_srq_wr, max_mr, responder, initiator, pad;
};

struct jbof_qp_config {
	uint64_t domain, send_cq, recv_cq, srq;
	uint32_t sends, recvs, inline_bytes, pad;
};

struct jbof_qp_info {
	uint64_t handle;
	uint32_t num, inline_bytes;
};

struct jbof_mr_info {
	uint64_t mr;
	uint32_t lkey, rkey;
};

// SendWR, RecvWR and WC of verbs.go, to the byte: Go's slices are passed as they are.
struct jbof_send_wr {
	uint64_t id, qp, addr, remote_addr;
	uint32_t len, lkey, rkey;
	uint8_t op, flags, pad[2];
};

struct jbof_recv_wr {
	uint64_t id, addr;
	uint32_t len, lkey;
};

struct jbof_wc {
	uint64_t id;
	uint32_t qp_num, len, rkey, vendor_err;
	uint8_t status, op, invalidated, pad[5];
};

// What became of a batch: how many were taken, why no more (a positive errno, 0: all were), how
// often the device was told.
struct jbof_posted {
	int32_t n, err, doorbells;
};

uint64_t jbof_channel_open(int32_t *fd, int32_t *err);
void jbof_channel_close(uint64_t channel);
int32_t jbof_cm_get(uint64_t channel, struct jbof_cm_event *out);
void jbof_cm_ack(uint64_t event);

uint64_t jbof_id_create(uint64_t channel, int32_t *err);
int32_t jbof_id_destroy(uint64_t id);
int32_t jbof_id_bind(uint64_t id, const struct jbof_addr *a);
int32_t jbof_id_listen(uint64_t id, int32_t backlog);
int32_t jbof_id_resolve_addr(uint64_t id, const struct jbof_addr *from, const struct jbof_addr *to, int32_t timeout_ms);
int32_t jbof_id_resolve_route(uint64_t id, int32_t timeout_ms);
int32_t jbof_id_connect(uint64_t id, const struct jbof_param *p);
int32_t jbof_id_accept(uint64_t id, const struct jbof_param *p);
int32_t jbof_id_reject(uint64_t id, const struct jbof_param *p);
int32_t jbof_id_disconnect(uint64_t id);
int32_t jbof_id_notify(uint64_t id);
uint64_t jbof_id_context(uint64_t id);
void jbof_id_addrs(uint64_t id, struct jbof_addr *local, struct jbof_addr *remote);

int32_t jbof_context_attr(uint64_t context, struct jbof_attr *out);
int32_t jbof_context_async_fd(uint64_t context);
int32_t jbof_context_async(uint64_t context, struct jbof_async_event *out);
void jbof_context_ack(const struct jbof_async_event *e);
void jbof_context_let_go(uint64_t context);

uint64_t jbof_domain_open(uint64_t context, int32_t *err);
int32_t jbof_domain_close(uint64_t domain);
int32_t jbof_mr_register(uint64_t domain, uint64_t addr, uint64_t len, uint32_t access, struct jbof_mr_info *out);
int32_t jbof_mr_close(uint64_t mr);
uint64_t jbof_cq_create(uint64_t domain, int32_t entries, int32_t *fd, int32_t *err);
int32_t jbof_cq_close(uint64_t cq);
int32_t jbof_cq_poll(uint64_t cq, struct jbof_wc *out, int32_t n);
int32_t jbof_cq_arm(uint64_t cq);
int32_t jbof_cq_event(uint64_t cq);
uint64_t jbof_srq_create(uint64_t domain, uint32_t entries, int32_t *err);
int32_t jbof_srq_close(uint64_t srq);
struct jbof_posted jbof_srq_post(uint64_t srq, const struct jbof_recv_wr *wrs, int32_t n);
int32_t jbof_qp_create(uint64_t id, const struct jbof_qp_config *c, struct jbof_qp_info *out);
int32_t jbof_qp_close(uint64_t id, uint64_t domain, uint64_t handle);
struct jbof_posted jbof_qp_post_recv(uint64_t domain, uint64_t handle, const struct jbof_recv_wr *wrs, int32_t n);
struct jbof_posted jbof_post_send(uint64_t domain, const struct jbof_send_wr *wrs, int32_t n);

#endif
