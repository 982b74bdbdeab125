// The C interface: checkpoints.
#include "c_api/common.hpp"

using namespace nibble;

namespace nibble::c_api {
namespace {

/// The common part of the three transforms: `run` gets the options and the description, and returns a report.
template <class Run>
nib_status transform(const char* in, const char* out, const nib_transform_desc* given, char** report, Run&& run) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(required({{"input's path", in}, {"output's path", out}}));
    NIBBLE_ASSIGN_OR_RETURN(const nib_transform_desc desc, read("nib_transform_desc", given, true));
    TransformOptions options{.overwrite = desc.overwrite != 0, .max_shard_bytes = desc.max_shard_bytes};
    NIBBLE_ASSIGN_OR_RETURN(options.executor, executor(desc.context));
    if (desc.progress != nullptr)
      options.progress = [&](std::uint64_t done, std::uint64_t total, std::string_view what) {
        desc.progress(desc.user, done, total, std::string(what).c_str());
      };
    NIBBLE_ASSIGN_OR_RETURN(const TransformReport result, run(desc, options));
    std::string text;
    for (const TransformedModule& module : result.modules) text += fmt::format("{}\t{}\n", module.name, module.scheme);
    return give(text + notes_text(result.notes), report);
  });
}

Result<QuantizeCheckpointSpec> checkpoint_spec(const nib_transform_desc& desc) {
  QuantizeCheckpointSpec spec;
  spec.format = text_or(desc.format, spec.format);
  NIBBLE_ASSIGN_OR_RETURN(const QuantizeSpec weights, quantize_spec(desc.quantize));
  spec.scheme.weight = weights.scheme;
  spec.clip_search = weights.clip_search;
  if (desc.quantize == nullptr || desc.quantize->scale == 0) spec.scheme.weight.scale = DType::none;
  NIBBLE_ASSIGN_OR_RETURN(spec.scheme.act, act_scheme(desc.act_scheme));
  spec.calibration = text_or(desc.calibration, "");
  if (desc.smooth != nullptr) spec.smooth = *desc.smooth;
  spec.convs = desc.convs != 0;
  spec.skip = text_or(desc.skip, "");
  spec.only = text_or(desc.only, "");
  spec.all = desc.all != 0;
  spec.dry_run = desc.dry_run != 0;
  return spec;
}

}  // namespace
}  // namespace nibble::c_api

using namespace nibble::c_api;

nib_status nib_checkpoint_open(const char* path, nib_checkpoint** checkpoint) {
  return create(checkpoint, [&]() -> Result<Checkpoint> {
    NIBBLE_RETURN_IF_ERROR(required({{"path", path}}));
    return Checkpoint::open(path);
  });
}

nib_status nib_checkpoint_destroy(nib_checkpoint* checkpoint) { return destroy(checkpoint); }

nib_status nib_checkpoint_get(const nib_checkpoint* checkpoint, nib_checkpoint_info* info) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const Checkpoint* c, open(checkpoint));
    nib_checkpoint_info out{};
    out.modules = c->modules().size();
    out.tensors = c->tensors().size();
    out.config = c->config().c_str();
    return write("nib_checkpoint_info", info, out);
  });
}

nib_status nib_checkpoint_module(const nib_checkpoint* checkpoint, size_t index, nib_module* module) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const Checkpoint* c, open(checkpoint));
    NIBBLE_ASSIGN_OR_RETURN(const Module* m, at(c->modules(), index, "module", "checkpoint"));
    nib_module out{};
    out.name = m->name.c_str();
    out.format = m->format.c_str();
    copy_text(m->quantized() ? m->scheme.name() : std::string(name(m->scheme.codes)), out.scheme);
    copy_text(m->claimed ? m->claimed->name() : "", out.claimed);
    out.n = m->n;
    out.k = m->k;
    out.bytes = m->bytes;
    out.quantized = m->quantized();
    out.act_order = m->act_order;
    out.has_bias = m->has_bias;
    return write("nib_module", module, out);
  });
}

nib_status nib_checkpoint_tensor(const nib_checkpoint* checkpoint, size_t index, nib_stored_tensor* tensor) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const Checkpoint* c, open(checkpoint));
    NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* t, at(c->tensors(), index, "tensor", "checkpoint"));
    nib_stored_tensor out{};
    out.name = t->name.c_str();
    out.file = t->file.c_str();
    out.file_offset = t->file_offset;
    out.bytes = t->bytes;
    out.view = view(c->view(*t));
    return write("nib_stored_tensor", tensor, out);
  });
}

nib_status nib_checkpoint_find_module(const nib_checkpoint* checkpoint, const char* name, size_t* index) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(required({{"name", name}, {"place for the index", index}}));
    NIBBLE_ASSIGN_OR_RETURN(const Checkpoint* c, open(checkpoint));
    return index_of(c->modules(), c->find_module(name), name, "module", "checkpoint", index);
  });
}

nib_status nib_checkpoint_find_tensor(const nib_checkpoint* checkpoint, const char* name, size_t* index) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(required({{"name", name}, {"place for the index", index}}));
    NIBBLE_ASSIGN_OR_RETURN(const Checkpoint* c, open(checkpoint));
    return index_of(c->tensors(), c->find_tensor(name), name, "tensor", "checkpoint", index);
  });
}

nib_status nib_checkpoint_notes(const nib_checkpoint* checkpoint, char** text) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const Checkpoint* c, open(checkpoint));
    std::string lines = notes_text({c->notes().begin(), c->notes().end()});
    for (const Module& m : c->modules()) lines += notes_text(m.notes, m.name);
    return give(lines, text);
  });
}

nib_status nib_checkpoint_read(const nib_checkpoint* checkpoint, size_t module, nib_qtensor** q, char** notes) {
  return create(q, [&]() -> Result<QuantTensor> {
    NIBBLE_ASSIGN_OR_RETURN(const Checkpoint* c, open(checkpoint));
    NIBBLE_ASSIGN_OR_RETURN(const Module* m, at(c->modules(), module, "module", "checkpoint"));
    std::vector<Note> findings;
    NIBBLE_ASSIGN_OR_RETURN(QuantTensor decoded, c->read(*m, &findings));
    NIBBLE_RETURN_IF_ERROR(give(notes_text(findings), notes));
    return decoded;
  });
}

nib_status nib_checkpoint_read_part(const nib_checkpoint* checkpoint, size_t module, nib_channels of, int64_t begin, int64_t end,
                                    nib_qtensor** q, char** notes) {
  return create(q, [&]() -> Result<QuantTensor> {
    NIBBLE_ASSIGN_OR_RETURN(const Checkpoint* c, open(checkpoint));
    NIBBLE_ASSIGN_OR_RETURN(const Module* m, at(c->modules(), module, "module", "checkpoint"));
    if (of != NIB_OUTPUTS && of != NIB_INPUTS)
      return error(StatusCode::invalid_argument, "{} is no nib_channels; use NIB_OUTPUTS or NIB_INPUTS", of);
    const LayerPart part{of == NIB_OUTPUTS ? LayerPart::Of::outputs : LayerPart::Of::inputs, begin, end};
    std::vector<Note> findings;
    NIBBLE_ASSIGN_OR_RETURN(QuantTensor decoded, c->read(*m, part, &findings));
    NIBBLE_RETURN_IF_ERROR(give(notes_text(findings), notes));
    return decoded;
  });
}

nib_status nib_checkpoint_quantize(const char* in, const char* out, const nib_transform_desc* desc, char** report) {
  return transform(in, out, desc, report,
                   [&](const nib_transform_desc& known, const TransformOptions& options) -> Result<TransformReport> {
                     NIBBLE_ASSIGN_OR_RETURN(const QuantizeCheckpointSpec spec, checkpoint_spec(known));
                     return quantize_checkpoint(in, out, spec, options);
                   });
}

nib_status nib_checkpoint_convert(const char* in, const char* out, const nib_transform_desc* desc, char** report) {
  return transform(in, out, desc, report, [&](const nib_transform_desc& known, const TransformOptions& options) {
    return convert_checkpoint(in, out, text_or(known.format, "compressed-tensors"), options);
  });
}

nib_status nib_checkpoint_dequantize(const char* in, const char* out, const nib_transform_desc* desc, char** report) {
  return transform(in, out, desc, report,
                   [&](const nib_transform_desc& known, const TransformOptions& options) -> Result<TransformReport> {
                     NIBBLE_ASSIGN_OR_RETURN(const DType type, dtype("nib_transform_desc.dtype", known.dtype, DType::f16));
                     return dequantize_checkpoint(in, out, type, options);
                   });
}
