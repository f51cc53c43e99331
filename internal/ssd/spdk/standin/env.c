// The environment of the stand-in: memory, and the log.

#define _GNU_SOURCE

#include "standin.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <spdk/env.h>
#include <spdk/log.h>

bool env_made, env_pci;
uint64_t *last_words;
static spdk_log_cb *logger;

void add(uint64_t *words, int word, int64_t n) { __atomic_add_fetch(&words[word], n, __ATOMIC_SEQ_CST); }
uint64_t get(uint64_t *words, int word) { return __atomic_load_n(&words[word], __ATOMIC_SEQ_CST); }

void violation(uint64_t *words, int line)
{
	if (!words)
		return;
	add(words, VIOLATIONS, 1);
	__atomic_store_n(&words[VIOLATION], line, __ATOMIC_SEQ_CST);
}

void spdk_log_open(spdk_log_cb *log) { logger = log; }
void spdk_log_set_print_level(enum spdk_log_level level) { (void)level; }

void error(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	if (logger)
		logger(SPDK_LOG_ERROR, __FILE__, __LINE__, "standin", format, args);
	va_end(args);
}

// Memory that devices see is in a list.

static struct area {
	struct area *next;
	uint8_t *at;
	size_t len;
	bool allocated;
} *areas;
static pthread_mutex_t areas_lock = PTHREAD_MUTEX_INITIALIZER;

static void add_area(void *at, size_t len, bool allocated)
{
	struct area *a = malloc(sizeof *a);
	*a = (struct area){.next = areas, .at = at, .len = len, .allocated = allocated};
	areas = a;
}

static bool within(const void *at, size_t len, bool allocated_only)
{
	bool found = false;
	pthread_mutex_lock(&areas_lock);
	for (struct area *a = areas; a && !found; a = a->next)
		found = (a->allocated || !allocated_only) && (uint8_t *)at >= a->at && (uint8_t *)at + len <= a->at + a->len;
	pthread_mutex_unlock(&areas_lock);
	return found;
}

bool visible(const void *at, size_t len) { return within(at, len, false); }
bool allocated(const void *at, size_t len) { return within(at, len, true); }

static int remove_area(void *at, size_t len, bool allocated)
{
	int rc = -EINVAL;
	pthread_mutex_lock(&areas_lock);
	for (struct area **p = &areas; *p; p = &(*p)->next) {
		struct area *a = *p;
		if (a->at != at || a->allocated != allocated || (!allocated && a->len != len))
			continue;
		*p = a->next;
		free(a);
		rc = 0;
		break;
	}
	pthread_mutex_unlock(&areas_lock);
	return rc;
}

void spdk_env_opts_init(struct spdk_env_opts *opts)
{
	if (opts->opts_size != sizeof *opts)
		abort(); // SPDK would leave all of it unset
	*opts = (struct spdk_env_opts){.name = "spdk", .core_mask = "0x1", .mem_size = -1, .opts_size = sizeof *opts};
}

int spdk_env_init(const struct spdk_env_opts *opts)
{
	int cpu;
	cpu_set_t one;
	if (env_made || (opts->core_mask != NULL) == (opts->lcore_map != NULL) || (opts->no_huge && opts->mem_size < 0) ||
		sscanf(opts->lcore_map, "0@%d", &cpu) != 1)
		return -EINVAL;
	env_made = true;
	env_pci = !opts->no_pci;
	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	return -pthread_setaffinity_np(pthread_self(), sizeof one, &one); // as DPDK does
}

void *spdk_zmalloc(size_t size, size_t align, uint64_t *unused, int numa_id, uint32_t flags)
{
	void *at = NULL;
	if (!env_made || unused || numa_id != SPDK_ENV_NUMA_ID_ANY || !(flags & SPDK_MALLOC_DMA) ||
		posix_memalign(&at, align, size))
		return NULL;
	memset(at, 0, size);
	pthread_mutex_lock(&areas_lock);
	add_area(at, size, true);
	pthread_mutex_unlock(&areas_lock);
	return at;
}

void spdk_free(void *buf)
{
	CHECK(last_words, remove_area(buf, 0, true) == 0);
	free(buf);
}

int spdk_mem_register(void *vaddr, size_t len)
{
	if (((uintptr_t)vaddr | len) & 4095)
		return -EINVAL;
	if (visible(vaddr, 1))
		return -EBUSY;
	if (last_words && get(last_words, FLAGS) & NO_REGISTER)
		return -ENOMEM;
	pthread_mutex_lock(&areas_lock);
	add_area(vaddr, len, false);
	pthread_mutex_unlock(&areas_lock);
	add(last_words, REGISTERED, 1);
	return 0;
}

int spdk_mem_unregister(void *vaddr, size_t len)
{
	int rc = remove_area(vaddr, len, false);
	CHECK(last_words, rc == 0);
	if (rc == 0)
		add(last_words, REGISTERED, -1);
	return rc;
}

uint64_t spdk_vtophys(const void *buf, uint64_t *size)
{
	static const void *first;
	bool lies = last_words && get(last_words, FLAGS) & NO_TRANSLATION;
	// With NO_TRANSLATION the first page has an address and the last has none.
	bool other = first && buf > first;
	first = buf;
	return visible(buf, *size) && !(lies && other) ? (uintptr_t)buf : SPDK_VTOPHYS_ERROR;
}
