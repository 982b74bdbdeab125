// Weights are copied until they exceed the last-level cache, and the copies are used in rotation: in a model a layer's weights are cold,
// too. Activations and outputs stay warm, as in a model.
#include "bench/core.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <thread>

namespace nibble::cli {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr float kCodeScale = 1.0f / 32, kOutScale = 0.25f;  // of activations and outputs that are codes
constexpr double kUsualSeconds = 0.2;                       // shorter measurements get shorter probes

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// A weight packed for the most rows, and for the first type of activations asked for that the layer takes.
Result<PackedWeight> pack_case(const BenchCase& layer, const QuantTensor& q, const BenchSpec& spec, const PackOptions& options) {
  BenchWork work{.d_dtype = spec.d_dtype,
                 .m = *std::max_element(layer.m.begin(), layer.m.end()),
                 .n = q.n,
                 .k = q.k,
                 .act_scheme = layer.act_scheme,
                 .accumulation = spec.accumulation,
                 .conv = layer.conv,
                 .operation = spec.operation,
                 .glu = spec.glu,
                 .norm = spec.norm};
  Result<PackedWeight> packed = Status(StatusCode::invalid_argument, "no type of activations to measure");
  for (const DType type : spec.acts) {
    work.a_dtype = type;
    packed = work.pack(q, options);
    if (packed.ok()) break;
  }
  return packed;
}

// Kernels to measure: the one the planner picks (""), the forced one, or all that could run.
std::vector<std::string> kernels_to_try(const BenchCase& layer, const BenchSpec& spec, Backend backend) {
  if (!spec.all_kernels) return {spec.kernel};
  std::vector<std::string> names;
  for (const KernelInfo& kernel : kernels()) {
    const bool can = layer.conv ? kernel.op == Op::conv || (kernel.op == Op::linear && layer.conv->geometry.pointwise())
                                : kernel.op == Op::linear;
    if (can && kernel.backend == backend && runs_here(kernel.isa).ok()) names.emplace_back(kernel.name);
  }
  return names;
}

// A weight packed for one kernel; kernels that share a layout share the copies.
struct Entry {
  std::string kernel;  // forced; empty: the planner's choice
  Copies copies;
};

PackOptions pack_options(const std::string& kernel, const BenchMachine& machine) {
  return {.kernel = kernel, .executor = &machine.executor(), .backend = machine.backend()};
}

Result<std::vector<Entry>> pack_for_all(const BenchCase& layer, const QuantTensor& weight, const BenchSpec& spec,
                                        const BenchMachine& machine) {
  std::vector<Entry> entries;
  Status refusal;
  for (const std::string& kernel : kernels_to_try(layer, spec, machine.backend())) {
    const PackOptions options = pack_options(kernel, machine);
    Entry entry{kernel, nullptr};
    const auto info = kernel_info(kernel);
    for (const Entry& other : entries) {
      if (info.ok() && other.copies->front().layout() == info->layout) entry.copies = other.copies;
    }
    if (!entry.copies) {
      auto first = pack_case(layer, weight, spec, options);
      if (!first.ok()) {
        refusal = first.status();
        continue;
      }
      auto copies = copies_of(
          *std::move(first), [&] { return pack_case(layer, weight, spec, options); }, machine.cold_bytes());
      if (!copies.ok()) return copies.status();
      entry.copies = *std::move(copies);
    }
    entries.push_back(std::move(entry));
  }
  if (entries.empty()) return refusal.ok() ? Status(StatusCode::unsupported, "this build has no kernel to measure") : refusal;
  return entries;
}

// Traffic counts weights, activations and outputs once each.
double bytes_of(const BenchWork& work, double weight_bytes) {
  return weight_bytes + bits(work.a_dtype) / 8.0 * static_cast<double>(work.a_elements()) +
         bits(work.out()) / 8.0 * static_cast<double>(work.d_elements());
}

double operations_of(const BenchWork& work) {
  if (work.operation != Operation::linear) return 0;
  return 2 * static_cast<double>(work.rows()) * static_cast<double>(work.n) * static_cast<double>(work.k);
}

std::string_view backend_of(std::string_view kernel) {
  for (const KernelInfo& info : kernels()) {
    if (info.name == kernel) return name(info.backend);
  }
  return "";
}

// A layer, ready to run.
struct Prepared {
  const BenchCase& layer;
  const QuantTensor& weight;
  std::vector<Entry> entries;
  std::optional<PackedWeight> by_default;  // as the planner packs it; only when all kernels are measured
  std::unique_ptr<Baseline> baseline;
};

// The kernel the planner would run, "" when that is unknown.
std::string planned_kernel(const Prepared& prepared, const BenchWork& work, int threads) {
  if (!prepared.by_default) return "";
  PlanOptions options;
  options.threads = threads;
  const auto plan = work.plan(*prepared.by_default, options);
  return plan.ok() ? std::string(plan->kernel(work.m)) : "";
}

// The planner's prediction for a measured kernel: for a CPU with the ceilings of that moment, for a GPU with the model's.
double predicted_us(const PackedWeight& weight, const BenchWork& work, const BenchResult& result, const BenchMachine& machine) {
  PlanOptions options;
  options.kernel = result.kernel;
  if (machine.backend() == Backend::cpu) {
    options.machine = machine.roofline();
    options.machine->read_gbytes_per_s = result.ceiling_gbytes_per_s;
    for (Ceiling peak : {Ceiling::f32, Ceiling::bf16, Ceiling::int8})
      (*options.machine)[peak] *= result.ceiling_gops / machine.roofline()[result.peak];
  }
  const auto plan = work.plan(weight, options);
  return plan.ok() ? plan->explain().buckets.back().cost_us : 0.0;
}

struct Planned {
  const Entry* entry;
  Plan plan;
};
// Whether a plan may choose the kernel for this work, which is then worth a measurement: it accepts, and is not predicted to take many times
// as long as the best one that reads the same layout. A model is wrong by less, and such kernels would take minutes with a thousand tokens.
bool may_be_chosen(const Explanation& explanation, std::string_view kernel) {
  const std::vector<Explanation::Candidate>& all = explanation.buckets.back().candidates;
  const auto own = std::ranges::find(all, kernel, &Explanation::Candidate::kernel);
  if (own == all.end() || !own->accepted) return false;
  double best = own->cost_us;
  for (const Explanation::Candidate& other : all)
    if (other.accepted) best = std::min(best, other.cost_us);
  const auto info = kernel_info(kernel);
  const double hopeless = info.ok() && info->backend == Backend::cuda && info->isa != Isa::simt ? 8 : 4;
  return own->cost_us <= hopeless * best;
}

// The plans to measure: of a forced kernel, or of all that may be chosen.
std::vector<Planned> plan_all(const Prepared& prepared, const BenchWork& work, int threads, bool all_kernels, Status& refusal) {
  std::vector<Planned> planned;
  std::map<const void*, Explanation> explanations;  // by weight
  for (const Entry& entry : prepared.entries) {
    const PackedWeight& weight = entry.copies->front();
    if (all_kernels) {
      auto known = explanations.find(&weight);
      if (known == explanations.end()) {
        const auto open = work.plan(weight, {.threads = threads});
        known = explanations.emplace(&weight, open.ok() ? open->explain() : Explanation{}).first;
        if (!open.ok()) refusal = open.status();
      }
      if (known->second.buckets.empty() || !may_be_chosen(known->second, entry.kernel)) continue;
    }
    auto plan = work.plan(weight, {.kernel = entry.kernel, .threads = threads});
    if (plan.ok())
      planned.push_back({&entry, *std::move(plan)});
    else
      refusal = plan.status();
  }
  return planned;
}

// The least time of a product of dense matrices.
double dense_us(DType type, const BenchWork& work, double gbytes_per_s, const Roofline& roofline) {
  const double bytes = bits(type) / 8.0 * static_cast<double>(work.n * work.k + work.m * work.k + work.m * work.n);
  const double operations = 2 * static_cast<double>(work.m) * static_cast<double>(work.n * work.k);
  const Ceiling peak = type == DType::s8     ? Ceiling::int8
                       : type == DType::bf16 ? Ceiling::bf16
                       : type == DType::f16  ? Ceiling::f16
                                             : Ceiling::f32;
  const double gops = roofline[peak] > 0 ? roofline[peak] : roofline.f16_gflops;  // of a GPU that of f16 is measured
  return std::max(bytes / (gbytes_per_s * 1e3), gops > 0 ? operations / (gops * 1e3) : 0.0);
}

// One cell: plans, contestants, times, results.
Result<std::vector<BenchResult>> bench_work(const Prepared& prepared, const BenchWork& work, const BenchSpec& spec,
                                            BenchMachine& machine) {
  const BenchCase& layer = prepared.layer;
  std::vector<Contestant> contestants;
  struct Source {
    const PackedWeight* weight;  // null: of an operator
    std::string layout;
    double bytes;
  };
  std::vector<Source> sources;  // of nibble's contestants
  Status refusal;
  for (const Planned& planned : plan_all(prepared, work, machine.executor().threads(), spec.all_kernels, refusal)) {
    auto contestant = machine.contestant(planned.plan, planned.entry->copies, work);
    if (!contestant.ok()) return contestant.status();
    contestants.push_back(*std::move(contestant));
    const PackedWeight& weight = planned.entry->copies->front();
    sources.push_back({&weight, std::string(weight.layout()), static_cast<double>(weight.bytes().size())});
  }
  if (work.operation != Operation::linear) {
    auto operators = machine.operators(prepared.weight, work);
    if (!operators.ok()) return operators.status();
    for (Operator& each : *operators) {
      contestants.push_back(std::move(each.contestant));
      sources.push_back({nullptr, each.layout, each.bytes});
    }
  }
  if (contestants.empty()) return refusal;
  if (prepared.baseline) {
    auto others = prepared.baseline->contestants(work);
    if (!others.ok()) return others.status();
    for (Contestant& other : *others) contestants.push_back(std::move(other));
  }

  Probes probes{.peak = machine.peak_for(work.a_dtype, layer.act_scheme)};
  const auto timings = time_beside_probes(contestants, spec, machine, probes);
  if (!timings.ok()) return timings.status();

  const std::string planned = planned_kernel(prepared, work, machine.executor().threads());
  std::vector<BenchResult> results;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const Source& source = sources[i];
    BenchResult& result = results.emplace_back();
    result.name = layer.name;
    result.modules = layer.modules;
    result.m = work.rows(), result.n = work.n, result.k = work.k;
    result.conv = layer.conv, result.batch = layer.conv ? work.m : 1;
    result.scheme = Scheme{prepared.weight.scheme, layer.act_scheme}.name();
    result.a_dtype = name(work.a_dtype);
    result.d_dtype = name(work.out());
    result.kernel = contestants[i].name;
    result.backend = source.weight == nullptr ? name(machine.backend()) : backend_of(result.kernel);
    result.layout = source.layout;
    result.calls = work.calls;
    result.operation = work.operation;
    result.transposed = work.transposed;
    result.glu = work.glu;
    result.norm = work.norm;
    result.prescale = !prepared.weight.prescale.empty();
    result.chosen = !spec.all_kernels || result.kernel == planned;
    derive(result, (*timings)[i], probes, bytes_of(work, source.bytes), operations_of(work));
    if (source.weight != nullptr) result.predicted_us = predicted_us(*source.weight, work, result, machine);
    for (std::size_t b = sources.size(); b < contestants.size(); ++b) {
      const Contestant& other = contestants[b];
      std::string why = doubt((*timings)[b], dense_us(other.dense, work, median(probes.gbytes_per_s), machine.roofline()));
      if (why.empty())
        result.baselines[other.name] = (*timings)[b].median_us;
      else
        result.doubted[other.name] = std::move(why);
    }
  }
  return results;
}

constexpr std::string_view kCalls[] = {"back-to-back", "isolated", "chain"};   // in the order of Calls
constexpr std::string_view kRoutings[] = {"uniform", "zipf", "hot", "empty"};  // of Routing

}  // namespace

std::string_view name(Calls calls) { return kCalls[static_cast<std::size_t>(calls)]; }

Calls parse_calls(std::string_view text) { return static_cast<Calls>(std::ranges::find(kCalls, text) - std::begin(kCalls)); }

std::vector<std::string> calls_names() { return {std::begin(kCalls), std::end(kCalls)}; }

std::string_view name(Routing routing) { return kRoutings[static_cast<std::size_t>(routing)]; }

Routing parse_routing(std::string_view text) {
  return static_cast<Routing>(std::ranges::find(kRoutings, text) - std::begin(kRoutings));
}

std::vector<std::string> routing_names() { return {std::begin(kRoutings), std::end(kRoutings)}; }

std::string_view name(Operation operation) {
  switch (operation) {
    case Operation::dequantize: return "dequantize";
    case Operation::quantize: return "quantize";
    default: return "linear";
  }
}

DType BenchWork::out() const {
  if (operation == Operation::quantize) return act_scheme.codes;
  return d_dtype != DType::none ? d_dtype : a_dtype == DType::e4m3 ? DType::bf16 : a_dtype;
}

LinearSpec BenchWork::linear() const {
  const bool codes = out() == DType::s8 || out() == DType::u8;
  return {.a_dtype = a_dtype,
          .m_max = m,
          .epilogue = {.bias = bias && out() != DType::s32,
                       .activation = glu ? Activation::silu : Activation::none,
                       .glu = glu,
                       .out = out(),
                       .out_scale = codes ? kOutScale : 1.0f},
          .act_scheme = act_scheme,
          .accumulation = accumulation,
          .norm = {.kind = norm, .add = norm != Norm::none}};
}

ConvSpec BenchWork::convolution() const {
  return {.geometry = conv->geometry,
          .input = conv->input,
          .output = conv->output,
          .a_dtype = a_dtype,
          .batch_max = m,
          .epilogue = linear().epilogue,
          .act_scheme = act_scheme,
          .accumulation = accumulation};
}

Result<PackedWeight> BenchWork::pack(const QuantTensor& q, const PackOptions& options) const {
  return conv ? nibble::pack(q, convolution(), options) : nibble::pack(q, linear(), options);
}

Result<Plan> BenchWork::plan(const PackedWeight& weight, const PlanOptions& options) const {
  if (operation == Operation::dequantize) return Plan::dequantize(weight, {.out = out(), .transposed = transposed}, options);
  return conv ? Plan::conv(weight, convolution(), options) : Plan::linear(weight, linear(), options);
}

std::int64_t BenchWork::rows() const { return conv ? m * conv->geometry.out_height() * conv->geometry.out_width() : m; }

std::int64_t BenchWork::d_elements() const {
  return operation == Operation::dequantize ? n * k : operation == Operation::quantize ? m * k : rows() * (glu ? n / 2 : n);
}

std::size_t BenchWork::d_copies(std::uint64_t cold_bytes) const {
  if (operation == Operation::linear) return 1;
  const auto bytes = static_cast<std::uint64_t>(d_elements() * bits(out()) / 8);
  return copies_in(cold_bytes, bytes);
}

std::int64_t BenchWork::a_elements() const {
  if (operation == Operation::dequantize) return 0;
  return conv ? m * conv->geometry.in_channels * conv->geometry.height * conv->geometry.width : m * k;
}

namespace {

// Strides of a dense image [B,C,H,W].
template <class View>
View laid_out(View view, ImageLayout layout) {
  const std::int64_t c = view.dim(1), h = view.dim(2), w = view.dim(3);
  if (layout == ImageLayout::nhwc) view.strides = {c * h * w, 1, w * c, c};
  return view;
}

}  // namespace

ConstTensorView BenchWork::a(const void* data) const {
  if (operation == Operation::dequantize) return {};
  if (!conv) return {data, a_dtype, {m, k}};
  const ConvGeometry& g = conv->geometry;
  return laid_out(ConstTensorView(data, a_dtype, {m, g.in_channels, g.height, g.width}), conv->input);
}

TensorView BenchWork::d(void* data) const {
  if (operation == Operation::dequantize) return transposed ? TensorView(data, out(), {k, n}) : TensorView(data, out(), {n, k});
  if (!conv) return {data, out(), {m, glu ? n / 2 : n}};
  const ConvGeometry& g = conv->geometry;
  return laid_out(TensorView(data, out(), {m, g.out_channels, g.out_height(), g.out_width()}), conv->output);
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 != 0) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

std::size_t copies_in(std::uint64_t cold_bytes, std::uint64_t bytes) {
  return std::clamp<std::size_t>((cold_bytes + bytes - 1) / bytes, 1, kMaxCopies);
}

Result<Copies> copies_of(PackedWeight first, const std::function<Result<PackedWeight>()>& pack, std::uint64_t cold_bytes) {
  const std::size_t count = copies_in(cold_bytes, first.bytes().size());
  std::vector<PackedWeight> copies = {std::move(first)};
  while (copies.size() < count) {
    auto packed = pack();
    if (!packed.ok()) return packed.status();
    copies.push_back(*std::move(packed));
  }
  return std::make_shared<const std::vector<PackedWeight>>(std::move(copies));
}

Result<std::vector<Timing>> time_beside_probes(std::span<const Contestant> contestants, const BenchSpec& spec,
                                               BenchMachine& machine, Probes& probes) {
  const double share = std::min(1.0, spec.min_seconds / kUsualSeconds);
  const TimingSpec timing{.min_seconds = spec.min_seconds, .rounds = spec.rounds, .sleeps = machine.backend() == Backend::cpu};
  return time_in_turns(contestants, timing, [&]() -> Status {
    const auto read = machine.probe(Ceiling::read, share), peak = machine.probe(probes.peak, share);
    if (!read.ok()) return read.status();
    if (!peak.ok()) return peak.status();
    probes.gbytes_per_s.push_back(*read);
    probes.gops.push_back(*peak);
    return {};
  });
}

void derive(BenchResult& result, const Timing& timing, const Probes& probes, double bytes, double operations) {
  result.median_us = timing.median_us;
  result.samples = timing.samples;
  result.gbytes_per_s = bytes / (result.median_us * 1e3);
  result.gflops = operations / (result.median_us * 1e3);
  std::vector<double> memory, compute;
  for (std::size_t round = 0; round < timing.round_us.size(); ++round) {
    memory.push_back(100 * bytes / (probes.gbytes_per_s[round] * 1e3) / timing.round_us[round]);
    const double gops = probes.gops[round];
    compute.push_back(gops > 0 ? 100 * operations / (gops * 1e3) / timing.round_us[round] : 0);
    result.round_percents.push_back(std::max(memory.back(), compute.back()));
  }
  result.peak = probes.peak;
  result.ceiling_gbytes_per_s = median(probes.gbytes_per_s);
  result.ceiling_gops = median(probes.gops);
  result.memory_percent = median(memory);
  result.compute_percent = median(compute);
  result.memory_bound = result.memory_percent >= result.compute_percent;
  result.roofline_percent = median(result.round_percents);
}

Tensor activations(DType dtype, std::int64_t m, std::int64_t k) {
  Tensor a(dtype, {m, k});
  constexpr std::int64_t kBlock = 1'000'003;  // numbers, which repeat: a prime, so that rows differ
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const std::int64_t count = m * k, drawn = std::min(count, kBlock);
  for (std::int64_t i = 0; i < drawn; ++i) a.set(i, normal(random));
  const std::size_t width = static_cast<std::size_t>(bits(dtype)) / 8;
  for (std::int64_t done = drawn; done < count; done += kBlock)
    std::copy_n(a.bytes.data(), static_cast<std::size_t>(std::min(kBlock, count - done)) * width,
                a.bytes.data() + static_cast<std::size_t>(done) * width);
  return a;
}

double value_at(const ConstTensorView& v, std::int64_t row, std::int64_t column) {
  const std::int64_t i = row * v.stride(0) + column;
  if (v.dtype == DType::f32) return static_cast<const float*>(v.data)[i];
  return v.dtype == DType::f16 ? to_f32(static_cast<const f16*>(v.data)[i]) : to_f32(static_cast<const bf16*>(v.data)[i]);
}

namespace {

// Of the tensor's type and shape.
ConstTensorView view(const Tensor& t, const void* data) {
  return t.shape.size() == 1 ? ConstTensorView(data, t.dtype, {t.shape[0]})
                             : ConstTensorView(data, t.dtype, {t.shape[0], t.shape[1]});
}

}  // namespace

Result<BenchActs> activations_for(const BenchWork& work) {
  if (work.operation == Operation::dequantize) return BenchActs();
  if (is_compute_float(work.a_dtype)) {
    BenchActs acts{activations(work.a_dtype, 1, work.a_elements()), {}, {}, {}};
    if (work.norm != Norm::none) acts.norm = activations(work.a_dtype, 1, (2 * work.m + 1) * work.k);
    return acts;
  }
  const Tensor floats = activations(DType::f32, 1, work.a_elements());
  const GroupShape& group = work.act_scheme.group;
  const std::int64_t tokens = group == GroupShape::tensor() ? 1 : work.m;
  const std::vector<std::int64_t> shape =
      group.k > 0 ? std::vector{tokens, (work.k + group.k - 1) / group.k} : std::vector{tokens};
  BenchActs acts{Tensor(work.a_dtype, floats.shape), Tensor(DType::f32, shape), {}, {}};
  const StaticActs known{kCodeScale, 0};
  const bool as_u8 = work.a_dtype == DType::u8;  // 128 more than s8 codes
  const DType codes = as_u8 ? DType::s8 : work.a_dtype;
  const Status quantized =
      quantize_activations(view(floats, floats.bytes.data()), {codes, GroupShape::tensor()},
                           {.codes = TensorView(acts.a.bytes.data(), codes, {1, work.a_elements()})}, {.known = known});
  if (!quantized.ok()) return quantized;
  if (as_u8)
    for (std::byte& code : acts.a.bytes) code ^= std::byte{0x80};
  for (std::int64_t i = 0; i < acts.scales.numel(); ++i) acts.scales.set(i, kCodeScale);
  if (work.act_scheme.zero == ZeroKind::offset) {
    acts.zeros = Tensor(DType::f32, shape);
    std::fill_n(acts.zeros.as<float>(), acts.zeros.numel(), 0.5f);
  } else if (work.act_scheme.zero != ZeroKind::none) {
    acts.zeros = Tensor(DType::s32, shape);
    std::fill_n(acts.zeros.as<std::int32_t>(), acts.zeros.numel(), as_u8 ? 139 : 11);
  }
  return acts;
}

Operands operands_of(const BenchWork& work, const BenchActs& acts, const void* scales, const void* zeros, void* norm) {
  // Of groups those of all tokens are side by side, as engines that multiply FP8 in groups lay them out.
  const auto side_by_side = [](const Tensor& values, const void* data) {
    ConstTensorView all = view(values, data);
    if (all.rank == 2) all.strides = {1, all.dim(0)};
    return all;
  };
  Operands operands;
  if (!acts.scales.empty()) operands.a_scale = side_by_side(acts.scales, scales);
  if (!acts.zeros.empty()) operands.a_zero = side_by_side(acts.zeros, zeros);
  if (!acts.norm.empty()) {
    const auto at = [&](std::int64_t row) { return static_cast<std::byte*>(norm) + row * work.k * bits(work.a_dtype) / 8; };
    operands.norm_weight = ConstTensorView(at(0), work.a_dtype, {work.k});
    operands.norm_add = ConstTensorView(at(1), work.a_dtype, {work.m, work.k});
    operands.norm_sum = TensorView(at(1 + work.m), work.a_dtype, {work.m, work.k});
  }
  return operands;
}

QuantizerMemory::QuantizerMemory(const BenchWork& work) {
  const auto up = [](std::int64_t size) { return static_cast<std::size_t>((size + 255) / 256 * 256); };
  const std::int64_t of_groups = 4 * work.m * work.act_scheme.group.cols(work.k);
  codes = up(work.m * work.k * bits(work.a_dtype) / 8);
  scales = codes + up(work.m * work.k);
  zeros = scales + up(of_groups);
  bytes = zeros + up(of_groups);
  scale_bytes = work.act_scheme.group == GroupShape::tensor()
                    ? 0.0
                    : static_cast<double>(of_groups) * (work.act_scheme.zero == ZeroKind::none ? 1 : 2);
}

Result<std::vector<Timing>> time_in_turns(std::span<const Contestant> contestants, const TimingSpec& spec,
                                          const std::function<Status()>& each_round) {
  std::vector<std::vector<double>> samples(contestants.size());
  std::vector<Timing> timings(contestants.size());
  std::vector<std::size_t> order(contestants.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937 random(1);
  for (int round = 0; round < spec.rounds; ++round) {
    if (Status looked = each_round ? each_round() : Status(); !looked.ok()) return looked;
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t c : order) {
      const auto run = [&] {
        auto seconds = contestants[c].run();
        return seconds.ok() ? std::move(seconds) : seconds.status().with_context(contestants[c].name);
      };
      // The threads of the previous contestant park, and one untimed run wakes up those of this one. For long runs waking up does not
      // matter, and only the first run, which touches new memory, is dropped.
      if (contestants.size() > 1 && spec.sleeps) std::this_thread::sleep_for(2ms);
      if (samples[c].empty() || samples[c].back() < 0.02) {
        if (auto warmed_up = run(); !warmed_up.ok()) return warmed_up.status();
      }
      std::vector<double> now;
      const auto start = Clock::now();
      do {
        const auto seconds = run();
        if (!seconds.ok()) return seconds.status();
        now.push_back(*seconds);
      } while (seconds_since(start) < spec.min_seconds / spec.rounds);
      samples[c].insert(samples[c].end(), now.begin(), now.end());
      timings[c].round_us.push_back(1e6 * median(std::move(now)));
    }
  }
  for (std::size_t c = 0; c < contestants.size(); ++c) {
    timings[c].samples = samples[c].size();
    timings[c].median_us = 1e6 * median(std::move(samples[c]));
  }
  return timings;
}

std::string doubt(const Timing& timing, double best_us) {
  constexpr double kLeastShare = 0.05, kCall = 50,
                   kSpread = 2;  // over the least time; µs of overhead of a call; between rounds
  if (timing.median_us > best_us / kLeastShare + kCall)
    return fmt::format(
        "took {:.0f} µs, {:.0f} times what its bytes and operations need: its threads were waiting, or do not scale",
        timing.median_us, timing.median_us / best_us);
  std::vector<double> rounds = timing.round_us;
  std::sort(rounds.begin(), rounds.end());
  if (rounds.size() < 4) return "";
  const double low = rounds[1], high = rounds[rounds.size() - 2];
  if (high <= kSpread * low + kCall) return "";
  return fmt::format("took from {:.0f} to {:.0f} µs in rounds of the same work: the machine is busy with something else", low,
                     high);
}

std::map<std::string, double>::const_iterator fastest_baseline(const BenchResult& result) {
  return std::min_element(result.baselines.begin(), result.baselines.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; });
}

std::optional<Regret> regret_of(std::span<const BenchResult> results) {
  struct Place {
    const BenchResult *chosen = nullptr, *best = nullptr;
  };
  std::map<std::string, Place> places;
  for (const BenchResult& r : results) {
    Place& place =
        places[fmt::format("{}\n{} {} {} {} {} {} {}", r.name, r.m, r.n, r.k, r.scheme, r.a_dtype, name(r.calls), r.prescale)];
    if (place.best == nullptr || r.median_us < place.best->median_us) place.best = &r;
    if (r.chosen) place.chosen = &r;
  }
  Regret regret;
  std::vector<double> ratios;
  for (const auto& [key, place] : places) {
    if (place.chosen == nullptr) continue;
    const double ratio = place.chosen->median_us / place.best->median_us;
    if (ratios.empty() || ratio > regret.worst) {
      regret.worst = ratio;
      regret.chosen = *place.chosen;
      regret.preferred = *place.best;
    }
    ratios.push_back(ratio);
  }
  if (ratios.empty()) return std::nullopt;
  regret.places = ratios.size();
  regret.median = median(std::move(ratios));
  return regret;
}

Misprediction misprediction_of(std::span<const BenchResult> results) {
  Misprediction found;
  std::vector<double> errors;
  for (const BenchResult& r : results) {
    if (!(r.predicted_us > 0)) continue;
    const double error = std::abs(r.predicted_us / r.median_us - 1);
    if (errors.empty() || error > found.worst) {
      found.worst = error;
      found.at = r;
    }
    errors.push_back(error);
  }
  if (!errors.empty()) found.median = median(std::move(errors));
  return found;
}

std::vector<bool> orders_of(Operation operation) {
  return operation == Operation::dequantize ? std::vector{false, true} : std::vector{false};
}

Result<LayerBench> bench_layer(const BenchCase& layer, const BenchSpec& spec, BenchMachine& machine,
                               const std::function<void(const std::string&)>& step) {
  const auto weight = layer.load();
  if (!weight.ok()) return weight.status().with_context(layer.name);
  if (spec.operation == Operation::quantize && layer.act_scheme.codes == DType::none)
    return Status(StatusCode::unsupported,
                  fmt::format("{}: its scheme does not quantize activations, as s8r_s8c does", layer.name));
  Prepared prepared{layer, *weight, {}, {}, {}};
  if (spec.operation != Operation::quantize) {
    step(fmt::format("{} packing", layer.name));
    auto entries = pack_for_all(layer, *weight, spec, machine);
    if (!entries.ok()) return entries.status().with_context(layer.name);
    prepared.entries = *std::move(entries);
  }
  if (spec.all_kernels) {
    auto packed = pack_case(layer, *weight, spec, pack_options("", machine));
    if (!packed.ok()) return packed.status().with_context(layer.name);
    prepared.by_default = *std::move(packed);
  }
  if (spec.baselines && spec.operation == Operation::linear &&
      !layer.conv) {  // a baseline of a convolution would be the product without its patches
    auto made = machine.baseline(*weight, prepared.by_default ? *prepared.by_default : prepared.entries.front().copies->front());
    if (!made.ok()) return made.status().with_context(layer.name);
    prepared.baseline = *std::move(made);
  }
  LayerBench bench;
  Status refusal;
  BenchWork work{.d_dtype = spec.d_dtype,
                 .n = weight->n,
                 .k = weight->k,
                 .act_scheme = layer.act_scheme,
                 .accumulation = spec.accumulation,
                 .bias = !weight->bias.empty(),
                 .conv = layer.conv,
                 .operation = spec.operation,
                 .glu = spec.glu,
                 .norm = spec.norm};
  for (DType act : spec.acts) {
    Status refused;
    for (std::int64_t m : layer.m)
      for (Calls calls : spec.calls)
        for (bool transposed : orders_of(spec.operation)) {
          step(fmt::format("{} {} M={}", layer.name, name(act), m));
          work.a_dtype = act, work.m = m, work.calls = calls, work.transposed = transposed;
          auto measured = bench_work(prepared, work, spec, machine);
          if (!measured.ok()) {
            if (measured.status().code() != StatusCode::unsupported) return measured.status().with_context(layer.name);
            refused = measured.status();
            continue;
          }
          for (BenchResult& result : *measured) bench.results.push_back(std::move(result));
        }
    if (refused.ok()) continue;
    refusal = refused.with_context(layer.name);
    bench.left_out.emplace_back(refused.with_context(fmt::format("{} × {}", layer.name, name(act))).message());
  }
  if (bench.results.empty() && !refusal.ok()) return refusal;
  return bench;
}

Result<LayerBench> bench_types(
    std::string_view what, const Scheme& scheme, std::span<const DType> types,
    const std::function<Status(DType type, const std::string& name, std::vector<BenchResult>& results)>& measure) {
  LayerBench bench;
  Status refusal;
  for (const DType type : types) {
    const std::string label = fmt::format("{} {} {}", what, scheme.name(), name(type));
    const Status refused = measure(type, label, bench.results);
    if (refused.ok()) continue;
    refusal = refused.with_context(label);
    if (refused.code() != StatusCode::unsupported) return refusal;
    bench.left_out.emplace_back(refusal.message());
  }
  if (bench.results.empty() && !refusal.ok()) return refusal;
  return bench;
}

}  // namespace nibble::cli
