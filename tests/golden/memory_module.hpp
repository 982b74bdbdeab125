// A module with tensors in memory, to call a format without a file.
#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include "checkpoint/config/format.hpp"

namespace nibble::testing {

struct MemoryModule {
  std::vector<codec::EncodedTensor> tensors;
  codec::QuantConfig config;

  Tensor* find(std::string_view suffix) {
    for (codec::EncodedTensor& t : tensors)
      if (t.suffix == suffix) return &t.tensor;
    return nullptr;
  }
  void erase(std::string_view suffix) {
    std::erase_if(tensors, [&](const codec::EncodedTensor& t) { return t.suffix == suffix; });
  }
  MemoryModule& set(const char* key, nlohmann::json value) {
    config.json[key] = std::move(value);
    return *this;
  }

  /// Views of the tensors; those of rank above 4 are left out.
  codec::ModuleTensors views() const {
    codec::ModuleTensors parts{"m", {}};
    for (const auto& [suffix, tensor] : tensors) {
      ConstTensorView view(tensor.bytes.data(), tensor.dtype, {});
      if (tensor.shape.size() > view.shape.size()) continue;
      view.rank = static_cast<int>(tensor.shape.size());
      std::int64_t stride = 1;
      for (std::size_t i = tensor.shape.size(); i-- > 0;) {
        view.shape[i] = tensor.shape[i];
        view.strides[i] = stride;
        stride *= tensor.shape[i];
      }
      parts.by_suffix[suffix] = view;
    }
    return parts;
  }

  struct Detected {
    const codec::Format* format = nullptr;  // null: no format knows it
    Result<Module> module = Status(StatusCode::not_found, "no format");
  };
  Detected detect() const {
    const codec::ModuleTensors parts = views();
    for (const codec::Format& format : codec::format_table())
      if (auto found = format.detect(parts, config)) return {&format, *std::move(found)};
    return {};
  }
  Result<QuantTensor> read(std::vector<Note>& notes) const {
    const Detected detected = detect();
    if (!detected.module.ok()) return detected.module.status();
    return detected.format->read(views(), *detected.module, config, notes);
  }
};

/// The tensors that `format` writes for q, with its config.
inline Result<MemoryModule> write_module(const codec::Format& format, const QuantTensor& q, const ActScheme& act = {}) {
  auto tensors = format.write(q, act);
  if (!tensors.ok()) return tensors.status();
  auto config = format.write_config({.modules = {{"m", q.scheme, !q.g_idx.empty(), act}}, .not_quantized = {"lm_head"}});
  if (!config.ok()) return config.status();
  return MemoryModule{*std::move(tensors), {*std::move(config), "config.json", nullptr}};
}

}  // namespace nibble::testing
