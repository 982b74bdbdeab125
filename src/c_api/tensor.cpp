// The C interface: quantized matrices.
#include "c_api/common.hpp"
#include "core/error.hpp"
#include "core/sizes.hpp"

using namespace nibble;

namespace nibble::c_api {
namespace {

/// Copies a view of any strides to dense memory, element by element. No part of W[n,k] has a dimension longer than both of W's.
Result<Tensor> copy(std::string_view what, const nib_view& given, const nib_qtensor_desc& desc) {
  NIBBLE_ASSIGN_OR_RETURN(const TensorView v, view(what, &given));
  if (v.empty()) return Tensor();
  for (int i = 0; i < v.rank; ++i)
    if (v.dim(i) > std::max(desc.n, desc.k) || v.rank > 2)
      return error(StatusCode::invalid_argument, "{} of rank {} has a dimension of {}, which is not of a W[{},{}]", what, v.rank,
                   v.dim(i), desc.n, desc.k);
  Tensor out(v.dtype, {v.shape.begin(), v.shape.begin() + v.rank});
  const auto size = static_cast<std::size_t>(bits(v.dtype) / 8);
  const auto* from = static_cast<const std::byte*>(v.data);
  const std::int64_t columns = v.rank == 0 ? 1 : v.dim(v.rank - 1), rows = columns == 0 ? 0 : v.numel() / columns;
  const std::int64_t step = v.rank == 0 ? 1 : v.stride(v.rank - 1);
  std::byte* to = out.bytes.data();
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int64_t at = 0;  // of the row's first element
    for (std::int64_t i = v.rank - 2, rest = row; i >= 0; rest /= v.dim(static_cast<int>(i)), --i)
      at += rest % v.dim(static_cast<int>(i)) * v.stride(static_cast<int>(i));
    if (step == 1) {
      to = std::copy_n(from + static_cast<std::size_t>(at) * size, static_cast<std::size_t>(columns) * size, to);
    } else {
      for (std::int64_t column = 0; column < columns; ++column)
        to = std::copy_n(from + static_cast<std::size_t>(at + column * step) * size, size, to);
    }
  }
  return out;
}

template <class T>
std::optional<T> optional(const T* value) {
  return value == nullptr ? std::nullopt : std::optional<T>(*value);
}

ConstTensorView view_of(const Tensor& t) {
  ConstTensorView v(t.bytes.data(), t.dtype, {});
  if (t.empty()) return {};
  v.rank = static_cast<int>(t.shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = t.shape.size(); i-- > 0; stride *= t.shape[i]) {
    v.shape[i] = t.shape[i];
    v.strides[i] = stride;
  }
  return v;
}

/// The same of TensorRT-LLM's codes.
Result<std::vector<std::uint8_t>> trtllm_codes_of(const nib_qtensor_desc& desc, const WeightScheme& scheme) {
  const int width = bits(scheme.codes);
  if (scheme.codes != DType::u4b8 && scheme.codes != DType::u8b128)
    return error(StatusCode::invalid_argument, "codes of TensorRT-LLM are u4b8 or u8b128, {} has {}", scheme.name(),
                 name(scheme.codes));
  NIBBLE_ASSIGN_OR_RETURN(const Tensor codes, copy("codes", desc.codes, desc));
  if (codes.shape != std::vector{desc.k, desc.n * width / 8} || bits(codes.dtype) != 8)
    return error(StatusCode::invalid_argument, "codes are {} [{}]; W[{},{}] has bytes of [{},{}] in TensorRT-LLM's layouts",
                 name(codes.dtype), fmt::join(codes.shape, ","), desc.n, desc.k, desc.k, desc.n * width / 8);
  return unpack_trtllm({reinterpret_cast<const std::uint8_t*>(codes.bytes.data()), codes.bytes.size()}, desc.n, desc.k, width,
                       static_cast<TrtllmLayout>(desc.nibble_order - NIB_TRTLLM_INTERLEAVED));
}

/// One code a byte, or the bytes of floats.
Result<std::vector<std::uint8_t>> codes_of(const nib_qtensor_desc& desc, const WeightScheme& scheme) {
  if (desc.nibble_order < NIB_BYTES || desc.nibble_order > NIB_TRTLLM_PERMUTED)
    return error(StatusCode::invalid_argument, "nib_qtensor_desc.nibble_order={} is no nib_nibble_order", desc.nibble_order);
  if (desc.nibble_order >= NIB_TRTLLM_INTERLEAVED) return trtllm_codes_of(desc, scheme);
  const bool pairs = desc.nibble_order != NIB_BYTES;
  if (pairs && bits(scheme.codes) != 4)
    return error(StatusCode::invalid_argument, "nibble_order={} is for codes of 4 bits, {} has {}", desc.nibble_order,
                 scheme.name(), bits(scheme.codes));
  NIBBLE_ASSIGN_OR_RETURN(const Tensor codes, copy("codes", desc.codes, desc));
  if (scheme.is_dense() && (codes.dtype != scheme.codes || codes.shape != std::vector{desc.n, desc.k}))
    return error(StatusCode::invalid_argument, "codes are {} [{}]; a dense W[{},{}] of {} has the numbers themselves, {} [{},{}]",
                 name(codes.dtype), fmt::join(codes.shape, ","), desc.n, desc.k, name(scheme.codes), name(scheme.codes), desc.n,
                 desc.k);
  const std::int64_t columns = pairs ? desc.k / 2 + desc.k % 2 : desc.k;
  if (!scheme.is_dense() && (codes.shape != std::vector{desc.n, columns} || bits(codes.dtype) != 8))
    return error(StatusCode::invalid_argument, "codes are {} [{}]; W[{},{}] has {}, [{},{}]", name(codes.dtype),
                 fmt::join(codes.shape, ","), desc.n, desc.k, pairs ? "two codes a byte" : "codes of a byte", desc.n, columns);
  const std::span bytes(reinterpret_cast<const std::uint8_t*>(codes.bytes.data()), codes.bytes.size());
  if (!pairs) return std::vector(bytes.begin(), bytes.end());
  return unpack_nibbles(bytes, desc.n, desc.k,
                        desc.nibble_order == NIB_LOW_FIRST ? NibbleOrder::low_first : NibbleOrder::high_first);
}

Result<QuantTensor> make(const nib_qtensor_desc& desc) {
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"N", desc.n}, {"K", desc.k}}));
  QuantTensor q;
  q.n = desc.n;
  q.k = desc.k;
  NIBBLE_ASSIGN_OR_RETURN(q.scales, copy("scales", desc.scales, desc));
  NIBBLE_ASSIGN_OR_RETURN(q.scheme, weight_scheme(desc.scheme, q.scales.dtype));
  NIBBLE_ASSIGN_OR_RETURN(q.codes, codes_of(desc, q.scheme));
  NIBBLE_ASSIGN_OR_RETURN(q.zeros, copy("zeros", desc.zeros, desc));
  NIBBLE_ASSIGN_OR_RETURN(const Tensor g_idx, copy("g_idx", desc.g_idx, desc));
  if (!g_idx.empty()) {
    if (g_idx.dtype != DType::s32 || g_idx.shape.size() != 1)
      return error(StatusCode::invalid_argument, "g_idx is {} of rank {}, expected s32 [{}]", name(g_idx.dtype),
                   g_idx.shape.size(), desc.k);
    q.g_idx.assign(g_idx.as<std::int32_t>(), g_idx.as<std::int32_t>() + g_idx.numel());
  }
  NIBBLE_ASSIGN_OR_RETURN(q.prescale, copy("prescale", desc.prescale, desc));
  NIBBLE_ASSIGN_OR_RETURN(q.bias, copy("bias", desc.bias, desc));
  q.scale2 = optional(desc.scale2);
  q.act_limit = optional(desc.act_limit);
  if (desc.act_scale != nullptr) q.static_acts = StaticActs{*desc.act_scale, desc.act_zero == nullptr ? 0 : *desc.act_zero};
  q.filter = {desc.filter_height == 0 ? 1 : desc.filter_height, desc.filter_width == 0 ? 1 : desc.filter_width};
  if (desc.act_scale == nullptr && desc.act_zero != nullptr)
    return error(StatusCode::invalid_argument, "act_zero goes with act_scale, which is NULL");
  NIBBLE_RETURN_IF_ERROR(q.validate());
  return q;
}

nib_qtensor_desc describe(const NamedTensor& named) {
  const QuantTensor& q = named.q;
  nib_qtensor_desc out{};
  out.scheme = named.scheme.c_str();
  out.n = q.n;
  out.k = q.k;
  out.codes = view(ConstTensorView(q.codes.data(), q.scheme.is_dense() ? q.scheme.codes : DType::u8, {q.n, q.k}));
  out.scales = view(view_of(q.scales));
  out.zeros = view(view_of(q.zeros));
  if (!q.g_idx.empty()) out.g_idx = view(ConstTensorView(q.g_idx.data(), {q.k}));
  out.prescale = view(view_of(q.prescale));
  out.bias = view(view_of(q.bias));
  out.scale2 = q.scale2 ? &*q.scale2 : nullptr;
  out.act_limit = q.act_limit ? &*q.act_limit : nullptr;
  out.act_scale = q.static_acts ? &q.static_acts->scale : nullptr;
  out.act_zero = q.static_acts ? &q.static_acts->zero : nullptr;
  out.filter_height = q.filter.h;
  out.filter_width = q.filter.w;
  return out;
}

/// One of the C++ interface's quantizers.
using Quantize = Result<QuantTensor>(const ConstTensorView& w, const QuantizeSpec& spec, Executor* executor);

/// A float weight by one of them.
nib_status quantized(Quantize* how, const nib_context* context, const nib_view* w, const nib_quantize_desc* desc,
                     nib_qtensor** q) {
  return create(q, [&]() -> Result<QuantTensor> {
    NIBBLE_ASSIGN_OR_RETURN(Executor * threads, executor(context));
    NIBBLE_ASSIGN_OR_RETURN(const QuantizeSpec spec, quantize_spec(desc));
    NIBBLE_ASSIGN_OR_RETURN(const TensorView v, view("w", w));
    return how(v, spec, threads);
  });
}

}  // namespace
}  // namespace nibble::c_api

using namespace nibble::c_api;

nib_status nib_qtensor_create(const nib_qtensor_desc* given, nib_qtensor** q) {
  return create(q, [&]() -> Result<QuantTensor> {
    NIBBLE_ASSIGN_OR_RETURN(const nib_qtensor_desc desc, read("nib_qtensor_desc", given));
    return make(desc);
  });
}

nib_status nib_qtensor_get(const nib_qtensor* q, nib_qtensor_desc* desc) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const NamedTensor* named, open(q));
    return write("nib_qtensor_desc", desc, describe(*named));
  });
}

nib_status nib_qtensor_destroy(nib_qtensor* q) { return destroy(q); }

nib_status nib_join(const nib_qtensor* const* parts, size_t count, nib_qtensor** q) {
  return create(q, [&]() -> Result<QuantTensor> {
    if (count != 0) NIBBLE_RETURN_IF_ERROR(required({{"array of weights", parts}}));
    std::vector<QuantTensor> opened;
    for (size_t i = 0; i < count; ++i) {
      NIBBLE_ASSIGN_OR_RETURN(const NamedTensor* named, open(parts[i]));
      opened.push_back(named->q);
    }
    return join(opened);
  });
}

nib_status nib_read_module(const nib_named_view* tensors, size_t count, const char* config, nib_qtensor** q, char** notes) {
  return create(q, [&]() -> Result<QuantTensor> {
    if (count != 0) NIBBLE_RETURN_IF_ERROR(required({{"array of tensors", tensors}}));
    std::vector<NamedView> named(count);
    for (size_t i = 0; i < count; ++i) {
      NIBBLE_RETURN_IF_ERROR(required({{"name of a tensor", tensors[i].name}}));
      NIBBLE_ASSIGN_OR_RETURN(const TensorView v, view(tensors[i].name, &tensors[i].view, false));
      named[i] = {tensors[i].name, v};
    }
    std::vector<Note> findings;
    NIBBLE_ASSIGN_OR_RETURN(QuantTensor made, read_module(named, text_or(config, ""), &findings));
    NIBBLE_RETURN_IF_ERROR(give(notes_text(findings), notes));
    return made;
  });
}

nib_status nib_quantize(const nib_context* context, const nib_view* w, const nib_quantize_desc* desc, nib_qtensor** q) {
  return quantized(quantize, context, w, desc, q);
}

nib_status nib_quantize_conv(const nib_context* context, const nib_view* w, const nib_quantize_desc* desc, nib_qtensor** q) {
  return quantized(quantize_conv, context, w, desc, q);
}

nib_status nib_quantization_error(const nib_context* context, const nib_view* w, const nib_qtensor* q, nib_quant_error* error) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(Executor * threads, executor(context));
    NIBBLE_ASSIGN_OR_RETURN(const TensorView v, view("w", w));
    NIBBLE_ASSIGN_OR_RETURN(const NamedTensor* named, open(q));
    NIBBLE_ASSIGN_OR_RETURN(const QuantError measured, quantization_error(v, named->q, threads));
    nib_quant_error out{};
    out.sqnr_db = measured.sqnr_db;
    out.cosine = measured.cosine;
    out.max_abs = measured.max_abs;
    out.relative_l2 = measured.relative_l2;
    return write("nib_quant_error", error, out);
  });
}
