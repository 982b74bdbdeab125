// The one list of kernels, and nothing else. It is explicit, because static constructors are dropped from static archives; and by
// itself, so that a program with a list of its own links that in place of this one (examples/adding_a_kernel.cpp).
#include "kernels/cpu/families.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/kernel.hpp"
#include "kernels/reference/reference.hpp"

namespace nibble {

std::span<const Kernel> kernel_table() {
  static const KernelTable kTable(
      {cpu::bf16_kernels(),       cpu::dot_kernels(),     cpu::float_kernels(),        cpu::conv_kernels(),
       cpu::dequantize_kernels(), cpu::prepare_kernels(), cpu::recode_kernels(),       cpu::finish_kernels(),
       cpu::norm_kernels(),       cuda::w8a8_kernels(),   cuda::wna8_kernels(),        cuda::fixed_point_kernels(),
       cuda::pair_kernels(),      cuda::wna16_kernels(),  cuda::e4m3_halves_kernels(), cuda::codes_kernels(),
       cuda::dense_kernels(),     cuda::conv_kernels(),   cuda::im2col_kernels(),      cuda::recode_kernels(),
       cuda::finish_kernels(),    cuda::norm_kernels(),   reference::kernels()});
  return kTable.rows();
}

}  // namespace nibble
