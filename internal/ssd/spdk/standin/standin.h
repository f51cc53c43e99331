// What standin.c and env.c share.

#ifndef STANDIN_H
#define STANDIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { // words
	FLAGS, BLOCK_SHIFT, MAX_TRANSFER, DELAY_NS, HANG, FAIL, FAIL_STATUS, NO_MEMORY, REFUSE, ATOMIC, ENTRIES, NO_QUEUE,
	SUBMITS = 16, TURNS, COMPLETIONS, ABORTS, RESETS, VIOLATIONS, VIOLATION, REGISTERED, ADMINS, DETACHES, FUAS, DEACS,
	FLUSHES, DSMS, SENDS, QPAIRS
};

enum { // of FLAGS
	WRITE_ZEROES = 1 << 0, DSM = 1 << 1, READS_ZERO = 1 << 2, CACHE = 1 << 3, NO_INTERRUPTS = 1 << 4,
	NO_TRANSLATION = 1 << 5, NO_REGISTER = 1 << 6, RESET_FAILS = 1 << 7, ABORT_IGNORED = 1 << 8, REMOVED = 1 << 9,
	CUT = 1 << 10, TWICE = 1 << 11, METADATA = 1 << 12, BACKWARDS = 1 << 13, SHRUNK = 1 << 14, REFUSED = 1 << 15,
	OTHER_UUID = 1 << 16, OTHER_NGUID = 1 << 17, OTHER_EUI64 = 1 << 18, NO_UUID = 1 << 19,
};

extern bool env_made, env_pci;
extern uint64_t *last_words; // of the controller that was connected last; NULL: none

void add(uint64_t *words, int word, int64_t n);
uint64_t get(uint64_t *words, int word);
void violation(uint64_t *words, int line);
void error(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool visible(const void *at, size_t len); // to devices
bool allocated(const void *at, size_t len); // by spdk_zmalloc

#define CHECK(words, x) do { if (!(x)) violation(words, __LINE__); } while (0)

#endif
