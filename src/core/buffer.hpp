// Memory for weights: packed ones, aligned and uninitialised on the host, or memory that another object owns; and vectors of bytes.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <utility>
#include <vector>

namespace nibble {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// `size` zero bytes. Before the first is written, large vectors request transparent huge pages: page faults of 4 KiB take longer than
/// decoding a checkpoint into such a vector.
template <class Byte>
std::vector<Byte> zero_bytes(std::size_t size) {
  static_assert(sizeof(Byte) == 1);
  constexpr std::size_t kPage = 4096;
  std::vector<Byte> bytes;
  bytes.reserve(size);
  if (size >= 2 * kHugePage) {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
    const std::uintptr_t first = (address + kPage - 1) / kPage * kPage, end = (address + size) / kPage * kPage;
    (void)madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
  }
  bytes.resize(size);
  return bytes;
}

/// A fixed-size block. On the host it is aligned for every vector width; large blocks request transparent huge pages, which save a core
/// that streams a weight most of its TLB misses.
class Buffer {
 public:
  static constexpr std::size_t kAlignment = 64;

  Buffer() = default;
  explicit Buffer(std::size_t size) : size_(size) {
    const std::size_t alignment = size >= kHugePage ? kHugePage : kAlignment;
    const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
    data_ = {static_cast<std::byte*>(std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded)), {}};
    if (!data_) throw std::bad_alloc();
    if (alignment == kHugePage) (void)madvise(data_.get(), rounded, MADV_HUGEPAGE);
  }

  /// Device memory, as long as `owner` lives.
  Buffer(std::byte* data, std::size_t size, std::shared_ptr<void> owner) : data_(data, {std::move(owner), true}), size_(size) {}

  /// Bytes of the host that are only read, such as those of a mapped file, as long as `owner` lives.
  Buffer(std::span<const std::byte> bytes, std::shared_ptr<const void> owner)
      : data_(const_cast<std::byte*>(bytes.data()), {std::move(owner), false}), size_(bytes.size()) {}

  /// data() is device memory.
  bool on_device() const { return data_.get_deleter().device; }
  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  std::span<std::byte> span() { return {data(), size_}; }
  std::span<const std::byte> span() const { return {data(), size_}; }

 private:
  struct Release {
    std::shared_ptr<const void> owner;  // null: this buffer
    bool device;                        // where the bytes are
    void operator()(std::byte* host) const {
      if (owner == nullptr) std::free(host);
    }
  };
  std::unique_ptr<std::byte, Release> data_;
  std::size_t size_ = 0;
};

}  // namespace nibble
