#include "kernels/cpu/outputs.hpp"

#include <algorithm>

#include "epilogue/epilogue.hpp"

namespace nibble::cpu {

void Outputs::store(float* sums, int rows, std::int64_t block, std::int64_t m, std::int64_t height) const {
  const std::int64_t n0 = block * rows, begin = std::max(n0, n_begin), end = std::min(n0 + rows, n_end);
  for (std::int64_t r = 0; r < height; ++r)
    epilogue::store_row(*epilogue, *operands, sums + r * rows + (begin - n0), m + r, begin, end - begin, *d);
}

}  // namespace nibble::cpu
