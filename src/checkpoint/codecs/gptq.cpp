// GPTQ (AutoGPTQ, GPTQModel, AutoRound): 2, 3, 4 or 8-bit codes in dense streams of words.
//
//   qweight  s32  [⌈K·b/32⌉, N]  column n is the stream of W[n,·]
//   qzeros   s32  [G, ⌈N·b/32⌉]  row g is the stream of the zero points of group g; v1 stores z − 1, v2 stores z; absent from some
//                                symmetric checkpoints, where b comes from the config or g_idx
//   scales   f16  [G, N]         bf16 and f32 seen
//   g_idx    s32  [K]            group of each input channel; only act-order needs it; s64 and [0] seen
//   bias     f16  [N]            optional
//
//   W[n,k] = (q − z)·s  with z and s of group g_idx[k], else k / group_size
//
// The shapes give b. Only the config distinguishes v1 from v2 and says whether g_idx is used; both are checked against the data when read.
// Source: AutoGPTQ auto_gptq/nn_modules/qlinear/qlinear_cuda.py; ModelCloud/GPTQModel gptqmodel/nn_modules/qlinear/__init__.py,
// utils/{model,planar_packing}.py; intel/auto-round auto_round/inference/backend.py.
#include <algorithm>

#include "checkpoint/codecs/table.hpp"
#include "checkpoint/config/codec_util.hpp"
#include "checkpoint/io/bits.hpp"

namespace nibble::codec {
namespace {

constexpr std::string_view kMethods[] = {"gptq",      "gptqmodel",  "gptq_marlin",     "marlin",
                                         "auto_gptq", "auto-round", "intel/auto-round"};
constexpr Axis kWords[] = {Axis::k_words, Axis::n}, kZeros[] = {Axis::k_groups, Axis::n_words},
               kScales[] = {Axis::k_groups, Axis::n};
constexpr StoredTensor kTensors[] = {
    {"qweight", kWords}, {"qzeros", kZeros}, {"scales", kScales}, {"g_idx", axes::kGroupOfK}, {"bias", axes::kN}};

struct Claims {
  bool v2 = false;      // zero points are stored as they are
  bool planar = false;  // gptq_p: 3, 5, 6 and 7-bit codes are split into planes
  std::optional<bool> symmetric;
  std::optional<bool> act_order;
  std::optional<std::int64_t> bits, group_size;
};

Claims read_claims(const QuantConfig& config) {
  Claims c;
  const std::string format = config_text(config.json, {"checkpoint_format", "format"});
  const std::string packing = config_text(config.json, {"packing_format"});
  c.planar = format == "gptq_p";
  c.v2 = c.planar || format == "gptq_v2" || packing == "auto_round" || packing == "auto_round:gptqmodel";
  c.symmetric = config_bool(config.json, {"sym"});
  c.act_order = config_bool(config.json, {"desc_act"});
  c.bits = config_int(config.json, {"bits"});
  c.group_size = config_int(config.json, {"group_size"});
  return c;
}

/// The width that matches all shapes; between several the config decides.
Result<int> infer_bits(const ModuleTensors& tensors, std::int64_t n, const Claims& claims) {
  const std::int64_t rows = tensors.find("qweight")->dim(0);
  const ConstTensorView *qzeros = tensors.find("qzeros"), *g_idx = find_g_idx(tensors, "g_idx");
  std::vector<int> fitting;
  for (int b = 2; b <= 8; ++b) {
    const bool rows_fit = g_idx == nullptr ? rows * 32 % b == 0 : words_of(Packing::dense, b, g_idx->dim(0)) == rows;
    if (rows_fit && (qzeros == nullptr || words_of(Packing::dense, b, n) == qzeros->dim(1))) fitting.push_back(b);
  }
  const auto claimed = std::ranges::find_if(fitting, [&](int b) { return b == claims.bits; });
  if (claimed != fitting.end()) return *claimed;
  if (fitting.size() == 1) return fitting.front();
  const std::string shapes =
      fmt::format("qweight {}, qzeros {}, g_idx {}", describe(*tensors.find("qweight")),
                  qzeros == nullptr ? "absent" : describe(*qzeros), g_idx == nullptr ? "absent" : describe(*g_idx));
  if (fitting.empty())
    return error(StatusCode::corrupt_data, "{}: no code width from 2 to 8 bits fits {}", tensors.module, shapes);
  return error(StatusCode::unsupported, "{}: {} fits codes of {} bits; say which with \"bits\" in the config", tensors.module,
               shapes, fmt::join(fitting, " or "));
}

struct Analysis {
  Module module;
  Claims claims;
  int bits = 0;
};

Result<Analysis> analyse(const ModuleTensors& tensors, const QuantConfig& config) {
  Analysis a{{}, read_claims(config), 0};
  Module& m = a.module;
  m.format = "gptq";
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "scales", kFloats, {-1, -1}));
  const ConstTensorView& scales = *tensors.find("scales");
  const std::int64_t groups = scales.dim(0);
  m.n = scales.dim(1);
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "qweight", {DType::s32}, {-1, m.n}));
  const bool has_zeros = tensors.find("qzeros") != nullptr;
  if (has_zeros) NIBBLE_RETURN_IF_ERROR(expect(tensors, "qzeros", {DType::s32}, {groups, -1}));
  if (!has_zeros && a.claims.symmetric == false)
    return error(StatusCode::corrupt_data, "{}.qzeros is missing, and {} says sym=false", tensors.module, config_name(config));
  const ConstTensorView* g_idx = find_g_idx(tensors, "g_idx");
  if (g_idx != nullptr) NIBBLE_RETURN_IF_ERROR(expect(tensors, "g_idx", {DType::s32, DType::s64}, {-1}));
  NIBBLE_RETURN_IF_ERROR(check_bias(tensors, m.n));
  m.has_bias = tensors.find("bias") != nullptr;

  NIBBLE_ASSIGN_OR_RETURN(a.bits, infer_bits(tensors, m.n, a.claims));
  m.k = g_idx != nullptr ? g_idx->dim(0) : tensors.find("qweight")->dim(0) * 32 / a.bits;
  NIBBLE_RETURN_IF_ERROR(check_dimensions(tensors, m.n, m.k));
  if (a.bits == 5 || a.bits == 6 || a.bits == 7 || (a.bits == 3 && a.claims.planar))
    return error(StatusCode::unsupported, "{}: recognised but not yet supported: {}-bit GPTQ with planar packing (gptq_p)",
                 tensors.module, a.bits);

  NIBBLE_ASSIGN_OR_RETURN(m.scheme.group, infer_group(tensors, m.k, groups, a.claims.group_size, config));
  const bool symmetric = a.claims.symmetric.value_or(!has_zeros);
  m.scheme.codes = *code_type(a.bits, symmetric);
  m.scheme.zero = symmetric ? ZeroKind::none : ZeroKind::integer;
  m.scheme.scale = scales.dtype;
  m.act_order = g_idx != nullptr && groups > 1 && a.claims.act_order.value_or(false);

  const auto claimed_codes = code_type(a.claims.bits.value_or(0), symmetric);
  if (claimed_codes && a.claims.group_size)
    claim(m, config, {*claimed_codes, m.scheme.zero, configured_group(*a.claims.group_size), scales.dtype});
  check_method(m, config, kMethods);
  if (a.claims.act_order.value_or(false) && g_idx == nullptr && groups > 1)
    note(m.notes, kWarning, "{} says desc_act=true, but there is no g_idx", config_name(config));
  const auto overrides = std::ranges::count_if(config_child(config.json, "dynamic").items(), [](const auto& item) {
    return !item.key().starts_with("-:");  // these keys skip modules
  });
  if (overrides > 0)
    note(m.notes, kInfo, "{} has {} \"dynamic\" overrides; nibble goes by the tensors and claims are those without overrides",
         config_name(config), overrides);
  return a;
}

std::optional<Result<Module>> detect(const ModuleTensors& tensors, const QuantConfig& config) {
  const ConstTensorView* qweight = tensors.find("qweight");
  const ConstTensorView* scales = tensors.find("scales");
  if (qweight == nullptr || scales == nullptr || qweight->dtype != DType::s32) return std::nullopt;
  if (tensors.find("qzeros") == nullptr && (qweight->rank != 2 || scales->rank != 2 || qweight->dim(1) != scales->dim(1)))
    return std::nullopt;  // Marlin's tiles are wider than N
  if (const std::string format = config_text(config.json, {"checkpoint_format"});
      format.starts_with("gptq_") && format != "gptq_v2" && format != "gptq_p")
    return error(StatusCode::unsupported, "{}: {} says checkpoint_format \"{}\"; nibble reads gptq and gptq_v2", tensors.module,
                 config_name(config), format);
  if (qweight->rank != 2 || scales->rank != 2 || qweight->dim(1) != scales->dim(1))
    return error(StatusCode::corrupt_data,
                 "{}: qweight {} and scales {} fit neither GPTQ [K·bits/32,N], [G,N] nor AWQ [K,N/8], [G,N]", tensors.module,
                 describe(*qweight), describe(*scales));
  auto analysis = analyse(tensors, config);
  if (!analysis.ok()) return analysis.status();
  return std::move(analysis->module);
}

/// Whether the stored fields are those of v1 or v2. Symmetric zero points are all 2^(b−1), so that the data can decide.
Result<bool> zeros_are_v2(const std::vector<std::uint8_t>& fields, const ModuleTensors& tensors, const Analysis& a,
                          std::vector<Note>& notes) {
  if (a.claims.symmetric == false) return a.claims.v2;
  const int middle = 1 << (a.bits - 1);
  const auto all = [&](int field) { return std::ranges::all_of(fields, [field](std::uint8_t f) { return f == field; }); };
  const bool looks_v1 = all(middle - 1), looks_v2 = all(middle);
  if ((looks_v1 && a.claims.v2) || (looks_v2 && !a.claims.v2)) {
    if (tensors.part)
      return error(StatusCode::unsupported, "{}.qzeros: only the whole layer shows whether they are those of v1 or v2",
                   tensors.module);
    note(notes, kWarning,
         "checkpoint_format would be {}, but all stored zero points are {}, which is symmetric as {}: read as that",
         a.claims.v2 ? "v2" : "v1", looks_v1 ? middle - 1 : middle, looks_v1 ? "v1" : "v2");
    return looks_v2;
  }
  return a.claims.v2;
}

/// A v1 writer stores z − 1. For z = 0 that underflows: a correct writer stores the mask, which decodes to 0 again; in AutoGPTQ the borrow
/// sets every higher field of the word, and the zero points there are lost.
void note_underflow(const std::vector<std::uint8_t>& fields, const Analysis& a, std::vector<Note>& notes) {
  const std::int64_t n = a.module.n;
  const int mask = (1 << a.bits) - 1;
  const auto first = std::ranges::find(fields, mask);
  if (first == fields.end()) return;
  const std::int64_t at = first - fields.begin();
  note(notes, kWarning,
       "{} of {} stored zero points are {}, an underflow of 0 − 1, and were read as 0 (the first at group {}, column {})",
       std::ranges::count(fields, mask), fields.size(), mask, at / n, at % n);

  if (a.bits == 3) return;  // its fields straddle words
  const std::int64_t per_word = 32 / a.bits;
  std::int64_t damaged = 0, damaged_at = 0;
  for (std::int64_t row = 0; row < static_cast<std::int64_t>(fields.size()); row += n) {
    for (std::int64_t c = 0; c + per_word <= n; c += per_word) {
      const std::span word(fields.data() + row + c, static_cast<std::size_t>(per_word));
      const auto begin = std::ranges::find(word, mask);
      const bool run_to_the_end =
          word.end() - begin >= 2 && std::all_of(begin, word.end(), [mask](std::uint8_t f) { return f == mask; });
      if (run_to_the_end && damaged++ == 0) damaged_at = row + c;
    }
  }
  if (damaged > 0)
    note(notes, kWarning,
         "words of zero points that are likely damaged: {}; above a {} all higher fields are {} too, as AutoGPTQ's borrow leaves "
         "them (the first at group {}, column {}); quantize the original weights again",
         damaged, mask, mask, damaged_at / n, damaged_at % n);
}

Status read_g_idx(const ModuleTensors& tensors, const Analysis& a, QuantTensor& q, std::vector<Note>& notes) {
  const ConstTensorView* view = find_g_idx(tensors, "g_idx");
  if (view == nullptr) return {};
  using Kind = GroupIndex::Kind;
  GroupIndex index = inspect_g_idx(*view, q.scheme.group, q.k);
  if (index.kind == Kind::natural) return {};
  if (index.kind == Kind::permutation) {
    if (a.claims.act_order == false)
      note(notes, kWarning, "the config says desc_act=false, but g_idx is a valid act-order permutation: used it");
    q.g_idx = std::move(index.values);
    return {};
  }
  const bool ignorable = a.claims.act_order == false || (!a.claims.act_order && index.kind == Kind::all_zero);
  if (!ignorable) return error(StatusCode::corrupt_data, "{}.g_idx cannot be an act-order: {}", tensors.module, index.why);
  note(notes, kInfo, "g_idx is {} and not meant to be used (no desc_act): ignored it",
       index.kind == Kind::all_zero ? "all zero" : "neither k / group_size nor a permutation of it");
  return {};
}

std::optional<StoredCodes> codes(const ModuleTensors&, const Module& m, const QuantConfig&) {
  return StoredCodes{.suffix = "qweight", .order = CodeOrder::streams, .bits = bits(m.scheme.codes), .n = m.n, .k = m.k};
}

Result<QuantTensor> read(const ModuleTensors& tensors, const Module&, const QuantConfig& config, std::vector<Note>& notes) {
  NIBBLE_ASSIGN_OR_RETURN(const Analysis a, analyse(tensors, config));
  const Module& m = a.module;
  const ConstTensorView& scales = *tensors.find("scales");
  const std::int64_t groups = scales.dim(0);
  QuantTensor q;
  q.scheme = {*code_type(a.bits, false), ZeroKind::integer, m.scheme.group, scales.dtype};
  q.n = m.n;
  q.k = m.k;
  NIBBLE_RETURN_IF_ERROR(read_g_idx(tensors, a, q, notes));
  q.codes = read_codes(tensors, *codes(tensors, m, config));

  const ConstTensorView* qzeros = tensors.find("qzeros");
  auto zeros = qzeros == nullptr
                   ? std::vector(static_cast<std::size_t>(groups * m.n), static_cast<std::uint8_t>(1 << (a.bits - 1)))
                   : unpack_rows(bytes_of(*qzeros), Packing::dense, a.bits, groups, m.n);
  bool v2 = true;
  if (qzeros != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(v2, zeros_are_v2(zeros, tensors, a, notes));
  }
  if (!v2) {
    if (m.scheme.zero == ZeroKind::integer) note_underflow(zeros, a, notes);
    const unsigned mask = (1u << a.bits) - 1;
    for (std::uint8_t& z : zeros) z = static_cast<std::uint8_t>((z + 1u) & mask);
  }
  q.zeros = zeros_tensor(transpose(zeros, groups, m.n), m.n, groups);
  q.scales = transposed(scales);
  if (m.scheme.zero == ZeroKind::none) fold_symmetric(q, notes);
  q.bias = read_bias(tensors, q.n);
  return q;
}

Result<std::vector<EncodedTensor>> write(const QuantTensor& q, const ActScheme& act) {
  NIBBLE_RETURN_IF_ERROR(check_writable("gptq", q));
  NIBBLE_RETURN_IF_ERROR(check_weight_only("gptq", q, act));
  const auto refuse = [&](std::string_view why) {
    return error(StatusCode::unsupported, "gptq cannot hold {} [{},{}]: {}", q.scheme.name(), q.n, q.k, why);
  };
  const int b = bits(q.scheme.codes);
  if (q.scheme.codes != code_type(b, true) || (b != 2 && b != 3 && b != 4 && b != 8))
    return refuse("nibble writes symmetric codes of 2, 3, 4 or 8 bits (u2b2, u3b4, u4b8, u8b128)");
  if (q.scheme.zero != ZeroKind::none) return refuse("nibble writes symmetric codes without zero points");
  if (q.scheme.group.n != 1) return refuse("scales are per output channel");
  if (q.k * b % 32 != 0 || q.n * b % 32 != 0) return refuse("K·bits and N·bits must be multiples of 32");

  const std::int64_t groups = q.groups();
  const std::vector<std::uint8_t> zeros(static_cast<std::size_t>(groups * q.n), static_cast<std::uint8_t>((1 << (b - 1)) - 1));
  Tensor g_idx(DType::s32, {q.k});
  for (std::int64_t k = 0; k < q.k; ++k)
    g_idx.as<std::int32_t>()[k] = !q.g_idx.empty()        ? q.g_idx[static_cast<std::size_t>(k)]
                                  : q.scheme.group.k == 0 ? 0
                                                          : static_cast<std::int32_t>(k / q.scheme.group.k);
  std::vector<EncodedTensor> out;
  out.push_back({"qweight",
                 word_tensor(pack_columns(transpose(q.codes, q.n, q.k).data(), Packing::dense, b, q.k, q.n), q.k * b / 32, q.n)});
  out.push_back({"qzeros", word_tensor(pack_rows(zeros.data(), Packing::dense, b, groups, q.n), groups, q.n * b / 32)});
  out.push_back({"scales", by_group(q.scales)});
  out.push_back({"g_idx", std::move(g_idx)});
  if (!q.bias.empty()) out.push_back({"bias", q.bias});
  return out;
}

/// A regular expression that matches only `name`.
std::string escaped(const std::string& name) {
  std::string text;
  for (const char c : name) {
    if (std::string_view(".^$|()[]{}*+?\\").find(c) != std::string_view::npos) text += '\\';
    text += c;
  }
  return text;
}

Result<Json> write_config(const WrittenCheckpoint& written) {
  NIBBLE_RETURN_IF_ERROR(check_uniform("gptq", written));
  const std::vector<WrittenModule>& modules = written.modules;
  const WeightScheme scheme = modules.empty() ? WeightScheme{} : modules.front().scheme;
  const bool act_order = std::ranges::any_of(modules, &WrittenModule::act_order);
  const bool lm_head = std::ranges::any_of(modules, [](const WrittenModule& module) { return module.name == "lm_head"; });
  Json json{{"quant_method", "gptq"},
            {"bits", bits(scheme.codes)},
            {"group_size", config_group_size(scheme.group)},
            {"desc_act", act_order},  // of all modules: readers drop every g_idx when this is false
            {"sym", true},
            {"static_groups", false},
            {"true_sequential", true},
            {"lm_head", lm_head},
            {"checkpoint_format", "gptq"}};
  for (const std::string& name : not_quantized(written))
    if (name != "lm_head") json["dynamic"]["-:^" + escaped(name) + "$"] = Json::object();
  return json;
}

}  // namespace

const Format kGptq{
    "gptq",      "GPTQ v1 and v2: 2, 3, 4 and 8-bit codes, act-order", true, kMethods, kTensors, detect, read, codes, write,
    write_config};

}  // namespace nibble::codec
