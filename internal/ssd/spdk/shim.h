// The functions that call_unsafe.go calls. They return 0 or a negative error number unless something else is said.
// Handles are addresses; 0 stands for no object. Nothing here keeps a pointer to memory of Go, or calls Go.

#ifndef JBOF_SPDK_H
#define JBOF_SPDK_H

#include <stdint.h>

// What a command does. The numbers are those of ssd.Op.
enum { JBOF_READ, JBOF_WRITE, JBOF_FLUSH, JBOF_DEALLOCATE, JBOF_WRITE_ZEROES };

enum {
	JBOF_FUA = 1,   // flags of struct jbof_cmd, as in ssd.Flags
	JBOF_UNMAP = 2,
};

// A command. Its data are contiguous. slot comes back in its completion; no other outstanding command of the queue has
// it.
struct jbof_cmd {
	uint64_t lba;
	uint64_t addr;   // READ, WRITE: of its data, which the queue owns until the completion
	uint32_t blocks;
	uint32_t slot;   // below the queue's places
	uint8_t op, flags;
	uint8_t reserved[6];
};

struct jbof_cpl {
	uint32_t slot;
	uint16_t status; // SC in bits 0 to 7, SCT in 8 to 10, DNR in 14, as in nvme.Status
	uint16_t reserved;
};

// What one turn of a queue has done.
struct jbof_turned {
	int32_t took;   // commands that were taken
	int32_t refused; // the error of the first command that was not taken, or 0
	int32_t cpls;   // completions that were returned
	int32_t lost;   // the error of the queue, or 0: no command can be sent until the controller was reset
	int32_t more;   // completions that are left for the next turn
	int32_t lies;   // completions of commands that were not outstanding
};

struct jbof_info {
	char model[40], serial[20];
	uint8_t names[40];         // of the namespace: UUID, NGUID and EUI64; zeroes: it has none
	uint64_t blocks;
	uint32_t block_bytes, max_transfer;
	uint32_t nsid, md_bytes;
	uint32_t atomic_blocks;    // of the controller: AWUPF + 1
	uint32_t optimal_blocks;   // NPWG + 1, or 0: not known
	uint16_t nawupf, nabspf, nabo;
	uint8_t ns_atomics;        // the three fields before are valid
	uint8_t volatile_cache, deallocates, reads_zero, write_zeroes, interrupts;
};

int32_t jbof_env_init(const char *name, const char *lcores, int32_t mem_mib, int32_t pci);
int32_t jbof_mem_register(uint64_t addr, uint64_t len);
int32_t jbof_mem_unregister(uint64_t addr, uint64_t len);
uint64_t jbof_alloc(uint64_t len); // zeroed memory that devices see, aligned to 4096 bytes; 0: there is none
void jbof_free(uint64_t addr);

uint64_t jbof_attach(const char *trid, const char *hostnqn, uint32_t nsid, int32_t interrupts, struct jbof_info *info,
	char *why, int32_t why_len);
void jbof_detach(uint64_t ctrl);
int32_t jbof_admin(uint64_t ctrl);
int32_t jbof_reset(uint64_t ctrl, struct jbof_info *info);

// Makes a queue of at most so many places, and returns how many it has. fd is readable when there are completions; -1:
// the queue sends no interrupts. It is SPDK's, which closes it at the end of the queue, or in a reset.
uint64_t jbof_queue_open(uint64_t ctrl, uint32_t *places, int32_t *fd, int32_t *err);
void jbof_queue_disconnect(uint64_t queue);
int32_t jbof_queue_reconnect(uint64_t queue, int32_t *fd);
void jbof_queue_end(uint64_t queue);  // outstanding commands end; completions can still be taken
void jbof_queue_close(uint64_t queue);
int32_t jbof_queue_abort(uint64_t queue, uint32_t slot);
void jbof_turn(uint64_t queue, const struct jbof_cmd *cmds, int32_t n, struct jbof_cpl *cpls, int32_t most,
	struct jbof_turned *out);

#endif
