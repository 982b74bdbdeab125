// The kernel table. A kernel is a row of plain data and four functions; the same rows drive dispatch, `inspect --explain`, the
// conformance tests, the benchmark and the docs.
//
// Adding a kernel family: two files that publish a span of rows, one line in registry.cpp, one in CMakeLists.txt; docs/adding.md.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "layouts/layout.hpp"
#include "nibble/conv.hpp"
#include "nibble/cuda.hpp"
#include "nibble/device.hpp"
#include "nibble/epilogue.hpp"
#include "nibble/plan.hpp"
#include "nibble/scheme.hpp"
#include "nibble/status.hpp"

namespace nibble {

namespace cuda {
struct ExpertTiles;  // cuda/tasks/expert_tiles.hpp
}

/// With Accumulation::precise, the most channels whose FP8 products are summed with fewer bits than f32 has.
inline constexpr int kPreciseChannels = 512;

/// The form in which a kernel reads activations.
enum class ActForm : std::uint8_t {
  as_given,     // as the caller passes them, without a prepare step
  f32,          // CPU; cpu/prepare/prepare.hpp draws this form and the next seven
  s8x3,         // 24-bit fixed point
  s8,           // int8
  s8k64,        // int8 in rows for AMX
  bf16,         // pairs of channels
  bf16k32,      // pairs of channels in rows for AMX
  bf16x2k32,    // the same of f16 as the sum of two bf16
  bf16x3k32,    // of f32 as the sum of three
  s8_rows,      // GPU: int8 codes row by row, followed by their scales (cuda/table/w8a8.cpp)
  e4m3_rows,    // GPU: the same of FP8 codes
  e4m3_halves,  // GPU: FP8 codes as the f16 numbers that they are, with scales (cuda/table/e4m3_halves.cpp)
  s8i16,        // GPU: int8 codes interleaved by 16 channels (cuda/table/wna8.cpp)
  s8x3_rows,    // GPU: 24-bit fixed point, three rows of such codes a token (cuda/table/fixed_point.cpp)
  f16x2_rows,   // GPU: f32 as the sum of two f16, row by row (cuda/table/pairs.cpp)
  recoded,      // u8 codes as s8 codes, in front of what reads those (recode.hpp)
  normalized,   // floats after RMSNorm or LayerNorm, in front of everything (norm.hpp)
};
/// The form's token in kernel names: "s8k64"; rows of the GPU by their type.
constexpr std::string_view name(ActForm form) {
  switch (form) {
    case ActForm::as_given: return "any";
    case ActForm::f32: return "f32";
    case ActForm::s8x3:
    case ActForm::s8x3_rows: return "s8x3";
    case ActForm::s8:
    case ActForm::s8_rows:
    case ActForm::recoded: return "s8";
    case ActForm::s8k64: return "s8k64";
    case ActForm::bf16: return "bf16";
    case ActForm::bf16k32: return "bf16k32";
    case ActForm::bf16x2k32: return "bf16x2k32";
    case ActForm::bf16x3k32: return "bf16x3k32";
    case ActForm::e4m3_rows: return "e4m3";
    case ActForm::e4m3_halves: return "e4m3f16";
    case ActForm::s8i16: return "s8i16";
    case ActForm::f16x2_rows: return "f16x2";
    case ActForm::normalized: return "normalized";
  }
  return "unknown";
}

/// How a kernel sums products, from which act_model derives the bound of its error (docs/accuracy.md).
enum class Sums : std::uint8_t {
  f32,                // f32 multiply-adds in any order
  fixed_point,        // integers of 24-bit fixed-point activations, added as f32 at the end of a segment
  integers,           // int8 codes times codes, over all of K where the scheme allows that, else by segments
  integer_folds,      // the same by folds of a record, codes taken as u − 8 or u − 128
  fixed_point_folds,  // 24-bit fixed-point activations by such folds, each of their three bytes on its own
  tensor_cores,       // tensor cores on 16-bit floats, FP8 codes included: f32 sums that are truncated, not rounded
  tensor_core_pairs,  // tensor cores on pairs of f16 that are f32 activations, of 128 channels at most, which are added as f32
  tensor_core_codes,  // the same on codes as they are stored; zero points are subtracted from the sums of a record
  tensor_core_fp8,    // wgmma on FP8 codes: sums keep 13 bits below the largest addend
};

/// The roofline assumed for this CPU, or for one of that level, without a measurement.
Roofline assumed_roofline(int threads, std::optional<Isa> cpu = {});

/// A problem for the table: one operation, with sizes and types.
struct Problem {
  Op op = Op::linear;
  std::int64_t m = 1, n = 1, k = 1;  // m of a convolution counts images
  WeightScheme scheme;
  DType zero_type = DType::none;
  std::string_view layout;        // of the packed weight; empty: not packed yet
  Backend memory = Backend::cpu;  // where its bytes are or will be: cuda is device memory
  DType a_dtype = DType::f32;     // of A as the caller passes it, but s8 of an A of u8
  EpilogueSpec epilogue;          // epilogue.out is the output type of every op
  ActScheme act_scheme;           // how A is quantized before the product, if at all
  /// How sums of FP8 codes are formed.
  Accumulation accumulation = Accumulation::fast;
  bool normalizes = false;   // a first step normalizes A (norm.hpp)
  bool u8_codes = false;     // A comes as u8, which a first step makes s8 (recode.hpp)
  bool permutes_k = false;   // act-order: the packed weight's input channels are permuted
  bool prescales_k = false;  // A is first multiplied by the weight's prescale
  ConvGeometry geometry;     // conv
  ImageLayout input = ImageLayout::nchw, output = ImageLayout::nchw;
  ActForm form = ActForm::as_given;        // prepare: the form of activations to make
  Roofline machine = assumed_roofline(1);  // that costs are computed for, with machine.threads threads
  const GpuInfo* gpu = nullptr;            // the same for kernels of the GPU; null: the current one
  std::optional<Isa> cpu = {};             // of a CPU that need not be there: its level; absent: this one's
  bool any_alignment = false;              // only kernels that read A wherever it lies
  std::int64_t experts = 0;                // GPU: of a grouped product, which has m rows of all of them; 0: of one weight
};

struct Tile {
  int m = 0, n = 0, k = 0;  // 0: not tiled in that dimension
  int split = 1;            // GPU: the CTAs that share a tile's K, on sm_90 as a cluster, or cuda::kStreamK
};

/// Everything a step of a plan gets at run time. All sizes, types and operands have been checked. For a kernel of the GPU every
/// pointer is device memory.
struct StepArgs {
  const PackedWeightData* weight = nullptr;
  ConstTensorView a;              // [M,K], the caller's; conv [B,Ci,H,W]; finish: the sums [M,N]
  std::byte* prepared = nullptr;  // A in the form the main kernel reads: written by prepare, read by the main kernel
  std::span<std::byte> scratch;   // of the main kernel: workspace() bytes at this M, aligned to 64 bytes, on the GPU to 256
  TensorView d;                   // linear [M,N]; conv [B,Co,Oh,Ow]; dequantize [N,K] or [K,N]
  bool transposed = false;        // dequantize: d is [K,N]
  const EpilogueSpec* epilogue = nullptr;
  Operands operands;
  ActScheme act_scheme;
  NormSpec norm;           // of the first step
  bool far_zeros = false;  // CPU: operands.a_zero has some outside −128 … 127
  Accumulation accumulation = Accumulation::fast;
  const ConvSpec* conv = nullptr;       // conv
  const void* config = nullptr;         // what configure() returned
  std::int64_t n_begin = 0, n_end = 0;  // the output channels to compute; n_end 0: to the last
  int prepare_tile = 1;                 // prepare: rows per tile, the main kernel's tile.m
  const cuda::ExpertTiles* experts =
      nullptr;                       // GPU: the rows of each expert, of which `weight` is the first; null: of one weight
  const StepArgs* joined = nullptr;  // GPU: the product of D that the same launch runs (Kernel::joins), complete; null: none
  Executor* executor = nullptr;      // CPU
  Stream stream = {};                // GPU: run() enqueues there and does not wait
};

struct Kernel {
  std::string_view name = {};  // given by the table: kernel_name()
  Backend backend;
  Isa isa;  // minimum
  Op op;
  /// Scalar tokens or scheme names; "any": whatever accepts() takes; "none". Where a kernel reads a form of its own, `act` is the
  /// name of that form; the `out` of a prepare kernel is the name of the form it makes.
  std::string_view out, act, weight;
  std::string_view layout;
  std::string_view variant = {};  // a word for kernels that the other fields do not distinguish
  Tile tile;
  std::string_view summary;
  /// The fewest rows of A for which choice considers it: with fewer, most of its tile is empty, and it was not measured. Forced by name it
  /// takes every M.
  std::int64_t least_m = 1;
  /// A row of D has the same bits for every M and whatever the other rows are.
  bool batch_invariant = true;
  /// W is rounded to the type of the activations before it is multiplied, and, with rounds_scales, its scales and float zeros
  /// before that. This determines the bound (docs/accuracy.md, "Kernels that round weights").
  bool rounds_weights = false, rounds_scales = false;
  /// Activations times a prescale are rounded to their type before they are multiplied.
  bool rounds_prescaled = false;
  /// The form of activations that it reads; of a prepare kernel, the form it makes.
  ActForm form = ActForm::as_given;
  /// Whether it reads A as given and quantizes it itself.
  bool quantizes = false;
  Sums sums = Sums::f32;
  /// The rows of a tile of a grouped product, all of which are one expert's; 0: it takes one weight only.
  int expert_rows = 0;
  /// Of a grouped product: it fetches each row of A from where it lies (cuda::ExpertTiles::source), so that rows need not be gathered. A prepare
  /// kernel does so for the product after it; a product that does so sorts up to cuda::kFewPairs pairs itself (ExpertTiles::sort).
  bool fetches_rows = false;
  /// Of a grouped product: whether one launch runs it and `second`, a product of the same kernel and of its results (StepArgs::joined, whose
  /// scratch is a cuda::Meeting); null: never.
  bool (*joins)(const Problem& first, const Problem& second) = nullptr;
  /// Of a convolution that multiplies prepared patches: the linear kernel of the same fields, whose loops it uses; given by the table. Of one
  /// that multiplies patches in memory on the GPU the linear row itself, which is not the table's.
  const Kernel* linear = nullptr;
  /// Of a kernel of e4m3_halves: the kernel of f16 activations that multiplies them.
  const Kernel* halves = nullptr;

  /// Ok, or the reason for refusing the problem, with the values.
  Status (*accepts)(const Kernel& self, const Problem& problem);
  /// Predicted microseconds. Only for accepted problems.
  double (*cost_us)(const Kernel& self, const Problem& problem);
  /// Bytes of workspace at problem.m; null: none. Of a prepare kernel what it writes for the main kernel (StepArgs::prepared), of
  /// every other its own scratch (StepArgs::scratch). Called in every run, so it only calculates; it never decreases with M.
  std::size_t (*workspace)(const Kernel& self, const Problem& problem) = nullptr;
  /// What all runs of up to problem.m rows share beside the weight, found once when a plan is made, on its GPU; null: nothing. run() gets
  /// it as StepArgs::config.
  Result<std::shared_ptr<const void>> (*configure)(const Kernel& self, const Problem& problem) = nullptr;
  /// Whether it can read A where it lies, which pointers and strides decide; null: any A. Where it cannot, the plan runs Bucket::unaligned.
  bool (*reads)(const StepArgs& args) = nullptr;
  /// Neither searches, nor locks, nor allocates. Fails only where the GPU's driver, or a library, refuses a launch.
  Status (*run)(const Kernel& self, const StepArgs& args);
};

/// The rows of some families in their order, each with its name and, if a convolution, its linear twin.
class KernelTable {
 public:
  explicit KernelTable(std::initializer_list<std::span<const Kernel>> families);
  KernelTable(const KernelTable&) = delete;
  KernelTable& operator=(const KernelTable&) = delete;
  std::span<const Kernel> rows() const { return rows_; }

 private:
  std::vector<std::string> names_;
  std::vector<Kernel> rows_;
};
/// All kernels, the reference last.
std::span<const Kernel> kernel_table();
/// The kernel of that name; null when there is none.
const Kernel* find_kernel(std::string_view name);

/// Whether integer sums over all of K, unscaled, need only one scale of the token and one of the output channel to be the result: the
/// products that docs/accuracy.md calls exact. Codes of 4 and 8 bits; other codes are rare and use segments.
inline bool sums_whole_rows(const WeightScheme& weight, const ActScheme& act) {
  const bool narrow = bits(weight.codes) == 4 || bits(weight.codes) == 8;
  const bool integers =
      info(weight.codes).kind != DTypeKind::floating && weight.zero != ZeroKind::offset && weight.zero != ZeroKind::real;
  return act.codes == DType::s8 && act.zero != ZeroKind::offset && act.group.k == 0 && weight.group.k == 0 && narrow && integers;
}

/// The largest |(q_a − z_a)·(q_w − z_w)|: |q − z| is 128 at most without zero points, 255 with those that are codes, and 383 where only one
/// of a weight's q and z has a sign.
inline std::int64_t largest_product(const WeightScheme& weight, DType zero_type, const ActScheme& act) {
  struct Range {
    std::int64_t least, most;
  };
  constexpr Range kSigned{-128, 127}, kUnsigned{0, 255};
  const Range code = info(weight.codes).kind == DTypeKind::uint ? kUnsigned : kSigned;
  const Range zero = weight.zero == ZeroKind::none ? Range{0, 0} : zero_type == DType::u8 ? kUnsigned : kSigned;
  return (act.zero == ZeroKind::none ? 128 : 255) * std::max(code.most - zero.least, zero.most - code.least);
}
/// The most channels for which such sums fit 32 bits.
inline std::int64_t most_whole_channels(const WeightScheme& weight, DType zero_type, const ActScheme& act) {
  return ((std::int64_t{1} << 31) - 1) / largest_product(weight, zero_type, act);
}

/// The layer whose cost a grouped product is taken to have: the rows of the experts that are hit stand side by side, and each gets the mean
/// number of tokens, and a standard deviation of random routing more. Of one weight the problem itself.
Problem mean_expert(Problem problem);

/// For prepare kernels: whether it makes the requested form.
Status accepts_form(const Kernel& self, const Problem& problem);
/// Whether a linear kernel that reads `form` needs a prepare step that makes it.
bool needs_prepare(ActForm form, const Problem& problem);

/// Ok, or the level of instructions that the problem's machine lacks for the kernel.
Status runs_there(const Kernel& self, const Problem& problem);
/// Whether the weight is in the layout and the memory that the kernel reads.
bool reads_weight(const Kernel& self, const Problem& problem);
/// The first check of every accepts(): whether the operation, the layout, the machine and the place of the weight fit.
Status accepts_common(const Kernel& self, const Problem& problem);

/// `op_out_act_weight__backend_isa_tile`, from the fields; with a variant `…_isa_variant_tile`.
std::string kernel_name(const Kernel& kernel);

}  // namespace nibble
