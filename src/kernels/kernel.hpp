// The kernel table. A kernel is a row of plain data and four functions; the same rows drive dispatch, `inspect --explain`, the
// conformance tests, the benchmark and the docs.
//
// Adding a kernel family: two files that publish a span of rows, one line in registry.cpp, one in CMakeLists.txt; docs/adding.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "layouts/layout.hpp"
#include "nibble/conv.hpp"
#include "nibble/cuda.hpp"
#include "nibble/device.hpp"
#include "nibble/epilogue.hpp"
#include "nibble/plan.hpp"
#include "nibble/scheme.hpp"
#include "nibble/status.hpp"

namespace nibble {

/// With Accumulation::precise, the most channels whose FP8 products are added up with fewer bits than f32 has.
inline constexpr int kPreciseChannels = 512;

/// What a machine of this instruction set is taken to do as long as nobody has measured it.
Roofline assumed_roofline(int threads);

/// One concrete question to the table: this operation, these sizes and types.
struct Problem {
  Op op = Op::linear;
  std::int64_t m = 1, n = 1, k = 1;  // m of a convolution counts images
  WeightScheme scheme;
  DType zero_type = DType::none;
  std::string_view layout;        // of the packed weight; empty: not packed yet
  Backend memory = Backend::cpu;  // where its bytes are or will be: cuda is device memory
  DType act = DType::f32;         // of A as the caller passes it
  EpilogueSpec epilogue;          // epilogue.out is the output type of every op
  ActScheme quantize;             // how A is quantized before the product, if at all
  /// Of FP8 codes.
  Accumulation accumulation = Accumulation::fast;
  bool permutes_k = false;   // act-order: the packed weight has its own order of input channels
  bool prescales_k = false;  // A is multiplied by the weight's prescale first
  ConvGeometry geometry;     // conv
  ImageLayout input = ImageLayout::nchw, output = ImageLayout::nchw;
  std::string_view form;                   // prepare: the form of activations that is wanted (cpu/prepare.hpp)
  Roofline machine = assumed_roofline(1);  // what costs are worked out for; machine.threads threads will run
  std::optional<GpuInfo> gpu = {};         // the same for kernels of the GPU; none: the current one
};

struct Tile {
  int m = 0, n = 0, k = 0;  // 0: not tiled in that dimension
};

/// Everything a step of a plan gets at run time. All sizes, types and operands have been checked. For a kernel of the GPU every
/// pointer is device memory.
struct StepArgs {
  const PackedWeightData* weight = nullptr;
  ConstTensorView a;              // [M,K], the caller's; conv [B,Ci,H,W]
  std::byte* prepared = nullptr;  // A in the form the main kernel reads: written by prepare, read by the main kernel
  std::span<std::byte> scratch;   // of the main kernel: what its workspace() asked for at this M, aligned to 64 bytes, GPU: 256
  TensorView d;                   // linear [M,N]; conv [B,Co,Oh,Ow]; dequantize [N,K] or [K,N]
  bool transposed = false;        // dequantize: d is [K,N]
  const EpilogueSpec* epilogue = nullptr;
  EpilogueArgs operands;
  ActScheme quantize;
  bool far_zeros = false;  // CPU: operands.a_zero has some outside −128 … 127
  Accumulation accumulation = Accumulation::fast;
  const ConvSpec* conv = nullptr;       // conv
  std::int64_t n_begin = 0, n_end = 0;  // of the output channels, those to work out; 0: to the last
  int prepare_tile = 1;                 // prepare: rows per tile, the main kernel's tile.m
  Executor* executor = nullptr;         // CPU
  Stream stream = {};                   // GPU: run() enqueues there and does not wait
};

struct Kernel {
  std::string_view name;  // a unit test rebuilds it from the fields below
  Backend backend;
  Isa isa;  // minimum
  Op op;
  /// Scalar tokens or scheme names; "any": whatever accepts() takes; "none". The `act` of a linear kernel on the CPU is the form
  /// of activations it reads (cpu/prepare.hpp), which is the `out` of the prepare kernel that makes it; on the GPU their type.
  std::string_view out, act, weight;
  std::string_view layout;
  std::string_view variant = {};  // a word that tells it from kernels of another making, where the fields do not
  Tile tile;
  std::string_view summary;
  /// The fewest rows of A for which it is chosen: with fewer, most of its tile is empty, and it was not measured. Forced by name it
  /// takes every M.
  std::int64_t least_m = 1;
  /// A row of D has the same bits for every M and whatever the other rows are.
  bool batch_invariant = true;
  /// W is rounded to the type of the activations before it is multiplied, and, with rounds_scales, its scales and float zeros
  /// before that. It decides the bound (docs/accuracy.md, "Kernels that round weights").
  bool rounds_weights = false, rounds_scales = false;
  /// On the GPU: reads A as it comes and makes its codes by itself, so that no step goes in front.
  bool quantizes = false;

  /// Ok, or why not, with the values.
  Status (*accepts)(const Kernel& self, const Problem& problem);
  /// Predicted microseconds. Only for accepted problems.
  double (*cost_us)(const Kernel& self, const Problem& problem);
  /// Bytes of workspace at problem.m; null: none. Of a prepare kernel what it writes for the main kernel (StepArgs::prepared), of
  /// every other its own scratch (StepArgs::scratch). Asked in every run, so it only calculates; never less for a larger M.
  std::size_t (*workspace)(const Kernel& self, const Problem& problem) = nullptr;
  /// Fails only where the GPU's driver, or a library, refuses a launch.
  Status (*run)(const Kernel& self, const StepArgs& args);
};

/// All kernels, the reference last.
std::span<const Kernel* const> kernel_table();
/// Null when there is none of that name.
const Kernel* find_kernel(std::string_view name);

/// What accepts() of every kernel begins with: the operation, the layout, the machine and the place of the weight fit.
Status accepts_common(const Kernel& self, const Problem& problem);

/// `op_out_act_weight__backend_isa_tile`, from the fields; with a variant `…_isa_variant_tile`.
std::string kernel_name(const Kernel& kernel);

}  // namespace nibble
