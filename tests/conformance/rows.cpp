#include "rows.hpp"

namespace nibble {

const bool kGpuRowsAreBuilt = NIBBLE_WITH_CUDA;

}  // namespace nibble
