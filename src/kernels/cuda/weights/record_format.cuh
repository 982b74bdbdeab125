// The format of a weight's records for the mainloop of a kernel: plain values, passed as parameters.
#pragma once

#include "kernels/cuda/tasks/linear_task.hpp"

namespace nibble::cuda {

/// The format of a record.
struct RecordFormat {
  gpu_tile::Codes codes;
  int bytes;
  int span;          // channels that share a slot: 8, 16, 32, 64 or 128
  int slots_offset;  // of slot 0 in a record
  int slot_bytes;
  int zeros_offset;  // in a slot
  DType scale_type;
  ZeroKind zero;
  DType zero_type;
  float zero_base;

  bool operator==(const RecordFormat&) const = default;
};

inline RecordFormat record_format(const DeviceWeight& w) {
  const gpu_tile::Geometry& g = w.geometry;
  return {.codes = w.codes,
          .bytes = g.record_bytes(),
          .span = g.span,
          .slots_offset = g.scale_offset(0),
          .slot_bytes = g.slot_bytes(),
          .zeros_offset = g.zero_offset(0) - g.scale_offset(0),
          .scale_type = w.scale_type,
          .zero = w.zero,
          .zero_type = w.zero_type,
          .zero_base = w.zero_base};
}

}  // namespace nibble::cuda
