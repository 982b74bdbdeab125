// See codec_util.hpp.
#include "checkpoint/config/codec_util.hpp"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <limits>

#include "checkpoint/config/ct_config.hpp"
#include "checkpoint/io/bits.hpp"

namespace nibble::codec {
namespace {

const Json* find(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it == object.end() ? nullptr : &*it;
}

/// nlohmann-json would wrap numbers that do not fit.
bool fits_int64(const Json& integer) {
  return !integer.is_number_unsigned() || integer.get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max();
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (const std::int64_t dim : shape) {
    if (text.size() > 1) text += ',';
    text += dim < 0 ? "any" : std::to_string(dim);
  }
  return text + "]";
}

std::size_t element_bytes(DType dtype) { return static_cast<std::size_t>(bits(dtype) / 8); }

void transpose_elements(DType dtype, const std::byte* in, std::int64_t rows, std::int64_t cols, std::byte* out) {
  switch (element_bytes(dtype)) {
    case 1: return transpose<std::uint8_t>(in, rows, cols, out);
    case 2: return transpose<std::uint16_t>(in, rows, cols, out);
    default: return transpose<std::uint32_t>(in, rows, cols, out);
  }
}

}  // namespace

std::optional<std::int64_t> config_int(const Json& object, std::initializer_list<const char*> keys) {
  for (const char* key : keys)
    if (const Json* value = find(object, key); value != nullptr && value->is_number_integer() && fits_int64(*value))
      return value->get<std::int64_t>();
  return std::nullopt;
}

std::optional<double> config_number(const Json& object, std::initializer_list<const char*> keys) {
  for (const char* key : keys)
    if (const Json* value = find(object, key); value != nullptr && value->is_number()) return value->get<double>();
  return std::nullopt;
}

std::optional<bool> config_bool(const Json& object, std::initializer_list<const char*> keys) {
  for (const char* key : keys)
    if (const Json* value = find(object, key); value != nullptr && value->is_boolean()) return value->get<bool>();
  return std::nullopt;
}

std::string config_text(const Json& object, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    const Json* value = find(object, key);
    if (value == nullptr || !value->is_string()) continue;
    std::string text = value->get<std::string>();
    std::ranges::transform(text, text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return text;
  }
  return {};
}

const Json& config_child(const Json& object, const char* key) {
  static const Json kNull;
  const Json* value = find(object, key);
  return value == nullptr ? kNull : *value;
}

std::string_view config_name(const QuantConfig& config) {
  return config.source.empty() ? std::string_view("config.json") : std::string_view(config.source);
}

std::optional<GroupShape> config_block(const Json& object, std::initializer_list<const char*> keys) {
  const auto size = [](const Json& value) -> std::int32_t {
    const std::int64_t n = value.is_number_integer() && fits_int64(value) ? value.get<std::int64_t>() : 0;
    return n <= std::numeric_limits<std::int32_t>::max() ? static_cast<std::int32_t>(n) : 0;
  };
  for (const char* key : keys)
    if (const Json* value = find(object, key); value != nullptr && value->is_array() && value->size() == 2)
      if (const GroupShape block{size((*value)[0]), size((*value)[1])}; block.n > 0 && block.k > 0) return block;
  return std::nullopt;
}

void claim(Module& module, const QuantConfig& config, const WeightScheme& weight, const ActScheme& act) {
  module.claimed = Scheme{weight, act};
  if (weight.name() != module.scheme.name())
    note(module.notes, kWarning, "{} says {}, the tensors are {}", config_name(config), weight.name(), module.scheme.name());
}

void check_method(Module& module, const QuantConfig& config, std::span<const std::string_view> expected) {
  const std::string method = config_text(config.json, {"quant_method", "method"});
  if (method.empty() || std::ranges::find(expected, method) != expected.end()) return;
  note(module.notes, kWarning, "{} says quant_method \"{}\", the tensors are {}", config_name(config), method, module.format);
}

std::string describe(const ConstTensorView& view) {
  return fmt::format("{} {}", name(view.dtype), shape_text(std::span(view.shape).first(static_cast<std::size_t>(view.rank))));
}

bool one_of(DType dtype, std::initializer_list<DType> dtypes) { return std::ranges::find(dtypes, dtype) != dtypes.end(); }

Status expect(const ModuleTensors& tensors, std::string_view suffix, std::initializer_list<DType> dtypes,
              std::initializer_list<std::int64_t> shape) {
  const auto wanted = [&] {
    std::string text;
    for (const DType dtype : dtypes) text += fmt::format("{}{}", text.empty() ? "" : "|", name(dtype));
    return fmt::format("{} {}", text, shape_text(shape));
  };
  const ConstTensorView* view = tensors.find(suffix);
  if (view == nullptr) return error(StatusCode::corrupt_data, "{}.{} is missing; expected {}", tensors.module, suffix, wanted());
  bool good = one_of(view->dtype, dtypes) && view->rank == static_cast<int>(shape.size());
  for (int i = 0; good && i < view->rank; ++i) {
    const std::int64_t dim = shape.begin()[i];
    good = dim < 0 ? view->dim(i) >= 1 : view->dim(i) == dim;
  }
  if (good) return {};
  return error(StatusCode::corrupt_data, "{}.{} is {}, expected {}", tensors.module, suffix, describe(*view), wanted());
}

Status expect_scalar(const ModuleTensors& tensors, std::string_view suffix, std::initializer_list<DType> dtypes) {
  if (expect(tensors, suffix, dtypes, {}).ok() || expect(tensors, suffix, dtypes, {1, 1}).ok()) return {};
  return expect(tensors, suffix, dtypes, {1});
}

Status check_dimensions(const ModuleTensors& tensors, std::int64_t n, std::int64_t k) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (n >= 1 && k >= 1 && n <= kMax && k <= kMax) return {};
  return error(StatusCode::corrupt_data, "{}: W[N,K] = [{},{}]; both must be from 1 to {}", tensors.module, n, k, kMax);
}

Status read_weight_shape(const ModuleTensors& tensors, Module& m) {
  const ConstTensorView* shape = tensors.find("weight_shape");
  const bool conv = shape != nullptr && shape->rank == 1 && shape->dim(0) == 4;
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "weight_shape", {DType::s64, DType::s32}, {conv ? 4 : 2}));
  const ConstTensorView& view = *shape;
  const std::size_t count = conv ? 4 : 2;
  std::int64_t dims[4] = {};
  if (view.dtype == DType::s64) {
    std::memcpy(dims, view.data, count * sizeof dims[0]);
  } else {
    std::int32_t narrow[4] = {};
    std::memcpy(narrow, view.data, count * sizeof narrow[0]);
    std::copy(narrow, narrow + count, dims);
  }
  m.n = dims[0];
  m.k = dims[1];
  if (!conv) return check_dimensions(tensors, m.n, m.k);
  m.filter = Extent{dims[2], dims[3]};
  // One factor at a time: the product of two checked numbers fits.
  NIBBLE_RETURN_IF_ERROR(check_dimensions(tensors, m.filter->h, m.filter->w));
  NIBBLE_RETURN_IF_ERROR(check_dimensions(tensors, m.n, m.k));
  NIBBLE_RETURN_IF_ERROR(check_dimensions(tensors, m.n, m.k *= m.filter->h));
  return check_dimensions(tensors, m.n, m.k *= m.filter->w);
}

Status check_bias(const ModuleTensors& tensors, std::int64_t n) {
  return tensors.find("bias") == nullptr ? Status{} : expect(tensors, "bias", kFloats, {n});
}

Result<GroupShape> infer_group(const ModuleTensors& tensors, std::int64_t k, std::int64_t groups,
                               std::optional<std::int64_t> configured, const QuantConfig& config) {
  if (configured && *configured > 0 && *configured <= std::numeric_limits<std::int32_t>::max()) {
    const GroupShape group = configured_group(*configured);
    if (group.cols(k) == groups) return group;
  }
  if (groups == 1) return GroupShape::channel();
  if (groups >= 1 && k % groups == 0) return configured_group(k / groups);
  return error(StatusCode::corrupt_data, "{}: K={} cannot be split evenly into {} groups, and {} has {}", tensors.module, k,
               groups, config_name(config), configured ? fmt::format("group_size={}", *configured) : "no group_size");
}

Result<GroupShape> infer_scale_group(const ModuleTensors& tensors, std::string_view suffix, std::int64_t n, std::int64_t k,
                                     std::optional<std::int64_t> configured, const QuantConfig& config) {
  const ConstTensorView* scale = tensors.find(suffix);
  if (scale != nullptr && one_of(scale->dtype, kFloats)) {
    const auto is = [&](std::initializer_list<std::int64_t> shape) { return expect(tensors, suffix, kFloats, shape).ok(); };
    if (is({}) || is({1}) || (n > 1 && is({1, 1}))) return GroupShape::tensor();
    if (is({n})) return GroupShape::channel();
    if (is({n, -1}) && scale->dim(1) <= k) return infer_group(tensors, k, scale->dim(1), configured, config);
  }
  return error(StatusCode::corrupt_data, "{}.{} is {}; for W[{},{}] expected a float [1], [{}], [{},1] or [{},groups]",
               tensors.module, suffix, scale == nullptr ? "missing" : describe(*scale), n, k, n, n, n);
}

std::optional<DType> code_type(std::int64_t bits, bool symmetric) {
  if (bits < 2 || bits > 8) return std::nullopt;
  return parse_dtype(symmetric ? fmt::format("u{}b{}", bits, 1 << (bits - 1)) : fmt::format("u{}", bits));
}

GroupShape configured_group(std::int64_t group_size) {
  if (group_size <= 0 || group_size > std::numeric_limits<std::int32_t>::max()) return GroupShape::channel();
  return GroupShape::group(static_cast<std::int32_t>(group_size));
}

Tensor copy_as(const ConstTensorView& view, std::vector<std::int64_t> shape) {
  Tensor t(view.dtype, std::move(shape));
  std::memcpy(t.bytes.data(), view.data, t.bytes.size());
  return t;
}

std::vector<std::uint8_t> read_codes(const ModuleTensors& tensors, const StoredCodes& stored) {
  if (tensors.without_codes) return {};
  return decode_all(stored, bytes_of(*tensors.find(stored.suffix)));
}

Tensor transposed(const ConstTensorView& view) {
  Tensor t(view.dtype, {view.dim(1), view.dim(0)});
  transpose_elements(view.dtype, bytes_of(view), view.dim(0), view.dim(1), t.bytes.data());
  return t;
}

Tensor zeros_tensor(std::vector<std::uint8_t> zeros, std::int64_t n, std::int64_t groups) {
  Tensor t(DType::u8, {n, groups});
  std::memcpy(t.bytes.data(), zeros.data(), t.bytes.size());
  return t;
}

void fold_symmetric(QuantTensor& q, std::vector<Note>& notes) {
  const int middle = 1 << (bits(q.scheme.codes) - 1);
  const std::span zeros(q.zeros.as<std::uint8_t>(), q.zeros.bytes.size());
  const auto other = [&](std::uint8_t z) { return z != middle; };
  const auto first = std::ranges::find_if(zeros, other);
  if (first == zeros.end()) {
    q.scheme.codes = *code_type(bits(q.scheme.codes), true);
    q.scheme.zero = ZeroKind::none;
    q.zeros = {};
    return;
  }
  note(notes, kWarning, "called symmetric, but {} of {} zero points are not {}: kept them (the first is {} at row {}, group {})",
       std::ranges::count_if(zeros, other), zeros.size(), middle, *first, (first - zeros.begin()) / q.groups(),
       (first - zeros.begin()) % q.groups());
}

const ConstTensorView* find_g_idx(const ModuleTensors& tensors, std::string_view suffix) {
  const ConstTensorView* view = tensors.find(suffix);
  return view == nullptr || (view->rank == 1 && view->dim(0) == 0) ? nullptr : view;
}

GroupIndex inspect_g_idx(const ConstTensorView& view, const GroupShape& group, std::int64_t k) {
  using Kind = GroupIndex::Kind;
  GroupIndex index{Kind::natural, std::vector<std::int32_t>(static_cast<std::size_t>(k)), {}};
  if (view.dtype == DType::s64) {
    for (std::size_t i = 0; i < index.values.size(); ++i) {
      std::int64_t wide = 0;
      std::memcpy(&wide, bytes_of(view) + i * sizeof wide, sizeof wide);
      constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
      index.values[i] =
          static_cast<std::int32_t>(std::clamp(wide, -kMost, kMost));  // a number that does not fit is no group either
    }
  } else {
    std::memcpy(index.values.data(), view.data, 4 * index.values.size());
  }
  const auto& values = index.values;

  const std::int64_t size = group.k == 0 ? k : group.k;
  std::int64_t at = 0;
  if (std::ranges::all_of(values, [&](std::int32_t g) { return g == at++ / size; })) return index;
  if (std::ranges::all_of(values, [](std::int32_t g) { return g == 0; }))
    index.kind = Kind::all_zero;
  else if (std::ranges::any_of(values, [](std::int32_t g) { return g < 0; }))
    index.kind = Kind::has_negative;
  else
    index.kind = Kind::permutation;

  std::vector<std::int64_t> members(static_cast<std::size_t>(group.cols(k)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] < 0 || values[i] >= group.cols(k)) {
      if (index.kind == Kind::permutation) index.kind = Kind::invalid;
      index.why = fmt::format("g_idx[{}] = {} is outside [0,{})", i, values[i], group.cols(k));
      return index;
    }
    ++members[static_cast<std::size_t>(values[i])];
  }
  for (std::int64_t g = 0; g < group.cols(k); ++g) {
    const std::int64_t full = std::min(size, k - g * size);
    if (members[static_cast<std::size_t>(g)] == full) continue;
    if (index.kind == Kind::permutation) index.kind = Kind::invalid;
    index.why =
        fmt::format("g_idx puts {} input channels into group {}, which holds {}", members[static_cast<std::size_t>(g)], g, full);
    break;
  }
  return index;
}

Status check_writable(std::string_view format, const QuantTensor& q, FloatZeros float_zeros, GroupsOfImages groups_of_images) {
  NIBBLE_RETURN_IF_ERROR(q.validate());
  const auto refuse = [&](std::string_view why) {
    return error(StatusCode::unsupported, "{} cannot hold {}: {}", format, q.scheme.name(), why);
  };
  if (q.scheme.group.all_elements && groups_of_images == GroupsOfImages::lacking)
    return refuse("its scales are per run of K; nibble-codes holds scales that all elements of a filter share");
  if (q.scale2) return refuse("it has no second-level scale");
  if (!q.prescale.empty()) return refuse("it has no activation pre-scale; fold it into the previous layer");
  if (q.act_limit) return refuse(fmt::format("it has no place for the limit {} of the activations", *q.act_limit));
  if (!one_of(q.scales.dtype, kFloats)) return refuse(fmt::format("scales are {}", name(q.scales.dtype)));
  const bool has_float_zeros = q.scheme.zero == ZeroKind::offset || q.scheme.zero == ZeroKind::real;
  if (has_float_zeros && float_zeros == FloatZeros::lacking) return refuse("zero points are integers; nibble-codes holds floats");
  if (q.scheme.zero == ZeroKind::integer) {
    const bool is_signed = q.scheme.codes == DType::s8;
    const std::span zeros(q.zeros.as<std::uint8_t>(), q.zeros.bytes.size());
    const int limit = 1 << bits(q.scheme.codes);
    const auto wide = std::ranges::find_if(zeros, [&](std::uint8_t z) { return z >= limit; });
    if (q.zeros.dtype != (is_signed ? DType::s8 : DType::u8))
      return refuse("zero points are signed when codes are, and else not");
    if (wide != zeros.end()) return refuse(fmt::format("zero point {} does not fit in {} bits", *wide, bits(q.scheme.codes)));
  }
  return {};
}

Status check_weight_only(std::string_view format, const QuantTensor& q, const ActScheme& act) {
  if (act.codes == DType::none && !q.static_acts) return {};
  return error(StatusCode::unsupported, "{} has no place for the quantized activations of {}", format,
               act.codes == DType::none ? fmt::format("scale {}", q.static_acts->scale) : Scheme{q.scheme, act}.name());
}

Tensor code_tensor(const QuantTensor& q) {
  Tensor t(q.scheme.codes, {q.n, q.k});
  std::memcpy(t.bytes.data(), q.codes.data(), q.codes.size());
  return t;
}

Tensor word_tensor(std::vector<std::byte> words, std::int64_t rows, std::int64_t cols) {
  Tensor t;
  t.dtype = DType::s32;
  t.shape = {rows, cols};
  t.bytes = std::move(words);
  return t;
}

Tensor weight_shape(const QuantTensor& q, bool conv) {
  std::vector<std::int64_t> dims{q.n, q.k};
  if (conv) dims = {q.n, q.k / (q.filter.h * q.filter.w), q.filter.h, q.filter.w};
  Tensor shape(DType::s64, {static_cast<std::int64_t>(dims.size())});
  std::ranges::copy(dims, shape.as<std::int64_t>());
  return shape;
}

Tensor by_group(const Tensor& t) {
  Tensor out(t.dtype, {t.shape[1], t.shape[0]});
  transpose_elements(t.dtype, t.bytes.data(), t.shape[0], t.shape[1], out.bytes.data());
  return out;
}

Status check_uniform(std::string_view format, const WrittenCheckpoint& written) {
  for (const WrittenModule& module : written.modules) {
    const WrittenModule& first = written.modules.front();
    if (bits(module.scheme.codes) != bits(first.scheme.codes) || module.scheme.group != first.scheme.group)
      return error(StatusCode::unsupported, "{} has one set of parameters for all layers, but {} is {} and {} is {}", format,
                   first.name, first.scheme.name(), module.name, module.scheme.name());
  }
  return check_weights_alone(format, written);
}

Status check_weights_alone(std::string_view format, const WrittenCheckpoint& written) {
  for (const WrittenModule& module : written.modules)
    if (!module.other_acts.empty())
      return error(StatusCode::unsupported,
                   "{} has no place for the quantized activations of {}, of which {} says {}; dequantize the checkpoint to do "
                   "without",
                   format, module.name, config_name(*written.source), module.other_acts);
  if (written.source != nullptr && !kv_cache_scheme(written.source->json).is_null())
    return error(StatusCode::unsupported,
                 "{} cannot say that the KV cache is quantized, as {} does; compressed-tensors, int-quantized and "
                 "float-quantized can",
                 format, config_name(*written.source));
  return {};
}

std::vector<std::string> not_quantized(const WrittenCheckpoint& written) {
  std::vector<std::string> names = written.not_quantized;
  names.insert(names.end(), written.tied_heads.begin(), written.tied_heads.end());
  return names;
}

}  // namespace nibble::codec
