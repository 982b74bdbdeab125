#include "weight.hpp"

#include <algorithm>
#include <string>

namespace nibble::ggml {

void log_error(const char* what, const char* reason) {
  ggml_log_callback log = nullptr;
  void* user = nullptr;
  ggml_log_get(&log, &user);
  log(GGML_LOG_LEVEL_ERROR, ("nibble: " + std::string(what) + ": " + reason + "\n").c_str(), user);
}

void Weight::write(const std::byte* data, std::size_t offset, std::size_t size) {
  const std::size_t each = matrix_bytes();
  bool fails = false;
  std::vector<std::byte> whole;
  for (const std::size_t end = offset + size; offset < end;) {
    const std::size_t i = offset / each, begin = offset % each, part = std::min(end - offset, each - begin);
    const std::byte* blocks = data;
    if (part != each) {
      whole.resize(each);
      read_matrix(i, whole.data());
      std::copy_n(data, part, whole.data() + begin);
      blocks = whole.data();
    }
    if (!pack(i, blocks)) {
      if (!fails) log_error("a weight cannot be packed", nib_last_error());
      fails = true;
      matrices_[i].reset();
      if (blocks != memory_ + i * each) std::copy_n(blocks, each, memory_ + i * each);
    }
    data += part;
    offset += part;
  }
  plan_.reset();
  grouped_plan_.reset();
  experts_.reset();
  const bool complete = std::ranges::all_of(matrices_, [](const auto& matrix) { return matrix != nullptr; });
  if (complete && !plan()) log_error("a weight cannot be used", nib_last_error());
}

bool Weight::pack(std::size_t i, const std::byte* blocks) {
  const nib_linear_desc linear{
      .struct_size = sizeof linear, .act_scheme = act_scheme_, .m_max = matrices_.size() == 1 ? kMaxRows : kMaxExpertRows};
  const nib_pack_desc desc{.struct_size = sizeof desc, .linear = &linear};
  nib_weight* weight = nullptr;
  const QTensor q = decode(format_, n_, k_, blocks);
  if (q == nullptr || nib_pack(q.get(), &desc, &weight) != NIB_OK) return false;
  matrices_[i].reset(weight);
  if (!heads_.empty()) copy_heads(format_, n_, k_, blocks, heads_.data() + i * matrix_heads());
  return true;
}

bool Weight::plan() {
  if (matrices_.size() == 1) {
    nib_plan* plan = nullptr;
    if (nib_plan_linear(matrices_[0].get(), nullptr, nullptr, &plan) != NIB_OK) return false;
    plan_.reset(plan);
    return nib_plan_workspace_size(plan, &workspace_bytes_) == NIB_OK;
  }
  std::vector<const nib_weight*> all;
  for (const auto& matrix : matrices_) all.push_back(matrix.get());
  nib_experts* experts = nullptr;
  if (nib_experts_of(all.data(), all.size(), &experts) != NIB_OK) return false;
  experts_.reset(experts);
  nib_grouped_plan* plan = nullptr;
  if (nib_plan_grouped(experts, nullptr, nullptr, &plan) != NIB_OK) return false;
  grouped_plan_.reset(plan);
  return nib_grouped_plan_ids_workspace_size(plan, &workspace_bytes_) == NIB_OK;
}

void Weight::read_matrix(std::size_t i, std::byte* blocks) const {
  if (matrices_[i] == nullptr) {
    std::copy_n(memory_ + i * matrix_bytes(), matrix_bytes(), blocks);
    return;
  }
  nib_qtensor* q = nullptr;
  const bool unpacked = nib_unpack(matrices_[i].get(), &q) == NIB_OK;
  const QTensor owner(q);
  if (!unpacked || !encode(format_, q, heads_.empty() ? nullptr : heads_.data() + i * matrix_heads(), blocks))
    GGML_ABORT("nibble: a packed weight cannot be read: %s", nib_last_error());
}

void Weight::read(std::byte* data, std::size_t offset, std::size_t size) const {
  const std::size_t each = matrix_bytes();
  std::vector<std::byte> whole;
  for (const std::size_t end = offset + size; offset < end;) {
    const std::size_t i = offset / each, begin = offset % each, part = std::min(end - offset, each - begin);
    if (part == each) {
      read_matrix(i, data);
    } else {
      whole.resize(each);
      read_matrix(i, whole.data());
      std::copy_n(whole.data() + begin, part, data);
    }
    data += part;
    offset += part;
  }
}

bool Weight::run(const nib_context* context, const float* a, std::int64_t a_stride, std::int64_t m, float* d,
                 std::byte* workspace) const {
  nib_view a_view = nib_matrix(a, NIB_F32, m, k_);
  a_view.strides[0] = a_stride;
  const nib_view d_view = nib_matrix(d, NIB_F32, m, n_);
  const nib_operands operands{.struct_size = sizeof operands, .context = context, .a = &a_view, .d = &d_view};
  return nib_plan_run(plan_.get(), matrices_[0].get(), &operands, workspace, workspace_bytes_, nullptr) == NIB_OK;
}

bool Weight::run_experts(const nib_context* context, const float* a, std::int64_t a_rows, const nib_view& ids, float* d,
                         std::byte* workspace) const {
  const nib_view a_view = nib_matrix(a, NIB_F32, a_rows, k_), d_view = nib_matrix(d, NIB_F32, ids.shape[0] * ids.shape[1], n_);
  const nib_expert_rows rows{.struct_size = sizeof rows, .ids = &ids};
  const nib_operands operands{.struct_size = sizeof operands, .context = context, .a = &a_view, .d = &d_view};
  return nib_grouped_plan_run(grouped_plan_.get(), experts_.get(), &rows, &operands, workspace, workspace_bytes_, nullptr) ==
         NIB_OK;
}

}  // namespace nibble::ggml
