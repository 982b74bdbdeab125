// Activations to codes in device memory.
#include "nibble/quantize.hpp"

#include "core/error.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "quantize/check_act_outputs.hpp"

namespace nibble {

Status quantize_activations(const ConstTensorView& a, const ActScheme& scheme, const ActOutputs& out, const ActOptions& options,
                            Stream stream) {
  NIBBLE_RETURN_IF_ERROR(check_act_outputs(a, scheme, out, options));
  cuda::QuantizeTask task{.a = a.data,
                          .type = a.dtype,
                          .a_stride = a.stride(0),
                          .m = a.dim(0),
                          .k = a.dim(1),
                          .prescale = static_cast<const float*>(options.prescale.data),
                          .codes_type = scheme.codes,
                          .zero_points = scheme.zero == ZeroKind::integer,
                          .known = options.known.has_value(),
                          .group = scheme.group.k,
                          .codes = out.codes.data,
                          .pitch = out.codes.stride(0),
                          .columns = a.dim(1),
                          .scales = static_cast<float*>(out.scales.data),
                          .scale_row = out.scales.stride(0),
                          .scale_group = out.scales.rank == 2 ? out.scales.stride(1) : 0,
                          .zero_row = out.zeros.stride(0),
                          .zero_group = out.zeros.rank == 2 ? out.zeros.stride(1) : 0,
                          .sums = static_cast<std::int32_t*>(out.sums.data),
                          .sum_row = out.sums.stride(0)};
  if (scheme.zero == ZeroKind::offset)
    task.offsets = static_cast<float*>(out.zeros.data);
  else
    task.zeros = static_cast<std::int32_t*>(out.zeros.data);
  if (options.limit) task.limit = *options.limit;
  if (options.known) task.scale = options.known->scale, task.zero = options.known->zero;
  return cuda::launch_quantize_acts(task, stream);
}

}  // namespace nibble
