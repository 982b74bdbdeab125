// One compilation of the epilogue per vector width.
#include "kernels/cpu/tiles/outputs.hpp"

#include <algorithm>
#include <cstring>

#include "core/target.hpp"
#include "epilogue/activation.hpp"
#include "epilogue/epilogue.hpp"
#include "kernels/cpu/intrinsics.hpp"
#include "layouts/tile.hpp"

namespace nibble::cpu {
namespace {

/// The wanted part of a row of `rows` sums, which are channels from n on.
void store_part(const Outputs& o, float* sums, std::int64_t n, int rows, std::int64_t m) {
  const std::int64_t begin = std::max(n, o.n_begin), end = std::min(n + rows, o.n_end);
  epilogue::store_row(*o.epilogue, *o.operands, sums + (begin - n), m, begin, end - begin, *o.d);
}

#define NIBBLE_LOOPS "kernels/cpu/tiles/outputs.inl"
#include "kernels/cpu/each_isa.inl"

Outputs::Store store_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512 || isa == Isa::avx512vnni || isa == Isa::avx512bf16 || isa == Isa::amx) return avx512::store;
  if (isa == Isa::avx2 || isa == Isa::avx2vnni) return avx2::store;
#endif
  (void)isa;
  return baseline::store;
}

}  // namespace

void Outputs::store_integers(const std::int32_t* sums, int rows, std::int64_t block, std::int64_t m, std::int64_t height) const {
  const std::int64_t n = block * rows, begin = std::max(n, n_begin), end = std::min(n + rows, n_end);
  for (std::int64_t r = 0; r < height && begin < end; ++r)
    std::copy_n(sums + r * rows + (begin - n), end - begin, static_cast<std::int32_t*>(d->data) + (m + r) * d->stride(0) + begin);
}

Outputs::Outputs(Isa isa, const StepArgs& args)
    : epilogue(args.epilogue),
      operands(&args.operands),
      d(&args.d),
      n_begin(args.n_begin),
      n_end(args.n_end == 0 ? args.weight->n : args.n_end),
      store_(store_for(isa)) {}

}  // namespace nibble::cpu
