// The kernels of decode.cu for codes that are floats: up to 8 tokens, for which registers suffice; scales of records of any type, and for
// e2m1 also of groups of 16 channels.
#include "kernels/cuda/sm90/decode/decode_kernel.cuh"

namespace nibble::cuda {
namespace {

DecodeKernel kernel_for(Codes codes, Known known) {
  const bool sixteen = known == Known::groups_of_16;
  if (codes == Codes::e4m3 && !sixteen) return &kLaunchable<decode_ring_kernel<Decode<Known::nothing, 1, Codes::e4m3>>>;
  if (codes != Codes::e2m1) return nullptr;
  return sixteen ? &kLaunchable<decode_ring_kernel<Decode<Known::groups_of_16, 1, Codes::e2m1>>>
                 : &kLaunchable<decode_ring_kernel<Decode<Known::nothing, 1, Codes::e2m1>>>;
}

}  // namespace

DecodeKernel decode_float_codes(Codes codes, Known known, int tokens) {
  if (tokens > 8) return nullptr;
  return kernel_for(codes, known);
}

}  // namespace nibble::cuda
