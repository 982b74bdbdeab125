#include "kernels/cpu/tiles/ahead.hpp"

namespace nibble::cpu {

std::ptrdiff_t low_tile_ahead() {
#if defined(__x86_64__)
  // On a Xeon of Intel with AMX, one token and cold weights, 2 KiB are a fifth faster than none on one thread, 1 KiB is as fast or up to 6 % slower,
  // 4 KiB are 4 to 9 % slower. On Zen 4 such prefetches compete with those of the hardware: a tenth slower than none.
  static const bool intel = __builtin_cpu_is("intel") != 0;
  return intel ? 2048 : 0;
#else
  return 0;
#endif
}

}  // namespace nibble::cpu
