// One module's tensors from memory: what Checkpoint::read does, for callers with a loader of their own.
#include <exception>

#include "core/error.hpp"
#include "formats/format.hpp"
#include "formats/json.hpp"
#include "formats/model_config.hpp"

namespace nibble {
namespace {

Status expect_dense(const NamedView& named) {
  const ConstTensorView& view = named.view;
  if (view.empty() && view.numel() != 0)
    return error(StatusCode::invalid_argument, "tensor {} has no data", storage::printable(named.name));
  std::int64_t stride = 1;
  for (int i = view.rank; i-- > 0; stride *= view.dim(i))
    if (view.dim(i) > 1 && view.stride(i) != stride)
      return error(StatusCode::invalid_argument, "tensor {} is not dense: dimension {} has stride {}, not {}",
                   storage::printable(named.name), i, view.stride(i), stride);
  return {};
}

Result<QuantTensor> decode_module(std::span<const NamedView> tensors, std::string_view config_text, std::vector<Note>* notes) {
  codec::ModuleTensors module{"tensors", {}};
  for (const NamedView& tensor : tensors) {
    NIBBLE_RETURN_IF_ERROR(expect_dense(tensor));
    if (!module.by_suffix.emplace(tensor.name, tensor.view).second)
      return error(StatusCode::invalid_argument, "there are two tensors called {}", storage::printable(tensor.name));
  }
  codec::QuantConfig config;
  if (!config_text.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(config, storage::parse_quant_config(config_text));
  }
  for (const codec::Format& format : codec::format_table()) {
    const auto found = format.detect(module, config);
    if (!found) continue;
    NIBBLE_ASSIGN_OR_RETURN(const Module detected, *found);
    if (!detected.quantized())
      return error(StatusCode::unsupported, "the tensors are a {} module: there are no codes to read", detected.format);
    std::vector<Note> findings = detected.notes;
    NIBBLE_ASSIGN_OR_RETURN(QuantTensor q, format.read(module, detected, config, findings));
    if (const Status invalid = q.validate(); !invalid.ok()) return Status(StatusCode::corrupt_data, invalid.message());
    if (notes != nullptr) notes->insert(notes->end(), findings.begin(), findings.end());
    return q;
  }
  std::string names;
  for (const NamedView& tensor : tensors) names += (names.empty() ? "" : ", ") + storage::printable(tensor.name);
  return error(StatusCode::unsupported, "no format has a module of these tensors: {}", names.empty() ? "none" : names);
}

}  // namespace

Result<QuantTensor> decode(std::span<const NamedView> tensors, std::string_view config, std::vector<Note>* notes) try {
  return decode_module(tensors, config, notes);
} catch (const std::exception& e) {
  return error(StatusCode::io_error, "cannot decode the tensors: {}", e.what());
}

}  // namespace nibble
