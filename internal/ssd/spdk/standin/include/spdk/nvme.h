// See env.h.

#ifndef SPDK_NVME_H
#define SPDK_NVME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum spdk_nvme_transport_type {
	SPDK_NVME_TRANSPORT_RDMA = 1,
	SPDK_NVME_TRANSPORT_TCP = 3,
	SPDK_NVME_TRANSPORT_PCIE = 256,
};

struct spdk_nvme_transport_id {
	enum spdk_nvme_transport_type trtype;
	char traddr[257], trsvcid[33], subnqn[224];
};

struct spdk_nvme_ctrlr_opts {
	bool enable_interrupts, disable_error_logging;
	uint32_t io_queue_size;
	char hostnqn[224];
	size_t opts_size;
};

struct spdk_nvme_io_qpair_opts {
	uint32_t io_queue_size, io_queue_requests;
	bool delay_cmd_submit;
	size_t opts_size;
};

struct spdk_nvme_cpl {
	uint32_t cdw0;
	uint16_t status_raw; // the phase tag in bit 0
};

struct spdk_nvme_ctrlr_data {
	char sn[20], mn[40];
	struct {
		uint8_t present : 1;
	} vwc;
	uint16_t awupf;
};

struct spdk_nvme_ns_data {
	struct {
		uint8_t ns_atomic_write_unit : 1, optperf : 1;
	} nsfeat;
	uint16_t nawupf, nabo, nabspf, npwg;
	uint8_t nguid[16];
	uint64_t eui64;
};

enum spdk_nvme_ns_flags {
	SPDK_NVME_NS_DEALLOCATE_SUPPORTED = 1 << 0,
	SPDK_NVME_NS_WRITE_ZEROES_SUPPORTED = 1 << 3,
};

enum spdk_nvme_dealloc_logical_block_read_value { SPDK_NVME_DEALLOC_NOT_REPORTED, SPDK_NVME_DEALLOC_READ_00 };

#define SPDK_NVME_IO_FLAGS_FORCE_UNIT_ACCESS (1U << 30)
#define SPDK_NVME_DSM_ATTR_DEALLOCATE 0x4

struct spdk_nvme_dsm_range {
	uint32_t attributes;
	uint32_t length;
	uint64_t starting_lba;
};

struct spdk_nvme_ctrlr;
struct spdk_nvme_ns;
struct spdk_uuid;
struct spdk_nvme_qpair;
struct spdk_event_handler_opts;

typedef void (*spdk_nvme_cmd_cb)(void *arg, const struct spdk_nvme_cpl *cpl);

int spdk_nvme_transport_id_parse(struct spdk_nvme_transport_id *trid, const char *str);
bool spdk_nvme_transport_available(enum spdk_nvme_transport_type trtype);
void spdk_nvme_ctrlr_get_default_ctrlr_opts(struct spdk_nvme_ctrlr_opts *opts, size_t opts_size);
struct spdk_nvme_ctrlr *spdk_nvme_connect(const struct spdk_nvme_transport_id *trid,
	const struct spdk_nvme_ctrlr_opts *opts, size_t opts_size);
int spdk_nvme_detach(struct spdk_nvme_ctrlr *ctrlr);
const struct spdk_nvme_ctrlr_opts *spdk_nvme_ctrlr_get_opts(struct spdk_nvme_ctrlr *ctrlr);
const struct spdk_nvme_ctrlr_data *spdk_nvme_ctrlr_get_data(struct spdk_nvme_ctrlr *ctrlr);
int32_t spdk_nvme_ctrlr_process_admin_completions(struct spdk_nvme_ctrlr *ctrlr);
bool spdk_nvme_ctrlr_is_failed(struct spdk_nvme_ctrlr *ctrlr);
int spdk_nvme_ctrlr_reset(struct spdk_nvme_ctrlr *ctrlr);
int spdk_nvme_ctrlr_cmd_abort_ext(struct spdk_nvme_ctrlr *ctrlr, struct spdk_nvme_qpair *qpair, void *cmd_cb_arg,
	spdk_nvme_cmd_cb cb_fn, void *cb_arg);

uint32_t spdk_nvme_ctrlr_get_first_active_ns(struct spdk_nvme_ctrlr *ctrlr);
struct spdk_nvme_ns *spdk_nvme_ctrlr_get_ns(struct spdk_nvme_ctrlr *ctrlr, uint32_t ns_id);
bool spdk_nvme_ns_is_active(struct spdk_nvme_ns *ns);
const struct spdk_nvme_ns_data *spdk_nvme_ns_get_data(struct spdk_nvme_ns *ns);
const struct spdk_uuid *spdk_nvme_ns_get_uuid(const struct spdk_nvme_ns *ns);
uint32_t spdk_nvme_ns_get_flags(struct spdk_nvme_ns *ns);
uint64_t spdk_nvme_ns_get_num_sectors(struct spdk_nvme_ns *ns);
uint32_t spdk_nvme_ns_get_sector_size(struct spdk_nvme_ns *ns);
uint32_t spdk_nvme_ns_get_md_size(struct spdk_nvme_ns *ns);
uint32_t spdk_nvme_ns_get_max_io_xfer_size(struct spdk_nvme_ns *ns);
enum spdk_nvme_dealloc_logical_block_read_value spdk_nvme_ns_get_dealloc_logical_block_read_value(
	struct spdk_nvme_ns *ns);

void spdk_nvme_ctrlr_get_default_io_qpair_opts(struct spdk_nvme_ctrlr *ctrlr, struct spdk_nvme_io_qpair_opts *opts,
	size_t opts_size);
struct spdk_nvme_qpair *spdk_nvme_ctrlr_alloc_io_qpair(struct spdk_nvme_ctrlr *ctrlr,
	const struct spdk_nvme_io_qpair_opts *opts, size_t opts_size);
int spdk_nvme_ctrlr_free_io_qpair(struct spdk_nvme_qpair *qpair);
void spdk_nvme_ctrlr_disconnect_io_qpair(struct spdk_nvme_qpair *qpair);
int spdk_nvme_ctrlr_reconnect_io_qpair(struct spdk_nvme_qpair *qpair);
int spdk_nvme_qpair_get_fd(struct spdk_nvme_qpair *qpair, struct spdk_event_handler_opts *opts);
int32_t spdk_nvme_qpair_process_completions(struct spdk_nvme_qpair *qpair, uint32_t max_completions);

int spdk_nvme_ns_cmd_read(struct spdk_nvme_ns *ns, struct spdk_nvme_qpair *qpair, void *payload, uint64_t lba,
	uint32_t lba_count, spdk_nvme_cmd_cb cb_fn, void *cb_arg, uint32_t io_flags);
int spdk_nvme_ns_cmd_write(struct spdk_nvme_ns *ns, struct spdk_nvme_qpair *qpair, void *payload, uint64_t lba,
	uint32_t lba_count, spdk_nvme_cmd_cb cb_fn, void *cb_arg, uint32_t io_flags);
int spdk_nvme_ns_cmd_flush(struct spdk_nvme_ns *ns, struct spdk_nvme_qpair *qpair, spdk_nvme_cmd_cb cb_fn,
	void *cb_arg);
int spdk_nvme_ns_cmd_dataset_management(struct spdk_nvme_ns *ns, struct spdk_nvme_qpair *qpair, uint32_t type,
	const struct spdk_nvme_dsm_range *ranges, uint16_t num_ranges, spdk_nvme_cmd_cb cb_fn, void *cb_arg);
int spdk_nvme_ns_cmd_write_zeroes(struct spdk_nvme_ns *ns, struct spdk_nvme_qpair *qpair, uint64_t lba,
	uint32_t lba_count, spdk_nvme_cmd_cb cb_fn, void *cb_arg, uint32_t io_flags);

#endif
