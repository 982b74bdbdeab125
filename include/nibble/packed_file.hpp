// Packed weights in files: packed once, mapped by every later start.
//
//   nibble::save_packed("model.nibble", {{"model.layers.0.mlp.down_proj", weight}, ...});
//
//   auto file   = nibble::PackedFile::open("model.nibble");
//   auto weight = file->load("model.layers.0.mlp.down_proj");  // its bytes are the mapped file: nothing is copied
//   auto plan   = nibble::Plan::linear(*weight);
//
// docs/howto/pack.md describes the format, a safetensors file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nibble/checkpoint.hpp"
#include "nibble/plan.hpp"
#include "nibble/status.hpp"

namespace nibble {

/// A packed weight of a file.
struct PackedModule {
  std::string name;         // that it was saved under
  WeightDesc desc;          // its shape and scheme
  PackedWeight::Spec spec;  // what it was packed for
  std::string_view layout;  // LayoutInfo::name
  bool has_bias = false;    // it has a bias of its own
  std::uint64_t bytes = 0;  // of PackedWeight::bytes()
  std::string source;       // Checkpoint::digest() of the module that it was packed from; "" when that is not recorded
};

/// Packed weights in a file, which stays open and memory-mapped as long as this, a copy or a weight from it lives.
class PackedFile {
 public:
  /// Checks everything but the packed bytes, which are not read. Errors: not_found; io_error; corrupt_data for what is no packed file, is
  /// truncated or contradicts itself; unsupported for a file of another format version, or with a layout that this library does not have
  /// in the same version: pack again then.
  static Result<PackedFile> open(const std::filesystem::path& path);
  /// The packed file beside a checkpoint, packed_path(). Findings of compare() are appended to `notes`.
  /// Errors: not_found when there is none, and those of open().
  static Result<PackedFile> beside(const Checkpoint& checkpoint, std::vector<ModuleNote>* notes = nullptr);
  /// Whether the file at `path` says that it is a packed file; false when it cannot be read.
  static bool recognises(const std::filesystem::path& path);

  /// The argument of open().
  const std::filesystem::path& path() const;
  /// The version of the library that wrote it: "0.2.0".
  const std::string& library_version() const;
  /// The name, without folders, of the checkpoint that it was packed from; "" when that is not recorded.
  const std::string& checkpoint() const;
  /// The weights, in the order that they were saved.
  std::span<const PackedModule> modules() const;
  /// The weight of that name; null when there is none.
  const PackedModule* find(std::string_view name) const;
  /// A weight in host memory whose bytes are the mapped file. As with every mapped file, touching a page that another program has truncated
  /// raises SIGBUS; files that nibble replaces stay whole for those who have them open. upload() copies a weight for the GPU there.
  /// Errors: not_found; io_error when the file has been truncated; corrupt_data.
  Result<PackedWeight> load(std::string_view name) const;
  /// A warning for each weight whose module in the checkpoint has changed since it was packed, or is gone.
  std::vector<ModuleNote> compare(const Checkpoint& checkpoint) const;

  struct Impl;
  /// For open().
  explicit PackedFile(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

/// How packed weights are saved.
struct SavePackedOptions {
  bool overwrite = false;  // replace an existing file
  /// Where the weights come from: the file records the digests of its modules of the same names, by which a changed checkpoint is noticed.
  /// Null: not recorded. Has to live as long as the writer.
  const Checkpoint* checkpoint = nullptr;
};

/// Writes packed weights one after the other: only one of them has to be in memory. The file appears with finish(), whole or not at all.
class PackedFileWriter {
 public:
  /// `names` are those of all weights to be added, in any order: the header comes first in the file, and is as long as they make it.
  /// Errors: already_exists; invalid_argument for a name of more than 1000 bytes, with control characters, or that is given twice; io_error.
  static Result<PackedFileWriter> create(const std::filesystem::path& path, std::span<const std::string> names,
                                         const SavePackedOptions& options = {});
  PackedFileWriter(PackedFileWriter&&) noexcept;
  ~PackedFileWriter();

  /// Writes a weight; one in device memory is copied to the host first. Errors: invalid_argument for a name that create() was not given or
  /// that was added before; io_error.
  Status add(std::string_view name, const PackedWeight& weight);
  /// Completes the file. Errors: invalid_argument when a name is missing; io_error.
  Status finish();

 private:
  struct Impl;
  explicit PackedFileWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Writes all of `weights` into a file, whole or not at all. Errors: those of PackedFileWriter.
Status save_packed(const std::filesystem::path& path, std::span<const std::pair<std::string, PackedWeight>> weights,
                   const SavePackedOptions& options = {});

/// pack(checkpoint.read(module), spec, options), bit for bit, without an array of codes between file and layout: blocks of the weight are
/// read, decoded and packed one after the other, on all threads of options.executor. In memory are the packed bytes and a few blocks; and of AWQ
/// and GPTQ, which store columns, all codes, where they are in act-order or the layout is none of cpu_n16 and cpu_n32. Findings of reading are
/// appended to `notes`.
/// Errors: those of Checkpoint::read and pack().
Result<PackedWeight> pack(const Checkpoint& checkpoint, const Module& module, const LinearSpec& spec,
                          const PackOptions& options = {}, std::vector<Note>* notes = nullptr);
/// The same for a convolution.
Result<PackedWeight> pack(const Checkpoint& checkpoint, const Module& module, const ConvSpec& spec,
                          const PackOptions& options = {}, std::vector<Note>* notes = nullptr);

/// Where the packed file of a checkpoint is looked for: MODEL.nibble beside the directory MODEL or the file MODEL.safetensors.
std::filesystem::path packed_path(const std::filesystem::path& checkpoint);

/// The packed weight of a module, and where it is from.
struct ModuleWeight {
  PackedWeight weight;         // for the specification that was asked for
  std::string packed_because;  // "": from the packed file; else why it was packed now, in a line
};
/// pack(checkpoint, module, spec, options), or the same weight from the packed file where that has it, in the layout that pack()
/// would choose, of a module that has not changed since; of Backend::cuda uploaded. `file` may be null. Findings of reading are appended
/// to `notes`. Errors: those of PackedFile::load, upload(), Checkpoint::read and pack().
Result<ModuleWeight> packed_weight(const Checkpoint& checkpoint, const Module& module, const LinearSpec& spec,
                                   const PackedFile* file, const PackOptions& options = {}, std::vector<Note>* notes = nullptr);
/// The same for a convolution.
Result<ModuleWeight> packed_weight(const Checkpoint& checkpoint, const Module& module, const ConvSpec& spec,
                                   const PackedFile* file, const PackOptions& options = {}, std::vector<Note>* notes = nullptr);

/// The inverse of upload(): a copy in host memory of a weight in device memory, equal to what pack() with Backend::cpu makes in its layout.
Result<PackedWeight> download(const PackedWeight& weight);

}  // namespace nibble
