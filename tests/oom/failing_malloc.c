/* Linked into a program, or preloaded into any: FAIL_ALLOCATION=12 lets the twelfth allocation fail, FAIL_ALLOCATION=12+ all
 * after it as well, and COUNT_ALLOCATIONS=FILE writes the number of allocations. */
#define _GNU_SOURCE
#include "failing_malloc.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern void* __libc_malloc(size_t bytes);
extern void* __libc_calloc(size_t count, size_t bytes);
extern void* __libc_realloc(void* old, size_t bytes);
extern void* __libc_memalign(size_t alignment, size_t bytes);

static atomic_long seen, first, last; /* allocations so far; those that fail */

void fail_allocation(long n, int for_good) {
  atomic_store(&last, 0);
  atomic_store(&seen, 0);
  atomic_store(&first, n);
  atomic_store(&last, for_good ? LONG_MAX : n);
}

long allocations(void) { return atomic_load(&seen); }

static int fails(void) {
  const long n = atomic_fetch_add(&seen, 1) + 1;
  if (n < atomic_load(&first) || n > atomic_load(&last)) return 0;
  errno = ENOMEM;
  return 1;
}

void* malloc(size_t bytes) { return fails() ? NULL : __libc_malloc(bytes); }
void* calloc(size_t count, size_t bytes) { return fails() ? NULL : __libc_calloc(count, bytes); }
void* realloc(void* old, size_t bytes) { return fails() ? NULL : __libc_realloc(old, bytes); }
void* memalign(size_t alignment, size_t bytes) { return fails() ? NULL : __libc_memalign(alignment, bytes); }
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** to, size_t alignment, size_t bytes) {
  void* const made = memalign(alignment, bytes);
  if (made == NULL) return ENOMEM;
  *to = made;
  return 0;
}

/* The first call of main() of the tool: exceptions of CLI11's globals before it cannot be caught. */
void (*signal(int number, void (*handler)(int)))(int) {
  static int called;
  const char* const text = getenv("FAIL_ALLOCATION");
  if (called++ == 0) fail_allocation(text == NULL ? 0 : atol(text), text != NULL && strchr(text, '+') != NULL);
  struct sigaction action = {0}, before;
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  return sigaction(number, &action, &before) == 0 ? before.sa_handler : SIG_ERR;
}

__attribute__((destructor)) static void write_count(void) {
  const char* const path = getenv("COUNT_ALLOCATIONS");
  if (path == NULL) return;
  char text[32];
  const int length = snprintf(text, sizeof text, "%ld\n", allocations());
  const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (fd < 0 || write(fd, text, (size_t)length) != length) _exit(99);
  close(fd);
}
