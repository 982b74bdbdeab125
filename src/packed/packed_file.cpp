// Reading files of packed weights.
#include "nibble/packed_file.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/io/json.hpp"
#include "checkpoint/io/mapped_file.hpp"
#include "checkpoint/io/safetensors.hpp"
#include "checkpoint/io/shards.hpp"
#include "core/error.hpp"
#include "core/weight_check.hpp"
#include "kernels/finish.hpp"
#include "packed/description.hpp"
#include "packed/format.hpp"
#include "plan/check.hpp"
#include "plan/pack.hpp"

namespace nibble {
namespace fs = std::filesystem;
using namespace packed;
using storage::printable;

/// A weight of the file: its description, and its tensors. Null: it has no such tensor.
struct StoredWeight {
  PackedWeightHeader header;
  const TensorInfo *packed = nullptr, *perm = nullptr, *prescale = nullptr, *bias = nullptr, *channel_sums = nullptr;
};

struct PackedFile::Impl {
  static Result<std::shared_ptr<const Impl>> open(const fs::path& path);
  Result<PackedWeight> load(std::size_t index) const;

  fs::path path;
  std::shared_ptr<const storage::MappedFile> file;
  std::vector<TensorInfo> tensors;
  std::string library_version, checkpoint;
  std::vector<PackedModule> modules;
  std::vector<StoredWeight> stored;  // of each module
  std::unordered_map<std::string_view, std::size_t> index;

 private:
  Status read_modules(const Json& json);
  Result<Tensor> read_tensor(const TensorInfo& info) const;
};

namespace {

/// The value of a key of the metadata; "" when there is none.
std::string_view find_value(const storage::Metadata& metadata, std::string_view key) {
  const auto found = std::ranges::find(metadata, key, &storage::Metadata::value_type::first);
  return found == metadata.end() ? std::string_view() : found->second;
}

Status check_format(const storage::Metadata& metadata, const fs::path& path) {
  if (find_value(metadata, kFormatKey) != kFormatName)
    return error(StatusCode::corrupt_data,
                 "{} is no file of packed weights: its metadata has no \"{}\": \"{}\"; nibble pack makes one", path.string(),
                 kFormatKey, kFormatName);
  const std::string_view version = find_value(metadata, kFormatVersionKey);
  if (version == kFormatVersion) return {};
  return error(StatusCode::unsupported,
               "{} has version {} of the format of packed weights, and this library reads {}: pack it again", path.string(),
               printable(version), kFormatVersion);
}

/// Ok for a tensor of that type and shape.
Status check_tensor(const TensorInfo& tensor, DType dtype, std::int64_t length) {
  if (tensor.dtype == dtype && tensor.shape == std::vector<std::int64_t>{length}) return {};
  return error(StatusCode::corrupt_data, "tensor {} is {} [{}], expected {} [{}]", printable(tensor.name), name(tensor.dtype),
               fmt::join(tensor.shape, ","), name(dtype), length);
}
Status check_floats(const TensorInfo& tensor, std::int64_t length) {
  if (is_compute_float(tensor.dtype)) return check_tensor(tensor, tensor.dtype, length);
  return error(StatusCode::corrupt_data, "tensor {} is {}, expected f32, f16 or bf16", printable(tensor.name),
               name(tensor.dtype));
}

WeightDesc desc_of(const StoredWeight& weight) {
  const PackedWeightHeader& header = weight.header;
  return {.scheme = header.scheme,
          .n = header.n,
          .k = header.k,
          .zero_type = header.zero_type,
          .filter = header.filter,
          .act_order = weight.perm != nullptr,
          .prescale = weight.prescale != nullptr,
          .static_acts = header.static_acts};
}

/// Whether what the file says about a weight fits together.
Status check(const StoredWeight& weight, const Description& description) {
  const PackedWeightHeader& header = weight.header;
  const auto corrupt = [](const Status& status) {
    return status.ok() ? status : Status(StatusCode::corrupt_data, status.message());
  };
  NIBBLE_RETURN_IF_ERROR(corrupt(check_weight({header.scheme, header.n, header.k, header.zero_type, header.filter,
                                               weight.perm != nullptr, header.static_acts, header.act_limit})));
  if (const std::string reason = refusal(*header.layout, header.scheme, header.zero_type, header.k); !reason.empty())
    return error(StatusCode::corrupt_data, "layout {} cannot hold it: {}", header.layout->name, reason);
  const std::size_t size = header.layout->size(header.scheme, header.zero_type, header.n, header.k);
  if (description.bytes != size)
    return error(StatusCode::corrupt_data, "has {} bytes, and W[{},{}] of {} in layout {} takes {}", description.bytes, header.n,
                 header.k, header.scheme.name(), header.layout->name, size);
  NIBBLE_RETURN_IF_ERROR(check_tensor(*weight.packed, DType::u8, static_cast<std::int64_t>(padded(size))));
  if (weight.packed->file_offset % kAlignment != 0)
    return error(StatusCode::corrupt_data, "tensor {} begins at byte {}, not at a multiple of {}", printable(weight.packed->name),
                 weight.packed->file_offset, kAlignment);
  if (weight.perm != nullptr) NIBBLE_RETURN_IF_ERROR(check_tensor(*weight.perm, DType::s32, header.k));
  if (weight.prescale != nullptr) NIBBLE_RETURN_IF_ERROR(check_floats(*weight.prescale, header.k));
  if (weight.bias != nullptr) NIBBLE_RETURN_IF_ERROR(check_floats(*weight.bias, header.n));
  const std::size_t sums = channel_sums_length(header.scheme, header.n);
  if ((weight.channel_sums != nullptr) != (sums != 0))
    return error(StatusCode::corrupt_data, "{}",
                 sums != 0 ? "has no channel_sums" : "has channel_sums, which such a weight has not");
  if (sums != 0) NIBBLE_RETURN_IF_ERROR(check_tensor(*weight.channel_sums, DType::f64, static_cast<std::int64_t>(sums)));
  const auto* const linear = std::get_if<LinearSpec>(&description.spec);
  if (header.paired != (linear != nullptr && pairs_rows(linear->epilogue, header.scheme)))
    return error(StatusCode::corrupt_data, "its rows lie {}in pairs, which is not as it was packed for",
                 header.paired ? "" : "not ");
  const WeightDesc desc = desc_of(weight);
  return corrupt(std::visit([&](const auto& spec) { return check_spec(desc, spec); }, description.spec))
      .with_context("what it was packed for");
}

/// Whether the sums can be those of a weight: kernels convert them to integers.
Status check_sums(const std::vector<double>& sums, const PackedWeightHeader& header) {
  const double most = 512.0 * static_cast<double>(header.k);  // codes and zero points have up to 8 bits
  const auto bad = std::ranges::find_if(sums, [&](double sum) { return !(std::abs(sum) <= most) || sum != std::trunc(sum); });
  if (bad == sums.end()) return {};
  return error(StatusCode::corrupt_data, "channel_sums[{}] is {}, not a whole number of at most {}", bad - sums.begin(), *bad,
               most);
}

/// Whether every input channel is there once.
Status check_perm(const std::vector<std::int32_t>& perm) {
  std::vector<bool> seen(perm.size());
  for (std::size_t i = 0; i < perm.size(); ++i) {
    const auto channel = static_cast<std::size_t>(static_cast<std::uint32_t>(perm[i]));
    if (channel >= perm.size() || seen[channel])
      return error(StatusCode::corrupt_data, "perm[{}] is {}, {}", i, perm[i],
                   channel >= perm.size() ? fmt::format("outside [0,{})", perm.size()) : "for the second time");
    seen[channel] = true;
  }
  return {};
}

template <class T>
std::vector<T> elements(const Tensor& tensor) {
  return {tensor.as<T>(), tensor.as<T>() + tensor.numel()};
}

}  // namespace

Status PackedFile::Impl::read_modules(const Json& json) {
  const auto bad = [&](std::string_view module, const Status& status) {
    return status.with_context(fmt::format("{}: module {}", path.string(), printable(module)));
  };
  if (!json.is_object())
    return error(StatusCode::corrupt_data, "{}: \"{}\" of the metadata is no JSON object", path.string(), kModulesKey);
  std::unordered_map<std::string_view, const TensorInfo*> by_name;
  for (const TensorInfo& tensor : tensors) by_name.emplace(tensor.name, &tensor);
  std::vector<std::pair<PackedModule, StoredWeight>> found;
  std::size_t used = 0;
  for (const auto& item : json.items()) {
    const std::string& module = item.key();
    Result<Description> description = parse_description(item.value());
    if (!description.ok()) return bad(module, description.status());
    StoredWeight weight{.header = std::move(description->header)};
    const auto tensor = [&](std::string_view suffix) -> const TensorInfo* {
      const auto at = by_name.find(module + std::string(suffix));
      used += at == by_name.end() ? 0 : 1;
      return at == by_name.end() ? nullptr : at->second;
    };
    weight.packed = tensor(kPacked), weight.perm = tensor(kPerm), weight.prescale = tensor(kPrescale);
    weight.bias = tensor(kBias), weight.channel_sums = tensor(kChannelSums);
    if (weight.packed == nullptr)
      return bad(module, error(StatusCode::corrupt_data, "there is no tensor {}", printable(module + std::string(kPacked))));
    if (const Status sound = check(weight, *description); !sound.ok()) return bad(module, sound);
    PackedModule described{.name = module,
                           .desc = desc_of(weight),
                           .spec = description->spec,
                           .layout = weight.header.layout->name,
                           .has_bias = weight.bias != nullptr,
                           .bytes = description->bytes,
                           .source = std::move(description->source)};
    found.emplace_back(std::move(described), std::move(weight));
  }
  if (used != tensors.size())
    return error(StatusCode::corrupt_data, "{}: {} of its {} tensors belong to no module that \"{}\" describes", path.string(),
                 tensors.size() - used, tensors.size(), kModulesKey);
  std::ranges::sort(found, {}, [](const auto& each) { return each.second.packed->file_offset; });
  for (auto& [module, weight] : found) {
    modules.push_back(std::move(module));
    stored.push_back(std::move(weight));
  }
  for (std::size_t i = 0; i < modules.size(); ++i) index.emplace(modules[i].name, i);
  return {};
}

Result<std::shared_ptr<const PackedFile::Impl>> PackedFile::Impl::open(const fs::path& path) {
  auto impl = std::make_shared<Impl>();
  impl->path = path;
  NIBBLE_ASSIGN_OR_RETURN(impl->file, storage::MappedFile::open(path));
  NIBBLE_ASSIGN_OR_RETURN(storage::SafetensorsHeader header, storage::read_header(*impl->file, path));
  NIBBLE_RETURN_IF_ERROR(check_format(header.metadata, path));
  impl->tensors = std::move(header.tensors);
  impl->library_version = find_value(header.metadata, kLibraryVersionKey);
  impl->checkpoint = find_value(header.metadata, kCheckpointKey);
  NIBBLE_ASSIGN_OR_RETURN(const Json json,
                          storage::parse_json<Json>(find_value(header.metadata, kModulesKey),
                                                    fmt::format("{}: \"{}\"", path.string(), kModulesKey), true));
  NIBBLE_RETURN_IF_ERROR(impl->read_modules(json));
  return std::shared_ptr<const Impl>(std::move(impl));
}

Result<Tensor> PackedFile::Impl::read_tensor(const TensorInfo& info) const {
  Tensor tensor(info.dtype, info.shape);
  NIBBLE_RETURN_IF_ERROR(file->read(info.file_offset, tensor.bytes));
  return tensor;
}

Result<PackedWeight> PackedFile::Impl::load(std::size_t i) const {
  const StoredWeight& from = stored[i];
  auto weight = std::make_shared<PackedWeightData>();
  static_cast<PackedWeightHeader&>(*weight) = from.header;
  if (from.perm != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(const Tensor perm, read_tensor(*from.perm));
    weight->perm = elements<std::int32_t>(perm);
    NIBBLE_RETURN_IF_ERROR(check_perm(weight->perm));
  }
  if (from.channel_sums != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(const Tensor sums, read_tensor(*from.channel_sums));
    weight->channel_sums = elements<double>(sums);
    NIBBLE_RETURN_IF_ERROR(check_sums(weight->channel_sums, from.header));
  }
  if (from.bias != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(weight->bias, read_tensor(*from.bias));
  }
  if (from.prescale != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(weight->prescale, read_tensor(*from.prescale));
    for (std::int64_t k = 0; k < from.header.k; ++k) weight->prescale_f32.push_back(weight->prescale.at(k));
  }
  std::byte last;  // a file that has been truncated has no such page
  NIBBLE_RETURN_IF_ERROR(file->read(from.packed->file_offset + from.packed->bytes - 1, {&last, 1}));
  weight->bytes = Buffer(file->bytes().subspan(from.packed->file_offset, modules[i].bytes), file);
  return PackedWeight(std::move(weight), modules[i].spec);
}

Result<PackedFile> PackedFile::open(const fs::path& path) try {
  NIBBLE_ASSIGN_OR_RETURN(auto impl, Impl::open(path));
  return PackedFile(std::move(impl));
} catch (const std::exception&) {
  return error(StatusCode::io_error, "cannot open {}: {}", path.string(), caught().message());
}

bool PackedFile::recognises(const fs::path& path) try {
  const auto file = storage::MappedFile::open(path);
  if (!file.ok()) return false;
  const auto header = storage::read_header(**file, path);
  return header.ok() && find_value(header->metadata, kFormatKey) == kFormatName;
} catch (...) {
  return false;
}

const fs::path& PackedFile::path() const { return impl_->path; }
const std::string& PackedFile::library_version() const { return impl_->library_version; }
const std::string& PackedFile::checkpoint() const { return impl_->checkpoint; }
std::span<const PackedModule> PackedFile::modules() const { return impl_->modules; }

const PackedModule* PackedFile::find(std::string_view name) const {
  const auto found = impl_->index.find(name);
  return found == impl_->index.end() ? nullptr : &impl_->modules[found->second];
}

Result<PackedWeight> PackedFile::load(std::string_view name) const try {
  const auto found = impl_->index.find(name);
  if (found == impl_->index.end())
    return error(StatusCode::not_found, "{} has no module {}", impl_->path.string(), printable(name));
  Result<PackedWeight> weight = impl_->load(found->second);
  if (!weight.ok()) return weight.status().with_context(fmt::format("{}: module {}", impl_->path.string(), printable(name)));
  return weight;
} catch (const std::exception&) {
  return error(StatusCode::io_error, "cannot load {}: {}", printable(name), caught().message());
}

}  // namespace nibble
