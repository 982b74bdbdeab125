// A tensor map is opaque: here it holds the arguments of ptx::load_box or ptx::load_patches.
#pragma once

#include <cstdint>

struct CUtensorMap {
  const std::uint8_t* bytes;
  std::int64_t pitch;                    // of rows, or of pixels
  std::int64_t m, row_bytes;             // of rows
  std::int64_t plane_pitch;              // of planes of rows; of one plane 0
  int images, height, width;             // of images
  int lower_w, lower_h, last_w, last_h;  // where a filter may begin: first and last
  int stride_w, stride_h;
  int box_rows, box_bytes;  // rows or pixels of a box, and bytes of each
  int element;              // bytes of the unit of columns and channels
};
