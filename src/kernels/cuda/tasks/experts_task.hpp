// The arguments of the steps around grouped products (steps/experts.hpp): plain values, host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epilogue/element.hpp"
#include "kernels/cuda/tasks/expert_tiles.hpp"
#include "nibble/types.hpp"

namespace nibble::cuda {

/// Experts of a GPU's grouped products, at most: a thread of the sorting CTA counts one. A power of two.
constexpr int kMostExperts = 1024;

/// Pairs of tokens and experts that a warp sorts, a lane each.
constexpr int kFewPairs = 32;

/// The most tiles of up to `each` rows that so many rows of so many experts make: every expert but those that cannot have a row may end with a
/// tile that is not full.
constexpr int most_tiles(std::int64_t rows, std::int64_t experts, int each) {
  return static_cast<int>(rows < experts ? rows : experts + (rows - experts) / each);
}

/// CTAs that sort so many pairs. Each counts the pairs of its run first, and must know the counts of the others before it places them: a launch more,
/// which pays where one CTA would take longer.
constexpr int kPairsOfCta = 1024;
constexpr int sort_ctas(std::int64_t pairs) {
  constexpr std::int64_t kAlone = 2 * kPairsOfCta, kMost = 32;
  const std::int64_t ctas = (pairs + kPairsOfCta - 1) / kPairsOfCta;
  return static_cast<int>(pairs <= kAlone ? 1 : ctas < kMost ? ctas : kMost);
}
/// Integers of SortTask::run_counts.
constexpr std::size_t sort_counts(std::int64_t pairs, std::int64_t experts) {
  return static_cast<std::size_t>(sort_ctas(pairs) * experts);
}

/// What nibble::route() reads and writes, in device memory; E ≤ kMostExperts.
struct RouteTask {
  epilogue::Operand logits;     // [T,E]
  const float* bias = nullptr;  // [E], or null
  int tokens = 0, experts = 0, top_k = 1, groups = 1, top_groups = 1;
  bool sigmoid = false, normalize = true;
  float scale = 1;
  std::int32_t* ids = nullptr;               // [T,top_k]
  std::int64_t id_token = 0, id_choice = 0;  // elements between tokens, and between the ids of a token
  float* weights = nullptr;                  // [T,top_k]
  std::int64_t weight_token = 0, weight_choice = 0;
};

/// Sorts rows by expert and cuts them into tiles. What is given is one of `ids`, `offsets` and `counts`, in device memory.
struct SortTask {
  const std::int32_t* ids =
      nullptr;  // [tokens,top_k]: the expert of each pair of a token and one of its experts; others than 0 … E − 1: none
  std::int64_t token_stride = 0, choice_stride = 0;  // elements between tokens, and between the ids of a token
  const std::int32_t* offsets = nullptr;             // [E+1]: rows offsets[e] … offsets[e+1] − 1 are expert e's
  const std::int32_t* counts = nullptr;              // [E]: rows e·pitch … e·pitch + counts[e] − 1 are
  std::int64_t given_stride = 1;                     // elements between offsets or counts
  int pitch = 0;                                     // of counts
  int experts = 0, rows = 0;                         // E ≤ kMostExperts; pairs, or rows of A
  int top_k = 1;

  std::int32_t* pair_of =
      nullptr;  // [rows], of ids: the pair, token · top_k + choice, whose row each one is; sorted by expert, then by pair
  std::int32_t* row_of = nullptr;     // [rows], the inverse, by pair; −1 of pairs without an expert
  std::int32_t* expert_of = nullptr;  // [rows]: of each row; −1 of those that are no expert's
  int* run_counts = nullptr;          // [sort_counts(rows, E)], of ids: what CTAs tell each other

  /// The tiles of up to two products, in the order of experts. rows 0: none.
  struct Tiles {
    int rows = 0;
    ExpertTile* tiles = nullptr;  // room for most_tiles()
    TileCount* count = nullptr;
  };
  Tiles products[2];
};

/// to[row,k] = from[source(row), perm_e[k]] · prescale_e[perm_e[k]], rounded to the type: the rows of A in the order of experts, and their channels in
/// that of the expert's weight. Rows that are no expert's become zeros.
struct GatherRowsTask {
  const void* from = nullptr;
  std::int64_t from_stride = 0;  // elements between rows
  DType type = DType::f16;       // f32, f16 or bf16
  void* to = nullptr;            // aligned to 16 bytes
  std::int64_t to_stride = 0;    // elements between rows, a multiple of 8
  std::int64_t rows = 0, columns = 0;
  const std::int32_t* source = nullptr;  // [rows]; null: row itself
  std::int64_t source_stride = 1;
  int divisor = 1;                          // the source is source[row] / divisor
  int sources = 0;                          // rows of `from`; a source beyond them is no row
  const std::int32_t* expert_of = nullptr;  // [rows]
  const std::int32_t* perm = nullptr;       // [E,K], or null
  const float* prescale = nullptr;          // [E,K], by input channel, or null
  std::int64_t parameter_pitch = 0;         // elements between experts of both
};

/// D[t] = Σ_j weights[t,j] · (results[row_of[t,j]] + bias of its expert) + the rest of the epilogue, in the order of j.
struct CombineTask {
  const void* results = nullptr;  // [rows,N], dense
  DType type = DType::f32;        // of them: f32, f16 or bf16
  const std::int32_t* row_of = nullptr;
  const std::int32_t* expert_of = nullptr;
  const float* weights = nullptr;  // [T,top_k]
  std::int64_t token_stride = 0, choice_stride = 0;
  epilogue::Operand bias;  // [E,N], of which `stride` elements are between experts
  epilogue::Element epilogue;
  int tokens = 0, top_k = 1, n = 0;
};

}  // namespace nibble::cuda
