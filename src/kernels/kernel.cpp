// Shared by all rows of the kernel table: names, the first checks of accepts(), the machine that costs assume.
#include "kernels/kernel.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/printable.hpp"
#include "kernels/norm.hpp"

namespace nibble {

KernelTable::KernelTable(std::initializer_list<std::span<const Kernel>> families) {
  for (const std::span<const Kernel> family : families) rows_.insert(rows_.end(), family.begin(), family.end());
  for (const Kernel& row : rows_) names_.push_back(kernel_name(row));
  for (std::size_t i = 0; i < rows_.size(); ++i) rows_[i].name = names_[i];
  for (Kernel& row : rows_) {
    if (row.op != Op::conv || row.form == ActForm::as_given) continue;
    Kernel linear = row;
    linear.op = Op::linear;
    if (const auto it = std::ranges::find(rows_, kernel_name(linear), &Kernel::name); it != rows_.end()) row.linear = &*it;
  }
}

const Kernel* find_kernel(std::string_view name) {
  const std::span<const Kernel> table = kernel_table();
  const auto it = std::ranges::find(table, name, &Kernel::name);
  return it == table.end() ? nullptr : &*it;
}

namespace {

Backend memory_of(const Kernel& kernel) { return kernel.backend == Backend::cuda ? Backend::cuda : Backend::cpu; }

bool reads_layout(const Kernel& self, const Problem& problem) {
  return problem.layout.empty() || self.layout.empty() || self.layout == problem.layout;
}

/// The same as reads_weight, with the reason.
Status accepts_weight(const Kernel& self, const Problem& problem) {
  if (!reads_layout(self, problem))
    return error(StatusCode::unsupported, "reads layout {}, the weight is packed as {}", self.layout, problem.layout);
  if (memory_of(self) == problem.memory) return {};
  return problem.memory == Backend::cpu
             ? error(StatusCode::unsupported, "runs on the GPU, the weight is in host memory; nibble::upload takes it there")
             : error(StatusCode::unsupported, "runs on the CPU, the weight is in device memory");
}

}  // namespace

bool reads_weight(const Kernel& self, const Problem& problem) {
  return memory_of(self) == problem.memory && reads_layout(self, problem);
}

Status accepts_form(const Kernel& self, const Problem& problem) {
  if (self.form != problem.form)
    return error(StatusCode::unsupported, "prepares {}, the kernel reads {}", name(self.form), name(problem.form));
  if (normalizes(self) == problem.normalizes) return {};
  return error(StatusCode::unsupported, "{}",
               problem.normalizes ? "reads normalized activations" : "normalizes activations first");
}

Status runs_here(Isa isa) {
  if (backend(isa) == Backend::cpu) {
    if (this_device().has(isa)) return {};
    return error(StatusCode::unsupported, "needs {}, this CPU offers {}", name(isa), name(this_device().isa));
  }
  const Result<GpuInfo> gpu = this_gpu();
  return gpu.ok() ? runs_on(*gpu, isa) : gpu.status().with_context(fmt::format("needs {}", name(isa)));
}

Status runs_on(const GpuInfo& gpu, Isa level) {
  if (gpu.has(level)) return {};
  constexpr int kLeast = 75;
  if (gpu.compute_capability < kLeast)
    return error(
        StatusCode::unsupported,
        "this {} is older than compute capability 7.5, the least that nibble has kernels for: run on a newer GPU, or on the "
        "CPU",
        gpu.name);
  if (gpu.isas == 0)
    return error(StatusCode::unsupported,
                 "this build has no code for this {} of compute capability {}.{}: build with -D NIBBLE_CUDA_ARCHITECTURES=native",
                 gpu.name, gpu.compute_capability / 10, gpu.compute_capability % 10);
  std::string_view best;
  for (const Isa isa : kAllIsas)
    if (gpu.has(isa)) best = name(isa);
  return error(StatusCode::unsupported, "needs {}, this {} offers {}", name(level), gpu.name, best);
}

namespace {

/// Whether a CPU of that level runs kernels of `needed`: it is the level or one of its parents.
bool includes(Isa level, Isa needed) {
  while (level != needed && level != parent(level)) level = parent(level);
  return level == needed;
}

Status runs_on(Isa cpu, Isa needed) {
  if (includes(cpu, needed)) return {};
  return error(StatusCode::unsupported, "needs {}, this CPU offers {}", name(needed), name(cpu));
}

}  // namespace

bool needs_prepare(ActForm form, const Problem& p) {
  switch (form) {
    case ActForm::as_given: return false;
    case ActForm::f32:  // a row of f32 is its own prepared form
      return p.m > 1 || p.a_dtype != DType::f32 || p.permutes_k || p.prescales_k || p.act_scheme.codes != DType::none;
    case ActForm::s8_rows:
    case ActForm::e4m3_rows: return is_compute_float(p.a_dtype);  // codes are read in place
    default: return true;
  }
}

namespace {

/// Tensor cores multiply bf16 from compute capability 8.0 on, those of 7.5 f16 and int8 only.
Status runs_on(const GpuInfo& gpu, const Kernel& self) {
  NIBBLE_RETURN_IF_ERROR(runs_on(gpu, self.isa));
  if (self.isa != Isa::sm80 || self.act != "bf16" || gpu.compute_capability >= 80) return {};
  return error(StatusCode::unsupported,
               "multiplies bf16, for which this {} of compute capability {}.{} has no tensor cores: pass f16", gpu.name,
               gpu.compute_capability / 10, gpu.compute_capability % 10);
}

}  // namespace

Status runs_there(const Kernel& self, const Problem& problem) {
  if (self.backend != Backend::cuda) return problem.cpu ? runs_on(*problem.cpu, self.isa) : runs_here(self.isa);
  if (problem.gpu != nullptr) return runs_on(*problem.gpu, self);
  NIBBLE_RETURN_IF_ERROR(runs_here(self.isa));
  NIBBLE_ASSIGN_OR_RETURN(const GpuInfo gpu, this_gpu());
  return runs_on(gpu, self);
}

Status accepts_common(const Kernel& self, const Problem& problem) {
  if (self.op != problem.op) return error(StatusCode::unsupported, "does {}, not {}", name(self.op), name(problem.op));
  if (problem.experts != 0 && self.op == Op::linear && self.expert_rows == 0)
    return error(StatusCode::unsupported, "multiplies by one weight, not by {} experts", problem.experts);
  if (problem.epilogue.reads_sums() && self.op != Op::prepare && self.backend != Backend::reference &&
      self.sums != Sums::integers)
    return error(StatusCode::unsupported, "has no integer sums, which {} needs", problem.epilogue.name());
  // A missing CPU feature is the better reason and is checked first; looking for a GPU may start its driver and comes last.
  if (self.backend != Backend::cuda) NIBBLE_RETURN_IF_ERROR(runs_there(self, problem));
  NIBBLE_RETURN_IF_ERROR(accepts_weight(self, problem));
  return self.backend == Backend::cuda ? runs_there(self, problem) : Status();
}

Problem mean_expert(Problem problem) {
  if (problem.experts == 0) return problem;
  const auto experts = static_cast<double>(problem.experts), rows = static_cast<double>(problem.m);
  const bool few = rows * rows <= 2 * experts;  // so few that less than one of them is expected to meet another
  const double hit = few ? rows : std::round(experts * (1 - std::pow(1 - 1 / experts, rows))), mean = rows / hit;
  problem.n *= static_cast<std::int64_t>(hit);
  problem.m = static_cast<std::int64_t>(std::ceil(mean + (few ? 0 : std::sqrt(mean))));
  return problem;
}

Roofline assumed_roofline(int threads, std::optional<Isa> cpu) {
  const auto has = [cpu](Isa level) { return cpu ? includes(*cpu, level) : this_device().has(level); };
  // One thread of a server core of 2022; the memory is shared and two threads saturate it.
  const bool wide = has(Isa::avx2);
  const bool dots = has(Isa::avx512vnni) || has(Isa::avx2vnni) || has(Isa::dotprod);
  Roofline machine{.threads = threads};
  machine.read_gbytes_per_s = std::min(24.0 * threads, 45.0);
  machine.f32_gflops = (wide ? 118.0 : 59.0) * threads;
  const bool tiles = has(Isa::amx);
  // Without AMX an Intel of this level is a server's core whose AMX may not be used. Its bf16 dot products take two clocks.
  const bool slow_bf16 = !cpu && this_device().cpu_name.starts_with("Intel");
  machine.bf16_gflops = tiles                  ? 16 * machine.f32_gflops
                        : has(Isa::avx512bf16) ? (slow_bf16 ? 0.5 : 2) * machine.f32_gflops
                        : has(Isa::neonbf16)   ? 4 * machine.f32_gflops
                                               : 0.0;
  machine.int8_gops = (tiles ? 32 : has(Isa::i8mm) ? 8 : dots ? 4 : 1) * machine.f32_gflops;
  return machine;
}

std::string kernel_name(const Kernel& kernel) {
  std::string tile(kernel.variant);
  if (kernel.tile.m + kernel.tile.n + kernel.tile.k != 0 && !tile.empty()) tile += "_";
  if (kernel.tile.m != 0) tile += fmt::format("m{}", kernel.tile.m);
  if (kernel.tile.n != 0) tile += fmt::format("n{}", kernel.tile.n);
  if (kernel.tile.k != 0) tile += fmt::format("k{}", kernel.tile.k);
  return fmt::format("{}_{}_{}_{}__{}_{}{}{}", name(kernel.op), kernel.out, kernel.act, kernel.weight, name(kernel.backend),
                     name(kernel.isa), tile.empty() ? "" : "_", tile);
}

std::string_view name(Op op) {
  switch (op) {
    case Op::linear: return "linear";
    case Op::conv: return "conv";
    case Op::dequantize: return "dequantize";
    case Op::prepare: return "prepare";
    case Op::finish: return "finish";
  }
  return "unknown";
}

namespace {

KernelInfo info_of(const Kernel& k) { return {k.name, k.backend, k.op, k.layout, k.isa, k.summary, k.batch_invariant}; }

/// The edit distance: insertions, deletions and replacements that turn one text into the other.
std::size_t edits(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);  // of the first i characters of `a` and each beginning of `b`
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t before = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j)
      before = std::exchange(row[j + 1], std::min({row[j] + 1, row[j + 1] + 1, before + (a[i] == b[j] ? 0 : 1)}));
  }
  return row.back();
}

}  // namespace

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> list;
  for (const Kernel& kernel : kernel_table()) list.push_back(info_of(kernel));
  return list;
}

Result<KernelInfo> kernel_info(std::string_view name) {
  if (const Kernel* kernel = find_kernel(name)) return info_of(*kernel);
  constexpr std::size_t kLongest = 128;  // longer texts resemble no name
  std::string_view nearest;
  std::size_t fewest = std::min(name.size(), kLongest) / 2 + 1;
  for (const Kernel& kernel : kernel_table()) {
    if (name.size() > kLongest) break;
    if (const std::size_t count = edits(name, kernel.name); count < fewest) nearest = kernel.name, fewest = count;
  }
  return error(StatusCode::not_found, "no kernel is called '{}'{}; nibble doctor --kernels lists them", shown(name),
               nearest.empty() ? "" : fmt::format(", the nearest is '{}'", nearest));
}

}  // namespace nibble
