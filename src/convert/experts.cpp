// See experts.hpp.
#include "convert/experts.hpp"

#include <algorithm>
#include <utility>

#include "checkpoint/config/codec_util.hpp"
#include "checkpoint/config/names.hpp"
#include "checkpoint/io/json.hpp"
#include "checkpoint/stacks.hpp"
#include "core/error.hpp"

namespace nibble {
namespace {

/// Models whose experts are w1, w3 and w2, one by one.
constexpr std::string_view kMixtralLike[] = {"mixtral", "minimax",  "minimax_m2", "minimax_m3_vl",
                                             "phimoe",  "lfm2_moe", "deepseek_v4"};

/// "gate_up_proj" of "model.layers.0.mlp.experts.7.gate_up_proj".
std::string_view matrix_of(const Module& module) { return std::string_view(module.name).substr(module.name.rfind('.') + 1); }
bool is_gate_up(const Checkpoint::Impl& in, const Module& module) {
  return is_stacked(in, module) && matrix_of(module) == "gate_up_proj";
}

/// Rows [begin,end), whose scales are their own.
QuantTensor rows(const QuantTensor& q, std::int64_t begin, std::int64_t end) {
  QuantTensor part;
  part.scheme = q.scheme;
  part.n = end - begin;
  part.k = q.k;
  const auto cut = [&](const auto& bytes, std::int64_t all, std::int64_t first, std::int64_t last) {
    const auto width = static_cast<std::ptrdiff_t>(bytes.size()) / all;
    return std::remove_cvref_t<decltype(bytes)>(bytes.begin() + width * first, bytes.begin() + width * last);
  };
  const auto cut_tensor = [&](const Tensor& t, std::int64_t first, std::int64_t last) {
    if (t.empty()) return Tensor();
    std::vector<std::int64_t> shape = t.shape;
    shape.front() = last - first;
    Tensor made(t.dtype, std::move(shape));
    made.bytes = cut(t.bytes, t.shape.front(), first, last);
    return made;
  };
  part.codes = cut(q.codes, q.n, begin, end);
  const std::int64_t height = q.scheme.group.n;  // of the rows that share a scale; 0: all
  const std::int64_t first = height == 0 ? 0 : begin / height, last = height == 0 ? 1 : (end + height - 1) / height;
  part.scales = cut_tensor(q.scales, first, last);
  part.zeros = cut_tensor(q.zeros, first, last);
  part.bias = cut_tensor(q.bias, begin, end);
  part.scale2 = q.scale2;
  part.g_idx = q.g_idx;
  part.prescale = q.prescale;
  part.static_acts = q.static_acts;
  part.act_limit = q.act_limit;
  return part;
}

}  // namespace

bool is_stacked(const Checkpoint::Impl& in, const Module& module) {
  return in.groups[in.group_index.at(module.name)].stack.has_value();
}

bool stays_together(const codec::Format* format) { return format == nullptr || format->experts_together; }

std::vector<Module> written_modules(const Checkpoint::Impl& in, const Module& module, const codec::Format* format) {
  if (!is_stacked(in, module) || stays_together(format)) return {module};
  const bool mixtral = std::ranges::find(kMixtralLike, in.config.model_type) != std::end(kMixtralLike);
  const bool both = is_gate_up(in, module);
  std::vector<std::string_view> names{mixtral ? "w2" : "down_proj"};
  if (both) names = mixtral ? std::vector<std::string_view>{"w1", "w3"} : std::vector<std::string_view>{"gate_proj", "up_proj"};
  std::vector<Module> written;
  for (const std::string_view name : names) {
    Module& part = written.emplace_back(module);
    part.name.replace(part.name.rfind('.') + 1, std::string::npos, name);
    part.stack.clear();
    if (both) part.n /= 2;
  }
  return written;
}

Status check_form(const Checkpoint::Impl& in, const Module& module, const codec::Format& format) {
  if (format.experts_together) {
    if (!is_stacked(in, module))
      return error(StatusCode::unsupported, "{} has experts that are stored together alone", format.name);
    NIBBLE_ASSIGN_OR_RETURN(const bool turns, takes_turns(in, module.stack));
    if (turns) return {};
    return error(
        StatusCode::unsupported,
        "{} is how gpt_oss has its experts, whose rows of gate and up take turns; of model_type {} no program reads them so: "
        "choose another format, which has them one by one",
        format.name, storage::printable(in.config.model_type));
  }
  if (is_stacked(in, module))
    for (const Module& written : written_modules(in, module, &format))
      if (written.name != module.name && in.group_index.contains(written.name))
        return error(StatusCode::unsupported,
                     "one by one it would be {}, which is there already; remove one of both from the checkpoint", written.name);
  if (!is_gate_up(in, module)) return {};
  const std::int64_t height = module.scheme.is_dense() ? 1 : module.scheme.group.n;  // 0: all rows share a scale
  NIBBLE_ASSIGN_OR_RETURN(const bool turns, takes_turns(in, module.stack));
  if (module.n % 2 != 0) return error(StatusCode::unsupported, "{} rows are not those of a gate and as many of up", module.n);
  if (height > 1 && (turns || (module.n / 2) % height != 0))
    return error(StatusCode::unsupported,
                 "gate and up, of {} rows each, cannot be written one by one: blocks of {} rows share a scale; dequantize the "
                 "checkpoint, then quantize it",
                 module.n / 2, height);
  return {};
}

Result<std::vector<QuantTensor>> written_weights(const Checkpoint::Impl& in, const Module& module, QuantTensor q,
                                                 const codec::Format* format) {
  std::vector<QuantTensor> parts;
  if (!is_gate_up(in, module) || stays_together(format)) {
    parts.push_back(std::move(q));
    return parts;
  }
  NIBBLE_ASSIGN_OR_RETURN(const bool turns, takes_turns(in, module.stack));
  if (turns) {
    NIBBLE_ASSIGN_OR_RETURN(q, deinterleaved(std::move(q)));
  }
  const std::int64_t half = q.n / 2;
  parts.push_back(rows(q, 0, half));
  parts.push_back(rows(q, half, q.n));
  return parts;
}

std::string stacked_name(const Module& module, std::string_view suffix) {
  const bool whole = suffix == "weight";
  return storage::join_name(module.stack, fmt::format("{}{}{}", matrix_of(module), whole ? "" : "_", whole ? "" : suffix));
}

Tensor stacked_weight(const Checkpoint::Impl& in, const Module& module, Tensor weight) {
  const auto& stack = in.groups[in.group_index.at(module.name)].stack;
  // MXFP4 has rows, and the floats of the same models columns.
  if (!stack || !(stack->transposed || module.format == "mxfp4")) return weight;
  return codec::transposed(ConstTensorView(weight.bytes.data(), weight.dtype, {module.n, module.k}));
}

}  // namespace nibble
