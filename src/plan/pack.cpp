// Packing: chooses a layout and fills its bytes; explain() does the first without the second.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <span>
#include <utility>

#include "core/code_rows.hpp"
#include "core/error.hpp"
#include "core/weight_check.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "kernels/finish.hpp"
#include "layouts/layout.hpp"
#include "nibble/plan.hpp"
#include "plan/check.hpp"
#include "plan/choose.hpp"
#include "plan/pack.hpp"

namespace nibble {

std::vector<LayoutInfo> layouts() {
  std::vector<LayoutInfo> list;
  for (const Layout* layout : layout_table()) list.push_back({layout->name, layout->backend, layout->drawing});
  return list;
}

const WeightScheme& PackedWeight::scheme() const { return data_->scheme; }
std::int64_t PackedWeight::n() const { return data_->n; }
std::int64_t PackedWeight::k() const { return data_->k; }
Extent PackedWeight::filter() const { return data_->filter; }
std::string_view PackedWeight::layout() const { return data_->layout->name; }
Backend PackedWeight::backend() const { return data_->backend(); }
std::span<const std::byte> PackedWeight::bytes() const { return data_->bytes.span(); }
bool PackedWeight::has_bias() const { return !data_->bias.empty(); }
bool PackedWeight::act_order() const { return !data_->perm.empty(); }
bool PackedWeight::paired() const { return data_->paired; }

WeightDesc describe(const QuantTensor& q) {
  return {.scheme = q.scheme,
          .n = q.n,
          .k = q.k,
          .zero_type = q.zeros.dtype,
          .filter = q.filter,
          .act_order = !q.g_idx.empty(),
          .prescale = !q.prescale.empty(),
          .static_acts = q.static_acts};
}

WeightDesc PackedWeight::desc() const {
  return {.scheme = data_->scheme,
          .n = data_->n,
          .k = data_->k,
          .zero_type = data_->zero_type,
          .filter = data_->filter,
          .act_order = !data_->perm.empty(),
          .prescale = !data_->prescale.empty(),
          .static_acts = data_->static_acts};
}

std::size_t channel_sums_length(const WeightScheme& scheme, std::int64_t n) {
  constexpr std::int64_t kRowBlock = 32;  // the longest of the CPU's layouts
  const bool integers =
      info(scheme.codes).kind != DTypeKind::floating && (scheme.zero == ZeroKind::none || scheme.zero == ZeroKind::integer);
  return scheme.group.k == 0 && integers ? static_cast<std::size_t>((n + kRowBlock - 1) / kRowBlock * kRowBlock) : 0;
}

namespace {

/// The sum of bytes of which each has been XORed with `flip`.
std::int64_t sum_bytes(const std::uint8_t* bytes, std::int64_t count, std::uint8_t flip) {
  constexpr std::int64_t kRun = 1 << 12;  // whose sum is in 32 bits
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < count; i += kRun) {
    std::uint32_t of_run = 0;
    for (std::int64_t j = i; j < std::min(count, i + kRun); ++j) of_run += static_cast<std::uint8_t>(bytes[j] ^ flip);
    sum += of_run;
  }
  return sum;
}

/// The sum of codes that lie in pairs.
std::int64_t sum_pairs(const std::uint8_t* pairs, std::int64_t count) {
  std::int64_t sum = count % 2 == 0 ? 0 : pairs[count / 2] & 15;
  for (std::int64_t i = 0; i < count / 2; ++i) sum += (pairs[i] & 15) + (pairs[i] >> 4);
  return sum;
}

/// Adds the codes that are there to the sums of their rows. Bands of the same rows may be added at the same time: sums of whole numbers are
/// exact in any order.
void sum_channels(const QuantTensor& q, const CodeRows& codes, std::span<double> sums) {
  const bool zeros = q.scheme.zero == ZeroKind::integer;
  const std::uint8_t flip = q.scheme.codes == DType::s8 ? 0x80 : 0;
  const auto channels = static_cast<double>(codes.channels()), bias = static_cast<double>(code_bias(q.scheme.codes));
  for (std::int64_t n = codes.begin; n < codes.end; ++n) {
    const std::uint8_t* const row = codes.row(n);
    const std::int64_t sum = codes.pairs ? sum_pairs(row, codes.channels()) : sum_bytes(row, codes.channels(), flip);
    const double zero = zeros ? static_cast<double>(q.zeros.at(q.scheme.group.n == 0 ? 0 : n / q.scheme.group.n)) : 0.0;
    const std::atomic_ref total(sums[static_cast<std::size_t>(n)]);
    total.fetch_add(static_cast<double>(sum) - (bias + zero) * channels, std::memory_order_relaxed);
  }
}

}  // namespace

std::vector<double> channel_sums(const QuantTensor& q, Executor& executor) {
  std::vector<double> sums(channel_sums_length(q.scheme, q.n));
  if (sums.empty()) return sums;
  const CodesOf codes(q);
  executor.parallel_for(q.n, [&](std::int64_t n) {
    std::vector<std::uint8_t> unused;
    sum_channels(q, *codes.read(n, n + 1, unused), sums);
  });
  return sums;
}

namespace {

/// The threads that pack, and whose number the costs assume.
Executor& executor_of(const PackOptions& options) { return options.executor != nullptr ? *options.executor : default_executor(); }

/// The level of a described CPU.
std::optional<Isa> level_of(const Machine* machine) {
  return machine == nullptr || machine->gpu != nullptr ? std::nullopt : std::optional(machine->cpu);
}

/// Puts the problem on the machine; null: this one.
void place(Problem& problem, const Machine* machine) {
  problem.gpu = machine == nullptr ? nullptr : machine->gpu;
  problem.cpu = level_of(machine);
}

/// Where a weight is for it.
Backend memory_of(const Machine& machine) { return machine.gpu != nullptr ? Backend::cuda : Backend::cpu; }

Status check_machine(const Machine& machine) {
  if (machine.gpu != nullptr || backend(machine.cpu) == Backend::cpu) return {};
  return error(StatusCode::invalid_argument, "{} is a level of GPUs; describe a GPU by its GpuInfo", name(machine.cpu));
}

/// The target of packing for the plans that `spec` specifies.
/// on: the machine to pack for; null: this one.
Result<Packing> packing_for(const WeightDesc& weight, const LinearSpec& spec, const PackOptions& options,
                            const Roofline& roofline, const Machine* on = nullptr) {
  NIBBLE_ASSIGN_OR_RETURN(Problem problem, problem_of(weight, spec, roofline));
  place(problem, on);
  return choose_packing(problem, spec.m_max, options);
}
Result<Packing> packing_for(const WeightDesc& weight, const ConvSpec& spec, const PackOptions& options, const Roofline& roofline,
                            const Machine* on = nullptr) {
  NIBBLE_ASSIGN_OR_RETURN(Problem problem, problem_of(weight, spec, roofline));
  place(problem, on);
  if (const auto linear = as_linear(spec); linear && !forces_conv(options.kernel))
    return packing_for(weight, *linear, options, roofline, on);
  return choose_packing(problem, spec.batch_max, options);
}

/// The GPU's kernels read e4m3 codes of gpu_n64k128 as finite numbers.
Status check_finite(const QuantTensor& q, const CodeRows& codes, const Layout& layout) {
  if (q.scheme.codes != DType::e4m3 || &layout != &kGpuTileLayout) return {};
  for (std::int64_t n = codes.begin; n < codes.end; ++n) {
    const std::span row(codes.row(n), static_cast<std::size_t>(codes.channels()));
    const auto nan = std::ranges::find_if(row, [](std::uint8_t code) { return (code & 0x7f) == 0x7f; });
    if (nan != row.end())
      return error(StatusCode::invalid_argument, "W[{},{}] is NaN (code {:#04x}), and layout {} holds finite e4m3 codes only", n,
                   codes.k_begin + (nan - row.begin()), *nan, layout.name);
  }
  return {};
}

/// Blocks that the source has cheaply, and the layout takes.
std::int64_t block_of(const CodeSource& codes, const Layout& layout) {
  return codes.in_bands() ? codes.block() : std::max<std::int64_t>(codes.block(), layout.rows);
}

/// The memory of the tasks of a loop: as many buffers as have run at the same time.
class Scratch {
 public:
  std::vector<std::uint8_t> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return {};
    std::vector<std::uint8_t> buffer = std::move(free_.back());
    free_.pop_back();
    return buffer;
  }
  void give(std::vector<std::uint8_t> buffer) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(buffer));
  }

 private:
  std::mutex mutex_;
  std::vector<std::vector<std::uint8_t>> free_;
};

/// The failure of the first block that failed.
class FirstFailure {
 public:
  void add(std::int64_t block, Status status) {
    if (status.ok()) return;
    const std::lock_guard lock(mutex_);
    if (status_.ok() || block < block_) status_ = std::move(status), block_ = block;
  }
  const Status& status() const { return status_; }

 private:
  std::mutex mutex_;
  Status status_;
  std::int64_t block_ = 0;
};

/// Calls use(rows) for all codes, in blocks of so many rows, or channels of bands.
template <class Use>
Status for_each_block(const QuantTensor& q, const CodeSource& codes, std::int64_t block, Executor& executor, Use use) {
  const std::int64_t length = codes.in_bands() ? q.k : q.n;
  Scratch scratch;
  FirstFailure failure;
  executor.parallel_for((length + block - 1) / block, [&](std::int64_t i) {
    std::vector<std::uint8_t> memory = scratch.take();
    const Result<CodeRows> read = codes.read(i * block, std::min(length, (i + 1) * block), memory);
    failure.add(i, read.ok() ? use(*read) : read.status());
    scratch.give(std::move(memory));
  });
  return failure.status();
}

/// All codes, as QuantTensor::codes has them, of a source that decodes them; not of a dense weight.
Result<Buffer> decode_all(const QuantTensor& q, const CodeSource& codes, const Layout& layout, Executor& executor) {
  Buffer all(static_cast<std::size_t>(q.n * q.k));
  auto* const to = reinterpret_cast<std::uint8_t*>(all.data());
  const auto copy_rows = [&](const CodeRows& rows) -> Status {
    NIBBLE_RETURN_IF_ERROR(check_finite(q, rows, layout));
    for (std::int64_t n = rows.begin; n < rows.end; ++n) rows.copy_row(n, 1, to + n * q.k + rows.k_begin);
    return {};
  };
  const std::int64_t block = codes.in_bands() ? whole_lines(codes.block()) : codes.block();
  NIBBLE_RETURN_IF_ERROR(for_each_block(q, codes, block, executor, copy_rows));
  return all;
}

/// Arranges gpu_n64k128 on the GPU, which takes all codes at once: where they lie, or in an array of them.
Status pack_on_gpu(const QuantTensor& q, const CodeSource& codes, PackedWeightData& packed, Executor& executor) {
  CodeRows every{.end = q.n, .k_end = q.k, .data = q.codes.data(), .pitch = q.k};
  Buffer all;
  if (q.codes.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(all, decode_all(q, codes, kGpuTileLayout, executor));
    every.data = reinterpret_cast<const std::uint8_t*>(all.data());
  } else {
    NIBBLE_RETURN_IF_ERROR(for_each_block(q, codes, block_of(codes, kGpuTileLayout), executor,
                                          [&](const CodeRows& rows) { return check_finite(q, rows, kGpuTileLayout); }));
  }
  return cuda::pack(q, every, packed);
}

/// Fills packed.bytes, and the sums of channels if there are any.
Status pack_on_host(const QuantTensor& q, const CodeSource& codes, PackedWeightData& packed, Executor& executor) {
  const Layout& layout = *packed.layout;
  const auto pack_rows = [&](const CodeRows& rows) -> Status {
    NIBBLE_RETURN_IF_ERROR(check_finite(q, rows, layout));
    layout.pack(q, rows, packed);
    if (!packed.channel_sums.empty()) sum_channels(q, rows, packed.channel_sums);
    return {};
  };
  if (!codes.in_bands() || fits_bands(layout, packed))
    return for_each_block(q, codes, block_of(codes, layout), executor, pack_rows);
  NIBBLE_ASSIGN_OR_RETURN(const Buffer all, decode_all(q, codes, layout, executor));
  const CodesOf rows(q, reinterpret_cast<const std::uint8_t*>(all.data()));
  return for_each_block(q, rows, block_of(rows, layout), executor, pack_rows);
}

/// Parameters [rows, columns] of the first element of a filter, for so many elements: a copy for each.
Tensor repeat_columns(const Tensor& t, std::int64_t elements) {
  if (t.empty()) return {};
  const std::size_t row_bytes = t.bytes.size() / static_cast<std::size_t>(t.shape[0]);
  Tensor all(t.dtype, {t.shape[0], elements * t.shape[1]});
  std::byte* to = all.bytes.data();
  for (std::size_t row = 0; row < t.bytes.size(); row += row_bytes)
    for (std::int64_t i = 0; i < elements; ++i) to = std::copy_n(t.bytes.data() + row, row_bytes, to);
  return all;
}

/// The inverse: the parameters of the first of so many elements.
Tensor first_columns(const Tensor& t, std::int64_t elements) {
  if (t.empty()) return {};
  Tensor first(t.dtype, {t.shape[0], t.shape[1] / elements});
  const std::size_t row_bytes = first.bytes.size() / static_cast<std::size_t>(t.shape[0]);
  for (std::size_t row = 0; row < first.bytes.size(); row += row_bytes)
    std::copy_n(t.bytes.data() + row * static_cast<std::size_t>(elements), row_bytes, first.bytes.data() + row);
  return first;
}

/// A weight whose parameters all elements of the filter share, without its codes, as layouts have it: groups are runs of K, each with
/// parameters of its own. A record holds codes and parameters together, so that a kernel reads both from one place.
QuantTensor with_runs(const QuantTensor& q) {
  QuantTensor runs = q;
  runs.codes.clear();
  runs.scheme.group.all_elements = false;
  runs.scales = repeat_columns(q.scales, q.filter.h * q.filter.w);
  runs.zeros = repeat_columns(q.zeros, q.filter.h * q.filter.w);
  return runs;
}

/// `given` without its codes, which are those of `codes`.
Result<PackedWeight> pack_in(const QuantTensor& given, const CodeSource& codes, bool paired, const PackedWeight::Spec& spec,
                             const Packing& packing, const PackOptions& options) {
  const bool all_elements = given.scheme.group.all_elements;
  const QuantTensor runs = all_elements ? with_runs(given) : QuantTensor();
  const QuantTensor& q = all_elements ? runs : given;
  const DType zero_type = q.zeros.dtype;
  const Layout* layout = packing.layout;
  auto packed = std::make_shared<PackedWeightData>();
  packed->layout = layout;
  packed->scheme = given.scheme;
  packed->n = q.n;
  packed->k = q.k;
  packed->filter = q.filter;
  packed->zero_type = zero_type;
  packed->scale2 = q.scale2;
  packed->prescale = q.prescale;
  if (!q.prescale.empty())
    for (std::int64_t k = 0; k < q.k; ++k) packed->prescale_f32.push_back(q.prescale.at(k));
  packed->bias = q.bias;
  packed->static_acts = q.static_acts;
  packed->act_limit = q.act_limit;
  packed->paired = paired;
  if (!q.g_idx.empty()) {  // stable, so that unpack can restore g_idx
    packed->perm.resize(static_cast<std::size_t>(q.k));
    std::iota(packed->perm.begin(), packed->perm.end(), 0);
    std::ranges::stable_sort(packed->perm, {}, [&](std::int32_t k) { return q.g_idx[static_cast<std::size_t>(k)]; });
  }
  Executor& executor = executor_of(options);
  try {
    if (packing.memory == Backend::cuda && layout == &kGpuTileLayout) {
      NIBBLE_RETURN_IF_ERROR(pack_on_gpu(q, codes, *packed, executor));
      return PackedWeight(std::move(packed), spec);
    }
    packed->bytes = Buffer(layout->size(q.scheme, zero_type, q.n, q.k));
    if (packing.memory == Backend::cpu) packed->channel_sums.resize(channel_sums_length(q.scheme, q.n));
    NIBBLE_RETURN_IF_ERROR(pack_on_host(q, codes, *packed, executor));
    if (packing.memory == Backend::cuda) NIBBLE_RETURN_IF_ERROR(cuda::move_to_device(*packed));
  } catch (const std::bad_alloc&) {
    return error(StatusCode::io_error, "no memory for the {} bytes of W[{},{}] packed as {}",
                 layout->size(q.scheme, zero_type, q.n, q.k), q.n, q.k, layout->name);
  }
  return PackedWeight(std::move(packed), spec);
}

/// Whether a weight for this specification has its rows in pairs.
bool packs_pairs(const PackedWeight::Spec& spec, const WeightScheme& scheme) {
  const auto* const linear = std::get_if<LinearSpec>(&spec);
  return linear != nullptr && pairs_rows(linear->epilogue, scheme);
}

template <class Spec>
Result<PackedWeight> pack_for(const QuantTensor& q, const Spec& spec, const PackOptions& options) try {
  NIBBLE_RETURN_IF_ERROR(q.validate());
  NIBBLE_ASSIGN_OR_RETURN(const Packing packing, choose_packing(describe(q), spec, options));
  if (!packs_pairs(spec, q.scheme)) return pack_in(q, CodesOf(q), false, spec, packing, options);
  const QuantTensor pairs = with_paired_rows(q);
  return pack_in(pairs, CodesOf(pairs), true, spec, packing, options);
} catch (...) {
  return caught();
}

/// Judges candidates that read another layout as if the weight were packed for it.
void judge_others(Explanation::Bucket& bucket, Problem problem, std::string_view chosen, bool allow_reference) {
  problem.m = bucket.m_high;
  for (Explanation::Candidate& candidate : bucket.candidates) {
    const Kernel& kernel = *find_kernel(candidate.kernel);
    const Layout* const layout = find_layout(kernel.layout);
    if (candidate.accepted || layout == nullptr || kernel.layout == chosen || layout->backend != problem.memory) continue;
    problem.layout = kernel.layout;
    const std::string reason = refusal(*layout, problem.scheme, problem.zero_type, problem.k);
    candidate = reason.empty() ? judge(kernel, problem, {}, allow_reference)
                               : Explanation::Candidate{.kernel = kernel.name,
                                                        .refusal = fmt::format("layout {}: {}", layout->name, reason)};
  }
}

template <class Spec>
Result<Explanation> explain_for(const WeightDesc& weight, const Spec& spec, std::int64_t m_max, Op op, const PackOptions& packing,
                                const PlanOptions& options, const Machine* on = nullptr) try {
  NIBBLE_RETURN_IF_ERROR(check_options(options));
  NIBBLE_ASSIGN_OR_RETURN(const std::string_view forced, forced_kernel(options.kernel, op));
  const Roofline roofline = machine_for(options, level_of(on));
  NIBBLE_ASSIGN_OR_RETURN(const Packing packed, packing_for(weight, spec, packing, roofline, on));
  NIBBLE_ASSIGN_OR_RETURN(Problem problem, problem_of(weight, spec, roofline));
  place(problem, on);
  problem.layout = packed.layout->name;
  problem.memory = packed.memory;
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<Bucket> buckets, choose_buckets(problem, m_max, forced, options.allow_reference));
  Explanation explanation = explanation_of(buckets, problem, forced, options.allow_reference);
  if (forced.empty() && packing.layout.empty() && packing.kernel.empty())
    for (Explanation::Bucket& bucket : explanation.buckets)
      judge_others(bucket, problem, packed.layout->name, options.allow_reference);
  return explanation;
} catch (...) {
  return caught();
}

}  // namespace

Result<Packing> choose_packing(const WeightDesc& weight, const PackedWeight::Spec& spec, const PackOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_environment());
  const Roofline roofline = assumed_roofline(executor_of(options).threads());
  return std::visit([&](const auto& s) { return packing_for(weight, s, options, roofline); }, spec);
}

Result<PackedWeight> pack_codes(const QuantTensor& q, const CodeSource& codes, const PackedWeight::Spec& spec,
                                const PackOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_but_codes(q));
  NIBBLE_ASSIGN_OR_RETURN(const Packing packing, choose_packing(describe(q), spec, options));
  return pack_in(q, codes, false, spec, packing, options);
}

Result<PackedWeight> pack(const QuantTensor& q, const LinearSpec& spec, const PackOptions& options) {
  return pack_for(q, spec, options);
}

Result<PackedWeight> pack(const QuantTensor& q, const ConvSpec& spec, const PackOptions& options) {
  return pack_for(q, spec, options);
}

Result<PackedWeight> pack(const QuantTensor& q, const PackOptions& options) {
  constexpr std::int64_t kTokens = std::int64_t{1} << 13;
  return pack_for(q, LinearSpec{.m_max = kTokens}, options);
}

Result<Explanation> explain(const WeightDesc& weight, const LinearSpec& spec, const PackOptions& packing,
                            const PlanOptions& options) {
  return explain_for(weight, spec, spec.m_max, Op::linear, packing, options);
}

Result<Explanation> explain(const WeightDesc& weight, const ConvSpec& spec, const PackOptions& packing,
                            const PlanOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_spec(weight, spec));
  if (const auto linear = as_linear(spec); linear && !forces_conv(options.kernel))
    return explain(weight, *linear, packing, options);
  return explain_for(weight, spec, spec.batch_max, Op::conv, packing, options);
}

Result<Explanation> explain(const WeightDesc& weight, const LinearSpec& spec, const Machine& machine,
                            const PlanOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_machine(machine));
  return explain_for(weight, spec, spec.m_max, Op::linear, {.backend = memory_of(machine)}, options, &machine);
}

Result<Explanation> explain(const WeightDesc& weight, const ConvSpec& spec, const Machine& machine, const PlanOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_machine(machine));
  NIBBLE_RETURN_IF_ERROR(check_spec(weight, spec));
  if (const auto linear = as_linear(spec); linear && !forces_conv(options.kernel))
    return explain(weight, *linear, machine, options);
  return explain_for(weight, spec, spec.batch_max, Op::conv, {.backend = memory_of(machine)}, options, &machine);
}

Result<Explanation> explain(const WeightDesc& weight, const DequantizeSpec& spec, std::string_view layout, const Machine& machine,
                            const PlanOptions& options) try {
  NIBBLE_RETURN_IF_ERROR(check_machine(machine));
  NIBBLE_RETURN_IF_ERROR(check_options(options));
  NIBBLE_ASSIGN_OR_RETURN(const std::string_view forced, forced_kernel(options.kernel, Op::dequantize));
  const Roofline roofline = machine_for(options, level_of(&machine));
  NIBBLE_ASSIGN_OR_RETURN(Problem problem, problem_of(weight, spec, roofline));
  place(problem, &machine);
  NIBBLE_ASSIGN_OR_RETURN(const Packing packed,
                          choose_packing(problem, 1, {.layout = std::string(layout), .backend = memory_of(machine)}));
  problem.layout = packed.layout->name;
  problem.memory = packed.memory;
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<Bucket> buckets, choose_buckets(problem, 1, forced, options.allow_reference));
  return explanation_of(buckets, problem, forced, options.allow_reference);
} catch (...) {
  return caught();
}

Result<QuantTensor> unpack(const PackedWeight& weight) try {
  const PackedWeightData& packed = weight.data();
  QuantTensor q;
  q.scheme = packed.scheme;
  q.n = packed.n;
  q.k = packed.k;
  q.filter = packed.filter;
  q.scale2 = packed.scale2;
  q.prescale = packed.prescale;
  q.bias = packed.bias;
  q.static_acts = packed.static_acts;
  q.act_limit = packed.act_limit;
  q.codes.resize(static_cast<std::size_t>(q.n * q.k * code_bytes(q.scheme.codes)));
  const std::vector<std::int64_t> shape{q.scheme.group.rows(q.n), packed.groups()};
  if (!q.scheme.is_dense()) q.scales = Tensor(q.scheme.scale, shape);
  if (packed.zero_type != DType::none) q.zeros = Tensor(packed.zero_type, shape);
  if (!packed.perm.empty()) {
    q.g_idx.resize(static_cast<std::size_t>(q.k));
    for (std::int64_t i = 0; i < q.k; ++i)
      q.g_idx[static_cast<std::size_t>(packed.perm[static_cast<std::size_t>(i)])] =
          static_cast<std::int32_t>(i / packed.group_size());
  }
  if (packed.backend() == Backend::cuda) {
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeightData on_host, cuda::download(packed));
    packed.layout->unpack(on_host, q);
  } else {
    packed.layout->unpack(packed, q);
  }
  if (q.scheme.group.all_elements) {
    q.scales = first_columns(q.scales, q.filter.h * q.filter.w);
    q.zeros = first_columns(q.zeros, q.filter.h * q.filter.w);
  }
  if (packed.paired) unpair_rows(q);
  return q;
} catch (...) {
  return caught();
}

}  // namespace nibble
