#include "kernels/cpu/tiles/ahead.hpp"

namespace nibble::cpu {

std::ptrdiff_t low_tile_ahead() {
#if defined(__x86_64__)
  // On a Xeon with AMX 2 KiB were the fastest of 0, 1, 2 and 4 KiB, for one token and cold weights. On Zen 4 such prefetches compete with those of
  // the hardware: a tenth slower than none.
  static const bool intel = __builtin_cpu_is("intel") != 0;
  return intel ? 2048 : 0;
#else
  return 0;
#endif
}

}  // namespace nibble::cpu
