/* malloc and its family with an allocation that fails. */
#ifndef NIBBLE_FAILING_MALLOC_H
#define NIBBLE_FAILING_MALLOC_H

/* The n-th allocation from now on fails; 0: none. */
void fail_allocation(long n);
/* How many there have been since. */
long allocations(void);

#endif
