// A stand-in for the part of SPDK that shim.c uses, for tests without SPDK. Its controller is a file (SPDK_STANDIN):
// the first page has words that tests set and read (control_unsafe_test.go has the same numbers), the rest are the
// blocks.
// It notes what SPDK's documentation does not allow as a violation.

#define _GNU_SOURCE

#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <spdk/nvme.h>

struct spdk_nvme_ns {
	struct spdk_nvme_ctrlr *ctrlr;
	struct spdk_nvme_ns_data data;
	uint8_t uuid[16];
};

struct spdk_nvme_ctrlr {
	pthread_mutex_t lock;
	enum spdk_nvme_transport_type trtype;
	struct spdk_nvme_ctrlr_opts opts;
	struct spdk_nvme_ctrlr_data data;
	struct spdk_nvme_ns ns;
	uint64_t *words;
	uint8_t *blocks;
	size_t size, mapped;
	struct spdk_nvme_qpair *qpairs;
	bool failed;
};

enum op { READ, WRITE, FLUSH, DEALLOCATE, ZEROES };

struct request {
	struct request *next;
	enum op op;
	void *payload;
	uint64_t lba, due;
	uint32_t count;
	uint16_t status; // raw
	bool sent, hangs, ended;
	spdk_nvme_cmd_cb cb;
	void *arg;
};

struct spdk_nvme_qpair {
	struct spdk_nvme_qpair *next;
	struct spdk_nvme_ctrlr *ctrlr;
	struct spdk_nvme_io_qpair_opts opts;
	struct request *pending; // the oldest first
	uint32_t n;
	int fd, inside;
	enum { CONNECTED, FAILED, DISCONNECTED } state;
};

static bool flag(struct spdk_nvme_ctrlr *c, int f) { return get(c->words, FLAGS) & f; }

// Takes one from a word that counts how often something is to happen.
static bool take(uint64_t *words, int word)
{
	uint64_t n = get(words, word);
	while (n > 0 && !__atomic_compare_exchange_n(&words[word], &n, n - 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		;
	return n > 0;
}

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ULL + t.tv_nsec;
}

// Controllers.

int spdk_nvme_transport_id_parse(struct spdk_nvme_transport_id *trid, const char *str)
{
	char *text = strdup(str), *rest = text, *word;
	int rc = 0;
	while ((word = strsep(&rest, " "))) {
		char *value = strchr(word, ':');
		if (!value) {
			rc = -EINVAL;
			break;
		}
		*value++ = 0;
		if (!strcmp(word, "trtype"))
			trid->trtype = !strcmp(value, "PCIe") ? SPDK_NVME_TRANSPORT_PCIE : !strcmp(value, "TCP") ?
				SPDK_NVME_TRANSPORT_TCP : SPDK_NVME_TRANSPORT_RDMA;
		else if (!strcmp(word, "traddr"))
			snprintf(trid->traddr, sizeof trid->traddr, "%s", value);
		else if (!strcmp(word, "trsvcid"))
			snprintf(trid->trsvcid, sizeof trid->trsvcid, "%s", value);
		else if (!strcmp(word, "subnqn"))
			snprintf(trid->subnqn, sizeof trid->subnqn, "%s", value);
		else if (strcmp(word, "adrfam") || (strcmp(value, "IPv4") && strcmp(value, "IPv6")))
			rc = -EINVAL;
	}
	free(text);
	return rc;
}

bool spdk_nvme_transport_available(enum spdk_nvme_transport_type trtype) { return trtype != 0; }

void spdk_nvme_ctrlr_get_default_ctrlr_opts(struct spdk_nvme_ctrlr_opts *opts, size_t opts_size)
{
	memset(opts, 0, opts_size);
	opts->io_queue_size = 256;
	opts->opts_size = opts_size;
}

// What a controller says of itself may change in a reset.
static void describe(struct spdk_nvme_ctrlr *c)
{
	uint64_t atomic = get(c->words, ATOMIC);
	memset(&c->data, ' ', sizeof c->data.sn + sizeof c->data.mn);
	memcpy(c->data.sn, "S1", 2);
	memcpy(c->data.mn, "Stand-in", 8);
	c->data.vwc.present = flag(c, CACHE);
	c->data.awupf = atomic & 0xffff;
	c->ns.data.nawupf = atomic >> 16;
	c->ns.data.nabspf = atomic >> 32;
	c->ns.data.nabo = atomic >> 48;
	c->ns.data.nsfeat.ns_atomic_write_unit = atomic >> 16 != 0;
	c->ns.ctrlr = c;
	c->ns.uuid[15] = flag(c, OTHER_UUID) ? 2 : 1;
	c->ns.data.nguid[15] = flag(c, OTHER_NGUID) ? 2 : 1;
	c->ns.data.eui64 = flag(c, OTHER_EUI64) ? 2 : 1;
}

struct spdk_nvme_ctrlr *spdk_nvme_connect(const struct spdk_nvme_transport_id *trid,
	const struct spdk_nvme_ctrlr_opts *opts, size_t opts_size)
{
	const char *path = getenv("SPDK_STANDIN");
	struct stat st;
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	if (fd < 0 || fstat(fd, &st) || opts_size != sizeof *opts || !env_made ||
		(trid->trtype == SPDK_NVME_TRANSPORT_PCIE && !env_pci)) {
		error("no controller at %s\n", trid->traddr);
		if (fd >= 0)
			close(fd);
		return NULL;
	}
	struct spdk_nvme_ctrlr *c = calloc(1, sizeof *c);
	c->mapped = st.st_size;
	c->words = mmap(NULL, c->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	c->blocks = (uint8_t *)c->words + 4096;
	c->size = c->mapped - 4096;
	pthread_mutex_init(&c->lock, NULL);
	c->trtype = trid->trtype;
	c->opts = *opts;
	last_words = c->words;
	if (flag(c, REMOVED | REFUSED)) {
		error("connect() to %s failed\n", trid->traddr);
		free(c);
		return NULL;
	}
	if (flag(c, NO_INTERRUPTS) || c->trtype == SPDK_NVME_TRANSPORT_TCP)
		c->opts.enable_interrupts = false;
	if (c->opts.io_queue_size > get(c->words, ENTRIES))
		c->opts.io_queue_size = get(c->words, ENTRIES);
	describe(c);
	return c;
}

int spdk_nvme_detach(struct spdk_nvme_ctrlr *c)
{
	CHECK(c->words, !c->qpairs);
	add(c->words, DETACHES, 1);
	// It stays mapped: last_words may be used, and a use after the end counts.
	return 0;
}

const struct spdk_nvme_ctrlr_opts *spdk_nvme_ctrlr_get_opts(struct spdk_nvme_ctrlr *c) { return &c->opts; }
const struct spdk_nvme_ctrlr_data *spdk_nvme_ctrlr_get_data(struct spdk_nvme_ctrlr *c) { return &c->data; }
bool spdk_nvme_ctrlr_is_failed(struct spdk_nvme_ctrlr *c) { return c->failed || flag(c, REMOVED); }

int32_t spdk_nvme_ctrlr_process_admin_completions(struct spdk_nvme_ctrlr *c)
{
	add(c->words, ADMINS, 1);
	if (flag(c, CUT))
		c->failed = true;
	return flag(c, REMOVED | CUT) ? -ENXIO : 0;
}

uint32_t spdk_nvme_ctrlr_get_first_active_ns(struct spdk_nvme_ctrlr *c) { (void)c; return 1; }
struct spdk_nvme_ns *spdk_nvme_ctrlr_get_ns(struct spdk_nvme_ctrlr *c, uint32_t n) { return n == 1 ? &c->ns : NULL; }
bool spdk_nvme_ns_is_active(struct spdk_nvme_ns *ns) { (void)ns; return true; }
const struct spdk_nvme_ns_data *spdk_nvme_ns_get_data(struct spdk_nvme_ns *ns) { return &ns->data; }

const struct spdk_uuid *spdk_nvme_ns_get_uuid(const struct spdk_nvme_ns *ns)
{
	return flag(ns->ctrlr, NO_UUID) ? NULL : (const void *)ns->uuid;
}

uint32_t spdk_nvme_ns_get_flags(struct spdk_nvme_ns *ns)
{
	return (flag(ns->ctrlr, DSM) ? SPDK_NVME_NS_DEALLOCATE_SUPPORTED : 0) |
		(flag(ns->ctrlr, WRITE_ZEROES) ? SPDK_NVME_NS_WRITE_ZEROES_SUPPORTED : 0);
}

uint32_t spdk_nvme_ns_get_sector_size(struct spdk_nvme_ns *ns) { return 1u << get(ns->ctrlr->words, BLOCK_SHIFT); }

uint64_t spdk_nvme_ns_get_num_sectors(struct spdk_nvme_ns *ns)
{
	return (ns->ctrlr->size >> get(ns->ctrlr->words, BLOCK_SHIFT)) - (flag(ns->ctrlr, SHRUNK) ? 1 : 0);
}

uint32_t spdk_nvme_ns_get_md_size(struct spdk_nvme_ns *ns) { return flag(ns->ctrlr, METADATA) ? 8 : 0; }
uint32_t spdk_nvme_ns_get_max_io_xfer_size(struct spdk_nvme_ns *ns) { return get(ns->ctrlr->words, MAX_TRANSFER); }

enum spdk_nvme_dealloc_logical_block_read_value spdk_nvme_ns_get_dealloc_logical_block_read_value(
	struct spdk_nvme_ns *ns)
{
	return flag(ns->ctrlr, READS_ZERO) ? SPDK_NVME_DEALLOC_READ_00 : SPDK_NVME_DEALLOC_NOT_REPORTED;
}

// Queue pairs.

// A queue pair is used by one thread at a time.
static void enter(struct spdk_nvme_qpair *q)
{
	CHECK(q->ctrlr->words, !__atomic_exchange_n(&q->inside, 1, __ATOMIC_SEQ_CST));
}

static void leave(struct spdk_nvme_qpair *q) { __atomic_store_n(&q->inside, 0, __ATOMIC_SEQ_CST); }

void spdk_nvme_ctrlr_get_default_io_qpair_opts(struct spdk_nvme_ctrlr *c, struct spdk_nvme_io_qpair_opts *opts,
	size_t opts_size)
{
	*opts = (struct spdk_nvme_io_qpair_opts){
	    .io_queue_size = c->opts.io_queue_size, .io_queue_requests = 512, .opts_size = opts_size};
}

static int interrupt(struct spdk_nvme_ctrlr *c)
{
	return c->opts.enable_interrupts ? timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK) : -1;
}

struct spdk_nvme_qpair *spdk_nvme_ctrlr_alloc_io_qpair(struct spdk_nvme_ctrlr *c,
	const struct spdk_nvme_io_qpair_opts *opts, size_t opts_size)
{
	if (opts_size != sizeof *opts || (opts->delay_cmd_submit && c->opts.enable_interrupts) || flag(c, REMOVED | CUT) ||
		opts->io_queue_size > get(c->words, ENTRIES) || opts->io_queue_size < 2 ||
		take(c->words, NO_QUEUE))
		return NULL;
	struct spdk_nvme_qpair *q = calloc(1, sizeof *q);
	q->ctrlr = c;
	q->opts = *opts;
	q->fd = interrupt(c);
	add(c->words, QPAIRS, 1);
	pthread_mutex_lock(&c->lock);
	q->next = c->qpairs;
	c->qpairs = q;
	pthread_mutex_unlock(&c->lock);
	return q;
}

int spdk_nvme_qpair_get_fd(struct spdk_nvme_qpair *q, struct spdk_event_handler_opts *opts)
{
	(void)opts;
	return q->fd;
}

// The interrupt comes when the first request is due.
static void arm(struct spdk_nvme_qpair *q)
{
	uint64_t first = 0;
	for (struct request *r = q->pending; r; r = r->next)
		if (r->ended || !r->hangs) {
			uint64_t due = r->ended ? 1 : r->due;
			if (!first || due < first)
				first = due;
		}
	if (q->fd >= 0 && first) { // without, what was not read stays
		struct itimerspec at = {.it_value = {first / 1000000000, first % 1000000000}};
		timerfd_settime(q->fd, TFD_TIMER_ABSTIME, &at, NULL);
	}
}

static void execute(struct spdk_nvme_ctrlr *c, struct request *r)
{
	uint64_t shift = get(c->words, BLOCK_SHIFT);
	uint8_t *at = c->blocks + (r->lba << shift);
	size_t len = (size_t)r->count << shift;
	if (take(c->words, FAIL)) {
		r->status = get(c->words, FAIL_STATUS) << 1;
		return;
	}
	if (r->lba + r->count > c->size >> shift) {
		r->status = 0x80 << 1; // LBA Out of Range
		return;
	}
	switch (r->op) {
	case READ:
		memcpy(r->payload, at, len);
		break;
	case WRITE:
		memcpy(at, r->payload, len);
		break;
	case ZEROES:
		memset(at, 0, len);
		break;
	case DEALLOCATE:
		memset(at, flag(c, READS_ZERO) ? 0 : 0xDA, len);
		break;
	case FLUSH:
		break;
	}
}

// Ends the requests that are pending with a status.
static void end_all(struct spdk_nvme_qpair *q, uint16_t status)
{
	struct request *r = q->pending;
	q->pending = NULL;
	q->n = 0;
	while (r) {
		struct request *next = r->next;
		struct spdk_nvme_cpl cpl = {.status_raw = status << 1};
		r->cb(r->arg, &cpl);
		free(r);
		r = next;
	}
	arm(q);
}

#define SQ_DELETION 0x08
#define DNR 0x4000

int spdk_nvme_ctrlr_free_io_qpair(struct spdk_nvme_qpair *q)
{
	struct spdk_nvme_ctrlr *c = q->ctrlr;
	enter(q);
	end_all(q, SQ_DELETION | DNR);
	leave(q);
	pthread_mutex_lock(&c->lock);
	struct spdk_nvme_qpair **p = &c->qpairs;
	while (*p && *p != q)
		p = &(*p)->next;
	CHECK(c->words, *p);
	*p = q->next;
	pthread_mutex_unlock(&c->lock);
	if (q->fd >= 0) { // whoever still polls it finds it readable for ever
		struct itimerspec ever = {{0, 1}, {0, 1}};
		timerfd_settime(q->fd, 0, &ever, NULL);
		close(q->fd);
	}
	add(c->words, QPAIRS, -1);
	free(q);
	return 0;
}

void spdk_nvme_ctrlr_disconnect_io_qpair(struct spdk_nvme_qpair *q)
{
	enter(q);
	end_all(q, SQ_DELETION);
	q->state = DISCONNECTED;
	leave(q);
}

int spdk_nvme_ctrlr_reconnect_io_qpair(struct spdk_nvme_qpair *q)
{
	if (flag(q->ctrlr, REMOVED))
		return -ENODEV;
	if (q->state == DISCONNECTED)
		q->state = CONNECTED;
	return 0;
}

int spdk_nvme_ctrlr_reset(struct spdk_nvme_ctrlr *c)
{
	add(c->words, RESETS, 1);
	if (flag(c, RESET_FAILS | REMOVED))
		return -1;
	pthread_mutex_lock(&c->lock);
	for (struct spdk_nvme_qpair *q = c->qpairs; q; q = q->next) {
		enter(q);
		if (c->trtype == SPDK_NVME_TRANSPORT_PCIE) {
			end_all(q, SQ_DELETION);
			q->state = CONNECTED;
			if (q->fd >= 0) { // SPDK does not promise that it stays the same
				close(q->fd);
				q->fd = interrupt(c);
			}
		} else if (q->state == CONNECTED) {
			q->state = FAILED; // until it is disconnected and connected again
		}
		leave(q);
	}
	pthread_mutex_unlock(&c->lock);
	c->failed = false;
	__atomic_and_fetch(&c->words[FLAGS], ~(uint64_t)CUT, __ATOMIC_SEQ_CST);
	describe(c);
	return 0;
}

int spdk_nvme_ctrlr_cmd_abort_ext(struct spdk_nvme_ctrlr *c, struct spdk_nvme_qpair *q, void *cmd_cb_arg,
	spdk_nvme_cmd_cb cb_fn, void *cb_arg)
{
	struct spdk_nvme_cpl ok = {0};
	int rc = -ENOENT;
	add(c->words, ABORTS, 1);
	enter(q);
	for (struct request *r = q->pending; r; r = r->next) {
		if (r->arg != cmd_cb_arg || r->ended)
			continue;
		rc = 0;
		if (!flag(c, ABORT_IGNORED)) {
			r->ended = true;
			r->status = 0x07 << 1; // Command Abort Requested
		}
	}
	arm(q);
	leave(q);
	if (rc == 0)
		cb_fn(cb_arg, &ok);
	return rc;
}

int32_t spdk_nvme_qpair_process_completions(struct spdk_nvme_qpair *q, uint32_t max_completions)
{
	struct spdk_nvme_ctrlr *c = q->ctrlr;
	uint64_t t = now();
	int32_t n = 0;
	(void)max_completions;
	add(c->words, TURNS, 1);
	enter(q);
	if (q->state == CONNECTED && flag(c, REMOVED | CUT)) {
		end_all(q, SQ_DELETION);
		q->state = DISCONNECTED;
	}
	if (q->state != CONNECTED || c->failed) {
		leave(q);
		return -ENXIO;
	}
	bool sends = false;
	for (struct request *r = q->pending; r; r = r->next)
		if (!r->sent) { // a transport that gathers commands sends them now
			r->sent = sends = true;
			r->due = t + get(c->words, DELAY_NS);
		}
	if (sends)
		add(c->words, SENDS, 1);
	struct request *due = NULL, **last = &due;
	for (struct request **p = &q->pending; *p;) {
		struct request *r = *p;
		if (!r->ended && (r->hangs || r->due > t)) {
			p = &r->next;
			continue;
		}
		*p = r->next;
		q->n--;
		if (flag(c, BACKWARDS)) {
			r->next = due;
			due = r;
		} else {
			r->next = NULL;
			*last = r;
			last = &r->next;
		}
	}
	while (due) {
		struct request *r = due;
		due = r->next;
		if (!r->ended)
			execute(c, r);
		struct spdk_nvme_cpl cpl = {.status_raw = r->status | 1};
		r->cb(r->arg, &cpl);
		if (flag(c, TWICE)) {
			__atomic_and_fetch(&c->words[FLAGS], ~(uint64_t)TWICE, __ATOMIC_SEQ_CST);
			r->cb(r->arg, &cpl);
		}
		free(r);
		n++;
	}
	add(c->words, COMPLETIONS, n);
	arm(q);
	leave(q);
	return n;
}

static int submit(struct spdk_nvme_qpair *q, struct request r)
{
	struct spdk_nvme_ctrlr *c = q->ctrlr;
	int rc = 0;
	enter(q);
	if (q->state != CONNECTED || c->failed || flag(c, REMOVED | CUT))
		rc = -ENXIO;
	else if (take(c->words, NO_MEMORY) || q->n == q->opts.io_queue_requests)
		rc = -ENOMEM;
	else
		rc = -(int)__atomic_exchange_n(&c->words[REFUSE], 0, __ATOMIC_SEQ_CST);
	if (rc == 0) {
		size_t len = (size_t)r.count << get(c->words, BLOCK_SHIFT);
		if (r.op == READ || r.op == WRITE) {
			CHECK(c->words, len > 0 && len <= get(c->words, MAX_TRANSFER));
			CHECK(c->words, c->trtype == SPDK_NVME_TRANSPORT_TCP || allocated(r.payload, len) ||
				(!flag(c, NO_TRANSLATION) && visible(r.payload, len)));
			CHECK(c->words, ((uintptr_t)r.payload & 3) == 0);
		}
		struct request *p = malloc(sizeof *p), **last = &q->pending;
		*p = r;
		p->next = NULL;
		p->hangs = take(c->words, HANG);
		p->sent = !q->opts.delay_cmd_submit;
		p->due = p->sent ? now() + get(c->words, DELAY_NS) : UINT64_MAX;
		while (*last)
			last = &(*last)->next;
		*last = p;
		q->n++;
		add(c->words, SUBMITS, 1);
		arm(q);
	}
	leave(q);
	return rc;
}

int spdk_nvme_ns_cmd_read(struct spdk_nvme_ns *ns, struct spdk_nvme_qpair *q, void *payload, uint64_t lba,
	uint32_t lba_count, spdk_nvme_cmd_cb cb_fn, void *cb_arg, uint32_t io_flags)
{
	add(ns->ctrlr->words, FUAS, io_flags == SPDK_NVME_IO_FLAGS_FORCE_UNIT_ACCESS);
	return submit(q, (struct request){.op = READ, .payload = payload, .lba = lba, .count = lba_count,
		.cb = cb_fn, .arg = cb_arg});
}

int spdk_nvme_ns_cmd_write(struct spdk_nvme_ns *ns, struct spdk_nvme_qpair *q, void *payload, uint64_t lba,
	uint32_t lba_count, spdk_nvme_cmd_cb cb_fn, void *cb_arg, uint32_t io_flags)
{
	add(ns->ctrlr->words, FUAS, io_flags == SPDK_NVME_IO_FLAGS_FORCE_UNIT_ACCESS);
	return submit(q, (struct request){.op = WRITE, .payload = payload, .lba = lba, .count = lba_count,
		.cb = cb_fn, .arg = cb_arg});
}

int spdk_nvme_ns_cmd_flush(struct spdk_nvme_ns *ns, struct spdk_nvme_qpair *q, spdk_nvme_cmd_cb cb_fn, void *cb_arg)
{
	add(ns->ctrlr->words, FLUSHES, 1);
	return submit(q, (struct request){.op = FLUSH, .cb = cb_fn, .arg = cb_arg});
}

int spdk_nvme_ns_cmd_dataset_management(struct spdk_nvme_ns *ns, struct spdk_nvme_qpair *q, uint32_t type,
	const struct spdk_nvme_dsm_range *ranges, uint16_t num_ranges, spdk_nvme_cmd_cb cb_fn, void *cb_arg)
{
	CHECK(ns->ctrlr->words, type == SPDK_NVME_DSM_ATTR_DEALLOCATE && num_ranges == 1 && flag(ns->ctrlr, DSM));
	add(ns->ctrlr->words, DSMS, 1);
	return submit(q, (struct request){.op = DEALLOCATE, .lba = ranges->starting_lba, .count = ranges->length,
		.cb = cb_fn, .arg = cb_arg});
}

int spdk_nvme_ns_cmd_write_zeroes(struct spdk_nvme_ns *ns, struct spdk_nvme_qpair *q, uint64_t lba, uint32_t lba_count,
	spdk_nvme_cmd_cb cb_fn, void *cb_arg, uint32_t io_flags)
{
	if (lba_count == 0 || lba_count > 65536)
		return -EINVAL;
	CHECK(ns->ctrlr->words, flag(ns->ctrlr, WRITE_ZEROES));
	add(ns->ctrlr->words, FUAS, (io_flags & SPDK_NVME_IO_FLAGS_FORCE_UNIT_ACCESS) != 0);
	add(ns->ctrlr->words, DEACS, (io_flags & 1u << 25) != 0);
	return submit(q, (struct request){.op = ZEROES, .lba = lba, .count = lba_count,
		.cb = cb_fn, .arg = cb_arg});
}
