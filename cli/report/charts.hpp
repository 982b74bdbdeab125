// The pictures of the report. Each returns an HTML fragment, empty when there is nothing to draw.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "report/report.hpp"

namespace nibble::cli {

/// Layers with the same role in every block: "down_proj" of all of them, in file order. Where layers were measured in several modes, a
/// mode with all of its layers.
struct LayerKind {
  std::string name;
  std::vector<const ReportLayer*> layers;
};
std::vector<LayerKind> kinds_of(const ReportData& data);

/// Every M timed, in order. Its position here is the number of its colour.
std::vector<std::int64_t> m_values(const ReportData& data);
const ReportTiming* timing_for(const ReportLayer& layer, std::int64_t m);

/// The known peaks that layers are compared with, lowest first.
std::vector<Ceiling> peaks_of(const ReportData& data);
/// "GB/s", "GFLOP/s" or "Gop/s".
std::string_view unit_of(Ceiling ceiling);

/// The legend of marks: one per M.
std::string m_legend(const std::vector<std::int64_t>& ms);

std::string roofline_chart(const ReportData& data);
/// Per kind and M: the share of the roofline that was reached.
std::string efficiency_chart(const ReportData& data);
std::string sqnr_chart(const ReportData& data);
std::string kernel_error_chart(const ReportData& data);

}  // namespace nibble::cli
