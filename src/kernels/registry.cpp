// The one list of kernels, and nothing else. It is explicit, because static constructors are dropped from static archives; and by
// itself, so that a program with a list of its own links that in place of this one (examples/adding_a_kernel.cpp).
#include <vector>

#include "kernels/cpu/families.hpp"
#include "kernels/cuda/table/conv.hpp"
#include "kernels/cuda/table/w8a8.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/table/wna8.hpp"
#include "kernels/kernel.hpp"
#include "kernels/reference/reference.hpp"

namespace nibble {

std::span<const Kernel* const> kernel_table() {
  static const std::vector<const Kernel*> kTable = [] {
    std::vector<const Kernel*> table;
    for (std::span<const Kernel> family : {cpu::bf16_kernels(), cpu::dot_kernels(), cpu::float_kernels(), cpu::conv_kernels(),
                                           cpu::dequantize_kernels(), cpu::prepare_kernels(), cuda::scaled_kernels(),
                                           cuda::online_kernels(), cuda::kernels(), cuda::conv_kernels(), reference::kernels()})
      for (const Kernel& kernel : family) table.push_back(&kernel);
    return table;
  }();
  return kTable;
}

}  // namespace nibble
