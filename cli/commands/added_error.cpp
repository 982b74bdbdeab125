#include "commands/added_error.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

std::string way_name(const ActScheme& act) {
  const std::string scheme = Scheme{.act = act}.name();
  return scheme.substr(0, scheme.find('_'));
}

// "0.82 % · 41.7".
std::string cell(double relative_l2) {
  if (relative_l2 == 0) return "exact";
  return fmt::format("{:.2f} % · {:.1f}", 100 * relative_l2, -20 * std::log10(relative_l2));
}

}  // namespace

std::vector<std::string> usual_activations() {
  return {"s8r", "s8zr", "s8g128", "s8zg128", "s8g32", "s8zg32", "s8og32", "e4m3r", "e4m3g128"};
}

Result<AddedErrorSource> AddedErrorSource::open(const std::filesystem::path& calibration, float outliers) {
  if (calibration.empty()) return AddedErrorSource(std::nullopt, outliers);
  auto inputs = Checkpoint::open(calibration);
  if (!inputs.ok()) return inputs.status().with_context("--calibration");
  return AddedErrorSource(*std::move(inputs), outliers);
}

Result<std::vector<ActError>> AddedErrorSource::measure(const Module& module, const QuantTensor& q,
                                                        const std::vector<ActScheme>& ways) const {
  ActErrorSpec spec;
  Tensor inputs;
  spec.outliers = outliers_;
  if (inputs_) {
    const TensorInfo* tensor = inputs_->find_tensor(module.name + ".input");
    if (tensor == nullptr) return std::vector<ActError>();
    if (tensor->shape.size() != 2)
      return Status(StatusCode::corrupt_data, fmt::format("{} has {} dimensions, not 2", tensor->name, tensor->shape.size()));
    auto loaded = inputs_->load(*tensor);
    if (!loaded.ok()) return loaded.status();
    inputs = *std::move(loaded);
    spec.inputs = ConstTensorView(inputs.bytes.data(), inputs.dtype, {inputs.shape[0], inputs.shape[1]});
    spec.tokens = 256;
  }
  return activation_errors(q, ways, spec);
}

std::string AddedErrorSource::describe() const {
  if (inputs_) return "inputs of " + inputs_->path().string();
  if (outliers_ == 1.0f) return "Gaussian activations";
  return fmt::format("Gaussian activations, every 256th channel ×{:g}", outliers_);
}

std::string added_error_text(const std::vector<AddedErrors>& modules, const AddedErrorSource& source, bool colour) {
  using enum Table::Align;
  std::string text = styled("added by quantizing activations", Style::bold, colour) + ", " + printable(source.describe()) +
                     ": relative L2 error · SQNR dB, against the same weights and exact activations\n";
  if (modules.empty()) return text + "nothing was measured\n";
  std::vector<Table::Column> columns{{"module"}};
  const std::vector<ActError>& first = modules.front().errors;
  for (const ActError& error : first) columns.push_back({way_name(error.act_scheme), right});
  Table table(std::move(columns));
  std::vector<std::vector<double>> by_way(first.size());
  for (const AddedErrors& module : modules) {
    std::vector<Cell> row{printable(module.module)};
    for (std::size_t i = 0; i < module.errors.size(); ++i) {
      const ActError& error = module.errors[i];
      row.emplace_back(error.possible.ok() ? Cell(cell(error.relative_l2)) : Cell("refused", Style::dim));
      if (error.possible.ok()) by_way[i].push_back(error.relative_l2);
    }
    table.add(std::move(row));
  }
  if (modules.size() > 1) {
    std::vector<Cell> worst{Cell("worst", Style::bold)}, median{Cell("median", Style::bold)};
    for (std::vector<double>& values : by_way) {
      std::sort(values.begin(), values.end());
      worst.emplace_back(values.empty() ? "" : cell(values.back()));
      median.emplace_back(values.empty() ? "" : cell(values[values.size() / 2]));
    }
    table.add(std::move(median));
    table.add(std::move(worst));
  }
  return text + table.render(colour);
}

Json added_error_json(const std::vector<ActError>& errors) {
  Json list = Json::array();
  for (const ActError& error : errors) {
    Json json = {{"act_scheme", way_name(error.act_scheme)}};
    if (error.possible.ok()) {
      json["relative_l2"] = error.relative_l2;
      json["sqnr_db"] = error.relative_l2 == 0 ? Json() : Json(error.sqnr_db);
    } else {
      json["refusal"] = error.possible.message();
    }
    list.push_back(json);
  }
  return list;
}

}  // namespace nibble::cli
