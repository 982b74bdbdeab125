// The kernel table. A kernel is a row of plain data and four functions; the same rows drive dispatch, `inspect --explain`, the
// conformance tests, the benchmark and the docs.
//
// Adding a kernel family: two files that publish a span of rows, one line in registry.cpp, one in CMakeLists.txt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "layouts/layout.hpp"
#include "nibble/device.hpp"
#include "nibble/epilogue.hpp"
#include "nibble/plan.hpp"
#include "nibble/scheme.hpp"
#include "nibble/status.hpp"

namespace nibble {

/// One concrete question to the table: this operation, these sizes and types.
struct Problem {
  Op op = Op::linear;
  std::int64_t m = 1, n = 1, k = 1;
  WeightScheme scheme;
  std::string_view layout;  // of the packed weight; empty: not packed yet
  DType act = DType::f32;   // of A as the caller passes it
  EpilogueSpec epilogue;    // epilogue.out is the output type of every op
  bool reorders_k = false;  // act-order or prescale: A must be permuted or scaled first
  int threads = 1;
};

struct Tile {
  int m = 0, n = 0, k = 0;  // 0: not tiled in that dimension
};

/// Everything a step of a plan gets at run time. All sizes, types and operands have been checked.
struct StepArgs {
  const PackedWeightData* weight = nullptr;
  ConstTensorView a;        // [M,K]; what `prepare` made, when the plan has that step (then dtype f32, see prepare.hpp)
  TensorView d;             // linear [M,N]; dequantize [N,K] or [K,N]; prepare f32 [M,K]
  bool transposed = false;  // dequantize: d is [K,N]
  const EpilogueSpec* epilogue = nullptr;
  EpilogueArgs operands;
  int prepare_tile = 1;  // prepare: rows per tile, the main kernel's tile.m
  Executor* executor = nullptr;
};

struct Kernel {
  std::string_view name;  // a unit test rebuilds it from the fields below
  Backend backend;
  Isa isa;  // minimum
  Op op;
  std::string_view out, act, weight;  // scalar tokens or scheme names; "any": whatever accepts() takes; "none"
  std::string_view layout;
  Tile tile;
  bool prepared;  // reads activations as prepare.hpp lays them out
  std::string_view summary;

  /// Ok, or why not, with the values.
  Status (*accepts)(const Kernel& self, const Problem& problem);
  /// Predicted microseconds. Only for accepted problems.
  double (*cost_us)(const Kernel& self, const Problem& problem);
  void (*run)(const Kernel& self, const StepArgs& args);
};

/// All kernels, the reference last.
std::span<const Kernel* const> kernel_table();
/// Null when there is none of that name.
const Kernel* find_kernel(std::string_view name);

/// What accepts() of every kernel begins with: the operation, the layout and the machine fit.
Status accepts_common(const Kernel& self, const Problem& problem);

/// `op_out_act_weight__backend_isa_tile`, from the fields.
std::string kernel_name(const Kernel& kernel);

}  // namespace nibble
