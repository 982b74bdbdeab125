// The format of a weight's records for the mainloop of a kernel: plain values, passed as parameters.
#pragma once

#include "kernels/cuda/tasks/linear_task.hpp"

namespace nibble::cuda {

/// The format of a record.
struct RecordFormat {
  int bytes;
  int span;          // channels that share a slot: 8, 16, 32, 64 or 128
  int slots_offset;  // of slot 0 in a record
  int slot_bytes;
  int zeros_offset;  // in a slot
  DType scale_type;
  ZeroKind zero;
  DType zero_type;
  float zero_base;
};

inline RecordFormat record_format(const DeviceWeight& w) {
  const gpu_tile::Geometry& g = w.geometry;
  return {g.record_bytes(), g.span, g.scale_offset(0), g.slot_bytes(), g.zero_offset(0) - g.scale_offset(0),
          w.scale_type,     w.zero, w.zero_type,       w.zero_base};
}

}  // namespace nibble::cuda
