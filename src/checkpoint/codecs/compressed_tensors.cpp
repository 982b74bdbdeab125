// compressed-tensors "pack-quantized": 2 to 8-bit codes in streams of words along the rows.
//
//   weight_packed      s32  [N, ⌈K·b/32⌉]  row n is the stream of q + 2^(b−1)
//   weight_scale       f16  [N,G], [N,1] or [1]; or bf16, f32
//   weight_zero_point  s32  [⌈N·b/32⌉, G]  column g is the stream of z + 2^(b−1); absent when symmetric; s8 like the scales when
//                                          per tensor
//   weight_g_idx       s32  [K]            act-order; −1 means never set; s64 and [0] seen
//   weight_shape       s64  [2]            N, K (s32 in old files); of a convolution [4]: Co, Ci/groups, Kh, Kw, rows are K = Kh·Kw·Ci/groups
//                                          long and in that order, input channels of a filter element side by side
//   input_scale, ...                       see act_scales.hpp
//   bias               f16  [N]            optional
//
//   W[n,k] = (q − z)·s
//
// Before June 2026 codes of 3, 5, 6 and 7 bits were padded to whole words (32/b a word); the number of columns shows which.
// Source: vllm-project/compressed-tensors src/compressed_tensors/compressors/pack_quantized.
#include <algorithm>
#include <cstring>

#include "checkpoint/codecs/table.hpp"
#include "checkpoint/config/act_scales.hpp"
#include "checkpoint/config/ct_config.hpp"
#include "checkpoint/io/bits.hpp"

namespace nibble::codec {
namespace {

constexpr std::string_view kMethods[] = {"compressed-tensors", "auto-round", "intel/auto-round"};
constexpr Axis kWords[] = {Axis::n, Axis::k_words}, kZeros[] = {Axis::n_words, Axis::k_groups};
constexpr StoredTensor kTensors[] = {{"weight_packed", kWords},
                                     {"weight_scale", axes::kGroups},
                                     {"weight_zero_point", kZeros},
                                     {"weight_g_idx", axes::kGroupOfK},
                                     {"weight_shape", axes::kSizes},
                                     {"input_scale"},
                                     {"input_zero_point"},
                                     {"pre_quant_scale", axes::kK},
                                     {"bias", axes::kN}};

struct Fit {
  int bits;
  Packing packing;
};

struct Analysis {
  Module module;
  Fit fit{};
};

/// The layout that matches the shapes; between several the config decides, and dense is more likely than padded.
Result<Fit> infer_fit(const ModuleTensors& tensors, const std::vector<CtGroup>& entries, Module& m) {
  const ConstTensorView& packed = *tensors.find("weight_packed");
  const ConstTensorView* zeros = tensors.find("weight_zero_point");
  const bool packed_zeros = zeros != nullptr && zeros->dtype == DType::s32 && zeros->rank == 2;
  std::vector<Fit> fits;
  for (const Packing packing : {Packing::dense, Packing::padded}) {
    for (int b = 2; b <= 8; ++b) {
      const std::int64_t longest = packed_zeros ? std::max(m.n, m.k) : m.k;
      if (packing == Packing::padded && (32 % b == 0 || longest <= 32 / b)) continue;  // the same as dense
      if (words_of(packing, b, m.k) != packed.dim(1)) continue;
      if (packed_zeros && words_of(packing, b, m.n) != zeros->dim(0)) continue;
      fits.push_back({b, packing});
    }
  }
  if (fits.empty())
    return error(StatusCode::corrupt_data, "{}: no code width from 2 to 8 bits packs W[{},{}] into weight_packed {}{}",
                 tensors.module, m.n, m.k, describe(packed),
                 packed_zeros ? fmt::format(" and weight_zero_point {}", describe(*zeros)) : "");

  const auto claimed = [&](const Fit& fit) {
    return std::ranges::any_of(entries, [&](const CtGroup& e) { return e.bits == fit.bits; });
  };
  if (std::ranges::any_of(fits, claimed)) std::erase_if(fits, [&](const Fit& fit) { return !claimed(fit); });
  const auto alternatives = [&] {
    std::string text;
    for (const Fit& fit : fits)
      text += fmt::format("{}{}-bit {}", text.empty() ? "" : ", ", fit.bits, fit.packing == Packing::dense ? "dense" : "padded");
    return text;
  };
  const bool one_dense = fits.front().packing == Packing::dense && (fits.size() == 1 || fits[1].packing == Packing::padded);
  if (fits.size() > 1 && !one_dense)
    return error(StatusCode::unsupported,
                 "{}: weight_packed {} of W[{},{}] fits several layouts ({}); say which with num_bits in the config",
                 tensors.module, describe(packed), m.n, m.k, alternatives());
  if (fits.size() > 1) note(m.notes, kInfo, "the number of columns fits several layouts ({}); took the first", alternatives());
  return fits.front();
}

Result<Analysis> analyse(const ModuleTensors& tensors, const QuantConfig& config) {
  Analysis a;
  Module& m = a.module;
  m.format = "compressed-tensors";
  NIBBLE_RETURN_IF_ERROR(refuse_online_transforms(tensors, config));
  NIBBLE_RETURN_IF_ERROR(read_weight_shape(tensors, m));
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "weight_packed", {DType::s32}, {m.n, -1}));
  const auto entries = ct_groups(config, CtType::integer);
  NIBBLE_ASSIGN_OR_RETURN(a.fit, infer_fit(tensors, entries, m));

  const ConstTensorView* scale = tensors.find("weight_scale");
  NIBBLE_ASSIGN_OR_RETURN(m.scheme.group,
                          infer_scale_group(tensors, "weight_scale", m.n, m.k, ct_group_size(entries, m.k, scale), config));
  const ConstTensorView* zeros = tensors.find("weight_zero_point");
  if (zeros != nullptr && zeros->dtype == DType::s8) {
    if (zeros->rank != scale->rank || zeros->shape != scale->shape)
      return error(StatusCode::corrupt_data, "{}.weight_zero_point is {}, expected the shape of weight_scale {}", tensors.module,
                   describe(*zeros), describe(*scale));
  } else if (zeros != nullptr) {
    const std::int64_t rows = words_of(a.fit.packing, a.fit.bits, m.scheme.group.rows(m.n));
    NIBBLE_RETURN_IF_ERROR(expect(tensors, "weight_zero_point", {DType::s32}, {rows, m.scheme.group.cols(m.k)}));
  }
  const bool has_g_idx = find_g_idx(tensors, "weight_g_idx") != nullptr;
  if (has_g_idx) NIBBLE_RETURN_IF_ERROR(expect(tensors, "weight_g_idx", {DType::s32, DType::s64}, {m.k}));
  NIBBLE_RETURN_IF_ERROR(check_bias(tensors, m.n));
  m.has_bias = tensors.find("bias") != nullptr;
  m.act_order = has_g_idx && m.scheme.group.k != 0;
  m.scheme.codes = *code_type(a.fit.bits, zeros == nullptr);
  m.scheme.zero = zeros == nullptr ? ZeroKind::none : ZeroKind::integer;
  m.scheme.scale = scale->dtype;
  claim_ct(m, tensors.module, config, entries, [](const CtGroup& e) { return code_type(e.bits.value_or(0), e.symmetric); });
  check_method(m, config, kMethods);
  NIBBLE_RETURN_IF_ERROR(analyse_activations(tensors, m, config));
  return a;
}

std::optional<Result<Module>> detect(const ModuleTensors& tensors, const QuantConfig& config) {
  const ConstTensorView* packed = tensors.find("weight_packed");
  if (packed == nullptr || packed->dtype != DType::s32 || tensors.find("weight_scale") == nullptr) return std::nullopt;
  auto analysis = analyse(tensors, config);
  if (!analysis.ok()) return analysis.status();
  return std::move(analysis->module);
}

Status read_zeros(const ModuleTensors& tensors, int width, Packing packing, QuantTensor& q) {
  const ConstTensorView* view = tensors.find("weight_zero_point");
  if (view == nullptr) return {};
  const std::int64_t rows = q.scheme.group.rows(q.n), groups = q.groups();
  if (view->dtype == DType::s32) {
    q.zeros = zeros_tensor(unpack_columns(bytes_of(*view), packing, width, rows, groups), rows, groups);
    return {};
  }
  q.zeros = Tensor(DType::u8, {rows, groups});
  const int middle = 1 << (width - 1);
  for (std::size_t i = 0; i < q.zeros.bytes.size(); ++i) {
    const int z = static_cast<std::int8_t>(bytes_of(*view)[i]);
    if (z < -middle || z >= middle)
      return error(StatusCode::corrupt_data, "{}.weight_zero_point[{}] = {} is no {}-bit number", tensors.module, i, z, width);
    q.zeros.bytes[i] = static_cast<std::byte>(z + middle);
  }
  return {};
}

Status read_g_idx(const ModuleTensors& tensors, QuantTensor& q, std::vector<Note>& notes) {
  const ConstTensorView* view = find_g_idx(tensors, "weight_g_idx");
  if (view == nullptr) return {};
  using Kind = GroupIndex::Kind;
  GroupIndex index = inspect_g_idx(*view, q.scheme.group, q.k);
  if (index.kind == Kind::natural) return {};
  if (index.kind == Kind::has_negative) {
    note(notes, kInfo, "weight_g_idx has entries below 0, so it was never set: ignored it");
    return {};
  }
  if (index.kind != Kind::permutation)
    return error(StatusCode::corrupt_data, "{}.weight_g_idx cannot be an act-order: {}", tensors.module, index.why);
  q.g_idx = std::move(index.values);
  return {};
}

StoredCodes stored_codes(const Analysis& a) {
  return {.suffix = "weight_packed",
          .order = CodeOrder::rows,
          .bits = a.fit.bits,
          .n = a.module.n,
          .k = a.module.k,
          .packing = a.fit.packing};
}

std::optional<StoredCodes> codes(const ModuleTensors& tensors, const Module&, const QuantConfig& config) {
  const auto analysis = analyse(tensors, config);
  return analysis.ok() ? std::optional(stored_codes(*analysis)) : std::nullopt;
}

Result<QuantTensor> read(const ModuleTensors& tensors, const Module&, const QuantConfig& config, std::vector<Note>& notes) {
  NIBBLE_ASSIGN_OR_RETURN(const Analysis a, analyse(tensors, config));
  QuantTensor q;
  q.scheme = a.module.scheme;
  q.n = a.module.n;
  q.k = a.module.k;
  q.filter = a.module.filter.value_or(Extent{});
  NIBBLE_RETURN_IF_ERROR(read_g_idx(tensors, q, notes));
  NIBBLE_RETURN_IF_ERROR(read_zeros(tensors, a.fit.bits, a.fit.packing, q));
  q.codes = read_codes(tensors, stored_codes(a));
  q.scales = copy_as(*tensors.find("weight_scale"), {q.scheme.group.rows(q.n), q.groups()});
  q.bias = read_bias(tensors, q.n);
  read_activations(tensors, a.module, q, notes);
  return q;
}

Result<std::vector<EncodedTensor>> encode(const QuantTensor& q, const ActScheme& act, Tensor shape) {
  NIBBLE_RETURN_IF_ERROR(check_ct_writable("compressed-tensors", q, act));
  const auto refuse = [&](std::string_view why) {
    return error(StatusCode::unsupported, "compressed-tensors cannot hold {} [{},{}]: {}", q.scheme.name(), q.n, q.k, why);
  };
  const int b = bits(q.scheme.codes);
  const bool symmetric = q.scheme.zero == ZeroKind::none;
  const GroupShape& group = q.scheme.group;
  if (q.scheme.codes != code_type(b, symmetric)) return refuse("codes are uX with integer zero points, or uXbB without");
  if (group.n > 1 || (group.n == 0 && group.k != 0)) return refuse("scales are per group of input channels");
  if (group == GroupShape::tensor() && !symmetric) return refuse("packed zero points are per channel or per group");

  const std::int64_t rows = q.scales.shape[0], groups = q.groups();
  std::vector<EncodedTensor> out;
  out.push_back({"weight_packed",
                 word_tensor(pack_rows(q.codes.data(), Packing::dense, b, q.n, q.k), q.n, words_of(Packing::dense, b, q.k))});
  out.push_back({"weight_scale", ct_scale(q.scales, group)});
  if (!symmetric)
    out.push_back({"weight_zero_point", word_tensor(pack_columns(q.zeros.as<std::uint8_t>(), Packing::dense, b, rows, groups),
                                                    words_of(Packing::dense, b, rows), groups)});
  if (!q.g_idx.empty()) {
    Tensor g_idx(DType::s32, {q.k});
    std::memcpy(g_idx.bytes.data(), q.g_idx.data(), g_idx.bytes.size());
    out.push_back({"weight_g_idx", std::move(g_idx)});
  }
  out.push_back({"weight_shape", std::move(shape)});
  encode_activations(q, act, out);
  if (!q.bias.empty()) out.push_back({"bias", q.bias});
  return out;
}

Result<std::vector<EncodedTensor>> write(const QuantTensor& q, const ActScheme& act) {
  return encode(q, act, weight_shape(q, false));
}

Result<std::vector<EncodedTensor>> write_conv(const QuantTensor& q, const ActScheme& act) {
  return encode(q, act, weight_shape(q, true));
}

Result<Json> write_config(const WrittenCheckpoint& written) { return ct_config("pack-quantized", written); }

}  // namespace

const Format kCompressedTensors{"compressed-tensors",
                                "compressed-tensors pack-quantized: 2 to 8-bit codes, act-order",
                                true,
                                kMethods,
                                kTensors,
                                detect,
                                read,
                                codes,
                                write,
                                write_config,
                                write_conv};

}  // namespace nibble::codec
