#include "commands/matrix.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <regex>
#include <utility>

#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

/// A weight to ask about. Others of the same codes and zero points get the answers of these.
struct Weight {
  const char* scheme;
  DType scale = DType::f16;
  bool act_order = false, prescale = false;
};
constexpr Weight kWeights[] = {
    {"u4b8g128"},
    {"u4b8g64"},
    {"u4b8g32"},
    {"u4b8g96"},
    {"u4b8g48"},
    {"u4b8g16"},
    {"u4b8g8"},
    {"u4b8c"},
    {"u4zg128"},
    {"u4zg64"},
    {"u4zg32"},
    {"u4zg96"},
    {"u4zg48"},
    {"u4zg16"},
    {"u4zg8"},
    {"u4zc"},
    {"u4og128"},
    {"u4og64"},
    {"u4og32"},
    {"u4og96"},
    {"u4og48"},
    {"u4og16"},
    {"u4og8"},
    {"u4oci32"},
    {"u4oc"},
    {"u4fg64"},
    {"u2zg64"},
    {"u3b4g128"},
    {"u6b32g128"},
    {"u8b128g128"},
    {"u8b128g32"},
    {"u8b128c"},
    {"u8zg128"},
    {"u8zc"},
    {"s8g128", DType::f32},
    {"s8c", DType::f32},
    {"s8t", DType::f32},
    {"s8zc", DType::f32},
    {"u4b8g128", DType::f16, true},
    {"u4zg128", DType::f16, true},
    {"u4b8g128", DType::f16, false, true},
    {"u4zg128", DType::f16, false, true},
    {"s8c", DType::f32, false, true},
    {"e4m3c", DType::f32},
    {"e4m3t", DType::f32},
    {"e4m3b128x128", DType::f32},
    {"e5m2c", DType::f32},
    {"e2m1g16", DType::e4m3},
    {"e2m1g32", DType::e8m0},
    {"f32", DType::none},
    {"f16", DType::none},
    {"bf16", DType::none},
};

/// A question: an operation, the type of A, and how activations are quantized: while running, or by whoever made A, which then has codes.
struct Asked {
  Op op;
  const char* name;
  DType a_dtype;
  const char* act;  // "" or the first part of a scheme
  const char* about;
};
constexpr Asked kQuestions[] = {
    {Op::linear, "f32", DType::f32, "", "as they are, in f32"},
    {Op::linear, "f16", DType::f16, "", "as they are, in f16"},
    {Op::linear, "bf16", DType::bf16, "", "as they are, in bf16"},
    {Op::linear, "f16→s8r", DType::f16, "s8r", "f16 quantized while running: int8, a scale per token"},
    {Op::linear, "f16→s8zr", DType::f16, "s8zr", "the same with a zero point per token"},
    {Op::linear, "f16→s8g128", DType::f16, "s8g128", "f16 quantized while running: int8, a scale per 128 channels of a token"},
    {Op::linear, "f16→s8zg128", DType::f16, "s8zg128", "the same with zero points"},
    {Op::linear, "f16→s8og32", DType::f16, "s8og32",
     "f16 quantized while running: int8, a scale and a float offset per 32 channels of a token"},
    {Op::linear, "f16→s8t", DType::f16, "s8t", "f16 quantized while running: int8, one static scale"},
    {Op::linear, "f16→s8zt", DType::f16, "s8zt", "the same with a static zero point"},
    {Op::linear, "f16→e4m3r", DType::f16, "e4m3r", "f16 quantized while running: FP8, a scale per token"},
    {Op::linear, "f16→e4m3g128", DType::f16, "e4m3g128", "f16 quantized while running: FP8, a scale per 128 channels of a token"},
    {Op::linear, "f16→e4m3t", DType::f16, "e4m3t", "f16 quantized while running: FP8, one static scale"},
    {Op::linear, "s8r", DType::s8, "s8r", "they come as int8, with a scale per token"},
    {Op::linear, "s8zr", DType::s8, "s8zr", "they come as int8, with a scale and a zero point per token"},
    {Op::linear, "s8g128", DType::s8, "s8g128", "they come as int8, with a scale per 128 channels of a token"},
    {Op::linear, "s8t", DType::s8, "s8t", "they come as int8, with one static scale"},
    {Op::linear, "e4m3r", DType::e4m3, "e4m3r", "they come as FP8, with a scale per token"},
    {Op::linear, "e4m3g128", DType::e4m3, "e4m3g128", "they come as FP8, with a scale per 128 channels of a token"},
    {Op::linear, "e4m3t", DType::e4m3, "e4m3t", "they come as FP8, with one static scale"},
    {Op::conv, "f32", DType::f32, "", "as they are, in f32"},
    {Op::conv, "f16", DType::f16, "", "as they are, in f16"},
    {Op::conv, "bf16", DType::bf16, "", "as they are, in bf16"},
    {Op::conv, "f16→s8r", DType::f16, "s8r", "f16 quantized while running: int8, a scale per patch"},
    {Op::conv, "f16→s8g128", DType::f16, "s8g128", "f16 quantized while running: int8, a scale per 128 channels of a pixel"},
    {Op::conv, "f16→e4m3t", DType::f16, "e4m3t", "f16 quantized while running: FP8, one static scale"},
    {Op::conv, "s8t", DType::s8, "s8t", "they come as int8, with one static scale"},
    {Op::conv, "e4m3t", DType::e4m3, "e4m3t", "they come as FP8, with one static scale"},
    {Op::dequantize, "→f16", DType::f16, "", "W in f16, of a weight packed for linear layers"},
};

constexpr std::int64_t kOutputs = 4096, kInputs = 6144;  // divisible by every group above
constexpr std::int64_t kChannels = 384, kPixels = 28;    // of a convolution
constexpr std::int64_t kTokens = 256;

WeightDesc described(const Weight& weight, const WeightScheme& scheme, const Asked& asked, const ActScheme& act) {
  const bool images = asked.op == Op::conv;
  WeightDesc desc{.scheme = scheme,
                  .n = images ? kChannels : kOutputs,
                  .k = images ? 9 * kChannels : kInputs,
                  .zero_type = scheme.zero == ZeroKind::none      ? DType::none
                               : scheme.zero != ZeroKind::integer ? DType::f16
                               : scheme.codes == DType::s8        ? DType::s8
                                                                  : DType::u8,
                  .filter = images ? Extent{3, 3} : Extent{},
                  .act_order = weight.act_order,
                  .prescale = weight.prescale};
  if (act.codes != DType::none && act.group == GroupShape::tensor()) desc.static_acts = StaticActs{0.02f, 0};
  return desc;
}

/// A kind of machine; `gpu` or a level of CPUs.
struct Place {
  std::string name, about;
  std::optional<GpuInfo> gpu;
  Isa cpu = Isa::baseline;
};

/// A GPU of that compute capability, for which this build has kernels of these levels.
Place gpu_of(int capability, int sms, std::initializer_list<Isa> levels, std::string about) {
  GpuInfo gpu = *described_gpu("h100");
  gpu.name = fmt::format("GPU of compute capability {}.{}", capability / 10, capability % 10);
  gpu.compute_capability = capability;
  gpu.sms = sms;
  if (capability < 80) gpu.shared_bytes_per_block = 64 << 10, gpu.read_gbytes_per_s = 290;  // a T4's
  gpu.isas = 0;
  for (const Isa level : levels) gpu.isas |= 1U << static_cast<int>(level);
  return {.name = fmt::format("sm_{}", capability), .about = std::move(about), .gpu = gpu};
}

/// The levels of CPUs that differ most, as far as this build has kernels of them, and generations of GPUs.
std::vector<Place> places() {
  std::vector<Place> all;
  const auto rows = kernels();
  for (const auto& [level, about] : {std::pair{Isa::baseline, "any CPU of this architecture"},
                                     {Isa::avx2, "x86-64 with AVX2"},
                                     {Isa::avx512vnni, "x86-64 with AVX-512 VNNI"},
                                     {Isa::amx, "x86-64 with AMX"},
                                     {Isa::dotprod, "AArch64 with dot products"},
                                     {Isa::i8mm, "AArch64 with int8 matrix products"},
                                     {Isa::neonbf16, "AArch64 with int8 and bf16 matrix products"}})
    if (std::ranges::find(rows, level, &KernelInfo::isa) != rows.end())
      all.push_back({.name = std::string(name(level)), .about = about, .gpu = {}, .cpu = level});
  all.push_back(gpu_of(70, 80, {}, "Volta"));
  all.push_back(gpu_of(75, 40, {Isa::simt, Isa::sm80}, "Turing"));
  all.push_back(gpu_of(80, 108, {Isa::simt, Isa::sm80}, "Ampere, also 8.6, Ada (8.9) and Blackwell (10.x, 12.x)"));
  all.push_back(gpu_of(90, 132, {Isa::simt, Isa::sm80, Isa::sm90}, "Hopper"));
  return all;
}

Result<Explanation> ask(const WeightDesc& weight, const Asked& asked, const ActScheme& act, const Machine& machine) {
  const PlanOptions options{.threads = 8};  // the same answers on every machine
  const DType out = is_compute_float(asked.a_dtype) ? asked.a_dtype : DType::f16;
  LinearSpec linear{.a_dtype = asked.a_dtype, .m_max = kTokens, .epilogue = {.out = out}, .act_scheme = act};
  if (asked.op == Op::linear) return explain(weight, linear, machine, options);
  if (asked.op == Op::conv)
    return explain(weight,
                   ConvSpec{.geometry = {.in_channels = kChannels,
                                         .out_channels = kChannels,
                                         .height = kPixels,
                                         .width = kPixels,
                                         .filter = {3, 3},
                                         .padding = {1, 1, 1, 1}},
                            .input = ImageLayout::nhwc,
                            .output = ImageLayout::nhwc,
                            .a_dtype = asked.a_dtype,
                            .batch_max = 4,
                            .epilogue = {.out = out},
                            .act_scheme = act},
                   machine, options);
  auto packed = explain(weight, linear, machine, options);
  for (const DType codes : {DType::s8, DType::e4m3}) {
    if (packed.ok()) break;
    linear.act_scheme = {codes};
    if (auto other = explain(weight, linear, machine, options); other.ok()) packed = std::move(other);
  }
  return packed.ok() ? explain(weight, DequantizeSpec{.out = out}, packed->layout, machine, options) : packed.status();
}

/// The words of cells, the best first.
constexpr std::pair<const char*, const char*> kWords[] = {
    {"fast", "a kernel for this machine's instructions: its vector or tile instructions, its tensor cores"},
    {"generic", "a kernel for every GPU, without tensor cores, or W dequantized into the workspace and multiplied by cuBLASLt"},
    {"reference", "the reference kernel: right, and slow"},
};

/// Which of the words, by its place.
std::size_t word_of(std::string_view kernel) {
  const auto info = kernel_info(kernel);
  if (!info.ok() || info->backend == Backend::reference) return 2;
  return info->isa == Isa::simt || info->layout == "gpu_rows" || kernel.ends_with("_dense") ? 1 : 0;
}

/// The best that runs at any M. Where it changes follows from costs, which are measured on some machines only.
std::string answer_of(const Explanation& explained) {
  std::size_t best = std::size(kWords) - 1;
  for (const Explanation::Bucket& bucket : explained.buckets) best = std::min(best, word_of(bucket.steps.back()));
  return kWords[best].first;
}

/// The answers of all machines. One that refuses what a better machine of its kind runs lacks what runs there; what all refuse, they refuse
/// for the reason of the best.
std::vector<std::string> answers_of(const std::vector<Place>& machines, const WeightDesc& weight, const Asked& asked,
                                    const ActScheme& act) {
  std::vector<std::string> answers(machines.size());
  struct Better {
    std::optional<Isa> level;  // of what runs there
    std::string refusal;
  };
  std::optional<Better> better[2];  // of CPUs, of GPUs
  for (std::size_t i = machines.size(); i-- > 0;) {
    const Place& place = machines[i];
    std::optional<Better>& known = better[place.gpu ? 1 : 0];
    const auto explained = ask(weight, asked, act, place.gpu ? Machine(*place.gpu) : Machine(place.cpu));
    if (explained.ok()) {
      answers[i] = answer_of(*explained);
      const auto kernel = kernel_info(explained->buckets.front().steps.back());
      known = Better{.level = kernel.ok() ? std::optional(kernel->isa) : std::nullopt, .refusal = {}};
    } else if (known && !known->refusal.empty()) {
      answers[i] = known->refusal;
    } else {
      std::string reason = reason_of(explained.status(), known ? known->level : std::nullopt);
      // The row and the column have the scheme already, and their neighbours the same reason.
      const std::string scheme = Scheme{weight.scheme, act}.name();
      if (const std::size_t at = reason.find(scheme); at != std::string::npos)
        reason.replace(at, scheme.size(), reason.substr(0, at).ends_with("they are ") ? asked.act : "this scheme");
      answers[i] = "no: " + reason;
      if (!known) known = Better{.level = {}, .refusal = answers[i]};
    }
  }
  return answers;
}

}  // namespace

std::string reason_of(const Status& refused, std::optional<Isa> level) {
  const std::vector<Refusal>& refusals = refused.refusals();
  const auto of_gpu = [](const Refusal& refusal) {
    const auto kernel = kernel_info(refusal.kernel);
    return kernel.ok() && kernel->backend == Backend::cuda;
  };
  const bool on_gpu = std::ranges::any_of(refusals, of_gpu);  // then CPU kernels only say that they are for the CPU
  const Refusal *of_layout = nullptr, *best = nullptr, *floats = nullptr, *lacking = nullptr;
  for (const Refusal& refusal : refusals) {
    if (refusal.kernel.empty()) {
      if (of_layout == nullptr) of_layout = &refusal;
    } else if (on_gpu && !of_gpu(refusal)) {
      continue;
    } else if (refusal.needs) {
      if (lacking == nullptr || (level && refusal.needs == level)) lacking = &refusal;
    } else if (refusal.reason.starts_with("multiplies floats")) {
      floats = &refusal;  // of kernels for other activations; those for these have a better reason
    } else if (best == nullptr || refusal.others > best->others) {
      best = &refusal;
    }
  }
  if (level && lacking != nullptr) return lacking->reason;
  for (const Refusal* refusal : {best, floats, of_layout, lacking})
    if (refusal != nullptr) return refusal->reason;
  return refused.message();
}

Result<SupportMatrix> support_matrix() {
  SupportMatrix matrix;
  const std::vector<Place> machines = places();
  for (const Place& place : machines) matrix.machines.push_back({place.name, place.about});
  std::vector<WeightScheme> schemes;
  for (const Weight& weight : kWeights) {
    const auto scheme = Scheme::parse(weight.scheme, weight.scale);
    if (!scheme.ok()) return scheme.status();
    schemes.push_back(scheme->weight);
    matrix.weights.push_back(
        fmt::format("{}{}{}", weight.scheme, weight.act_order ? " act-order" : "", weight.prescale ? " prescale" : ""));
  }
  for (const Asked& asked : kQuestions) {
    SupportMatrix::Question& question =
        matrix.questions.emplace_back(SupportMatrix::Question{std::string(name(asked.op)), asked.name, asked.about, {}});
    ActScheme act;
    if (*asked.act != '\0') {
      const auto scheme = Scheme::parse(std::string(asked.act) + "_s8c");
      if (!scheme.ok()) return scheme.status();
      act = scheme->act;
    }
    for (std::size_t w = 0; w < schemes.size(); ++w) {
      const WeightDesc weight = described(kWeights[w], schemes[w], asked, act);
      std::vector<std::size_t>& row = question.cells.emplace_back();
      for (std::string& answer : answers_of(machines, weight, asked, act)) {
        const auto known = std::ranges::find(matrix.answers, answer);
        row.push_back(static_cast<std::size_t>(known - matrix.answers.begin()));
        if (known == matrix.answers.end()) matrix.answers.push_back(std::move(answer));
      }
    }
  }
  return matrix;
}

namespace {

/// "{a,b}", or "a" alone.
std::string braced(const std::vector<std::string>& words) {
  return words.size() == 1 ? words.front() : fmt::format("{{{}}}", fmt::join(words, ","));
}

/// Weights as a shell would expand them: "u4{b8,z}g{128,64}, s8c prescale".
std::string together(const std::vector<std::string>& weights) {
  static const std::regex kParts(R"((u\d|s8|e\dm\d)([bzof]?\d*?)(g\d+|ci\d+|c|t|b\d+x\d+)((?: .*)?))");
  struct Kind {
    std::string codes, rest;
    std::vector<std::string> zeros, groups;
  };
  std::vector<Kind> kinds;
  for (const std::string& weight : weights) {
    std::smatch parts;
    if (!std::regex_match(weight, parts, kParts)) {
      kinds.push_back({weight, "", {""}, {""}});
      continue;
    }
    const auto known = std::ranges::find_if(kinds, [&](const Kind& kind) {
      return kind.codes == parts[1] && kind.zeros.front() == parts[2] && kind.rest == parts[4];
    });
    if (known == kinds.end())
      kinds.push_back({parts[1], parts[4], {parts[2]}, {parts[3]}});
    else
      known->groups.push_back(parts[3]);
  }
  std::vector<Kind> merged;
  for (Kind& kind : kinds) {
    const auto same = std::ranges::find_if(
        merged, [&](const Kind& one) { return one.codes == kind.codes && one.rest == kind.rest && one.groups == kind.groups; });
    if (same == merged.end())
      merged.push_back(std::move(kind));
    else
      same->zeros.push_back(kind.zeros.front());
  }
  std::string text;
  for (Kind& kind : merged) {
    const bool runs = std::ranges::all_of(kind.groups, [](const std::string& group) { return group.starts_with("g"); });
    if (runs)
      for (std::string& group : kind.groups) group.erase(0, 1);
    text += fmt::format("{}{}{}{}{}{}", text.empty() ? "" : ", ", kind.codes, braced(kind.zeros), runs ? "g" : "",
                        braced(kind.groups), kind.rest);
  }
  return text;
}

using Answers = std::vector<std::size_t>;

/// Names with the same answers, together, in the order of the first of each.
std::vector<std::pair<std::vector<std::string>, Answers>> grouped(const std::vector<std::string>& names,
                                                                  const std::vector<Answers>& answers) {
  std::vector<std::pair<std::vector<std::string>, Answers>> groups;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto same = std::ranges::find(groups, answers[i], [](const auto& group) { return group.second; });
    if (same == groups.end())
      groups.push_back({{names[i]}, answers[i]});
    else
      same->first.push_back(names[i]);
  }
  return groups;
}

}  // namespace

SupportTables tables_of(const SupportMatrix& matrix) {
  SupportTables all;
  std::vector<std::size_t> refusals;  // in the order of their numbers
  const auto cell = [&](std::size_t answer) {
    const std::string& words = matrix.answers[answer];
    if (!words.starts_with("no: ")) return words;
    const auto known = std::ranges::find(refusals, answer);
    const auto number = known - refusals.begin() + 1;
    if (known == refusals.end()) {
      refusals.push_back(answer);
      all.refusals.push_back(words.substr(4));
    }
    return fmt::format("no ({})", number);
  };
  for (const Op op : {Op::linear, Op::conv, Op::dequantize}) {
    std::vector<const SupportMatrix::Question*> questions;
    std::vector<std::string> activations, machines;
    for (const SupportMatrix::Question& question : matrix.questions)
      if (question.operation == name(op)) questions.push_back(&question), activations.push_back(question.name);
    if (questions.empty()) continue;
    std::vector<Answers> of_machines;  // [machine][question × weight]
    for (std::size_t m = 0; m < matrix.machines.size(); ++m) {
      machines.push_back(matrix.machines[m].name);
      Answers& answers = of_machines.emplace_back();
      for (const SupportMatrix::Question* question : questions)
        for (const Answers& row : question->cells) answers.push_back(row[m]);
    }
    for (const auto& [names, answers] : grouped(machines, of_machines)) {
      SupportTables::Table& table = all.tables.emplace_back(SupportTables::Table{std::string(name(op)), names, {}, {}});
      if (std::ranges::all_of(answers, [&](std::size_t answer) { return matrix.answers[answer].starts_with("no: "); })) {
        table.rows.push_back({"", {cell(answers.front())}});
        continue;
      }
      std::vector<Answers> of_questions, of_weights(matrix.weights.size());
      for (auto at = answers.begin(); at != answers.end(); at += static_cast<std::ptrdiff_t>(matrix.weights.size()))
        of_questions.emplace_back(at, at + static_cast<std::ptrdiff_t>(matrix.weights.size()));
      for (const auto& [columns, column] : grouped(activations, of_questions)) {
        table.columns.push_back(fmt::format("{}", fmt::join(columns, ", ")));
        for (std::size_t w = 0; w < of_weights.size(); ++w) of_weights[w].push_back(column[w]);
      }
      for (const auto& [weights, row] : grouped(matrix.weights, of_weights)) {
        SupportTables::Row& shown = table.rows.emplace_back(SupportTables::Row{together(weights), {}});
        for (const std::size_t answer : row) shown.cells.push_back(cell(answer));
      }
    }
  }
  return all;
}

std::string matrix_text(const SupportMatrix& matrix, bool colour) {
  const SupportTables all = tables_of(matrix);
  std::string text;
  for (const SupportTables::Table& table : all.tables) {
    text += styled(fmt::format("{} on {}", table.operation, fmt::join(table.machines, ", ")), Style::bold, colour);
    if (table.columns.empty()) {
      text += fmt::format(": {}\n\n", table.rows.front().cells.front());
      continue;
    }
    text += "\n";
    for (const SupportTables::Row& row : table.rows) {
      text += fmt::format("  {}\n", row.weights);
      std::vector<std::string> shown;
      for (const std::string& words : row.cells) {
        if (std::ranges::find(shown, words) != shown.end()) continue;
        shown.push_back(words);
        std::string activations;
        for (std::size_t i = 0; i < row.cells.size(); ++i)
          if (row.cells[i] == words) activations += (activations.empty() ? "" : ", ") + table.columns[i];
        text += fmt::format("    {}: {}\n", words, activations);
      }
    }
    text += "\n";
  }
  for (const auto& [word, about] : kWords) text += fmt::format("{}: {}\n", word, about);
  text += "f16→s8r: f16 activations, quantized to s8r while running; s8r: they come quantized\n\n";
  for (std::size_t i = 0; i < all.refusals.size(); ++i) text += fmt::format("({}) {}\n", i + 1, all.refusals[i]);
  return text;
}

Json matrix_json(const SupportMatrix& matrix) {
  const SupportTables all = tables_of(matrix);
  Json words = Json::array(), machines = Json::array(), activations = Json::array(), tables = Json::array();
  for (const auto& [word, about] : kWords) words.push_back({{"name", word}, {"about", about}});
  for (const auto& machine : matrix.machines) machines.push_back({{"name", machine.name}, {"about", machine.about}});
  for (const auto& question : matrix.questions)
    activations.push_back({{"operation", question.operation}, {"name", question.name}, {"about", question.about}});
  for (const SupportTables::Table& table : all.tables) {
    Json rows = Json::array();
    for (const SupportTables::Row& row : table.rows) rows.push_back({{"weights", row.weights}, {"cells", row.cells}});
    tables.push_back({{"operation", table.operation}, {"machines", table.machines}, {"columns", table.columns}, {"rows", rows}});
  }
  return {{"words", words}, {"machines", machines}, {"activations", activations}, {"tables", tables}, {"refusals", all.refusals}};
}

}  // namespace nibble::cli
