// The tile scheduler: which rows, tokens and channels a CTA multiplies, and when. Plain arithmetic, the same in kernels and on the host,
// where it is tested.
//
//   D is cut into row blocks of 64 and token tiles. A pass is up to `most` neighbouring row blocks of one token tile, times all of K, which
//   is a row of records. Passes are distributed in one of four ways, which distribute() chooses:
//
//   units    a unit is one row block of one token tile. Every CTA has a run of U/C units, rounded up or down, and takes it in passes: 57344
//            rows on 132 CTAs are 6 or 7 blocks each, taken as 4 and 3 (97 % of the time all are busy), where tiles of 256 rows would
//            take two rounds (85 %)
//   bands    many tokens, or even passes: passes are numbered, CTA c takes c, c + C, c + 2·C …; those that run at the same time share
//            their inputs
//   split    a cluster takes a pass, rank r of S the records [r·R/S, (r+1)·R/S)
//   stream-K whole rounds of passes as bands do, and the records of the others laid in one line, of which every CTA has 1/C:
//
//                  pass 0            pass 1            pass 2
//            ├────────┊────────┼────────┊────────┼─ … ──────────┤     three passes on, say, four CTAs
//            ├── CTA 0 ──┼── CTA 1 ──┼── CTA 2 ──┼── CTA 3 ─────┤
//                        ◀──         ◀──         ◀──                  a CTA takes its run from the end
//
//            Where a run ends within a pass (CTA 0, 1 and 2) the partial sums are stored in memory (stream_k.cuh); that part is the first
//            that the CTA multiplies. The pass is finished by the CTA that has its last record, which multiplies that part last: by then
//            the others have stored theirs. There are no more CTAs than multiprocessors, and a CTA waits only for those before it, which
//            start first.
//
// Where units are distributed, a run that goes on in another token tile takes a pass more; and where a line holds several token tiles, the
// CTAs of the same rows read the same weights at different times, so that memory is read once per token tile. Both end when the number of
// CTAs is a multiple of the token tiles: each tile then has as many, with the same rows and records. distribute() leaves CTAs idle for that
// where it costs nothing, or, with stream-K, less than the second read.
//
// The order of a sum depends on the distribution and the GPU, and with stream-K on M.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"
#include "kernels/cuda/tasks/expert_tiles.hpp"

namespace nibble::cuda {

/// Multiplying warpgroups of a CTA, each with a row block: four, or fewer where sums need more registers.
NIBBLE_HOST_DEVICE constexpr int gemm_groups(int tokens) { return tokens <= 64 ? 4 : tokens == 128 ? 3 : 2; }
/// The same for pairs of f16, whose groups have sums of their own.
NIBBLE_HOST_DEVICE constexpr int pair_groups(int tokens) { return tokens <= 32 ? 4 : tokens == 64 ? 3 : 2; }

/// The same for codes on both sides, whose operands are in shared memory. Groups need registers for two sets of sums.
NIBBLE_HOST_DEVICE constexpr int w8a8_groups(int tokens, bool grouped = false) {
  if (grouped) return tokens >= 64 ? 2 : 4;
  return tokens == 256 ? 2 : tokens == 128 ? 3 : 4;
}

/// Rows of a part of a tile of experts. Parts without rows are neither copied nor multiplied. Few tokens are bound by memory, and have one. Of
/// activations that are codes each part waits for its products, so that parts of 64 tokens are small enough.
NIBBLE_HOST_DEVICE constexpr int gemm_part(int tokens, bool codes) {
  if (codes) return tokens < 64 ? tokens : 64;
  return tokens < 64 ? tokens : tokens / 4;
}
/// The same for codes on both sides, with tokens as the 64-row operand or not: 64 rows of each warpgroup are one.
NIBBLE_HOST_DEVICE constexpr int w8a8_part(int tokens, bool token_rows) { return token_rows ? 64 : tokens; }

/// The `split` of kernels whose CTAs share passes along K wherever a run ends; of others it is the CTAs of a cluster.
constexpr int kStreamK = 0;

/// Whether a kernel of codes on both sides has tokens as the 64-row operand, and the weight's rows as the other one (w8a8_token_rows.cuh):
/// where a pass has many tokens, and two row blocks, or with groups one. Not where sums of tensor cores are added in f32
/// (W8A8Task::together), nor, without groups, with clusters.
constexpr int kTokenRowBlocks = 2;  // of a pass then, at most
constexpr bool takes_tokens_as_rows(int tokens, int blocks, int split, bool grouped, bool precise) {
  if (grouped) return tokens >= 128 || (tokens == 64 && split != kStreamK);
  return !precise && tokens >= 128 && blocks == kTokenRowBlocks && split <= 1;
}
/// The tokens of a band, where there are two bands or more (Schedule::banded): concurrent passes then share their inputs. With K = 8192, 8 or
/// 16 MiB of activations stay in L2 while the weights are read once per band.
constexpr int kBandTokens = 1024;

NIBBLE_HOST_DEVICE constexpr bool takes_bands(int token_tiles, int tokens) { return token_tiles * tokens >= 2 * kBandTokens; }

/// Division by a number known on the host, as a multiplication: an integer division before the first copy takes a tenth of a microsecond.
/// Exact for all n ≥ 0: with by ≤ 2^bits < 2·by the inverse ⌈2^(31+bits)/by⌉ is above by less than 2^-31 of itself.
struct Divisor {
  std::uint32_t inverse = std::uint32_t{1} << 31;
  int shift = 31;

  Divisor() = default;
  NIBBLE_HOST_DEVICE constexpr explicit Divisor(int by) {
    while (std::int64_t{1} << (shift - 31) < by) ++shift;
    inverse =
        static_cast<std::uint32_t>(((std::uint64_t{1} << shift) + static_cast<unsigned>(by) - 1) / static_cast<unsigned>(by));
  }
  NIBBLE_HOST_DEVICE friend constexpr int operator/(int n, const Divisor& d) {
    return static_cast<int>(static_cast<std::uint64_t>(n) * d.inverse >> d.shift);
  }
};

/// Row blocks [block, block + blocks) of a token tile, and of their records [first, end).
struct Pass {
  int token_tile = 0, block = 0, blocks = 0;
  int first = 0, end = 0;
  ExpertTile tile{};  // of experts: what the token tile is, which the kernel reads

  NIBBLE_HOST_DEVICE constexpr int records() const { return end - first; }
};

struct Schedule {
  static constexpr int kFractionBits =
      20;  // for up to 1024 clusters: their square is no more than 2^20, and 1024 · 2^20 fits in 32 bits

  int row_blocks = 1, token_tiles = 1, records = 1;
  int most = 4;       // row blocks of a pass
  int split = 1;      // CTAs of a cluster, which share passes along K: a power of two; kStreamK
  bool even = false;  // whether passes are to have `most` row blocks, because fewer take as long
  int shift = 0;      // of which 2^shift = split
  int clusters = 1;   // of one CTA, or of `split`
  int band = 0;       // token tiles of a band of numbered passes; 0: units are distributed
  int whole = 0;      // numbered passes that are run whole; the others form the line of stream-K
  int each = 0;       // units of a cluster, or records of the line, in the mean: whole ones,
  int fraction = 0;   // and 2^-kFractionBits of one
  int row_tiles = 1;
  Divisor by_row_blocks{}, by_most{}, by_band{}, by_high{}, by_last{}, by_records{};

  NIBBLE_HOST_DEVICE constexpr int units() const { return row_blocks * token_tiles; }
  NIBBLE_HOST_DEVICE constexpr int passes() const { return row_tiles * token_tiles; }
  /// The most records that one CTA multiplies, or more.
  constexpr int longest() const {
    if (split == kStreamK) return longest_run() + (whole + clusters - 1) / clusters * records;
    const bool one = band == 0 ? most_passes() == 1 : passes() <= clusters;
    return one ? (records + split - 1) / split : 2 * records;  // effectively unlimited
  }
  /// The first unit of a cluster, or the first record of its run.
  NIBBLE_HOST_DEVICE constexpr int begin(int cluster) const { return cluster * each + (cluster * fraction >> kFractionBits); }
  /// Divides `count` units, or records of the line, among the clusters: c begins at ⌊c · count / clusters⌋. The rounded fraction is above the
  /// exact one by less than 2^-kFractionBits, and c times that is less than 1/clusters, so that the floor is the same.
  NIBBLE_HOST_DEVICE constexpr void divide(int count) {
    each = count / clusters;
    fraction = (((count % clusters) << kFractionBits) + clusters - 1) / clusters;
  }
  /// The most units, or records of the line, of a cluster.
  constexpr int longest_run() const { return each + (fraction != 0); }
  /// The most passes of a cluster, where units are distributed.
  constexpr int most_passes() const {
    const auto passes = [&](int count) { return (count + most - 1) / most; };
    int found = passes(longest_run());
    for (int end = row_blocks; end < units(); end += row_blocks) {  // of a token tile: in whose run?
      const int cluster = static_cast<int>(((end + std::int64_t{1}) * clusters - 1) / units());
      const int here = passes(end - begin(cluster)) + passes(begin(cluster + 1) - end);
      if (here > found) found = here;
    }
    return found;
  }

  /// The pass that begins at `unit` of a run that ends before `stop`. Its blocks are divided evenly among the passes of this token tile.
  NIBBLE_HOST_DEVICE constexpr Pass pass_at(int unit, int stop) const {
    const int tile = unit / by_row_blocks, block = unit - tile * row_blocks;
    const int left = stop - unit < row_blocks - block ? stop - unit : row_blocks - block;
    const int count = (left + most - 1) / by_most;
    int blocks = most;
    while (count * (blocks - 1) >= left) --blocks;
    return {.token_tile = tile, .block = block, .blocks = blocks};
  }
  /// Pass `index`: bands of up to `band` token tiles, row tile by row tile.
  NIBBLE_HOST_DEVICE constexpr Pass numbered(int index) const {
    const int number = index / by_band, first = number * band, rest = index - first * row_tiles;
    const bool last = first + band > token_tiles;
    const int row_tile = last ? rest / by_last : rest / by_high, height = last ? token_tiles - first : band;
    const int block = row_tile * most;
    return {.token_tile = first + rest - row_tile * height,
            .block = block,
            .blocks = row_blocks - block < most ? row_blocks - block : most};
  }

  /// The progress of a cluster, one number, because it occupies a register during the products: the next unit or pass or, when these are
  /// done, −1 − the end of the remaining run of the line.
  NIBBLE_HOST_DEVICE constexpr int start(int cluster) const { return band == 0 ? begin(cluster) : cluster; }
  /// Gets the next pass of CTA `rank` of a cluster; false when there is none.
  NIBBLE_HOST_DEVICE constexpr bool next(int cluster, int rank, int& at, Pass& pass) const {
    const int stop = band == 0 ? begin(cluster + 1) : whole;
    if (at >= 0 && at < stop) {
      pass = band == 0 ? pass_at(at, stop) : numbered(at);
      pass.first = split > 1 ? (rank * records) >> shift : 0;
      pass.end = split > 1 ? ((rank + 1) * records) >> shift : records;
      at += band == 0 ? pass.blocks : clusters;
      return true;
    }
    if (split != kStreamK) return false;
    const int from = begin(cluster), to = at >= 0 ? begin(cluster + 1) : -1 - at;
    if (from == to) return false;
    const int number = (to - 1) / by_records, first = number * records, left = first > from ? first : from;
    pass = numbered(whole + number);
    pass.first = left - first;
    pass.end = to - first;
    at = -1 - left;
    return true;
  }
  /// The row blocks of the partial pass that a cluster stores for another; 0: it has none.
  NIBBLE_HOST_DEVICE constexpr int left_blocks(int cluster) const {
    const int from = begin(cluster), to = begin(cluster + 1);
    if (split != kStreamK || from == to) return 0;
    const int number = (to - 1) / by_records;
    return to == (number + 1) * records ? 0 : numbered(whole + number).blocks;
  }
};

/// In shared memory, whose end it takes where a kernel makes it.
constexpr int kScheduleBytes = (sizeof(Schedule) + 15) / 16 * 16;
/// Before it: passes of experts that a CTA has drawn (sm90/gemm/expert_passes.cuh). A third slot is for producers, who are ahead of the products;
/// each pass more that a CTA has drawn is one that no other can take.
constexpr int kPassSlots = 3, kPassSlotBytes = 32, kExpertPassBytes = kPassSlots * (kPassSlotBytes + 2 * 8);
static_assert(kExpertPassBytes % 16 == 0);

/// Distributes the row blocks, token tiles and records of `schedule`, with its `most`, `split` and `even`, to `ctas` CTAs, in tiles of
/// `tokens` tokens.
NIBBLE_HOST_DEVICE constexpr void distribute(Schedule& schedule, int tokens, int ctas) {
  const auto up = [](int a, int b) { return (a + b - 1) / b; };
  const bool bands = schedule.even || takes_bands(schedule.token_tiles, tokens);
  schedule.row_tiles = up(schedule.row_blocks, schedule.most);
  const int passes = schedule.passes(), multiple = ctas - ctas % schedule.token_tiles;
  schedule.whole = passes;
  if (schedule.split > 1) {
    while (1 << schedule.shift < schedule.split) ++schedule.shift;
    schedule.clusters = passes;  // one each
    schedule.band = 1;
  } else if (schedule.split == 1 && !bands) {
    const int units = schedule.units();
    schedule.clusters = units < ctas ? units : ctas;
    if (0 < multiple && multiple < units && up(units, multiple) == up(units, ctas)) schedule.clusters = multiple;
    schedule.divide(units);
    schedule.band = 0;
  } else {
    schedule.band = kBandTokens / tokens < schedule.token_tiles ? kBandTokens / tokens : schedule.token_tiles;
    schedule.clusters = passes < ctas ? passes : ctas;
  }
  if (schedule.split == kStreamK) {
    const std::int64_t all = std::int64_t{passes} * schedule.records;
    schedule.clusters = all < ctas ? static_cast<int>(all) : ctas;
    const int rest = passes % schedule.clusters;
    // A pass shared by many CTAs takes long to reduce: with a whole round in the line at most three share one.
    constexpr int kFew = 3;
    schedule.whole = passes - rest;
    if (rest != 0 && kFew * rest < schedule.clusters && schedule.whole > 0) schedule.whole -= schedule.clusters;
    if (schedule.whole == 0 && schedule.clusters == ctas && ctas - multiple <= ctas / 16) {
      schedule.band = 1;  // so that the line is one token tile after the other
      schedule.clusters = multiple;
    }
    schedule.divide((passes - schedule.whole) * schedule.records);
    schedule.by_records = Divisor(schedule.records);
  }
  schedule.by_row_blocks = Divisor(schedule.row_blocks);
  schedule.by_most = Divisor(schedule.most);
  if (schedule.band != 0) {
    schedule.by_band = Divisor(schedule.band * schedule.row_tiles);
    schedule.by_high = Divisor(schedule.band);
    if (const int over = schedule.token_tiles % schedule.band; over != 0) schedule.by_last = Divisor(over);
  }
}

}  // namespace nibble::cuda
