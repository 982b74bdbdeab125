// The C interface: packed weights, plans, runs, other operators, verification.
#include "c_api/common.hpp"

using namespace nibble;

namespace nibble::c_api {

Result<PackOptions> pack_options(const nib_pack_desc& desc) {
  PackOptions options;
  options.layout = text_or(desc.layout, "");
  options.kernel = text_or(desc.kernel, "");
  NIBBLE_ASSIGN_OR_RETURN(options.executor, executor(desc.context));
  NIBBLE_ASSIGN_OR_RETURN(options.backend, backend(desc.backend));
  return options;
}

namespace {

Result<EpilogueSpec> epilogue_spec(const nib_epilogue* given) {
  NIBBLE_ASSIGN_OR_RETURN(const nib_epilogue e, read("nib_epilogue", given, true));
  constexpr std::uint32_t kKnown =
      NIB_ROW_SCALE | NIB_COL_SCALE | NIB_BIAS | NIB_GATE | NIB_RESIDUAL | NIB_SUM_BIAS | NIB_OUT_SCALE;
  if ((e.operands & ~kKnown) != 0)
    return error(StatusCode::unsupported, "nib_epilogue.operands={:#x} has bits this version does not know", e.operands);
  if (e.activation < NIB_ACTIVATION_NONE || e.activation > NIB_ACTIVATION_QUICK_GELU)
    return error(StatusCode::invalid_argument, "nib_epilogue.activation={} is no nib_activation", e.activation);
  EpilogueSpec spec;
  spec.sum_bias = (e.operands & NIB_SUM_BIAS) != 0;
  spec.row_scale = (e.operands & NIB_ROW_SCALE) != 0;
  spec.col_scale = (e.operands & NIB_COL_SCALE) != 0;
  spec.bias = (e.operands & NIB_BIAS) != 0;
  spec.gate = (e.operands & NIB_GATE) != 0;
  spec.residual = (e.operands & NIB_RESIDUAL) != 0;
  spec.activation = static_cast<Activation>(e.activation);
  if (e.clamp_low != 0 || e.clamp_high != 0) spec.clamp_low = e.clamp_low, spec.clamp_high = e.clamp_high;
  if (e.negative_slope != 0) spec.negative_slope = e.negative_slope;
  NIBBLE_ASSIGN_OR_RETURN(spec.out, dtype("nib_epilogue.out", e.out, DType::f32));
  if (e.out_scale != 0) spec.out_scale = e.out_scale;
  spec.out_zero = e.out_zero;
  spec.out_scales = (e.operands & NIB_OUT_SCALE) != 0;
  if (e.out_low != 0 || e.out_high != 0) spec.out_low = e.out_low, spec.out_high = e.out_high;
  spec.glu = e.glu != 0;
  if (e.glu_limit != 0) spec.glu_limit = e.glu_limit;
  spec.glu_offset = e.glu_offset;
  return spec;
}

Result<NormSpec> norm_spec(const nib_norm* given) {
  if (given == nullptr) return NormSpec{};
  NIBBLE_ASSIGN_OR_RETURN(const nib_norm norm, read("nib_norm", given));
  if (norm.kind < NIB_NORM_NONE || norm.kind > NIB_NORM_LAYER)
    return error(StatusCode::invalid_argument, "nib_norm.kind={} is no nib_norm_kind", norm.kind);
  if ((norm.parts & ~std::uint32_t{NIB_NORM_ADD | NIB_NORM_BIAS}) != 0)
    return error(StatusCode::unsupported, "nib_norm.parts={:#x} has bits this version does not know", norm.parts);
  return NormSpec{.kind = static_cast<Norm>(norm.kind),
                  .eps = norm.eps,
                  .weight_offset = norm.weight_offset,
                  .bias = (norm.parts & NIB_NORM_BIAS) != 0,
                  .add = (norm.parts & NIB_NORM_ADD) != 0};
}

}  // namespace

Result<LinearSpec> linear_spec(const nib_linear_desc* given) {
  NIBBLE_ASSIGN_OR_RETURN(const nib_linear_desc desc, read("nib_linear_desc", given, true));
  LinearSpec spec;
  NIBBLE_ASSIGN_OR_RETURN(spec.a_dtype, dtype("nib_linear_desc.a_dtype", desc.a_dtype, DType::f32));
  if (desc.m_max != 0) spec.m_max = desc.m_max;
  NIBBLE_ASSIGN_OR_RETURN(spec.epilogue, epilogue_spec(desc.epilogue));
  NIBBLE_ASSIGN_OR_RETURN(spec.act_scheme, act_scheme(desc.act_scheme));
  NIBBLE_ASSIGN_OR_RETURN(spec.accumulation, accumulation("nib_linear_desc.accumulation", desc.accumulation));
  NIBBLE_ASSIGN_OR_RETURN(spec.norm, norm_spec(desc.norm));
  return spec;
}

Result<LinearSpec> packed_linear_spec(const nib_pack_desc& desc) {
  constexpr std::int64_t kTokens = std::int64_t{1} << 13;
  return desc.linear == nullptr ? LinearSpec{.m_max = kTokens} : linear_spec(desc.linear);
}

namespace {

/// The specification of a convolution with the weight W[n,k] of this filter.
Result<ConvSpec> conv_spec(std::int64_t n, std::int64_t k, Extent filter, const nib_conv_desc* given) {
  NIBBLE_ASSIGN_OR_RETURN(const nib_conv_desc desc, read("nib_conv_desc", given));
  const auto or_one = [](std::int64_t value) { return value == 0 ? 1 : value; };
  const std::int64_t groups = or_one(desc.groups);
  ConvSpec spec;
  // Where there cannot be so many groups, the geometry is refused whatever the channels.
  spec.geometry = {.in_channels = k / (filter.h * filter.w) * std::clamp<std::int64_t>(groups, 1, 1 << 30),
                   .out_channels = n,
                   .height = desc.height,
                   .width = desc.width,
                   .filter = filter,
                   .stride = {or_one(desc.stride_height), or_one(desc.stride_width)},
                   .padding = {desc.padding_top, desc.padding_bottom, desc.padding_left, desc.padding_right},
                   .dilation = {or_one(desc.dilation_height), or_one(desc.dilation_width)},
                   .groups = groups};
  NIBBLE_ASSIGN_OR_RETURN(spec.input, image_layout("nib_conv_desc.input", desc.input));
  NIBBLE_ASSIGN_OR_RETURN(spec.output, image_layout("nib_conv_desc.output", desc.output));
  NIBBLE_ASSIGN_OR_RETURN(spec.a_dtype, dtype("nib_conv_desc.a_dtype", desc.a_dtype, DType::f32));
  if (desc.batch_max != 0) spec.batch_max = desc.batch_max;
  NIBBLE_ASSIGN_OR_RETURN(spec.epilogue, epilogue_spec(desc.epilogue));
  NIBBLE_ASSIGN_OR_RETURN(spec.act_scheme, act_scheme(desc.act_scheme));
  NIBBLE_ASSIGN_OR_RETURN(spec.accumulation, accumulation("nib_conv_desc.accumulation", desc.accumulation));
  return spec;
}

}  // namespace

Result<PlanOptions> plan_options(const nib_plan_options* given) {
  NIBBLE_ASSIGN_OR_RETURN(const nib_plan_options desc, read("nib_plan_options", given, true));
  PlanOptions options;
  options.kernel = text_or(desc.kernel, "");
  options.allow_reference = desc.forbid_reference == 0;
  options.threads = desc.threads;
  if (desc.machine == nullptr) return options;
  NIBBLE_ASSIGN_OR_RETURN(const nib_roofline machine, read("nib_roofline", desc.machine));
  options.machine = Roofline{.threads = machine.threads,
                             .read_gbytes_per_s = machine.read_gbytes_per_s,
                             .f32_gflops = machine.f32_gflops,
                             .bf16_gflops = machine.bf16_gflops,
                             .int8_gops = machine.int8_gops};
  return options;
}

std::string explanation_text(const Explanation& explanation) {
  std::string text;
  for (const Explanation::Bucket& bucket : explanation.buckets) {
    text +=
        fmt::format("M = {}…{}: {}, {:.1f} µs\n", bucket.m_low, bucket.m_high, fmt::join(bucket.steps, " + "), bucket.cost_us);
    if (!bucket.unaligned.empty())
      text += fmt::format("  rows of A that do not begin at multiples of 16 bytes: {}\n", bucket.unaligned);
    for (const Explanation::Candidate& c : bucket.candidates)
      text += c.accepted ? fmt::format("  {}: {:.1f} µs\n", c.kernel, c.cost_us) : fmt::format("  {}: {}\n", c.kernel, c.refusal);
  }
  return text;
}

Result<std::span<std::byte>> scratch_memory(void* workspace, size_t bytes) {
  if (workspace == nullptr && bytes != 0) return error(StatusCode::invalid_argument, "the workspace of {} bytes is NULL", bytes);
  return std::span(static_cast<std::byte*>(workspace), bytes);
}

Status without_stream(const void* stream) {
  if (stream == nullptr) return {};
  return error(StatusCode::invalid_argument, "the weight is in host memory, where nothing is enqueued: pass NULL for the stream");
}

Result<Operands> plan_operands(const nib_operands& operands) {
  Operands args;
  NIBBLE_ASSIGN_OR_RETURN(args.a_scale, view("a_scale", operands.a_scale));
  NIBBLE_ASSIGN_OR_RETURN(args.a_zero, view("a_zero", operands.a_zero));
  NIBBLE_ASSIGN_OR_RETURN(args.row_scale, view("row_scale", operands.row_scale));
  NIBBLE_ASSIGN_OR_RETURN(args.col_scale, view("col_scale", operands.col_scale));
  NIBBLE_ASSIGN_OR_RETURN(args.bias, view("bias", operands.bias));
  NIBBLE_ASSIGN_OR_RETURN(args.gate, view("gate", operands.gate));
  NIBBLE_ASSIGN_OR_RETURN(args.residual, view("residual", operands.residual));
  NIBBLE_ASSIGN_OR_RETURN(args.sum_bias, view("sum_bias", operands.sum_bias));
  NIBBLE_ASSIGN_OR_RETURN(args.out_scale, view("out_scale", operands.out_scale));
  NIBBLE_ASSIGN_OR_RETURN(args.out_zero, view("out_zero", operands.out_zero));
  NIBBLE_ASSIGN_OR_RETURN(args.norm_weight, view("norm_weight", operands.norm_weight));
  NIBBLE_ASSIGN_OR_RETURN(args.norm_bias, view("norm_bias", operands.norm_bias));
  NIBBLE_ASSIGN_OR_RETURN(args.norm_add, view("norm_add", operands.norm_add));
  NIBBLE_ASSIGN_OR_RETURN(args.norm_sum, view("norm_sum", operands.norm_sum));
  if (operands.next != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(args.next, open(operands.next));
  }
  return args;
}

namespace {

Status execute(const nib_plan* plan_handle, const nib_weight* weight_handle, const nib_operands* given, void* workspace,
               size_t workspace_bytes, void* stream) {
  NIBBLE_ASSIGN_OR_RETURN(const Plan* plan, open(plan_handle));
  NIBBLE_ASSIGN_OR_RETURN(const PackedWeight* weight, open(weight_handle));
  NIBBLE_ASSIGN_OR_RETURN(const nib_operands operands, read("nib_operands", given));
  NIBBLE_ASSIGN_OR_RETURN(const std::span<std::byte> scratch, scratch_memory(workspace, workspace_bytes));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView a, view("a", operands.a));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView d, view("d", operands.d));
  NIBBLE_ASSIGN_OR_RETURN(const Operands args, plan_operands(operands));
  if (weight->backend() == Backend::cuda) return plan->run(*weight, a, d, args, scratch, Stream{stream});
  NIBBLE_RETURN_IF_ERROR(without_stream(stream));
  NIBBLE_ASSIGN_OR_RETURN(Executor * threads, executor(operands.context));
  return plan->run(*weight, a, d, args, scratch, threads);
}

Status quantize_acts(const nib_act_quantize_desc* given, void* stream) {
  NIBBLE_ASSIGN_OR_RETURN(const nib_act_quantize_desc acts, read("nib_act_quantize_desc", given));
  NIBBLE_RETURN_IF_ERROR(required({{"scheme", acts.scheme}}));
  NIBBLE_ASSIGN_OR_RETURN(const ActScheme scheme, act_scheme(acts.scheme));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView a, view("a", acts.a));
  ActOutputs out;
  NIBBLE_ASSIGN_OR_RETURN(out.codes, view("codes", acts.codes));
  NIBBLE_ASSIGN_OR_RETURN(out.scales, view("scales", acts.scales));
  NIBBLE_ASSIGN_OR_RETURN(out.zeros, view("zeros", acts.zeros));
  NIBBLE_ASSIGN_OR_RETURN(out.sums, view("sums", acts.sums));
  ActOptions options;
  NIBBLE_ASSIGN_OR_RETURN(options.prescale, view("prescale", acts.prescale));
  if (acts.limit != nullptr) options.limit = *acts.limit;
  if (acts.static_scale != nullptr)
    options.known = StaticActs{*acts.static_scale, acts.static_zero == nullptr ? 0 : *acts.static_zero};
  NIBBLE_ASSIGN_OR_RETURN(const Backend where, backend(acts.backend));
  if (where == Backend::cuda) return quantize_activations(a, scheme, out, options, Stream{stream});
  if (stream != nullptr)
    return error(StatusCode::invalid_argument, "NIB_CPU enqueues nothing: pass NULL for the stream, or NIB_CUDA");
  NIBBLE_ASSIGN_OR_RETURN(Executor * threads, executor(acts.context));
  return quantize_activations(a, scheme, out, options, threads);
}

Status dequantize_tensors(const nib_checkpoint_tensors* given, const nib_view* to, bool transposed, void* stream) {
  NIBBLE_ASSIGN_OR_RETURN(const nib_checkpoint_tensors t, read("nib_checkpoint_tensors", given));
  NIBBLE_RETURN_IF_ERROR(required({{"qweight", t.qweight}, {"qzeros", t.qzeros}, {"scales", t.scales}}));
  if (t.packing != NIB_AWQ && t.packing != NIB_GPTQ)
    return error(StatusCode::invalid_argument, "packing {} is neither NIB_AWQ nor NIB_GPTQ", t.packing);
  CheckpointTensors tensors{.format = t.packing == NIB_AWQ ? CheckpointTensors::Format::awq : CheckpointTensors::Format::gptq,
                            .bits = t.bits == 0 ? 4 : t.bits,
                            .zeros_minus_one = t.zeros_minus_one != 0,
                            .n = t.n,
                            .k = t.k,
                            .group = t.group,
                            .qweight = t.qweight,
                            .qzeros = t.qzeros,
                            .scales = t.scales,
                            .g_idx = t.g_idx};
  NIBBLE_ASSIGN_OR_RETURN(tensors.scale, dtype("nib_checkpoint_tensors.scale", t.scale, DType::f16));
  const auto unaligned = [](const void* p, int by) {
    return reinterpret_cast<std::uintptr_t>(p) % static_cast<unsigned>(by) != 0;
  };
  if (unaligned(t.qweight, 4) || unaligned(t.qzeros, 4) || unaligned(t.g_idx, 4) || unaligned(t.scales, bits(tensors.scale) / 8))
    return error(StatusCode::invalid_argument,
                 "a tensor is not aligned to its elements: qweight {}, qzeros {}, g_idx {}, scales {}", t.qweight, t.qzeros,
                 t.g_idx, t.scales);
  NIBBLE_ASSIGN_OR_RETURN(const TensorView out, view("out", to));
  NIBBLE_RETURN_IF_ERROR(required({{"output", out.data}}));
  return dequantize(tensors, out, transposed, Stream{stream});
}

/// The plans that W[n,k] of this filter is packed for.
Result<PackedWeight::Spec> packed_spec(std::int64_t n, std::int64_t k, Extent filter, const nib_pack_desc& desc) {
  if (desc.linear != nullptr && desc.conv != nullptr)
    return error(StatusCode::invalid_argument, "nib_pack_desc has both linear and conv: a weight is packed for one of them");
  if (desc.conv != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(const ConvSpec spec, conv_spec(n, k, filter, desc.conv));
    return PackedWeight::Spec(spec);
  }
  NIBBLE_ASSIGN_OR_RETURN(const LinearSpec spec, packed_linear_spec(desc));
  return PackedWeight::Spec(spec);
}

}  // namespace
}  // namespace nibble::c_api

using namespace nibble::c_api;

nib_status nib_pack(const nib_qtensor* q, const nib_pack_desc* given, nib_weight** weight) {
  return create(weight, [&]() -> Result<PackedWeight> {
    NIBBLE_ASSIGN_OR_RETURN(const NamedTensor* named, open(q));
    NIBBLE_ASSIGN_OR_RETURN(const nib_pack_desc desc, read("nib_pack_desc", given, true));
    NIBBLE_ASSIGN_OR_RETURN(const PackOptions options, pack_options(desc));
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight::Spec spec, packed_spec(named->q.n, named->q.k, named->q.filter, desc));
    return std::visit([&](const auto& s) { return pack(named->q, s, options); }, spec);
  });
}

nib_status nib_unpack(const nib_weight* weight, nib_qtensor** q) {
  return create(q, [&]() -> Result<QuantTensor> {
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight* packed, open(weight));
    return unpack(*packed);
  });
}

nib_status nib_upload(const nib_weight* host, nib_weight** device) {
  return create(device, [&]() -> Result<PackedWeight> {
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight* packed, open(host));
    return upload(*packed);
  });
}

nib_status nib_download(const nib_weight* device, nib_weight** host) {
  return create(host, [&]() -> Result<PackedWeight> {
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight* packed, open(device));
    return download(*packed);
  });
}

nib_status nib_packed_weight(const nib_checkpoint* checkpoint, size_t module, const nib_packed_file* file,
                             const nib_pack_desc* given, nib_weight** weight, char** packed_because) {
  return create(weight, [&]() -> Result<PackedWeight> {
    NIBBLE_ASSIGN_OR_RETURN(const Checkpoint* c, open(checkpoint));
    NIBBLE_ASSIGN_OR_RETURN(const Module* m, at(c->modules(), module, "module", "checkpoint"));
    const PackedFile* from = nullptr;
    if (file != nullptr) {
      NIBBLE_ASSIGN_OR_RETURN(from, open(file));
    }
    NIBBLE_ASSIGN_OR_RETURN(const nib_pack_desc desc, read("nib_pack_desc", given, true));
    NIBBLE_ASSIGN_OR_RETURN(const PackOptions options, pack_options(desc));
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight::Spec spec, packed_spec(m->n, m->k, m->filter.value_or(Extent()), desc));
    NIBBLE_ASSIGN_OR_RETURN(const ModuleWeight found,
                            std::visit([&](const auto& s) { return packed_weight(*c, *m, s, from, options); }, spec));
    NIBBLE_RETURN_IF_ERROR(give(found.packed_because, packed_because));
    return found.weight;
  });
}

nib_status nib_weight_get(const nib_weight* weight, nib_weight_info* info) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight* w, open(weight));
    nib_weight_info out{};
    out.layout = w->layout().data();  // a literal
    out.data = w->bytes().data();
    out.bytes = w->bytes().size();
    copy_text(w->scheme().name(), out.scheme);
    out.n = w->n();
    out.k = w->k();
    out.backend = w->backend() == Backend::cuda ? NIB_CUDA : NIB_CPU;
    out.has_bias = w->has_bias();
    out.act_order = w->act_order();
    out.paired = w->paired() ? 1 : 0;
    out.filter_height = w->filter().h;
    out.filter_width = w->filter().w;
    return write("nib_weight_info", info, out);
  });
}

nib_status nib_weight_destroy(nib_weight* weight) { return destroy(weight); }

nib_status nib_plan_linear(const nib_weight* weight, const nib_linear_desc* desc, const nib_plan_options* options,
                           nib_plan** plan) {
  return create(plan, [&]() -> Result<Plan> {
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight* packed, open(weight));
    NIBBLE_ASSIGN_OR_RETURN(const PlanOptions chosen, plan_options(options));
    if (desc == nullptr) return Plan::linear(*packed, chosen);
    NIBBLE_ASSIGN_OR_RETURN(const LinearSpec spec, linear_spec(desc));
    return Plan::linear(*packed, spec, chosen);
  });
}

nib_status nib_plan_conv(const nib_weight* weight, const nib_conv_desc* desc, const nib_plan_options* options, nib_plan** plan) {
  return create(plan, [&]() -> Result<Plan> {
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight* packed, open(weight));
    NIBBLE_ASSIGN_OR_RETURN(const PlanOptions chosen, plan_options(options));
    if (desc == nullptr) return Plan::conv(*packed, chosen);
    NIBBLE_ASSIGN_OR_RETURN(const ConvSpec spec, conv_spec(packed->n(), packed->k(), packed->filter(), desc));
    return Plan::conv(*packed, spec, chosen);
  });
}

nib_status nib_plan_dequantize(const nib_weight* weight, const nib_dequantize_desc* given, const nib_plan_options* options,
                               nib_plan** plan) {
  return create(plan, [&]() -> Result<Plan> {
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight* packed, open(weight));
    NIBBLE_ASSIGN_OR_RETURN(const nib_dequantize_desc desc, read("nib_dequantize_desc", given, true));
    DequantizeSpec spec{.transposed = desc.transposed != 0};
    NIBBLE_ASSIGN_OR_RETURN(spec.out, dtype("nib_dequantize_desc.out", desc.out, DType::f32));
    NIBBLE_ASSIGN_OR_RETURN(const PlanOptions chosen, plan_options(options));
    return Plan::dequantize(*packed, spec, chosen);
  });
}

nib_status nib_plan_workspace_size(const nib_plan* plan, size_t* bytes) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(required({{"place for the size", bytes}}));
    NIBBLE_ASSIGN_OR_RETURN(const Plan* p, open(plan));
    *bytes = p->workspace_bytes();
    return {};
  });
}

nib_status nib_plan_workspace_size_for(const nib_plan* plan, int64_t m, size_t* bytes) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(required({{"place for the size", bytes}}));
    NIBBLE_ASSIGN_OR_RETURN(const Plan* p, open(plan));
    *bytes = p->workspace_bytes(m);
    return {};
  });
}

nib_status nib_plan_kernel(const nib_plan* plan, int64_t m, const char** name) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(required({{"place for the name", name}}));
    NIBBLE_ASSIGN_OR_RETURN(const Plan* p, open(plan));
    *name = p->kernel(m).data();  // of the kernel table, which ends them in NUL
    return {};
  });
}

nib_status nib_plan_explain(const nib_plan* plan, char** text) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const Plan* p, open(plan));
    return give(explanation_text(p->explain()), text);
  });
}

nib_status nib_explain(const nib_qtensor* q, const nib_pack_desc* given, const char* gpu, char** text) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const NamedTensor* named, open(q));
    NIBBLE_ASSIGN_OR_RETURN(const nib_pack_desc desc, read("nib_pack_desc", given, true));
    NIBBLE_ASSIGN_OR_RETURN(const PackOptions options, pack_options(desc));
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight::Spec spec, packed_spec(named->q.n, named->q.k, named->q.filter, desc));
    const auto explained = [&](const auto& s) -> Result<Explanation> {
      if (gpu == nullptr) return explain(describe(named->q), s, options);
      NIBBLE_ASSIGN_OR_RETURN(const GpuInfo described, described_gpu(gpu));
      return explain(describe(named->q), s, described);
    };
    NIBBLE_ASSIGN_OR_RETURN(const Explanation explanation, std::visit(explained, spec));
    return give(explanation_text(explanation), text);
  });
}

nib_status nib_plan_destroy(nib_plan* plan) { return destroy(plan); }

nib_status nib_plan_cache_create(size_t capacity, nib_plan_cache** cache) {
  return create(cache, [&]() -> Result<PlanCache> { return PlanCache(capacity == 0 ? PlanCache::kCapacity : capacity); });
}

nib_status nib_plan_cache_linear(nib_plan_cache* cache, const nib_weight* weight, const nib_linear_desc* desc,
                                 const nib_plan_options* options, nib_plan** plan) {
  return create(plan, [&]() -> Result<Plan> {
    NIBBLE_ASSIGN_OR_RETURN(PlanCache * plans, open(cache));
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight* packed, open(weight));
    NIBBLE_ASSIGN_OR_RETURN(const PlanOptions chosen, plan_options(options));
    if (desc == nullptr) return plans->linear(*packed, chosen);
    NIBBLE_ASSIGN_OR_RETURN(const LinearSpec spec, linear_spec(desc));
    return plans->linear(*packed, spec, chosen);
  });
}

nib_status nib_plan_cache_conv(nib_plan_cache* cache, const nib_weight* weight, const nib_conv_desc* desc,
                               const nib_plan_options* options, nib_plan** plan) {
  return create(plan, [&]() -> Result<Plan> {
    NIBBLE_ASSIGN_OR_RETURN(PlanCache * plans, open(cache));
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight* packed, open(weight));
    NIBBLE_ASSIGN_OR_RETURN(const PlanOptions chosen, plan_options(options));
    if (desc == nullptr) return plans->conv(*packed, chosen);
    NIBBLE_ASSIGN_OR_RETURN(const ConvSpec spec, conv_spec(packed->n(), packed->k(), packed->filter(), desc));
    return plans->conv(*packed, spec, chosen);
  });
}

nib_status nib_plan_cache_get(const nib_plan_cache* cache, nib_plan_cache_info* info) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const PlanCache* plans, open(cache));
    const PlanCache::Statistics statistics = plans->statistics();
    nib_plan_cache_info out{};
    out.hits = statistics.hits;
    out.misses = statistics.misses;
    out.size = statistics.size;
    return write("nib_plan_cache_info", info, out);
  });
}

nib_status nib_plan_cache_clear(nib_plan_cache* cache) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(PlanCache * plans, open(cache));
    plans->clear();
    return {};
  });
}

nib_status nib_plan_cache_destroy(nib_plan_cache* cache) { return destroy(cache); }

nib_status nib_plan_run(const nib_plan* plan, const nib_weight* weight, const nib_operands* operands, void* workspace,
                        size_t workspace_bytes, void* stream) {
  return guarded([&] { return execute(plan, weight, operands, workspace, workspace_bytes, stream); });
}

nib_status nib_quantize_activations(const nib_act_quantize_desc* activations, void* stream) {
  return guarded([&] { return quantize_acts(activations, stream); });
}

nib_status nib_dequantize_checkpoint_tensors(const nib_checkpoint_tensors* tensors, const nib_view* out, int32_t transposed,
                                             void* stream) {
  return guarded([&] { return dequantize_tensors(tensors, out, transposed != 0, stream); });
}

nib_status nib_verify(const nib_qtensor* q, const nib_verify_desc* given, nib_verify_report* report, char** failure) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const NamedTensor* named, open(q));
    NIBBLE_ASSIGN_OR_RETURN(const nib_verify_desc desc, read("nib_verify_desc", given, true));
    if (desc.conv != nullptr && desc.linear != nullptr)
      return error(StatusCode::invalid_argument, "nib_verify_desc has a linear layer and a convolution: leave one NULL");
    if (desc.sample_columns < 0)
      return error(StatusCode::invalid_argument, "nib_verify_desc.sample_columns={} is negative", desc.sample_columns);
    NIBBLE_ASSIGN_OR_RETURN(Executor * threads, executor(desc.context));
    const auto verified = [&](auto spec, const auto& verify) -> Result<VerifyReport> {
      NIBBLE_ASSIGN_OR_RETURN(const nib_pack_desc packing, read("nib_pack_desc", desc.pack, true));
      NIBBLE_ASSIGN_OR_RETURN(spec.pack, pack_options(packing));
      NIBBLE_ASSIGN_OR_RETURN(spec.plan, plan_options(desc.plan));
      if (desc.seed != 0) spec.seed = desc.seed;
      if (desc.outliers != 0) spec.outliers = desc.outliers;
      spec.sample_columns = desc.sample_columns;
      return verify(named->q, spec, threads);
    };
    const auto of_what = [&]() -> Result<VerifyReport> {
      if (desc.conv == nullptr) {
        NIBBLE_ASSIGN_OR_RETURN(const LinearSpec linear, linear_spec(desc.linear));
        return verified(VerifySpec{.linear = linear}, verify_linear);
      }
      NIBBLE_ASSIGN_OR_RETURN(const ConvSpec conv, conv_spec(named->q.n, named->q.k, named->q.filter, desc.conv));
      return verified(VerifyConvSpec{.conv = conv}, verify_conv);
    };
    NIBBLE_ASSIGN_OR_RETURN(const VerifyReport result, of_what());
    nib_verify_report out{};
    out.passed = result.passed;
    out.round_trip = result.round_trip;
    out.repeatable = result.repeatable;
    out.checked = result.checked;
    out.worst_error_over_bound = result.worst_error_over_bound;
    out.relative_l2 = result.relative_l2;
    copy_text(result.kernel, out.kernel);
    NIBBLE_RETURN_IF_ERROR(write("nib_verify_report", report, out));
    return give(result.failure, failure);
  });
}
