#include "nibble/write_module.hpp"

#include <algorithm>
#include <utility>

#include "checkpoint/config/format.hpp"
#include "checkpoint/io/json.hpp"
#include "core/error.hpp"

namespace nibble {
namespace {

Result<const codec::Format*> writable(std::string_view name) {
  const codec::Format* const format = codec::find_format(name);
  if (format != nullptr && format->can_write) return format;
  std::string names;
  for (const codec::Format& f : codec::format_table())
    if (f.can_write) names += (names.empty() ? "" : ", ") + std::string(f.name);
  return error(StatusCode::not_found, "'{}' is no format that nibble writes; choose one of {}", name.substr(0, 40), names);
}

}  // namespace

Result<std::vector<ModuleTensor>> write_module(const QuantTensor& q, std::string_view format_name, const ActScheme& act) try {
  NIBBLE_ASSIGN_OR_RETURN(const codec::Format* format, writable(format_name));
  NIBBLE_RETURN_IF_ERROR(q.validate());
  if (q.filter != Extent{})
    return error(StatusCode::unsupported, "a convolution of {}x{}; write_module writes linear layers", q.filter.h, q.filter.w);
  NIBBLE_ASSIGN_OR_RETURN(std::vector<codec::EncodedTensor> encoded, format->write(q, act));
  std::vector<ModuleTensor> tensors;
  for (codec::EncodedTensor& t : encoded) tensors.push_back({std::move(t.suffix), std::move(t.tensor)});
  return tensors;
} catch (...) {
  return caught();
}

Result<std::string> write_config(std::string_view format_name, std::span<const WrittenLayer> layers,
                                 std::span<const std::string> not_quantized) try {
  NIBBLE_ASSIGN_OR_RETURN(const codec::Format* format, writable(format_name));
  codec::WrittenCheckpoint written;
  for (const WrittenLayer& layer : layers) {
    NIBBLE_ASSIGN_OR_RETURN(const codec::Format* own, writable(layer.format));
    written.modules.push_back({.name = layer.name,
                               .scheme = layer.scheme.weight,
                               .act_order = layer.act_order,
                               .act = layer.scheme.act,
                               .format = own->name});
  }
  written.not_quantized.assign(not_quantized.begin(), not_quantized.end());
  NIBBLE_ASSIGN_OR_RETURN(const Json config, format->write_config(written));
  return storage::dump(config);
} catch (...) {
  return caught();
}

}  // namespace nibble
