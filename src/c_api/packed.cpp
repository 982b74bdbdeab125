// The C interface: files of packed weights.
#include "c_api/common.hpp"

using namespace nibble;
using namespace nibble::c_api;

nib_status nib_packed_file_save(const char* path, const char* const* names, const nib_weight* const* weights, size_t count,
                                const nib_checkpoint* checkpoint, int32_t overwrite) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(required({{"path", path}}));
    if (count != 0) NIBBLE_RETURN_IF_ERROR(required({{"array of names", names}, {"array of weights", weights}}));
    SavePackedOptions options{.overwrite = overwrite != 0};
    if (checkpoint != nullptr) {
      NIBBLE_ASSIGN_OR_RETURN(options.checkpoint, open(checkpoint));
    }
    std::vector<std::pair<std::string, PackedWeight>> named;
    for (size_t i = 0; i < count; ++i) {
      NIBBLE_RETURN_IF_ERROR(required({{"name of a weight", names[i]}}));
      NIBBLE_ASSIGN_OR_RETURN(const PackedWeight* weight, open(weights[i]));
      named.emplace_back(names[i], *weight);
    }
    return save_packed(path, named, options);
  });
}

nib_status nib_packed_file_open(const char* path, nib_packed_file** file) {
  return create(file, [&]() -> Result<PackedFile> {
    NIBBLE_RETURN_IF_ERROR(required({{"path", path}}));
    return PackedFile::open(path);
  });
}

nib_status nib_packed_file_beside(const nib_checkpoint* checkpoint, nib_packed_file** file, char** notes) {
  return create(file, [&]() -> Result<PackedFile> {
    NIBBLE_ASSIGN_OR_RETURN(const Checkpoint* c, open(checkpoint));
    std::vector<ModuleNote> findings;
    NIBBLE_ASSIGN_OR_RETURN(PackedFile found, PackedFile::beside(*c, &findings));
    std::string text;
    for (const ModuleNote& note : findings) text += notes_text({note.note}, note.module);
    NIBBLE_RETURN_IF_ERROR(give(text, notes));
    return found;
  });
}

nib_status nib_packed_file_destroy(nib_packed_file* file) { return destroy(file); }

nib_status nib_packed_file_get(const nib_packed_file* file, nib_packed_file_info* info) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const PackedFile* f, open(file));
    nib_packed_file_info out{};
    out.count = f->modules().size();
    out.library_version = f->library_version().c_str();
    out.checkpoint = f->checkpoint().c_str();
    return write("nib_packed_file_info", info, out);
  });
}

nib_status nib_packed_file_module(const nib_packed_file* file, size_t index, nib_packed_module* module) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const PackedFile* f, open(file));
    NIBBLE_ASSIGN_OR_RETURN(const PackedModule* m, at(f->modules(), index, "weight", "file"));
    nib_packed_module out{};
    out.name = m->name.c_str();
    out.layout = m->layout.data();  // a literal
    copy_text(m->desc.scheme.name(), out.scheme);
    out.n = m->desc.n;
    out.k = m->desc.k;
    out.bytes = m->bytes;
    out.filter_height = m->desc.filter.h;
    out.filter_width = m->desc.filter.w;
    out.has_bias = m->has_bias;
    out.act_order = m->desc.act_order;
    return write("nib_packed_module", module, out);
  });
}

nib_status nib_packed_file_find_module(const nib_packed_file* file, const char* name, size_t* index) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(required({{"name", name}, {"place for the index", index}}));
    NIBBLE_ASSIGN_OR_RETURN(const PackedFile* f, open(file));
    return index_of(f->modules(), f->find(name), name, "weight", "file", index);
  });
}

nib_status nib_packed_file_load(const nib_packed_file* file, size_t index, nib_weight** weight) {
  return create(weight, [&]() -> Result<PackedWeight> {
    NIBBLE_ASSIGN_OR_RETURN(const PackedFile* f, open(file));
    NIBBLE_ASSIGN_OR_RETURN(const PackedModule* m, at(f->modules(), index, "weight", "file"));
    return f->load(m->name);
  });
}
