// The formats, one definition per file; table.cpp puts them in order.
#pragma once

#include "checkpoint/config/format.hpp"

namespace nibble::codec {

extern const Format kAwq, kGptq, kCompressedTensors, kIntQuantized, kFloatQuantized, kFp8, kSmoothQuant, kModelOptInt4, kMxfp4,
    kNibbleCodes, kUnsupported, kDense;

}  // namespace nibble::codec
