// The part of SPDK's API that shim.c uses, declared from its documentation for tests without SPDK (standin.c).

#ifndef SPDK_ENV_H
#define SPDK_ENV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SPDK_ENV_NUMA_ID_ANY (-1)
#define SPDK_MALLOC_DMA 0x01
#define SPDK_VTOPHYS_ERROR (0xFFFFFFFFFFFFFFFFULL)

struct spdk_env_opts {
	const char *name, *core_mask, *lcore_map;
	int mem_size;
	bool no_pci, no_huge;
	size_t opts_size;
};

void spdk_env_opts_init(struct spdk_env_opts *opts);
int spdk_env_init(const struct spdk_env_opts *opts);
void *spdk_zmalloc(size_t size, size_t align, uint64_t *unused, int numa_id, uint32_t flags);
void spdk_free(void *buf);
int spdk_mem_register(void *vaddr, size_t len);
int spdk_mem_unregister(void *vaddr, size_t len);
uint64_t spdk_vtophys(const void *buf, uint64_t *size);

#endif
