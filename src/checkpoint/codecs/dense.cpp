// Dense: a weight that is not quantized.
//
//   weight  f32, f16 or bf16  [N,K], or of a convolution [Co,Ci/groups,Kh,Kw]
//   bias    f32, f16 or bf16  [N]    optional
//
// Embeddings look the same and are listed too.
#include "checkpoint/codecs/table.hpp"
#include "checkpoint/config/codec_util.hpp"

namespace nibble::codec {
namespace {

constexpr StoredTensor kTensors[] = {{"weight"}, {"bias"}};

std::optional<Result<Module>> detect(const ModuleTensors& tensors, const QuantConfig&) {
  const ConstTensorView* weight = tensors.find("weight");
  if (weight == nullptr || (weight->rank != 2 && weight->rank != 4) || !is_compute_float(weight->dtype)) return std::nullopt;
  Module m;
  m.format = "dense";
  m.n = weight->dim(0);
  m.k = weight->dim(1);
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
  m.scheme = {weight->dtype, ZeroKind::none, GroupShape::tensor(), DType::none};
  return m;
}

Result<QuantTensor> read(const ModuleTensors& tensors, const Module&, const QuantConfig&, std::vector<Note>&) {
  return error(StatusCode::unsupported, "{} is not quantized: it has no codes to read", tensors.module);
}

}  // namespace

const Format kDense{"dense", "not quantized: f32, f16 or bf16", false, {}, kTensors, detect, read, nullptr, nullptr};

}  // namespace nibble::codec
