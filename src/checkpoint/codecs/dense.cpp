// Dense: a weight that is not quantized.
//
//   weight  f32, f16 or bf16  [N,K], or of a convolution [Co,Ci/groups,Kh,Kw]
//   bias    f32, f16 or bf16  [N]    optional
//
//   weight.transposed in place of weight: [K,N], of experts that are stored together (stacks.hpp); no tensor of a checkpoint is called so
//
// Read as they are, without a change of their bits. Embeddings look the same and are listed too.
#include <algorithm>
#include <cstring>
#include <utility>

#include "checkpoint/codecs/table.hpp"
#include "checkpoint/config/codec_util.hpp"

namespace nibble::codec {
namespace {

constexpr StoredTensor kTensors[] = {{"weight", axes::kCodes}, {"weight.transposed"}, {"bias", axes::kN}};

std::optional<Result<Module>> detect(const ModuleTensors& tensors, const QuantConfig&) {
  const ConstTensorView *stored = tensors.find("weight"), *columns = tensors.find("weight.transposed");
  const ConstTensorView* weight = stored != nullptr ? stored : columns;
  if (weight == nullptr || (weight->rank != 2 && (weight->rank != 4 || weight == columns)) || !is_compute_float(weight->dtype))
    return std::nullopt;
  Module m;
  m.format = "dense";
  m.n = weight->dim(0);
  m.k = weight->dim(1);
  if (weight == columns) std::swap(m.n, m.k);
  if (weight->rank == 4) {
    if (weight->dim(0) < 1 || weight->dim(1) < 1 || weight->dim(2) < 1 || weight->dim(3) < 1) return std::nullopt;
    m.filter = Extent{weight->dim(2), weight->dim(3)};
    m.k *= m.filter->h * m.filter->w;
  }
  if (!check_dimensions(tensors, m.n, m.k).ok()) return std::nullopt;
  m.has_bias = tensors.find("bias") != nullptr && check_bias(tensors, m.n).ok();
  if (tensors.find("bias") != nullptr && !m.has_bias)
    note(m.notes, kInfo, "bias {} does not belong to weight {} = [N,K]; is the weight stored transposed?",
         describe(*tensors.find("bias")), describe(*weight));
  m.scheme = WeightScheme::dense(weight->dtype);
  return m;
}

/// Rows in the order kh, kw, ci of [Co,Ci/groups,Kh,Kw].
void order_by_filter(QuantTensor& q) {
  const auto width = static_cast<std::size_t>(code_bytes(q.scheme.codes));
  const std::int64_t elements = q.filter.h * q.filter.w, channels = q.k / elements;
  const std::vector<std::uint8_t> stored = q.codes;
  std::uint8_t* to = q.codes.data();
  for (std::int64_t row = 0; row < q.n; ++row)
    for (std::int64_t e = 0; e < elements; ++e)
      for (std::int64_t c = 0; c < channels; ++c)
        to = std::copy_n(stored.data() + static_cast<std::size_t>(row * q.k + c * elements + e) * width, width, to);
}

std::optional<StoredCodes> codes(const ModuleTensors& tensors, const Module& m, const QuantConfig&) {
  if (m.filter || tensors.find("weight") == nullptr) return std::nullopt;
  return StoredCodes{.suffix = "weight", .bits = bits(m.scheme.codes), .n = m.n, .k = m.k};
}

/// A bias that detect() found to be of something else is not left out: results would be wrong.
Status check_own_bias(const ModuleTensors& tensors, const Module& m) {
  const ConstTensorView* bias = tensors.find("bias");
  if (bias == nullptr || m.has_bias) return {};
  return error(StatusCode::corrupt_data,
               "{}.bias is {}, but its weight is W[N,K] = [{},{}], whose bias is f16, bf16 or f32 [{}]; a weight stored as [K,N] "
               "has to be transposed, and the bias of another layer left out",
               tensors.module, describe(*bias), m.n, m.k, m.n);
}

Result<QuantTensor> read(const ModuleTensors& tensors, const Module& m, const QuantConfig&, std::vector<Note>&) {
  NIBBLE_RETURN_IF_ERROR(check_own_bias(tensors, m));
  QuantTensor q;
  q.scheme = m.scheme;
  if (const ConstTensorView* columns = tensors.find("weight.transposed")) {
    const Tensor rows = transposed(*columns);
    q.n = columns->dim(1), q.k = columns->dim(0);
    q.codes.resize(rows.bytes.size());
    std::memcpy(q.codes.data(), rows.bytes.data(), rows.bytes.size());
    if (m.has_bias) q.bias = read_bias(tensors, q.n);
    return q;
  }
  const ConstTensorView& weight = *tensors.find("weight");
  q.n = weight.dim(0);
  q.k = weight.numel() / q.n;
  q.codes = read_codes(tensors, {.suffix = "weight", .bits = bits(q.scheme.codes), .n = q.n, .k = q.k});
  if (m.filter) {
    q.filter = *m.filter;
    order_by_filter(q);
  }
  if (m.has_bias) q.bias = read_bias(tensors, q.n);
  return q;
}

}  // namespace

const Format kDense{"dense", "not quantized: f32, f16 or bf16", false, {}, kTensors, detect, read, codes, nullptr, nullptr};

}  // namespace nibble::codec
