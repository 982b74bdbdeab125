// The list of formats is the order of detection: packed ones first, then formats that nibble recognises but cannot read, dense last.
#include "checkpoint/codecs/table.hpp"

#include <algorithm>

namespace nibble::codec {

std::span<const Format> format_table() {
  static const Format kTable[] = {kAwq,          kGptq,  kCompressedTensors, kIntQuantized, kFloatQuantized, kFp8, kSmoothQuant,
                                  kModelOptInt4, kMxfp4, kNibbleCodes,       kUnsupported,  kDense};
  return kTable;
}

const Format* find_format(std::string_view name) {
  const auto table = format_table();
  const auto it = std::ranges::find(table, name, &Format::name);
  return it == table.end() ? nullptr : &*it;
}

}  // namespace nibble::codec
