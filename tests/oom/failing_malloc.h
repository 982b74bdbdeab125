/* malloc and its family with allocations that fail. */
#ifndef NIBBLE_FAILING_MALLOC_H
#define NIBBLE_FAILING_MALLOC_H

/* The n-th allocation from now on fails, and all after it where `for_good`; 0: none. */
void fail_allocation(long n, int for_good);
/* The number of allocations since. */
long allocations(void);

#endif
