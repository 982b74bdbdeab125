// The packed file of a checkpoint: where it is, whether it is current, and the packed weight of a module from it or by packing.
#include <exception>

#include "checkpoint/checkpoint_impl.hpp"
#include "core/error.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "nibble/packed_file.hpp"
#include "packed/format.hpp"
#include "packed/parts.hpp"
#include "plan/pack.hpp"

namespace nibble {
namespace fs = std::filesystem;
using namespace packed;
namespace {

/// Why a weight of the file cannot stand for pack(checkpoint.read(module), spec, options); "" when it can.
Result<std::string> objection(const Checkpoint& checkpoint, const Module& module, const PackedWeight::Spec& spec,
                              const PackedFile* file, const PackOptions& options) {
  if (file == nullptr) return std::string("there is no packed file");
  const std::string path = file->path().string();
  const PackedModule* found = file->find(module.name);
  if (found == nullptr) return fmt::format("{} does not have it", path);
  if (found->desc.n != module.n || found->desc.k != module.k)
    return fmt::format("{} has W[{},{}] under its name, and it is W[{},{}]", path, found->desc.n, found->desc.k, module.n,
                       module.k);
  if (found->source.empty()) return fmt::format("{} does not say which checkpoint it was packed from", path);
  NIBBLE_ASSIGN_OR_RETURN(const std::string digest, checkpoint.digest(module));
  if (digest != found->source) return fmt::format("it has changed since {} was packed", path);
  NIBBLE_ASSIGN_OR_RETURN(const Packing packing, choose_packing(found->desc, spec, options));
  const bool pairs = packed_in_pairs(spec, found->desc.scheme);
  if (pairs != packed_in_pairs(found->spec, found->desc.scheme))
    return fmt::format("{} has it {} a glu", path, pairs ? "without" : "for");
  if (packing.layout->name != found->layout)
    return fmt::format("{} has it in layout {}, and its kernels read {} here", path, found->layout, packing.layout->name);
  return std::string();
}

/// The module's codes go into the layout block by block, unless all of them have to be there at once.
template <class Spec>
Result<PackedWeight> pack_module(const Checkpoint& checkpoint, const Module& module, const Spec& spec, const PackOptions& options,
                                 std::vector<Note>* notes) {
  if (!packed_in_pairs(spec, module.scheme)) {
    NIBBLE_ASSIGN_OR_RETURN(const std::optional<OpenModule> opened, checkpoint.impl().open_module(module, notes));
    if (opened) {
      NIBBLE_ASSIGN_OR_RETURN(PackedWeight weight, pack_codes(opened->q, *opened->codes, spec, options));
      if (notes != nullptr) add_nan_note(opened->q, opened->codes->nans(), *notes);
      return weight;
    }
  }
  NIBBLE_ASSIGN_OR_RETURN(const QuantTensor q, checkpoint.read(module, notes));
  return pack(q, spec, options);
}

template <class Spec>
Result<ModuleWeight> find_or_pack(const Checkpoint& checkpoint, const Module& module, const Spec& spec, const PackedFile* file,
                                  const PackOptions& options, std::vector<Note>* notes) try {
  NIBBLE_ASSIGN_OR_RETURN(std::string why, objection(checkpoint, module, spec, file, options));
  if (!why.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(PackedWeight weight, pack_module(checkpoint, module, spec, options, notes));
    return ModuleWeight{std::move(weight), std::move(why)};
  }
  NIBBLE_ASSIGN_OR_RETURN(PackedWeight stored, file->load(module.name));
  const auto kept = std::make_shared<const PackedWeight>(std::move(stored));
  PackedWeight weight({kept, &kept->data()}, spec);  // its bytes are those of every specification with this layout
  if (options.backend == Backend::cuda) {
    NIBBLE_ASSIGN_OR_RETURN(weight, upload(weight));
  }
  return ModuleWeight{std::move(weight), {}};
} catch (...) {
  return caught();
}

}  // namespace

fs::path packed_path(const fs::path& checkpoint) {
  fs::path path = checkpoint_place(checkpoint);
  if (path.extension() == ".safetensors") path.replace_extension();
  return path += ".nibble";
}

Result<PackedFile> PackedFile::beside(const Checkpoint& checkpoint, std::vector<ModuleNote>* notes) {
  NIBBLE_ASSIGN_OR_RETURN(PackedFile file, open(packed_path(checkpoint.path())));
  if (notes != nullptr)
    for (ModuleNote& note : file.compare(checkpoint)) notes->push_back(std::move(note));
  return file;
}

std::vector<ModuleNote> PackedFile::compare(const Checkpoint& checkpoint) const {
  std::vector<ModuleNote> notes;
  const auto warn = [&](const PackedModule& module, std::string text) {
    notes.push_back({module.name, {Note::Severity::warning, std::move(text)}});
  };
  for (const PackedModule& module : modules()) {
    if (module.source.empty()) continue;
    const Module* own = checkpoint.find_module(module.name);
    if (own == nullptr) {
      warn(module, fmt::format("the checkpoint has no such module any more; pack {} again", path().string()));
      continue;
    }
    const Result<std::string> digest = checkpoint.digest(*own);
    if (!digest.ok())
      warn(module, digest.status().message());
    else if (*digest != module.source)
      warn(module, fmt::format("the checkpoint has changed since it was packed; pack {} again", path().string()));
  }
  return notes;
}

Result<PackedWeight> pack(const Checkpoint& checkpoint, const Module& module, const LinearSpec& spec, const PackOptions& options,
                          std::vector<Note>* notes) try {
  return pack_module(checkpoint, module, spec, options, notes);
} catch (...) {
  return caught();
}

Result<PackedWeight> pack(const Checkpoint& checkpoint, const Module& module, const ConvSpec& spec, const PackOptions& options,
                          std::vector<Note>* notes) try {
  return pack_module(checkpoint, module, spec, options, notes);
} catch (...) {
  return caught();
}

Result<ModuleWeight> packed_weight(const Checkpoint& checkpoint, const Module& module, const LinearSpec& spec,
                                   const PackedFile* file, const PackOptions& options, std::vector<Note>* notes) {
  return find_or_pack(checkpoint, module, spec, file, options, notes);
}

Result<ModuleWeight> packed_weight(const Checkpoint& checkpoint, const Module& module, const ConvSpec& spec,
                                   const PackedFile* file, const PackOptions& options, std::vector<Note>* notes) {
  return find_or_pack(checkpoint, module, spec, file, options, notes);
}

Result<PackedWeight> download(const PackedWeight& weight) try {
  if (weight.backend() == Backend::cpu) return weight;
  NIBBLE_ASSIGN_OR_RETURN(PackedWeightData on_host, cuda::download(weight.data()));
  return with_sums(std::make_shared<PackedWeightData>(std::move(on_host)), weight.spec());
} catch (...) {
  return caught();
}

}  // namespace nibble
