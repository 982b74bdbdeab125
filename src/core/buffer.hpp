// Memory for packed weights: aligned and uninitialised on the host, or on a GPU.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <utility>

#include "nibble/cuda.hpp"

namespace nibble {

/// A fixed-size block. On the host it is aligned for every vector width; large ones ask for transparent huge pages, which spare a
/// core that streams a weight most of its TLB misses.
class Buffer {
 public:
  static constexpr std::size_t kAlignment = 64;
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;

  Buffer() = default;
  explicit Buffer(std::size_t size) : size_(size) {
    const std::size_t alignment = size >= kHugePage ? kHugePage : kAlignment;
    const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded)));
    if (!data_) throw std::bad_alloc();
    if (alignment == kHugePage) (void)madvise(data_.get(), rounded, MADV_HUGEPAGE);
  }

  explicit Buffer(DeviceMemory memory) : size_(memory.size()), device_(std::move(memory)) {}

  /// data() is device memory.
  bool on_device() const { return device_.data() != nullptr; }
  std::byte* data() { return on_device() ? device_.data() : data_.get(); }
  const std::byte* data() const { return on_device() ? device_.data() : data_.get(); }
  std::size_t size() const { return size_; }
  std::span<std::byte> span() { return {data(), size_}; }
  std::span<const std::byte> span() const { return {data(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_ = 0;
  DeviceMemory device_;
};

}  // namespace nibble
