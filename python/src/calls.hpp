// What a call from Python costs is here: how its arrays are found, which plan it takes, and who makes the result.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "arrays.hpp"
#include "nibble/nibble.hpp"

namespace nibble::python {

using Pair = std::pair<std::int64_t, std::int64_t>;  // of a height and a width
using OptionalFloat = std::optional<float>;

/// "s8r", or the name of a scheme that begins so; "" is no quantization. Throws Failure.
ActScheme act_from(std::string_view text);
/// Of "fast" or "precise". Throws Failure.
Accumulation accumulation_from(std::string_view text);
/// Of "cpu" or "cuda". Throws Failure.
Backend backend_from(std::string_view name);
/// What a weight is packed for. Throws Failure.
LinearSpec packing_spec(std::string_view a_dtype, std::string_view act_scheme, std::int64_t m_max, std::string_view accumulation);

/// The plans of one weight by what they were asked for. Guarded by the interpreter's lock.
template <class Spec>
class Plans {
 public:
  /// The plan of an earlier call, or a new one, made without the lock. Throws Failure.
  Plan get(const PackedWeight& weight, const Spec& spec, std::string_view kernel = {}, bool allow_reference = true);
  std::size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    Spec spec;
    std::string kernel;
    bool allow_reference;
    Plan plan;
  };
  std::vector<Entry> entries_;  // few: a look at each is cheaper than a hash of one
};

/// A packed weight, and what its calls need to know.
struct Weight {
  PackedWeight packed;
  int gpu = 0;  // that has it
  Plans<LinearSpec> linear = {};
  Plans<ConvSpec> conv = {};
  Plans<DequantizeSpec> dequantize = {};

  /// What it was packed for; a call may say otherwise.
  const LinearSpec& spec() const { return std::get<LinearSpec>(packed.spec()); }
  /// Of a glu: as it was packed.
  const EpilogueSpec& glu() const { return spec().epilogue; }
};

/// A weight that was packed for the current GPU, or for the CPU.
Weight weight_of(PackedWeight packed);

/// Experts, the plans of layers that they are gate_up of, and those of products of theirs alone.
struct Experts {
  PackedExperts packed;
  std::vector<nb::object> weights;  // whose memory `packed` reads
  struct Entry {
    const void* down;  // the experts' data
    LinearSpec gate_up_spec, down_spec;
    MoeSpec spec;
    std::string kernel;  // forced
    MoePlan plan;
  };
  std::vector<Entry> plans = {};
  struct Product {
    LinearSpec spec;
    std::string kernel;  // forced
    GroupedPlan plan;
  };
  std::vector<Product> products = {};
};

/// What linear() and conv() have in common, as Python passes it.
struct Options {
  nb::handle bias;  // an array, None or a bool
  std::string_view activation;
  std::pair<float, float> clamp;
  float negative_slope;
  nb::handle gate, residual, row_scale, col_scale, a_scale, a_zero;  // arrays or None
  std::optional<std::string_view> act_scheme, accumulation;
  nb::handle out_dtype;
  nb::handle out_scale, out_zero;  // numbers or arrays
  std::optional<std::pair<std::int32_t, std::int32_t>> out_range;
  nb::handle sum_bias;  // an array or None
  nb::handle out, stream;
  std::string_view kernel;
  bool allow_reference;
  const Weight* next = nullptr;
  nb::handle norm = nb::none();  // None, or (kind, weight, eps, bias, weight_offset, residual)
  PlanCache* plans = nullptr;    // null: the weight's own
};

/// y[..., N]: Options::out, or a new array of the kind of x.
nb::object linear(Weight& weight, nb::handle x, const Options& options);
/// y[B,Co,Oh,Ow], likewise. padding: top, bottom, left, right. channels_last: of a new result; as x is unless given.
nb::object conv(Weight& weight, nb::handle x, Pair stride,
                std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> padding, Pair dilation, std::int64_t groups,
                std::optional<bool> channels_last, const Options& options);
/// D[..., N]: `out`, or a new array of the kind of x.
nb::object moe(Experts& gate_up, const Experts& down, nb::handle x, nb::handle ids, nb::handle weights,
               std::string_view activation, nb::handle residual, nb::handle out_dtype, nb::handle out, std::string_view kernel);
/// D [R,N] of x [R,K] that is sorted by expert, [E,R,N] of [E,R,K] with counts, or [..., top_k, N] with ids: Options::out, or a new array of the
/// kind of x.
nb::object grouped(Experts& experts, nb::handle x, nb::handle offsets, nb::handle counts, nb::handle rows, nb::handle ids,
                   const Options& options);
/// logits [T,E] → (ids, weights), both [T,top_k].
nb::tuple route(nb::handle logits, nb::handle bias, const RouteSpec& spec, nb::handle stream);
/// W into `out` [N,K], or [K,N].
void dequantize(Weight& weight, nb::handle out, bool transposed, nb::handle stream);
/// x → (codes, scales, zeros), which are those given or new, None where the scheme has none.
nb::tuple quantize_activations(nb::handle x, std::string_view scheme, OptionalFloat scale, std::int32_t zero, OptionalFloat limit,
                               nb::handle prescale, nb::handle codes, nb::handle scales, nb::handle zeros, nb::handle stream);

}  // namespace nibble::python
