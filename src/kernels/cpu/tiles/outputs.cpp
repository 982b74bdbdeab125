// One compilation of the epilogue per vector width.
#include "kernels/cpu/tiles/outputs.hpp"

#include <algorithm>
#include <cstring>

#include "core/target.hpp"
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

Outputs::Outputs(Isa isa, const StepArgs& args)
    : epilogue(args.epilogue),
      operands(&args.operands),
      d(&args.d),
      n_begin(args.n_begin),
      n_end(args.n_end == 0 ? args.weight->n : args.n_end),
      store_(store_for(isa)) {}

}  // namespace nibble::cpu
