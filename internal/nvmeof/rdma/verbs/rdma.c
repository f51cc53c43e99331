//go:build rdma && cgo

#define _GNU_SOURCE // dup3

#include "rdma.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

// The twins in Go are held to the same numbers in call_unsafe.go.
_Static_assert(sizeof(struct jbof_send_wr) == 48 && offsetof(struct jbof_send_wr, len) == 32 && offsetof(struct jbof_send_wr, op) == 44, "SendWR");
_Static_assert(sizeof(struct jbof_recv_wr) == 24 && offsetof(struct jbof_recv_wr, len) == 16, "RecvWR");
_Static_assert(sizeof(struct jbof_wc) == 32 && offsetof(struct jbof_wc, status) == 24 && offsetof(struct jbof_wc, invalidated) == 26, "WC");

// The numbers in verbs.go.
_Static_assert(IBV_WC_LOC_LEN_ERR == 1 && IBV_WC_LOC_PROT_ERR == 4 && IBV_WC_WR_FLUSH_ERR == 5 && IBV_WC_LOC_ACCESS_ERR == 8 &&
	IBV_WC_REM_INV_REQ_ERR == 9 && IBV_WC_REM_ACCESS_ERR == 10 && IBV_WC_REM_OP_ERR == 11 && IBV_WC_RETRY_EXC_ERR == 12 &&
	IBV_WC_RNR_RETRY_EXC_ERR == 13 && IBV_WC_GENERAL_ERR == 21, "WCStatus");

enum { OP_SEND, OP_SEND_INVALIDATE, OP_WRITE, OP_READ, OP_RECV };
enum { FLAG_SIGNALED = 1, FLAG_FENCE = 2, FLAG_INLINE = 4 };
enum { ACCESS_LOCAL_WRITE = 1, ACCESS_REMOTE_READ = 2, ACCESS_REMOTE_WRITE = 4 };

// How many work requests go to the device by one call at most; the arrays for them are on the
// stack.
#define BATCH 256

#define PTR(type, n) ((type *)(uintptr_t)(n))
#define NUM(p) ((uint64_t)(uintptr_t)(p))

// Set before there is a second thread, and before the libraries are first used, which is when they look.
__attribute__((constructor)) static void prepare(void)
{
	// Destroying the objects of a device that is gone then succeeds and frees their memory.
	setenv("RDMAV_ALLOW_DISASSOC_DESTROY", "1", 0);
	// Before rdma-core 52 librdmacm compares the addresses of devices as ints, and when one comes or goes
	// may take others for gone. Allocated from one arena they are near enough to each other.
	mallopt(M_ARENA_MAX, 1);
}

static int32_t failed(void) { return errno ? -errno : -EIO; }

// own_fd returns a descriptor for Go of the library's fd, which does not block any more. Both
// close their own.
static int own_fd(int fd)
{
	int flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return -1;
	return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

// --- Addresses

static void to_sockaddr(const struct jbof_addr *a, struct sockaddr_storage *s)
{
	memset(s, 0, sizeof *s);
	if (a->v4) {
		struct sockaddr_in *in = (struct sockaddr_in *)s;
		in->sin_family = AF_INET;
		in->sin_port = htons(a->port);
		memcpy(&in->sin_addr, a->ip + 12, 4);
		return;
	}
	struct sockaddr_in6 *in = (struct sockaddr_in6 *)s;
	in->sin6_family = AF_INET6;
	in->sin6_port = htons(a->port);
	in->sin6_scope_id = a->scope;
	memcpy(&in->sin6_addr, a->ip, 16);
}

static void from_sockaddr(const struct sockaddr *s, struct jbof_addr *a)
{
	memset(a, 0, sizeof *a);
	if (s->sa_family == AF_INET) {
		const struct sockaddr_in *in = (const struct sockaddr_in *)s;
		a->v4 = 1;
		a->port = ntohs(in->sin_port);
		memcpy(a->ip + 12, &in->sin_addr, 4);
	} else if (s->sa_family == AF_INET6) {
		const struct sockaddr_in6 *in = (const struct sockaddr_in6 *)s;
		a->port = ntohs(in->sin6_port);
		a->scope = in->sin6_scope_id;
		memcpy(a->ip, &in->sin6_addr, 16);
	} else {
		a->none = 1;
	}
}

// --- Connection manager

uint64_t jbof_channel_open(int32_t *fd, int32_t *err)
{
	errno = 0;
	struct rdma_event_channel *c = rdma_create_event_channel();
	if (!c) {
		*err = failed();
		return 0;
	}
	if ((*fd = own_fd(c->fd)) < 0) {
		*err = failed();
		rdma_destroy_event_channel(c);
		return 0;
	}
	return NUM(c);
}

void jbof_channel_close(uint64_t channel) { rdma_destroy_event_channel(PTR(struct rdma_event_channel, channel)); }

// rnr_timer shortens the time for which this side tells a sender to wait that met no receive: 0.64 ms (code 12 of
// the specification) instead of the 655 ms that the kernel's CM leaves it at. It is an
// optimization, so a device may refuse it.
static void rnr_timer(struct rdma_cm_id *id)
{
	struct ibv_qp_attr a = {.min_rnr_timer = 12};
	if (id->qp)
		(void)ibv_modify_qp(id->qp, &a, IBV_QP_MIN_RNR_TIMER);
}

int32_t jbof_cm_get(uint64_t channel, struct jbof_cm_event *out)
{
	struct rdma_cm_event *e;
	errno = 0;
	if (rdma_get_cm_event(PTR(struct rdma_event_channel, channel), &e))
		return failed();
	if (e->event == RDMA_CM_EVENT_ESTABLISHED)
		rnr_timer(e->id);
	memset(out, 0, sizeof *out);
	out->event = NUM(e);
	out->id = NUM(e->id);
	out->listener = NUM(e->listen_id);
	out->kind = e->event;
	out->status = e->status;
	if (e->status == -1 && errno) // librdmacm could not take in what the kernel said
		out->status = -errno;
	const struct rdma_conn_param *p = &e->param.conn;
	if (p->private_data && p->private_data_len) {
		out->param.len = p->private_data_len;
		memcpy(out->param.data, p->private_data, p->private_data_len);
	}
	out->param.responder = p->responder_resources;
	out->param.initiator = p->initiator_depth;
	out->param.retry = p->retry_count;
	out->param.rnr = p->rnr_retry_count;
	return 0;
}

void jbof_cm_ack(uint64_t event) { rdma_ack_cm_event(PTR(struct rdma_cm_event, event)); }

uint64_t jbof_id_create(uint64_t channel, int32_t *err)
{
	struct rdma_cm_id *id;
	errno = 0;
	if (rdma_create_id(PTR(struct rdma_event_channel, channel), &id, NULL, RDMA_PS_TCP)) {
		*err = failed();
		return 0;
	}
	return NUM(id);
}

int32_t jbof_id_destroy(uint64_t id) { return rdma_destroy_id(PTR(struct rdma_cm_id, id)) ? failed() : 0; }

int32_t jbof_id_bind(uint64_t id, const struct jbof_addr *a)
{
	struct sockaddr_storage s;
	to_sockaddr(a, &s);
	return rdma_bind_addr(PTR(struct rdma_cm_id, id), (struct sockaddr *)&s) ? failed() : 0;
}

int32_t jbof_id_listen(uint64_t id, int32_t backlog) { return rdma_listen(PTR(struct rdma_cm_id, id), backlog) ? failed() : 0; }

int32_t jbof_id_resolve_addr(uint64_t id, const struct jbof_addr *from, const struct jbof_addr *to, int32_t timeout_ms)
{
	struct sockaddr_storage src, dst;
	if (from)
		to_sockaddr(from, &src);
	to_sockaddr(to, &dst);
	return rdma_resolve_addr(PTR(struct rdma_cm_id, id), from ? (struct sockaddr *)&src : NULL,
				 (struct sockaddr *)&dst, timeout_ms) ? failed() : 0;
}

int32_t jbof_id_resolve_route(uint64_t id, int32_t timeout_ms)
{
	return rdma_resolve_route(PTR(struct rdma_cm_id, id), timeout_ms) ? failed() : 0;
}

static struct rdma_conn_param conn_param(const struct jbof_param *p)
{
	return (struct rdma_conn_param){
		.private_data = p->data,
		.private_data_len = (uint8_t)p->len,
		.responder_resources = p->responder,
		.initiator_depth = p->initiator,
		.retry_count = p->retry,
		.rnr_retry_count = p->rnr,
	};
}

int32_t jbof_id_connect(uint64_t id, const struct jbof_param *p)
{
	struct rdma_conn_param c = conn_param(p);
	return rdma_connect(PTR(struct rdma_cm_id, id), &c) ? failed() : 0;
}

int32_t jbof_id_accept(uint64_t id, const struct jbof_param *p)
{
	struct rdma_conn_param c = conn_param(p);
	if (rdma_accept(PTR(struct rdma_cm_id, id), &c))
		return failed();
	rnr_timer(PTR(struct rdma_cm_id, id)); // the peer may send before this side is told
	return 0;
}

int32_t jbof_id_reject(uint64_t id, const struct jbof_param *p)
{
	return rdma_reject(PTR(struct rdma_cm_id, id), p->data, (uint8_t)p->len) ? failed() : 0;
}

int32_t jbof_id_disconnect(uint64_t id) { return rdma_disconnect(PTR(struct rdma_cm_id, id)) ? failed() : 0; }

int32_t jbof_id_notify(uint64_t id) { return rdma_notify(PTR(struct rdma_cm_id, id), IBV_EVENT_COMM_EST) ? failed() : 0; }

uint64_t jbof_id_context(uint64_t id) { return NUM(PTR(struct rdma_cm_id, id)->verbs); }

void jbof_id_addrs(uint64_t id, struct jbof_addr *local, struct jbof_addr *remote)
{
	from_sockaddr(rdma_get_local_addr(PTR(struct rdma_cm_id, id)), local);
	from_sockaddr(rdma_get_peer_addr(PTR(struct rdma_cm_id, id)), remote);
}

// --- Devices

static uint8_t below_256(int n) { return n < 0 ? 0 : n > 255 ? 255 : (uint8_t)n; }

int32_t jbof_context_attr(uint64_t context, struct jbof_attr *out)
{
	struct ibv_context *c = PTR(struct ibv_context, context);
	struct ibv_device_attr a;
	int err = ibv_query_device(c, &a);
	if (err)
		return -err;
	memset(out, 0, sizeof *out);
	strncpy(out->name, ibv_get_device_name(c->device), sizeof out->name - 1);
	out->max_mr_bytes = a.max_mr_size;
	out->max_qp = a.max_qp;
	out->max_qp_wr = a.max_qp_wr;
	out->max_cqe = a.max_cqe;
	out->max_srq_wr = a.max_srq_wr;
	out->max_mr = a.max_mr;
	out->responder = below_256(a.max_qp_rd_atom);
	out->initiator = below_256(a.max_qp_init_rd_atom);
	return 0;
}

int32_t jbof_context_async_fd(uint64_t context)
{
	int fd = own_fd(PTR(struct ibv_context, context)->async_fd);
	return fd < 0 ? failed() : fd;
}

int32_t jbof_context_async(uint64_t context, struct jbof_async_event *out)
{
	struct ibv_async_event e;
	memset(&e, 0, sizeof e);
	errno = 0;
	if (ibv_get_async_event(PTR(struct ibv_context, context), &e))
		return failed();
	*out = (struct jbof_async_event){.type = e.event_type};
	memcpy(&out->element, &e.element, sizeof out->element);
	// The elements exist until the event is acknowledged.
	switch (e.event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
		out->kind = JBOF_ASYNC_QP;
		out->object = NUM(e.element.qp->qp_context);
		break;
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		out->kind = JBOF_ASYNC_LAST;
		out->object = NUM(e.element.qp->qp_context);
		break;
	case IBV_EVENT_COMM_EST:
		out->kind = JBOF_ASYNC_COMM;
		out->object = NUM(e.element.qp->qp_context);
		break;
	case IBV_EVENT_CQ_ERR:
		out->kind = JBOF_ASYNC_CQ;
		out->object = NUM(e.element.cq->cq_context);
		break;
	case IBV_EVENT_SRQ_ERR:
		out->kind = JBOF_ASYNC_SRQ;
		out->object = NUM(e.element.srq);
		break;
	case IBV_EVENT_DEVICE_FATAL:
		out->kind = JBOF_ASYNC_DEVICE;
		break;
	default:
		out->kind = JBOF_ASYNC_OTHER;
	}
	return 0;
}

void jbof_context_ack(const struct jbof_async_event *e)
{
	struct ibv_async_event a = {.event_type = e->type};
	memcpy(&a.element, &e->element, sizeof e->element);
	ibv_ack_async_event(&a);
}

// jbof_context_let_go lets go of a removed device. librdmacm closes the context of a removed
// device only when it next meets a new one, and a kernel driver that cannot cut off its users
// (rxe) holds up the removal until all files are closed. So the context's files are exchanged
// for ones that mean nothing. Nothing may use the context any more but librdmacm, for closing.
void jbof_context_let_go(uint64_t context)
{
	struct ibv_context *c = PTR(struct ibv_context, context);
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (null < 0)
		return;
	dup3(null, c->cmd_fd, O_CLOEXEC);
	dup3(null, c->async_fd, O_CLOEXEC);
	close(null);
}

// --- Protection domains, and their queue pairs by handle
//
// A handle is an index into the domain's table (low half) and the generation of that entry (high
// half), so that a request for a queue pair that has been closed, also one just now by another
// thread, is refused. Entries stay until the domain is closed; an entry's lock is held while
// its queue pair is posted to, and is free but for that moment.

#define CHUNK 256
#define CHUNKS 4096

struct slot {
	pthread_mutex_t mu;
	struct ibv_qp *qp;
	uint32_t generation;
	uint32_t next_free; // index + 1
};

struct domain {
	struct ibv_pd *pd;
	pthread_mutex_t mu; // over free and used
	uint32_t free;      // index + 1
	uint32_t used;
	uint32_t vector; // where the next completion queue's interrupts go
	struct slot *chunks[CHUNKS];
};

static struct slot *slot_at(struct domain *d, uint32_t i) { return &d->chunks[i / CHUNK][i % CHUNK]; }

static uint64_t slot_take(struct domain *d, struct ibv_qp *qp)
{
	uint32_t i;
	pthread_mutex_lock(&d->mu);
	if (d->free) {
		i = d->free - 1;
		d->free = slot_at(d, i)->next_free;
	} else {
		i = d->used;
		if (i == CHUNK * CHUNKS || (i % CHUNK == 0 && !(d->chunks[i / CHUNK] = calloc(CHUNK, sizeof(struct slot))))) {
			pthread_mutex_unlock(&d->mu);
			return 0;
		}
		pthread_mutex_init(&slot_at(d, i)->mu, NULL);
		slot_at(d, i)->generation = 1;
		__atomic_store_n(&d->used, i + 1, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&d->mu);
	struct slot *s = slot_at(d, i);
	pthread_mutex_lock(&s->mu);
	s->qp = qp;
	uint64_t handle = (uint64_t)s->generation << 32 | i;
	pthread_mutex_unlock(&s->mu);
	return handle;
}

// slot_lock returns the entry of a handle, locked, or NULL if its queue pair is closed.
static struct slot *slot_lock(struct domain *d, uint64_t handle)
{
	uint32_t i = (uint32_t)handle;
	if (i >= __atomic_load_n(&d->used, __ATOMIC_ACQUIRE))
		return NULL;
	struct slot *s = slot_at(d, i);
	pthread_mutex_lock(&s->mu);
	if (s->generation == handle >> 32 && s->qp)
		return s;
	pthread_mutex_unlock(&s->mu);
	return NULL;
}

static void slot_give(struct domain *d, uint64_t handle)
{
	struct slot *s = slot_lock(d, handle);
	if (!s)
		return;
	s->qp = NULL;
	if (++s->generation == 0)
		s->generation = 1;
	pthread_mutex_unlock(&s->mu);
	pthread_mutex_lock(&d->mu);
	s->next_free = d->free;
	d->free = (uint32_t)handle + 1;
	pthread_mutex_unlock(&d->mu);
}

uint64_t jbof_domain_open(uint64_t context, int32_t *err)
{
	struct domain *d = calloc(1, sizeof *d);
	errno = ENOMEM;
	if (!d || !(d->pd = ibv_alloc_pd(PTR(struct ibv_context, context)))) {
		*err = failed();
		free(d);
		return 0;
	}
	pthread_mutex_init(&d->mu, NULL);
	return NUM(d);
}

int32_t jbof_domain_close(uint64_t domain)
{
	struct domain *d = PTR(struct domain, domain);
	int err = ibv_dealloc_pd(d->pd);
	if (err && err != EIO && err != ENODEV)
		return -err;
	for (int i = 0; i < CHUNKS; i++)
		free(d->chunks[i]);
	free(d);
	return 0;
}

int32_t jbof_mr_register(uint64_t domain, uint64_t addr, uint64_t len, uint32_t access, struct jbof_mr_info *out)
{
	int flags = (access & ACCESS_LOCAL_WRITE ? IBV_ACCESS_LOCAL_WRITE : 0) | (access & ACCESS_REMOTE_READ ? IBV_ACCESS_REMOTE_READ : 0) |
		(access & ACCESS_REMOTE_WRITE ? IBV_ACCESS_REMOTE_WRITE : 0);
	errno = 0;
	struct ibv_mr *mr = ibv_reg_mr(PTR(struct domain, domain)->pd, PTR(void, addr), len, flags);
	if (!mr)
		return failed();
	*out = (struct jbof_mr_info){NUM(mr), mr->lkey, mr->rkey};
	return 0;
}

int32_t jbof_mr_close(uint64_t mr) { return -ibv_dereg_mr(PTR(struct ibv_mr, mr)); }

// --- Completion queues

// Notices that are acknowledged together, because each time takes a lock.
#define ACK_EVERY 64

struct cq {
	struct ibv_cq *cq;
	struct ibv_comp_channel *channel;
	unsigned unacked;
};

uint64_t jbof_cq_create(uint64_t domain, int32_t entries, int32_t *fd, int32_t *err)
{
	struct domain *d = PTR(struct domain, domain);
	struct ibv_context *context = d->pd->context;
	struct cq *q = calloc(1, sizeof *q);
	*fd = -1;
	errno = ENOMEM;
	if (!q)
		goto failed;
	if (!(q->channel = ibv_create_comp_channel(context)))
		goto failed;
	if ((*fd = own_fd(q->channel->fd)) < 0)
		goto failed;
	unsigned vectors = context->num_comp_vectors > 0 ? (unsigned)context->num_comp_vectors : 1;
	int vector = (int)(__atomic_fetch_add(&d->vector, 1, __ATOMIC_RELAXED) % vectors);
	if (!(q->cq = ibv_create_cq(context, entries, q, q->channel, vector)))
		goto failed;
	return NUM(q);
failed:
	*err = failed();
	if (*fd >= 0)
		close(*fd);
	if (q && q->channel)
		ibv_destroy_comp_channel(q->channel);
	free(q);
	return 0;
}

int32_t jbof_cq_close(uint64_t cq)
{
	struct cq *q = PTR(struct cq, cq);
	ibv_ack_cq_events(q->cq, q->unacked); // or it would be waited for
	q->unacked = 0;
	int err = ibv_destroy_cq(q->cq);
	if (err && err != EIO && err != ENODEV)
		return -err;
	ibv_destroy_comp_channel(q->channel);
	free(q);
	return -err;
}

int32_t jbof_cq_poll(uint64_t cq, struct jbof_wc *out, int32_t n)
{
	struct ibv_cq *q = PTR(struct cq, cq)->cq;
	struct ibv_wc wc[BATCH];
	int32_t got = 0;
	while (got < n) {
		int want = n - got < BATCH ? n - got : BATCH;
		int m = ibv_poll_cq(q, want, wc);
		if (m < 0)
			return got ? got : -EIO;
		for (int i = 0; i < m; i++) {
			const struct ibv_wc *w = &wc[i];
			struct jbof_wc *o = &out[got++];
			*o = (struct jbof_wc){.id = w->wr_id, .qp_num = w->qp_num, .vendor_err = w->vendor_err, .status = (uint8_t)w->status};
			if (w->status != IBV_WC_SUCCESS)
				continue;
			switch (w->opcode) {
			case IBV_WC_RDMA_WRITE:
				o->op = OP_WRITE;
				break;
			case IBV_WC_RDMA_READ:
				o->op = OP_READ;
				break;
			case IBV_WC_RECV:
				o->op = OP_RECV;
				o->len = w->byte_len;
				if (w->wc_flags & IBV_WC_WITH_INV) {
					o->invalidated = 1;
					o->rkey = w->invalidated_rkey;
				}
				break;
			default:
				o->op = OP_SEND;
			}
		}
		if (m < want)
			break;
	}
	return got;
}

int32_t jbof_cq_arm(uint64_t cq) { return -ibv_req_notify_cq(PTR(struct cq, cq)->cq, 0); }

// jbof_cq_event takes a notice.
int32_t jbof_cq_event(uint64_t cq)
{
	struct cq *q = PTR(struct cq, cq);
	struct ibv_cq *which;
	void *context;
	errno = 0;
	if (ibv_get_cq_event(q->channel, &which, &context))
		return failed();
	if (++q->unacked == ACK_EVERY) {
		ibv_ack_cq_events(q->cq, q->unacked);
		q->unacked = 0;
	}
	return 0;
}

// --- Receives

uint64_t jbof_srq_create(uint64_t domain, uint32_t entries, int32_t *err)
{
	struct ibv_srq_init_attr a = {.attr = {.max_wr = entries, .max_sge = 1}};
	errno = 0;
	struct ibv_srq *s = ibv_create_srq(PTR(struct domain, domain)->pd, &a);
	if (!s)
		*err = failed();
	return NUM(s);
}

int32_t jbof_srq_close(uint64_t srq) { return -ibv_destroy_srq(PTR(struct ibv_srq, srq)); }

static int post_recv(void *queue, int shared, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	return shared ? ibv_post_srq_recv(queue, wr, bad) : ibv_post_recv(queue, wr, bad);
}

static struct jbof_posted post_recvs(void *queue, int shared, const struct jbof_recv_wr *in, int32_t n)
{
	struct ibv_recv_wr wr[BATCH];
	struct ibv_sge sge[BATCH];
	struct jbof_posted r = {0, 0, 0};
	while (r.n < n) {
		int m = n - r.n < BATCH ? n - r.n : BATCH;
		for (int i = 0; i < m; i++, in++) {
			sge[i] = (struct ibv_sge){.addr = in->addr, .length = in->len, .lkey = in->lkey};
			wr[i] = (struct ibv_recv_wr){.wr_id = in->id, .next = &wr[i + 1], .sg_list = &sge[i], .num_sge = 1};
		}
		wr[m - 1].next = NULL;
		struct ibv_recv_wr *bad = wr;
		r.err = post_recv(queue, shared, wr, &bad);
		int taken = r.err ? (bad ? (int)(bad - wr) : 0) : m;
		r.n += taken;
		r.doorbells += taken > 0;
		if (r.err)
			break;
	}
	return r;
}

struct jbof_posted jbof_srq_post(uint64_t srq, const struct jbof_recv_wr *wrs, int32_t n)
{
	return post_recvs(PTR(void, srq), 1, wrs, n);
}

struct jbof_posted jbof_qp_post_recv(uint64_t domain, uint64_t handle, const struct jbof_recv_wr *wrs, int32_t n)
{
	struct slot *s = slot_lock(PTR(struct domain, domain), handle);
	if (!s)
		return (struct jbof_posted){0, ESHUTDOWN, 0};
	struct jbof_posted r = post_recvs(s->qp, 0, wrs, n);
	pthread_mutex_unlock(&s->mu);
	return r;
}

// --- Queue pairs and sends

int32_t jbof_qp_create(uint64_t id, const struct jbof_qp_config *c, struct jbof_qp_info *out)
{
	struct rdma_cm_id *cm = PTR(struct rdma_cm_id, id);
	struct domain *d = PTR(struct domain, c->domain);
	struct ibv_qp_init_attr a = {
		.qp_context = cm, // by which an asynchronous event names its endpoint
		.send_cq = PTR(struct cq, c->send_cq)->cq,
		.recv_cq = PTR(struct cq, c->recv_cq)->cq,
		.srq = PTR(struct ibv_srq, c->srq),
		.cap = {.max_send_wr = c->sends, .max_recv_wr = c->recvs, .max_send_sge = 1, .max_recv_sge = c->srq ? 0 : 1, .max_inline_data = c->inline_bytes},
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 0,
	};
	errno = 0;
	if (rdma_create_qp(cm, d->pd, &a)) {
		// Was it for a peer that has gone meanwhile? Then the CM has no attributes for it any more.
		int32_t err = failed(), mask;
		struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT};
		return rdma_init_qp_attr(cm, &attr, &mask) ? -ENOTCONN : err;
	}
	out->handle = slot_take(d, cm->qp);
	if (!out->handle) {
		rdma_destroy_qp(cm);
		return -ENOMEM;
	}
	out->num = cm->qp->qp_num;
	out->inline_bytes = a.cap.max_inline_data;
	return 0;
}

// jbof_qp_close must not run at the same time as jbof_cm_get, which may bring the queue pair of an
// identifier into the state that an event asks for.
int32_t jbof_qp_close(uint64_t id, uint64_t domain, uint64_t handle)
{
	struct rdma_cm_id *cm = PTR(struct rdma_cm_id, id);
	slot_give(PTR(struct domain, domain), handle);
	int err = ibv_destroy_qp(cm->qp);
	cm->qp = NULL;
	return -err;
}

static void fill_send(struct ibv_send_wr *wr, struct ibv_sge *sge, const struct jbof_send_wr *in)
{
	static const enum ibv_wr_opcode opcodes[] = {
		[OP_SEND] = IBV_WR_SEND, [OP_SEND_INVALIDATE] = IBV_WR_SEND_WITH_INV, [OP_WRITE] = IBV_WR_RDMA_WRITE, [OP_READ] = IBV_WR_RDMA_READ,
	};
	*sge = (struct ibv_sge){.addr = in->addr, .length = in->len, .lkey = in->lkey};
	wr->wr_id = in->id;
	wr->next = wr + 1;
	wr->sg_list = sge;
	wr->num_sge = in->len ? 1 : 0;
	wr->opcode = opcodes[in->op];
	wr->send_flags = (in->flags & FLAG_SIGNALED ? IBV_SEND_SIGNALED : 0) | (in->flags & FLAG_FENCE ? IBV_SEND_FENCE : 0) |
		(in->flags & FLAG_INLINE ? IBV_SEND_INLINE : 0);
	wr->invalidate_rkey = in->rkey;
	wr->wr.rdma.remote_addr = in->remote_addr;
	wr->wr.rdma.rkey = in->rkey;
}

struct jbof_posted jbof_post_send(uint64_t domain, const struct jbof_send_wr *in, int32_t n)
{
	struct domain *d = PTR(struct domain, domain);
	struct ibv_send_wr wr[BATCH];
	struct ibv_sge sge[BATCH];
	struct jbof_posted r = {0, 0, 0};
	while (r.n < n) {
		const struct jbof_send_wr *first = in + r.n;
		int m = 0;
		while (m < BATCH && r.n + m < n && first[m].qp == first->qp && first[m].op <= OP_READ) {
			fill_send(&wr[m], &sge[m], &first[m]);
			m++;
		}
		if (m == 0) {
			r.err = EINVAL; // no operation of a send queue
			break;
		}
		wr[m - 1].next = NULL;
		struct slot *s = slot_lock(d, first->qp);
		if (!s) {
			r.err = ESHUTDOWN;
			break;
		}
		struct ibv_send_wr *bad = NULL;
		r.err = ibv_post_send(s->qp, wr, &bad);
		pthread_mutex_unlock(&s->mu);
		int taken = r.err ? (bad ? (int)(bad - wr) : 0) : m;
		r.n += taken;
		r.doorbells += taken > 0;
		if (r.err)
			break;
	}
	return r;
}
