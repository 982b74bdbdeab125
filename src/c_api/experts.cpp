// The C interface: mixture of experts.
#include "c_api/common.hpp"

using namespace nibble;
using namespace nibble::c_api;

namespace {

Status run_grouped(const nib_grouped_plan* plan_handle, const nib_experts* experts_handle, const nib_expert_rows* given_rows,
                   const nib_operands* given, void* workspace, size_t workspace_bytes, void* stream) {
  NIBBLE_ASSIGN_OR_RETURN(const GroupedPlan* plan, open(plan_handle));
  NIBBLE_ASSIGN_OR_RETURN(const PackedExperts* experts, open(experts_handle));
  NIBBLE_ASSIGN_OR_RETURN(const nib_expert_rows described, read("nib_expert_rows", given_rows));
  NIBBLE_ASSIGN_OR_RETURN(const nib_operands operands, read("nib_operands", given));
  NIBBLE_ASSIGN_OR_RETURN(const std::span<std::byte> scratch, scratch_memory(workspace, workspace_bytes));
  const bool on_gpu = experts->backend() == Backend::cuda;
  if (!on_gpu) NIBBLE_RETURN_IF_ERROR(without_stream(stream));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView a, view("a", operands.a));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView d, view("d", operands.d));
  ExpertRows rows;
  NIBBLE_ASSIGN_OR_RETURN(rows.offsets, view("offsets", described.offsets));
  NIBBLE_ASSIGN_OR_RETURN(rows.counts, view("counts", described.counts));
  NIBBLE_ASSIGN_OR_RETURN(rows.rows, view("rows", described.rows));
  NIBBLE_ASSIGN_OR_RETURN(rows.ids, view("ids", described.ids));
  NIBBLE_ASSIGN_OR_RETURN(const Operands args, plan_operands(operands));
  if (on_gpu) return plan->run(*experts, a, rows, d, args, scratch, Stream{stream});
  NIBBLE_ASSIGN_OR_RETURN(Executor * threads, executor(operands.context));
  return plan->run(*experts, a, rows, d, args, scratch, threads);
}

Status run_moe(const nib_moe_plan* plan_handle, const nib_experts* gate_up_handle, const nib_experts* down_handle,
               const nib_moe_operands* given, void* workspace, size_t workspace_bytes, void* stream) {
  NIBBLE_ASSIGN_OR_RETURN(const MoePlan* plan, open(plan_handle));
  NIBBLE_ASSIGN_OR_RETURN(const PackedExperts* gate_up, open(gate_up_handle));
  NIBBLE_ASSIGN_OR_RETURN(const PackedExperts* down, open(down_handle));
  NIBBLE_ASSIGN_OR_RETURN(const nib_moe_operands operands, read("nib_moe_operands", given));
  NIBBLE_ASSIGN_OR_RETURN(const std::span<std::byte> scratch, scratch_memory(workspace, workspace_bytes));
  const bool on_gpu = gate_up->backend() == Backend::cuda;
  if (!on_gpu) NIBBLE_RETURN_IF_ERROR(without_stream(stream));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView x, view("x", operands.x));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView d, view("d", operands.d));
  MoeOperands args;
  NIBBLE_ASSIGN_OR_RETURN(args.ids, view("ids", operands.ids));
  NIBBLE_ASSIGN_OR_RETURN(args.weights, view("weights", operands.weights));
  NIBBLE_ASSIGN_OR_RETURN(args.residual, view("residual", operands.residual));
  if (on_gpu) return plan->run(*gate_up, *down, x, args, d, scratch, Stream{stream});
  NIBBLE_ASSIGN_OR_RETURN(Executor * threads, executor(operands.context));
  return plan->run(*gate_up, *down, x, args, d, scratch, threads);
}

Status route_tokens(const nib_route_desc* given) {
  NIBBLE_ASSIGN_OR_RETURN(const nib_route_desc desc, read("nib_route_desc", given));
  if (desc.score != NIB_ROUTE_SOFTMAX && desc.score != NIB_ROUTE_SIGMOID)
    return error(StatusCode::invalid_argument, "nib_route_desc.score is {}, neither NIB_ROUTE_SOFTMAX nor NIB_ROUTE_SIGMOID",
                 desc.score);
  RouteSpec spec{.score = desc.score == NIB_ROUTE_SOFTMAX ? RouteScore::softmax : RouteScore::sigmoid,
                 .normalize = desc.unnormalized == 0};
  if (desc.top_k != 0) spec.top_k = desc.top_k;
  if (desc.groups != 0) spec.groups = desc.groups;
  if (desc.top_groups != 0) spec.top_groups = desc.top_groups;
  if (desc.scale != 0) spec.scale = desc.scale;
  NIBBLE_ASSIGN_OR_RETURN(const Backend where, backend(desc.backend));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView logits, view("logits", desc.logits));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView bias, view("bias", desc.bias));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView ids, view("ids", desc.ids));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView weights, view("weights", desc.weights));
  NIBBLE_ASSIGN_OR_RETURN(Executor * threads, executor(desc.context));
  if (where == Backend::cuda) return route(logits, bias, spec, ids, weights, Stream{desc.stream});
  return route(logits, bias, spec, ids, weights, threads);
}

Result<PackedExpertLayer> pack_layer(const nib_checkpoint* checkpoint, const char* name, const nib_expert_layer_desc* given,
                                     std::vector<ModuleNote>* notes) {
  NIBBLE_RETURN_IF_ERROR(required({{"name of a layer", name}}));
  NIBBLE_ASSIGN_OR_RETURN(const Checkpoint* c, open(checkpoint));
  NIBBLE_ASSIGN_OR_RETURN(const nib_expert_layer_desc desc, read("nib_expert_layer_desc", given));
  if (desc.gate_up == nullptr)
    return error(StatusCode::invalid_argument,
                 "nib_expert_layer_desc.gate_up is NULL: it says the activation of the model's glu, which no checkpoint does");
  const nib_pack_desc packing{.struct_size = sizeof packing,
                              .context = desc.context,
                              .linear = desc.down,
                              .layout = desc.layout,
                              .kernel = desc.kernel,
                              .backend = desc.backend};
  NIBBLE_ASSIGN_OR_RETURN(const PackOptions options, pack_options(packing));
  NIBBLE_ASSIGN_OR_RETURN(const LinearSpec gate_up, linear_spec(desc.gate_up));
  NIBBLE_ASSIGN_OR_RETURN(const LinearSpec down, packed_linear_spec(packing));
  NIBBLE_ASSIGN_OR_RETURN(const ExpertLayer layer, expert_layer(*c, name));
  return pack_experts(*c, layer, gate_up, down, options, notes);
}

/// The size of a plan's workspace.
template <class Handle>
nib_status workspace_size(const Handle* plan, size_t* bytes) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(required({{"place for the size", bytes}}));
    NIBBLE_ASSIGN_OR_RETURN(const auto* p, open(plan));
    *bytes = p->workspace_bytes();
    return {};
  });
}

}  // namespace

nib_status nib_pack_experts(const nib_qtensor* const* q, size_t count, const nib_pack_desc* given, nib_experts** experts) {
  return create(experts, [&]() -> Result<PackedExperts> {
    if (count != 0) NIBBLE_RETURN_IF_ERROR(required({{"array of experts", q}}));
    NIBBLE_ASSIGN_OR_RETURN(const nib_pack_desc desc, read("nib_pack_desc", given, true));
    if (desc.conv != nullptr)
      return error(StatusCode::unsupported, "nib_pack_desc has conv: experts are linear layers, leave it NULL");
    NIBBLE_ASSIGN_OR_RETURN(const PackOptions options, pack_options(desc));
    NIBBLE_ASSIGN_OR_RETURN(const LinearSpec spec, packed_linear_spec(desc));
    const auto expert = [q](std::int64_t e) -> Result<QuantTensor> {
      NIBBLE_ASSIGN_OR_RETURN(const NamedTensor* named, open(q[e]));
      return named->q;
    };
    return pack_experts(static_cast<std::int64_t>(std::min<size_t>(count, PTRDIFF_MAX)), expert, spec, options);
  });
}

nib_status nib_experts_of(const nib_weight* const* weights, size_t count, nib_experts** experts) {
  return create(experts, [&]() -> Result<PackedExperts> {
    if (count != 0) NIBBLE_RETURN_IF_ERROR(required({{"array of weights", weights}}));
    std::vector<PackedWeight> packed;
    for (size_t i = 0; i < count; ++i) {
      NIBBLE_ASSIGN_OR_RETURN(const PackedWeight* weight, open(weights[i]));
      packed.push_back(*weight);
    }
    return experts_of(std::move(packed));
  });
}

nib_status nib_experts_weight(const nib_experts* experts, size_t index, nib_weight** weight) {
  return create(weight, [&]() -> Result<PackedWeight> {
    NIBBLE_ASSIGN_OR_RETURN(const PackedExperts* packed, open(experts));
    if (const auto count = static_cast<size_t>(packed->count()); index >= count)
      return error(StatusCode::invalid_argument, "there is no expert {}: the layer has {}", index, count);
    return (*packed)[static_cast<std::int64_t>(index)];
  });
}

nib_status nib_experts_get(const nib_experts* experts, nib_experts_info* info) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const PackedExperts* packed, open(experts));
    nib_experts_info out{};
    out.count = static_cast<size_t>(packed->count());
    out.bytes = packed->nbytes();
    out.n = packed->n();
    out.k = packed->k();
    out.backend = packed->backend() == Backend::cuda ? NIB_CUDA : NIB_CPU;
    return write("nib_experts_info", info, out);
  });
}

nib_status nib_experts_destroy(nib_experts* experts) { return destroy(experts); }

nib_status nib_checkpoint_expert_layers(const nib_checkpoint* checkpoint, char** text) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const Checkpoint* c, open(checkpoint));
    std::string lines;
    for (const ExpertLayer& layer : expert_layers(*c)) lines += fmt::format("{}\t{}\n", layer.name, layer.count);
    return give(lines, text);
  });
}

nib_status nib_pack_expert_layer(const nib_checkpoint* checkpoint, const char* layer, const nib_expert_layer_desc* desc,
                                 nib_experts** gate_up, nib_experts** down, char** notes) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(required({{"handle of gate_up to be made", gate_up}, {"handle of down to be made", down}}));
    std::vector<ModuleNote> findings;
    NIBBLE_ASSIGN_OR_RETURN(PackedExpertLayer packed,
                            pack_layer(checkpoint, layer, desc, notes == nullptr ? nullptr : &findings));
    auto first = std::make_unique<nib_experts>(std::move(packed.gate_up)),
         second = std::make_unique<nib_experts>(std::move(packed.down));
    if (notes != nullptr) {
      std::string lines;
      for (const ModuleNote& note : findings) lines += notes_text({note.note}, note.module);
      NIBBLE_RETURN_IF_ERROR(give(lines, notes));
    }
    *gate_up = first.release();
    *down = second.release();
    return {};
  });
}

nib_status nib_plan_grouped(const nib_experts* experts, const nib_linear_desc* desc, const nib_plan_options* options,
                            nib_grouped_plan** plan) {
  return create(plan, [&]() -> Result<GroupedPlan> {
    NIBBLE_ASSIGN_OR_RETURN(const PackedExperts* packed, open(experts));
    NIBBLE_ASSIGN_OR_RETURN(const PlanOptions chosen, plan_options(options));
    if (desc == nullptr) return GroupedPlan::make(*packed, packed->spec(), chosen);
    NIBBLE_ASSIGN_OR_RETURN(const LinearSpec spec, linear_spec(desc));
    return GroupedPlan::make(*packed, spec, chosen);
  });
}

nib_status nib_grouped_plan_workspace_size(const nib_grouped_plan* plan, size_t* bytes) { return workspace_size(plan, bytes); }

nib_status nib_grouped_plan_ids_workspace_size(const nib_grouped_plan* plan, size_t* bytes) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(required({{"place for the size", bytes}}));
    NIBBLE_ASSIGN_OR_RETURN(const GroupedPlan* p, open(plan));
    *bytes = p->ids_workspace_bytes();
    return {};
  });
}

nib_status nib_grouped_plan_explain(const nib_grouped_plan* plan, char** text) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const GroupedPlan* p, open(plan));
    return give(explanation_text(p->expert_plan().explain()), text);
  });
}

nib_status nib_grouped_plan_destroy(nib_grouped_plan* plan) { return destroy(plan); }

nib_status nib_grouped_plan_run(const nib_grouped_plan* plan, const nib_experts* experts, const nib_expert_rows* rows,
                                const nib_operands* operands, void* workspace, size_t workspace_bytes, void* stream) {
  return guarded([&] { return run_grouped(plan, experts, rows, operands, workspace, workspace_bytes, stream); });
}

nib_status nib_plan_moe(const nib_experts* gate_up, const nib_experts* down, const nib_moe_desc* given,
                        const nib_plan_options* options, nib_moe_plan** plan) {
  return create(plan, [&]() -> Result<MoePlan> {
    NIBBLE_ASSIGN_OR_RETURN(const PackedExperts* first, open(gate_up));
    NIBBLE_ASSIGN_OR_RETURN(const PackedExperts* second, open(down));
    NIBBLE_ASSIGN_OR_RETURN(const nib_moe_desc desc, read("nib_moe_desc", given, true));
    NIBBLE_ASSIGN_OR_RETURN(const PlanOptions chosen, plan_options(options));
    MoeSpec spec{.residual = desc.residual != 0};
    if (desc.tokens_max != 0) spec.tokens_max = desc.tokens_max;
    if (desc.top_k != 0) spec.top_k = desc.top_k;
    NIBBLE_ASSIGN_OR_RETURN(spec.out, dtype("nib_moe_desc.out", desc.out, DType::f32));
    const auto specification = [](const nib_linear_desc* of, const PackedExperts& experts) -> Result<LinearSpec> {
      return of == nullptr ? experts.spec() : linear_spec(of);
    };
    NIBBLE_ASSIGN_OR_RETURN(const LinearSpec gate_up_spec, specification(desc.gate_up, *first));
    NIBBLE_ASSIGN_OR_RETURN(const LinearSpec down_spec, specification(desc.down, *second));
    return MoePlan::make(*first, gate_up_spec, *second, down_spec, spec, chosen);
  });
}

nib_status nib_moe_plan_workspace_size(const nib_moe_plan* plan, size_t* bytes) { return workspace_size(plan, bytes); }

nib_status nib_moe_plan_explain(const nib_moe_plan* plan, char** text) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const MoePlan* p, open(plan));
    const std::string gate_up = explanation_text(p->gate_up_plan().explain());
    return give("gate_up\n" + gate_up + "down\n" + explanation_text(p->down_plan().explain()), text);
  });
}

nib_status nib_moe_plan_destroy(nib_moe_plan* plan) { return destroy(plan); }

nib_status nib_moe_plan_run(const nib_moe_plan* plan, const nib_experts* gate_up, const nib_experts* down,
                            const nib_moe_operands* operands, void* workspace, size_t workspace_bytes, void* stream) {
  return guarded([&] { return run_moe(plan, gate_up, down, operands, workspace, workspace_bytes, stream); });
}

nib_status nib_route(const nib_route_desc* routing) {
  return guarded([&] { return route_tokens(routing); });
}
