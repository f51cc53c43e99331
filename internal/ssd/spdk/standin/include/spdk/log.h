// See env.h.

#ifndef SPDK_LOG_H
#define SPDK_LOG_H

#include <stdarg.h>

enum spdk_log_level { SPDK_LOG_DISABLED = -1, SPDK_LOG_ERROR, SPDK_LOG_WARN, SPDK_LOG_NOTICE };

typedef void spdk_log_cb(int level, const char *file, const int line, const char *func, const char *format,
	va_list args);

void spdk_log_open(spdk_log_cb *log);
void spdk_log_set_print_level(enum spdk_log_level level);

#endif
