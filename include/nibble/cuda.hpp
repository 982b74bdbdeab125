// NVIDIA GPUs: devices, device memory, and operators on checkpoints' tensors in it.
//
//   auto weight = nibble::pack(quant_tensor, spec, {.backend = Backend::cuda});    // bytes in device memory
//   auto plan   = nibble::Plan::linear(*weight);                                   // for that spec
//   plan->run(*weight, a, d, {}, workspace, nibble::Stream{stream});               // device pointers; enqueues, does not wait
//
// Needs no CUDA header. In a build without CUDA, and on a machine without a GPU, every call fails with the reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nibble/device.hpp"
#include "nibble/scheme.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"
#include "nibble/types.hpp"

namespace nibble {

/// A CUDA device.
struct GpuInfo {
  std::string name;                         // "NVIDIA H200"
  int ordinal = 0;                          // as cudaGetDevice counts
  int compute_capability = 0;               // 90 means 9.0
  int sms = 0;                              // multiprocessors
  std::int64_t shared_bytes_per_block = 0;  // shared memory, the most that a kernel may use
  std::int64_t l2_bytes = 0;                // shared by all multiprocessors
  std::int64_t memory_bytes = 0;            // in all, free or not
  double read_gbytes_per_s = 0;             // streaming reads, estimated from the memory's clock and width, not measured
  std::uint32_t isas = 0;                   // bit i: this build has kernels of level i (Isa) that run on it

  /// Whether kernels of that level run on it.
  bool has(Isa level) const { return (isas >> static_cast<int>(level) & 1) != 0; }
};

/// The device that is current in the calling thread. Fails with unsupported: built without CUDA, no driver, no device.
Result<GpuInfo> this_gpu();
/// A GPU that need not be there, for explain(): one of described_gpus(). Errors: not_found.
Result<GpuInfo> described_gpu(std::string_view name);
/// "h100" and "h200", whose kernels were measured.
std::vector<std::string_view> described_gpus();
/// Ok when kernels of that level run on the GPU; otherwise unsupported with the level it has.
Status runs_on(const GpuInfo& gpu, Isa level);

/// Device memory that frees itself; moves, does not copy.
class DeviceMemory {
 public:
  /// Holds nothing: null and 0.
  DeviceMemory() = default;
  /// Memory of the current device, aligned to 256 bytes. Errors: io_error when there is not enough, unsupported without a GPU.
  static Result<DeviceMemory> allocate(std::size_t bytes);
  DeviceMemory(DeviceMemory&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr, other.size_ = 0; }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceMemory();

  /// A device pointer; null when nothing is held.
  std::byte* data() const { return data_; }
  /// Its size in bytes.
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Copies from the host, in the order of the stream; returns when done.
Status copy_to_device(void* to, const void* from, std::size_t bytes, Stream stream = {});
/// Copies to the host, in the order of the stream; returns when done.
Status copy_from_device(void* to, const void* from, std::size_t bytes, Stream stream = {});
/// Waits until everything enqueued on the stream has finished; reports what went wrong there.
Status synchronize(Stream stream = {});

/// Measures the read bandwidth of the current GPU's memory, as RooflineProbe does for the CPU.
class GpuReadProbe {
 public:
  /// Allocates the buffer to read: 4 GiB, or an eighth of the GPU's memory if that is less. Errors: as DeviceMemory::allocate.
  static Result<GpuReadProbe> make();
  /// GB/s of a few passes; takes some milliseconds.
  Result<double> measure();
  /// Enqueues a kernel that reads and writes 256 KiB, as a model's norms and activation functions do between its layers. It is an ordinary
  /// one: it begins when all before it has ended, and what follows begins when it has.
  Status separate(Stream stream) const;

 private:
  DeviceMemory memory_, sink_;
};

/// D[M,N] = A[M,K] · W[N,K]ᵀ of dense 8-bit codes by cuBLASLt, without scales: what kernels that multiply codes are compared with.
class GpuCodesProduct {
 public:
  /// Of s8 codes to s8, or else to their s32 sums; of e4m3 codes to `out`, summed as `accumulation` says. By the algorithm that cuBLASLt
  /// recommends. Errors: unsupported where there is no cuBLASLt, or it has no algorithm.
  static Result<GpuCodesProduct> make(std::int64_t m, std::int64_t n, std::int64_t k, DType codes, DType out,
                                      Accumulation accumulation);
  /// Enqueues the product of device memory, whose rows are dense.
  Status run(const void* a, const void* w, void* d, Stream stream) const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

/// A quantized matrix as it lies in an AWQ or GPTQ checkpoint, in device memory; every tensor is dense.
struct CheckpointTensors {
  /// How qweight and qzeros are packed.
  enum class Format : std::uint8_t {
    awq,   // qweight [K, N/8], qzeros [G, N/8]: nibbles in AWQ's order; 4 bits
    gptq,  // qweight [⌈K·b/32⌉, N], qzeros [G, ⌈N·b/32⌉]: dense streams; 2, 3, 4 or 8 bits
  };
  Format format = Format::awq;    // how the checkpoint packs
  int bits = 4;                   // per code and zero point
  bool zeros_minus_one = false;   // GPTQ v1: qzeros holds (z − 1) mod 2^bits
  DType scale = DType::f16;       // f16, bf16 or f32
  std::int64_t n = 0, k = 0;      // W[N,K]: output and input channels
  std::int64_t group = 0;         // input channels a group; 0: all of K
  const void* qweight = nullptr;  // s32 words
  const void* qzeros = nullptr;   // s32 words
  const void* scales = nullptr;   // [G, N]
  const void* g_idx = nullptr;    // s32 [K], each in [0, G) (not checked); null: k / group
};

/// Enqueues W → `out`: f16, bf16 or f32, [N,K] or (transposed) [K,N], dense, device memory. Bit-identical to QuantTensor::value
/// rounded once to out.dtype. No packing, no synchronisation; allocates no device memory. Needs compute capability 7.5 or later, as
/// Isa::sm80 does.
/// Errors: invalid_argument with the values, unsupported without such a GPU.
Status dequantize(const CheckpointTensors& weight, const TensorView& out, bool transposed, Stream stream = {});

}  // namespace nibble
