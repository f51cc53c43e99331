//go:build spdk && cgo

#define _GNU_SOURCE // pthread_getaffinity_np

#include "shim.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <spdk/env.h>
#include <spdk/log.h>
#include <spdk/nvme.h>

// The twins in Go are held to the same numbers in call_unsafe.go.
_Static_assert(sizeof(struct jbof_cmd) == 32 && offsetof(struct jbof_cmd, slot) == 20 &&
	offsetof(struct jbof_cmd, op) == 24, "command");
_Static_assert(sizeof(struct jbof_cpl) == 8 && offsetof(struct jbof_cpl, status) == 4, "completion");

// DEAC in command dword 12 of Write Zeroes, for which SPDK has no name.
#define WRITE_ZEROES_DEAC (1u << 25)

#define MOST_ENTRIES 4096

#define PTR(type, n) ((type *)(uintptr_t)(n))
#define NUM(p) ((uint64_t)(uintptr_t)(p))

// The last error that SPDK has logged on this thread, because spdk_nvme_connect does not say why it fails.
static __thread char last_error[256];

static void log_line(int level, const char *file, const int line, const char *func, const char *format, va_list args)
{
	char text[256];
	(void)file;
	(void)line;
	if (level > SPDK_LOG_WARN)
		return;
	vsnprintf(text, sizeof text, format, args);
	text[strcspn(text, "\n")] = 0;
	if (level == SPDK_LOG_ERROR)
		snprintf(last_error, sizeof last_error, "%s", text);
	fprintf(stderr, "spdk: %s: %s\n", func ? func : "", text);
}

int32_t jbof_env_init(const char *name, const char *lcores, int32_t mem_mib, int32_t pci)
{
	struct spdk_env_opts opts;
	cpu_set_t before;
	memset(&opts, 0, sizeof opts);
	opts.opts_size = sizeof opts;
	spdk_env_opts_init(&opts);
	opts.name = name;
	opts.core_mask = NULL;
	opts.lcore_map = lcores;
	opts.mem_size = mem_mib;
	opts.no_huge = true;
	opts.no_pci = !pci;
	spdk_log_open(log_line);
	spdk_log_set_print_level(SPDK_LOG_WARN);
	// DPDK pins the thread that initialises it.
	int r = pthread_getaffinity_np(pthread_self(), sizeof before, &before);
	if (r)
		return -r;
	int rc = spdk_env_init(&opts);
	r = pthread_setaffinity_np(pthread_self(), sizeof before, &before);
	return rc ? rc : -r;
}

// Registers memory, and looks its first and its last page up: where there is no IOMMU, registering succeeds and the
// address of the device is not known all the same.
int32_t jbof_mem_register(uint64_t addr, uint64_t len)
{
	int rc = spdk_mem_register(PTR(void, addr), len);
	if (rc)
		return rc;
	for (int i = 0; i < 2; i++) {
		uint64_t size = 4096;
		if (spdk_vtophys(PTR(void, i ? addr + len - 4096 : addr), &size) == SPDK_VTOPHYS_ERROR) {
			spdk_mem_unregister(PTR(void, addr), len);
			return -EFAULT;
		}
	}
	return 0;
}

int32_t jbof_mem_unregister(uint64_t addr, uint64_t len) { return spdk_mem_unregister(PTR(void, addr), len); }

uint64_t jbof_alloc(uint64_t len)
{
	return NUM(spdk_zmalloc(len, 4096, NULL, SPDK_ENV_NUMA_ID_ANY, SPDK_MALLOC_DMA));
}

void jbof_free(uint64_t addr) { spdk_free(PTR(void, addr)); }

// A controller, of which one namespace is used.
struct ctrl {
	struct spdk_nvme_ctrlr *ctrlr;
	struct spdk_nvme_ns *ns;
	uint32_t nsid;
	bool fabrics;
};

// Why there is no such namespace, or NULL.
static const char *describe(struct ctrl *c, struct jbof_info *info)
{
	const struct spdk_nvme_ctrlr_data *cd = spdk_nvme_ctrlr_get_data(c->ctrlr);
	if (c->nsid == 0)
		c->nsid = spdk_nvme_ctrlr_get_first_active_ns(c->ctrlr);
	c->ns = c->nsid ? spdk_nvme_ctrlr_get_ns(c->ctrlr, c->nsid) : NULL;
	if (!c->ns || !spdk_nvme_ns_is_active(c->ns))
		return "the controller has no such active namespace";
	const struct spdk_nvme_ns_data *nd = spdk_nvme_ns_get_data(c->ns);
	uint32_t flags = spdk_nvme_ns_get_flags(c->ns);
	memset(info, 0, sizeof *info);
	memcpy(info->model, cd->mn, sizeof info->model);
	memcpy(info->serial, cd->sn, sizeof info->serial);
	const void *uuid = spdk_nvme_ns_get_uuid(c->ns);
	if (uuid)
		memcpy(info->names, uuid, 16);
	memcpy(info->names + 16, &nd->nguid, 16);
	memcpy(info->names + 32, &nd->eui64, 8);
	info->blocks = spdk_nvme_ns_get_num_sectors(c->ns);
	info->block_bytes = spdk_nvme_ns_get_sector_size(c->ns);
	info->max_transfer = spdk_nvme_ns_get_max_io_xfer_size(c->ns);
	info->nsid = c->nsid;
	info->md_bytes = spdk_nvme_ns_get_md_size(c->ns);
	info->atomic_blocks = (uint32_t)cd->awupf + 1;
	info->ns_atomics = nd->nsfeat.ns_atomic_write_unit;
	info->nawupf = nd->nawupf;
	info->nabspf = nd->nabspf;
	info->nabo = nd->nabo;
	info->optimal_blocks = nd->nsfeat.optperf ? (uint32_t)nd->npwg + 1 : 0;
	info->volatile_cache = cd->vwc.present;
	info->deallocates = !!(flags & SPDK_NVME_NS_DEALLOCATE_SUPPORTED);
	info->write_zeroes = !!(flags & SPDK_NVME_NS_WRITE_ZEROES_SUPPORTED);
	info->reads_zero = spdk_nvme_ns_get_dealloc_logical_block_read_value(c->ns) == SPDK_NVME_DEALLOC_READ_00;
	// SPDK drops the option where the device has no interrupts to give.
	info->interrupts = spdk_nvme_ctrlr_get_opts(c->ctrlr)->enable_interrupts;
	return NULL;
}

uint64_t jbof_attach(const char *trid, const char *hostnqn, uint32_t nsid, int32_t interrupts, struct jbof_info *info,
	char *why, int32_t why_len)
{
	struct spdk_nvme_transport_id id;
	struct spdk_nvme_ctrlr_opts opts;
	memset(&id, 0, sizeof id);
	int rc = spdk_nvme_transport_id_parse(&id, trid);
	if (rc) {
		snprintf(why, why_len, "SPDK does not understand the transport ID \"%s\": %s", trid, strerror(-rc));
		return 0;
	}
	if (!spdk_nvme_transport_available(id.trtype)) {
		snprintf(why, why_len, "this SPDK was built or linked without the transport");
		return 0;
	}
	spdk_nvme_ctrlr_get_default_ctrlr_opts(&opts, sizeof opts);
	if (hostnqn[0])
		snprintf(opts.hostnqn, sizeof opts.hostnqn, "%s", hostnqn);
	opts.enable_interrupts = interrupts;
	opts.io_queue_size = MOST_ENTRIES; // SPDK makes that what the controller can have
	opts.disable_error_logging = true; // errors are results of requests
	struct ctrl *c = calloc(1, sizeof *c);
	if (!c) {
		snprintf(why, why_len, "%s", strerror(ENOMEM));
		return 0;
	}
	last_error[0] = 0;
	c->ctrlr = spdk_nvme_connect(&id, &opts, sizeof opts);
	if (!c->ctrlr) {
		snprintf(why, why_len, "%s", last_error[0] ? last_error : "SPDK does not say why");
		free(c);
		return 0;
	}
	c->nsid = nsid;
	c->fabrics = id.trtype != SPDK_NVME_TRANSPORT_PCIE;
	const char *no = describe(c, info);
	if (no) {
		snprintf(why, why_len, "%s", no);
		jbof_detach(NUM(c));
		return 0;
	}
	return NUM(c);
}

void jbof_detach(uint64_t ctrl)
{
	struct ctrl *c = PTR(struct ctrl, ctrl);
	spdk_nvme_detach(c->ctrlr);
	free(c);
}

int32_t jbof_admin(uint64_t ctrl)
{
	struct ctrl *c = PTR(struct ctrl, ctrl);
	int32_t rc = spdk_nvme_ctrlr_process_admin_completions(c->ctrlr);
	if (rc >= 0 && spdk_nvme_ctrlr_is_failed(c->ctrlr))
		rc = -ENXIO;
	return rc < 0 ? rc : 0;
}

// The namespace may be another one afterwards, so that it is looked up and described again.
int32_t jbof_reset(uint64_t ctrl, struct jbof_info *info)
{
	struct ctrl *c = PTR(struct ctrl, ctrl);
	int rc = spdk_nvme_ctrlr_reset(c->ctrlr);
	if (rc)
		return rc < 0 ? rc : -EIO;
	return describe(c, info) ? -ENODEV : 0;
}

struct slot {
	struct queue *q;
	uint32_t n;
	bool busy;
};

// A queue pair, with the ring that its completions are put into.
struct queue {
	struct ctrl *ctrl;
	struct spdk_nvme_qpair *qp; // NULL after jbof_queue_end
	uint32_t places;
	uint32_t first, held;       // of ring
	int32_t lies;
	struct jbof_cpl *ring;      // of as many entries as there are places: each slot completes once
	struct slot *slots;
};

static void completed(void *arg, const struct spdk_nvme_cpl *cpl)
{
	struct slot *s = arg;
	struct queue *q = s->q;
	if (!s->busy) {
		q->lies++;
		return;
	}
	s->busy = false;
	struct jbof_cpl *to = &q->ring[(q->first + q->held++) % q->places];
	to->slot = s->n;
	to->status = cpl->status_raw >> 1; // without the phase tag
}

static int32_t interrupt_fd(struct queue *q)
{
	return spdk_nvme_ctrlr_get_opts(q->ctrl->ctrlr)->enable_interrupts ? spdk_nvme_qpair_get_fd(q->qp, NULL) : -1;
}

uint64_t jbof_queue_open(uint64_t ctrl, uint32_t *places, int32_t *fd, int32_t *err)
{
	struct ctrl *c = PTR(struct ctrl, ctrl);
	bool interrupts = spdk_nvme_ctrlr_get_opts(c->ctrlr)->enable_interrupts;
	struct spdk_nvme_io_qpair_opts opts;
	struct queue *q = calloc(1, sizeof *q);
	*err = -ENOMEM;
	*fd = -1;
	if (!q)
		return 0;
	q->ctrl = c;
	// An entry of the queue is always free. SPDK does not check the length against what the controller can have.
	spdk_nvme_ctrlr_get_default_io_qpair_opts(c->ctrlr, &opts, sizeof opts);
	if (*places > opts.io_queue_size - 1)
		*places = opts.io_queue_size - 1;
	q->places = *places;
	q->ring = calloc(*places, sizeof *q->ring);
	q->slots = calloc(*places, sizeof *q->slots);
	if (!q->ring || !q->slots) {
		jbof_queue_close(NUM(q));
		return 0;
	}
	for (uint32_t i = 0; i < *places; i++)
		q->slots[i] = (struct slot){.q = q, .n = i};
	opts.io_queue_size = *places + 1;
	opts.io_queue_requests = 2 * *places;
	opts.delay_cmd_submit = !interrupts; // one doorbell for a batch
	q->qp = spdk_nvme_ctrlr_alloc_io_qpair(c->ctrlr, &opts, sizeof opts);
	if (!q->qp) {
		*err = -ENXIO;
		jbof_queue_close(NUM(q));
		return 0;
	}
	*fd = interrupt_fd(q);
	*err = 0;
	return NUM(q);
}

void jbof_queue_disconnect(uint64_t queue)
{
	struct queue *q = PTR(struct queue, queue);
	if (q->qp && q->ctrl->fabrics)
		spdk_nvme_ctrlr_disconnect_io_qpair(q->qp);
}

int32_t jbof_queue_reconnect(uint64_t queue, int32_t *fd)
{
	struct queue *q = PTR(struct queue, queue);
	int rc = q->qp ? spdk_nvme_ctrlr_reconnect_io_qpair(q->qp) : -ENXIO;
	*fd = rc ? -1 : interrupt_fd(q);
	return rc;
}

void jbof_queue_end(uint64_t queue)
{
	struct queue *q = PTR(struct queue, queue);
	if (q->qp)
		spdk_nvme_ctrlr_free_io_qpair(q->qp);
	q->qp = NULL;
}

void jbof_queue_close(uint64_t queue)
{
	struct queue *q = PTR(struct queue, queue);
	jbof_queue_end(queue);
	free(q->ring);
	free(q->slots);
	free(q);
}

static void aborted(void *arg, const struct spdk_nvme_cpl *cpl)
{
	(void)arg;
	(void)cpl; // an Abort that does nothing is followed by a reset
}

int32_t jbof_queue_abort(uint64_t queue, uint32_t slot)
{
	struct queue *q = PTR(struct queue, queue);
	return q->qp ? spdk_nvme_ctrlr_cmd_abort_ext(q->ctrl->ctrlr, q->qp, &q->slots[slot], aborted, NULL) : -ENXIO;
}

static int submit(struct queue *q, const struct jbof_cmd *c, struct slot *s)
{
	struct spdk_nvme_ns *ns = q->ctrl->ns;
	uint32_t flags = c->flags & JBOF_FUA ? SPDK_NVME_IO_FLAGS_FORCE_UNIT_ACCESS : 0;
	void *data = PTR(void, c->addr);
	switch (c->op) {
	case JBOF_READ:
		return spdk_nvme_ns_cmd_read(ns, q->qp, data, c->lba, c->blocks, completed, s, flags);
	case JBOF_WRITE:
		return spdk_nvme_ns_cmd_write(ns, q->qp, data, c->lba, c->blocks, completed, s, flags);
	case JBOF_FLUSH:
		return spdk_nvme_ns_cmd_flush(ns, q->qp, completed, s);
	case JBOF_DEALLOCATE: {
		struct spdk_nvme_dsm_range range = {.length = c->blocks, .starting_lba = c->lba}; // SPDK copies it
		return spdk_nvme_ns_cmd_dataset_management(ns, q->qp, SPDK_NVME_DSM_ATTR_DEALLOCATE, &range, 1, completed, s);
	}
	case JBOF_WRITE_ZEROES:
		if (c->flags & JBOF_UNMAP)
			flags |= WRITE_ZEROES_DEAC;
		return spdk_nvme_ns_cmd_write_zeroes(ns, q->qp, c->lba, c->blocks, completed, s, flags);
	}
	return -EINVAL;
}

void jbof_turn(uint64_t queue, const struct jbof_cmd *cmds, int32_t n, struct jbof_cpl *cpls, int32_t most,
	struct jbof_turned *out)
{
	struct queue *q = PTR(struct queue, queue);
	memset(out, 0, sizeof *out);
	for (; q->qp && out->took < n; out->took++) {
		struct slot *s = &q->slots[cmds[out->took].slot];
		s->busy = true; // before the call, which may complete it
		int rc = submit(q, &cmds[out->took], s);
		if (rc) {
			s->busy = false;
			out->refused = rc;
			break;
		}
	}
	// This also sends what the transport has gathered.
	int32_t rc = q->qp ? spdk_nvme_qpair_process_completions(q->qp, 0) : 0;
	if (rc < 0)
		out->lost = rc;
	for (; q->held > 0 && out->cpls < most; q->held--) {
		cpls[out->cpls++] = q->ring[q->first];
		q->first = (q->first + 1) % q->places;
	}
	out->more = q->held;
	out->lies = q->lies;
}
