// Verification of whole checkpoints, for `verify` and for the report.
#pragma once

#include <cstdint>
#include <regex>
#include <span>
#include <string>
#include <vector>

#include "nibble/nibble.hpp"

namespace nibble::tools {

struct VerifiedLayer {
  std::string name, scheme;
  std::int64_t m = 1, n = 0, k = 0;
  VerifyReport report;
};

/// verify_linear for every quantized module that matches, and every M; `spec` gives the rest.
Result<std::vector<VerifiedLayer>> verify_checkpoint(const Checkpoint& checkpoint, const std::regex& layer,
                                                     std::span<const std::int64_t> m_list, VerifySpec spec, Executor& executor);

}  // namespace nibble::tools
