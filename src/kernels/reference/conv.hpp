// The oracle of convolutions: the patches as a matrix, and the oracle of linear layers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/reference/oracle.hpp"
#include "nibble/conv.hpp"
#include "nibble/tensor.hpp"

namespace nibble::reference {

/// The patches that conv2d(A, W) multiplies by the rows of one group: [B·Oh·Ow, Kh·Kw·Ci/groups] of A's type, in the order kh, kw, ci.
/// Padding is `pad`: 0, or the code of 0. `a` is [B,Ci,H,W] with any strides.
Tensor patches(const ConvGeometry& geometry, const ConstTensorView& a, std::int64_t group, float pad);

/// A view [B,C,H,W] of any strides as a dense matrix [B·H·W, C].
Tensor pixels(const ConstTensorView& image);

/// The code that padding has in an A of `type`: the zero point, where A comes quantized with one; else 0.
float padding_code(const ConvSpec& spec, DType type, const WeightArrays& w, const Operands& args);

/// Expected D of output channels `columns`, all of one group, for every output pixel [B·Oh·Ow, |columns|] row by row; `a`, gate and
/// residual are images.
std::vector<Expected> conv(const WeightArrays& w, const ConvSpec& spec, const ConstTensorView& a, const Operands& args,
                           std::span<const std::int64_t> columns, const ActModel& model = {});

}  // namespace nibble::reference
