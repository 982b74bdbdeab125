// Shared by the codecs: checked access to untrusted configs and shapes, and the steps of decoding that do not depend on a packing.
//
// Tensors are dense and row-major, at any address. A shape is multiplied only after its dimensions and dtype have been checked: its bytes
// are then in the file, so that no product of sizes overflows.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/config/format.hpp"
#include "core/error.hpp"

namespace nibble::codec {

// --- config: the first of `keys` with a value of the right type; a value of another type counts as absent --------------------

std::optional<std::int64_t> config_int(const Json& object, std::initializer_list<const char*> keys);
std::optional<double> config_number(const Json& object, std::initializer_list<const char*> keys);
std::optional<bool> config_bool(const Json& object, std::initializer_list<const char*> keys);
/// A string in lower case; "" when absent.
std::string config_text(const Json& object, std::initializer_list<const char*> keys);
/// A null value when absent.
const Json& config_child(const Json& object, const char* key);
/// The name of the config file, for messages.
std::string_view config_name(const QuantConfig& config);
/// [bn, bk], both from 1: the block of a config's weight_block_size or block_structure.
std::optional<GroupShape> config_block(const Json& object, std::initializer_list<const char*> keys);

// --- notes --------------------------------------------------------------------------------------------------------------------

template <class... Args>
void note(std::vector<Note>& notes, Note::Severity severity, fmt::format_string<Args...> format, Args&&... args) {
  notes.push_back({severity, fmt::format(format, std::forward<Args>(args)...)});
}
inline constexpr auto kInfo = Note::Severity::info;
inline constexpr auto kWarning = Note::Severity::warning;

/// Sets module.claimed, and notes where it disagrees with what was detected.
void claim(Module& module, const QuantConfig& config, const WeightScheme& weight, const ActScheme& act = {});
/// Notes a quant_method that is none of `expected`; one that is absent is fine.
void check_method(Module& module, const QuantConfig& config, std::span<const std::string_view> expected);

// --- shapes -------------------------------------------------------------------------------------------------------------------

inline constexpr std::initializer_list<DType> kFloats{DType::f16, DType::bf16, DType::f32};

/// "s32 [4096,1792]".
std::string describe(const ConstTensorView& view);
bool one_of(DType dtype, std::initializer_list<DType> dtypes);
/// corrupt_data, with both, unless the tensor is there with one of `dtypes` and exactly `shape`; −1 stands for any size from 1.
Status expect(const ModuleTensors& tensors, std::string_view suffix, std::initializer_list<DType> dtypes,
              std::initializer_list<std::int64_t> shape);
/// The same for a single number: [], [1] or [1,1].
Status expect_scalar(const ModuleTensors& tensors, std::string_view suffix, std::initializer_list<DType> dtypes);
/// Both from 1 to 2^31 − 1.
Status check_dimensions(const ModuleTensors& tensors, std::int64_t n, std::int64_t k);
/// bias, when there is one, is a float [N].
Status check_bias(const ModuleTensors& tensors, std::int64_t n);
/// n and k of `m`, and filter of a convolution, from weight_shape: s64 or s32 [N,K], or of a convolution [Co,Ci/groups,Kh,Kw].
Status read_weight_shape(const ModuleTensors& tensors, Module& m);

/// How K splits into `groups`: as the config says when that gives this many, else evenly, else an error. configured ≤ 0 is one
/// group.
Result<GroupShape> infer_group(const ModuleTensors& tensors, std::int64_t k, std::int64_t groups,
                               std::optional<std::int64_t> configured, const QuantConfig& config);
/// The same for the scales compressed-tensors uses: [], [1] or [1,1] per tensor, [N] or [N,1] per channel, [N,G] per group.
Result<GroupShape> infer_scale_group(const ModuleTensors& tensors, std::string_view suffix, std::int64_t n, std::int64_t k,
                                     std::optional<std::int64_t> configured, const QuantConfig& config);

/// u{bits}, or u{bits}b{2^(bits−1)} when symmetric; bits from 2 to 8.
std::optional<DType> code_type(std::int64_t bits, bool symmetric);
/// GroupShape of a config's group_size: −1 (or 0) means one group.
GroupShape configured_group(std::int64_t group_size);

// --- decoding -----------------------------------------------------------------------------------------------------------------

/// All codes that are stored so, for QuantTensor::codes; none for tensors without codes.
std::vector<std::uint8_t> read_codes(const ModuleTensors& tensors, const StoredCodes& stored);
inline const std::byte* bytes_of(const ConstTensorView& view) { return static_cast<const std::byte*>(view.data); }
/// The elements of `view`, in order, under another shape of the same size.
Tensor copy_as(const ConstTensorView& view, std::vector<std::int64_t> shape);
/// The one element of a tensor that passed expect_scalar.
inline float read_scalar(const ConstTensorView& view) { return copy_as(view, {1}).at(0); }
/// [rows, cols] → [cols, rows].
Tensor transposed(const ConstTensorView& view);
/// [N,G] zero points of unsigned codes.
Tensor zeros_tensor(std::vector<std::uint8_t> zeros, std::int64_t n, std::int64_t groups);

/// The bias; an empty tensor when there is none.
inline Tensor read_bias(const ModuleTensors& tensors, std::int64_t n) {
  const ConstTensorView* bias = tensors.find("bias");
  return bias == nullptr ? Tensor() : copy_as(*bias, {n});
}
/// Integer zero points that all are 2^(bits−1) become the biased code type; others are kept with a note that the claim of
/// symmetry is wrong.
void fold_symmetric(QuantTensor& q, std::vector<Note>& notes);

/// The result of checking a stored g_idx.
struct GroupIndex {
  enum class Kind { natural, permutation, all_zero, has_negative, invalid } kind;
  std::vector<std::int32_t> values;
  std::string why;  // invalid: the first contradiction
};
/// The g_idx called `suffix`; null when it is absent or has no elements.
const ConstTensorView* find_g_idx(const ModuleTensors& tensors, std::string_view suffix);
/// `view` is s32 or s64 [k].
GroupIndex inspect_g_idx(const ConstTensorView& view, const GroupShape& group, std::int64_t k);

// --- encoding -----------------------------------------------------------------------------------------------------------------

/// Whether a format holds float offsets and float zero points.
enum class FloatZeros : std::uint8_t { lacking, held };
/// Whether a format holds scales that all elements of a filter share.
enum class GroupsOfImages : std::uint8_t { lacking, held };
/// q is valid and has nothing that all written formats lack: second-level scales, activation pre-scales and limits.
Status check_writable(std::string_view format, const QuantTensor& q, FloatZeros float_zeros = FloatZeros::lacking,
                      GroupsOfImages groups_of_images = GroupsOfImages::lacking);
/// For formats that hold weights only: activations are not quantized.
Status check_weight_only(std::string_view format, const QuantTensor& q, const ActScheme& act);
/// Codes of 8 bits as they are, [N,K].
Tensor code_tensor(const QuantTensor& q);
Tensor word_tensor(std::vector<std::byte> words, std::int64_t rows, std::int64_t cols);
/// The s64 tensor that read_weight_shape reads.
Tensor weight_shape(const QuantTensor& q, bool conv);
/// Scales and zeros [N,G] → [G,N].
Tensor by_group(const Tensor& t);
/// For formats whose config holds one set of parameters and nothing else: all schemes have the bits and the group of the first, and the
/// source's config has no activations or KV cache that would be lost.
Status check_uniform(std::string_view format, const WrittenCheckpoint& written);
/// The same for formats whose layers each have parameters of their own: nothing of the source's config would be lost.
Status check_weights_alone(std::string_view format, const WrittenCheckpoint& written);
/// The names of all layers that are not quantized.
std::vector<std::string> not_quantized(const WrittenCheckpoint& written);
/// −1 for one group per channel.
inline std::int64_t config_group_size(const GroupShape& group) { return group.k == 0 ? -1 : group.k; }

}  // namespace nibble::codec
